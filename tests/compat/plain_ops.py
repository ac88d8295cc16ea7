"""The ops of ``mmcv._ext`` written as loops, slow and differentiable, to compare with."""

import math

import torch


def iou(a, b, offset=0, over_first=False):
    """Overlap of two boxes given as lists (x1, y1, x2, y2)."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    area_a = (a[2] - a[0] + offset) * (a[3] - a[1] + offset)
    area_b = (b[2] - b[0] + offset) * (b[3] - b[1] + offset)
    shared = width * height
    return shared / (area_a if over_first else area_a + area_b - shared)


def nms(boxes, scores, threshold, offset=0):
    boxes, scores, kept = boxes.tolist(), scores.tolist(), []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(iou(boxes[i], boxes[j], offset) <= threshold for j in kept):
            kept.append(i)
    return kept


def soft_nms(boxes, scores, threshold, sigma, min_score, method, offset=0):
    """Kept (index, score) pairs; a discarded candidate leaves its place to the last one."""
    boxes, kept = boxes.tolist(), []
    candidates = [[i, score] for i, score in enumerate(scores.tolist())]
    while candidates:
        best = max(range(len(candidates)), key=lambda k: candidates[k][1])
        candidates[0], candidates[best] = candidates[best], candidates[0]
        chosen = candidates.pop(0)
        kept.append(tuple(chosen))
        k = 0
        while k < len(candidates):
            overlap = iou(boxes[chosen[0]], boxes[candidates[k][0]], offset)
            if method == "gaussian":
                candidates[k][1] *= math.exp(-(overlap**2) / sigma)
            elif overlap >= threshold:
                candidates[k][1] *= 0 if method == "naive" else 1 - overlap
            if candidates[k][1] < min_score:
                last = candidates.pop()
                if k < len(candidates):
                    # The last one has not been looked at yet: this place is visited again.
                    candidates[k] = last
                continue
            k += 1
    return kept


def roi_align(features, rois, size, scale, sampling_ratio, aligned):
    """Features (b, c, h, w) and rois (n, 5) to (n, c, size[0], size[1])."""
    out = []
    for image, *box in rois.tolist():
        x1, y1, x2, y2 = (v * scale - (0.5 if aligned else 0.0) for v in box)
        width, height = x2 - x1, y2 - y1
        if not aligned:
            width, height = max(width, 1.0), max(height, 1.0)
        steps_y = sampling_ratio or math.ceil(height / size[0])
        steps_x = sampling_ratio or math.ceil(width / size[1])
        for row in range(size[0]):
            for column in range(size[1]):
                total = features.new_zeros(features.size(1))
                for j in range(steps_y):
                    for i in range(steps_x):
                        y = y1 + (row + (j + 0.5) / steps_y) * height / size[0]
                        x = x1 + (column + (i + 0.5) / steps_x) * width / size[1]
                        total = total + _border_sample(features[int(image)], y, x)
                out.append(total / max(steps_y * steps_x, 1))
    return torch.stack(out).view(len(rois), *size, -1).permute(0, 3, 1, 2)


def _border_sample(plane, y, x):
    # Outside the map by up to a pixel the border continues, beyond that there is nothing.
    height, width = plane.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return plane.new_zeros(len(plane))
    return _zero_padded_sample(plane, min(max(y, 0), height - 1), min(max(x, 0), width - 1))


def _zero_padded_sample(plane, y, x):
    """Bilinear sample of a (c, h, w) map; y and x are floats or scalar tensors."""
    value = plane.new_zeros(len(plane))
    top, left = (math.floor(torch.as_tensor(v).detach()) for v in (y, x))
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < plane.size(1) and 0 <= column < plane.size(2):
                value = value + plane[:, row, column] * (1 - abs(y - row)) * (1 - abs(x - column))
    return value


def roi_pool(features, rois, size, scale):
    """Features (b, c, h, w) and rois (n, 5) to (n, c, size[0], size[1])."""
    height, width = features.shape[2:]
    out = []
    for image, *box in rois.tolist():
        x1, y1 = box[0] * scale, box[1] * scale
        bin_w = ((box[2] + 1) * scale - x1) / size[1]
        bin_h = ((box[3] + 1) * scale - y1) / size[0]
        for row in range(size[0]):
            for column in range(size[1]):
                top = max(math.floor(y1 + row * bin_h), 0)
                bottom = min(math.ceil(y1 + (row + 1) * bin_h), height)
                left = max(math.floor(x1 + column * bin_w), 0)
                right = min(math.ceil(x1 + (column + 1) * bin_w), width)
                region = features[int(image), :, top:bottom, left:right].flatten(1)
                hollow = bin_w <= 0 or bin_h <= 0 or region.numel() == 0
                out.append(region.new_zeros(len(region)) if hollow else region.max(dim=1)[0])
    return torch.stack(out).view(len(rois), *size, -1).permute(0, 3, 1, 2)


def deform_conv(
    x, offset, weight, stride, padding, dilation, groups, deform_groups, mask=None, bias=None
):
    """Tensors as mmcv's deform_conv2d takes them; the numbers are (vertical, horizontal)."""
    taps_h, taps_w = weight.shape[2:]
    out = x.new_zeros(len(x), len(weight), *offset.shape[2:])
    for b in range(len(x)):
        for row in range(offset.size(2)):
            for column in range(offset.size(3)):
                samples = []  # per tap, the channels of the input at its place
                for t in range(taps_h * taps_w):
                    y0 = row * stride[0] - padding[0] + t // taps_w * dilation[0]
                    x0 = column * stride[1] - padding[1] + t % taps_w * dilation[1]
                    parts = []
                    for g, plane in enumerate(x[b].chunk(deform_groups)):
                        tap = g * taps_h * taps_w + t
                        dy, dx = offset[b, 2 * tap : 2 * tap + 2, row, column]
                        part = _zero_padded_sample(plane, y0 + dy, x0 + dx)
                        parts.append(part if mask is None else part * mask[b, tap, row, column])
                    samples.append(torch.cat(parts))
                window = torch.stack(samples, dim=1)  # (c, taps)
                values = [
                    (kernel.flatten(1) * part).sum()
                    for kernels, part in zip(
                        weight.chunk(groups), window.chunk(groups), strict=True
                    )
                    for kernel in kernels
                ]
                out[b, :, row, column] = torch.stack(values)
    return out if bias is None else out + bias[:, None, None]


def sigmoid_focal_loss(logits, target, gamma, alpha, weight=None):
    """Logits (n, c) and target (n,) to losses (n, c)."""
    rows = []
    for logit_row, label in zip(logits, target.tolist(), strict=True):
        row = []
        for c, logit in enumerate(logit_row):
            p = torch.sigmoid(logit)
            if c == label:
                loss = -alpha * (1 - p) ** gamma * torch.log(p)
            else:
                loss = -(1 - alpha) * p**gamma * torch.log(1 - p)
            row.append(loss if weight is None else loss * weight[label])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def softmax_focal_loss(logits, target, gamma, alpha, weight=None):
    """Logits (n, c) and target (n,) to losses (n,)."""
    losses = []
    for row, label in zip(logits, target.tolist(), strict=True):
        p = torch.softmax(row, dim=0)[label]
        loss = -alpha * (1 - p) ** gamma * torch.log(p) if label >= 0 else p * 0
        losses.append(loss if weight is None else loss * weight[label])
    return torch.stack(losses)
