"""The one place that decides how attention is computed.

Shape letters: B images, or with a bias any leading dimensions (images and windows), h heads, N
queries, M keys, D channels of a head, K label channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlalign_mm.layers.label_columns import LabelColumns


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, token_labels: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention that moves labels with the probabilities of the features.

    Labels follow ``mean over heads of softmax(q k^T / sqrt(D) + bias) @ token_labels`` (TL-Align,
    https://arxiv.org/abs/2210.06455, section 3.2), without gradient and in float32. How that is
    computed is a matter of speed alone; ``benchmarks/README.md`` holds the measured comparison:

    - with a bias on the CPU (windows: short, and no fused kernel there differentiates a bias) the
      probabilities are computed once and serve both;
    - in float32 labels are extra value columns of one fused call;
    - lower precisions would round the labels, so there they get a call of their own.

    Args:
        q: (B, h, N, D)
        k: (B, h, M, D)
        v: (B, h, M, D)
        bias: Added to the logits, broadcastable to (B, h, N, M).
        token_labels: (B, M, K) float32, or None.

    Returns:
        Features (B, h, N, D) and labels (B, N, K), or None where none came in.
    """
    if bias is not None and q.device.type == "cpu":
        return _explicit(q, k, v, bias, token_labels)
    if token_labels is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias), None
    token_labels = token_labels.detach()
    is_float32 = v.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type)
    if is_float32 and q.device.type == "cpu":
        return LabelColumns.apply(q, k, v, token_labels)
    if is_float32:
        return _columns(q, k, v, bias, token_labels)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out, _labels_alone(q, k, bias, token_labels)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, token_labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    logits = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).add_(bias)
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)  # (B, h, N, M)
    out = probabilities.to(v.dtype) @ v
    if token_labels is None:
        return out, None
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return out, probabilities.mean(dim=-3) @ token_labels


def _columns(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, token_labels: Tensor
) -> tuple[Tensor, Tensor]:
    dim, num_labels = v.shape[-1], token_labels.shape[-1]
    room = (0, -(dim + num_labels) % 8)  # fused kernels want whole groups of channels
    columns = F.pad(token_labels, room).unsqueeze(-3).expand(*v.shape[:-1], -1)
    out = F.scaled_dot_product_attention(q, k, torch.cat([v, columns], -1), attn_mask=bias)
    out, moved, _ = out.split([dim, num_labels, room[1]], dim=-1)
    return out, moved.detach().mean(dim=-3)


@torch.no_grad()
def _labels_alone(q: Tensor, k: Tensor, bias: Tensor | None, token_labels: Tensor) -> Tensor:
    dim, num_labels = q.shape[-1], token_labels.shape[-1]
    width = max(dim, -(-num_labels // 8) * 8)  # kernels for the CPU want one width for all
    columns = F.pad(token_labels, (0, width - num_labels))
    columns = columns.unsqueeze(-3).expand(*k.shape[:-1], -1)  # (B, h, M, width)
    room = (0, width - dim)
    with torch.autocast(q.device.type, enabled=False):
        bias = None if bias is None else bias.float()
        moved = F.scaled_dot_product_attention(
            F.pad(q.float(), room), F.pad(k.float(), room), columns, bias, scale=dim**-0.5
        )
    return moved[..., :num_labels].mean(dim=-3)


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
