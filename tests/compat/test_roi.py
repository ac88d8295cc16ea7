import pytest
import torch

from tests.compat import plain_ops
from tlalign_mm.compat import install_mmcv_ext

pytest.importorskip("mmcv")
if not install_mmcv_ext():
    pytest.skip("mmcv brings its compiled ops", allow_module_level=True)

from mmcv.ops import RoIAlign, RoIPool  # noqa: E402

LOW_PRECISION = [torch.float16, torch.bfloat16]

# image, x1, y1, x2, y2 in a field of 14 by 12: inside, over the border, tiny, outside.
ROIS = [
    [0.0, 1.0, 2.0, 9.0, 11.0],
    [1.0, -3.0, 4.5, 6.0, 19.0],
    [1.0, 5.25, 5.5, 5.5, 6.0],
    [0.0, 40.0, 40.0, 50.0, 45.0],
]


@pytest.fixture
def features():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 6, 7, generator=generator, dtype=torch.float64)


@pytest.fixture
def rois():
    return torch.tensor(ROIS, dtype=torch.float64)


def gradient(pooled, features):
    """Of a sum with a different factor for every value pooled."""
    factors = torch.arange(1, pooled.numel() + 1, dtype=pooled.dtype).view_as(pooled)
    return torch.autograd.grad((pooled * factors).sum(), features)[0]


class TestRoIAlign:
    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("sampling_ratio", [0, 2])
    def test_equals_the_plain_one(self, features, rois, sampling_ratio, aligned):
        features.requires_grad_()
        layer = RoIAlign((2, 3), 0.5, sampling_ratio, aligned=aligned)
        actual = layer(features, rois)
        expected = plain_ops.roi_align(features, rois, (2, 3), 0.5, sampling_ratio, aligned)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradient(actual, features), gradient(expected, features))

    @pytest.mark.parametrize("rois_dtype", [None, torch.float32])
    @pytest.mark.parametrize("dtype", LOW_PRECISION)
    def test_rounds_once_in_low_precision(self, features, rois, dtype, rois_dtype):
        low = features.to(dtype).requires_grad_()
        layer = RoIAlign(2, 0.5)
        actual = layer(low, rois.to(rois_dtype or dtype))
        assert torch.equal(actual, layer(low.float(), rois.float()).to(dtype))
        assert torch.autograd.grad(actual.sum(), low)[0].dtype == dtype

    def test_works_under_autocast(self, features, rois):
        low, rois = features.bfloat16().requires_grad_(), rois.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = RoIAlign(2, 0.5)(low, rois)
            actual.sum().backward()
        assert torch.equal(actual, RoIAlign(2, 0.5)(low, rois))

    def test_takes_strided_tensors(self, features, rois):
        layer = RoIAlign(2, 0.5)
        strided = features.to(memory_format=torch.channels_last)
        assert torch.equal(layer(strided, rois.t().contiguous().t()), layer(features, rois))

    def test_no_rois_give_an_empty_result_and_a_zero_gradient(self, features):
        features.requires_grad_()
        pooled = RoIAlign((2, 3))(features, torch.zeros(0, 5, dtype=torch.float64))
        assert pooled.shape == (0, 3, 2, 3)
        assert torch.equal(gradient(pooled, features), torch.zeros_like(features))

    @pytest.mark.parametrize("sampling_ratio", [0, 2])
    def test_a_roi_without_area_is_no_nan(self, features, sampling_ratio):
        point = torch.tensor([[0.0, 3, 3, 3, 3]], dtype=torch.float64)
        assert RoIAlign(2, 1.0, sampling_ratio)(features, point).isfinite().all()

    def test_refuses_the_maximum(self, features, rois):
        with pytest.raises(NotImplementedError, match="pool_mode='avg'"):
            RoIAlign(2, pool_mode="max")(features, rois)

    @pytest.mark.parametrize(
        "roi, reason",
        [
            ([0, float("nan"), 0, 4, 4], "finite"),
            ([0, 0, 0, float("inf"), 4], "finite"),
            ([2, 0, 0, 4, 4], "image index below 2"),
            ([-1, 0, 0, 4, 4], "image index below 2"),
            ([0, 4, 0, 2, 4], "negative width or height"),
        ],
    )
    def test_refuses_what_would_read_outside_the_features(self, features, roi, reason):
        with pytest.raises(ValueError, match=reason):
            RoIAlign(2)(features, torch.tensor([roi], dtype=torch.float64))

    def test_legacy_mode_gives_a_negative_size_one_pixel(self, features):
        flipped = torch.tensor([[0.0, 4, 0, 2, 4]], dtype=torch.float64)
        expected = plain_ops.roi_align(features, flipped, (2, 2), 1.0, 0, False)
        torch.testing.assert_close(RoIAlign(2, aligned=False)(features, flipped), expected)


class TestRoIPool:
    @pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
    def test_equals_the_plain_one(self, features, rois, scale):
        features.requires_grad_()
        actual = RoIPool((2, 3), scale)(features, rois)
        expected = plain_ops.roi_pool(features, rois, (2, 3), scale)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradient(actual, features), gradient(expected, features))

    def test_the_first_of_equal_maxima_has_the_gradient(self):
        features = torch.ones(1, 1, 3, 3, requires_grad=True)
        RoIPool(1)(features, torch.tensor([[0.0, 0, 1, 2, 2]])).sum().backward()
        assert features.grad.flatten().nonzero().tolist() == [[3]]

    def test_a_roi_without_area_gives_zeros_and_no_gradient(self, features):
        features.requires_grad_()
        flipped = torch.tensor([[0.0, 4, 0, 2, 4]], dtype=torch.float64)
        pooled = RoIPool(2)(features, flipped)
        assert not pooled.any()
        assert not gradient(pooled, features).any()

    @pytest.mark.parametrize("dtype", LOW_PRECISION)
    def test_low_precision(self, features, rois, dtype):
        low = features.to(dtype).requires_grad_()
        actual = RoIPool(2, 0.5)(low, rois.to(dtype))
        assert torch.equal(actual, RoIPool(2, 0.5)(low.float(), rois.float()).to(dtype))
        assert torch.autograd.grad(actual.sum(), low)[0].dtype == dtype

    def test_no_rois_give_an_empty_result(self, features):
        features.requires_grad_()
        pooled = RoIPool((2, 3))(features, torch.zeros(0, 5, dtype=torch.float64))
        assert pooled.shape == (0, 3, 2, 3)
        assert not gradient(pooled, features).any()

    def test_refuses_an_image_that_is_not_there(self, features):
        with pytest.raises(ValueError, match="image index below 2"):
            RoIPool(2)(features, torch.tensor([[2.0, 0, 0, 4, 4]], dtype=torch.float64))
