"""Windows of a token map: the same pad, roll, partition and reverse for features and labels.

Swin Transformer (ICCV 2021, https://arxiv.org/abs/2103.14030), section 3.2. The order is pad, then
roll, then mask, so that padding never wraps into the map on sizes that windows do not divide.

Shape letters: B images, H and W the token map, C channels (features) or K label channels, nH and
nW windows per column and row, Wh and Ww the sides of a window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class WindowGrid(NamedTuple):
    """How one map is cut; all in tokens, height first.

    Attributes:
        size: Sides of the map.
        window: Sides of a window, never larger than ``padded``.
        shift: How far the map is rolled before it is cut; (0, 0) for no shift.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        """Sides of the map after padding to whole windows."""
        return tuple(-(-s // w) * w for s, w in zip(self.size, self.window, strict=True))

    @property
    def is_padded(self) -> bool:
        """Whether some windows hold padding."""
        return self.padded != self.size

    @property
    def num_windows(self) -> int:
        """Windows of one image."""
        return (self.padded[0] // self.window[0]) * (self.padded[1] // self.window[1])


def plan_windows(
    size: tuple[int, int], window_size: int, shift_size: int, always_shift: bool = False
) -> WindowGrid:
    """Choose window and shift for a map.

    Where the map fits in one window, the window shrinks to the map and nothing shifts (the rule of
    the classification code). ``always_shift`` keeps the full window and the shift, as the dense
    Swin of mmsegmentation and mmdetection does.

    Raises:
        ValueError: If the map is empty, or not 0 <= ``shift_size`` < ``window_size``.
    """
    if min(size) < 1 or not 0 <= shift_size < window_size:
        raise ValueError(
            f"Windows need a map of at least 1x1 and 0 <= shift_size < window_size, but got a map "
            f"of {size[0]}x{size[1]}, window_size={window_size}, shift_size={shift_size}."
        )
    if always_shift:
        return WindowGrid(size, (window_size,) * 2, (shift_size,) * 2)
    window = tuple(min(side, window_size) for side in size)
    shift = tuple(0 if side <= window_size else shift_size for side in size)
    return WindowGrid(size, window, shift)


def pad_map(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros below and to the right of a map (B, H, W, C); without any, the map and no copy."""
    return F.pad(x, (0, 0, 0, columns, 0, rows)) if rows or columns else x


def partition(x: Tensor, grid: WindowGrid) -> Tensor:
    """Cut a map into windows.

    Args:
        x: (B, H, W, C) features, or labels with K in place of C.
        grid: The plan of this map.

    Returns:
        (B * nH * nW, Wh * Ww, C); padding holds zeros.

    Raises:
        ValueError: If the map has not the sides that the plan was made for.
    """
    if tuple(x.shape[1:3]) != tuple(grid.size):
        raise ValueError(
            f"The map is {x.shape[1]}x{x.shape[2]}, but its windows of {grid.window} were planned "
            f"for {grid.size[0]}x{grid.size[1]}."
        )
    (height, width), (win_h, win_w) = grid.padded, grid.window
    x = pad_map(x, height - x.shape[1], width - x.shape[2])
    if any(grid.shift):
        x = x.roll((-grid.shift[0], -grid.shift[1]), dims=(1, 2))
    x = x.reshape(-1, height // win_h, win_h, width // win_w, win_w, x.shape[-1])
    return x.transpose(2, 3).reshape(-1, win_h * win_w, x.shape[-1])  # (B*nH*nW, Wh*Ww, C)


def reverse(windows: Tensor, grid: WindowGrid) -> Tensor:
    """Undo ``partition`` and crop the padding.

    Args:
        windows: (B * nH * nW, Wh * Ww, C); C may be several dimensions, which are joined.
        grid: The plan that cut them.

    Returns:
        (B, H, W, C)
    """
    (height, width), (win_h, win_w) = grid.padded, grid.window
    x = windows.reshape(-1, height // win_h, width // win_w, win_h, win_w, *windows.shape[2:])
    x = x.transpose(2, 3).reshape(-1, height, width, windows.shape[2:].numel())  # (B, H, W, C)
    if any(grid.shift):
        x = x.roll(grid.shift, dims=(1, 2))
    return x[:, : grid.size[0], : grid.size[1]]


def shift_mask(grid: WindowGrid, device: torch.device) -> Tensor | None:
    """Forbid attention between tokens that the roll made neighbours.

    Returns:
        (nH * nW, Wh * Ww, Wh * Ww) float32 to add to the logits, 0 where tokens may attend and
        -100 (the value that published weights were trained with) where not; None without a shift.
    """
    if not any(grid.shift):
        return None
    rows, columns = (
        _regions(side, window, shift, device)
        for side, window, shift in zip(grid.padded, grid.window, grid.shift, strict=True)
    )
    region = rows[:, None] * 3 + columns  # (H, W), a number for each of up to nine regions
    unshifted = grid._replace(size=grid.padded, shift=(0, 0))
    region = partition(region[None, :, :, None], unshifted).squeeze(-1)  # (nH*nW, Wh*Ww)
    return (region[:, None] != region[:, :, None]) * -100.0


def _regions(side: int, window: int, shift: int, device: torch.device) -> Tensor:
    """(side,) number of the stretch that each position of a rolled axis came from."""
    position = torch.arange(side, device=device)
    if not shift:
        return torch.zeros_like(position)
    return (position >= side - window).long() + (position >= side - shift).long()
