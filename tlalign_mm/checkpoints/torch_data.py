"""Tensors from a pickle: what torch's rebuild functions do, with every bound checked first."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tlalign_mm.checkpoints.allowed import PYTHON_RULES
from tlalign_mm.checkpoints.unpickle import Global, NotAllowed, Rules

STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QInt8": "qint8",
    "QUInt8": "quint8",
    "QInt32": "qint32",
}
DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "complex128 complex64 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu"
).split()
ODD = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of a subclass",
}
TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
SCHEMES = (
    "per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric "
    "per_channel_affine_float_qparams"
).split()
EXPANDED_BYTES = 2**26  # what a tensor may take that repeats the values of a smaller storage


class StorageType(NamedTuple):
    """What the numbers of a storage are."""

    dtype: torch.dtype


class Storage(NamedTuple):
    """Memory and what its numbers are."""

    data: torch.UntypedStorage
    dtype: torch.dtype


class OddTensor(NamedTuple):
    """A tensor of a kind that is no plain array of numbers; it cannot be a weight here."""

    kind: str


def _tensor(
    storage: object, offset: object, size: object, stride: object, *rest: object
) -> Tensor | OddTensor:
    """``_rebuild_tensor`` and ``_rebuild_tensor_v2``; rest: requires_grad, hooks, metadata."""
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without storage")
    if len(rest) > 2 and rest[2]:
        return OddTensor("a conjugated or negated view")
    return view(storage.data, storage.dtype, offset, size, stride)


def _tensor_of_bytes(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> Tensor | OddTensor:
    """``_rebuild_tensor_v3``: the storage is untyped."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without storage")
    return _tensor(Storage(storage.data, dtype), offset, size, stride, requires_grad, hooks)


def view(
    data: torch.UntypedStorage, dtype: torch.dtype, offset: object, size: object, stride: object
) -> Tensor:
    """A tensor over ``data``.

    Args:
        data: Memory.
        dtype: What lies there.
        offset: Of the first number, in numbers.
        size: Shape.
        stride: In numbers, one for each dimension.

    Raises:
        ValueError: If the tensor reaches beyond the memory or would take far more than it.
    """
    parts = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(p) is int and 0 <= p < 2**62 for p in parts):
        raise ValueError("a tensor of an odd shape")
    item = torch.empty((), dtype=dtype, device="meta").element_size()
    count = 1
    for length in size:
        count *= length
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if count and (last + 1) * item > data.nbytes():
        raise ValueError("a tensor larger than its storage")
    if count * item > max(data.nbytes(), EXPANDED_BYTES):
        raise ValueError("a tensor far larger than its storage")
    return torch.empty(0, dtype=dtype, device=data.device).set_(data, offset, size, stride)


def _parameter(data: object, requires_grad: object = True, *_: object) -> object:
    if not isinstance(data, Tensor):
        return data
    floating = data.is_floating_point() or data.is_complex()
    return nn.Parameter(data, requires_grad=bool(requires_grad) and floating)


def _of_class(function: object, cls: object, arguments: tuple, state: object) -> object:
    """``_rebuild_from_type_v2``: a tensor of a class, with attributes, which are left out."""
    for part in (function, cls):
        if not isinstance(part, Global):
            raise ValueError("a tensor of an odd class")
    if cls.name not in TENSOR_CLASSES:
        raise NotAllowed(cls.name)
    if not function.name.startswith("torch._utils.") or function.build is None:
        raise NotAllowed(function.name)
    return function.build(*arguments)


def _as_it_is(data: object, *_: object) -> object:
    """A tensor of another device that was saved by way of the CPU."""
    return torch.from_numpy(data) if not isinstance(data, Tensor) else data


def _device(*arguments: object) -> torch.device:
    if not all(isinstance(a, str | int) for a in arguments):
        raise ValueError("an odd device")
    return torch.device(*arguments)


def _size(sizes: object = ()) -> torch.Size:
    return torch.Size(sizes)


def _storage_types() -> dict[str, StorageType]:
    known = {name: getattr(torch, dtype) for name, dtype in STORAGES.items()}
    types = {f"{name}Storage": StorageType(dtype) for name, dtype in known.items()}
    untyped = StorageType(torch.uint8)
    return {
        **{f"torch.{name}": kind for name, kind in types.items()},
        **{f"torch.cuda.{name}": kind for name, kind in types.items()},
        "torch.storage.UntypedStorage": untyped,
        "torch.UntypedStorage": untyped,
    }


TORCH_RULES = Rules(
    values={
        **PYTHON_RULES.values,
        **{f"torch.{name}": getattr(torch, name) for name in DTYPES if hasattr(torch, name)},
        **{f"torch.{name}": name for name in SCHEMES},
        **{name: Global(name, None) for name in TENSOR_CLASSES},
        **{f"torch.{name}Tensor": Global(f"torch.{name}Tensor", None) for name in STORAGES},
        **_storage_types(),
    },
    builders={
        **PYTHON_RULES.builders,
        **{name: lambda *_, kind=kind: OddTensor(kind) for name, kind in ODD.items()},
        "torch.Size": _size,
        "torch.device": _device,
        "torch.serialization._get_layout": lambda name: str(name),
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_bytes,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_device_tensor_from_numpy": _as_it_is,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _as_it_is,
        "torch._tensor._rebuild_from_type_v2": _of_class,
    },
    states={**PYTHON_RULES.states, nn.Parameter: lambda target, state: None},
)
