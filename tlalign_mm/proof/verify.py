"""The proof of a conversion: the source model and the target model make the same of an image.

Each model is one of the library whose names its tensors have, as far as there is one, and gets the
tensors as they are; this package's tables take no part. What the libraries compute differently with
the same weights is not hidden: the comparison goes where they agree, and the rest is said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tlalign_mm.checkpoints import Checkpoint, CheckpointError, Weights, backbone_part
from tlalign_mm.checkpoints.convert import HEADS, PREFIX
from tlalign_mm.proof.anatomy import Size, image_sizes, strides
from tlalign_mm.proof.builders import Part, build_side, common_form
from tlalign_mm.proof.sides import Side

TOLERANCE = 1e-5


class Difference(NamedTuple):
    """The largest absolute difference of one thing.

    Attributes:
        what: ``stage i``, ``norm i``, ``pooled``, ``distilled`` or ``logits``.
        size: Height and width of the image.
        value: In units of about a standard deviation.
    """

    what: str
    size: Size
    value: float

    def __str__(self) -> str:
        return f"{figure(self.value)} ({self.what}, {self.size[0]}x{self.size[1]})"


def figure(value: float) -> str:
    """A difference in two digits."""
    return f"{value:.1e}" if value else "0"


@dataclass
class Verification:
    """What a comparison of two models found.

    Attributes:
        source: Whose class the source model is, and which.
        target: The same of the target model.
        differences: Of everything that both models have, at every size.
        own_rules: What a library does otherwise where it runs by itself, with the largest
            difference under that rule at the last size.
        notes: What was left out, and what a reader should know.
        tolerance: The largest difference that is none.
    """

    source: str
    target: str
    differences: list[Difference]
    own_rules: dict[str, Difference] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tolerance: float = TOLERANCE

    @property
    def largest(self) -> Difference:
        """The largest of the differences; one that is no number counts as larger than any."""
        return max(self.differences, key=lambda d: float("inf") if d.value != d.value else d.value)

    @property
    def passes(self) -> bool:
        """Whether the two are the same network."""
        return self.largest.value <= self.tolerance

    def __str__(self) -> str:
        verdict = "the same network" if self.passes else "NOT the same network"
        lines = [f"Verified {self.source} against {self.target}: {verdict}"]
        for size in dict.fromkeys(difference.size for difference in self.differences):
            most: dict[str, float] = {}
            for what, _, value in (d for d in self.differences if d.size == size):
                most[what.split()[0]] = max(value, most.get(what.split()[0], 0.0))
            found = ", ".join(f"{what} {figure(value)}" for what, value in most.items())
            lines.append(f"  {size[0]}x{size[1]}: {found}")
        lines.append(f"  largest difference {self.largest}, tolerance {self.tolerance:g}")
        rules = self.own_rules.items()
        lines += [
            f"  as the library runs by itself, where {rule}: {largest}" for rule, largest in rules
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def check(self) -> None:
        """Raise ``CheckpointError`` if the two are not the same network."""
        if not self.passes:
            raise CheckpointError(
                f"{self.source} and {self.target} differ by {self.largest}, more than "
                f"{self.tolerance:g}; check --from and --arch, and do not use the result."
            )


def verify(
    file: Checkpoint,
    weights: Weights,
    converted: Checkpoint,
    sizes: Sequence[Size] | None = None,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Build the models of a file before and after its conversion, and compare them.

    Args:
        file: The source as it was read.
        weights: What ``read_weights`` made of it; of it the layout, prefix and sizes count.
        converted: What ``write_weights`` made of that.
        sizes: Heights and widths of the images; None takes two at which all libraries agree.
        tolerance: The largest difference that is none.

    Raises:
        CheckpointError: If the tensors of either do not fill the model of their library, or windows
            were resized.
    """
    source, target = source_part(file, weights), target_part(converted)
    sizes = sizes or comparable_sizes(source, target)
    form = common_form(source, target)
    return compare(build_side(source, form), build_side(target, form), sizes, tolerance)


def source_part(file: Checkpoint, weights: Weights) -> Part:
    """The backbone of a file as it is there, with its classifier."""
    found = backbone_part(file.tensors, weights.prefix)
    heads = {name: t for name, t in found.rest.items() if name.startswith(HEADS)}
    return Part(weights.layout.name, weights.architecture.fields, {**found.tensors, **heads})


def target_part(converted: Checkpoint) -> Part:
    """The same of what ``write_weights`` gives."""
    prefix = PREFIX if any(name.startswith(PREFIX) for name in converted.tensors) else ""
    found = backbone_part(converted.tensors, prefix)
    heads = {name: t for name, t in found.rest.items() if name.startswith(HEADS)}
    return Part(converted.layout, converted.architecture, {**found.tensors, **heads})


def comparable_sizes(source: Part, target: Part) -> list[Size]:
    """Where the two may be compared: resized positions are the same at their new size alone."""
    fields = (source.architecture, target.architecture)
    windows, sides = ([sizes.get(key) for sizes in fields] for key in ("window_size", "img_size"))
    if windows[0] != windows[1]:
        raise CheckpointError(
            f"Windows of {windows[0]} tokens became windows of {windows[1]}, a network that has "
            "nothing to be compared with; verify the conversion without --window-size."
        )
    if sides[0] is not None and list(sides[0]) != list(sides[1]):
        return [tuple(sides[1])]
    return image_sizes(target.architecture)


def compare(
    source: Side, target: Side, sizes: Sequence[Size], tolerance: float = TOLERANCE
) -> Verification:
    """Run both models on the same random images.

    Raises:
        CheckpointError: If the two have nothing in common.
    """
    found = [d for size in sizes for d in _differences(size, source, target)]
    if not found:
        raise CheckpointError(f"{source.title} and {target.title} share nothing to be compared.")
    own_rules = {}
    for side, other in ((source, target), (target, source)):
        if side.own_rule and side.who != other.who:
            by_itself = _differences(sizes[-1], side, other, own=True)
            own_rules[side.own_rule] = max(by_itself, key=lambda d: d.value)
    notes = [*_notes(source, "file"), *_notes(target, "result"), *_windows(source, target, sizes)]
    return Verification(source.title, target.title, found, own_rules, notes, tolerance)


def _differences(size: Size, one: Side, other: Side, own: bool = False) -> Iterator[Difference]:
    """Of everything that both have; ``own`` runs the first by its own rule."""
    mine, theirs = one.outputs(size, own), other.outputs(size)
    for what in mine:
        if what in theirs:
            yield Difference(what, size, _largest(mine[what], theirs[what]))


def _largest(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        raise CheckpointError(
            f"The models' outputs are {tuple(one.shape)} and {tuple(other.shape)}; check --arch."
        )
    return (one - other).abs().max().item()


def _notes(side: Side, which: str) -> Iterator[str]:
    yield from side.notes
    if side.unused:
        yield f"left out of the {which}: {_some(side.unused)}"
    if side.initial:
        yield f"not in the {which}, so not compared: {_some(side.initial)}"


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _windows(source: Side, target: Side, sizes: Sequence[Size]) -> Iterator[str]:
    """Swin shifts and pads by different rules at maps that windows do not tile twice over."""
    window = source.architecture.get("window_size")
    if window is None or source.who == target.who:
        return
    every = strides(source.architecture)
    maps = [-(-side // stride) for size in sizes for side in size for stride in every]
    rules = (
        "the libraries pad and shift differently where a map is no multiple of the window or fits "
        "in one"
    )
    if all(side % window == 0 and side > window for side in maps):
        yield f"{rules}: compared where neither is so"
    else:
        yield f"{rules}, as here: a difference need not be the conversion's"
