"""Pickles as data: an interpreter of the opcodes that calls nothing a file names.

Python's unpickler imports what a file names and calls it. This one walks the opcodes with
``pickletools`` and builds values of known types with functions of its own; any other name becomes
an inert ``Foreign`` and is reported. As no opcode reaches further, what is checked is what is read,
for every protocol and with every version of torch.

The opcodes: https://docs.python.org/3/library/pickletools.html
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8".split()
)
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
IGNORED = frozenset({"PROTO", "FRAME"})
# Python 2, numpy 1 and Python 3.13 keep the same things under other names.
RENAMED = {
    "__builtin__.": "builtins.",
    "copy_reg.": "copyreg.",
    "numpy._core.": "numpy.core.",
    "pathlib._local.": "pathlib.",
}
SCALARS = (str, bytes, int, float, type(None))


class NotAllowed(Exception):
    """Raised by a builder for arguments that would make it more than data; holds the name."""


class Global(NamedTuple):
    """A class or function that a file names, before and without being called.

    Attributes:
        name: Dotted, as in the file.
        build: Makes the value from the arguments in the file; None where nothing may.
    """

    name: str
    build: Callable[..., object] | None


class Foreign:
    """What an unknown class or function would have made.

    Attributes:
        name: Dotted name of the class or function.
        state: The object's attributes in the file.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: object = None


class Rules(NamedTuple):
    """What may be made from a pickle.

    Attributes:
        values: Name of a global to what it stands for.
        builders: Name of a global to the function that is called in its place.
        states: Type of a value to the function that takes the value and its pickled state.
    """

    values: Mapping[str, object]
    builders: Mapping[str, Callable[..., object]]
    states: Mapping[type, Callable[..., None]]


def key(value: object) -> object:
    """Return a key of a dict or set, where hashing it is cheap.

    Raises:
        ValueError: For anything but scalars and flat tuples: nested ones can take for ever.
    """
    parts = value if isinstance(value, tuple) else (value,)
    if all(isinstance(part, SCALARS) for part in parts) or type(value).__hash__ is object.__hash__:
        return value
    raise ValueError(f"a {type(value).__name__} as a key")


class Unpickler:
    """Reads pickles under rules.

    Args:
        rules: What may be made.
        persistent: Gives what a persistent id stands for, as torch uses them for storages.

    Attributes:
        unsafe: Names in the pickles that the rules do not allow, in their order.
    """

    def __init__(self, rules: Rules, persistent: Callable[[object], object]) -> None:
        self.rules = rules
        self.persistent = persistent
        self.unsafe: dict[str, None] = {}

    def load(self, stream: BinaryIO) -> object:
        """Read one pickle; the stream is left behind its end.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: If the pickle is damaged.
        """
        self.stack: list = []
        self.marks: list[list] = []
        self.memo: dict[int, object] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name == "STOP":
                break
            if name in LITERALS:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in EMPTY:
                self.stack.append(EMPTY[name]())
            elif name in STEPS:
                STEPS[name](self, argument)
            elif name not in IGNORED:
                raise ValueError(f"unknown opcode {name}")
        return self.stack.pop()

    def find(self, name: str) -> object:
        """What a global's name stands for."""
        for prefix, usual in RENAMED.items():
            if name.startswith(prefix):
                name = usual + name.removeprefix(prefix)
        if name in self.rules.values:
            return self.rules.values[name]
        if name not in self.rules.builders:
            self.unsafe[name] = None
        return Global(name, self.rules.builders.get(name))

    def call(self, function: object, arguments: object) -> object:
        """Make what a global stands for from the arguments in the file."""
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise ValueError(f"a call of a {type(function).__name__}")
        try:
            if function.build is None:
                raise NotAllowed(function.name)
            return function.build(*arguments)
        except NotAllowed as refusal:
            self.unsafe[str(refusal)] = None
            return Foreign(str(refusal))

    def push(self, value: object) -> None:
        """Put a value on top of the stack, which may be another one than before it was made."""
        self.stack.append(value)

    def pop_mark(self) -> list:
        """Everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def set_items(self, items: list) -> None:
        """Put pairs into the dict on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            return
        if not isinstance(target, dict):
            raise ValueError(f"items for a {type(target).__name__}")
        for name, value in zip(items[::2], items[1::2], strict=True):
            target[key(name)] = value

    def extend(self, items: list) -> None:
        """Append to the list on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            return
        if type(target) is not list:
            raise ValueError(f"elements for a {type(target).__name__}")
        target.extend(items)

    def add(self, items: list) -> None:
        """Add to the set on top of the stack."""
        if type(self.stack[-1]) is not set:
            raise ValueError(f"members for a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(map(key, items))

    def set_state(self, state: object) -> None:
        """Give the value on top of the stack its state."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state
            return
        rules = [self.rules.states[c] for c in type(target).__mro__ if c in self.rules.states]
        if not rules:
            raise ValueError(f"a state for a {type(target).__name__}")
        rules[0](target, state)


def _mark(self: Unpickler, _: object) -> None:
    self.marks.append(self.stack)
    self.stack = []


def _pop(self: Unpickler, _: object) -> None:
    self.stack.pop() if self.stack else self.pop_mark()


def _tuple_of(count: int) -> Callable[[Unpickler, object], None]:
    def step(self: Unpickler, _: object) -> None:
        if len(self.stack) < count:
            raise ValueError("too few values")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    return step


def _dict(self: Unpickler, _: object) -> None:
    items = self.pop_mark()
    self.push({})
    self.set_items(items)


def _put(self: Unpickler, index: int | None) -> None:
    self.memo[len(self.memo) if index is None else index] = self.stack[-1]


def _stack_global(self: Unpickler, _: object) -> None:
    name, module = self.stack.pop(), self.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("a name that is no text")
    self.push(self.find(f"{module}.{name}"))


def _object(self: Unpickler, _: object) -> None:
    cls, *arguments = self.pop_mark()
    self.push(self.call(cls, tuple(arguments)))


def _instance(self: Unpickler, name: str) -> None:
    arguments = tuple(self.pop_mark())
    self.push(self.call(self.find(name.replace(" ", ".", 1)), arguments))


def _reduce(self: Unpickler, _: object) -> None:
    arguments, function = self.stack.pop(), self.stack.pop()
    self.push(self.call(function, arguments))


def _new_with_keywords(self: Unpickler, _: object) -> None:
    if self.stack.pop() != {}:
        raise ValueError("keywords for a class")
    _reduce(self, None)


STEPS: dict[str, Callable[[Unpickler, object], None]] = {
    "MARK": _mark,
    "POP": _pop,
    "POP_MARK": lambda self, _: self.pop_mark() and None,
    "DUP": lambda self, _: self.push(self.stack[-1]),
    "TUPLE": lambda self, _: self.push(tuple(self.pop_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "LIST": lambda self, _: self.push(self.pop_mark()),
    "DICT": _dict,
    "FROZENSET": lambda self, _: self.push(frozenset(map(key, self.pop_mark()))),
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "GET": lambda self, index: self.push(self.memo[index]),
    "BINGET": lambda self, index: self.push(self.memo[index]),
    "LONG_BINGET": lambda self, index: self.push(self.memo[index]),
    "GLOBAL": lambda self, name: self.push(self.find(name.replace(" ", ".", 1))),
    "STACK_GLOBAL": _stack_global,
    "INST": _instance,
    "OBJ": _object,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": lambda self, _: self.set_state(self.stack.pop()),
    "APPEND": lambda self, _: self.extend([self.stack.pop()]),
    "APPENDS": lambda self, _: self.extend(self.pop_mark()),
    "SETITEM": lambda self, _: self.set_items([self.stack.pop(-2), self.stack.pop()]),
    "SETITEMS": lambda self, _: self.set_items(self.pop_mark()),
    "ADDITEMS": lambda self, _: self.add(self.pop_mark()),
    "PERSID": lambda self, pid: self.push(self.persistent(pid)),
    "BINPERSID": lambda self, _: self.push(self.persistent(self.stack.pop())),
}
