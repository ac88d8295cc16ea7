"""Parts of the Swin Transformer with the label stream.

Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (ICCV 2021,
https://arxiv.org/abs/2103.14030). Parameter names are timm's. Maps are channels-last.

Shape letters: B images, H and W the token map, C channels, K label channels, h heads, n windows of
an image, N tokens of a window.
"""

from typing import Any

import torch
from timm.layers import DropPath, Mlp, resize_rel_pos_bias_table_simple, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.labels import stream
from tlalign_mm.labels.windows import WindowGrid, partition, plan_windows, reverse, shift_mask
from tlalign_mm.layers.attention import attend


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with a relative position bias.

    The bias table always has the size of the full window; a smaller window (a map that fits in
    one) uses the part of the table that its offsets reach, so one checkpoint serves every size.
    """

    def __init__(self, dim: int, num_heads: int, window_size: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(
            torch.empty((2 * window_size - 1) ** 2, num_heads)
        )
        trunc_normal_(self.relative_position_bias_table, std=0.02)
        index = relative_position_index(window_size)
        self.register_buffer("relative_position_index", index, persistent=False)
        self._register_load_state_dict_pre_hook(self._resize_bias_table)

    def forward(
        self, windows: Tensor, grid: WindowGrid, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each window.

        Args:
            windows: (B * n, N, C)
            grid: The plan that cut the windows.
            token_labels: (B * n, N, K) or None.

        Returns:
            Features and labels in the shapes they came in.
        """
        bias = self._bias(grid)  # (n or 1, h, N, N)
        num_groups, num_heads, num_tokens, _ = bias.shape
        qkv = self.qkv(windows).reshape(-1, num_groups, num_tokens, 3, num_heads, self.head_dim)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind()  # each (B, n, h, N, D)
        if token_labels is not None:
            token_labels = token_labels.reshape(-1, num_groups, num_tokens, token_labels.shape[-1])
        out, token_labels = attend(q, k, v, bias.to(q.dtype), token_labels)
        out = self.proj(out.transpose(2, 3).reshape(windows.shape))  # (B*n, N, C)
        if token_labels is None:
            return out, None
        return out, token_labels.flatten(0, 1)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.proj.in_features // self.num_heads

    def _bias(self, grid: WindowGrid) -> Tensor:
        """(n, h, N, N) position bias plus shift mask, or (1, h, N, N) where nothing shifts."""
        side, (win_h, win_w) = self.window_size, grid.window
        index = self.relative_position_index.view(side, side, side, side)
        index = index[:win_h, :win_w, :win_h, :win_w].reshape(win_h * win_w, -1)  # (N, N)
        bias = self.relative_position_bias_table[index].permute(2, 0, 1)[None]  # (1, h, N, N)
        mask = shift_mask(grid, bias.device)
        return bias if mask is None else bias + mask[:, None]

    def _resize_bias_table(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Fit the table of another window size; drop the index that old files carry."""
        state_dict.pop(f"{prefix}relative_position_index", None)
        name = f"{prefix}relative_position_bias_table"
        table = state_dict.get(name)
        if table is not None and table.shape[0] != self.relative_position_bias_table.shape[0]:
            window = (self.window_size, self.window_size)
            shape = tuple(self.relative_position_bias_table.shape)
            state_dict[name] = resize_rel_pos_bias_table_simple(table, window, shape)


def relative_position_index(window_size: int) -> Tensor:
    """(N, N) row of the bias table for each pair of tokens of a window, row-major in offsets."""
    side = torch.arange(window_size)
    position = torch.stack(torch.meshgrid(side, side, indexing="ij")).flatten(1)  # (2, N)
    rows, columns = position[:, :, None] - position[:, None, :] + window_size - 1  # each (N, N)
    return rows * (2 * window_size - 1) + columns


class SwinBlock(nn.Module):
    """Window attention and MLP, each with a residual; labels move through the attention only."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        shift_size: int,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        always_shift: bool = False,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.shift_size = shift_size
        self.always_shift = always_shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads, window_size)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels to the same shapes."""
        moved, moved_labels = self._window_attention(self.norm1(x), token_labels)
        x = x + self.drop_path1(moved)
        if token_labels is not None:
            token_labels = stream.residual(moved_labels, token_labels)
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x, token_labels

    def _window_attention(
        self, x: Tensor, token_labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        size = (x.shape[1], x.shape[2])
        grid = plan_windows(size, self.window_size, self.shift_size, self.always_shift)
        labels = None if token_labels is None else partition(token_labels, grid)
        out, labels = self.attn(partition(x, grid), grid, labels)
        if labels is None:
            return reverse(out, grid), None
        if grid.is_padded:
            labels = stream.normalize(labels)  # padding was attended to, but has no label
        return reverse(out, grid), reverse(labels, grid)


class PatchMerging(nn.Module):
    """Halve the map: the four tokens of each 2x2 cell become one of twice the channels."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) to (B, ceil(H / 2), ceil(W / 2), 2 C), labels to the same map."""
        x = nn.functional.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, H/2, 2, W/2, 2, C)
        # neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1) of the published weights
        x = self.reduction(self.norm(x.permute(0, 1, 3, 4, 2, 5).flatten(3)))
        return x, None if token_labels is None else stream.merge_2x2(token_labels)
