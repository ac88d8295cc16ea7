"""From the two shares of a mixed image to a distribution over classes.

Everything downstream of a label is linear, so carrying two shares (own image, partner) and
expanding them to classes once equals carrying class-sized labels through the whole network.
"""

import torch
from torch import Tensor


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
