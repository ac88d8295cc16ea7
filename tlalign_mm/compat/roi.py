"""Region ops of ``mmcv._ext``: roi_align and roi_pool.

Names, argument order and out-parameters are those that mmcv/ops/roi_align.py and
mmcv/ops/roi_pool.py call. A roi is (image index, x1, y1, x2, y2), its coordinates in pixels of the
network input; ``spatial_scale`` turns them into pixels of the feature map.
"""

import torch
import torchvision  # noqa: F401  (registers torch.ops.torchvision)
from torch import Tensor

from tlalign_mm.compat.precision import kernel_dtype

_AVERAGE = 1  # mmcv's code for pool_mode 'avg'


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Average bilinear samples in every bin of every roi.

    Mirrors the call in ``mmcv.ops.roi_align.RoIAlignFunction.forward``.

    Args:
        input: Features, shape (b, c, h, w).
        rois: Shape (n, 5).
        output: Shape (n, c, aligned_height, aligned_width), overwritten.
        argmax_y: Belongs to max pooling; not used.
        argmax_x: As ``argmax_y``.
        aligned_height: Bins per roi, vertically.
        aligned_width: Bins per roi, horizontally.
        spatial_scale: Feature pixels per input pixel.
        sampling_ratio: Samples per bin and axis; 0 for one per feature pixel.
        pool_mode: 1 for the average.
        aligned: Shift the rois by half a feature pixel.

    Raises:
        NotImplementedError: If ``pool_mode`` asks for the maximum.
        ValueError: On the CPU, for rois that are not finite, name no image of the batch, or if
            aligned have a negative size.
    """
    _require_average(pool_mode)
    _check_rois(rois, batch_size=input.size(0), sized=aligned)
    dtype = kernel_dtype(input, rois)
    bins = (spatial_scale, aligned_height, aligned_width)
    pooled = torch.ops.torchvision.roi_align(
        input.to(dtype), rois.to(dtype), *bins, sampling_ratio, aligned
    )
    output.copy_(pooled)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Add the gradient of ``roi_align_forward`` to ``grad_input``.

    Mirrors the call in ``mmcv.ops.roi_align.RoIAlignFunction.backward``: ``grad_output`` has the
    shape of the forward pass's output, ``grad_input`` that of its input, and the others are its
    own arguments.

    Raises:
        NotImplementedError: If ``pool_mode`` asks for the maximum.
    """
    _require_average(pool_mode)
    dtype = kernel_dtype(grad_output, rois)
    gradient = torch.ops.torchvision._roi_align_backward(
        grad_output.to(dtype),
        rois.to(dtype),
        spatial_scale,
        aligned_height,
        aligned_width,
        *grad_input.shape,
        sampling_ratio,
        aligned,
    )
    grad_input.add_(gradient)


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Take the maximum of the feature pixels that every bin of every roi touches.

    Mirrors the call in ``mmcv.ops.roi_pool.RoIPoolFunction.forward``. torchvision rounds the rois
    to whole pixels where mmcv keeps fractions, so the bins are computed here and each goes to
    torchvision as a roi of its own. A roi without area gives zeros and no gradient.

    Args:
        input: Features, shape (b, c, h, w).
        rois: Shape (n, 5).
        output: Shape (n, c, pooled_height, pooled_width), overwritten.
        argmax: As ``output``, int32, overwritten: ``y * w + x`` of the maximum, -1 for none.
        pooled_height: Bins per roi, vertically.
        pooled_width: Bins per roi, horizontally.
        spatial_scale: Feature pixels per input pixel.

    Raises:
        ValueError: On the CPU, for rois that are not finite or name no image of the batch.
    """
    _check_rois(rois, batch_size=input.size(0), sized=False)
    dtype = kernel_dtype(input, rois)
    bins, empty = _split_rois(
        rois.to(dtype), spatial_scale, (pooled_height, pooled_width), input.shape[2:]
    )
    best, place = torch.ops.torchvision.roi_pool(
        input.to(dtype), bins.flatten(0, 2), 1.0, 1, 1
    )  # each (n * pooled_height * pooled_width, c, 1, 1)
    per_bin = (*bins.shape[:3], input.size(1))
    output.copy_(best.reshape(per_bin).permute(0, 3, 1, 2).masked_fill(empty, 0))
    argmax.copy_(place.reshape(per_bin).permute(0, 3, 1, 2).masked_fill(empty, -1))


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Add the gradient of ``roi_pool_forward`` to ``grad_input``.

    Mirrors the call in ``mmcv.ops.roi_pool.RoIPoolFunction.backward``: ``grad_output`` has the
    shape of the forward pass's output, ``grad_input`` that of its input, ``argmax`` is what it
    wrote, and the others are its own arguments.
    """
    dtype = kernel_dtype(grad_output, rois)
    gradient = torch.ops.torchvision._roi_pool_backward(
        grad_output.to(dtype),
        rois.to(dtype),
        argmax,
        spatial_scale,
        pooled_height,
        pooled_width,
        *grad_input.shape,
    )
    grad_input.add_(gradient)


def _require_average(pool_mode: int) -> None:
    if pool_mode != _AVERAGE:
        raise NotImplementedError(
            "The torchvision fallback for mmcv's roi_align averages only; use pool_mode='avg', "
            "or install mmcv with compiled ops for pool_mode='max'."
        )


def _check_rois(rois: Tensor, batch_size: int, sized: bool) -> None:
    # On the CPU such rois crash the process; on a GPU looking at them would stall its queue.
    if rois.device.type != "cpu":
        return
    if not rois.isfinite().all():
        raise ValueError("rois must be finite")
    image = rois[:, 0]
    if ((image < 0) | (image >= batch_size)).any():
        raise ValueError(f"the first column of rois must be an image index below {batch_size}")
    if sized and (rois[:, 3:] < rois[:, 1:3]).any():
        raise ValueError("rois must not have a negative width or height")


def _split_rois(
    rois: Tensor, spatial_scale: float, bins: tuple[int, int], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    # Every bin as a roi in whole feature pixels, last one included, (n, bins_h, bins_w, 5);
    # and which hold no pixel, (n, 1, bins_h, bins_w).
    top, bottom = _bin_edges(rois[:, 2], rois[:, 4], spatial_scale, bins[0], size[0])
    left, right = _bin_edges(rois[:, 1], rois[:, 3], spatial_scale, bins[1], size[1])
    rows, columns = (slice(None), slice(None), None), (slice(None), None, slice(None))
    image, x1, y1, x2, y2 = torch.broadcast_tensors(
        rois[:, :1, None], left[columns], top[rows], right[columns], bottom[rows]
    )
    empty = (x2 <= x1) | (y2 <= y1)
    return torch.stack([image, x1, y1, x2 - 1, y2 - 1], dim=-1), empty[:, None]


def _bin_edges(
    start: Tensor, stop: Tensor, spatial_scale: float, bins: int, limit: int
) -> tuple[Tensor, Tensor]:
    # Per roi (n,) -> first pixel of each bin and the one after its last, (n, bins).
    start = (start * spatial_scale)[:, None]
    size = ((stop + 1) * spatial_scale)[:, None] - start
    index = torch.arange(bins, dtype=start.dtype, device=start.device)
    low = (index * (size / bins) + start).floor().clamp(0, limit)
    high = ((index + 1) * (size / bins) + start).ceil().clamp(0, limit)
    return low, torch.where(size > 0, high, low)


MMCV_OPS = {
    "roi_align_forward": roi_align_forward,
    "roi_align_backward": roi_align_backward,
    "roi_pool_forward": roi_pool_forward,
    "roi_pool_backward": roi_pool_backward,
}
