"""Labels where a map loses tokens: the mean over what the feature rule reads, by loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor, nn

from tests.labels.rules import Window, batches, distributions, reading_windows, sides
from tlalign_mm.labels import merge_2x2, reduce_by_window, reduce_to

channels = st.integers(1, 4)


def mean_over(labels: Tensor, rows: list[range], columns: list[range]) -> Tensor:
    """(B, rows, columns, K) mean of the labels that lie inside of each pair of ranges."""
    batch, height, width, num_channels = labels.shape
    out = torch.zeros(batch, len(rows), len(columns), num_channels)
    for b in range(batch):
        for i in range(len(rows)):
            for j in range(len(columns)):
                inside = [
                    labels[b, y, x]
                    for y in rows[i]
                    for x in columns[j]
                    if 0 <= y < height and 0 <= x < width
                ]
                out[b, i, j] = sum(inside) / len(inside)
    return out


def read_by(window: Window, side: int) -> list[range]:
    """Positions under each step of a window along an axis, those in the padding included."""
    starts = range(-window.padding, side + window.padding, window.stride)
    if window.ceil_mode:  # hangs over, but starts on a token or before
        return [range(start, start + window.kernel) for start in starts if start < side]
    return [
        range(start, start + window.kernel)
        for start in starts
        if start + window.kernel <= side + window.padding
    ]


def ceil_reaches(window: Window, side: int) -> int:
    """Steps with ``ceil_mode``: as many as cover the padded side."""
    steps = math.ceil((side + 2 * window.padding - window.kernel) / window.stride) + 1
    return min(steps, len(read_by(window, side)))


@given(data=st.data(), batch=batches, window=reading_windows(), num_channels=channels)
def test_a_window_is_the_mean_of_the_tokens_that_it_reads(
    data: DataObject, batch: int, window: Window, num_channels: int
) -> None:
    fitting = st.integers(window.smallest_side, 8)
    height, width = data.draw(fitting), data.draw(fitting)
    labels = data.draw(distributions((batch, height, width), num_channels))
    rows, columns = read_by(window, height), read_by(window, width)
    if window.ceil_mode:
        rows = rows[: ceil_reaches(window, height)]
        columns = columns[: ceil_reaches(window, width)]
    moved = reduce_by_window(labels, **window._asdict())
    torch.testing.assert_close(moved, mean_over(labels, rows, columns))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 4, 3), (3, 2, 1), (8, 8, 0)])
@pytest.mark.parametrize("size", [(8, 8), (13, 9), (16, 11)])
def test_the_map_is_that_of_the_convolution(kernel, stride, padding, size) -> None:
    features = nn.Conv2d(3, 5, kernel, stride, padding)(torch.randn(1, 3, *size))
    labels = reduce_by_window(torch.full((1, *size, 2), 0.5), kernel, stride, padding)
    assert labels.shape == (1, *features.shape[2:], 2)


def test_a_window_reads_what_the_convolution_reads() -> None:
    size, where = (6, 5), torch.eye(30).view(1, 6, 5, 30)  # every token is a channel of its own
    weights = reduce_by_window(where, kernel=3, stride=2, padding=1)[0]  # (3, 3, 30)
    image = torch.zeros(1, 1, *size, requires_grad=True)
    convolution = nn.Conv2d(1, 1, 3, 2, 1)
    for y in range(3):
        for x in range(3):
            (read,) = torch.autograd.grad(convolution(image)[0, 0, y, x], image)
            assert torch.equal(weights[y, x].view(size) > 0, read[0, 0] != 0)


@given(data=st.data(), batch=batches, height=sides, width=sides, num_channels=channels)
def test_merging_is_the_mean_of_the_tokens_that_exist(
    data: DataObject, batch: int, height: int, width: int, num_channels: int
) -> None:
    labels = data.draw(distributions((batch, height, width), num_channels))
    rows, columns = (
        [range(start, start + 2) for start in range(0, side, 2)] for side in (height, width)
    )
    torch.testing.assert_close(merge_2x2(labels), mean_over(labels, rows, columns))


@given(
    data=st.data(),
    batch=batches,
    height=sides,
    width=sides,
    size=st.tuples(sides, sides),
    num_channels=channels,
)
def test_adaptive_pooling_to_any_size_also_a_larger_one(
    data: DataObject, batch: int, height: int, width: int, size: tuple, num_channels: int
) -> None:
    labels = data.draw(distributions((batch, height, width), num_channels))
    rows, columns = (
        [range(i * side // out, math.ceil((i + 1) * side / out)) for i in range(out)]
        for side, out in zip((height, width), size, strict=True)
    )
    torch.testing.assert_close(reduce_to(labels, size), mean_over(labels, rows, columns))
