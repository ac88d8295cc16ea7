"""Every conversion there and back, and the models of both sides beside each other.

Weights are random and such that every tensor matters. A round trip goes by the names of the tensors
alone: what the converted checkpoint says of itself is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlalign_mm.backbones import Backbone
from tlalign_mm.checkpoints import Checkpoint, Weights, read_weights, write_weights
from tlalign_mm.checkpoints.keymap import Translation
from tlalign_mm.checkpoints.tables import TABLES, before_leaving
from tlalign_mm.proof.builders import Form, Part, build_side, common_form
from tlalign_mm.proof.sides import Side
from tlalign_mm.proof.twins import TWINS, our_config, randomize
from tlalign_mm.proof.verify import comparable_sizes, compare, target_part
from tlalign_mm.registry import MODELS

NUM_CLASSES = 10
DENSE = ("mmseg", "mmdet")
DENSE_FAMILIES = ("VisionTransformer", "SwinTransformer", "PyramidVisionTransformer")
PVT = {f"pvt-{size}": "PyramidVisionTransformer" for size in ("tiny", "small", "medium", "large")}


class Conversion(NamedTuple):
    """A line of the table.

    Attributes:
        arch: Our name of the architecture.
        form: ``pretraining`` (with a classifier) or ``dense``.
        layout: Where the weights go and come back from.
        tensors: Number of tensors there.
        transformed: Number of them with other values than ours.
        dropped: What the layout has no place for.
        bit_equal: Whether all that came back is what went, bit for bit.
        features: Largest difference of the model that is built there, or None.
        compared_with: Whose model that is, ``–`` where none is installed.
        own_rule: The difference where that library follows a rule of its own, or None.
    """

    arch: str
    form: str
    layout: str
    tensors: int
    transformed: int
    dropped: str
    bit_equal: str
    features: float | None
    compared_with: str
    own_rule: float | None

    def passes(self, tolerance: float) -> bool:
        """Whether nothing is lost on the way and the models make the same of an image."""
        agrees = self.features is None or self.features <= tolerance
        return agrees and self.bit_equal == "yes"


def conversions() -> dict[str, Callable[[], list[Conversion]]]:
    """The conversions of every architecture, by its name and form."""
    found = {}
    for arch in (*TWINS, *PVT):
        cfg = _config(arch)
        found[f"{arch} pretraining"] = lambda arch=arch, cfg=cfg: [*convert_all(arch, cfg)]
        if cfg["type"].removeprefix("tlalign_mm.") in DENSE_FAMILIES:
            dense = {key: value for key, value in cfg.items() if key != "out_indices"}
            found[f"{arch} dense"] = lambda arch=arch, cfg=dense: [*convert_all(arch, cfg)]
    return found


def _config(arch: str) -> dict[str, Any]:
    if arch in TWINS:
        return our_config(TWINS[arch])
    return {"type": f"tlalign_mm.{PVT[arch]}", "arch": arch, "out_indices": ()}


def convert_all(arch: str, cfg: Mapping[str, Any]) -> Iterator[Conversion]:
    """Convert a network to every layout that has it.

    Args:
        arch: Its name.
        cfg: Config of our backbone; a dense one goes to the dense mm libraries alone.
    """
    ours = randomize(MODELS.build({**cfg, "drop_path_rate": 0.0}))
    is_dense = bool(ours.out_indices)
    weights = _weights(ours)
    source = Part("tlalign_mm", ours.architecture, weights.tensors)
    del ours

    @cache
    def side(form: Form) -> Side:
        return build_side(source, form)

    for layout in TABLES[source.family]:
        if _exists(source, layout) and (not is_dense or layout in DENSE):
            converted, translation = write_weights(weights, layout)
            target = target_part(converted)
            yield Conversion(
                arch,
                "dense" if is_dense else "pretraining",
                layout,
                len(converted.tensors),
                len(translation.transformed),
                ", ".join(_dropped(weights, translation, layout)),
                "yes" if is_back(weights, converted, translation) else "no",
                *_compare(source, target, side),
            )


def _weights(ours: Backbone) -> Weights:
    """Our tensors, with random classifiers where there are some."""
    tensors = dict(ours.state_dict())
    heads = [] if ours.out_indices else ["head", "head_dist"][: 1 + ("dist_token" in tensors)]
    generator = torch.Generator().manual_seed(3)
    for head in heads:
        dim = ours.num_features[-1]
        shapes = {"weight": (NUM_CLASSES, dim), "bias": (NUM_CLASSES,)}
        for name, shape in shapes.items():
            tensors[f"{head}.{name}"] = torch.randn(shape, generator=generator) / dim**0.5
    file = Checkpoint(tensors, "tlalign_mm", ours.architecture)
    return read_weights(file, "our backbone")


def _exists(source: Part, layout: str) -> bool:
    has_linear = source.architecture.get("linear", False)
    return layout != "tlalign_mm" and not (has_linear and layout == "mmdet")


def _dropped(weights: Weights, translation: Translation, layout: str) -> Iterator[str]:
    """Modules and tokens that the layout has no place for."""
    yield from dict.fromkeys(
        name.removesuffix(".weight") for name in translation.dropped if not name.endswith(".bias")
    )
    before = before_leaving(weights.layout.family, layout, weights.tensors)
    yield from (f"a row of {n}" for n, t in before.items() if t.shape != weights.tensors[n].shape)


def is_back(weights: Weights, converted: Checkpoint, translation: Translation) -> bool:
    """Whether a converted checkpoint gives our tensors back, bit for bit.

    Args:
        weights: Ours.
        converted: The same in another layout.
        translation: What became of ours; of what is dropped nothing comes back.
    """
    sent = before_leaving(weights.layout.family, converted.layout, weights.tensors)
    sent = {name: tensor for name, tensor in sent.items() if name not in translation.dropped}
    back = read_weights(Checkpoint(converted.tensors), "the way back", layout=converted.layout)
    found: dict[str, Tensor] = write_weights(back, "tlalign_mm")[0].tensors
    return sent.keys() == found.keys() and all(
        tensor.dtype == found[name].dtype and torch.equal(tensor, found[name])
        for name, tensor in sent.items()
    )


def _compare(
    source: Part, target: Part, side: Callable[[Form], Side]
) -> tuple[float | None, str, float | None]:
    """Largest difference, whose model it is, and the difference by a rule of its own."""
    if target.who == "ours":
        return None, "–", None
    form = common_form(source, target)
    sizes = comparable_sizes(source, target)
    found = compare(side(form), build_side(target, form), sizes)
    own = [difference.value for difference in found.own_rules.values()]
    return found.largest.value, target.who, max(own, default=None)
