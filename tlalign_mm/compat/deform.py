"""Deformable convolutions of ``mmcv._ext``, version 1 and 2 (modulated).

Names, argument order and out-parameters are those that mmcv/ops/deform_conv.py and
mmcv/ops/modulated_deform_conv.py call. Shapes: input (b, c, h, w); weight (o, c / group, kh, kw);
offset (b, deformable_group * 2 * kh * kw, oh, ow) with (y, x) in pixels for each tap in turn;
mask (b, deformable_group * kh * kw, oh, ow); output (b, o, oh, ow). The buffers ``columns`` and
``ones`` and the batch split ``im2col_step`` concern mmcv's kernels and change no value.
"""

from typing import NamedTuple

import torch
import torchvision  # noqa: F401  (registers torch.ops.torchvision)
from torch import Tensor

from tlalign_mm.compat.precision import kernel_dtype


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Overwrite ``output`` with the deformable convolution.

    Mirrors the call in ``mmcv.ops.deform_conv.DeformConv2dFunction.forward``.

    Raises:
        RuntimeError: If the shapes do not fit each other.
    """
    geometry = _Geometry(dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
    output.copy_(_convolve(_Operands(input, weight, offset), geometry))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Write the gradients of the input and of the offset.

    Mirrors the first call in ``mmcv.ops.deform_conv.DeformConv2dFunction.backward``: adds to
    ``gradInput`` and overwrites ``gradOffset``.
    """
    geometry = _Geometry(dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
    gradients = _differentiate(gradOutput, _Operands(input, weight, offset), geometry)
    gradInput.add_(gradients.input)
    gradOffset.copy_(gradients.offset)


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Add ``scale`` times the gradient of the weight to ``gradWeight``.

    Mirrors the second call in ``mmcv.ops.deform_conv.DeformConv2dFunction.backward``.
    """
    geometry = _Geometry(dH, dW, padH, padW, dilationH, dilationW, group, deformable_group)
    # mmcv passes no weight here; its gradient depends on the shape alone.
    operands = _Operands(input, torch.zeros_like(gradWeight), offset)
    gradWeight.add_(_differentiate(gradOutput, operands, geometry).weight, alpha=scale)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Overwrite ``output`` with the deformable convolution whose taps ``mask`` scales.

    Mirrors the call in ``mmcv.ops.modulated_deform_conv.ModulatedDeformConv2dFunction.forward``;
    ``bias`` has shape (o,) and counts only ``with_bias``.

    Raises:
        RuntimeError: If the shapes do not fit each other.
    """
    geometry = _Geometry(
        stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, deformable_group
    )
    operands = _Operands(input, weight, offset, mask, bias if with_bias else None)
    output.copy_(_convolve(operands, geometry))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Write the five gradients of ``modulated_deform_conv_forward``.

    Mirrors the call in ``mmcv.ops.modulated_deform_conv.ModulatedDeformConv2dFunction.backward``:
    adds to ``grad_input``, ``grad_weight`` and, ``with_bias``, ``grad_bias``; overwrites
    ``grad_offset`` and ``grad_mask``.
    """
    geometry = _Geometry(
        stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, group, deformable_group
    )
    operands = _Operands(input, weight, offset, mask, bias if with_bias else None)
    gradients = _differentiate(grad_output, operands, geometry)
    grad_input.add_(gradients.input)
    grad_weight.add_(gradients.weight)
    grad_offset.copy_(gradients.offset)
    grad_mask.copy_(gradients.mask)
    if with_bias:
        grad_bias.add_(gradients.bias)


class _Geometry(NamedTuple):  # in the order of torchvision's op
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    dilation_w: int
    group: int
    deformable_group: int


class _Operands(NamedTuple):  # in the order of torchvision's op
    input: Tensor
    weight: Tensor
    offset: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "_Operands":
        # torchvision wants tensors for what is absent: a zero bias, a mask it does not look at.
        mask = self.input.new_zeros(len(self.input), 1) if self.mask is None else self.mask
        bias = self.input.new_zeros(len(self.weight)) if self.bias is None else self.bias
        operands = (self.input, self.weight, self.offset, mask, bias)
        return _Operands(*(operand.to(dtype) for operand in operands))


def _convolve(operands: _Operands, geometry: _Geometry) -> Tensor:
    dtype = kernel_dtype(operands.input, operands.weight, operands.offset)
    use_mask = operands.mask is not None
    with torch.autocast(operands.input.device.type, enabled=False):
        return torch.ops.torchvision.deform_conv2d(*operands.to(dtype), *geometry, use_mask)


def _differentiate(grad_output: Tensor, operands: _Operands, geometry: _Geometry) -> _Operands:
    dtype = kernel_dtype(grad_output, operands.input, operands.weight, operands.offset)
    use_mask = operands.mask is not None
    # A backward pass run under autocast would else have its matrix products in low precision.
    with torch.autocast(operands.input.device.type, enabled=False):
        gradients = torch.ops.torchvision._deform_conv2d_backward(
            grad_output.to(dtype), *operands.to(dtype), *geometry, use_mask
        )
    return _Operands(*gradients)


MMCV_OPS = {
    "deform_conv_forward": deform_conv_forward,
    "deform_conv_backward_input": deform_conv_backward_input,
    "deform_conv_backward_parameters": deform_conv_backward_parameters,
    "modulated_deform_conv_forward": modulated_deform_conv_forward,
    "modulated_deform_conv_backward": modulated_deform_conv_backward,
}
