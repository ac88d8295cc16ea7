"""What every rule of the label stream keeps, whatever its features, sizes and labels are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.labels.rules import RULES, distributions
from tlalign_mm.labels import smoothed_one_hot

# these read features or weights; the others see labels alone, which start from a mask and are
# detached where they enter a backbone, so that nothing is there to send a gradient into
ATTENDS = ["attend", "attend with bias", "attend in windows"]
READS_FEATURES = [*ATTENDS, "mix_by_weights", "mix_by_kernel"]

every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
channels = st.integers(1, 4)


def assert_equal_labels(labels: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(labels, expected, atol=2e-6, rtol=0)


@every_rule
@given(data=st.data(), num_channels=channels)
def test_rows_are_non_negative_and_sum_to_one(rules, data: DataObject, num_channels: int) -> None:
    rule = data.draw(rules)
    labels = rule.move(data.draw(distributions(rule.shape, num_channels)))
    assert labels.min() >= 0
    assert_equal_labels(labels.sum(-1), torch.ones(labels.shape[:-1]))


@every_rule
@given(data=st.data(), num_channels=channels)
def test_equal_labels_stay_equal(rules, data: DataObject, num_channels: int) -> None:
    rule = data.draw(rules)
    label = data.draw(distributions((), num_channels))
    moved = rule.move(label.expand(*rule.shape, -1))
    assert_equal_labels(moved, label.expand_as(moved))


@every_rule
@given(data=st.data(), num_channels=channels, share=st.floats(0, 1))
def test_linear_in_the_labels(rules, data: DataObject, num_channels: int, share: float) -> None:
    rule = data.draw(rules)
    one, other = (data.draw(distributions(rule.shape, num_channels)) for _ in range(2))
    mixed = rule.move(share * one + (1 - share) * other)
    assert_equal_labels(mixed, share * rule.move(one) + (1 - share) * rule.move(other))


@every_rule
@given(data=st.data(), num_channels=channels)
def test_permuting_tokens_permutes_labels(rules, data: DataObject, num_channels: int) -> None:
    rule = data.draw(rules)
    labels = data.draw(distributions(rule.shape, num_channels))
    permuted = rule.permuted_move(rule.permute(labels))
    assert_equal_labels(permuted, rule.permute_out(rule.move(labels)))


@every_rule
@given(data=st.data())
def test_two_shares_expanded_equal_labels_of_class_size(rules, data: DataObject) -> None:
    rule = data.draw(rules)
    shares = data.draw(distributions(rule.shape, 2))
    classes = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3)))
    own = smoothed_one_hot(classes, 5, smoothing=0.1)[: rule.shape[0]]
    targets = torch.stack([own, own.flip(0)], dim=1)  # (B, 2, 5), the partner is the batch flipped

    def expand(y: Tensor) -> Tensor:
        return torch.einsum("b...k,bkc->b...c", y, targets)

    assert_equal_labels(rule.move(expand(shares)), expand(rule.move(shares)))


@pytest.mark.parametrize("name", READS_FEATURES)
@given(data=st.data())
def test_no_gradient_flows(name: str, data: DataObject) -> None:
    rule = data.draw(RULES[name])
    assert rule.sources and all(source.requires_grad for source in rule.sources)
    labels = data.draw(distributions(rule.shape, 2)).requires_grad_()
    assert not rule.move(labels).requires_grad


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_labels_are_float32_inside_autocast_too(name: str, data: DataObject) -> None:
    rule = data.draw(RULES[name])
    labels = data.draw(distributions(rule.shape, 2))
    label = torch.tensor([0.3, 0.7])  # neither is a number of bfloat16
    exact = rule.move(labels)
    with torch.autocast("cpu", torch.bfloat16):
        moved, still_equal = rule.move(labels), rule.move(label.expand_as(labels))
    assert exact.dtype == moved.dtype == torch.float32
    assert_equal_labels(moved.sum(-1), torch.ones(moved.shape[:-1]))
    assert_equal_labels(still_equal, label.expand_as(still_equal))
    # attention is that of the features, whose logits are rounded; nothing else may differ
    torch.testing.assert_close(moved, exact, atol=0.1 if name in ATTENDS else 2e-6, rtol=0)
