"""Image mixing: draw the parameters once, apply them to images and to labels.

The split of the random draw from its application follows kornia's mix family; the box itself is
CutMix (Yun et al., ICCV 2019, https://arxiv.org/abs/1905.04899, section 3).
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class MixParams(NamedTuple):
    """What one draw decided; everything else follows from it.

    Attributes:
        partner: (B,) index of the image that each image is mixed with.
        mask: (B, 1, H, W) float32, the partner's share of each pixel: 1 inside a pasted box, 0
            outside, all 0 for an image that stays unmixed.
    """

    partner: Tensor
    mask: Tensor

    @property
    def lam(self) -> Tensor:
        """(B,) share of the own image, counted from what was really pasted."""
        return 1 - self.mask.mean(dim=(1, 2, 3))


def draw_cutmix(
    batch_size: int,
    size: tuple[int, int],
    generator: torch.Generator,
    alpha: float = 1.0,
    prob: float = 1.0,
    cell: int = 1,
    per_sample: bool = False,
) -> MixParams:
    """Draw one box a batch, or one a sample.

    The partner is the batch flipped, as in both papers' code; the middle image of an odd batch
    would be its own partner and stays unmixed, and so does an image whose box came out empty.

    Args:
        batch_size: Number of images B.
        size: Height and width of the images in pixels.
        generator: The only source of randomness (CPU).
        alpha: Both parameters of the Beta distribution of the nominal ratio.
        prob: Probability that a batch (or a sample) is mixed at all.
        cell: Side in pixels of the cells that boxes are aligned to; the patch size gives token
            labels of 0 and 1 only (TL-Align's code), 1 gives pixel boxes (TransMix's code).
        per_sample: Draw a box for every sample.

    Raises:
        ValueError: If ``alpha`` or ``cell`` is not positive or ``prob`` is not in [0, 1].
    """
    if alpha <= 0 or cell < 1 or not 0 <= prob <= 1:
        raise ValueError(
            f"CutMix needs alpha > 0, cell >= 1 and 0 <= prob <= 1, but got alpha={alpha}, "
            f"cell={cell}, prob={prob}."
        )
    rows = batch_size if per_sample else 1
    grid = tuple(-(-side // cell) for side in size)
    # torch has no Beta that takes a generator; numpy's is seeded from ours, so one state rules both
    seed = torch.randint(2**63 - 1, (1,), generator=generator).item()
    nominal = torch.from_numpy(np.random.default_rng(seed).beta(alpha, alpha, rows))  # (rows,)
    mixed = torch.rand(rows, generator=generator) < prob
    inside = [  # rows of the box, then columns: (rows, grid side)
        _draw_interval(side, nominal, generator) & mixed[:, None] for side in grid
    ]
    mask = inside[0][:, None, :, None] & inside[1][:, None, None, :]  # (rows, 1, grid h, grid w)
    mask = mask.repeat_interleave(cell, 2).repeat_interleave(cell, 3)[..., : size[0], : size[1]]
    return _pair_flipped(batch_size, mask.float())


def _draw_interval(side: int, nominal: Tensor, generator: torch.Generator) -> Tensor:
    """(rows, side) bool, true inside an interval of length ``side * sqrt(1 - nominal)``."""
    length = (side * (1 - nominal).sqrt()).long()  # (rows,)
    center = torch.randint(side, (len(nominal),), generator=generator)
    start = center - length // 2
    position = torch.arange(side)
    return (position >= start[:, None]) & (position < (start + length)[:, None])


def _pair_flipped(batch_size: int, mask: Tensor) -> MixParams:
    own = torch.arange(batch_size)
    partner = own.flip(0)
    unpaired = (partner == own)[:, None, None, None]
    return MixParams(partner, mask.expand(batch_size, -1, -1, -1).masked_fill(unpaired, 0.0))


def apply_mix(images: Tensor, params: MixParams) -> Tensor:
    """Paste each partner into its image.

    Args:
        images: (B, C, H, W) floating point.
        params: What ``draw_*`` returned, on the images' device.
    """
    return torch.lerp(images, images[params.partner], params.mask.to(images.dtype))


def token_labels(params: MixParams, patch_size: int) -> Tensor:
    """Give every patch token the share of its patch that each image covers.

    A patch that hangs over the edge of the image counts the pixels that exist.

    Returns:
        (B, N, 2) float32 in row-major order of the ceil(H / P) x ceil(W / P) grid; rows sum to 1.
        TL-Align (https://arxiv.org/abs/2210.06455), section 3.2, for boxes aligned to patches.
    """
    partner = F.avg_pool2d(
        params.mask, patch_size, ceil_mode=True, count_include_pad=False
    )  # (B, 1, H/P, W/P)
    partner = partner.flatten(1)  # (B, N)
    return torch.stack([1 - partner, partner], dim=-1)


def area_labels(params: MixParams) -> Tensor:
    """(B, 2) the label that plain CutMix uses: the shares of the image's area."""
    return torch.stack([params.lam, 1 - params.lam], dim=-1)
