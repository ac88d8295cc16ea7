"""Talking heads and class attention: labels equal their definition, features plain formulas."""

import pytest
import torch
from torch import Tensor, nn

from tlalign_mm.layers import ClassAttentionBlock, TalkingHeadAttention, read_class

B, N, C, HEADS, K = 2, 5, 12, 3, 3


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def heads(x: Tensor) -> Tensor:
    return x.reshape(B, -1, HEADS, C // HEADS).transpose(1, 2)  # (B, h, N, D)


def distributions(num_tokens: int = N) -> Tensor:
    return torch.rand(B, num_tokens, K).softmax(-1)


def talking_weights(attn: TalkingHeadAttention, x: Tensor) -> Tensor:
    """(B, h, N, N) with the heads mixed one by one."""
    q, k, _ = (heads(t) for t in attn.qkv(x).chunk(3, -1))
    logits = q @ k.transpose(-2, -1) / (C // HEADS) ** 0.5
    before = [
        sum(attn.proj_l.weight[i, j] * logits[:, j] for j in range(HEADS)) + attn.proj_l.bias[i]
        for i in range(HEADS)
    ]
    probabilities = [x.softmax(-1) for x in before]
    after = [
        sum(attn.proj_w.weight[i, j] * probabilities[j] for j in range(HEADS)) + attn.proj_w.bias[i]
        for i in range(HEADS)
    ]
    return torch.stack(after, 1)


def test_talking_heads_mix_logits_and_weights() -> None:
    attn, x = randomised(TalkingHeadAttention(C, HEADS)), torch.randn(B, N, C)
    value = heads(attn.qkv(x).chunk(3, -1)[2])
    gathered = talking_weights(attn, x) @ value  # (B, h, N, D)
    expected = attn.proj(gathered.transpose(1, 2).reshape(B, N, C))
    torch.testing.assert_close(attn(x)[0], expected)


def test_labels_follow_the_contribution_of_signed_weights() -> None:
    attn, x = randomised(TalkingHeadAttention(C, HEADS)), torch.randn(B, N, C)
    weights = talking_weights(attn, x).detach()
    assert weights.min() < 0 < weights.max(), "the case that probabilities never show"
    labels = distributions()
    expected = torch.zeros(B, N, K)
    for b in range(B):
        for h in range(HEADS):
            for i in range(N):
                share = weights[b, h, i].abs() / weights[b, h, i].abs().sum()
                for j in range(N):
                    expected[b, i] += share[j] * labels[b, j] / HEADS
    out, moved = attn(x, labels)
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(moved.sum(-1), torch.ones(B, N))
    assert not moved.requires_grad
    torch.testing.assert_close(out, attn(x)[0])


def test_equal_labels_stay_equal_and_order_follows_the_tokens() -> None:
    attn, x = randomised(TalkingHeadAttention(C, HEADS)), torch.randn(B, N, C)
    equal = torch.tensor([0.2, 0.5, 0.3]).expand(B, N, K)
    torch.testing.assert_close(attn(x, equal)[1], equal)
    labels, order = distributions(), torch.randperm(N)
    torch.testing.assert_close(attn(x[:, order], labels[:, order])[1], attn(x, labels)[1][:, order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_stay_in_float32_under_autocast(dtype: torch.dtype) -> None:
    attn, x = randomised(TalkingHeadAttention(C, HEADS)), torch.randn(B, N, C)
    labels = distributions()
    exact = attn(x, labels)[1]
    with torch.autocast("cpu", dtype):
        moved = attn(x, labels)[1]
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, exact, atol=2e-2, rtol=0)
    torch.testing.assert_close(moved.sum(-1), torch.ones(B, N))


def class_row(block: ClassAttentionBlock, x: Tensor) -> Tensor:
    """(B, h, 1 + N) probabilities of the class token."""
    x = block.norm1(x)
    logits = heads(block.attn.q(x[:, :1])) @ heads(block.attn.k(x)).transpose(-2, -1)
    return (logits / (C // HEADS) ** 0.5).softmax(-1)[:, :, 0]


def test_class_attention_moves_the_class_row_alone() -> None:
    block = randomised(ClassAttentionBlock(C, HEADS))
    x, labels = torch.randn(B, 1 + N, C), distributions(1 + N)
    row = class_row(block, x)
    gathered = (row[:, :, None] @ heads(block.attn.v(block.norm1(x)))).transpose(1, 2).flatten(1)
    token = x[:, 0] + block.gamma_1 * block.attn.proj(gathered)
    token = token + block.gamma_2 * block.mlp(block.norm2(token))
    out, moved = block(x, labels)
    torch.testing.assert_close(out[:, 0], token)
    assert torch.equal(out[:, 1:], x[:, 1:])
    expected = (torch.einsum("bn,bnk->bk", row.mean(1), labels) + labels[:, 0]) / 2
    torch.testing.assert_close(moved[:, 0], expected)
    assert torch.equal(moved[:, 1:], labels[:, 1:])
    torch.testing.assert_close(out, block(x)[0])


def test_attention_to_the_patches_has_no_gradient_and_full_precision() -> None:
    block = randomised(ClassAttentionBlock(C, HEADS))
    x = torch.randn(B, 1 + N, C)
    torch.testing.assert_close(block.class_attention(x), class_row(block, x).mean(1)[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        attention = block.class_attention(x)
    assert attention.dtype == torch.float32 and not attention.requires_grad


def test_a_block_starts_near_the_identity() -> None:
    block, x = ClassAttentionBlock(C, HEADS, init_values=1e-6), torch.randn(B, 1 + N, C)
    assert torch.equal(block.gamma_1, torch.full((C,), 1e-6))
    torch.testing.assert_close(block(x)[0], x, atol=1e-4, rtol=0)


def test_reading_the_class_joins_it_with_the_mean_label() -> None:
    blocks = [randomised(ClassAttentionBlock(C, HEADS)) for _ in range(2)]
    token, x, labels = torch.randn(1, 1, C), torch.randn(B, N, C), distributions()
    tokens = torch.cat([token.expand(B, -1, -1), x], 1)
    moved = torch.cat([labels.mean(1, keepdim=True), labels], 1)
    tokens, moved = blocks[0](tokens, moved)
    row = blocks[1].class_attention(tokens)
    tokens, moved = blocks[1](tokens, moved)
    found = read_class(token, blocks, x, labels, class_attention=True)
    for one, other in zip(found, (tokens[:, 0], moved[:, 0], row), strict=True):
        torch.testing.assert_close(one, other)
    assert read_class(token, blocks, x)[1:] == (None, None)
