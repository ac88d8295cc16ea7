"""How labels move where features move; each rule stands next to the feature rule it mirrors.

TL-Align: Token-Label Alignment for Vision Transformers (ICCV 2023,
https://arxiv.org/abs/2210.06455), sections 3.2 and 3.3. Attention itself moves labels inside
``tlalign_mm.layers.attention.attend``, with the very probabilities that the features use.

Layouts: token lists are (B, N, K), token maps (B, H, W, K). Rows sum to 1.
"""

import torch.nn.functional as F
from torch import Tensor


def residual(moved: Tensor, token_labels: Tensor) -> Tensor:
    """Labels after ``x = x + attention(x)``: the mean of both branches, so rows still sum to 1."""
    return (moved + token_labels) / 2


def normalize(token_labels: Tensor) -> Tensor:
    """Scale rows to sum 1 after tokens without a label (padding) took part in a sum.

    A row that saw nothing but padding stays 0; such rows belong to padding and are cropped.
    """
    total = token_labels.sum(dim=-1, keepdim=True)
    return token_labels / total.where(total > 0, 1.0)


def merge_2x2(token_labels: Tensor) -> Tensor:
    """Labels after Swin's patch merging: the mean of the 2x2 tokens that exist.

    Args:
        token_labels: (B, H, W, K), odd sides allowed.

    Returns:
        (B, ceil(H / 2), ceil(W / 2), K)
    """
    channels_first = token_labels.permute(0, 3, 1, 2)  # (B, K, H, W)
    merged = F.avg_pool2d(channels_first, 2, ceil_mode=True, count_include_pad=False)
    return merged.permute(0, 2, 3, 1)


def pool(token_labels: Tensor) -> Tensor:
    """Labels after global average pooling: the mean over all tokens, (B, ..., K) to (B, K)."""
    return token_labels.flatten(1, -2).mean(dim=1)
