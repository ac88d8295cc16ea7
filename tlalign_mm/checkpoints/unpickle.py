"""Pickles as data: Python's own unpickler with a list of what a file may name.

A name on the list stands for plain data, or for a function here or in numpy that only makes such
data. Any other name becomes an inert class, so that one pass finds all that is refused. Nothing
else of a file is imported or called, and only objects of known types take a state from it.
"""

import argparse
import collections
import datetime
import functools
import importlib
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np

# Python 2, numpy 1 and Python 3.13 keep the same things under other names.
RENAMED = {
    "__builtin__.": "builtins.",
    "copy_reg.": "copyreg.",
    "numpy._core.": "numpy.core.",
    "pathlib._local.": "pathlib.",
}
ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8", "utf8")
FACTORIES = (dict, list, set, int, float, bool, str, tuple, collections.OrderedDict)
NUMBERS = re.compile(r"[<>=|]?[biufcSUV]\d{1,4}")
HISTORY = "mmengine.logging.history_buffer.HistoryBuffer"


class NotAllowed(Exception):
    """Raised for arguments that would make more than data; holds the name to report."""


class Foreign:
    """What a class or function that is not on the list would have made.

    Attributes:
        name: Dotted name of the class or function.
        state: The object's attributes in the file.
    """

    name = ""
    state: object = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __call__(self, *arguments: object) -> "Foreign":
        """Return the same: what would have been called is not known either."""
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        """Leave out what the object would hold."""

    extend = add = append


def foreign(name: str) -> type[Foreign]:
    """An inert class in place of the one of this name."""
    return type("Foreign", (Foreign,), {"name": name})


@functools.cache
def _history_class() -> type:
    """The class of mmengine, which training resumes with; inert without mmengine."""
    try:
        cls = importlib.import_module("mmengine.logging").HistoryBuffer
    except ImportError:
        return foreign(HISTORY)
    keys = ("_log_history", "_count_history", "max_length")  # its own rule would change the class
    STATES[cls] = lambda target, state: cls.__init__(target, *(state[key] for key in keys))
    return cls


def _history(*arguments: object) -> object:
    return _history_class()(*arguments)


def _getattr(owner: object, name: object) -> None:
    """Let a history name its statistics, which its class knows already."""
    if owner is not _history:
        raise NotAllowed("builtins.getattr")


def _reconstruct(cls: Callable, base: object, state: object) -> object:
    """An object of protocols 0 and 1."""
    return cls() if state is None else cls(state)


def _defaultdict(factory: object = None, *items: dict) -> collections.defaultdict:
    if not any(factory is known for known in (*FACTORIES, None)):
        raise NotAllowed("collections.defaultdict")
    return collections.defaultdict(factory, *items)


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if encoding not in ENCODINGS:
        raise NotAllowed("_codecs.encode")
    return text.encode(encoding)


def _bytes(kind: type, value: object = b"", encoding: str = "latin1") -> bytes | bytearray:
    if isinstance(value, int):  # a length, which may be any
        raise pickle.UnpicklingError("bytes without content")
    return kind(_encode(value, encoding) if isinstance(value, str) else value)


def _text(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _dtype(code: bytes | str, *_: object) -> np.dtype:
    if not NUMBERS.fullmatch(_text(code)):
        raise NotAllowed(f"numpy.dtype({_text(code)!r:.40})")  # objects or fields
    return np.dtype(_text(code), copy=True)


def _set_dtype(target: np.dtype, state: tuple) -> None:
    """State: version, byte order, then fields and sub-arrays, which plain numbers lack."""
    order = _text(state[1])
    if order not in tuple("<>=|") or state[2:5] != (None, None, None):
        raise pickle.UnpicklingError("an odd dtype")
    sizes = (target.itemsize, target.alignment, 0) if target.kind in "SUV" else (-1, -1, 0)
    target.__setstate__((3, order, None, None, None, *sizes))


def _set_metadata(target: collections.OrderedDict, state: dict) -> None:
    """Keep the versions of modules, which torch writes there."""
    vars(target).update({key: value for key, value in state.items() if key == "_metadata"})


# Types of objects that take a state, and how.
STATES: dict[type, Callable[..., None]] = {
    Foreign: lambda target, state: setattr(target, "state", state),
    argparse.Namespace: lambda target, state: vars(target).update(state),
    collections.OrderedDict: _set_metadata,
    dict: lambda target, state: None,  # attributes of a config beside its items
    np.dtype: _set_dtype,
    np.ndarray: np.ndarray.__setstate__,
}
TYPES = {
    "argparse": (argparse.Namespace,),
    "builtins": (
        *(bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    ),
    "collections": (collections.Counter, collections.OrderedDict),
    "datetime": tuple(vars(datetime)[n] for n in "date datetime time timedelta timezone".split()),
    "pathlib": (pathlib.PurePosixPath, pathlib.PureWindowsPath),
}
DICTS = (
    "mmengine.config.config.ConfigDict mmcv.utils.config.ConfigDict addict.addict.Dict "
    "yacs.config.CfgNode easydict.EasyDict"
).split()
INERT = "builtins.object numpy.ndarray mmengine.config.config.Config mmcv.utils.config.Config"
PYTHON: dict[str, object] = {
    **{f"{module}.{kind.__name__}": kind for module, kinds in TYPES.items() for kind in kinds},
    **{name: foreign(name) for name in INERT.split()},
    **dict.fromkeys(DICTS, dict),
    **dict.fromkeys(f"{HISTORY}.{name}" for name in ("min", "max", "current", "mean")),
    HISTORY: _history,
    "_codecs.encode": _encode,
    "builtins.bytearray": functools.partial(_bytes, bytearray),
    "builtins.bytes": functools.partial(_bytes, bytes),
    "builtins.getattr": _getattr,
    "builtins.xrange": range,
    "collections.defaultdict": _defaultdict,
    "copyreg._reconstructor": _reconstruct,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": lambda *_: np.empty(0),
    "numpy.core.multiarray.scalar": np.float64(0).__reduce__()[0],
    "numpy.core.numeric._frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
}
CALLABLE = (Foreign, type, FunctionType, BuiltinFunctionType, functools.partial)


class Unpickler(pickle._Unpickler):  # the one in Python; the one in C cannot be told what to call
    """Reads pickles of what is allowed.

    Attributes:
        allowed: Dotted name in a file to what stands for it.
        unsafe: Names in the file that are not allowed, in their order.
    """

    allowed: Mapping[str, object] = PYTHON
    unsafe: dict[str, None]

    def refuse(self, name: str) -> type[Foreign]:
        """Note a name that is not allowed and return what stands for it."""
        self.unsafe[name if name.isprintable() else ascii(name)] = None
        return foreign(name)

    def find_class(self, module: str, name: str) -> object:
        """What a name in the file stands for."""
        name = f"{module}.{name}"
        for prefix, usual in RENAMED.items():
            if name.startswith(prefix):
                name = usual + name.removeprefix(prefix)
        return self.allowed[name] if name in self.allowed else self.refuse(name)

    def get_extension(self, code: int) -> None:
        """Refuse names by number, which do not pass ``find_class``."""
        raise pickle.UnpicklingError(f"extension {code}")

    def load_reduce(self) -> None:
        """Call, and make objects of classes, with the arguments in the file."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, CALLABLE) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError(f"a call of a {type(function).__name__}")
        try:
            self.append(function(*arguments))
        except NotAllowed as refusal:
            self.append(self.refuse(str(refusal))())

    def load_newobj_ex(self) -> None:
        """Make an object without keywords, which nothing on the list needs."""
        if self.stack.pop() != {}:
            raise pickle.UnpicklingError("keywords for a class")
        self.load_reduce()

    def _instantiate(self, klass: object, args: list) -> None:
        self.stack += [klass, tuple(args)]
        self.load_reduce()

    def load_build(self) -> None:
        """Give an object its state; classes and functions take none."""
        state = self.stack.pop()
        for kind in type(self.stack[-1]).__mro__:
            if kind in STATES:
                STATES[kind](self.stack[-1], state)
                return
        raise pickle.UnpicklingError(f"a state for a {type(self.stack[-1]).__name__}")

    def load_bytearray8(self) -> None:
        """Read bytes before memory for them is taken."""
        self.load_binbytes8()
        self.append(bytearray(self.stack.pop()))

    dispatch = {  # noqa: RUF012
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def inert_pickle(
    base: type[Unpickler] = Unpickler, **attributes: object
) -> tuple[ModuleType, dict[str, None]]:
    """A module in place of ``pickle`` for one file, and the names that it will have refused."""
    unsafe: dict[str, None] = {}
    module = ModuleType("pickle")
    module.Unpickler = type("Unpickler", (base,), {"unsafe": unsafe, **attributes})
    module.load = lambda file, **options: module.Unpickler(file, **options).load()
    return module, unsafe
