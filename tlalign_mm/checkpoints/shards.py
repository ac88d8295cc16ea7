"""Safetensors files, and weights that an index spreads over several files.

The format: https://huggingface.co/docs/safetensors
"""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.kinds import damaged

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


class Tensors(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        tensors: Name to tensor.
        metadata: Text beside them.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_safetensors(path: Path) -> Tensors:
    """Read a safetensors file; its tensors lie in the file until they are used.

    Raises:
        CheckpointError: If the file is damaged.
    """
    shapes = read_safetensors_header(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
    return Tensors(tensors, shapes.metadata)


def read_safetensors_header(path: Path) -> Tensors:
    """Read names, shapes and metadata only; the tensors are on the device ``meta``.

    Raises:
        CheckpointError: If the header is damaged, or tells of more than the file holds.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise damaged(path, f"its header alone takes {length}")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        tensors = {name: _empty(entry, size - 8 - length) for name, entry in header.items()}
        if not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("its metadata is not text")
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise damaged(path, error) from error
    except RecursionError as error:
        raise damaged(path, "its header is nested too deeply") from error
    return Tensors(tensors, metadata)


def _empty(entry: dict, data_bytes: int) -> Tensor:
    """A tensor without data, from its entry in a header of a file with so many bytes of data."""
    if entry["dtype"] not in DTYPES or not hasattr(torch, DTYPES[entry["dtype"]]):
        raise ValueError(f"numbers of type {entry['dtype']}, which this torch lacks")
    dtype = getattr(torch, DTYPES[entry["dtype"]])
    shape = entry["shape"]
    if not all(type(length) is int and 0 <= length < 2**62 for length in shape):
        raise ValueError("a shape of odd numbers")
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= data_bytes:
        raise ValueError("tensors beyond the end of the file")
    item = torch.empty((), dtype=dtype, device="meta").element_size()
    if stop - start != math.prod(shape) * item:
        raise ValueError("a tensor that does not fit its bytes")
    return torch.empty(shape, dtype=dtype, device="meta")


def find_index(folder: Path) -> Path:
    """The one index in a folder.

    Raises:
        CheckpointError: If there is none, or more than one.
    """
    found = sorted(folder.glob("*.index.json"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(p.name for p in found) or "no index (*.index.json)"
    raise CheckpointError(
        f"Checkpoint {folder} is a folder with {names}; name the file in it that is meant."
    )


def read_index(path: Path, read: Callable[[Path], object]) -> dict[str, Tensor]:
    """Read all shards that an index names.

    Args:
        path: The index.
        read: Reads one shard, a dict of tensors.

    Raises:
        CheckpointError: If the index is damaged, or a shard or a tensor of it is missing.
    """
    places = _weight_map(path)
    for name in sorted(set(places.values())):
        if not (path.parent / name).is_file():
            raise CheckpointError(
                f"Checkpoint {path} names the shard {name}, which is not beside it; fetch that "
                "file too."
            )
    shards = {name: read(path.parent / name) for name in sorted(set(places.values()))}
    for tensor, shard in places.items():
        if not isinstance(shards[shard], dict) or tensor not in shards[shard]:
            raise CheckpointError(
                f"Checkpoint {path} says that {shard} holds {tensor}, which it does not; fetch the "
                "index and all shards again."
            )
    return {tensor: shards[shard][tensor] for tensor, shard in places.items()}


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not places or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("its weight_map is no table of names")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from error
    for name in places.values():
        if Path(name).name != name:
            raise CheckpointError(
                f"Checkpoint {path} names the shard {name}, which lies elsewhere; a shard must lie "
                "beside its index."
            )
    return places
