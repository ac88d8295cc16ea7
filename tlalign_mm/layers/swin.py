"""Parts of the Swin Transformer with the label stream.

Swin Transformer: Hierarchical Vision Transformer using Shifted Windows (ICCV 2021,
https://arxiv.org/abs/2103.14030). Parameter names are timm's. Maps are channels-last.

Shape letters: B images, H and W the token map, C channels, K label channels, h heads, n windows of
an image, N tokens of a window.
"""

from typing import Any

import torch
from timm.layers import Mlp, resize_rel_pos_bias_table_simple, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.labels import merge_2x2, stream
from tlalign_mm.labels.windows import (
    WindowGrid,
    pad_map,
    partition,
    plan_windows,
    reverse,
    shift_mask,
)
from tlalign_mm.layers.attention import attend
from tlalign_mm.layers.block import Block, run_block


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with a relative position bias.

    The bias table always has the size of the full window; a smaller window (a map that fits in
    one) uses the part of the table that its offsets reach, so one checkpoint serves every size.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        shift_size: int = 0,
        always_shift: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        self.shift_size = shift_size
        self.always_shift = always_shift
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(
            torch.empty((2 * window_size - 1) ** 2, num_heads)
        )
        trunc_normal_(self.relative_position_bias_table, std=0.02)
        index = relative_position_index(window_size)
        self.register_buffer("relative_position_index", index, persistent=False)
        self._register_load_state_dict_pre_hook(self._resize_bias_table)

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each window: (B, H, W, C) and (B, H, W, K) to the same shapes."""
        size = (x.shape[1], x.shape[2])
        grid = plan_windows(size, self.window_size, self.shift_size, self.always_shift)
        if token_labels is None:
            out, _ = self.attend_windows(partition(x, grid), grid)
            return self.proj(reverse(out, grid)), None
        out, labels = self.attend_windows(partition(x, grid), grid, partition(token_labels, grid))
        labels = reverse(labels, grid)
        if grid.is_padded:  # padding was attended to, but has no label
            labels = stream.normalize(labels, token_labels)
        return self.proj(reverse(out, grid)), labels

    def attend_windows(
        self, windows: Tensor, grid: WindowGrid, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within windows that are cut already, without the last projection.

        Args:
            windows: (B * n, N, C)
            grid: The plan that cut the windows.
            token_labels: (B * n, N, K) or None.

        Returns:
            Features (B * n, N, h, D), and labels in the shape they came in.
        """
        bias = self._bias(grid)  # (n or 1, h, N, N)
        num_groups, num_heads, num_tokens, _ = bias.shape
        qkv = self.qkv(windows).reshape(-1, num_groups, num_tokens, 3, num_heads, self.head_dim)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind()  # each (B, n, h, N, D)
        if token_labels is not None:
            token_labels = token_labels.reshape(-1, num_groups, num_tokens, token_labels.shape[-1])
        out, token_labels = attend(q, k, v, bias.to(q.dtype), token_labels)
        out = out.transpose(2, 3).flatten(0, 1)  # (B*n, N, h, D), still a view
        return out, None if token_labels is None else token_labels.flatten(0, 1)

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
        x = pad_map(x, x.shape[1] % 2, x.shape[2] % 2)
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, H/2, 2, W/2, 2, C)
        # neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1) of the published weights
        x = self.reduction(self.norm(x.permute(0, 1, 3, 4, 2, 5).flatten(3)))
        return x, None if token_labels is None else merge_2x2(token_labels)


class SwinStage(nn.Module):
    """Patch merging (but for the first stage), then blocks of alternating shift."""

    def __init__(
        self,
        dim: int,
        merge: bool,
        num_heads: int,
        window_size: int,
        mlp_ratio: float,
        drop_path: list[float],
        always_shift: bool,
        with_cp: bool,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.downsample = PatchMerging(dim // 2) if merge else None
        shifts = [window_size // 2 * (i % 2) for i in range(len(drop_path))]
        self.blocks = nn.ModuleList(
            Block(
                dim,
                WindowAttention(dim, num_heads, window_size, shift, always_shift),
                Mlp(dim, int(dim * mlp_ratio)),
                rate,
            )
            for shift, rate in zip(shifts, drop_path, strict=True)
        )

    def forward(
        self, x: Tensor, token_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (B, H, W, C) features and (B, H, W, K) labels through the stage."""
        if self.downsample is not None:
            x, token_labels = self.downsample(x, token_labels)
        for block in self.blocks:
            x, token_labels = run_block(block, x, token_labels, self.with_cp)
        return x, token_labels
