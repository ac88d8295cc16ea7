"""From what a file holds to weights: wrappers, averaged weights, prefixes.

mmengine's EMAHook swaps the two on saving: its ``state_dict`` is the average and its
``ema_state_dict`` holds the weights that training goes on with [mmengine/hooks/ema_hook.py].
"""

import argparse
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.prefixes import strip_transparent
from tlalign_mm.checkpoints.torch_files import OddTensor
from tlalign_mm.checkpoints.unpickle import Foreign

ROLES = {
    "model": ("state_dict", "model", "module", "student", "backbone"),
    "ema": ("model_ema", "state_dict_ema", "ema_state_dict", "teacher", "ema"),
}
WRAPPERS = ROLES["model"] + ROLES["ema"]
DEPTH = 4  # of wrappers in wrappers
COUNTERS = frozenset({"steps", "n_averaged"})


class Checkpoint(NamedTuple):
    """What a file holds.

    Attributes:
        tensors: Name to tensor, on the CPU.
        layout: Who named the tensors (``tlalign_mm``), or None where the file does not say.
        architecture: The backbone's ``architecture``, or None where the file does not say.
        weights: ``model`` or ``ema``, where the file holds both and one was chosen.
        beside: What else the file holds: key to a word about it.
        meta: What the file says about itself, in plain values.
    """

    tensors: dict[str, Tensor]
    layout: str | None = None
    architecture: dict | None = None
    weights: str | None = None
    beside: Mapping[str, str] = MappingProxyType({})
    meta: Mapping[str, Any] = MappingProxyType({})


def find_weights(content: object, weights: str | None, source: str) -> Checkpoint:
    """Find the state dict in what a file holds, and choose where there are two.

    Args:
        content: As it was unpickled.
        weights: ``model``, ``ema`` or None for the average where there is one.
        source: The file, for messages.

    Raises:
        CheckpointError: If it holds no weights, or not those that are asked for.
    """
    if weights not in (None, "model", "ema"):
        raise CheckpointError(f"Weights {weights!r} of {source} are unknown; ask for model or ema.")
    found = _state_dicts(content)
    if not found:
        raise CheckpointError(
            f"Checkpoint {source} holds no state dict ({_summary(content)}); name the right file."
        )
    chosen = weights or ("ema" if "ema" in found else "model")
    if chosen not in found:
        ((other, (key, _)),) = found.items()
        place = f" under {key!r}" if key else ""
        raise CheckpointError(
            f"Checkpoint {source} holds no {chosen} weights, only {other} weights{place}; leave "
            "--weights out."
        )
    key, state = found[chosen]
    meta = _mapping(_mapping(content).get("meta"))
    layout, architecture = meta.get("layout"), meta.get("architecture")
    ours = isinstance(layout, str) and isinstance(architecture, dict | type(None))
    return Checkpoint(
        tensors=_tensors(state, source),
        layout=layout if ours else None,
        architecture=plain(architecture) if ours and architecture else None,
        weights=chosen if len(found) == 2 else None,
        beside=_beside(content, key, found),
        meta={k: v for k, v in plain(meta).items() if k not in ("layout", "architecture")},
    )


def from_metadata(
    tensors: dict[str, Tensor], metadata: dict[str, str], weights: str | None, source: str
) -> Checkpoint:
    """What a safetensors file holds.

    Args:
        tensors: As in the file.
        metadata: The text in its header.
        weights: As for ``find_weights``.
        source: The file, for messages.

    Raises:
        CheckpointError: As ``find_weights``.
    """
    architecture, meta = _json(metadata.get("architecture")), _json(metadata.get("meta"))
    return find_weights(tensors, weights, source)._replace(
        layout=metadata.get("layout"), architecture=architecture or None, meta=meta
    )


def _json(text: str | None) -> dict[str, Any]:
    """A JSON object; what is none is a word of somebody else's."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def module_instead(content: object) -> str | None:
    """Class of a whole module that a file holds where a state dict belongs, or None."""
    places = (content, *(_mapping(content).get(key) for key in WRAPPERS))
    found = (v for v in places if isinstance(v, Foreign) and "_modules" in _mapping(v.state))
    return next((module.name for module in found), None)


def _state_dicts(content: object, depth: int = DEPTH) -> dict[str, tuple[str, Mapping]]:
    """``model`` and ``ema``, as far as they are there: the key that holds them, and the weights."""
    if isinstance(content, nn.Module):  # of a file that is trusted
        content = content.state_dict()
    if not isinstance(content, Mapping) or depth == 0:
        return {}
    inside = {}
    for role, keys in ROLES.items():
        for key in reversed(keys):  # the first of them wins
            states = _state_dicts(content.get(key), depth - 1)
            if states:
                inside[role] = (key, states)
    if not inside and any(_is_weight(value) for value in content.values()):
        return {"model": ("", content)}
    if len(inside) == 1:
        ((key, states),) = inside.values()
        if len(states) == 2:  # wrapped together
            return {role: (key, state) for role, (_, state) in states.items()}
    found = {role: (key, _of(states, role)) for role, (key, states) in inside.items()}
    return {"model": found["ema"], "ema": found["model"]} if _is_swapped(content) else found


def _of(states: dict[str, tuple[str, Mapping]], role: str) -> Mapping:
    """The weights of a role, or else the only ones there are."""
    return states[role if role in states else next(iter(states))][1]


def _is_swapped(content: Mapping) -> bool:
    """Whether mmengine's EMAHook wrote the file: its counter lies beside the names."""
    return "state_dict" in content and "steps" in _mapping(content.get("ema_state_dict"))


def _tensors(state: Mapping, source: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, OddTensor):
            raise CheckpointError(
                f"Checkpoint {source} holds {value.kind} at {name}, which is not read; save it as "
                "a plain tensor."
            )
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        if value.layout != torch.strided:
            raise CheckpointError(
                f"Checkpoint {source} holds a sparse tensor at {name}, which is not read; save it "
                "as a plain tensor."
            )
        clear = strip_transparent(name)
        if clear.rsplit(".", 1)[-1] in COUNTERS and value.numel() == 1:
            continue
        if clear in tensors:
            raise CheckpointError(
                f"Checkpoint {source} holds {clear} twice, once as {name}; remove one of them."
            )
        tensors[clear] = value.detach()
    if not tensors:
        raise CheckpointError(f"Checkpoint {source} holds no weights; name the right file.")
    return tensors


def _beside(content: object, key: str, found: dict[str, tuple[str, Mapping]]) -> dict[str, str]:
    roles = {where: role for role, (where, _) in found.items() if where and where != key}
    state = {} if key else {k: v for k, v in _mapping(content).items() if not _is_weight(v)}
    others = {k: v for k, v in _mapping(content).items() if k != key} if key else state
    return {
        str(name): f"{roles[name]} weights" if name in roles else describe(value)
        for name, value in others.items()
    }


def _is_weight(value: object) -> bool:
    return isinstance(value, Tensor | OddTensor)


def describe(value: object) -> str:
    """A word about a value of a file: its class, or the value itself where it is short."""
    if isinstance(value, Foreign):
        return value.name.rsplit(".", 1)[-1]
    if value is None or isinstance(value, bool | int | float | np.generic):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else "str"
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, argparse.Namespace):
        return "Namespace"
    return type(value).__name__


def _summary(content: object) -> str:
    keys = [str(key) for key in _mapping(content)]
    if not keys:
        return f"it is a {describe(content)}"
    more = ", …" if len(keys) > 6 else ""
    return f"it holds {', '.join(keys[:6])}{more}"


def plain(value: object) -> Any:
    """A value in plain Python: dicts, lists, text and numbers; anything else is left out."""
    return _plain(value, 8, {})


def _plain(value: object, depth: int, known: dict[tuple[int, int], Any]) -> Any:
    """``plain`` of what is nested up to ``depth``; ``known`` are those that occurred before."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    place = (id(value), depth)
    if place not in known and depth and isinstance(value, Mapping):
        pairs = {k: _plain(v, depth - 1, known) for k, v in value.items() if isinstance(k, str)}
        known[place] = {k: v for k, v in pairs.items() if v is not None or value[k] is None}
    if place not in known and depth and isinstance(value, list | tuple):
        known[place] = [_plain(v, depth - 1, known) for v in value]
    return known.get(place)
