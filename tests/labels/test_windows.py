"""Windows: cutting, the shift rule, the mask, and labels through padding, against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.labels.rules import attend_in_windows, batches, distributions
from tlalign_mm.labels.windows import WindowGrid, partition, plan_windows, reverse, shift_mask

sizes = {
    "height": st.integers(1, 11),
    "width": st.integers(1, 11),
    "window": st.integers(1, 5),
    "always_shift": st.booleans(),
}


def token_positions(height: int, width: int) -> Tensor:
    """(height, width, 2) row and column of each token."""
    rows, columns = torch.arange(height), torch.arange(width)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)


def differences(x: Tensor) -> Tensor:
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
def test_windows_are_row_major_and_padding_holds_zeros(
    height: int, width: int, window: int, always_shift: bool
) -> None:
    grid = shifted_plan(height, width, window, always_shift)
    x = torch.arange(1.0, 1 + height * width).view(1, height, width, 1)
    windows = partition(x, grid)
    (padded_height, padded_width), (win_h, win_w) = grid.padded, grid.window
    for n in range(grid.num_windows):
        for t in range(win_h * win_w):
            row = n // (padded_width // win_w) * win_h + t // win_w
            column = n % (padded_width // win_w) * win_w + t % win_w
            row = (row + grid.shift[0]) % padded_height  # the roll is undone
            column = (column + grid.shift[1]) % padded_width
            inside = row < height and column < width
            assert windows[n, t] == (1 + row * width + column if inside else 0)


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


def attend_to_each_other(one: tuple, other: tuple, grid: WindowGrid) -> bool:
    """Whether two places of the padded map share a window, and not by the roll alone."""
    for axis in range(2):
        side, window, shift = grid.padded[axis], grid.window[axis], grid.shift[axis]
        rolled, rolled_other = (one[axis] - shift) % side, (other[axis] - shift) % side
        if rolled // window != rolled_other // window:
            return False
        if rolled - rolled_other != one[axis] - other[axis]:
            return False
    return True


@given(**sizes, data=st.data(), batch=batches)
def test_even_attention_gives_the_mean_of_the_tokens_of_a_window_that_exist(
    height: int, width: int, window: int, always_shift: bool, data: DataObject, batch: int
) -> None:
    grid = shifted_plan(height, width, window, always_shift)
    labels = data.draw(distributions((batch, height, width), 2))
    places = [(y, x) for y in range(height) for x in range(width)]
    expected = torch.zeros_like(labels)
    for one in places:
        seen = [labels[:, y, x] for y, x in places if attend_to_each_other(one, (y, x), grid)]
        expected[:, one[0], one[1]] = sum(seen) / len(seen)
    moved = attend_in_windows(torch.zeros(batch, height, width, 1), labels, grid)
    torch.testing.assert_close(moved, expected)


@given(**sizes, data=st.data())
def test_padding_carries_no_label_until_it_is_cropped(
    height: int, width: int, window: int, always_shift: bool, data: DataObject
) -> None:
    grid = shifted_plan(height, width, window, always_shift)
    labels = data.draw(distributions((1, height, width), 3))
    windows = partition(labels, grid)
    real = partition(torch.ones(1, height, width, 1), grid)[..., 0]
    torch.testing.assert_close(windows.sum(-1), real)  # rows sum to 1, those of padding to 0
    torch.testing.assert_close(reverse(windows, grid), labels)


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


@pytest.mark.parametrize(
    ("size", "window", "shift"), [((0, 4), 4, 0), ((4, 4), 0, 0), ((4, 4), 4, 4), ((4, 4), 4, -1)]
)
def test_plans_that_cannot_be_cut_are_named(size, window, shift) -> None:
    with pytest.raises(ValueError, match=f"window_size={window}, shift_size={shift}"):
        plan_windows(size, window, shift)


def test_a_map_that_does_not_fit_its_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The map is 4x5, .* planned for 4x4"):
        partition(torch.zeros(1, 4, 5, 2), plan_windows((4, 4), 2, 0))
