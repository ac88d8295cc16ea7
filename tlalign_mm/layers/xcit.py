"""Parts of XCiT with the label stream.

XCiT: Cross-Covariance Image Transformers (NeurIPS 2021, https://arxiv.org/abs/2106.09681).
Parameter names are timm's. Maps are channels-last.

Shape letters: B images, H and W the token map, N patch tokens, C channels, h heads, D channels of a
head, K label channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as gradient_checkpoint
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from tlalign_mm.labels import mix_by_kernel, stream
from tlalign_mm.layers.attention import ClassAttention
from tlalign_mm.layers.block import Block


class ConvPatchEmbed(nn.Module):
    """Patches by a stack of 3x3 convolutions of stride 2, each with a BatchNorm.

    As in XCiT's published code (https://github.com/facebookresearch/xcit). Padding rounds odd sides
    up, so every size has ceil(side / patch_size) tokens.

    Args:
        patch_size: Side of a patch in pixels, a power of 2; its logarithm counts the convolutions.
        dim: Channels C of the last convolution; each one doubles them.
    """

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        steps = int(math.log2(patch_size))
        widths = [3, *(dim // 2**i for i in reversed(range(steps)))]
        layers: list[nn.Module] = []
        for before, after in zip(widths[:-1], widths[1:], strict=True):
            conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            layers += [nn.Sequential(conv, nn.BatchNorm2d(after)), nn.GELU()]
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) pixels to a (B, H', W', C) token map."""
        return self.proj(images).permute(0, 2, 3, 1)


class FourierPositions(nn.Module):
    """Positions as sines and cosines of the relative row and column, projected to the channels.

    XCiT's variant of Attention Is All You Need (https://arxiv.org/abs/1706.03762), section 3.5: a
    position is counted from 0 to 2 pi over the map, so maps of any size have theirs.

    Args:
        dim: Channels C.
        hidden_dim: Sines and cosines of an axis, together.
        temperature: Wavelengths grow from 2 pi towards 2 pi times this.
    """

    def __init__(self, dim: int, hidden_dim: int = 32, temperature: float = 10000.0) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.temperature = temperature
        self.token_projection = nn.Conv2d(2 * hidden_dim, dim, 1)

    def forward(self, height: int, width: int) -> Tensor:
        """Compute the (1, H, W, C) positions of a map."""
        rows, columns = self._waves(height), self._waves(width)
        waves = [rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)]
        waves = torch.cat(waves, dim=-1).to(self.token_projection.weight.dtype)
        return self.token_projection(waves.permute(2, 0, 1)[None]).permute(0, 2, 3, 1)

    def _waves(self, side: int) -> Tensor:
        """(side, hidden_dim) sine and cosine of each wave in turn; the last position is at 2 pi."""
        device = self.token_projection.weight.device
        position = torch.arange(1, side + 1, device=device).float() / (side + 1e-6) * (2 * math.pi)
        exponent = torch.arange(0, self.hidden_dim, 2, device=device).float() / self.hidden_dim
        angle = position[:, None] / self.temperature**exponent  # (side, hidden_dim / 2)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class CrossCovarianceAttention(nn.Module):
    """Attention between the channels of a head, by their covariance over all tokens.

    Section 3.2 of XCiT. Every token's channels are mixed by the same (D, D) matrix and no token
    reads another, so labels stay.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features to the same shape, and labels to themselves."""
        qkv = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, h, D)
        q, k, v = qkv.permute(2, 0, 3, 4, 1).unbind()  # each (B, h, D, N)
        # lengths over all tokens of a large image leave the range of float16
        q, k = (F.normalize(t.float(), dim=-1) for t in (q, k))
        weights = (q @ k.mT * self.temperature).softmax(dim=-1)  # (B, h, D, D)
        out = weights.to(v.dtype) @ v  # (B, h, D, N)
        return self.proj(out.flatten(1, 2).mT).view(x.shape), token_labels


class LocalPatchInteraction(nn.Module):
    """Two depthwise 3x3 convolutions, the only place where patch tokens meet each other.

    Section 3.3 of XCiT. Labels follow the contribution of both kernels one after the other; what
    stands between them acts on each token alone.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.act = nn.GELU()
        self.bn = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels to the same shapes."""
        x = self.conv1(x.permute(0, 3, 1, 2))  # (B, C, H, W)
        x = self.conv2(self.bn(self.act(x)))
        if token_labels is not None:
            token_labels = mix_by_kernel(self.conv1.weight, token_labels)
            token_labels = mix_by_kernel(self.conv2.weight, token_labels)
        return x.permute(0, 2, 3, 1), token_labels


class XCABlock(Block):
    """Cross-covariance attention, local patch interaction and MLP, each behind norm and residual.

    Section 3.3 of XCiT. Every branch has a LayerScale, which changes no label.

    Args:
        dim: Channels C.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        eta: What all scales start with.
        drop_path: Rate of stochastic depth of all branches.
        norm_eps: Epsilon of the LayerNorms.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        eta: float = 1.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        attn = CrossCovarianceAttention(dim, num_heads, qkv_bias)
        super().__init__(dim, attn, Mlp(dim, int(dim * mlp_ratio)), drop_path, norm_eps)
        self.norm3 = nn.LayerNorm(dim, norm_eps)
        self.local_mp = LocalPatchInteraction(dim)
        self.drop_path3 = DropPath(drop_path)
        self.gamma1 = nn.Parameter(torch.full((dim,), eta))
        self.gamma2 = nn.Parameter(torch.full((dim,), eta))
        self.gamma3 = nn.Parameter(torch.full((dim,), eta))

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels to the same shapes."""
        moved, token_labels = self.attn(self.norm1(x), token_labels)
        x = x + self.drop_path1(self.gamma1 * moved)
        moved, moved_labels = self.local_mp(self.norm3(x), token_labels)
        x = x + self.drop_path3(self.gamma3 * moved)
        if token_labels is not None:
            token_labels = stream.residual(moved_labels, token_labels)
        return x + self.drop_path2(self.gamma2 * self.mlp(self.norm2(x))), token_labels


class XCiTClassBlock(Block):
    """Class attention as XCiT has it: patch tokens change too, but each on its own.

    Section 3.3 of XCiT, after CaiT (https://arxiv.org/abs/2103.17239), section 3. As in the
    published code, patch tokens add their own norm in the first residual and themselves in the
    second. ``class_attention(x)`` gives the (B, N) attention to the patch tokens of the list that
    ``forward`` would take. There is no stochastic depth.

    Args:
        dim: Channels C.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        eta: What both scales start with.
        tokens_norm: Whether the second norm acts on patch tokens, too.
        norm_eps: Epsilon of both norms.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        eta: float = 1.0,
        tokens_norm: bool = True,
        norm_eps: float = 1e-6,
    ) -> None:
        attn = ClassAttention(dim, num_heads, qkv_bias)
        super().__init__(dim, attn, Mlp(dim, int(dim * mlp_ratio)), norm_eps=norm_eps)
        self.tokens_norm = tokens_norm
        self.gamma1 = nn.Parameter(torch.full((dim,), eta))
        self.gamma2 = nn.Parameter(torch.full((dim,), eta))

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, 1 + N, C) features and (B, 1 + N, K) labels to the same shapes."""
        normed = self.norm1(x)
        moved, moved_labels = self.attn(normed, token_labels)
        x = x + self.gamma1 * torch.cat([moved, normed[:, 1:]], dim=1)
        if token_labels is not None:
            token_labels = stream.class_row(moved_labels, token_labels)
        token, patches = self.norm2(x[:, :1]), x[:, 1:]
        if self.tokens_norm:
            patches = self.norm2(patches)
        token = token + self.gamma2 * self.mlp(token)
        return torch.cat([token, 2 * patches], dim=1), token_labels


def run_xca_block(
    block: XCABlock, x: Tensor, token_labels: Tensor | None, with_cp: bool
) -> tuple[Tensor, Tensor | None]:
    """``run_block`` for a block with a BatchNorm, whose statistics count each batch once."""
    if not with_cp or not block.training:
        return block(x, token_labels)
    first, _ = gradient_checkpoint.noop_context_fn()
    return gradient_checkpoint.checkpoint(
        block,
        x,
        token_labels,
        use_reentrant=False,
        context_fn=lambda: (first, _KeptStatistics(block.local_mp.bn)),
    )


class _KeptStatistics:
    """Context that puts a norm's running statistics back where it ends."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __enter__(self) -> None:
        self.before = [buffer.clone() for buffer in self.norm.buffers()]

    def __exit__(self, *_: Any) -> None:
        for buffer, value in zip(self.norm.buffers(), self.before, strict=True):
            buffer.copy_(value)
