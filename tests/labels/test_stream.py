"""Rules of the label stream against plain loops, and the invariants that every rule keeps."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tlalign_mm.labels import class_targets, merge_2x2, normalize, pool, residual, smoothed_one_hot


def random_labels(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def merge_by_loops(labels: Tensor) -> Tensor:
    batch, height, width, channels = labels.shape
    out = torch.zeros(batch, -(-height // 2), -(-width // 2), channels)
    for b in range(batch):
        for y in range(out.shape[1]):
            for x in range(out.shape[2]):
                cell = labels[b, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].reshape(-1, channels)
                out[b, y, x] = cell.sum(0) / len(cell)
    return out


@given(height=st.integers(1, 7), width=st.integers(1, 7), channels=st.integers(1, 4))
def test_merging_is_the_mean_of_the_tokens_that_exist(
    height: int, width: int, channels: int
) -> None:
    labels = random_labels(2, height, width, channels)
    merged = merge_2x2(labels)
    torch.testing.assert_close(merged, merge_by_loops(labels))
    torch.testing.assert_close(merged.sum(-1), torch.ones(merged.shape[:-1]))


def test_equal_labels_stay_equal() -> None:
    labels = torch.tensor([0.3, 0.7]).expand(2, 5, 3, 2)
    torch.testing.assert_close(merge_2x2(labels), labels[:, :3, :2])
    torch.testing.assert_close(residual(labels, labels), labels)
    torch.testing.assert_close(pool(labels), torch.tensor([0.3, 0.7]).expand(2, 2))


def test_residual_is_the_mean_of_both_branches() -> None:
    one, other = random_labels(2, 4, 3), random_labels(2, 4, 3, seed=1)
    torch.testing.assert_close(residual(one, other), 0.5 * one + 0.5 * other)


def test_rows_without_mass_stay_zero_and_others_sum_to_one() -> None:
    labels = torch.tensor([[0.2, 0.1], [0.0, 0.0]])
    torch.testing.assert_close(normalize(labels), torch.tensor([[2 / 3, 1 / 3], [0.0, 0.0]]))


def test_two_shares_expanded_equal_labels_of_class_size() -> None:
    targets = smoothed_one_hot(torch.tensor([2, 0, 1]), 4, smoothing=0.1)
    partner = torch.tensor([2, 1, 0])
    tokens = random_labels(3, 4, 6, 2)  # a map of shares, (B, H, W, 2)
    classes = (
        tokens[..., :1] * targets[:, None, None] + tokens[..., 1:] * targets[partner][:, None, None]
    )
    expected = pool(merge_2x2(residual(classes, classes.flip(1))))
    shares = pool(merge_2x2(residual(tokens, tokens.flip(1))))
    torch.testing.assert_close(class_targets(shares, targets, partner), expected)


def test_smoothing_leaves_a_distribution_with_timms_values() -> None:
    target = smoothed_one_hot(torch.tensor([1]), 10, smoothing=0.1)
    torch.testing.assert_close(target.sum(), torch.tensor(1.0))
    torch.testing.assert_close(target[0, 1], torch.tensor(0.91))
    torch.testing.assert_close(target[0, 0], torch.tensor(0.01))
