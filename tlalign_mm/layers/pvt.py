"""Parts of the Pyramid Vision Transformer, both versions, with the label stream.

Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions (ICCV
2021, https://arxiv.org/abs/2102.12122); PVT v2: Improved Baselines with Pyramid Vision Transformer
(CVMJ 2022, https://arxiv.org/abs/2106.13797). Parameter names are the official ones, which timm
kept. Maps are channels-last.

Shape letters: B images, H and W the token map, N tokens, M keys, C channels, K label channels, h
heads, D channels of a head, R the reduction ratio.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tlalign_mm.labels import reduce_by_window, reduce_to, stream
from tlalign_mm.labels.windows import pad_map
from tlalign_mm.layers.attention import attend, attention_row
from tlalign_mm.layers.block import Block, run_block

LINEAR_SIZE = (7, 7)  # map of the keys in linear attention, PVTv2 section 3.2


class SpatialReductionAttention(nn.Module):
    """Multi-head self-attention whose keys and values come from a smaller map.

    A convolution with kernel and stride R makes one key of R x R tokens; like every such
    convolution it leaves out rows and columns that fill no window. A map side below R, which the
    published code cannot process, is padded to one window. The linear variant pools to 7 x 7 keys
    at any size. The papers have no labels: a key's label is the mean over the tokens it reads.

    Args:
        dim: Channels C.
        num_heads: Heads h.
        sr_ratio: Reduction ratio R; without meaning where ``linear`` is set.
        linear: Pool the keys instead (PVTv2-linear).
        qkv_bias: Whether query, key and value have a bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sr_ratio: int = 1,
        linear: bool = False,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.sr_ratio = sr_ratio
        self.linear = linear
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, dim * 2, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        if linear or sr_ratio > 1:
            kernel = 1 if linear else sr_ratio
            self.sr = nn.Conv2d(dim, dim, kernel, kernel)
            self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over all keys.

        Args:
            x: (B, H, W, C), or without reduction also a list (B, N, C).
            token_labels: (B, H, W, K) or (B, N, K), or None.

        Returns:
            Features and labels in the shapes they came in.
        """
        keys, key_labels = self._reduce(x, token_labels)
        k, v = self.kv(keys).chunk(2, dim=-1)  # each (B, M, C)
        q, k, v = self._heads(self.q(x)), self._heads(k), self._heads(v)
        out, moved = attend(q, k, v, token_labels=key_labels)
        out = self.proj(out.transpose(1, 2).reshape(x.shape))
        return out, None if moved is None else moved.reshape(token_labels.shape)

    @torch.no_grad()
    def class_attention(self, x: Tensor) -> Tensor:
        """(B, N) attention of the first token of a list, which only needs its own query."""
        k, _ = self.kv(x).chunk(2, dim=-1)
        return attention_row(self._heads(self.q(x[:, :1])), self._heads(k))

    def _reduce(self, x: Tensor, token_labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What keys and values are made of, (B, M, C) or a map, and its labels (B, M, K)."""
        if self.linear:
            x = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), LINEAR_SIZE)
            x = F.gelu(self.norm(self.sr(x).permute(0, 2, 3, 1)))
            reduced = None if token_labels is None else reduce_to(token_labels, LINEAR_SIZE)
        elif self.sr_ratio > 1:
            x = self.sr(self._pad(x).permute(0, 3, 1, 2))
            x = self.norm(x.permute(0, 2, 3, 1))
            reduced = None if token_labels is None else self._reduce_labels(token_labels)
        else:
            reduced = token_labels
        return x, None if reduced is None else reduced.flatten(1, -2)

    def _reduce_labels(self, token_labels: Tensor) -> Tensor:
        """Mean over the tokens of each window; padding was read, but has no label."""
        reduced = reduce_by_window(self._pad(token_labels), self.sr_ratio, self.sr_ratio)
        return stream.normalize(reduced, token_labels)

    def _pad(self, x: Tensor) -> Tensor:
        """Zeros below and to the right of a map (B, H, W, C) whose sides are smaller than R."""
        return pad_map(x, *(max(0, self.sr_ratio - side) for side in x.shape[1:3]))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, ..., C) to (B, h, N, D)."""
        return x.flatten(1, -2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class ConvMlp(nn.Module):
    """MLP with a 3x3 depthwise convolution between its layers (PVTv2, section 3.3).

    Labels pass it by like any MLP.
    """

    def __init__(self, dim: int, hidden_dim: int, extra_relu: bool = False) -> None:
        super().__init__()
        self.extra_relu = extra_relu
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, H, W, C) to the same shape."""
        x = self.fc1(x)
        x = F.relu(x) if self.extra_relu else x  # the published linear models have it
        x = self.dwconv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.fc2(F.gelu(x))


class PyramidEmbed(nn.Module):
    """Make each patch of a map one token (PVT); odd sizes are padded to whole patches."""

    def __init__(self, in_dim: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_dim, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) and (B, H, W, K) to maps of ceil(H / P) x ceil(W / P) tokens."""
        x = pad_map(x, *(-side % self.patch_size for side in x.shape[1:3]))
        x = self.norm(self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        if token_labels is not None:
            token_labels = reduce_by_window(
                token_labels, self.patch_size, self.patch_size, ceil_mode=True
            )
        return x, token_labels


class OverlapEmbed(nn.Module):
    """Make tokens of patches that overlap (PVTv2, section 3.1)."""

    def __init__(self, in_dim: int, dim: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_dim, dim, kernel, stride, kernel // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) and (B, H, W, K) to ceil(H / stride) x ceil(W / stride) tokens."""
        x = self.norm(self.proj(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        if token_labels is not None:
            (kernel, _), (stride, _) = self.proj.kernel_size, self.proj.stride
            token_labels = reduce_by_window(token_labels, kernel, stride, kernel // 2)
        return x, token_labels


class PyramidStage(nn.Module):
    """Overlapping patches (but for the first stage), blocks and a norm (PVTv2).

    Args:
        dim: Channels C.
        downsample: Makes the stage's map of the one before, or None.
        blocks: The stage's blocks.
        with_cp: Recompute blocks in the backward pass to save memory.
    """

    def __init__(
        self, dim: int, downsample: nn.Module | None, blocks: Iterable[Block], with_cp: bool
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, 1e-6)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels through the stage."""
        if self.downsample is not None:
            x, token_labels = self.downsample(x, token_labels)
        for block in self.blocks:
            x, token_labels = run_block(block, x, token_labels, self.with_cp)
        return self.norm(x), token_labels
