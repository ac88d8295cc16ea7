"""Largest differences between our backbones and their references, with the same weights.

Weights are drawn so that every parameter matters, images are mixed, and labels are compared with a
replay on the reference by hooks. Differences are absolute; features are of order 1 behind a norm.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tlalign_mm.backbones import Backbone
from tlalign_mm.labels import draw_cutmix, token_labels
from tlalign_mm.proof.replay import LabelReplay, StockPVTReplay
from tlalign_mm.proof.stock import build_pair
from tlalign_mm.proof.twins import TWINS, build_ours, build_timm, copy_weights, randomize

DENSE = {  # arch to the image sizes that padding, shifted windows or interpolation depend on
    "deit-small": [(224, 224), (232, 331)],
    "swin-tiny": [(224, 224), (229, 331)],
    "swin-small": [(224, 224)],
    "pvt-tiny": [(224, 224), (256, 320)],
    "pvt-small": [(224, 224)],
    "pvt-medium": [(224, 224)],
    "pvt-large": [(224, 224)],
}


class Difference(NamedTuple):
    """A line of the table.

    Attributes:
        arch: Our name of the architecture.
        reference: Whose model it is compared with.
        size: Height and width of the images.
        parameters: In millions, classifier aside.
        features: Largest difference of pooled features or of the maps.
        labels: Largest difference of labels, None where the reference cannot say.
        attention: Largest difference of the class attention, None where there is none.
        shift: Largest difference of the aligned label from the area label: how much there is to
            get wrong.
    """

    arch: str
    reference: str
    size: str
    parameters: float
    features: float
    labels: float | None
    attention: float | None
    shift: float | None

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max(d for d in (self.features, self.labels, self.attention) if d is not None)


def comparisons() -> dict[str, Callable[[], Difference]]:
    """Every comparison by a name of its own."""
    found = {f"{arch} timm": lambda arch=arch: compare_with_timm(arch) for arch in TWINS}
    for arch, sizes in DENSE.items():
        for size in sizes:
            name = f"{arch} dense {size[0]}x{size[1]}"
            found[name] = lambda arch=arch, size=size: compare_dense(arch, size)
    return found


def mixed_labels(batch: int, size: tuple[int, int], patch_size: int) -> tuple[Tensor, Tensor]:
    """Token labels (B, N, 2) of pixel boxes, and the area labels' first column (B,)."""
    params = draw_cutmix(batch, size, torch.Generator().manual_seed(1), per_sample=True)
    return token_labels(params, patch_size), params.lam


@torch.no_grad()
def compare_with_timm(arch: str, batch: int = 2, size: int = 224) -> Difference:
    """Pooled features, labels and class attention against timm's model."""
    theirs = randomize(build_timm(TWINS[arch], size)).eval()
    ours = build_ours(TWINS[arch], size).eval()
    copy_weights(theirs, ours)
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))
    labels, area = mixed_labels(batch, (size, size), ours.patch_size)
    pooled = ours.forward_features(images, labels, ours.has_class_token)
    with LabelReplay(theirs) as replay:
        replay.start(labels, (size // ours.patch_size,) * 2)
        features = theirs(images)
        expected = replay.label(ours.has_class_token)
    own = pooled.features if pooled.distilled is None else (pooled.features + pooled.distilled) / 2
    attention = None
    if pooled.class_attention is not None:
        attention = largest(pooled.class_attention.flatten(1), replay.class_row)
    return Difference(
        arch,
        "timm",
        f"{size}x{size}",
        millions(ours),
        largest(own, features),
        largest(pooled.token_labels, expected),
        attention,
        largest(pooled.token_labels[:, 0], area),
    )


@torch.no_grad()
def compare_dense(arch: str, size: tuple[int, int], batch: int = 2) -> Difference:
    """Maps against the stock dense backbone; PVT's labels against a replay on it."""
    stock, ours = build_pair(arch, 224)
    randomize(ours)
    stock, ours = build_pair(arch, 224, weights=ours.state_dict())
    stock.eval()
    ours.eval()
    images = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(2))
    labels = shift = None
    if arch.startswith("pvt"):
        token, area = mixed_labels(batch, size, ours.patch_size)
        token = token.unflatten(1, tuple(side // ours.patch_size for side in size))
        kept: list[Tensor] = []
        hook = last_block(ours).register_forward_hook(lambda _m, _i, out: kept.append(out[1]))
        maps, _ = ours._run(images, token)
        hook.remove()
        with StockPVTReplay(stock, ours.architecture["sr_ratios"]) as replay:
            replay.start(token)
            expected = stock(images)
        labels = largest(kept[0], replay.labels)
        shift = largest(kept[0].mean((1, 2))[:, 0], area)
    else:
        maps, expected = ours(images), stock(images)
    return Difference(
        arch,
        type(stock).__module__.split(".")[0],
        f"{size[0]}x{size[1]}",
        millions(ours),
        max(
            largest(a, b) / max(1.0, b.square().mean().sqrt().item())
            for a, b in zip(maps, expected, strict=True)
        ),
        labels,
        None,
        shift,
    )


def last_block(backbone: Backbone) -> nn.Module:
    """The last block of the last stage of a PVT."""
    return backbone.stage_modules()[-1][0][-1]


def largest(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; shapes must agree."""
    if one.shape != other.shape:
        raise ValueError(f"shapes {tuple(one.shape)} and {tuple(other.shape)} differ.")
    return (one - other).abs().max().item()


def millions(module: nn.Module) -> float:
    """Parameters in millions."""
    return sum(p.numel() for p in module.parameters()) / 1e6
