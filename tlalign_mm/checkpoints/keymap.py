"""Tables of key patterns that are read in both directions.

A rule says what a tensor is called here and there, and what happens to it on the way. Templates
have placeholders: ``{i}`` and ``{j}`` are numbers, with an offset where the sides count differently
(``{i+1}``), ``{p}`` is one part of a name, ``{rest}`` is anything, ``{last}`` is the last stage.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tlalign_mm.checkpoints.errors import CheckpointError

PLACEHOLDER = re.compile(r"\{(?P<name>[a-z]+)(?P<offset>[+-]\d+)?\}")
KINDS = {"i": r"\d+", "j": r"\d+", "p": r"[^.]+", "rest": r".+"}


class Op(NamedTuple):
    """What happens to a tensor between the layouts.

    Attributes:
        name: For the report.
        to_theirs: Ours to theirs.
        to_ours: Its inverse, bit for bit.
    """

    name: str
    to_theirs: Callable[[Tensor], Tensor]
    to_ours: Callable[[Tensor], Tensor]


class Rule(NamedTuple):
    """A line of a table.

    Attributes:
        ours: Template of our name; several where theirs is one tensor of their rows; None for keys
            that exist there only and are dropped on purpose.
        theirs: Template of their name; None for keys that exist here only and are dropped.
        op: What happens to the tensor, or None.
        shares: Rows of each of ``ours`` in theirs, as parts of the sum; for several of ours.
    """

    ours: str | tuple[str, ...] | None
    theirs: str | None
    op: Op | None = None
    shares: tuple[int, ...] = ()


Table = tuple[Rule, ...]


@dataclass
class Translation:
    """State dict under other names.

    Attributes:
        tensors: The new state dict.
        transformed: New name to what happened to its values, where something did.
        dropped: Old names that are left out on purpose.
        unknown: Old names that no rule explains.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    transformed: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def same(*templates: str) -> Table:
    """Rules for tensors that are the same on both sides."""
    return tuple(Rule(template, template) for template in templates)


def under(ours: str, theirs: str, table: Table) -> Table:
    """The table with a prefix on either side."""

    def join(prefix: str, name: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(name, tuple):
            return tuple(prefix + part for part in name)
        return None if name is None else prefix + name

    return tuple(
        rule._replace(ours=join(ours, rule.ours), theirs=join(theirs, rule.theirs))
        for rule in table
    )


def to_theirs(tensors: Mapping[str, Tensor], table: Table, last: int = 0) -> Translation:
    """Our state dict under their names.

    Args:
        tensors: Our state dict.
        table: Rules, the first that matches wins.
        last: Index of the last stage, for ``{last}``.

    Raises:
        CheckpointError: If two tensors would get one name.
    """
    found, parts = Translation(), {}
    for name, tensor in tensors.items():
        rule, part, values = _find(name, table, "ours", last)
        if rule is None:
            found.unknown.append(name)
        elif rule.theirs is None:
            found.dropped.append(name)
        elif rule.shares:
            target = _fill(rule.theirs, values, last)
            parts.setdefault((target, len(rule.shares)), {})[part] = (name, tensor)
        else:
            _put(found, _fill(rule.theirs, values, last), tensor, rule.op, "to_theirs")
    for (target, number), pieces in parts.items():
        if len(pieces) < number:
            found.unknown += [name for name, _ in pieces.values()]
            continue
        _put(found, target, torch.cat([pieces[k][1] for k in range(number)]), None, "")
        found.transformed[target] = "joined from " + ", ".join(n for n, _ in pieces.values())
    return found


def to_ours(tensors: Mapping[str, Tensor], table: Table, last: int = 0) -> Translation:
    """Their state dict under our names; the inverse of ``to_theirs``.

    Args:
        tensors: Their state dict.
        table: Rules, the first that matches wins.
        last: Index of the last stage, for ``{last}``.

    Raises:
        CheckpointError: If two tensors would get one name, or rows cannot be split.
    """
    found = Translation()
    for name, tensor in tensors.items():
        rule, _, values = _find(name, table, "theirs", last)
        if rule is None:
            found.unknown.append(name)
        elif rule.ours is None:
            found.dropped.append(name)
        elif rule.shares:
            for template, rows in zip(rule.ours, _split(name, tensor, rule.shares), strict=True):
                target = _fill(template, values, last)
                _put(found, target, rows, None, "")
                found.transformed[target] = f"split from {name}"
        else:
            _put(found, _fill(rule.ours, values, last), tensor, rule.op, "to_ours")
    return found


def _put(found: Translation, name: str, tensor: Tensor, op: Op | None, direction: str) -> None:
    if name in found.tensors:
        raise CheckpointError(f"Two tensors of the file are {name}; remove one of them.")
    if op is not None:
        try:
            tensor = getattr(op, direction)(tensor)
        except (RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"Tensor {name} has shape {tuple(tensor.shape)}, which cannot be "
                f"{op.name}; name a file of a known architecture."
            ) from error
        found.transformed[name] = op.name
    found.tensors[name] = tensor


def _split(name: str, tensor: Tensor, shares: tuple[int, ...]) -> tuple[Tensor, ...]:
    if not tensor.ndim or len(tensor) % sum(shares):
        raise CheckpointError(
            f"Tensor {name} of shape {tuple(tensor.shape)} cannot be split into {sum(shares)} "
            "equal parts; name a file of a known architecture."
        )
    unit = len(tensor) // sum(shares)
    return tensor.split([share * unit for share in shares])


def _find(
    name: str, table: Table, side: str, last: int
) -> tuple[Rule | None, int, dict[str, int | str]]:
    """First rule with this name on this side, which of its names it is, and the placeholders."""
    for rule in table:
        templates = getattr(rule, side)
        templates = templates if isinstance(templates, tuple) else (templates,)
        for k, template in enumerate(templates):
            values = None if template is None else _match(template, name, last)
            if values is not None:
                return rule, k, values
    return None, 0, {}


def _match(template: str, name: str, last: int) -> dict[str, int | str] | None:
    pattern, offsets = _compile(template.replace("{last}", str(last)))
    match = pattern.fullmatch(name)
    if match is None:
        return None
    values = {k: int(v) - offsets[k] if k in offsets else v for k, v in match.groupdict().items()}
    return None if any(values[k] < 0 for k in offsets) else values


@lru_cache(maxsize=4096)
def _compile(template: str) -> tuple[re.Pattern[str], dict[str, int]]:
    """Regular expression of a template, and the offsets of its numbers."""
    pattern, offsets, end = "", {}, 0
    for match in PLACEHOLDER.finditer(template):
        name = match["name"]
        pattern += re.escape(template[end : match.start()]) + f"(?P<{name}>{KINDS[name]})"
        if KINDS[name] == KINDS["i"]:
            offsets[name] = int(match["offset"] or 0)
        end = match.end()
    return re.compile(pattern + re.escape(template[end:])), offsets


def _fill(template: str, values: dict[str, int | str], last: int) -> str:
    def value(match: re.Match[str]) -> str:
        found = values[match["name"]]
        return str(found + int(match["offset"] or 0) if isinstance(found, int) else found)

    return PLACEHOLDER.sub(value, template.replace("{last}", str(last)))
