"""Box ops of ``mmcv._ext``: nms, softnms and bbox_overlaps.

Names, argument order and out-parameters are those that mmcv/ops/nms.py and mmcv/ops/bbox.py call.
Boxes are (x1, y1, x2, y2) in pixels; with ``offset`` 1 a box spans ``x2 - x1 + 1`` pixels.
"""

import torch
import torchvision  # noqa: F401  (registers torch.ops.torchvision)
from torch import Tensor

from tlalign_mm.compat.precision import kernel_dtype


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Suppress every box that overlaps a better one by more than the threshold.

    Equal scores keep their input order. Mirrors the call in ``mmcv.ops.nms.NMSop``.

    Args:
        boxes: Shape (n, 4).
        scores: Shape (n,).
        iou_threshold: A box is dropped when its IoU with a kept one is above it, not at it.
        offset: 0 or 1.

    Returns:
        The kept indices, int64, best first.
    """
    dtype = kernel_dtype(boxes, scores)
    # Growing x2 and y2 gives every width, height and intersection the offset.
    grown = boxes.to(dtype) + torch.tensor([0, 0, offset, offset], dtype=dtype, device=boxes.device)
    # torchvision compares with a double; rounded to the boxes' dtype as in the compiled op, an IoU
    # that equals the threshold is kept.
    threshold = torch.tensor(iou_threshold, dtype=dtype).item()
    return torch.ops.torchvision.nms(grown, scores.to(dtype), threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Take the best box, lower the scores of those it overlaps, and repeat.

    Mirrors the call in ``mmcv.ops.nms.SoftNMSop``, which runs on the CPU.

    Args:
        boxes: Shape (n, 4).
        scores: Shape (n,).
        dets: Shape (n, 5), overwritten: its first k rows become the kept (box, score).
        iou_threshold: Overlap from which methods 0 and 1 lower a score.
        sigma: Width of the Gaussian of method 2.
        min_score: Boxes whose lowered score is below it are discarded.
        method: 0 drops overlapping boxes, 1 scales by ``1 - iou``, 2 by ``exp(-iou**2 / sigma)``.
        offset: 0 or 1.

    Returns:
        The k kept indices, int64, in the order of ``dets``.
    """
    dtype = kernel_dtype(boxes, scores)
    rows = torch.cat([boxes.to(dtype), scores.to(dtype)[:, None]], dim=1)  # (n, 5)
    inds = torch.arange(len(rows), device=boxes.device)
    current, count = 0, len(rows)
    while current < count:
        best = current + int(rows[current:count, 4].argmax())
        rows[[current, best]] = rows[[best, current]]
        inds[[current, best]] = inds[[best, current]]
        rest = rows[current + 1 : count]
        iou = _overlap(rows[current, :4], rest[:, :4], offset)
        rest[:, 4] *= _soft_weight(iou, iou_threshold, sigma, method)
        keep = ~(rest[:, 4] < min_score)
        _fill_holes(rest, keep)
        _fill_holes(inds[current + 1 : count], keep)
        current, count = current + 1, current + 1 + int(keep.sum())
    dets[:count].copy_(rows[:count])
    return inds[:count]


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int
) -> None:
    """Write the overlaps of two sets of boxes into ``ious``.

    Mirrors the call in ``mmcv.ops.bbox.bbox_overlaps``.

    Args:
        bboxes1: Shape (n, 4).
        bboxes2: Shape (m, 4).
        ious: Shape (n, m), or (n,) if aligned; overwritten.
        mode: 0 divides the intersection by the union, 1 by the area of the first box.
        aligned: Compare box i with box i only; needs n == m.
        offset: 0 or 1.
    """
    dtype = kernel_dtype(bboxes1, bboxes2)
    first = bboxes1.to(dtype) if aligned else bboxes1.to(dtype)[:, None]
    ious.copy_(_overlap(first, bboxes2.to(dtype), offset, over_first=mode == 1))


def _overlap(first: Tensor, second: Tensor, offset: int, over_first: bool = False) -> Tensor:
    # (..., 4) boxes, broadcast against each other -> (...)
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    shared = (high - low + offset).clamp(min=0).prod(dim=-1)
    area1 = (first[..., 2:] - first[..., :2] + offset).prod(dim=-1)
    if over_first:
        return shared / area1
    area2 = (second[..., 2:] - second[..., :2] + offset).prod(dim=-1)
    return shared / (area1 + area2 - shared)


def _soft_weight(iou: Tensor, iou_threshold: float, sigma: float, method: int) -> Tensor:
    if method == 2:
        return torch.exp(-(iou * iou) / sigma)
    lowered = 1 - iou if method == 1 else torch.zeros_like(iou)
    return torch.where(iou >= iou_threshold, lowered, torch.ones_like(iou))


def _fill_holes(table: Tensor, keep: Tensor) -> None:
    # Moves the last kept rows, last one first, into the places of the dropped rows before them:
    # the compiled op's order, which decides between equal scores.
    count = int(keep.sum())
    holes = (~keep[:count]).nonzero()[:, 0]
    movers = keep[count:].nonzero()[:, 0].flip(0) + count
    table[holes] = table[movers]


MMCV_OPS = {"nms": nms, "softnms": softnms, "bbox_overlaps": bbox_overlaps}
