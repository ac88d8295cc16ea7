"""What stands before the names of a backbone's tensors in a whole model."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from tlalign_mm.checkpoints.errors import CheckpointError

X = TypeVar("X")

# Segments of names that wrappers of a module put there, wherever they wrap.
TRANSPARENT = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
CONTAINERS = ("backbone", "encoder", "model", "module", "student", "teacher", "ema", "model_ema")


class Part(NamedTuple):
    """The backbone of a whole model.

    Attributes:
        prefix: What its names began with.
        tensors: Its tensors, without the prefix.
        rest: All other tensors, with their whole names.
    """

    prefix: str
    tensors: dict[str, Any]
    rest: dict[str, Any]


def strip_transparent(name: str) -> str:
    """A tensor's name without ``module.``, ``_orig_mod.`` and the like, wherever they stand."""
    *segments, last = name.split(".")
    return ".".join([s for s in segments if s not in TRANSPARENT] + [last])


def backbone_part(
    tensors: Mapping[str, X], prefix: str | None = None, source: str = "the checkpoint"
) -> Part:
    """Find the backbone in the tensors of a whole model.

    Args:
        tensors: Name to tensor, or to anything else.
        prefix: What the backbone's names begin with, with or without the last dot; None to follow
            ``backbone.``, ``encoder.``, ``model.`` and the like from the front.
        source: The file, for messages.

    Raises:
        CheckpointError: If no name has the prefix, or two parts could be the backbone.
    """
    if prefix is None:
        prefix = _find_prefix(tensors, source)
    elif prefix:
        prefix = prefix.removesuffix(".") + "."
        if not any(name.startswith(prefix) for name in tensors):
            prefix = strip_transparent(prefix)
    inside = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if not inside:
        seen = sorted({name.split(".")[0] + "." * ("." in name) for name in tensors})
        raise CheckpointError(
            f"No tensor of {source} has the prefix {prefix!r}; its names begin with "
            f"{', '.join(seen[:12])}{', …' if len(seen) > 12 else ''}; set prefix to one of these."
        )
    return Part(prefix, inside, {n: t for n, t in tensors.items() if not n.startswith(prefix)})


def _find_prefix(names: Iterable[str], source: str) -> str:
    prefix, names = "", list(names)
    while True:
        inside = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        first = {name.split(".")[0] for name in inside if "." in name}
        found = [container for container in CONTAINERS if container in first]
        if found[:2] == ["backbone", "encoder"]:  # the encoder of a detector such as DETR
            found = found[:1] + found[2:]
        if not found:
            return prefix
        if len(found) > 1:
            both = " and ".join(f"{prefix}{container}." for container in found[:2])
            raise CheckpointError(
                f"Both {both} in {source} could be the backbone; choose one with prefix=."
            )
        prefix += f"{found[0]}."
