"""What may be read from a pickle: plain data of Python, numpy, mmengine and the like.

Every name stands for a function of this file that checks its arguments first: no class of another
library is called but those of plain data, and nothing allocates more than the file holds.
"""

import argparse
import collections
import datetime
import pathlib
import re
from collections.abc import Callable, Iterable

import numpy as np

from tlalign_mm.checkpoints.unpickle import Global, NotAllowed, Rules, key

# Subclasses of dict in configs; they are read as plain dicts.
DICTS = (
    "mmengine.config.config.ConfigDict",
    "mmcv.utils.config.ConfigDict",
    "addict.addict.Dict",
    "yacs.config.CfgNode",
    "easydict.EasyDict",
)
# Objects that the weights do not need; they are read as inert stand-ins.
OBJECTS = (
    "mmengine.logging.history_buffer.HistoryBuffer",
    "mmengine.config.config.Config",
    "mmcv.utils.config.Config",
)
PATHS = {
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
}
FACTORIES: dict[str, type] = {
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.set": set,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.bool": bool,
    "builtins.str": str,
    "builtins.tuple": tuple,
    "collections.OrderedDict": collections.OrderedDict,
}
ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8", "utf8")
NUMBERS = re.compile(r"[<>=|]?[biufcSUV]\d{1,4}")


class StandIn:
    """Takes the place of an object that is known to be harmless but of no use here.

    Attributes:
        name: Dotted name of its class.
        state: What the file says about it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: object = None


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _stand_in(name: str) -> Callable[..., StandIn]:
    return lambda *_: StandIn(name)


def _set_stand_in(target: StandIn, state: object) -> None:
    target.state = state


def _dict(items: object = (), **_: object) -> dict:
    pairs = items.items() if isinstance(items, dict) else items
    return {key(name): value for name, value in pairs}


def _ordered(items: object = ()) -> collections.OrderedDict:
    return collections.OrderedDict(_dict(items))


def _set_ordered(target: collections.OrderedDict, state: object) -> None:
    target.__dict__.update(_text_keys(state))  # torch keeps the modules' versions there


def _defaultdict(factory: object = None, items: object = ()) -> collections.defaultdict:
    name = factory.name if isinstance(factory, Global) else None
    if factory is not None and name not in FACTORIES:
        raise NotAllowed(str(name or factory))
    return collections.defaultdict(FACTORIES.get(str(name)), _dict(items))


def _text_keys(state: object) -> dict[str, object]:
    _check(isinstance(state, dict) and all(isinstance(k, str) for k in state), "an odd state")
    return state


def _namespace() -> argparse.Namespace:
    return argparse.Namespace()


def _set_namespace(target: argparse.Namespace, state: object) -> None:
    vars(target).update(_text_keys(state))


def _items(kind: Callable[[Iterable], object]) -> Callable[..., object]:
    def build(items: object = ()) -> object:
        _check(isinstance(items, list | tuple | set | frozenset), "odd elements")
        return kind(items)

    return build


def _numbers(kind: Callable[..., object]) -> Callable[..., object]:
    def build(*arguments: object) -> object:
        _check(all(isinstance(a, int | float | type(None)) for a in arguments), "odd numbers")
        return kind(*arguments)

    return build


def as_bytes(value: object) -> bytes:
    """Bytes, which Python 2 pickles as text."""
    return value.encode("latin-1") if isinstance(value, str) else bytes(memoryview(value))


def _bytes(kind: type) -> Callable[..., object]:
    def build(value: object = b"", encoding: str = "latin-1") -> object:
        return kind(_encode(value, encoding) if isinstance(value, str) else as_bytes(value))

    return build


def _encode(text: object, encoding: object = "utf-8") -> bytes:
    _check(isinstance(text, str) and encoding in ENCODINGS, "odd text")
    return text.encode(encoding)


def _path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    def build(*parts: object) -> pathlib.PurePath:
        _check(all(isinstance(part, str) for part in parts), "odd parts of a path")
        return kind(*parts)

    return build


def _moment(kind: Callable[..., object]) -> Callable[..., object]:
    known = (bytes, str, int, float, datetime.tzinfo, datetime.timedelta)

    def build(*arguments: object) -> object:
        _check(all(isinstance(a, known) for a in arguments), "an odd date")
        return kind(*arguments)

    return build


def _method(owner: object, name: object) -> Global:
    """``getattr`` of a HistoryBuffer's own statistics, which nothing can call."""
    if not isinstance(owner, Global) or not owner.name.endswith(".HistoryBuffer"):
        raise NotAllowed("builtins.getattr")
    return Global(f"{owner.name}.{name}", None)


def _reconstruct(cls: object, base: object, state: object) -> object:
    """``copyreg._reconstructor``: an object of protocols 0 and 1."""
    if not isinstance(cls, Global) or cls.build is None:
        raise NotAllowed(getattr(cls, "name", "copyreg._reconstructor"))
    value = cls.build()
    if isinstance(value, dict) and isinstance(state, dict):
        value.update(state)
    return value


def _dtype(code: object, *_: object) -> np.dtype:
    text = as_bytes(code).decode("ascii") if isinstance(code, bytes | str) else ""
    if not NUMBERS.fullmatch(text):
        raise NotAllowed(f"numpy.dtype({code!r:.40})")
    return np.dtype(text, copy=True)


def _set_dtype(target: np.dtype, state: object) -> None:
    """State: version, byte order, then fields and sub-arrays, which plain numbers lack."""
    _check(isinstance(state, tuple) and 8 <= len(state) <= 9, "an odd dtype")
    order = as_bytes(state[1]).decode("ascii")
    _check(order in ("<", ">", "=", "|") and state[2:5] == (None, None, None), "an odd dtype")
    sizes = (
        (target.itemsize, target.alignment, target.flags) if target.kind in "USV" else (-1, -1, 0)
    )
    target.__setstate__((3, order, None, None, None, *sizes))


def _scalar(dtype: object, data: object) -> np.generic:
    _check(isinstance(dtype, np.dtype), "an odd number")
    data = as_bytes(data)
    _check(len(data) == dtype.itemsize > 0, "an odd number")
    return np.frombuffer(data, dtype)[0]


def _array(cls: object, *_: object) -> np.ndarray:
    if not isinstance(cls, Global) or cls.name != "numpy.ndarray":
        raise NotAllowed(getattr(cls, "name", "numpy.core.multiarray._reconstruct"))
    return np.empty(0)


def _set_array(target: np.ndarray, state: object) -> None:
    _check(isinstance(state, tuple) and len(state) == 5, "an odd array")
    version, shape, dtype, fortran, data = state
    data = as_bytes(data)
    _check(isinstance(dtype, np.dtype), "an odd array")
    _check_shape(shape, dtype, data)
    target.__setstate__((version, shape, dtype, bool(fortran), data))


def _check_shape(shape: object, dtype: np.dtype, data: bytes) -> None:
    _check(isinstance(shape, tuple) and all(type(s) is int and s >= 0 for s in shape), "odd shape")
    count = 1
    for size in shape:
        count *= size
    _check(count * dtype.itemsize == len(data) and dtype.itemsize > 0, "an array of another size")


def _array_of_buffer(data: object, dtype: object, shape: object, order: object) -> np.ndarray:
    """An array of protocol 5."""
    data = as_bytes(data)
    _check(isinstance(dtype, np.dtype) and order in ("C", "F"), "an odd array")
    _check_shape(shape, dtype, data)
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


BUILDERS: dict[str, Callable[..., object]] = {
    "argparse.Namespace": _namespace,
    "builtins.getattr": _method,
    "builtins.bytearray": _bytes(bytearray),
    "builtins.bytes": _bytes(bytes),
    "builtins.complex": _numbers(complex),
    "builtins.range": _numbers(range),
    "builtins.xrange": _numbers(range),
    "builtins.slice": _numbers(slice),
    "builtins.int": _numbers(int),
    "builtins.float": _numbers(float),
    "builtins.bool": _numbers(bool),
    "builtins.str": lambda *_: "",
    "builtins.dict": _dict,
    "builtins.list": _items(list),
    "builtins.tuple": _items(tuple),
    "builtins.set": _items(lambda items: set(map(key, items))),
    "builtins.frozenset": _items(lambda items: frozenset(map(key, items))),
    "collections.Counter": lambda items=(): collections.Counter(_dict(items)),
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "copyreg._reconstructor": _reconstruct,
    "_codecs.encode": _encode,
    "datetime.date": _moment(datetime.date),
    "datetime.datetime": _moment(datetime.datetime),
    "datetime.time": _moment(datetime.time),
    "datetime.timedelta": _moment(datetime.timedelta),
    "datetime.timezone": _moment(datetime.timezone),
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array_of_buffer,
    **{name: _path(kind) for name, kind in PATHS.items()},
    **{name: _dict for name in DICTS},
    **{name: _stand_in(name) for name in OBJECTS},
}
VALUES: dict[str, object] = {
    name: Global(name, None) for name in ("builtins.object", "numpy.ndarray")
}
STATES: dict[type, Callable[..., None]] = {
    argparse.Namespace: _set_namespace,
    collections.OrderedDict: _set_ordered,
    dict: lambda target, state: None,  # attributes of a config beside its items
    np.ndarray: _set_array,
    np.dtype: _set_dtype,
    StandIn: _set_stand_in,
}
PYTHON_RULES = Rules(VALUES, BUILDERS, STATES)
