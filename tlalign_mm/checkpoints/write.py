"""Checkpoint files written whole or not at all."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tlalign_mm.checkpoints.content import Checkpoint, plain
from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.kinds import one_line

PICKLES = (".pth", ".pt", ".bin")
SUFFIXES = (".safetensors", *PICKLES)


def write(
    path: str | Path,
    checkpoint: Checkpoint,
    wrapper: str | None = "state_dict",
    overwrite: bool = True,
) -> Path:
    """Write a checkpoint under another name beside ``path`` and move it into place.

    Args:
        path: Ends in ``.safetensors``, or in ``.pth``, ``.pt`` or ``.bin`` for ``torch.save``.
        checkpoint: What to write; ``weights`` and ``beside`` are not.
        wrapper: Key of the weights in a file of ``torch.save``, with layout, architecture and meta
            under ``meta``; None writes the bare weights, without those.
        overwrite: Replace the file where it exists.

    Raises:
        CheckpointError: If the suffix is another, the file exists and must not be replaced, or it
            cannot be written, for example on a full disk.
    """
    path = Path(path).expanduser()
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"Cannot write {path}; its name must end in {', '.join(SUFFIXES)}.")
    if not overwrite and path.exists():
        raise CheckpointError(f"{path} exists already; name another file, or pass --force.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(partial, path.suffix, checkpoint, wrapper)
        os.replace(partial, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(
            f"Cannot write {path} ({why}); free space or mend the path, then run this again."
        ) from error
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot write {path} (a type of number that safetensors lacks: {one_line(error)}); "
            "write a .pth file instead."
        ) from error
    finally:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)
    return path


def _save(partial: Path, suffix: str, checkpoint: Checkpoint, wrapper: str | None) -> None:
    """Write the bytes and wait until they are on the disk, before a name points to them."""
    tensors = _separate(checkpoint.tensors)
    if suffix in PICKLES:
        torch.save(_wrap(checkpoint, tensors, wrapper), partial)
    else:
        save_file(tensors, partial, _metadata(checkpoint))
    with partial.open("rb+") as file:
        os.fsync(file.fileno())


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each with memory of its own; copied where they are not."""
    known: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in known:
            tensor = tensor.clone()
        elif storage.nbytes():
            known.add(storage.data_ptr())
        separate[name] = tensor
    return separate


def _about(checkpoint: Checkpoint) -> dict[str, object]:
    about = {"layout": checkpoint.layout, "architecture": checkpoint.architecture}
    return {key: value for key, value in about.items() if value}


def _wrap(checkpoint: Checkpoint, tensors: dict[str, Tensor], wrapper: str | None) -> dict:
    if wrapper is None:
        return tensors
    return {wrapper: tensors, "meta": plain({**checkpoint.meta, **_about(checkpoint)})}


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    metadata = {"format": "pt"}
    if checkpoint.layout:
        metadata["layout"] = checkpoint.layout
    if checkpoint.architecture:
        metadata["architecture"] = json.dumps(plain(checkpoint.architecture))
    if checkpoint.meta:
        metadata["meta"] = json.dumps(plain(checkpoint.meta))
    return metadata
