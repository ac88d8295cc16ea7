"""The one place that decides how attention is computed.

Shape letters: B any leading dimensions, h heads, N queries, M keys, D channels of a head, K label
channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, token_labels: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention that moves labels with the probabilities of the features.

    Labels follow ``mean over heads of softmax(q k^T / sqrt(D) + bias) @ token_labels`` (TL-Align,
    https://arxiv.org/abs/2210.06455, section 3.2), without gradient and in float32. In float32 they
    ride along as extra value columns of the same call, so no (N, M) matrix is kept for them. Lower
    precisions would round the labels, so there they get a call of their own.

    Args:
        q: (B, h, N, D)
        k: (B, h, M, D)
        v: (B, h, M, D)
        bias: Added to the logits, broadcastable to (B, h, N, M).
        token_labels: (B, M, K) float32, or None.

    Returns:
        Features (B, h, N, D) and labels (B, N, K), or None where none came in.
    """
    if token_labels is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias), None
    columns = token_labels.detach().unsqueeze(-3).expand(*v.shape[:-1], -1)  # (B, h, M, K)
    if v.dtype == torch.float32:
        out = F.scaled_dot_product_attention(q, k, torch.cat([v, columns], -1), attn_mask=bias)
        out, moved = out.split([v.shape[-1], columns.shape[-1]], dim=-1)
        return out, moved.detach().mean(dim=-3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out, _move_labels(q, k, columns, bias)


@torch.no_grad()
def _move_labels(q: Tensor, k: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        bias = None if bias is None else bias.float()
        moved = F.scaled_dot_product_attention(q.float(), k.float(), columns, attn_mask=bias)
    return moved.mean(dim=-3)
