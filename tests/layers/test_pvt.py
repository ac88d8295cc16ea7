"""Spatial reduction and patch embeddings: features and labels equal loops over what is read."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tlalign_mm.layers import (
    Attention,
    ConvMlp,
    OverlapEmbed,
    PyramidEmbed,
    SpatialReductionAttention,
)

DIM, HEADS, K = 12, 3, 4


def random_map(height: int, width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randn(2, height, width, K).mul(3).softmax(-1)
    return torch.randn(2, height, width, DIM), labels


def build(sr_ratio: int = 1, **kwargs: bool) -> SpatialReductionAttention:
    torch.manual_seed(1)
    return SpatialReductionAttention(DIM, HEADS, sr_ratio, **kwargs).requires_grad_(False)


def mean_by_loops(x: Tensor, rows: list[range], columns: list[range]) -> Tensor:
    """Mean of the tokens that exist in each window, (B, windows, C)."""
    windows = []
    for r in rows:
        for c in columns:
            inside = [
                x[:, i, j] for i in r for j in c if 0 <= i < x.shape[1] and 0 <= j < x.shape[2]
            ]
            windows.append(torch.stack(inside).mean(0))
    return torch.stack(windows, dim=1)


def windows_of(side: int, kernel: int, stride: int, padding: int, count: int) -> list[range]:
    starts = [i * stride - padding for i in range(count)]
    assert starts[-1] < side
    return [range(start, start + kernel) for start in starts]


def probabilities(attn: SpatialReductionAttention, x: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    """(B, h, N, M) softmax written out, and the values (B, h, M, D)."""
    q = attn.q(x.flatten(1, -2))
    k, v = attn.kv(keys).split(DIM, dim=-1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT / math.sqrt(DIM // HEADS)).softmax(-1), v


def check(
    attn: SpatialReductionAttention, x: Tensor, labels: Tensor, keys: Tensor, key_labels: Tensor
) -> None:
    weights, values = probabilities(attn, x, keys)
    expected = attn.proj((weights @ values).transpose(1, 2).flatten(2))
    out, moved = attn(x, labels)
    assert out.shape == x.shape and moved.shape == labels.shape
    torch.testing.assert_close(out.flatten(1, -2), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        moved.flatten(1, -2), weights.mean(1) @ key_labels, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(moved.sum(-1), torch.ones(moved.shape[:-1]))


@pytest.mark.parametrize("size", [(8, 8), (6, 9), (4, 7), (3, 5), (9, 2), (1, 1)])
def test_keys_are_windows_and_their_labels_the_mean_of_those(size: tuple[int, int]) -> None:
    attn, ratio = build(4), 4
    x, labels = random_map(*size)
    counts = [max(1, side // ratio) for side in size]
    rows, columns = (
        windows_of(side, ratio, ratio, 0, count) for side, count in zip(size, counts, strict=True)
    )
    padded = F.pad(x, (0, 0, 0, ratio, 0, ratio))
    kernel = attn.sr.weight.permute(0, 2, 3, 1).flatten(1)  # (C, R*R*C)
    cut = [padded[:, r.start : r.stop, c.start : c.stop].flatten(1) for r in rows for c in columns]
    keys = attn.norm(torch.stack(cut, 1) @ kernel.T + attn.sr.bias)
    check(attn, x, labels, keys, mean_by_loops(labels, rows, columns))


def test_rows_beyond_the_last_window_are_no_keys() -> None:
    attn = build(4)
    x, labels = random_map(6, 9)
    changed = labels.clone()
    changed[:, 4:] = changed[:, 4:].flip(-1)
    changed[:, :, 8:] = changed[:, :, 8:].flip(-1)
    torch.testing.assert_close(attn(x, changed)[1], attn(x, labels)[1])
    changed[:, 3, 7] = changed[:, 3, 7].flip(-1)
    assert not torch.allclose(attn(x, changed)[1], attn(x, labels)[1])


@pytest.mark.parametrize("size", [(14, 14), (7, 7), (9, 16), (3, 10), (1, 1)])
def test_linear_attention_pools_labels_as_features(size: tuple[int, int]) -> None:
    attn = build(8, linear=True)
    x, labels = random_map(*size)
    rows, columns = (
        [range(i * side // 7, -(-(i + 1) * side // 7)) for i in range(7)] for side in size
    )
    pooled = mean_by_loops(x, rows, columns) @ attn.sr.weight.flatten(1).T + attn.sr.bias
    keys = F.gelu(attn.norm(pooled))
    check(attn, x, labels, keys, mean_by_loops(labels, rows, columns))


def test_without_reduction_it_is_plain_attention_on_maps_and_lists() -> None:
    attn, plain = build(), Attention(DIM, HEADS)
    plain.qkv.weight.data = torch.cat([attn.q.weight, attn.kv.weight])
    plain.qkv.bias.data = torch.cat([attn.q.bias, attn.kv.bias])
    plain.proj.load_state_dict(attn.proj.state_dict())
    x, labels = random_map(5, 6)
    expected = plain(x.flatten(1, 2), labels.flatten(1, 2))
    torch.testing.assert_close(attn(x.flatten(1, 2), labels.flatten(1, 2)), expected)
    out, moved = attn(x, labels)
    torch.testing.assert_close((out.flatten(1, 2), moved.flatten(1, 2)), expected)


def test_class_attention_is_the_first_row() -> None:
    attn, x = build(), random_map(5, 6)[0].flatten(1, 2)
    weights, _ = probabilities(attn, x, x)
    torch.testing.assert_close(attn.class_attention(x), weights.mean(1)[:, 0])


@pytest.mark.parametrize("kwargs", [{}, {"sr_ratio": 4}, {"linear": True}])
def test_low_precision_rounds_no_labels(kwargs: dict) -> None:
    attn = build(**kwargs)
    x, labels = random_map(9, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out, moved = attn(x, labels)
    assert out.dtype == torch.bfloat16 and moved.dtype == torch.float32
    torch.testing.assert_close(moved.sum(-1), torch.ones(2, 9, 6))


def test_bias_of_query_key_and_value_is_optional() -> None:
    attn = build(qkv_bias=False)
    assert attn.q.bias is None and attn.kv.bias is None and attn.proj.bias is not None


@pytest.mark.parametrize("size", [(8, 8), (5, 6), (1, 7), (1, 1)])
def test_patches_of_a_map_average_the_tokens_that_exist(size: tuple[int, int]) -> None:
    embed = PyramidEmbed(DIM, 8, 2)
    x, labels = random_map(*size)
    out, moved = embed(x, labels)
    grid = [-(-side // 2) for side in size]
    rows, columns = (windows_of(s, 2, 2, 0, n) for s, n in zip(size, grid, strict=True))
    assert out.shape == (2, *grid, 8)
    torch.testing.assert_close(moved.flatten(1, 2), mean_by_loops(labels, rows, columns))
    whole = F.pad(x, (0, 0, 0, 1, 0, 1))[:, : 2 * grid[0], : 2 * grid[1]]
    torch.testing.assert_close(out, embed(whole)[0])
    assert embed(x)[1] is None


@pytest.mark.parametrize("size", [(8, 8), (5, 6), (1, 7), (1, 1)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (7, 4)])
def test_overlapping_patches_average_what_they_read(
    size: tuple[int, int], kernel: int, stride: int
) -> None:
    embed = OverlapEmbed(DIM, 8, kernel, stride)
    x, labels = random_map(*size)
    out, moved = embed(x, labels)
    grid = [-(-side // stride) for side in size]
    rows, columns = (
        windows_of(s, kernel, stride, kernel // 2, n) for s, n in zip(size, grid, strict=True)
    )
    assert out.shape == (2, *grid, 8)
    torch.testing.assert_close(moved.flatten(1, 2), mean_by_loops(labels, rows, columns))


@pytest.mark.parametrize("extra_relu", [False, True])
def test_the_mlp_convolves_each_channel(extra_relu: bool) -> None:
    mlp = ConvMlp(DIM, 8, extra_relu)
    x, _ = random_map(4, 5)
    hidden = mlp.fc1(x).relu() if extra_relu else mlp.fc1(x)
    padded = F.pad(hidden, (0, 0, 1, 1, 1, 1))
    expected = mlp.dwconv.bias.expand_as(hidden).clone()
    for i in range(3):
        for j in range(3):
            expected += padded[:, i : i + 4, j : j + 5] * mlp.dwconv.weight[:, 0, i, j]
    torch.testing.assert_close(mlp(x), mlp.fc2(F.gelu(expected)))
