"""Windows: a round trip, the shift rule, and the mask against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlalign_mm.labels.windows import WindowGrid, partition, plan_windows, reverse, shift_mask

sizes = {
    "height": st.integers(1, 11),
    "width": st.integers(1, 11),
    "window": st.integers(1, 5),
    "always_shift": st.booleans(),
}


def token_positions(height: int, width: int) -> torch.Tensor:
    """(height, width, 2) row and column of each token."""
    rows, columns = torch.arange(height), torch.arange(width)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)


def differences(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, None] - x[:, None, :]


def shifted_plan(height: int, width: int, window: int, always_shift: bool) -> WindowGrid:
    return plan_windows((height, width), window, window // 2, always_shift)


@given(**sizes)
def test_reverse_undoes_partition(height: int, width: int, window: int, always_shift: bool) -> None:
    grid = shifted_plan(height, width, window, always_shift)
    x = torch.randn(2, height, width, 3)
    windows = partition(x, grid)
    assert windows.shape == (2 * grid.num_windows, grid.window[0] * grid.window[1], 3)
    assert torch.equal(reverse(windows, grid), x)


@given(**sizes)
def test_the_mask_separates_what_the_roll_joined(
    height: int, width: int, window: int, always_shift: bool
) -> None:
    grid = shifted_plan(height, width, window, always_shift)
    mask = shift_mask(grid, torch.device("cpu"))
    if grid.shift == (0, 0):
        assert mask is None
        return
    origin = token_positions(*grid.padded)[None]
    origin = partition(origin, grid._replace(size=grid.padded))  # (n, N, 2) place before the roll
    local = token_positions(*grid.window).reshape(1, -1, 2)  # (1, N, 2) place in the window
    # neighbours by the roll alone: their distance in the window is not their distance in the map
    wrapped = (differences(origin) != differences(local)).any(-1)
    assert torch.equal(mask < 0, wrapped)
    assert mask[~wrapped].eq(0).all()


@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [
        ((8, 8), (4, 4), (2, 2)),
        ((4, 4), (4, 4), (0, 0)),  # the map is one window: nothing to shift
        ((2, 3), (2, 3), (0, 0)),  # smaller than a window: the window shrinks
        ((3, 9), (3, 4), (0, 2)),  # each side by itself
    ],
)
def test_shift_is_off_where_the_map_fits_in_a_window(size, window, shift) -> None:
    assert plan_windows(size, 4, 2) == WindowGrid(size, window, shift)
    assert plan_windows(size, 4, 2, always_shift=True) == WindowGrid(size, (4, 4), (2, 2))
