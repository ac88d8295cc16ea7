"""CutMix: the draw, its application, and the labels that follow from the mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.labels.masks import cell, mixed_batches
from tests.labels.rules import batches
from tlalign_mm.labels import MixParams, apply_mix, area_labels, draw_cutmix, pool, token_labels


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(batch: int = 4, size: tuple[int, int] = (16, 24), seed: int = 0, **kw) -> MixParams:
    return draw_cutmix(batch, size, generator(seed), **kw)


def coverage_by_loops(mask: Tensor, patch: int) -> Tensor:
    """(N,) share of each patch that the mask covers, counting the pixels that exist."""
    height, width = mask.shape
    shares = []
    for row in range(-(-height // patch)):
        for column in range(-(-width // patch)):
            pixels = cell(mask, row, column, patch)
            shares.append(sum(pixels) / len(pixels))
    return torch.tensor(shares)


sizes = {
    "data": st.data(),
    "batch": batches,
    "height": st.integers(1, 19),
    "width": st.integers(1, 19),
}
settings = {
    "batch": st.integers(1, 5),
    "height": st.integers(1, 19),
    "width": st.integers(1, 19),
    "patch": st.integers(1, 6),
    "seed": st.integers(0, 10_000),
    "per_sample": st.booleans(),
}


@given(**sizes, patch=st.integers(1, 6))
def test_token_labels_are_exact_coverage_and_rows_sum_to_one(
    data: DataObject, batch: int, height: int, width: int, patch: int
) -> None:
    params = data.draw(mixed_batches(batch, (height, width)))
    labels = token_labels(params, patch)
    assert labels.dtype == torch.float32
    assert labels.min() >= 0
    torch.testing.assert_close(labels.sum(-1), torch.ones(labels.shape[:2]))
    for mask, label in zip(params.mask[:, 0], labels, strict=True):
        torch.testing.assert_close(label[:, 1], coverage_by_loops(mask, patch))


@given(**sizes)
def test_area_labels_are_the_share_of_all_pixels(
    data: DataObject, batch: int, height: int, width: int
) -> None:
    params = data.draw(mixed_batches(batch, (height, width)))
    labels = area_labels(params)
    assert labels.dtype == torch.float32
    assert labels.min() >= 0
    for mask, label in zip(params.mask[:, 0], labels, strict=True):
        pixels = mask.flatten().tolist()
        partner = sum(pixels) / len(pixels)
        torch.testing.assert_close(label, torch.tensor([1 - partner, partner]))


@given(data=st.data(), batch=batches, grid=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_whole_patches_pool_to_the_area_label(data: DataObject, batch: int, grid: tuple) -> None:
    params = data.draw(mixed_batches(batch, (3 * grid[0], 3 * grid[1])))
    torch.testing.assert_close(pool(token_labels(params, 3)), area_labels(params))


@given(data=st.data(), batch=batches, grid=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_turned_images_turn_their_token_labels(
    data: DataObject, batch: int, grid: tuple[int, int]
) -> None:
    params = data.draw(mixed_batches(batch, (3 * grid[0], 3 * grid[1])))
    labels = token_labels(params, 3).unflatten(1, grid)  # (B, H, W, 2), row-major
    flipped = params._replace(mask=params.mask.flip(2))
    torch.testing.assert_close(token_labels(flipped, 3), labels.flip(1).flatten(1, 2))
    turned = params._replace(mask=params.mask.transpose(2, 3))
    torch.testing.assert_close(token_labels(turned, 3), labels.transpose(1, 2).flatten(1, 2))


@given(share=st.floats(0, 1), patch=st.integers(1, 6))
def test_mixup_gives_every_token_the_same_label(share: float, patch: int) -> None:
    params = MixParams(torch.tensor([1, 0]), torch.full((2, 1, 7, 10), share))
    labels = token_labels(params, patch)
    torch.testing.assert_close(labels, torch.tensor([1 - share, share]).expand_as(labels))


def test_labels_stay_exact_inside_autocast() -> None:
    params = draw(4, (19, 13), per_sample=True)
    with torch.autocast("cpu", torch.bfloat16):
        labels, area = token_labels(params, 4), area_labels(params)
    assert torch.equal(labels, token_labels(params, 4))
    assert torch.equal(area, area_labels(params))


@given(**sizes)
def test_mixing_is_pixel_by_pixel(data: DataObject, batch: int, height: int, width: int) -> None:
    params = data.draw(mixed_batches(batch, (height, width)))
    images = torch.randn(batch, 2, height, width)
    mixed = apply_mix(images, params)
    for b in range(batch):
        own, partner, share = images[b], images[params.partner[b]], params.mask[b]
        torch.testing.assert_close(mixed[b], (1 - share) * own + share * partner)


@given(**settings)
def test_lam_is_the_share_that_was_not_pasted(
    batch: int, height: int, width: int, patch: int, seed: int, per_sample: bool
) -> None:
    params = draw(batch, (height, width), seed, per_sample=per_sample)
    own = torch.zeros(batch, 3, height, width)
    mixed = apply_mix(torch.cat([own]) + torch.arange(batch)[:, None, None, None], params)
    for i, image in enumerate(mixed):
        if params.partner[i] == i:
            assert params.lam[i] == 1, "an image that is its own partner counts as unmixed"
        else:
            kept = (image == i).float().mean()
            torch.testing.assert_close(params.lam[i], kept)
    torch.testing.assert_close(area_labels(params)[:, 0], params.lam)


def test_the_box_is_a_rectangle_with_the_nominal_side() -> None:
    for seed in range(50):
        mask = draw(2, (32, 32), seed).mask[0, 0].bool()
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns[None, :])
        for side in (rows, columns):  # one stretch, no gap
            assert (side.diff() != 0).sum() <= 2


def test_mean_area_follows_the_beta_distribution() -> None:
    # alpha = 1: the nominal pasted share is uniform, mean 1/2; clipping at the border lowers it
    params = draw_cutmix(4000, (64, 64), generator(), per_sample=True)
    assert 0.25 < 1 - params.lam.mean() < 0.45


def test_a_cell_of_patch_size_gives_labels_of_zero_and_one() -> None:
    labels = token_labels(draw(64, (32, 32), cell=4, per_sample=True), 4)
    assert set(labels.unique().tolist()) == {0.0, 1.0}


def test_the_generator_alone_decides() -> None:
    torch.manual_seed(1)
    first = draw(seed=5)
    torch.manual_seed(2)
    second, other = draw(seed=5), draw(seed=6)
    assert torch.equal(first.mask, second.mask)
    assert not torch.equal(first.mask, other.mask)


def test_one_box_a_batch_or_one_a_sample() -> None:
    shared = draw(8, seed=3).mask
    assert all(torch.equal(shared[0], mask) for mask in shared)
    single = draw(8, seed=3, per_sample=True).mask
    assert any(not torch.equal(single[0], mask) for mask in single)


def test_prob_zero_leaves_every_image_alone() -> None:
    params = draw(prob=0.0)
    images = torch.randn(4, 3, 16, 24)
    assert torch.equal(apply_mix(images, params), images)
    assert torch.equal(area_labels(params), torch.tensor([[1.0, 0.0]]).expand(4, 2))


@pytest.mark.parametrize("batch", [1, 3])
def test_odd_batches_leave_the_middle_image_unmixed(batch: int) -> None:
    params = draw(batch)
    assert params.partner[batch // 2] == batch // 2
    assert params.lam[batch // 2] == 1


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"cell": 0}, {"prob": 1.5}, {"prob": -0.1}])
def test_wrong_settings_are_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        draw(**wrong)
