"""Fused attention on the CPU that carries labels in its forward pass alone.

torch's fused kernel for the CPU wants query, key and value of one width. Padding all three by the
label channels makes room for labels as value columns; the log-sum-exp of the rows stays what it
was, so the backward pass runs on the unpadded tensors and costs what it costs without labels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LabelColumns(torch.autograd.Function):
    """(q, k, v, token_labels) to features (B, h, N, D) and labels (B, N, K), the head mean.

    q is (B, h, N, D), k and v (B, h, M, D), token_labels (B, M, K); all float32 on the CPU.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        dim, room = v.shape[-1], (0, token_labels.shape[-1])
        columns = token_labels.unsqueeze(1).expand(-1, v.shape[1], -1, -1)  # (B, h, M, K)
        values = torch.cat([v, columns], dim=-1)  # (B, h, M, D + K)
        out, lse = _forward(F.pad(q, room), F.pad(k, room), values, scale=dim**-0.5)
        moved = out[..., dim:].mean(dim=1)
        # the kernel's own layout, so that heads join without a copy and the wide buffer is freed
        out = out[..., :dim].transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(moved)
        return out, moved

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad_out: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = _backward(grad_out, q, k, v, out, lse, 0.0, False, scale=q.shape[-1] ** -0.5)
        return *grads, None
