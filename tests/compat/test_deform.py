import pytest
import torch

from tests.compat import plain_ops
from tlalign_mm.compat import install_mmcv_ext

pytest.importorskip("mmcv")
if not install_mmcv_ext():
    pytest.skip("mmcv brings its compiled ops", allow_module_level=True)

from mmcv.ops import (  # noqa: E402
    DeformConv2d,
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    deform_conv2d,
    modulated_deform_conv2d,
)

# Name: kernel, stride, padding, dilation, groups, deform_groups
GEOMETRIES = {
    "simple": ((3, 3), (1, 1), (0, 0), (1, 1), 1, 1),
    "uneven": ((2, 3), (2, 1), (0, 1), (1, 2), 1, 1),
    "grouped": ((2, 2), (1, 1), (1, 0), (1, 1), 2, 2),
}


def random_operands(kernel, stride, padding, dilation, groups, deform_groups, batch=2):
    """Input (b, 4, 4, 5), offset, mask, weight and bias with gradients on."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip((4, 5), kernel, stride, padding, dilation, strict=True)
    ]
    taps = deform_groups * kernel[0] * kernel[1]
    return (
        draw(batch, 4, 4, 5),
        draw(batch, 2 * taps, *out),
        draw(batch, taps, *out),
        draw(2, 4 // groups, *kernel),
        draw(2),
    )


def assert_same_values_and_gradients(actual, expected, operands):
    torch.testing.assert_close(actual, expected)
    factors = torch.arange(1, actual.numel() + 1, dtype=actual.dtype).view_as(actual)
    for ours, theirs in zip(
        torch.autograd.grad((actual * factors).sum(), operands),
        torch.autograd.grad((expected * factors).sum(), operands),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


class TestDeformConv:
    @pytest.mark.parametrize("name", GEOMETRIES)
    def test_equals_the_plain_one(self, name):
        geometry = GEOMETRIES[name][1:]
        x, offset, _, weight, _ = random_operands(*GEOMETRIES[name])
        actual = deform_conv2d(x, offset, weight, *geometry)
        expected = plain_ops.deform_conv(x, offset, weight, *geometry)
        assert_same_values_and_gradients(actual, expected, (x, offset, weight))

    def test_the_batch_split_changes_nothing(self):
        x, offset, _, weight, _ = random_operands(*GEOMETRIES["simple"], batch=4)
        geometry = GEOMETRIES["simple"][1:]
        whole, split = (deform_conv2d(x, offset, weight, *geometry, False, step) for step in (4, 2))
        assert_same_values_and_gradients(split, whole, (x, offset, weight))

    def test_takes_strided_tensors(self):
        x, offset, _, weight, _ = random_operands(*GEOMETRIES["simple"])
        strided = [t.detach().to(memory_format=torch.channels_last) for t in (x, offset, weight)]
        expected = deform_conv2d(x, offset, weight)
        torch.testing.assert_close(deform_conv2d(*strided), expected)

    def test_the_layer_takes_an_input_smaller_than_its_kernel(self):
        layer = DeformConv2d(2, 3, kernel_size=3, padding=1)
        out = layer(torch.rand(1, 2, 2, 2), torch.rand(1, 18, 2, 2))
        assert out.shape == (1, 3, 2, 2)

    def test_without_offsets_it_is_a_convolution(self):
        layer = DeformConv2dPack(2, 3, kernel_size=3, padding=1)
        x = torch.rand(1, 2, 5, 5)
        torch.testing.assert_close(layer(x), torch.conv2d(x, layer.weight, padding=1))

    def test_refuses_an_offset_of_the_wrong_size(self):
        with pytest.raises(RuntimeError, match="offset"):
            deform_conv2d(torch.rand(1, 2, 5, 5), torch.rand(1, 18, 2, 2), torch.rand(3, 2, 3, 3))


class TestModulatedDeformConv:
    @pytest.mark.parametrize("with_bias", [True, False])
    @pytest.mark.parametrize("name", GEOMETRIES)
    def test_equals_the_plain_one(self, name, with_bias):
        geometry = GEOMETRIES[name][1:]
        x, offset, mask, weight, bias = random_operands(*GEOMETRIES[name])
        operands = (x, offset, mask, weight, bias) if with_bias else (x, offset, mask, weight)
        bias = bias if with_bias else None
        actual = modulated_deform_conv2d(x, offset, mask, weight, bias, *geometry)
        expected = plain_ops.deform_conv(x, offset, weight, *geometry, mask, bias)
        assert_same_values_and_gradients(actual, expected, operands)

    def test_with_a_mask_of_halves_it_is_half_a_convolution(self):
        layer = ModulatedDeformConv2dPack(2, 3, kernel_size=3, padding=1, bias=False)
        x = torch.rand(1, 2, 5, 5)
        torch.testing.assert_close(layer(x), torch.conv2d(x, layer.weight, padding=1) / 2)


class TestLowPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_rounds_once(self, dtype):
        low = [
            t.detach().to(dtype).requires_grad_() for t in random_operands(*GEOMETRIES["simple"])
        ]
        actual = modulated_deform_conv2d(*low)
        assert torch.equal(actual, modulated_deform_conv2d(*(t.float() for t in low)).to(dtype))
        assert all(g.dtype == dtype for g in torch.autograd.grad(actual.sum(), low))

    def test_mixed_dtypes_follow_the_offset(self):
        x, offset, mask, weight, bias = random_operands(*GEOMETRIES["simple"])
        out = modulated_deform_conv2d(x.float(), offset.half(), mask, weight, bias.half())
        assert out.dtype == torch.float16

    @pytest.mark.parametrize("layer_type", [DeformConv2dPack, ModulatedDeformConv2dPack])
    def test_layers_train_under_autocast(self, layer_type):
        layer = layer_type(2, 3, kernel_size=3, padding=1)
        x = torch.rand(1, 2, 5, 5)
        exact = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
            out.sum().backward()
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), exact, atol=0.02, rtol=0.02)
        assert layer.weight.grad.isfinite().all()

    def test_autocast_leaves_a_float32_backward_pass_exact(self):
        operands = [
            t.detach().float().requires_grad_() for t in random_operands(*GEOMETRIES["simple"])
        ]
        expected = torch.autograd.grad(modulated_deform_conv2d(*operands).sum(), operands)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = torch.autograd.grad(modulated_deform_conv2d(*operands).sum(), operands)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
