"""Parts of XCiT: features equal plain formulas, labels the definition written with loops."""

import pytest
import torch
from torch import Tensor, nn

from tlalign_mm.layers import (
    ConvPatchEmbed,
    CrossCovarianceAttention,
    FourierPositions,
    LocalPatchInteraction,
    XCABlock,
    XCiTClassBlock,
    run_xca_block,
)

B, H, W, C, HEADS, K = 2, 4, 3, 12, 3, 3
N, D = H * W, C // HEADS


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def distributions(*shape: int) -> Tensor:
    return torch.rand(*shape, K).softmax(-1)


def moved_by_loops(kernel: Tensor, labels: Tensor) -> Tensor:
    """Every token takes the labels of existing neighbours, by the channel mean of |kernel|."""
    out = torch.zeros_like(labels)
    for y in range(H):
        for x in range(W):
            total = 0.0
            for i in range(3):
                for j in range(3):
                    if 0 <= y + i - 1 < H and 0 <= x + j - 1 < W:
                        weight = kernel[:, 0, i, j].abs().sum() / C
                        out[:, y, x] += weight * labels[:, y + i - 1, x + j - 1]
                        total += weight
            out[:, y, x] /= total
    return out


@pytest.mark.parametrize(("patch_size", "widths"), [(4, [6, 12]), (8, [3, 6, 12])])
def test_patches_shrink_by_steps_of_two_and_round_up(patch_size: int, widths: list[int]) -> None:
    embed = ConvPatchEmbed(patch_size, C)
    assert [layer[0].out_channels for layer in embed.proj[::2]] == widths
    assert embed(torch.randn(B, 3, 33, 50)).shape == (
        B,
        -(-33 // patch_size),
        -(-50 // patch_size),
        C,
    )


def test_positions_are_waves_over_the_map() -> None:
    positions = FourierPositions(64)
    nn.init.zeros_(positions.token_projection.bias)
    positions.token_projection.weight.data = torch.eye(64)[:, :, None, None]
    found = positions(5, 7)
    assert found.shape == (1, 5, 7, 64)
    for channel in range(64):
        wavelength = 10000 ** (channel % 32 // 2 * 2 / 32)
        wave = torch.cos if channel % 2 else torch.sin
        for y in range(5):
            for x in range(7):
                turn = (y + 1) / 5 if channel < 32 else (x + 1) / 7
                expected = wave(torch.tensor(turn * 2 * torch.pi / wavelength))
                assert abs(found[0, y, x, channel] - expected) < 1e-5


def test_cross_covariance_attention_mixes_channels_and_keeps_labels() -> None:
    attn, x = randomised(CrossCovarianceAttention(C, HEADS)), torch.randn(B, H, W, C)
    q, k, v = (t.reshape(B, N, HEADS, D) for t in attn.qkv(x).chunk(3, -1))
    out = torch.zeros(B, N, HEADS, D)
    for b in range(B):
        for h in range(HEADS):
            for i in range(D):
                unit = q[b, :, h, i] / q[b, :, h, i].norm()
                logits = [unit @ k[b, :, h, j] / k[b, :, h, j].norm() for j in range(D)]
                weights = (torch.stack(logits) * attn.temperature[h, 0, 0]).softmax(0)
                out[b, :, h, i] = v[b, :, h] @ weights
    labels = distributions(B, H, W)
    found, moved = attn(x, labels)
    torch.testing.assert_close(found, attn.proj(out.reshape(B, H, W, C)))
    assert moved is labels
    assert attn(x)[1] is None


def test_lengths_of_many_large_tokens_do_not_overflow_float16() -> None:
    torch.manual_seed(0)
    attn = CrossCovarianceAttention(C, HEADS)
    x = 1000 * torch.randn(1, 100, 100, C)
    assert attn.qkv(x).norm(dim=(1, 2)).max() > torch.finfo(torch.float16).max / 2
    with torch.autocast("cpu", torch.float16):
        rounded, _ = attn(x)
    exact, _ = attn(x)
    assert rounded.isfinite().all()
    torch.testing.assert_close(rounded.float(), exact, atol=0.02 * exact.std().item(), rtol=0)


def test_local_interaction_moves_labels_by_both_kernels() -> None:
    module, labels = randomised(LocalPatchInteraction(C)).eval(), distributions(B, H, W)
    x = torch.randn(B, H, W, C)
    _, moved = module(x, labels)
    expected = moved_by_loops(module.conv2.weight, moved_by_loops(module.conv1.weight, labels))
    torch.testing.assert_close(moved, expected.detach())
    torch.testing.assert_close(moved.sum(-1), torch.ones(B, H, W))
    assert not moved.requires_grad
    assert (moved - labels).abs().max() > 0.01


def test_local_interaction_reads_the_neighbours_whose_labels_it_takes() -> None:
    module = randomised(LocalPatchInteraction(C)).eval()
    x = torch.randn(1, H, W, C, requires_grad=True)
    eye = torch.eye(N).view(1, H, W, N)
    out, moved = module(x, eye)
    reach = torch.stack(
        [
            torch.autograd.grad(token.sum(), x, retain_graph=True)[0].abs().sum(-1).flatten()
            for token in out.flatten(0, 2)
        ]
    )  # (N, N)
    assert torch.equal(reach > 0, moved.view(N, N) > 0)


def test_the_block_has_three_scaled_branches_and_one_that_moves_labels() -> None:
    block = randomised(XCABlock(C, HEADS)).eval()
    x, labels = torch.randn(B, H, W, C), distributions(B, H, W)
    out, moved = block(x, labels)
    y = x + block.gamma1 * block.attn(block.norm1(x))[0]
    y = y + block.gamma3 * block.local_mp(block.norm3(y))[0]
    y = y + block.gamma2 * block.mlp(block.norm2(y))
    torch.testing.assert_close(out, y)
    torch.testing.assert_close(moved, (block.local_mp(x, labels)[1] + labels) / 2)
    torch.testing.assert_close(block(x)[0], out)
    assert block(x)[1] is None


def test_equal_labels_stay_equal() -> None:
    block = randomised(XCABlock(C, HEADS))
    equal = torch.tensor([0.2, 0.5, 0.3]).expand(B, H, W, K)
    torch.testing.assert_close(block(torch.randn(B, H, W, C), equal)[1], equal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_labels_are_exact_under_autocast(dtype: torch.dtype) -> None:
    block = randomised(XCABlock(C, HEADS)).eval()
    x, labels = torch.randn(B, H, W, C), distributions(B, H, W)
    exact = block(x, labels)[1]
    with torch.autocast("cpu", dtype):
        moved = block(x, labels)[1]
    assert torch.equal(moved, exact), "kernels and labels are float32 all the way"


@pytest.mark.parametrize("tokens_norm", [False, True])
def test_the_class_block_moves_the_class_row_alone(tokens_norm: bool) -> None:
    block = randomised(XCiTClassBlock(C, HEADS, tokens_norm=tokens_norm))
    x, labels = torch.randn(B, 1 + N, C), distributions(B, 1 + N)
    normed = block.norm1(x)
    q, k = block.attn.q(normed[:, 0]).view(B, HEADS, D), block.attn.k(normed)
    k = k.view(B, 1 + N, HEADS, D)
    row = (torch.einsum("bhd,bnhd->bhn", q, k) / D**0.5).softmax(-1)
    v = block.attn.v(normed).view(B, 1 + N, HEADS, D)
    gathered = block.attn.proj(torch.einsum("bhn,bnhd->bhd", row, v).flatten(1))
    token = block.norm2(x[:, 0] + block.gamma1 * gathered)
    patches = x[:, 1:] + block.gamma1 * normed[:, 1:]
    patches = block.norm2(patches) if tokens_norm else patches
    out, moved = block(x, labels)
    torch.testing.assert_close(out[:, 0], token + block.gamma2 * block.mlp(token))
    torch.testing.assert_close(out[:, 1:], 2 * patches)
    expected = (torch.einsum("bn,bnk->bk", row.mean(1), labels) + labels[:, 0]) / 2
    torch.testing.assert_close(moved[:, 0], expected.detach())
    assert torch.equal(moved[:, 1:], labels[:, 1:])
    attention = block.class_attention(x)
    torch.testing.assert_close(attention, row.mean(1)[:, 1:].detach())
    assert not attention.requires_grad
    torch.testing.assert_close(block(x)[0], out)


def test_recomputing_counts_a_batch_once() -> None:
    states, gradients = [], []
    for with_cp in (False, True):
        block = randomised(XCABlock(C, HEADS))
        x = torch.randn(B, H, W, C, requires_grad=True)
        out, moved = run_xca_block(block, x, distributions(B, H, W), with_cp)
        states.append([out, moved, *(b.clone() for b in block.buffers())])
        out.square().sum().backward()
        states[-1] += list(block.buffers())
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
    assert block.local_mp.bn.num_batches_tracked == 1
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
