"""Checkpoint files: weights in, whatever the format; nothing of a file is ever run."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlalign_mm.checkpoints.content import Checkpoint, find_weights, from_metadata, module_instead
from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.kinds import kind_of, one_line
from tlalign_mm.checkpoints.shards import (
    find_index,
    read_index,
    read_safetensors,
    read_safetensors_header,
)
from tlalign_mm.checkpoints.torch_files import Content, load

__all__ = ["Checkpoint", "CheckpointError", "Header", "check_finite", "read", "read_header"]


class Header(NamedTuple):
    """What a file says without its data.

    Attributes:
        format: ``safetensors``, ``torch zip``, ``torch legacy``, ``torch tar``, ``pickle``, or one
            of them with ``sharded`` before.
        size: Of the file, or of all shards, in bytes.
        shapes: Name to shape, as ``read`` would give the tensors.
        dtypes: Name to type of number.
        layout: Who named the tensors, or None where the file does not say.
        architecture: The backbone's ``architecture``, or None where the file does not say.
        weights: ``model`` or ``ema``, where the file holds both and one was chosen.
        beside: What else the file holds: key to a word about it.
        meta: What the file says about itself, in plain values.
        unsafe: Names in it for which it is not read unless it is trusted.
    """

    format: str
    size: int
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    layout: str | None = None
    architecture: dict | None = None
    weights: str | None = None
    beside: Mapping[str, str] = MappingProxyType({})
    meta: Mapping[str, Any] = MappingProxyType({})
    unsafe: Sequence[str] = ()


def read(path: str | Path, weights: str | None = None, trust: bool = False) -> Checkpoint:
    """Read a checkpoint of any format; its bytes decide which, not its name.

    Args:
        path: ``.pth``, ``.pt``, ``.bin``, ``.safetensors``, an index of shards or its folder.
        weights: ``model`` or ``ema`` where the file holds both; None is the average where there is.
        trust: Let Python run what the file asks for, if it is no plain data. Only for files whose
            maker you trust as you trust a program.

    Returns:
        The weights, on the CPU; most formats are mapped from the file, so do not overwrite it in
        place (``write`` never does).

    Raises:
        CheckpointError: If the file is missing, damaged, unsafe or holds no such weights.
    """
    path = _resolve(path)
    kind = kind_of(path)
    if kind == "safetensors":
        return from_metadata(*read_safetensors(path), weights, str(path))
    if kind == "index":
        tensors = read_index(path, lambda shard: _read_shard(shard, trust))
        return find_weights(tensors, weights, str(path))
    return find_weights(read_content(path, trust=trust), weights, str(path))


def _read_shard(path: Path, trust: bool) -> object:
    safe = kind_of(path) == "safetensors"
    return read_safetensors(path).tensors if safe else read_content(path, trust=trust)


def _resolve(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return find_index(path) if path.is_dir() else path


def read_content(path: Path, trust: bool = False) -> object:
    """Read all that a file of ``torch.save`` holds, as it is nested there.

    Args:
        path: The file.
        trust: Let Python run what the file asks for, if it is no plain data.

    Raises:
        CheckpointError: If the file is damaged, or not data alone and not trusted.
    """
    content = load(path, kind_of(path))
    if not content.unsafe:
        return content.value
    if trust:
        return _run(path, content.format)
    whole = module_instead(content.value)
    names = ", ".join(content.unsafe[:4]) + ", …" * (len(content.unsafe) > 4)
    found = f"a whole model of class {whole} instead of a state dict" if whole else names
    raise CheckpointError(
        f"Checkpoint {path} holds {found}, which is not read since that would run code from it; "
        "export its state_dict() where it was made, or convert it by tools/convert_checkpoint.py "
        "with --trust if you trust its maker as you trust a program."
    )


def _run(path: Path, form: str) -> object:
    """Unpickle a file that is trusted."""
    try:
        if form == "pickle":
            return pickle.loads(path.read_bytes())
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # a program may fail in any way
        raise CheckpointError(
            f"Checkpoint {path} cannot be unpickled ({type(error).__name__}: {one_line(error)}); "
            "install what it needs, or export its state_dict() where it was made."
        ) from error


def read_header(path: str | Path, weights: str | None = None) -> Header:
    """Read what a file says about its weights, without their data.

    A file that is not data alone is described as far as that goes, and what it asks for is named.

    Args:
        path: As for ``read``.
        weights: As for ``read``.

    Raises:
        CheckpointError: If the file is missing or damaged, or safe and without such weights.
    """
    path = _resolve(path)
    kind = kind_of(path)
    if kind == "safetensors":
        found = from_metadata(*read_safetensors_header(path), weights, str(path))
        return _header(path, kind, found)
    if kind == "index":
        return _index_header(path, weights)
    content = load(path, kind, "meta")
    try:
        found = find_weights(content.value, weights, str(path))
    except CheckpointError:
        if not content.unsafe:
            raise
        found = Checkpoint({})
    return _header(path, content.format, found)._replace(unsafe=content.unsafe)


def _header(path: Path, form: str, found: Checkpoint) -> Header:
    shapes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in found.tensors.items()}
    return Header(form, path.stat().st_size, shapes, dtypes, *found[1:])


def _index_header(path: Path, weights: str | None) -> Header:
    shards: dict[Path, Content] = {}

    def shard(file: Path) -> object:
        kind = kind_of(file)
        if kind == "safetensors":
            shards[file] = Content(read_safetensors_header(file).tensors, kind, [])
        else:
            shards[file] = load(file, kind, "meta")
        return shards[file].value

    found = find_weights(read_index(path, shard), weights, str(path))
    form = next(iter(shards.values())).format
    return _header(path, f"sharded {form}", found)._replace(
        size=sum(file.stat().st_size for file in shards),
        unsafe=[name for content in shards.values() for name in content.unsafe],
    )


def check_finite(tensors: dict[str, Tensor], source: str) -> None:
    """Refuse weights that are not numbers.

    Args:
        tensors: Name to tensor.
        source: The file, for the message.

    Raises:
        CheckpointError: If a tensor holds NaN or infinity; the first ones are named.
    """
    bad = [name for name, tensor in tensors.items() if not _is_finite(tensor)]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise CheckpointError(
            f"Checkpoint {source} holds NaN or infinity in {', '.join(bad[:4])}{more}; take an "
            "earlier checkpoint of that training."
        )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # float8 knows no arithmetic
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
