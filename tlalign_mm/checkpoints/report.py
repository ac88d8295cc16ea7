"""Load a state dict into a module and account for every tensor on both sides."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from tlalign_mm.checkpoints.files import CheckpointError


@dataclass
class LoadReport:
    """What became of every tensor of a file and of a module.

    Attributes:
        source: The file, for the message.
        matched: Loaded as they are.
        resized: Loaded after a resize: name to (shape in the file, shape in the module).
        dropped: In the file only, on purpose.
        initial: In the module only, on purpose: left at their initialisation.
        missing: In the module only, unexplained.
        unexpected: In the file only, unexplained.
        coverage: Percent of the module's parameters (numbers, not tensors) that came from the file.
    """

    source: str
    matched: list[str] = field(default_factory=list)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    initial: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    coverage: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"Loaded {self.source}: {len(self.matched)} tensors matched, {len(self.resized)} "
            f"resized, {self.coverage:.2f} % of the parameters",
            *_line("resized", [f"{k} {a} -> {b}" for k, (a, b) in self.resized.items()]),
            *_line("dropped on purpose", self.dropped),
            *_line("left at initialisation", self.initial),
            *_line("missing in the file, unexplained", self.missing),
            *_line("unexpected in the file, unexplained", self.unexpected),
        ]
        return "\n".join(lines)

    def check(self, minimum_coverage: float) -> None:
        """Raise ``CheckpointError`` where something is unexplained or too little was loaded."""
        if self.missing or self.unexpected:
            raise CheckpointError(
                f"Checkpoint {self.source} does not fit the model: {len(self.missing)} tensors are "
                f"missing {self.missing[:4]} and {len(self.unexpected)} unexpected "
                f"{self.unexpected[:4]}; name the right file, or set strict=False in init_cfg."
            )
        if self.coverage < minimum_coverage:
            raise CheckpointError(
                f"Checkpoint {self.source} covers {self.coverage:.1f} % of the parameters, less "
                f"than {minimum_coverage:g} %; name the right file, or set strict=False in "
                "init_cfg."
            )


def _line(title: str, names: list[str], most: int = 8) -> list[str]:
    if not names:
        return []
    more = f", … and {len(names) - most} more" if len(names) > most else ""
    return [f"  {title} ({len(names)}): {', '.join(names[:most])}{more}"]


def load_state(
    module: nn.Module,
    tensors: dict[str, Tensor],
    source: str,
    dropped: Iterable[str] = (),
    initial: Iterable[str] = (),
    strict: bool = True,
    minimum_coverage: float = 50.0,
    fit: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> LoadReport:
    """Load ``tensors`` by name; the module's own load hooks may resize them.

    Args:
        module: Where the tensors go.
        tensors: The file's tensors under the module's names.
        source: The file's name, for messages.
        dropped: Patterns of names that the file may hold in vain.
        initial: Patterns of names that the file need not hold.
        strict: Fail on anything unexplained and on too little coverage.
        minimum_coverage: In percent of the module's parameters.
        fit: Resizes tensors first, where the module's load hooks know too little to do so.

    Raises:
        CheckpointError: If a shape does not fit, or ``strict`` and the report does not pass.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    try:
        missing, unexpected = module.load_state_dict(fit(dict(tensors)), strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"Checkpoint {source} does not fit the model: {reason} Name a file of this "
            "architecture, or change the backbone's fields to the file's."
        ) from error
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    loaded = [name for name in own if name in tensors]
    report = LoadReport(source)
    report.matched = [name for name in loaded if shapes[name] == own[name]]
    report.resized = {n: (shapes[n], own[n]) for n in loaded if shapes[n] != own[n]}
    report.initial, report.missing = _split(missing, initial)
    report.dropped, report.unexpected = _split(unexpected, dropped)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    covered = sum(size for name, size in sizes.items() if name in tensors)
    report.coverage = 100.0 * covered / max(1, sum(sizes.values()))
    if strict:
        report.check(minimum_coverage)
    return report


def _split(names: list[str], patterns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names that a pattern explains, and the rest."""
    explained = [name for name in names if any(re.fullmatch(p, name) for p in patterns)]
    return explained, [name for name in names if name not in explained]
