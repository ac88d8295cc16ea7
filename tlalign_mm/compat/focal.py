"""Focal losses of ``mmcv._ext``, in plain torch.

Names, argument order and out-parameters are those that mmcv/ops/focal_loss.py calls. torchvision's
focal loss takes one-hot targets, no class weights, and does not clamp its logarithms, so it would
not agree with mmcv's. Notation: p is the predicted probability, g is gamma.
"""

import torch
from torch import Tensor

from tlalign_mm.compat.precision import kernel_dtype

_SMALLEST = torch.finfo(torch.float32).tiny  # mmcv takes no logarithm of less


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the loss of every class as a yes/no question.

    Mirrors the call in ``mmcv.ops.focal_loss.SigmoidFocalLossFunction.forward``.

    Args:
        input: Logits, shape (n, c).
        target: Class indices, int64, shape (n,). The index c, or a negative one, is background.
        weight: Factor per class of the target, shape (c,), or empty for none.
        output: Shape (n, c), overwritten.
        gamma: Exponent that plays down easy examples.
        alpha: Factor of the positive term; the negative one has 1 - alpha.

    Raises:
        ValueError: If a target is above c, or background although there are weights.
    """
    _check_target(target, num_classes=input.size(1), highest=input.size(1), weight=weight)
    p, positive = _probability(input, target)
    loss_if_positive = -alpha * (1 - p) ** gamma * p.clamp(min=_SMALLEST).log()
    loss_if_negative = -(1 - alpha) * p**gamma * (1 - p).clamp(min=_SMALLEST).log()
    output.copy_(_weighted(positive, loss_if_positive, loss_if_negative, target, weight))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Overwrite ``grad_input`` with the derivative of each loss by its own logit.

    Mirrors the call in ``mmcv.ops.focal_loss.SigmoidFocalLossFunction.backward``. The clamp of the
    forward pass has no part in the derivative: a saturated logit still learns.

    Args:
        input: Logits, shape (n, c).
        target: As in the forward pass.
        weight: As in the forward pass.
        grad_input: Shape (n, c), overwritten.
        gamma: As in the forward pass.
        alpha: As in the forward pass.
    """
    p, positive = _probability(input, target)
    log_p, log_q = p.clamp(min=_SMALLEST).log(), (1 - p).clamp(min=_SMALLEST).log()
    slope_if_positive = -alpha * (1 - p) ** gamma * (1 - p - gamma * p * log_p)
    slope_if_negative = -(1 - alpha) * p**gamma * (gamma * (1 - p) * log_q - p)
    grad_input.copy_(_weighted(positive, slope_if_positive, slope_if_negative, target, weight))


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the loss of every row.

    Mirrors the call in ``mmcv.ops.focal_loss.SoftmaxFocalLossFunction.forward``.

    Args:
        softmax: Probabilities, shape (n, c).
        target: Class indices, int64, shape (n,); a negative one leaves its row out.
        weight: Factor per class of the target, shape (c,), or empty for none.
        output: Shape (n,), overwritten.
        gamma: Exponent that plays down easy examples.
        alpha: Factor of the loss.

    Raises:
        ValueError: If a target is c or above.
    """
    _check_target(target, num_classes=softmax.size(1), highest=softmax.size(1) - 1)
    p, factor = _picked(softmax, target, weight)
    output.copy_(-alpha * factor * (1 - p) ** gamma * p.clamp(min=_SMALLEST).log())


def softmax_focal_loss_backward(
    softmax: Tensor,
    target: Tensor,
    weight: Tensor,
    buff: Tensor,
    grad_input: Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Overwrite ``grad_input`` with the derivative of the losses by the logits.

    Mirrors the call in ``mmcv.ops.focal_loss.SoftmaxFocalLossFunction.backward``.

    Args:
        softmax: Probabilities, shape (n, c).
        target: As in the forward pass.
        weight: As in the forward pass.
        buff: Shape (n,), overwritten: p times the derivative of each row's loss by p.
        grad_input: Shape (n, c), overwritten.
        gamma: As in the forward pass.
        alpha: As in the forward pass.
    """
    p, factor = _picked(softmax, target, weight)
    q = (1 - p).clamp(min=_SMALLEST)  # with gamma below 1, 0 ** (gamma - 1) would give nan
    log_p = p.clamp(min=_SMALLEST).log()
    slope = alpha * factor * (gamma * q ** (gamma - 1) * p * log_p - (1 - p) ** gamma)
    buff.copy_(slope)
    grad_input.copy_(slope[:, None] * (_one_hot(target, softmax.size(1)).to(p.dtype) - softmax))


def _check_target(
    target: Tensor, num_classes: int, highest: int, weight: Tensor | None = None
) -> None:
    if target.numel() == 0:
        return
    if target.max() > highest:
        raise ValueError(f"targets must not exceed {highest} for {num_classes} classes")
    if weight is not None and weight.numel():
        if target.min() < 0 or target.max() >= num_classes:
            raise ValueError("class weights know no background: targets must all be classes")


def _probability(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    p = input.to(kernel_dtype(input)).sigmoid()
    return p, _one_hot(target, input.size(1))


def _one_hot(target: Tensor, num_classes: int) -> Tensor:
    # (n,) -> (n, c), a row without a True for background
    return target[:, None] == torch.arange(num_classes, device=target.device)


def _weighted(
    positive: Tensor, if_positive: Tensor, if_negative: Tensor, target: Tensor, weight: Tensor
) -> Tensor:
    value = torch.where(positive, if_positive, if_negative)
    return value * weight[target][:, None] if weight.numel() else value


def _picked(softmax: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    # The probability of each row's target and the factor of its loss, both (n,).
    label = target.clamp(min=0)
    p = softmax.to(kernel_dtype(softmax)).gather(1, label[:, None])[:, 0]
    factor = (target >= 0).to(p.dtype)
    return p, factor * weight[label] if weight.numel() else factor


MMCV_OPS = {
    "sigmoid_focal_loss_forward": sigmoid_focal_loss_forward,
    "sigmoid_focal_loss_backward": sigmoid_focal_loss_backward,
    "softmax_focal_loss_forward": softmax_focal_loss_forward,
    "softmax_focal_loss_backward": softmax_focal_loss_backward,
}
