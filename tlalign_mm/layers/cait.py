"""Parts of CaiT with the label stream: talking heads, LayerScale and class attention.

Going deeper with Image Transformers (ICCV 2021, https://arxiv.org/abs/2103.17239). Parameter names
are timm's.

Shape letters: B images, N patch tokens, C channels, h heads, D channels of a head, K label
channels.
"""

from collections.abc import Iterable

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from tlalign_mm.labels import mix_by_weights, stream
from tlalign_mm.layers.attention import ClassAttention
from tlalign_mm.layers.block import Block, run_block


class TalkingHeadAttention(nn.Module):
    """Self-attention whose heads mix their logits before the softmax and their weights after it.

    Section 2 of CaiT, after Talking-Heads Attention (https://arxiv.org/abs/2003.02436). No fused
    kernel mixes heads, so this attention keeps its (N, N) weights. Those are signed and sum to
    anything; labels follow their contribution.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) features and (B, N, K) labels to the same shapes."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, h, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, h, N, D)
        logits = _mix_heads(q * q.shape[-1] ** -0.5 @ k.mT, self.proj_l)  # (B, h, N, N)
        weights = _mix_heads(logits.softmax(dim=-1), self.proj_w)
        if token_labels is not None:
            token_labels = mix_by_weights(weights, token_labels)
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), token_labels


def _mix_heads(x: Tensor, proj: nn.Linear) -> Tensor:
    """(B, h, N, N) through a linear layer over the heads, without moving them to the end."""
    weight = proj.weight.expand(len(x), -1, -1)  # (B, h, h)
    return torch.baddbmm(proj.bias[:, None], weight, x.flatten(2)).view_as(x)


class LayerScaleBlock(Block):
    """The transformer block with a learned scale a channel on both branches.

    Section 2 of CaiT (LayerScale). Scales change no label: they act on channels.

    Args:
        dim: Channels C.
        attn: Maps (x, token_labels) to a pair of the same shapes.
        mlp: Maps x to its own shape, token by token.
        init_values: What all scales start with.
        drop_path: Rate of stochastic depth of both branches.
        norm_eps: Epsilon of both norms.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        mlp: nn.Module,
        init_values: float,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, attn, mlp, drop_path, norm_eps)
        self.gamma_1 = nn.Parameter(torch.full((dim,), init_values))
        self.gamma_2 = nn.Parameter(torch.full((dim,), init_values))

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, N, C) features and (B, N, K) labels to the same shapes."""
        moved, moved_labels = self.attn(self.norm1(x), token_labels)
        x = x + self.drop_path1(self.gamma_1 * moved)
        if token_labels is not None:
            token_labels = stream.residual(moved_labels, token_labels)
        return x + self.drop_path2(self.gamma_2 * self.mlp(self.norm2(x))), token_labels


class ClassAttentionBlock(LayerScaleBlock):
    """Block that updates the class token alone, from itself and all patch tokens.

    Section 3 of CaiT. It has no stochastic depth, like the published blocks. ``class_attention(x)``
    gives the (B, N) attention to the patch tokens of the list that ``forward`` would take.

    Args:
        dim: Channels C.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        init_values: What all scales start with.
        norm_eps: Epsilon of both norms.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float = 1e-5,
        norm_eps: float = 1e-6,
    ) -> None:
        attn = ClassAttention(dim, num_heads, qkv_bias)
        super().__init__(dim, attn, Mlp(dim, int(dim * mlp_ratio)), init_values, norm_eps=norm_eps)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, 1 + N, C) features and (B, 1 + N, K) labels to the same shapes."""
        moved, moved_labels = self.attn(self.norm1(x), token_labels)
        token = x[:, :1] + self.gamma_1 * moved
        if token_labels is not None:
            token_labels = stream.class_row(moved_labels, token_labels)
        token = token + self.gamma_2 * self.mlp(self.norm2(token))
        return torch.cat([token, x[:, 1:]], dim=1), token_labels


def read_class(
    cls_token: Tensor,
    blocks: Iterable[ClassAttentionBlock],
    x: Tensor,
    token_labels: Tensor | None = None,
    class_attention: bool = False,
    with_cp: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Let a class token join the patch tokens, and return what it gathered.

    Args:
        cls_token: (1, 1, C)
        blocks: The class-attention blocks in their order.
        x: (B, N, C) patch tokens.
        token_labels: (B, N, K) their labels, or None; the class token joins with the mean.
        class_attention: Also return the attention of the last block.
        with_cp: Recompute blocks in the backward pass.

    Returns:
        The class token (B, C); its label (B, K) or None; its attention (B, N) to the patch tokens
        in the last block, head mean, or None.
    """
    x = torch.cat([cls_token.to(x.dtype).expand(len(x), -1, -1), x], dim=1)  # (B, 1 + N, C)
    if token_labels is not None:
        token_labels = stream.join(token_labels)
    row, blocks = None, list(blocks)
    for i, block in enumerate(blocks):
        if class_attention and i == len(blocks) - 1:
            row = block.class_attention(x)
        x, token_labels = run_block(block, x, token_labels, with_cp)
    return x[:, 0], None if token_labels is None else token_labels[:, 0], row
