"""How labels move where features move; each rule stands next to the feature rule it mirrors.

TL-Align: Token-Label Alignment for Vision Transformers (ICCV 2023,
https://arxiv.org/abs/2210.06455), sections 3.2 and 3.3. Attention itself moves labels inside
``tlalign_mm.layers.attention.attend``, with the very probabilities that the features use.

Means where maps shrink are in ``reduction``, weights that are no probabilities in ``contribution``.
Layouts: token lists are (B, N, K), token maps (B, H, W, K). Rows sum to 1.
"""

import torch
from torch import Tensor


def residual(moved: Tensor, token_labels: Tensor) -> Tensor:
    """Labels after ``x = x + attention(x)``: the mean of both branches, so rows still sum to 1."""
    return (moved + token_labels) / 2


def normalize(moved: Tensor, token_labels: Tensor) -> Tensor:
    """Scale rows to sum 1 after tokens without a label (padding) took part in a sum.

    Args:
        moved: (B, H, W, K) labels whose rows may have lost mass.
        token_labels: (B, H, W, K) the labels before; a row that kept nothing, since its attention
            to all real tokens underflowed, takes their mean, the area label.
    """
    total = moved.sum(dim=-1, keepdim=True)
    area = token_labels.detach().mean(dim=(1, 2), keepdim=True)
    return (moved / total.where(total > 0, 1.0)).where(total > 0, area)


def join(token_labels: Tensor, num_tokens: int = 1) -> Tensor:
    """Labels after class and distillation tokens joined: they start as the mean of the others.

    Args:
        token_labels: (B, N, K)
        num_tokens: Tokens L that joined in front.

    Returns:
        (B, L + N, K)
    """
    mean = token_labels.mean(dim=1, keepdim=True).expand(-1, num_tokens, -1)
    return torch.cat([mean, token_labels], dim=1)


def class_row(moved: Tensor, token_labels: Tensor) -> Tensor:
    """Labels after class attention and its residual: only the class token's row moves.

    Args:
        moved: (B, 1, K) what the class token's attention gathered.
        token_labels: (B, 1 + N, K)
    """
    return torch.cat([residual(moved, token_labels[:, :1]), token_labels[:, 1:]], dim=1)


def pool(token_labels: Tensor) -> Tensor:
    """Labels after global average pooling: the mean over all tokens, (B, ..., K) to (B, K)."""
    return token_labels.flatten(1, -2).mean(dim=1)
