"""The rules of the label stream that need no weights, each against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from tests.labels.rules import batches, distributions, lengths, sides
from tlalign_mm.labels import class_row, join, normalize, pool, residual

channels = st.integers(1, 4)
sizes = {"data": st.data(), "batch": batches, "length": lengths, "num_channels": channels}


@given(**sizes)
def test_residual_is_the_mean_of_both_branches(
    data: DataObject, batch: int, length: int, num_channels: int
) -> None:
    shape = (batch, length)
    moved, stayed = (data.draw(distributions(shape, num_channels)) for _ in range(2))
    expected = torch.zeros_like(stayed)
    for b in range(batch):
        for i in range(length):
            for c in range(num_channels):
                expected[b, i, c] = (moved[b, i, c].item() + stayed[b, i, c].item()) / 2
    torch.testing.assert_close(residual(moved, stayed), expected)


@given(**sizes, num_joining=st.integers(1, 2))
def test_joining_tokens_start_as_the_mean_of_the_others(
    data: DataObject, batch: int, length: int, num_channels: int, num_joining: int
) -> None:
    labels = data.draw(distributions((batch, length), num_channels))
    expected = torch.zeros(batch, num_joining + length, num_channels)
    for b in range(batch):
        for c in range(num_channels):
            column = labels[b, :, c].tolist()
            for i in range(num_joining):
                expected[b, i, c] = sum(column) / length
            for i in range(length):
                expected[b, num_joining + i, c] = column[i]
    torch.testing.assert_close(join(labels, num_joining), expected)


@given(**sizes)
def test_class_attention_moves_the_class_row_alone(
    data: DataObject, batch: int, length: int, num_channels: int
) -> None:
    gathered = data.draw(distributions((batch, 1), num_channels))
    labels = data.draw(distributions((batch, 1 + length), num_channels))
    expected = labels.clone()
    for b in range(batch):
        for c in range(num_channels):
            expected[b, 0, c] = (gathered[b, 0, c].item() + labels[b, 0, c].item()) / 2
    moved = class_row(gathered, labels)
    torch.testing.assert_close(moved, expected)
    assert torch.equal(moved[:, 1:], labels[:, 1:])


@given(data=st.data(), batch=batches, height=sides, width=sides, num_channels=channels)
def test_pooling_is_the_mean_over_all_tokens_of_a_map_or_a_list(
    data: DataObject, batch: int, height: int, width: int, num_channels: int
) -> None:
    labels = data.draw(distributions((batch, height, width), num_channels))
    expected = torch.zeros(batch, num_channels)
    for b in range(batch):
        for c in range(num_channels):
            tokens = [labels[b, y, x, c].item() for y in range(height) for x in range(width)]
            expected[b, c] = sum(tokens) / len(tokens)
    torch.testing.assert_close(pool(labels), expected)
    torch.testing.assert_close(pool(labels.flatten(1, 2)), expected)


@given(
    data=st.data(),
    batch=batches,
    width=lengths,
    num_channels=channels,
    scales=st.lists(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]), min_size=6),
)
def test_normalising_undoes_any_scale_and_a_row_without_mass_takes_the_area_label(
    data: DataObject, batch: int, width: int, num_channels: int, scales: list[float]
) -> None:
    moved, before = (data.draw(distributions((batch, 1, width), num_channels)) for _ in range(2))
    scale = torch.tensor(scales[:width])[:, None]
    expected = torch.zeros_like(moved)
    for b in range(batch):
        area = sum(before[b, 0, x] for x in range(width)) / width
        for x in range(width):
            expected[b, 0, x] = moved[b, 0, x] if scales[x] > 0 else area
    torch.testing.assert_close(normalize(scale * moved, before), expected)


def test_normalising_by_hand() -> None:
    before = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])  # a map of two tokens, mean 3/4 and 1/4
    moved = torch.tensor([[[[0.2, 0.1], [0.0, 0.0]]]])
    expected = torch.tensor([[[[2 / 3, 1 / 3], [0.75, 0.25]]]])
    torch.testing.assert_close(normalize(moved, before), expected)
