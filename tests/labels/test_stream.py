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


@given(**sizes, scales=st.lists(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]), min_size=6))
def test_normalising_undoes_any_scale_but_zero(
    data: DataObject, batch: int, length: int, num_channels: int, scales: list[float]
) -> None:
    labels = data.draw(distributions((batch, length), num_channels))
    scale = torch.tensor(scales[:length])[:, None]
    expected = torch.zeros_like(labels)
    for b in range(batch):
        for i in range(length):
            if scales[i] > 0:  # a row without mass stays 0
                expected[b, i] = labels[b, i]
    torch.testing.assert_close(normalize(scale * labels), expected)


def test_normalising_by_hand() -> None:
    labels = torch.tensor([[0.2, 0.1], [0.0, 0.0]])
    torch.testing.assert_close(normalize(labels), torch.tensor([[2 / 3, 1 / 3], [0.0, 0.0]]))
