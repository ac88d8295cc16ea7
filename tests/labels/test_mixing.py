"""CutMix: the draw, its application, and the labels that follow from the mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tlalign_mm.labels import MixParams, apply_mix, area_labels, draw_cutmix, token_labels


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(batch: int = 4, size: tuple[int, int] = (16, 24), seed: int = 0, **kw) -> MixParams:
    return draw_cutmix(batch, size, generator(seed), **kw)


def coverage_by_loops(mask: Tensor, patch: int) -> Tensor:
    """Share of each patch that the mask covers, counting the pixels that exist."""
    height, width = mask.shape
    shares = []
    for top in range(0, height, patch):
        for left in range(0, width, patch):
            inside = [
                mask[y, x].item()
                for y in range(top, min(top + patch, height))
                for x in range(left, min(left + patch, width))
            ]
            shares.append(sum(inside) / len(inside))
    return torch.tensor(shares)


settings = {
    "batch": st.integers(1, 5),
    "height": st.integers(1, 19),
    "width": st.integers(1, 19),
    "patch": st.integers(1, 6),
    "seed": st.integers(0, 10_000),
    "per_sample": st.booleans(),
}


@given(**settings)
def test_token_labels_are_exact_coverage_and_rows_sum_to_one(
    batch: int, height: int, width: int, patch: int, seed: int, per_sample: bool
) -> None:
    params = draw(batch, (height, width), seed, per_sample=per_sample)
    labels = token_labels(params, patch)
    assert labels.dtype == torch.float32
    assert labels.min() >= 0
    torch.testing.assert_close(labels.sum(-1), torch.ones(labels.shape[:2]))
    for mask, label in zip(params.mask[:, 0], labels, strict=True):
        torch.testing.assert_close(label[:, 1], coverage_by_loops(mask, patch))


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
