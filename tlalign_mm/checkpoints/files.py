"""Checkpoint files: tensors and a little text in, tensors and a little text out.

Reading never runs code from a file: safetensors holds none, and ``torch.load`` is called with
``weights_only=True`` and no fall-back.
"""

import json
import os
import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

WRAPPERS = ("state_dict", "model")
PREFIXES = ("module.", "backbone.")


class CheckpointError(ValueError):
    """A file that cannot be used; the message says which, why and what to do."""


class Checkpoint(NamedTuple):
    """What a file holds.

    Attributes:
        tensors: Name to tensor, on the CPU.
        layout: Who named the tensors (``tlalign_mm``), or None where the file does not say.
        architecture: The backbone's ``architecture``, or None where the file does not say.
    """

    tensors: dict[str, Tensor]
    layout: str | None = None
    architecture: dict | None = None


def read(path: str | Path) -> Checkpoint:
    """Read ``.safetensors``, or anything that ``torch.save`` wrote of plain tensors.

    Raises:
        CheckpointError: If the file is missing, empty, cut off, or holds more than tensors.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise CheckpointError(f"Checkpoint {path} does not exist; check the path in init_cfg.")
    if path.stat().st_size == 0:
        raise CheckpointError(f"Checkpoint {path} is empty; delete it and make it again.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return Checkpoint(_unwrap(_read_pickle(path), path))


def _read_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise CheckpointError(
            f"Checkpoint {path} is incomplete or no safetensors file ({error}); "
            "delete it and make it again."
        ) from error
    architecture = metadata.get("architecture")
    return Checkpoint(
        tensors, metadata.get("layout"), json.loads(architecture) if architecture else None
    )


def _read_pickle(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"Checkpoint {path} holds more than tensors and is not read, since that would run code "
            "from it; export the backbone as .safetensors instead."
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is incomplete or no checkpoint; delete it and make it again."
        ) from error


def _unwrap(content: object, path: Path) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    tensors = content if isinstance(content, dict) else {}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"Checkpoint {path} holds no state dict; name the right file.")
    for prefix in PREFIXES:
        inside = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        tensors = inside or tensors
    return tensors


def write(path: str | Path, checkpoint: Checkpoint) -> Path:
    """Write a safetensors file whole or not at all.

    The file is completed under another name beside ``path`` and then moved into place.

    Raises:
        OSError: If it cannot be written, for example on a full disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    if checkpoint.layout:
        metadata["layout"] = checkpoint.layout
    if checkpoint.architecture:
        metadata["architecture"] = json.dumps(checkpoint.architecture)
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    except SafetensorError as error:
        raise OSError(f"Cannot write {path} ({error}); free space and run this again.") from error
    finally:
        partial.unlink(missing_ok=True)
    return path
