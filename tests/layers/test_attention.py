"""attend: features equal plain attention, labels equal its definition written with loops."""

import pytest
import torch
from torch import Tensor

from tlalign_mm.layers import attend

B, HEADS, N, M, D, K = 2, 3, 5, 4, 6, 3


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, HEADS, N, D, requires_grad=True),
        "k": torch.randn(B, HEADS, M, D, requires_grad=True),
        "v": torch.randn(B, HEADS, M, D, requires_grad=True),
        "bias": torch.randn(1, HEADS, N, M, requires_grad=True),
        "token_labels": torch.rand(B, M, K).softmax(-1),
    }


def labels_by_loops(q: Tensor, k: Tensor, bias: Tensor, token_labels: Tensor) -> Tensor:
    out = torch.zeros(B, N, K)
    for b in range(B):
        for h in range(HEADS):
            for i in range(N):
                logits = [(q[b, h, i] @ k[b, h, j]) / D**0.5 + bias[0, h, i, j] for j in range(M)]
                weights = torch.stack(logits).exp()
                for j in range(M):
                    out[b, i] += weights[j] / weights.sum() * token_labels[b, j] / HEADS
    return out


def test_labels_follow_the_head_mean_of_the_probabilities(tensors: dict[str, Tensor]) -> None:
    _, labels = attend(**tensors)
    expected = labels_by_loops(*(tensors[n].detach() for n in ("q", "k", "bias", "token_labels")))
    torch.testing.assert_close(labels, expected)
    torch.testing.assert_close(labels.sum(-1), torch.ones(B, N))


def test_identity_labels_give_the_attention_matrix_itself(tensors: dict[str, Tensor]) -> None:
    eye = torch.eye(M).expand(B, M, M)
    _, labels = attend(**{**tensors, "token_labels": eye})
    q, k, bias = (tensors[name].detach() for name in ("q", "k", "bias"))
    attention = (q @ k.transpose(-2, -1) / D**0.5 + bias).softmax(-1).mean(1)
    torch.testing.assert_close(labels, attention)


def test_labels_change_neither_features_nor_gradients(tensors: dict[str, Tensor]) -> None:
    inputs = [tensors[name] for name in ("q", "k", "v", "bias")]
    plain, none = attend(*inputs)
    with_labels, labels = attend(*inputs, tensors["token_labels"])
    assert none is None
    torch.testing.assert_close(with_labels, plain)
    probe = torch.randn_like(plain)
    for one, other in zip(
        torch.autograd.grad(plain, inputs, probe),
        torch.autograd.grad(with_labels, inputs, probe),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert not labels.requires_grad


def test_labels_are_linear_and_follow_a_permutation_of_tokens(tensors: dict[str, Tensor]) -> None:
    one, other = tensors["token_labels"], torch.rand(B, M, K)
    move = lambda y: attend(**{**tensors, "token_labels": y})[1]  # noqa: E731
    torch.testing.assert_close(move(0.3 * one + 0.7 * other), 0.3 * move(one) + 0.7 * move(other))
    order = torch.randperm(M)
    permuted = {
        **tensors,
        "k": tensors["k"][:, :, order],
        "v": tensors["v"][:, :, order],
        "bias": tensors["bias"][..., order],
        "token_labels": one[:, order],
    }
    torch.testing.assert_close(attend(**permuted)[1], move(one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_stay_in_float32_in_lower_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, HEADS, M, D).to(dtype) for _ in range(3))
    labels = torch.tensor([0.3, 0.7]).expand(B, M, 2)  # equal labels stay equal, to float32
    with torch.autocast("cpu", dtype):
        out, moved = attend(q, k, v, token_labels=labels)
    assert out.dtype == dtype
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, labels, atol=1e-6, rtol=0)
