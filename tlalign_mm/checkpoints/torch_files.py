"""Files of ``torch.save``, read by torch with an unpickler that knows data alone.

The formats are zip (since torch 1.6), legacy (pickles, then the storages), tar (before 0.1.10) and
a bare pickle: https://github.com/pytorch/pytorch/blob/main/torch/serialization.py
"""

import math
import pickle
import sys
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, StorageType

from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.kinds import damaged
from tlalign_mm.checkpoints.unpickle import PYTHON, Unpickler, foreign, inert_pickle

EXPANDED_BYTES = 2**26  # what a tensor may take that repeats the values of a smaller storage


class Content(NamedTuple):
    """What a file of ``torch.save`` holds.

    Attributes:
        value: The content; None where it makes no sense without what is unsafe in it.
        format: ``torch zip``, ``torch legacy``, ``torch tar`` or ``pickle``.
        unsafe: Names in it that are not data; the value holds ``Foreign`` in their places.
    """

    value: object
    format: str
    unsafe: list[str]


class OddTensor(NamedTuple):
    """A tensor of a kind that is no plain array of numbers; it cannot be a weight here."""

    kind: str


def load(path: Path, kind: str, device: str = "cpu") -> Content:
    """Read what ``torch.save`` or ``pickle`` wrote, without running anything from it.

    Args:
        path: The file.
        kind: ``zip``, ``tar`` or ``pickle``, from its first bytes.
        device: Where the tensors shall lie; on ``meta`` those of a zip file are not read.

    Raises:
        CheckpointError: If the file is damaged, or of a kind that is not read.
    """
    pickles, unsafe = inert_pickle(_Unpickler, held=path.stat().st_size)
    form, value, text = f"torch {kind}", None, {"encoding": "latin1"}  # Python 2: any bytes
    try:
        mapped = CHECKS[kind](path)
        with path.open("rb") as file:
            if kind == "pickle":
                value = pickles.load(file, **text)
                legacy = isinstance(value, int) and value == MAGIC_NUMBER
                form = "torch legacy" if legacy else "pickle"
                file.seek(0)
            if form != "pickle":
                source, place = (str(path), device) if mapped else (file, "cpu")
                options = {"pickle_module": pickles, "weights_only": False, **text}
                value = torch.load(source, place, mmap=mapped, **options)
    except CheckpointError:
        raise
    except Exception as error:  # torch says nowhere what it raises
        if not unsafe:
            raise damaged(path, error) from error
        value = None
    return Content(value, form, list(unsafe))


def _check_zip(path: Path) -> bool:
    """Refuse what torch would run or misread; return whether it can be mapped into memory."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    if not any(info.filename.endswith("/data.pkl") for info in infos):
        names = ", ".join(info.filename for info in infos[:3])
        raise CheckpointError(
            f"Checkpoint {path} is a zip archive that torch.save did not write (it holds "
            f"{names or 'nothing'}); unpack it and name the file in it."
        )
    reader = torch._C.PyTorchFileReader(str(path))  # by which torch.load goes
    records = reader.get_all_records()
    if "constants.pkl" in records:
        raise CheckpointError(
            f"Checkpoint {path} is a TorchScript archive, which is a program and is not read; save "
            "the model's state_dict() instead."
        )
    order = reader.get_record("byteorder") if "byteorder" in records else b""
    if order in (b"little", b"big") and order != sys.byteorder.encode():
        raise CheckpointError(
            f"Checkpoint {path} is {order.decode()}-endian; save it on this machine."
        )
    stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
    return stored and path.suffix != ".safetensors"  # the one suffix that torch.load believes


def _check_tar(path: Path) -> bool:
    """Refuse links and pipes, which torch would open."""
    with tarfile.open(path, "r:") as archive:
        if not all(archive.getmember(name).isreg() for name in ("storages", "tensors")):
            raise ValueError("a link")
    return False


CHECKS = {"zip": _check_zip, "tar": _check_tar, "pickle": lambda path: False}


class _Unpickler(Unpickler):
    """Knows torch's data too.

    Attributes:
        held: Size of the file in bytes.
    """

    held: int

    def load_binpersid(self) -> None:
        """Get a storage from torch, or from a tar archive a tensor.

        Without the source of a pickled class, which torch would compare with ours.
        """
        pid = self.stack.pop()
        if isinstance(pid, tuple) and pid[:1] != ("storage",):
            pid = (*pid[:-1], None)
        value = self.persistent_load(pid)
        if isinstance(value, Tensor):
            _check_size(value.nbytes, value.untyped_storage().nbytes(), self.held)
        self.append(value)

    dispatch = {**Unpickler.dispatch, pickle.BINPERSID[0]: load_binpersid}  # noqa: RUF012


def _check_size(taken: int, needed: int, held: int) -> None:
    """Refuse a tensor for which torch would enlarge the storage, or which repeats it endlessly."""
    if needed > held or taken > max(held, EXPANDED_BYTES):
        raise ValueError("a tensor larger than its storage")


def _tensor(
    storage: torch.storage.TypedStorage,
    offset: int,
    size: tuple,
    stride: tuple,
    requires_grad: bool = False,
    hooks: object = None,
    *rest: object,
) -> Tensor | OddTensor:
    """Any plain tensor, without hooks; rest: its type if the storage has none, and metadata."""
    if any(isinstance(part, dict) and part for part in rest):
        return OddTensor("a conjugated or negated view")
    dtype = rest[0] if rest and isinstance(rest[0], torch.dtype) else storage.dtype
    data, item, count = storage._untyped_storage, dtype.itemsize, math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    _check_size(count * item, (last + 1) * item * bool(count), data.nbytes())
    tensor = torch.empty(0, dtype=dtype, device=data.device).set_(data, offset, size, stride)
    return tensor.requires_grad_(requires_grad)


def _parameter(data: object, requires_grad: bool = True, *_: object) -> object:
    """A parameter without hooks and attributes."""
    if not isinstance(data, Tensor):
        return data
    return torch._utils._rebuild_parameter(data, requires_grad, OrderedDict())


def _on_cpu(data: object, dtype: torch.dtype, *_: object) -> Tensor:
    """A tensor of another device that was saved by way of numpy or the CPU."""
    return torch.as_tensor(data, dtype=dtype)


ODD = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a subclass",
}
PLAIN = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
NUMBERS = "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexDouble ComplexFloat"
TYPES = [f"{owner}.{name}" for owner in ("torch", "torch.cuda") for name in NUMBERS.split()]
CLASSES = (
    *(f"{name}Tensor" for name in TYPES),
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
)
UNTYPED = StorageType("ByteStorage")
_Unpickler.allowed = {
    **PYTHON,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, PLAIN)},
    **{f"{name}Storage": StorageType(f"{name.split('.')[-1]}Storage") for name in TYPES},
    **{name: foreign(name) for name in CLASSES},
    **{name: lambda *_, kind=kind: OddTensor(kind) for name, kind in ODD.items()},
    "torch.Size": torch.Size,
    "torch.UntypedStorage": UNTYPED,
    "torch.device": torch.device,
    "torch.serialization._get_layout": str,
    "torch.storage.UntypedStorage": UNTYPED,
    "torch._tensor._rebuild_from_type_v2": lambda build, kind, arguments, state: build(*arguments),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_cpu,
    "torch._utils._rebuild_device_tensor_from_numpy": _on_cpu,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
}
