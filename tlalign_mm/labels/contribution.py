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
        share = weights.float().abs()
        total = share.sum(dim=-1, keepdim=True)  # (B, h, N, 1)
        # shares before labels: a product with weights close to 0 would round to 0
        share = share.div_(total).masked_fill_(total == 0, 1 / weights.shape[-1])
        return share.mean(dim=-3) @ token_labels


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
    weight = kernel.float().abs().sum(dim=(0, 1))  # (kh, kw), C times the mean: shares follow
    present = _neighbours(torch.ones_like(token_labels[:1, ..., :1]), weight) * weight
    total = present.sum(dim=(-2, -1), keepdim=True)  # (1, H, W, 1, 1, 1)
    moved = (_neighbours(token_labels, weight) * (present / total)).sum(dim=(-2, -1))
    return moved.where(total[..., 0, 0] > 0, token_labels)


def _neighbours(x: Tensor, weight: Tensor) -> Tensor:
    """(B, H, W, K, kh, kw) what the kernel reads around each token, 0 outside of the map.

    A convolution would do, but cuDNN's rounds float32 to TF32 by default.
    """
    height, width = weight.shape
    x = F.pad(x, (0, 0, width // 2, width // 2, height // 2, height // 2))
    return x.unfold(1, height, 1).unfold(2, width, 1)
