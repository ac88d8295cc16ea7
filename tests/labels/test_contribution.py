"""Labels under signed weights: contributions |w| / sum |w|, by loops and at their limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.labels.rules import batches, distributions, kernel_sides, lengths, sides, signed_weights
from tlalign_mm.labels import mix_by_kernel, mix_by_weights

channels = st.integers(1, 4)


def share_of_each(weights: list[float]) -> list[float] | None:
    """Contributions that sum to 1, or None where there is no weight at all."""
    total = sum(abs(weight) for weight in weights)
    return [abs(weight) / total for weight in weights] if total else None


def weights_by_loops(weights: Tensor, labels: Tensor) -> Tensor:
    batch, heads, queries, keys = weights.shape
    out = torch.zeros(batch, queries, labels.shape[-1])
    for b in range(batch):
        for i in range(queries):
            for h in range(heads):
                shares = share_of_each(weights[b, h, i].tolist()) or [1 / keys] * keys
                for j in range(keys):
                    out[b, i] += shares[j] * labels[b, j] / heads
    return out


def kernel_by_loops(kernel: Tensor, labels: Tensor) -> Tensor:
    num_kernels, _, kernel_height, kernel_width = kernel.shape
    batch, height, width, _ = labels.shape
    out = labels.clone()
    for y in range(height):
        for x in range(width):
            read = []  # weight and place of every token under the kernel
            for i in range(kernel_height):
                for j in range(kernel_width):
                    row, column = y + i - kernel_height // 2, x + j - kernel_width // 2
                    if 0 <= row < height and 0 <= column < width:
                        weight = sum(abs(kernel[c, 0, i, j].item()) for c in range(num_kernels))
                        read.append((weight, row, column))
            shares = share_of_each([weight for weight, *_ in read])
            if shares:
                for b in range(batch):
                    out[b, y, x] = sum(
                        share * labels[b, row, column]
                        for share, (_, row, column) in zip(shares, read, strict=True)
                    )
    return out


@given(
    data=st.data(),
    batch=batches,
    heads=batches,
    queries=lengths,
    keys=lengths,
    num_channels=channels,
)
def test_weights_count_by_their_share_of_the_row(
    data: DataObject, batch: int, heads: int, queries: int, keys: int, num_channels: int
) -> None:
    weights = data.draw(signed_weights(batch, heads, queries, keys)).detach()
    labels = data.draw(distributions((batch, keys), num_channels))
    torch.testing.assert_close(mix_by_weights(weights, labels), weights_by_loops(weights, labels))


@given(data=st.data(), batch=batches, height=sides, width=sides, num_channels=channels)
def test_kernels_count_by_their_channel_mean(
    data: DataObject, batch: int, height: int, width: int, num_channels: int
) -> None:
    kernel = data.draw(signed_weights(data.draw(batches), 1, *data.draw(kernel_sides))).detach()
    labels = data.draw(distributions((batch, height, width), num_channels))
    torch.testing.assert_close(
        mix_by_kernel(kernel, labels), kernel_by_loops(kernel, labels), atol=1e-5, rtol=0
    )


def test_probabilities_move_labels_as_attention_does() -> None:
    attention, labels = torch.randn(2, 3, 5, 4).softmax(-1), torch.rand(2, 4, 3).softmax(-1)
    torch.testing.assert_close(mix_by_weights(attention, labels), attention.mean(1) @ labels)


def test_the_sign_of_a_weight_does_not_count() -> None:
    weights, labels = torch.randn(1, 2, 3, 4), torch.rand(1, 4, 2).softmax(-1)
    torch.testing.assert_close(mix_by_weights(-weights, labels), mix_by_weights(weights, labels))


def test_a_row_without_weight_takes_the_mean_of_all_labels() -> None:
    labels = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    weights = torch.tensor([[[[0.0, 0.0, 0.0, 0.0], [0.0, -3.0, 0.0, 0.0]]]])
    expected = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    assert torch.equal(mix_by_weights(weights, labels), expected)


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e30])
def test_tiny_and_huge_weights_count_by_their_share_too(scale: float) -> None:
    labels = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]])
    moved = mix_by_weights(torch.full((1, 1, 1, 2), scale), labels)
    torch.testing.assert_close(moved, torch.tensor([[[0.6, 0.4]]]))
    moved = mix_by_kernel(torch.full((1, 1, 3, 3), scale), labels[None])
    torch.testing.assert_close(moved, torch.tensor([0.6, 0.4]).expand(1, 1, 2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_lower_precision_leave_labels_in_float32(dtype: torch.dtype) -> None:
    labels = torch.tensor([0.3, 0.7]).expand(1, 4, 2)
    weights = torch.randn(1, 2, 4, 4).to(dtype)
    weights[0, 0, 0] = 1e-9  # underflows to 0 in float16
    with torch.autocast("cpu", dtype):
        moved = mix_by_weights(weights, labels)
        moved_map = mix_by_kernel(weights.view(8, 1, 4, 1)[:, :, :3], labels.view(1, 2, 2, 2))
    assert moved.dtype == moved_map.dtype == torch.float32
    torch.testing.assert_close(moved, labels, atol=1e-6, rtol=0)
    torch.testing.assert_close(moved_map, labels.view(1, 2, 2, 2), atol=1e-6, rtol=0)


def test_a_kernel_of_one_tap_shifts_labels_and_keeps_those_at_the_border() -> None:
    kernel = torch.zeros(3, 1, 3, 3)
    kernel[:, 0, 1, 0] = torch.tensor([-1.0, 2.0, 0.5])  # every channel reads the left neighbour
    labels = torch.eye(4).view(1, 1, 4, 4)
    expected = labels[:, :, [0, 0, 1, 2]]  # the first has no left neighbour
    assert torch.equal(mix_by_kernel(kernel, labels), expected)


def test_a_kernel_without_weight_keeps_every_label() -> None:
    labels = torch.rand(2, 3, 4, 2).softmax(-1)
    assert torch.equal(mix_by_kernel(torch.zeros(5, 1, 3, 3), labels), labels)


def test_padding_does_not_count() -> None:
    labels = torch.eye(2).view(1, 1, 2, 2)  # one row of two tokens, most of the kernel is outside
    moved = mix_by_kernel(torch.ones(1, 1, 3, 3), labels)
    torch.testing.assert_close(moved, torch.full((1, 1, 2, 2), 0.5))
