"""Labels where a convolution or a pooling makes fewer tokens of a map: means over what it reads.

TL-Align (ICCV 2023, https://arxiv.org/abs/2210.06455), section 3.3, does so for patch merging;
spatial reduction and overlapping patch embeddings (PVT) follow the same rule, which is ours.

Layout: token maps (B, H, W, K), rows sum to 1; padding carries no label and does not count.
"""

import torch.nn.functional as F
from torch import Tensor


def reduce_by_window(
    token_labels: Tensor, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False
) -> Tensor:
    """Mean over the receptive field of a convolution.

    Args:
        token_labels: (B, H, W, K)
        kernel: Side of the kernel.
        stride: Step of the kernel.
        padding: Zeros on every side of the map.
        ceil_mode: Whether windows that hang over the bottom and right edges count as well.

    Returns:
        (B, H', W', K) on the map of the convolution's output.
    """
    channels = token_labels.permute(0, 3, 1, 2)  # (B, K, H, W)
    reduced = F.avg_pool2d(
        channels, kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=False
    )
    return reduced.permute(0, 2, 3, 1)


def merge_2x2(token_labels: Tensor) -> Tensor:
    """Labels after Swin's patch merging: the mean of the 2x2 tokens that exist.

    Args:
        token_labels: (B, H, W, K), odd sides allowed.

    Returns:
        (B, ceil(H / 2), ceil(W / 2), K)
    """
    return reduce_by_window(token_labels, kernel=2, stride=2, ceil_mode=True)


def reduce_to(token_labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Adaptive average pooling (linear PVTv2): (B, H, W, K) to (B, *size, K)."""
    return F.adaptive_avg_pool2d(token_labels.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)
