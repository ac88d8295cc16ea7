"""Ways to compute attention that moves labels; ``layers.attention.attend`` keeps the fastest.

Each is a function (q, k, v, token_labels) to features and labels, forward and backward; the base is
attention without labels.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tlalign_mm.analysis.measure import Step
from tlalign_mm.layers import attend

HEADS, DIM = 6, 64  # DeiT-S
Moved = tuple[Tensor, Tensor | None]


def no_labels(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Moved:
    """Fused attention alone."""
    return F.scaled_dot_product_attention(q, k, v), None


def explicit(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """Probabilities are kept and used twice; their head mean moves the labels."""
    probabilities = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(dim=-1)
    moved = probabilities.detach().mean(dim=1).float() @ token_labels
    return probabilities @ v, moved


def padded_columns(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """Labels are value columns of one fused call; query and key are padded to its width."""
    dim, room = q.shape[-1], (0, token_labels.shape[-1])
    columns = token_labels.to(v.dtype)[:, None].expand(-1, v.shape[1], -1, -1)
    values = torch.cat([v, columns], dim=-1)
    out = F.scaled_dot_product_attention(F.pad(q, room), F.pad(k, room), values, scale=dim**-0.5)
    return out[..., :dim], out[..., dim:].detach().float().mean(dim=1)


def second_call(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """A second fused call without gradient, its values are the labels."""
    out = F.scaled_dot_product_attention(q, k, v)
    columns = F.pad(token_labels.to(v.dtype), (0, v.shape[-1] - token_labels.shape[-1]))
    with torch.no_grad():
        columns = columns[:, None].expand(-1, v.shape[1], -1, -1)
        moved = F.scaled_dot_product_attention(q, k, columns)[..., : token_labels.shape[-1]]
    return out, moved.float().mean(dim=1)


def log_sum_exp(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """A second pass that reuses the row sums of the fused one; nothing of it is kept."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if q.device.type == "cuda":
        fused = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = fused(q, k, v)
    with torch.no_grad():
        scaled, keys, moved = q * q.shape[-1] ** -0.5, k.mT, []
        for rows in torch.arange(q.shape[2]).split(256):  # chunks that fit in a cache
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            weights = (scaled[:, :, part] @ keys).float().sub_(lse[:, :, part, None]).exp_()
            moved.append((weights @ token_labels[:, None]).mean(dim=1))
    return out, torch.cat(moved, dim=1)


_compiled_flex = torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """FlexAttention without gradient, its values are the labels, beside the fused call."""
    out = F.scaled_dot_product_attention(q, k, v)
    width = 2 ** math.ceil(math.log2(max(16, token_labels.shape[-1])))
    columns = F.pad(token_labels.to(v.dtype), (0, width - token_labels.shape[-1]))
    with torch.no_grad():
        columns = columns[:, None].expand(-1, v.shape[1], -1, -1).contiguous()
        moved = _compiled_flex(q.contiguous(), k.contiguous(), columns)
    return out, moved[..., : token_labels.shape[-1]].float().mean(dim=1)


def ours(q: Tensor, k: Tensor, v: Tensor, token_labels: Tensor) -> Moved:
    """What the package uses."""
    return attend(q, k, v, token_labels=token_labels)


METHODS: dict[str, Callable[..., Moved]] = {
    "no labels": no_labels,
    "explicit": explicit,
    "padded columns": padded_columns,
    "second call": second_call,
    "log-sum-exp": log_sum_exp,
    "flex": flex,
    "attend": ours,
}


def build_step(
    method: str, batch: int, tokens: int, amp: str | None = None, device: str = "cpu"
) -> Step:
    """Forward and backward of one layer of attention.

    Args:
        method: A key of ``METHODS``.
        batch: Images.
        tokens: Tokens of an image.
        amp: ``bf16`` or ``fp16`` for tensors of this precision, or None for float32.
        device: ``cpu`` or ``cuda``.
    """
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float32}[amp]
    shape = (batch, tokens, 3, HEADS, DIM)
    qkv = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    token_labels = torch.rand(batch, tokens, 2, device=device).softmax(dim=-1)
    grad = torch.randn(batch, HEADS, tokens, DIM, device=device, dtype=dtype)

    def step() -> None:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        out, _ = METHODS[method](q, k, v, token_labels)
        out.backward(grad)
        qkv.grad = None

    return step
