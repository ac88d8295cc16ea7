"""Learned position embeddings on a grid of another size.

Shape letters: L prefix tokens and N patch tokens of an embedding, C channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_pos_embed(
    pos_embed: Tensor, source: tuple[int, int], target: tuple[int, int], mode: str = "bicubic"
) -> Tensor:
    """Interpolate as DeiT's fine-tuning code and mmsegmentation do: no antialiasing, no corners.

    Args:
        pos_embed: (1, N, C) in row-major order, without prefix tokens.
        source: Height and width of its grid.
        target: Height and width wanted.
        mode: ``bicubic`` or ``bilinear``.

    Returns:
        (1, target N, C), the input itself where the grids are equal.
    """
    if source == target:
        return pos_embed
    grid = pos_embed.float().transpose(1, 2).unflatten(2, source)  # (1, C, H, W)
    grid = F.interpolate(grid, target, mode=mode, align_corners=False)
    return grid.flatten(2).transpose(1, 2).to(pos_embed.dtype)


def fit_pos_embed(
    pos_embed: Tensor,
    prefix: int,
    target_prefix: int,
    target: tuple[int, int],
    source: tuple[int, int] | None = None,
    mode: str = "bicubic",
) -> Tensor:
    """Fit a checkpoint's embedding to a model: other grid, fewer prefix tokens.

    Args:
        pos_embed: (1, L + N, C)
        prefix: Prefix tokens L of the checkpoint.
        target_prefix: Prefix tokens of the model, at most L; the first ones are kept.
        target: Grid of the model.
        source: Grid of the checkpoint; a square is assumed where nothing says it.
        mode: ``bicubic`` or ``bilinear``.

    Raises:
        ValueError: If the tokens do not fill the source grid, or are no square.
    """
    patches = pos_embed.shape[1] - prefix
    if source is None and patches == target[0] * target[1]:
        source = target
    if source is None:
        source = (math.isqrt(patches),) * 2
    if source[0] * source[1] != patches:
        raise ValueError(
            f"The checkpoint's position embedding holds {patches} patches, which do not fill a "
            f"grid of {source[0]}x{source[1]}; name the checkpoint's img_size (height, width)."
        )
    tokens = resize_pos_embed(pos_embed[:, prefix:], source, target, mode)
    return torch.cat([pos_embed[:, :target_prefix], tokens], dim=1)
