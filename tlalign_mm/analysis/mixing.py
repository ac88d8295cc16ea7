"""Figures of mixed images: their label maps, and area against aligned ratios."""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from tlalign_mm.analysis.label_maps import record_token_labels
from tlalign_mm.backbones import Backbone
from tlalign_mm.labels import apply_mix, draw_cutmix, token_labels

OWN_TO_PARTNER = "coolwarm"  # blue: all own image, red: all partner


class MixedBatch(NamedTuple):
    """Mixed images and what became of their labels.

    Attributes:
        images: (B, 3, H, W) before mixing.
        partner: (B,) index of each partner.
        mixed: (B, 3, H, W) after mixing.
        maps: Partner's share of each token, (B, H', W'): at the input, then behind each stage.
        area: (B,) partner's share by area.
        aligned: (B,) partner's share in the label that TL-Align trains with.
    """

    images: Tensor
    partner: Tensor
    mixed: Tensor
    maps: list[Tensor]
    area: Tensor
    aligned: Tensor


def mix_and_record(backbone: Backbone, images: Tensor, seed: int = 0, cell: int = 1) -> MixedBatch:
    """CutMix a batch, a box for every image, and follow the labels through the backbone."""
    size = (images.shape[2], images.shape[3])
    generator = torch.Generator().manual_seed(seed)
    params = draw_cutmix(len(images), size, generator, cell=cell, per_sample=True)
    mixed = apply_mix(images, params)
    labels = token_labels(params, backbone.patch_size)
    stages, pooled = record_token_labels(backbone, mixed, labels)
    grid = tuple(-(-side // backbone.patch_size) for side in size)
    maps = [labels.unflatten(1, grid), *stages]
    return MixedBatch(
        images, params.partner, mixed, [m[..., 1] for m in maps], 1 - params.lam, pooled[:, 1]
    )


def plot_label_maps(batch: MixedBatch, rows: list[int], mean: Tensor, std: Tensor) -> Figure:
    """A row an image: image, partner, mixed image, then the label maps from input to last stage."""
    titles = ["image", "partner", "mixed", "token labels\nat the input"]
    titles += [f"after stage {i}" for i in range(1, len(batch.maps))]
    figure, axes = plt.subplots(
        len(rows), len(titles), figsize=(1.55 * len(titles), 1.75 * len(rows)), squeeze=False
    )
    for row, i in zip(axes, rows, strict=True):
        pictures = (batch.images[i], batch.images[batch.partner[i]], batch.mixed[i])
        for axis, picture in zip(row, pictures, strict=False):
            axis.imshow((picture * std + mean).clamp(0, 255).byte().permute(1, 2, 0))
        for axis, labels in zip(row[3:], batch.maps, strict=True):
            axis.imshow(labels[i], cmap=OWN_TO_PARTNER, vmin=0, vmax=1)
        own_area, own_aligned = 1 - batch.area[i].item(), 1 - batch.aligned[i].item()
        row[2].set_xlabel(f"λ area {own_area:.2f}", fontsize=9)
        row[-1].set_xlabel(f"λ aligned {own_aligned:.2f}", fontsize=9)
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.tight_layout()
    return figure


def plot_ratios(axes: Axes, batch: MixedBatch) -> None:
    """Scatter λ by area against λ aligned, with the root mean square of their difference."""
    area, aligned = 1 - batch.area.numpy(), 1 - batch.aligned.numpy()
    rmse = np.sqrt(np.mean((area - aligned) ** 2))
    axes.plot([0, 1], [0, 1], color="gray", lw=1, label="equal")
    axes.scatter(area, aligned, s=8, alpha=0.6, label=f"{len(area)} mixed images, RMSE {rmse:.3f}")
    axes.set(xlabel="λ by area", ylabel="λ aligned", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
