"""The containers that ``torch.save`` has written over the years, and what is pickled in them.

- zip (since torch 1.6): ``NAME/data.pkl`` and one record ``NAME/data/KEY`` for each storage;
- legacy: pickles of a magic number, the version, the system, the content and the storages' keys,
  then the storages, each behind its length;
- tar (before torch 0.1.10): members ``storages``, ``tensors`` and ``pickle``;
- a bare pickle.

The memory of a storage is mapped from the file, so that nothing is read before it is used.
The formats: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py
"""

import io
import mmap
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.torch_data import TORCH_RULES, Storage, StorageType, view
from tlalign_mm.checkpoints.unpickle import Rules, Unpickler

MAGIC = 0x1950A86A20F9469CFC6C
ALIGNMENT = 16  # bytes; that of the largest numbers
PICKLE = re.compile(r"[^/]*/data\.pkl")
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip record: signature, length of name and extra
# Takes the memory of a storage and its device ('cpu', 'cuda:0', …) and gives it where it shall lie.
Place = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]


class Content(NamedTuple):
    """What a file of ``torch.save`` holds.

    Attributes:
        value: The content; tensors lie in the file until they are used.
        format: ``torch zip``, ``torch legacy``, ``torch tar`` or ``pickle``.
        unsafe: Names in it that are not data; the value holds ``Foreign`` in their places.
    """

    value: object
    format: str
    unsafe: list[str]


class Memory:
    """A file as memory: private, so that writing to a tensor does not change the file.

    Args:
        path: The file, not empty.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.whole = torch.frombuffer(self.bytes, dtype=torch.uint8).untyped_storage()
        self.size = len(self.bytes)

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """Memory of ``size`` bytes from ``start``.

        Raises:
            ValueError: If the file ends before.
        """
        if not 0 <= start <= start + size <= self.size:
            raise ValueError("a storage beyond the end of the file")
        return self.whole[start : start + size] if size else torch.UntypedStorage(0)


def keep(data: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    """Leave a storage in the file's memory, whatever device it was saved from."""
    return data if data.data_ptr() % ALIGNMENT == 0 else data.clone()


def forget(data: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    """Leave out what a storage holds, for shapes alone."""
    return torch.UntypedStorage(data.nbytes(), device="meta")


def load(path: Path, kind: str, rules: Rules = TORCH_RULES, place: Place = keep) -> Content:
    """Read what ``torch.save`` or ``pickle`` wrote, without running anything from it.

    Args:
        path: The file.
        kind: ``zip``, ``tar`` or ``pickle``, from its first bytes.
        rules: What may be made from it.
        place: Where its storages shall lie.

    Raises:
        CheckpointError: If the file is of a kind that is not read.
        Exception: If it is damaged: any of ``files.DAMAGE``.
    """
    reader = {"zip": _load_zip, "tar": _load_tar, "pickle": _load_pickles}[kind]
    return reader(path, rules, place)


def _item_size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype, device="meta").element_size()


def _parse(pid: object, kind: type = StorageType) -> tuple:
    """A persistent id: ``('storage', type, key, device, length)`` and, if legacy, a view."""
    if not isinstance(pid, tuple) or len(pid) < 5 or not isinstance(pid[1], kind):
        raise ValueError("an odd persistent id")
    if type(pid[4]) is not int or pid[4] < 0 or not isinstance(pid[2], str | int):
        raise ValueError("an odd storage")
    return pid[1].dtype, str(pid[2]), str(pid[3]), pid[4], *pid[5:]


def _load_zip(path: Path, rules: Rules, place: Place) -> Content:
    memory = Memory(path)
    records = _records(path, memory)
    (root,) = [name.removesuffix("data.pkl") for name in records if PICKLE.fullmatch(name)]
    order = memory.bytes[slice(*records.get(f"{root}byteorder", (0, 0)))].decode()
    if order not in ("", sys.byteorder):
        raise CheckpointError(f"Checkpoint {path} is {order}-endian; save it on this machine.")
    known: dict[str, torch.UntypedStorage] = {}

    def persistent(pid: object) -> Storage:
        dtype, key, device, length = _parse(pid)[:4]
        if key not in known:
            start, stop = records[f"{root}data/{key}"]
            item = _item_size(dtype)
            if length * item > stop - start:
                raise ValueError("a storage larger than its record")
            known[key] = place(memory.storage(start, length * item), device)
        return Storage(known[key], dtype)

    unpickler = Unpickler(rules, persistent)
    pickled = io.BytesIO(memory.bytes[slice(*records[f"{root}data.pkl"])])
    return Content(unpickler.load(pickled), "torch zip", list(unpickler.unsafe))


def _records(path: Path, memory: Memory) -> dict[str, tuple[int, int]]:
    """Name to start and end in the file, of a zip archive as torch writes it."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    names = [info.filename for info in infos]
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
        raise CheckpointError(
            f"Checkpoint {path} is a TorchScript archive, which is a program and is not read; save "
            "the model's state_dict() instead."
        )
    if sum(bool(PICKLE.fullmatch(name)) for name in names) != 1:
        raise CheckpointError(
            f"Checkpoint {path} is a zip archive that torch.save did not write (it holds "
            f"{', '.join(names[:3]) or 'nothing'}); unpack it and name the file in it."
        )
    records = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"Checkpoint {path} is compressed inside, which torch.save never does; unpack it "
                "and pack it again without compression."
            )
        header = memory.bytes[info.header_offset : info.header_offset + LOCAL_HEADER.size]
        signature, name_length, extra_length = LOCAL_HEADER.unpack(header)
        start = info.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if signature != b"PK\3\4" or start + info.file_size > memory.size:
            raise ValueError("a record beyond the end of the file")
        records[info.filename] = (start, start + info.file_size)
    return records


def _load_pickles(path: Path, rules: Rules, place: Place) -> Content:
    memory = Memory(path)
    dtypes: dict[str, torch.dtype] = {}

    def count(pid: object) -> object:  # first pass: of what kind each storage is, and no data
        if isinstance(pid, tuple) and pid[:1] == ("module",):
            return pid[1]
        dtype, key, _, length = _parse(pid)[:4]
        dtypes[key] = dtype
        return Storage(torch.UntypedStorage(length * _item_size(dtype), device="meta"), dtype)

    memory.bytes.seek(0)
    scout = Unpickler(rules, count)
    first = scout.load(memory.bytes)
    if first != MAGIC:
        return Content(first, "pickle", list(scout.unsafe))
    version, system = scout.load(memory.bytes), scout.load(memory.bytes)
    if version != 1001 or not isinstance(system, dict):
        raise ValueError("an unknown version")
    if system.get("little_endian", True) != (sys.byteorder == "little"):
        raise CheckpointError(f"Checkpoint {path} has another byte order; save it on this machine.")
    start = memory.bytes.tell()
    scout.load(memory.bytes)
    keys = scout.load(memory.bytes)
    storages = _legacy_storages(memory, keys, dtypes)
    placed: dict[str, torch.UntypedStorage] = {}

    def persistent(pid: object) -> object:
        if pid[:1] == ("module",):
            return pid[1]
        dtype, key, device, _, *views = _parse(pid)
        if key not in placed:
            placed[key] = place(storages[key], device)
        return Storage(_part(placed[key], dtype, *views), dtype)

    memory.bytes.seek(start)
    unpickler = Unpickler(rules, persistent)
    return Content(unpickler.load(memory.bytes), "torch legacy", list(unpickler.unsafe))


def _legacy_storages(
    memory: Memory, keys: object, dtypes: dict[str, torch.dtype]
) -> dict[str, torch.UntypedStorage]:
    """The storages behind the pickles, each behind its length in numbers."""
    position = memory.bytes.tell()
    storages = {}
    for key in map(str, keys):
        item = _item_size(dtypes[key])
        (length,) = struct.unpack_from("<q", memory.bytes, position)
        storages[key] = memory.storage(position + 8, length * item)
        position += 8 + length * item
    return storages


def _part(
    data: torch.UntypedStorage, dtype: torch.dtype, part: tuple[str, int, int] | None = None
) -> torch.UntypedStorage:
    """A view of a storage, as torch had them up to 0.3: its key, first number and length."""
    if part is None:
        return data
    item = _item_size(dtype)
    start, stop = part[1] * item, (part[1] + part[2]) * item
    if not 0 <= start <= stop <= data.nbytes():
        raise ValueError("a view beyond its storage")
    return data[start:stop]


def _load_tar(path: Path, rules: Rules, place: Place) -> Content:
    memory = Memory(path)
    with tarfile.open(path, "r:") as archive:
        parts = {m.name: (m.offset_data, m.offset_data + m.size) for m in archive.getmembers()}
    if not {"storages", "tensors", "pickle"} <= parts.keys():
        raise CheckpointError(
            f"Checkpoint {path} is a tar archive that torch did not write (it holds "
            f"{', '.join(list(parts)[:3])}); unpack it and name the file in it."
        )
    known: dict[int, object] = {}  # storages, their views and tensors by their numbers
    unpickler = Unpickler(rules, lambda pid: pid[0] if isinstance(pid, tuple) else known[int(pid)])
    memory.bytes.seek(parts["storages"][0])
    for _ in range(_length(unpickler.load(memory.bytes), memory)):
        key, device, kind = unpickler.load(memory.bytes)
        item = _item_size(kind.dtype)
        (length,) = struct.unpack("<q", memory.bytes.read(8))
        data = memory.storage(memory.bytes.tell(), length * item)
        memory.bytes.seek(length * item, 1)
        known[key] = Storage(place(data, str(device)), kind.dtype)
    for key, root, offset, length in unpickler.load(memory.bytes):
        data, dtype = known[root]
        known[key] = Storage(_part(data, dtype, (str(key), offset, length)), dtype)
    memory.bytes.seek(parts["tensors"][0])
    for _ in range(_length(unpickler.load(memory.bytes), memory)):
        key, storage, _ = unpickler.load(memory.bytes)
        known[key] = _tar_tensor(memory, known[storage])
    memory.bytes.seek(parts["pickle"][0])
    return Content(unpickler.load(memory.bytes), "torch tar", list(unpickler.unsafe))


def _length(count: object, memory: Memory) -> int:
    """A number of things, each of which takes a byte at least."""
    if type(count) is not int or not 0 <= count <= memory.size:
        raise ValueError("an odd length")
    return count


def _tar_tensor(memory: Memory, storage: object) -> Tensor:
    """Dimensions (in 8 bytes), shape, strides and offset of a tensor of the tar format."""
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without storage")
    (dims,) = struct.unpack("<i4x", memory.bytes.read(8))
    numbers = struct.unpack(f"<{2 * dims + 1}q", memory.bytes.read(8 * (2 * dims + 1)))
    return view(storage.data, storage.dtype, numbers[-1], numbers[:dims], numbers[dims : 2 * dims])
