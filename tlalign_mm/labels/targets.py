"""From the two shares of a mixed image to a distribution over classes.

Everything downstream of a label is linear, so carrying two shares (own image, partner) and
expanding them to classes once equals carrying class-sized labels through the whole network.
"""

import torch
from torch import Tensor

from tlalign_mm.labels.mixing import MixParams, token_labels

TOKEN_MASKS = ("nearest", "coverage")


def smoothed_one_hot(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Spread ``smoothing`` evenly over all classes.

    Args:
        labels: (B,) class indices.
        num_classes: Number of classes.
        smoothing: Mass taken from the true class; it keeps its own part of the spread (timm).

    Returns:
        (B, classes) float32, rows sum to 1.
    """
    off = smoothing / num_classes
    target = torch.full((len(labels), num_classes), off, device=labels.device)
    return target.scatter_(1, labels[:, None], 1 - smoothing + off)


def transmix_labels(
    class_attention: Tensor,
    params: MixParams,
    stride: int,
    ratio: float = 0.5,
    token_mask: str = "nearest",
) -> Tensor:
    """Weigh the label by where the class token looks.

    TransMix (CVPR 2022, https://arxiv.org/abs/2111.09833), section 3.2 and 4.1: the share is the
    mean of the area share and the share of class attention on tokens of the own image. The
    published ratio is one half.

    Args:
        class_attention: (B, H', W') non-negative attention of the class token to the last map.
        params: How the images were mixed.
        stride: Pixels between the tokens of that map.
        ratio: Weight of the attention; 0 gives the area label.
        token_mask: ``nearest``: a token belongs to the image of its first pixel (published);
            ``coverage``: to both, by the exact area of each.

    Returns:
        (B, 2) float32, rows sum to 1; the area label where attention sums to (almost) 0.

    Raises:
        ValueError: If ``ratio`` or ``token_mask`` is not one of those, or the attention is of
            another map.
    """
    if not 0 <= ratio <= 1 or token_mask not in TOKEN_MASKS:
        raise ValueError(
            f"TransMix needs 0 <= ratio <= 1 and token_mask of {' or '.join(TOKEN_MASKS)}, but got "
            f"ratio={ratio}, token_mask={token_mask!r}."
        )
    partner = _partner_map(params, stride, token_mask)
    if class_attention.shape != partner.shape:
        raise ValueError(
            f"class_attention has shape {tuple(class_attention.shape)}, but these images have a "
            f"map of {tuple(partner.shape)} at stride={stride}; pass the backbone's stride."
        )
    attention = class_attention.detach().float()
    total = attention.sum(dim=(1, 2))
    seen = total > 1e-6
    own = (attention * (1 - partner)).sum(dim=(1, 2)) / total.where(seen, 1.0)
    lam_attention = own.clamp(max=1).where(seen, params.lam)  # rounding may exceed 1
    lam = (1 - ratio) * params.lam + ratio * lam_attention
    return torch.stack([lam, 1 - lam], dim=-1)


def _partner_map(params: MixParams, stride: int, token_mask: str) -> Tensor:
    """(B, H', W') share of each token that belongs to the partner."""
    nearest = params.mask[:, 0, ::stride, ::stride]
    if token_mask == "nearest":
        return nearest
    return token_labels(params, stride)[..., 1].view(nearest.shape)


def class_targets(mix_labels: Tensor, targets: Tensor, partner: Tensor) -> Tensor:
    """Expand the shares of own image and partner to classes.

    Args:
        mix_labels: (B, 2) shares of the own image and of the partner.
        targets: (B, classes) target of each unmixed image.
        partner: (B,) index of each image's partner.

    Returns:
        (B, classes), rows sum to 1.
    """
    return mix_labels[:, :1] * targets + mix_labels[:, 1:] * targets[partner]
