"""Any layout to ours and ours to any layout; the file's own words first, then its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tlalign_mm.checkpoints.architecture import Architecture, infer
from tlalign_mm.checkpoints.content import Checkpoint
from tlalign_mm.checkpoints.errors import CheckpointError
from tlalign_mm.checkpoints.keymap import Translation, to_ours, to_theirs
from tlalign_mm.checkpoints.layouts import Layout, choose
from tlalign_mm.checkpoints.prefixes import backbone_part
from tlalign_mm.checkpoints.report import Report
from tlalign_mm.checkpoints.tables import TABLES, after_leaving, before_leaving

HEADS = ("head.", "head_dist.")  # of classifiers; they live beside the backbone in the mm libraries
MM = ("mmseg", "mmdet")
PREFIX = "backbone."
CA_SWIN = "CASwinTransformer"


@dataclass
class Weights:
    """State dict under our names, and where it came from.

    Attributes:
        layout: Whose names the file had.
        tensors: The backbone's tensors, a classifier's ``head.*`` with them.
        architecture: Sizes of the network.
        rest: Tensors of a whole segmentor or detector outside its backbone.
        translation: What became of the file's tensors on the way.
        prefix: What stood before the backbone's names.
        meta: The file's plain metadata.
        chosen: Which of the file's weights these are, where it has raw and averaged ones.
    """

    layout: Layout
    tensors: dict[str, Tensor]
    architecture: Architecture
    rest: dict[str, Tensor]
    translation: Translation
    prefix: str
    meta: dict[str, Any]
    chosen: str | None = None

    def report(self, source: str, action: str = "Loaded") -> Report:
        """The start of a report: what became of the file's tensors up to here."""
        return Report(
            source,
            action,
            str(self.layout),
            self.chosen,
            transformed=dict(self.translation.transformed),
            dropped=[*self.translation.dropped, *self.rest],
            unexpected=list(self.translation.unknown),
        )


def read_weights(
    file: Checkpoint, source: str, prefix: str | None = None, layout: str | None = None
) -> Weights:
    """Bring a file's backbone under our names.

    Args:
        file: What was read; tensors on the meta device will do to see what is there.
        source: The file's name, for messages.
        prefix: What stands before the backbone's names; found where None.
        layout: Whose names these are, one of ``LAYOUTS``; found where None.

    Raises:
        CheckpointError: If the network or the layout is unknown or not clear, or sizes are odd.
    """
    part = backbone_part(file.tensors, prefix, source)
    body, rest = dict(part.tensors), {}
    for name, tensor in part.rest.items():
        (body if name.startswith(HEADS) else rest)[name] = tensor
    found = choose(body, rest, source, layout or file.layout)
    if (file.architecture or {}).get("type") == CA_SWIN and found.family == "SwinTransformer":
        found = found._replace(family=CA_SWIN)  # a dense one has no class block to be told by
    table = _table(found, source)
    try:
        translation = to_ours(body, table, _last_stage(body))
        architecture = _merge(infer(found.family, translation.tensors), file.architecture)
    except CheckpointError as error:
        raise CheckpointError(f"Checkpoint {source}: {error}") from error
    return Weights(
        found,
        translation.tensors,
        architecture,
        rest,
        translation,
        part.prefix,
        dict(file.meta),
        file.weights,
    )


def write_weights(
    weights: Weights, to: str, keep_head: bool = True
) -> tuple[Checkpoint, Translation]:
    """Bring tensors under our names into another layout.

    Args:
        weights: What ``read_weights`` found.
        to: One of ``LAYOUTS``, or ``mm`` for the mm library that has the network.
        keep_head: Keep a classifier's head, and what a whole segmentor or detector has beside its
            backbone.

    Returns:
        What to write, and what became of our tensors.

    Raises:
        CheckpointError: If the layout does not have this network, or a tensor has no name there.
    """
    family = weights.architecture.fields["type"]
    target = Layout(family, resolve_layout(family, to))
    _check_exists(weights.architecture, target)
    tensors = before_leaving(family, target.name, weights.tensors)
    if not keep_head:
        tensors = {name: t for name, t in tensors.items() if not name.startswith(HEADS)}
    translation = to_theirs(tensors, _table(target, to), _last_stage(tensors))
    if translation.unknown:
        raise CheckpointError(
            f"{', '.join(translation.unknown[:4])} have no name in the layout of {target}; convert "
            "a file without them."
        )
    found = after_leaving(family, target.name, translation.tensors)
    rest = weights.rest if keep_head and target.name in (*MM, "tlalign_mm") else {}
    rest = {name: t for name, t in rest.items() if not name.startswith("data_preprocessor.")}
    translation.dropped += [name for name in weights.rest if name not in rest]
    if rest or _needs_prefix(target, to):
        found = {(n if n.startswith(HEADS) else PREFIX + n): t for n, t in found.items()}
    meta = {key: value for key, value in weights.meta.items() if key != "cfg"}
    fields = _fields_there(weights.architecture.fields, target)
    return Checkpoint(found | rest, target.name, fields, meta=meta), translation


def resolve_layout(family: str, to: str) -> str:
    """``mm`` by the mm library that has the network; any other layout as it is.

    Raises:
        CheckpointError: If neither mmsegmentation nor mmdetection has it.
    """
    if to != "mm":
        return to
    for name in MM:
        if name in TABLES[family]:
            return name
    raise CheckpointError(f"Neither mmsegmentation nor mmdetection has a backbone like {family}.")


def _table(layout: Layout, source: str) -> tuple:
    tables = TABLES[layout.family]
    if layout.name not in tables:
        raise CheckpointError(
            f"{source}: there is no {layout.family} in the layout {layout.name}; it exists in "
            f"{', '.join(tables)}."
        )
    return tables[layout.name]


def _needs_prefix(layout: Layout, to: str) -> bool:
    """Mmpretrain's files are whole classifiers, and mmdetection's Swin reads no bare names."""
    is_swin = "Swin" in layout.family
    return layout.name == "mmpretrain" or is_swin and (layout.name == "mmdet" or to == "mm")


def _last_stage(names: Mapping[str, Any]) -> int:
    stages = [name.split(".")[1] for name in names if name.startswith(("layers.", "stages."))]
    return max((int(stage) for stage in stages if stage.isdigit()), default=0)


def _merge(
    found: Architecture,
    said: dict[str, Any] | None,
    where: str = "its metadata",
    mend: str = "the file was altered, make it again",
) -> Architecture:
    """What is said of a file, checked against its tensors."""
    said = {key: value for key, value in (said or {}).items() if key != "type"}
    differing = [
        f"{key} is {said[key]} by {where} and {value} by its tensors"
        for key, value in found.known.items()
        if key in said and value is not None and said[key] != value
    ]
    if differing:
        raise CheckpointError(f"{'; '.join(differing)}: {mend}.")
    assumed = tuple(key for key in found.assumed if key not in said)
    return Architecture({**found.fields, **said}, assumed)


def _check_exists(architecture: Architecture, target: Layout) -> None:
    if target == ("PyramidVisionTransformerV2", "mmdet") and architecture.fields["linear"]:
        raise CheckpointError(
            "mmdetection's PVT v2 has no linear variant; use tlalign_mm.PyramidVisionTransformerV2 "
            "in its configs, which reads this file as it is."
        )


def _fields_there(fields: dict[str, Any], target: Layout) -> dict[str, Any]:
    """Architecture of what is left: the layout may lack a token, or the class-attention block."""
    if target == ("VisionTransformer", "mmseg"):
        return {**fields, "distilled": False}
    if target.family != CA_SWIN or target.name == "tlalign_mm":
        return fields
    depths = [*fields["depths"][:-1], fields["depths"][-1] - 1]
    return {**fields, "type": "SwinTransformer", "depths": depths}


def with_fields(weights: Weights, fields: dict[str, Any]) -> Weights:
    """The same with fields that the user gives, for what shapes do not tell.

    Raises:
        CheckpointError: If a field contradicts the tensors.
    """
    merged = _merge(weights.architecture, fields, "--arch", "leave that field out")
    return replace(weights, architecture=merged)
