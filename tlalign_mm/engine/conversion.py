"""From a file in one layout to a checkpoint in another, with every tensor accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tlalign_mm.backbones.rebuild import MODULES, rebuild
from tlalign_mm.checkpoints import (
    Checkpoint,
    CheckpointError,
    Report,
    Weights,
    account,
    check_finite,
    read,
    read_weights,
    write_weights,
)
from tlalign_mm.checkpoints.architecture import Architecture
from tlalign_mm.checkpoints.convert import HEADS, resolve_layout, with_fields
from tlalign_mm.checkpoints.keymap import Translation
from tlalign_mm.checkpoints.layouts import DETECTOR, Layout
from tlalign_mm.engine.config_text import backbone_config

SQUARE = ("img_size",)  # fields that may be given as one number


@dataclass(frozen=True)
class Request:
    """What is wanted of a conversion.

    Attributes:
        to: One of ``LAYOUTS``, or ``mm`` for the mm library that has the network.
        layout: Whose names the file has; found where None.
        prefix: What stands before the backbone's names; found where None.
        weights: ``model`` or ``ema`` where the file has both; None takes the average.
        arch: Published name of the architecture, or None.
        fields: Fields of the architecture that tensors do not tell; they win over ``arch``.
        keep_head: Keep a classifier's head, and the rest of a segmentor or detector.
        img_size: Height and width to resize position embeddings for, or None.
        window_size: Side of the windows to resize bias tables for, or None.
        strict: Fail on tensors that nothing explains.
        trust: Run the code that a pickle asks for.
    """

    to: str
    layout: str | None = None
    prefix: str | None = None
    weights: str | None = None
    arch: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    keep_head: bool = True
    img_size: tuple[int, int] | None = None
    window_size: int | None = None
    strict: bool = True
    trust: bool = False


@dataclass(frozen=True)
class Converted:
    """A conversion before it is written.

    Attributes:
        file: What was read.
        source: Its weights under our names.
        weights: The same after resizing.
        layout: Whose names the result has.
        checkpoint: What to write.
        report: What became of every tensor.
        config: The backbone's config in the file, where it holds a whole model with its config.
    """

    file: Checkpoint
    source: Weights
    weights: Weights
    layout: Layout
    checkpoint: Checkpoint
    report: Report
    config: dict[str, Any] | None

    @property
    def is_whole(self) -> bool:
        """Whether the result holds more of a segmentor or detector than its backbone."""
        return any(name in self.checkpoint.tensors for name in self.weights.rest)


def check_target(source: str, target: str, force: bool) -> None:
    """Refuse to write over the source, and over any other file without being told to.

    Raises:
        CheckpointError: If the target is the source, or exists.
    """
    path = Path(target).expanduser()
    if path.exists() and Path(source).expanduser().exists() and path.samefile(source):
        raise CheckpointError(f"{target} is the file to be read; name another one to write.")
    if path.exists() and not force:
        raise CheckpointError(f"{target} exists already; name another file, or pass --force.")


def convert(source: str, request: Request) -> Converted:
    """Read a file and bring it into another layout.

    Args:
        source: Path of the file.
        request: What is wanted.

    Raises:
        CheckpointError: If the file cannot be read, its network or architecture stays unclear, the
            other layout does not have it, or tensors are missing, left over or not finite.
    """
    file = read(source, request.weights, request.trust)
    weights = read_weights(file, source, request.prefix, request.layout)
    config = backbone_config(weights.meta.get("cfg"))
    weights = _settle(weights, request, config or {})
    report = _account(weights, source)
    if request.strict:
        _check(report)
    known = {n: t for n, t in weights.tensors.items() if n not in report.unexpected}
    weights = replace(weights, tensors=known)
    resized = _resize(weights, request, report)
    family = resized.architecture.fields["type"]
    is_detector = any(name.startswith(DETECTOR) for name in weights.rest)
    to = "mmdet" if request.to == "mm" and is_detector else resolve_layout(family, request.to)
    checkpoint, translation = write_weights(resized, to, request.keep_head)
    check_finite(checkpoint.tensors, source)
    _complete(report, resized, checkpoint, translation)
    layout = Layout(family, to)
    return Converted(file, weights, resized, layout, checkpoint, report, config)


def _settle(weights: Weights, request: Request, config: Mapping[str, Any]) -> Weights:
    """Architecture with the user's word, then that of the config beside the weights."""
    family = weights.architecture.fields["type"]
    given = {**_published(family, request.arch), **request.fields}
    sizes = MODULES[family].ARCHITECTURES.values()
    known = weights.architecture.fields.keys() | {key for each in sizes for key in each}
    if unknown := sorted(given.keys() - known):
        raise CheckpointError(
            f"--arch names {', '.join(unknown)}, which a {family} does not have; its fields are "
            f"{', '.join(sorted(known - {'type'}))}."
        )
    weights = with_fields(weights, {key: _plain(key, value) for key, value in given.items()})
    fields, assumed = weights.architecture
    open_fields = {key for key, value in fields.items() if value is None} | {*assumed}
    config = {"img_size": config.get("pretrain_img_size"), **config}  # mmdetection's word for it
    said = {key: _plain(key, config[key]) for key in open_fields if config.get(key) is not None}
    return with_fields(weights, said)


def _published(family: str, arch: str | None) -> dict[str, Any]:
    """Fields of a published architecture."""
    if arch is None:
        return {}
    for name, module in MODULES.items():
        if arch in module.ARCHITECTURES and name == family:
            return dict(module.ARCHITECTURES[arch])
    known = ", ".join(MODULES[family].ARCHITECTURES)
    raise CheckpointError(f"--arch {arch} is no {family}, but the file is; choose one of {known}.")


def _plain(key: str, value: Any) -> Any:
    if key in SQUARE and isinstance(value, int):
        return [value, value]
    return list(value) if isinstance(value, tuple) else value


def _body(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(HEADS)}


def _account(weights: Weights, source: str) -> Report:
    """Compare the file with the network that it should be."""
    body = _body(weights.tensors)
    module = _build(weights.architecture, body)
    shapes = {name: tuple(tensor.shape) for name, tensor in body.items()}
    report = weights.report(source, "Converted")
    return account(report, shapes, module, module.dropped_keys, module.initial_keys)


def _build(architecture: Architecture, names: Mapping[str, Tensor]) -> Any:
    """Our network without values."""
    try:
        return rebuild(architecture.fields, names, "meta")
    except TypeError as error:
        raise CheckpointError(
            f"Fields of the wrong kind for a {architecture.fields['type']} ({error}); correct "
            "--arch."
        ) from error


def _check(report: Report) -> None:
    """Fail where the file is not the whole network, or more than it."""
    if report.unexplained:
        raise CheckpointError(
            f"Checkpoint {report.source} is not a whole network of a known kind: "
            f"{len(report.missing)} tensors are missing {report.missing[:4]} and "
            f"{len(report.unexpected)} unexplained {report.unexpected[:4]}; name the right file, "
            "or pass --no-strict to leave those out."
        )
    odd = [
        f"{name} {theirs} instead of {own}"
        for name, (theirs, own) in report.resized.items()
        if not _is_class_slot(name, theirs, own)
    ]
    if odd:
        raise CheckpointError(
            f"Checkpoint {report.source} has tensors of odd sizes, {'; '.join(odd[:4])}; give the "
            "fields that tensors do not tell by --arch, or name the right file."
        )


def _is_class_slot(name: str, theirs: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Official PVT detectors keep the class token's position without the token."""
    return name.startswith("pos_embed") and theirs == (own[0], own[1] + 1, *own[2:])


def _resize(weights: Weights, request: Request, report: Report) -> Weights:
    """Fit position embeddings and bias tables to other sizes, as our network does on loading."""
    wanted = {"img_size": request.img_size, "window_size": request.window_size}
    wanted = {key: _plain(key, value) for key, value in wanted.items() if value is not None}
    fields = weights.architecture.fields
    report.resized = {}
    if absent := sorted(wanted.keys() - fields.keys()):
        option = absent[0].replace("_", "-")
        raise CheckpointError(
            f"A {fields['type']} has nothing that depends on {absent[0]}; leave --{option} out."
        )
    if not wanted:
        return weights
    body = _body(weights.tensors)
    architecture = Architecture({**fields, **wanted}, weights.architecture.assumed)
    module = _build(architecture, body)
    known = {key: value for key, value in fields.items() if value is not None}
    module.load_state_dict(module.fit(dict(body), known), strict=False, assign=True)
    state = module.state_dict()
    tensors = {name: state.get(name, tensor) for name, tensor in weights.tensors.items()}
    report.resized = {
        name: (tuple(tensor.shape), tuple(tensors[name].shape))
        for name, tensor in weights.tensors.items()
        if tensor.shape != tensors[name].shape
    }
    return replace(weights, tensors=tensors, architecture=architecture)


def _complete(
    report: Report, weights: Weights, checkpoint: Checkpoint, translation: Translation
) -> None:
    """Sort our tensors by what became of them on the way out; each is in one list."""
    written = {id(tensor) for tensor in checkpoint.tensors.values()}
    intact = {name for name, tensor in weights.tensors.items() if id(tensor) in written}
    cut = {name for name in weights.tensors if name.startswith("pos_embed")} - intact
    cut -= report.resized.keys()
    ways_in = {name: how for name, how in report.transformed.items() if name in intact}
    ways_out = {name: "without rows of absent tokens" for name in cut} | translation.transformed
    report.transformed = {**ways_in, **ways_out}
    passed = [name for name in weights.rest if name in checkpoint.tensors]
    changed = report.transformed.keys() | report.resized.keys()
    report.matched = sorted(intact - changed) + passed
    dropped = [n for n in report.dropped if n not in intact and n not in passed]
    report.dropped = [*dict.fromkeys([*dropped, *translation.dropped])]
