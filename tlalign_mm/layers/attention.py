"""The one place that decides how attention is computed.

Shape letters: B any leading dimensions, h heads, N queries, M keys, D channels of a head, K label
channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


@torch.no_grad()
def attention_row(q: Tensor, k: Tensor) -> Tensor:
    """Head mean of the probabilities of a single query, in float32.

    TransMix (CVPR 2022, https://arxiv.org/abs/2111.09833), section 3.2, needs this row of the
    attention matrix alone.

    Args:
        q: (B, h, 1, D)
        k: (B, h, M, D)

    Returns:
        (B, M), rows sum to 1.
    """
    with torch.autocast(q.device.type, enabled=False):
        q = q.float() * q.shape[-1] ** -0.5
        logits = (q * k.float()).sum(-1)  # (B, h, M)
        return logits.softmax(dim=-1).mean(dim=-2)


class Attention(nn.Module):
    """Multi-head self-attention over a list of tokens (ViT)."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) features and (B, N, K) labels to the same shapes."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, h, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, h, N, D)
        out, token_labels = attend(q, k, v, token_labels=token_labels)
        return self.proj(out.transpose(1, 2).flatten(2)), token_labels

    @torch.no_grad()
    def class_attention(self, x: Tensor) -> Tensor:
        """(B, N) attention of the first token, which only needs its own query."""
        weight, bias = self.qkv.weight.chunk(3), self._bias_chunks()
        q = nn.functional.linear(x[:, :1], weight[0], bias[0])
        k = nn.functional.linear(x, weight[1], bias[1])
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k))
        return attention_row(q, k)

    def _bias_chunks(self) -> tuple[Tensor | None, ...]:
        return (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)


class ClassAttention(nn.Module):
    """Attention whose only query is the class token, the first of the list (CaiT).

    Going deeper with Image Transformers (ICCV 2021, https://arxiv.org/abs/2103.17239), section 3.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) features and (B, N, K) labels to those of the class token.

        Returns:
            Features (B, 1, C) and labels (B, 1, K) or None.
        """
        q, k, v = self._heads(self.q(x[:, :1])), self._heads(self.k(x)), self._heads(self.v(x))
        out, token_labels = attend(q, k, v, token_labels=token_labels)
        return self.proj(out.transpose(1, 2).flatten(2)), token_labels

    @torch.no_grad()
    def class_attention(self, x: Tensor) -> Tensor:
        """(B, N) attention of the class token to all tokens, itself included."""
        return attention_row(self._heads(self.q(x[:, :1])), self._heads(self.k(x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, h, N, D)
