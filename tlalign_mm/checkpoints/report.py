"""What became of every tensor, on both sides, when weights were loaded or converted."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.files import check_finite

MOST_NAMES = 8  # of a list in the log
CHOSEN = {  # of a file that holds both
    "ema": "  weights: the moving average (ema); the file holds the raw ones (model) too",
    "model": "  weights: the raw ones (model); the file holds their moving average (ema) too",
}


@dataclass
class Report:
    """What became of every tensor of a file and of a network.

    Attributes:
        source: The file, for the message.
        action: ``Loaded`` or ``Converted``.
        layout: Whose names the file had, or None.
        weights: ``model`` or ``ema``, which were taken of a file that has both, or None.
        matched: Taken as they are.
        transformed: Name to what was done to the values (reordered, joined, split, reshaped).
        resized: Name to (shape in the file, shape in the network).
        dropped: In the file only, on purpose.
        initial: In the network only, on purpose: left at their initialisation.
        missing: In the network only, unexplained.
        unexpected: In the file only, unexplained.
        coverage: Percent of the network's parameters (numbers, not tensors) that came from the
            file.
    """

    source: str
    action: str = "Loaded"
    layout: str | None = None
    weights: str | None = None
    matched: list[str] = field(default_factory=list)
    transformed: dict[str, str] = field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    coverage: float = 0.0

    @property
    def unexplained(self) -> list[str]:
        """Names on either side that nothing accounts for."""
        return self.missing + self.unexpected

    def __str__(self) -> str:
        origin = f" ({self.layout})" if self.layout else ""
        lines = [
            f"{self.action} {self.source}{origin}: {len(self.matched)} tensors matched, "
            f"{len(self.transformed)} transformed, {len(self.resized)} resized, "
            f"{len(self.dropped)} dropped on purpose, {len(self.initial)} left at initialisation, "
            f"{len(self.unexplained)} unexplained; {self.coverage:.2f} % of the parameters",
            *([CHOSEN[self.weights]] if self.weights else []),
            *_line("transformed", [f"{k} {how}" for k, how in self.transformed.items()]),
            *_line("resized", [f"{k} {a} -> {b}" for k, (a, b) in self.resized.items()]),
            *_line("dropped on purpose", self.dropped),
            *_line("left at initialisation", self.initial),
            *_line("missing in the file, unexplained", self.missing),
            *_line("unexpected in the file, unexplained", self.unexpected),
        ]
        return "\n".join(lines)

    def check(self, minimum_coverage: float) -> None:
        """Raise ``CheckpointError`` where something is unexplained or too little was found."""
        if self.unexplained:
            raise CheckpointError(
                f"Checkpoint {self.source} does not fit the network: {len(self.missing)} tensors "
                f"are missing {self.missing[:4]} and {len(self.unexpected)} unexpected "
                f"{self.unexpected[:4]}; name the right file, or set strict=False in init_cfg."
            )
        if self.coverage < minimum_coverage:
            raise CheckpointError(
                f"Checkpoint {self.source} covers {self.coverage:.1f} % of the parameters, less "
                f"than {minimum_coverage:g} %; name the right file, or set strict=False in "
                "init_cfg."
            )


def _line(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", … and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return [f"  {title} ({len(names)}): {', '.join(names[:MOST_NAMES])}{more}"]


def account(
    report: Report,
    theirs: Mapping[str, tuple[int, ...]],
    module: nn.Module,
    dropped: Iterable[str] = (),
    initial: Iterable[str] = (),
) -> Report:
    """Sort every tensor of a file and of a module into the report's lists.

    Args:
        report: ``transformed``, ``dropped`` and ``unexpected`` may hold names already.
        theirs: Shapes in the file, under the module's names.
        module: The network; its values are not read.
        dropped: Patterns of names that the file may hold in vain.
        initial: Patterns of names that the file need not hold.
    """
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    both = [name for name in own if name in theirs]
    report.resized = {n: (theirs[n], own[n]) for n in both if theirs[n] != own[n]}
    report.transformed = {n: h for n, h in report.transformed.items() if n in own}
    changed = report.resized.keys() | report.transformed.keys()
    report.matched = [name for name in both if name not in changed]
    report.initial, report.missing = _split([n for n in own if n not in theirs], initial)
    in_vain, unexpected = _split([n for n in theirs if n not in own], dropped)
    report.dropped = [*report.dropped, *in_vain]
    report.unexpected = [*report.unexpected, *unexpected]
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    covered = sum(size for name, size in sizes.items() if name in theirs)
    report.coverage = 100.0 * covered / max(1, sum(sizes.values()))
    return report


def load_state(
    module: nn.Module,
    tensors: dict[str, Tensor],
    report: Report,
    dropped: Iterable[str] = (),
    initial: Iterable[str] = (),
    strict: bool = True,
    minimum_coverage: float = 50.0,
    fit: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Report:
    """Load ``tensors`` by name; the module's own load hooks may resize them.

    Args:
        module: Where the tensors go.
        tensors: The file's tensors under the module's names.
        report: Names the file; what reading it found is kept.
        dropped: Patterns of names that the file may hold in vain.
        initial: Patterns of names that the file need not hold.
        strict: Fail on anything unexplained and on too little coverage.
        minimum_coverage: In percent of the module's parameters.
        fit: Resizes tensors first, where the module's load hooks know too little to do so.

    Raises:
        CheckpointError: If a shape does not fit, a value is not finite, or ``strict`` and the
            report does not pass; the module is left as it was.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    account(report, shapes, module, dropped, initial)
    if strict:
        report.check(minimum_coverage)
    check_finite(tensors, report.source)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        module.load_state_dict(fit(dict(tensors)), strict=False)
    except (RuntimeError, ValueError) as error:
        module.load_state_dict(before)  # torch has copied what fits by then
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"Checkpoint {report.source} does not fit the network: {reason} Name a file of this "
            "architecture, or change the backbone's fields to the file's."
        ) from error
    return report


def _split(names: list[str], patterns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that a pattern explains, and the rest."""
    explained = [name for name in names if any(re.fullmatch(p, name) for p in patterns)]
    return explained, [name for name in names if name not in explained]
