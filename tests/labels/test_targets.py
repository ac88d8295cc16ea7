"""Targets over classes and TransMix, against plain loops and at their limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.labels.masks import cell, mixed_batches
from tests.labels.rules import batches, distributions, transpose
from tlalign_mm.labels import (
    MixParams,
    area_labels,
    class_targets,
    smoothed_one_hot,
    token_labels,
    transmix_labels,
)

BOTH_MASKS = pytest.mark.parametrize("token_mask", ["nearest", "coverage"])


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_classes=st.integers(6, 9),
    smoothing=st.floats(0, 0.99),
)
def test_smoothing_spreads_its_mass_over_all_classes(
    labels: list[int], num_classes: int, smoothing: float
) -> None:
    expected = torch.zeros(len(labels), num_classes)
    for b in range(len(labels)):
        for c in range(num_classes):
            kept = 1 - smoothing if c == labels[b] else 0
            expected[b, c] = kept + smoothing / num_classes
    target = smoothed_one_hot(torch.tensor(labels), num_classes, smoothing)
    assert target.dtype == torch.float32
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(target.sum(-1), torch.ones(len(labels)))


def test_smoothing_by_hand() -> None:
    target = smoothed_one_hot(torch.tensor([1]), 10, smoothing=0.1)
    assert target[0, :3].tolist() == pytest.approx([0.01, 0.91, 0.01])
    assert smoothed_one_hot(torch.tensor([1]), 3).tolist() == [[0, 1, 0]]


@given(data=st.data(), batch=batches, num_classes=st.integers(1, 5))
def test_class_targets_mix_own_and_partner_target(
    data: DataObject, batch: int, num_classes: int
) -> None:
    shares = data.draw(distributions((batch,), 2))
    targets = data.draw(distributions((batch,), num_classes))
    partner = torch.tensor(data.draw(st.permutations(range(batch))))
    expected = torch.zeros(batch, num_classes)
    for b in range(batch):
        for c in range(num_classes):
            own, other = targets[b, c].item(), targets[partner[b], c].item()
            expected[b, c] = shares[b, 0].item() * own + shares[b, 1].item() * other
    mixed = class_targets(shares, targets, partner)
    torch.testing.assert_close(mixed, expected)
    assert mixed.min() >= 0
    torch.testing.assert_close(mixed.sum(-1), torch.ones(batch))
    same = targets[:1].expand(batch, -1)  # equal targets stay equal
    torch.testing.assert_close(class_targets(shares, same, partner), same)


def transmix_by_loops(
    attention: Tensor, mask: Tensor, stride: int, ratio: float, token_mask: str
) -> Tensor:
    out = torch.zeros(len(attention), 2)
    for b in range(len(attention)):
        area = mask[b, 0].flatten().tolist()
        own_area = 1 - sum(area) / len(area)
        own, total = 0.0, 0.0
        for y in range(attention.shape[1]):
            for x in range(attention.shape[2]):
                pixels, weight = cell(mask[b, 0], y, x, stride), attention[b, y, x].item()
                partner = pixels[0] if token_mask == "nearest" else sum(pixels) / len(pixels)
                own += weight * (1 - partner)
                total += weight
        own_attention = own / total if total > 1e-6 else own_area
        out[b, 0] = (1 - ratio) * own_area + ratio * own_attention
        out[b, 1] = 1 - out[b, 0]
    return out


@BOTH_MASKS
@given(
    data=st.data(),
    batch=batches,
    size=st.tuples(st.integers(1, 11), st.integers(1, 11)),  # also no multiple of the stride
    stride=st.integers(1, 6),
    ratio=st.floats(0, 1),
)
def test_transmix_is_its_definition_on_any_map(
    token_mask: str, data: DataObject, batch: int, size: tuple, stride: int, ratio: float
) -> None:
    params = data.draw(mixed_batches(batch, size))
    grid = [-(-side // stride) for side in size]
    attention = data.draw(distributions((batch,), grid[0] * grid[1])).view(batch, *grid)
    seen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    attention = attention * seen[:, None, None] * 0.9  # the class token's own share is left out
    labels = transmix_labels(attention, params, stride, ratio, token_mask)
    expected = transmix_by_loops(attention, params.mask, stride, ratio, token_mask)
    torch.testing.assert_close(labels, expected)
    assert labels.min() >= 0
    torch.testing.assert_close(labels.sum(-1), torch.ones(batch))


def left_half_pasted(batch: int = 2, height: int = 8, width: int = 16, up_to: int = 8) -> MixParams:
    mask = torch.zeros(batch, 1, height, width)
    mask[..., :up_to] = 1
    return MixParams(torch.arange(batch).flip(0), mask)


@BOTH_MASKS
def test_ratio_zero_is_the_area_and_one_the_attention(token_mask: str) -> None:
    params = left_half_pasted(up_to=4)  # the first of four columns of tokens
    attention = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.0, 0.0, 0.0]])
    attention = torch.stack([attention, torch.zeros(2, 4)], dim=1)  # (B, 2, 4), second row unseen
    move = lambda ratio: transmix_labels(attention, params, 4, ratio, token_mask)  # noqa: E731
    assert torch.equal(move(0.0), area_labels(params))
    assert torch.equal(move(1.0), torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    assert torch.equal(move(0.5), torch.tensor([[0.625, 0.375], [0.375, 0.625]]))
    assert torch.equal(transmix_labels(attention, params, 4), move(0.5)), "published: half, half"


def test_a_token_on_the_edge_of_a_box_belongs_to_its_first_pixel_or_to_both() -> None:
    params = left_half_pasted(up_to=5)  # covers a quarter of the second column of tokens
    attention = torch.zeros(2, 2, 4)
    attention[:, :, 1] = 1.0
    nearest = transmix_labels(attention, params, 4, ratio=1.0)
    assert torch.equal(nearest, torch.tensor([[0.0, 1.0]]).expand(2, 2))
    coverage = transmix_labels(attention, params, 4, ratio=1.0, token_mask="coverage")
    assert torch.equal(coverage, torch.tensor([[0.75, 0.25]]).expand(2, 2))


@BOTH_MASKS
@pytest.mark.parametrize("stride", [4, 8, 16, 32])
def test_the_stride_of_a_later_map(stride: int, token_mask: str) -> None:
    params = left_half_pasted(height=32, width=64, up_to=32)
    attention = torch.zeros(2, 32 // stride, 64 // stride)
    attention[0, 0, 0] = attention[1, -1, -1] = 0.7  # one looks at the partner, one at itself
    labels = transmix_labels(attention, params, stride, 1.0, token_mask)
    assert torch.equal(labels, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_even_attention_covers_the_area() -> None:
    params, attention = left_half_pasted(up_to=5), torch.full((2, 2, 4), 0.1)
    labels = transmix_labels(attention, params, 4, 1.0, token_mask="coverage")
    torch.testing.assert_close(labels, area_labels(params))


@BOTH_MASKS
@given(data=st.data(), batch=batches, ratio=st.floats(0, 1))
def test_permuting_tokens_and_their_pixels_changes_nothing(
    token_mask: str, data: DataObject, batch: int, ratio: float
) -> None:
    height, width, stride = 3, 4, 2
    params = data.draw(mixed_batches(batch, (height * stride, width * stride)))
    attention = data.draw(distributions((batch,), height * width)).view(batch, height, width)
    rows = torch.tensor(data.draw(st.permutations(range(height))))
    columns = torch.tensor(data.draw(st.permutations(range(width))))
    pixels = params.mask.unflatten(3, (width, stride)).unflatten(2, (height, stride))
    pixels = pixels[:, :, rows][:, :, :, :, columns].flatten(4, 5).flatten(2, 3)
    labels = transmix_labels(attention, params, stride, ratio, token_mask)
    permuted = transmix_labels(
        attention[:, rows][:, :, columns],
        params._replace(mask=pixels),
        stride,
        ratio,
        token_mask,
    )
    torch.testing.assert_close(permuted, labels)
    turned = params._replace(mask=params.mask.transpose(2, 3))
    torch.testing.assert_close(
        transmix_labels(transpose(attention), turned, stride, ratio, token_mask), labels
    )


@BOTH_MASKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # 1e-9 is 0 in float16
@pytest.mark.parametrize("unseen", [0.0, 1e-9, 1e-42])
def test_attention_of_almost_nothing_leaves_the_area_label(
    unseen: float, dtype: torch.dtype, token_mask: str
) -> None:
    params = left_half_pasted(up_to=4)
    attention = torch.zeros(2, 2, 4)
    attention[:, 0, 0] = torch.tensor([0.5, unseen])  # one image must not spoil the other
    attention = attention.to(dtype)
    labels = transmix_labels(attention, params, 4, 1.0, token_mask)
    assert torch.equal(labels[0], torch.tensor([0.0, 1.0]))
    assert torch.equal(labels[1], area_labels(params)[1])


@BOTH_MASKS
@given(lam=st.floats(0, 1), ratio=st.floats(0, 1))
def test_mixup_keeps_its_share(token_mask: str, lam: float, ratio: float) -> None:
    params = MixParams(torch.tensor([1, 0]), torch.full((2, 1, 9, 7), 1 - lam))
    attention = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0))
    labels = transmix_labels(attention, params, 3, ratio, token_mask)
    torch.testing.assert_close(labels, torch.tensor([[lam, 1 - lam]]).expand(2, 2))


@BOTH_MASKS
@given(ratio=st.floats(0, 1))
def test_an_unmixed_image_is_all_its_own(token_mask: str, ratio: float) -> None:
    params = MixParams(torch.tensor([1, 0]), torch.zeros(2, 1, 8, 8))
    attention = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = transmix_labels(attention, params, 4, ratio, token_mask)
    torch.testing.assert_close(labels, torch.tensor([[1.0, 0.0]]).expand(2, 2), atol=1e-7, rtol=0)
    assert torch.equal(token_labels(params, 4), torch.tensor([1.0, 0.0]).expand(2, 4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_transmix_sends_no_gradient_and_stays_in_float32(dtype: torch.dtype) -> None:
    params = left_half_pasted(up_to=5)
    attention = torch.rand(2, 2, 4).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        labels = transmix_labels(attention, params, 4, token_mask="coverage")
    assert labels.dtype == torch.float32 and not labels.requires_grad
    exact = transmix_labels(attention.float(), params, 4, token_mask="coverage")
    torch.testing.assert_close(labels, exact)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratio": 1.5}, "0 <= ratio <= 1.*ratio=1.5"),
        ({"ratio": -0.1}, "0 <= ratio <= 1.*ratio=-0.1"),
        ({"ratio": float("nan")}, "ratio=nan"),
        ({"token_mask": "bilinear"}, "nearest or coverage.*token_mask='bilinear'"),
        ({"stride": 8}, r"shape \(2, 2, 4\).*map of \(2, 1, 2\) at stride=8"),
    ],
)
def test_wrong_settings_are_named(wrong: dict, message: str) -> None:
    arguments = {"stride": 4, **wrong}
    with pytest.raises(ValueError, match=message):
        transmix_labels(torch.rand(2, 2, 4), left_half_pasted(), **arguments)


def test_a_map_on_its_side_is_refused() -> None:
    with pytest.raises(ValueError, match=r"class_attention has shape \(2, 4, 2\)"):
        transmix_labels(torch.rand(2, 4, 2), left_half_pasted(), stride=4)
