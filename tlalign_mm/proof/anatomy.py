"""Where the same parts are in the models of different libraries."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from tlalign_mm.backbones.pvt_v2 import PATCH_SIZE

Size = tuple[int, int]
MM = ("mmseg", "mmdet", "mmpretrain")
USUAL_SIDE = 224  # of the images where positions do not tell


class Anatomy(NamedTuple):
    """Names of modules.

    Attributes:
        stages: The last block of every stage; every block of a network without stages.
        norms: Norms that are no part of a block, by the stage that they follow.
        final: The one of them that a classifier stands on, or None.
    """

    stages: list[str]
    norms: dict[int, str]
    final: str | None


def anatomy(who: str, family: str, model: nn.Module) -> Anatomy:
    """Find the parts of a backbone.

    Args:
        who: An mm library, or ``timm`` or ``ours``.
        family: Our class for the network.
        model: The backbone.
    """
    found = PARTS[family](who in MM, model)
    modules = {name for name, _ in model.named_modules()}
    norms = {i: name for i, name in found.norms.items() if name in modules}
    return Anatomy(found.stages, norms, found.final if found.final in modules else None)


def strides(architecture: Mapping[str, Any]) -> list[int]:
    """Pixels between the tokens of every stage."""
    patch = architecture.get("patch_size", PATCH_SIZE)
    if "depths" in architecture:
        return [patch * 2**i for i in range(len(architecture["depths"]))]
    return [patch] * architecture["depth"]


def image_sizes(architecture: Mapping[str, Any]) -> list[Size]:
    """Two sizes of images at which no library pads or shifts otherwise than another.

    The first is the one that positions are made for, where there are any. Swin's maps are larger
    than a window and multiples of it in every stage; no map leaves a rest to a spatial reduction.

    Args:
        architecture: Our class as ``type``, and the sizes.
    """
    every = strides(architecture)
    if "window_size" in architecture:
        unit = every[-1] * architecture["window_size"]
        return [(2 * unit, 2 * unit), (2 * unit, 3 * unit)]
    reductions = architecture.get("sr_ratios", [1] * len(every))
    unit = math.lcm(*(s * r for s, r in zip(every, reductions, strict=True)))
    height, width = architecture.get("img_size", (USUAL_SIDE, USUAL_SIDE))
    height, width = (-(-side // unit) * unit for side in (height, width))
    return [(height, width), (height + unit, width + 2 * unit)]


def _vit(is_mm: bool, model: nn.Module) -> Anatomy:
    return _blocks(model, "layers", "ln1") if is_mm else _blocks(model, "blocks", "norm")


def _cait(is_mm: bool, model: nn.Module) -> Anatomy:
    return _blocks(model, "blocks", "norm")


def _xcit(is_mm: bool, model: nn.Module) -> Anatomy:
    return _blocks(model, "xca_layers" if is_mm else "blocks", "norm")


def _blocks(model: nn.Module, blocks: str, norm: str) -> Anatomy:
    number = len(model.get_submodule(blocks))
    return Anatomy([f"{blocks}.{i}" for i in range(number)], {number - 1: norm}, norm)


def _swin(is_mm: bool, model: nn.Module) -> Anatomy:
    """Dense models have a norm behind every stage; mmpretrain's classifier stands on the last."""
    part = "stages" if is_mm else "layers"
    stages = _last(model, [f"{part}.{i}.blocks" for i in range(len(model.get_submodule(part)))])
    norms = {i: f"norm{i}" for i in range(len(stages))}
    last = len(stages) - 1
    if hasattr(model, "norm"):
        return Anatomy(stages, {last: "norm"}, "norm")
    is_classifier = type(model).__module__.startswith("mmpretrain.")
    return Anatomy(stages, norms, norms[last] if is_classifier else None)


def _pvt(is_mm: bool, model: nn.Module) -> Anatomy:
    if is_mm:
        return Anatomy(_last(model, [f"layers.{i}.1" for i in range(len(model.layers))]), {}, None)
    number = sum(name.startswith("patch_embed") for name, _ in model.named_children())
    stages = _last(model, [f"block{i + 1}" for i in range(number)])
    return Anatomy(stages, {number - 1: "norm"}, "norm")


def _pvt_v2(is_mm: bool, model: nn.Module) -> Anatomy:
    number = len(model.layers if is_mm else model.stages)
    blocks, norm = (
        ("layers.{}.1", "layers.{}.2") if is_mm else ("stages.{}.blocks", "stages.{}.norm")
    )
    norms = {i: norm.format(i) for i in range(number)}
    stages = _last(model, [blocks.format(i) for i in range(number)])
    return Anatomy(stages, norms, norms[number - 1])


def _last(model: nn.Module, lists: Sequence[str]) -> list[str]:
    """The last module of each list of modules."""
    return [f"{name}.{len(model.get_submodule(name)) - 1}" for name in lists]


PARTS: dict[str, Callable[[bool, nn.Module], Anatomy]] = {
    "VisionTransformer": _vit,
    "SwinTransformer": _swin,
    "CASwinTransformer": _swin,
    "PyramidVisionTransformer": _pvt,
    "PyramidVisionTransformerV2": _pvt_v2,
    "CaiT": _cait,
    "XCiT": _xcit,
}
