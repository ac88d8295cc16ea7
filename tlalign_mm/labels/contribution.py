"""Labels under weights that are no probabilities: signed, or not summing to 1.

TL-Align (ICCV 2023, https://arxiv.org/abs/2210.06455), section 3.1, defines the contribution of a
token to another as ``|w_ij| / sum over k of |w_ik|``; for attention this is the attention itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def mix_by_weights(weights: Tensor, token_labels: Tensor) -> Tensor:
    """Labels moved by matrices of signed weights (talking heads).

    Args:
        weights: (B, h, N, M) what multiplies the values, of any sign and any sum.
        token_labels: (B, M, K), rows sum to 1.

    Returns:
        (B, N, K) float32, head mean; a row without any weight takes the mean of all labels.
    """
    with torch.autocast(weights.device.type, enabled=False):
        contribution = weights.float().abs()
        total = contribution.sum(dim=-1, keepdim=True)  # (B, h, N, 1)
        moved = contribution @ token_labels.unsqueeze(-3) / total.where(total > 0, 1.0)
    mean = token_labels.mean(dim=-2)[..., None, None, :]  # (B, 1, 1, K)
    return moved.where(total > 0, mean).mean(dim=-3)


@torch.no_grad()
def mix_by_kernel(kernel: Tensor, token_labels: Tensor) -> Tensor:
    """Labels moved by a depthwise convolution of stride 1 that keeps the map's size.

    Every channel has a kernel of its own, labels have none: they use the mean of ``|kernel|``.
    Padding carries no label and does not count.

    Args:
        kernel: (C, 1, kh, kw) with odd sides.
        token_labels: (B, H, W, K), rows sum to 1.

    Returns:
        (B, H, W, K) float32; a token without any weight keeps its label.
    """
    with torch.autocast(kernel.device.type, enabled=False):
        weight = kernel.float().abs().mean(dim=0, keepdim=True)  # (1, 1, kh, kw)
        padding = (kernel.shape[2] // 2, kernel.shape[3] // 2)
        channels = token_labels.permute(0, 3, 1, 2)  # (B, K, H, W)
        moved = F.conv2d(channels.reshape(-1, 1, *channels.shape[2:]), weight, padding=padding)
        moved = moved.view_as(channels)
        total = F.conv2d(torch.ones_like(channels[:1, :1]), weight, padding=padding)
    moved = (moved / total.where(total > 0, 1.0)).where(total > 0, channels)
    return moved.permute(0, 2, 3, 1)
