"""Every rule of the label stream as one value, so that an invariant is written once for all.

A rule is drawn with all that it needs but the labels: sizes, features, kernels. The list of rules
is ``RULES``; add a rule there and ``test_invariants`` holds it to everything.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from tlalign_mm.labels import (
    class_row,
    join,
    merge_2x2,
    mix_by_kernel,
    mix_by_weights,
    normalize,
    pool,
    reduce_by_window,
    reduce_to,
    residual,
)
from tlalign_mm.labels.windows import WindowGrid, partition, plan_windows, reverse, shift_mask
from tlalign_mm.layers import attend

Move = Callable[[Tensor], Tensor]


class Rule(NamedTuple):
    """A rule that waits for labels.

    Attributes:
        shape: Shape of the labels, images first, K aside.
        move: The rule, (*shape, K) to labels of another shape.
        permute: Puts the tokens that come in into another order.
        permuted_move: The rule with its features or sizes in that order as well.
        permute_out: The order that tokens have to come out in.
        sources: What decides how labels move; the labels may not send a gradient into it.
    """

    shape: tuple[int, ...]
    move: Move
    permute: Move
    permuted_move: Move
    permute_out: Move
    sources: tuple[Tensor, ...] = ()


def unchanged(labels: Tensor) -> Tensor:
    return labels


def transpose(x: Tensor) -> Tensor:
    """(B, H, W, ...) to (B, W, H, ...): the one order that every rule on maps has to follow."""
    return x.transpose(1, 2)


def normal(draw: DrawFn, *shape: int, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(draw(seeds))
    return torch.randn(*shape, generator=generator).requires_grad_(requires_grad)


def order(draw: DrawFn, length: int, fixed: int = 0) -> Tensor:
    """A permutation that leaves the first ``fixed`` tokens where they are."""
    rest = draw(st.permutations(range(fixed, length)))
    return torch.tensor([*range(fixed), *rest])


seeds = st.integers(0, 2**16)
batches = st.integers(1, 3)
lengths = st.integers(1, 6)
sides = st.integers(1, 7)


@st.composite
def distributions(draw: DrawFn, shape: tuple[int, ...], num_channels: int) -> Tensor:
    """Rows that are soft, nearly hard, or all mass on one channel."""
    logits = normal(draw, *shape, num_channels)
    if draw(st.booleans()):
        return (logits * draw(st.sampled_from([0.1, 1.0, 50.0]))).softmax(-1)
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


@st.composite
def residual_rule(draw: DrawFn) -> Rule:
    """The second dimension of the labels is the branch: what attention moved, what stayed."""
    batch, length = draw(batches), draw(lengths)
    places = order(draw, length)
    return Rule(
        (batch, 2, length),
        residual_of_branches,
        lambda y: y[:, :, places],
        residual_of_branches,
        lambda y: y[:, places],
    )


def residual_of_branches(labels: Tensor) -> Tensor:
    return residual(labels[:, 0], labels[:, 1])


@st.composite
def join_rule(draw: DrawFn) -> Rule:
    batch, length, num_joining = draw(batches), draw(lengths), draw(st.integers(1, 2))
    places = order(draw, num_joining + length, fixed=num_joining)
    move = partial(join, num_tokens=num_joining)
    permute = places[num_joining:] - num_joining
    return Rule((batch, length), move, lambda y: y[:, permute], move, lambda y: y[:, places])


@st.composite
def class_row_rule(draw: DrawFn) -> Rule:
    """The first row is what the class token gathered, the second the class token's own."""
    batch, length = draw(batches), draw(lengths)
    places = order(draw, 2 + length, fixed=2)
    return Rule(
        (batch, 2 + length),
        class_row_of_first,
        lambda y: y[:, places],
        class_row_of_first,
        lambda y: y[:, places[1:] - 1],
    )


def class_row_of_first(labels: Tensor) -> Tensor:
    return class_row(labels[:, :1], labels[:, 1:])


@st.composite
def pool_rule(draw: DrawFn) -> Rule:
    batch, length = draw(batches), draw(lengths)
    places = order(draw, length)
    return Rule((batch, length), pool, lambda y: y[:, places], pool, unchanged)


@st.composite
def pool_map_rule(draw: DrawFn) -> Rule:
    shape = (draw(batches), draw(sides), draw(sides))
    return Rule(shape, pool, transpose, pool, unchanged)


@st.composite
def attend_rule(draw: DrawFn, has_bias: bool) -> Rule:
    batch, heads, queries, keys = draw(batches), draw(batches), draw(lengths), draw(lengths)
    q = normal(draw, batch, heads, queries, 4, requires_grad=True)
    k, v = (normal(draw, batch, heads, keys, 4, requires_grad=True) for _ in range(2))
    bias = normal(draw, 1, heads, queries, keys, requires_grad=True) if has_bias else None
    asked, read = order(draw, queries), order(draw, keys)
    bias_permuted = bias[:, :, asked][..., read] if has_bias else None
    permuted = (q[:, :, asked], k[:, :, read], v[:, :, read], bias_permuted)
    return Rule(
        (batch, keys),
        lambda y: attend(q, k, v, bias, y)[1],
        lambda y: y[:, read],
        lambda y: attend(*permuted, y)[1],
        lambda y: y[:, asked],
        (q, k, v, bias) if has_bias else (q, k, v),
    )


@st.composite
def signed_weights(draw: DrawFn, *shape: int) -> Tensor:
    """Weights of both signs; some rows hold nothing, some next to nothing, some a lot."""
    weights = normal(draw, *shape)
    generator = torch.Generator().manual_seed(draw(seeds))
    scales = torch.tensor([1.0, 0.0, 1e-44, 1e20])
    scale = scales[torch.randint(len(scales), (*shape[:-1], 1), generator=generator)]
    return (weights * scale).requires_grad_()


@st.composite
def mix_by_weights_rule(draw: DrawFn) -> Rule:
    batch, heads, queries, keys = draw(batches), draw(batches), draw(lengths), draw(lengths)
    weights = draw(signed_weights(batch, heads, queries, keys))
    asked, read = order(draw, queries), order(draw, keys)
    return Rule(
        (batch, keys),
        lambda y: mix_by_weights(weights, y),
        lambda y: y[:, read],
        lambda y: mix_by_weights(weights[:, :, asked][..., read], y),
        lambda y: y[:, asked],
        (weights,),
    )


@st.composite
def mix_by_kernel_rule(draw: DrawFn) -> Rule:
    shape = (draw(batches), draw(sides), draw(sides))
    kernel = draw(signed_weights(draw(batches), 1, *draw(kernel_sides)))
    return Rule(
        shape,
        lambda y: mix_by_kernel(kernel, y),
        lambda y: transpose(y).flip(1),
        lambda y: mix_by_kernel(kernel.transpose(2, 3).flip(2), y),
        lambda y: transpose(y).flip(1),
        (kernel,),
    )


kernel_sides = st.sampled_from([(1, 1), (3, 3), (1, 3), (5, 3)])


@st.composite
def merge_2x2_rule(draw: DrawFn) -> Rule:
    shape = (draw(batches), draw(sides), draw(sides))
    return Rule(shape, merge_2x2, transpose, merge_2x2, transpose)


class Window(NamedTuple):
    """Arguments of ``reduce_by_window``, and the smallest side of a map that it fits."""

    kernel: int
    stride: int
    padding: int
    ceil_mode: bool

    @property
    def smallest_side(self) -> int:
        overhang = self.stride - 1 if self.ceil_mode else 0
        return max(1, self.kernel - 2 * self.padding - overhang)


@st.composite
def reading_windows(draw: DrawFn) -> Window:
    """Windows that overlap, touch or leave gaps; padding is at most half a kernel."""
    kernel = draw(st.integers(1, 5))
    padding = draw(st.integers(0, kernel // 2))
    return Window(kernel, draw(st.integers(1, 6)), padding, draw(st.booleans()))


@st.composite
def reduce_by_window_rule(draw: DrawFn) -> Rule:
    window = draw(reading_windows())
    fitting = st.integers(window.smallest_side, 8)
    shape = (draw(batches), draw(fitting), draw(fitting))
    move = partial(reduce_by_window, **window._asdict())
    return Rule(shape, move, transpose, move, transpose)


@st.composite
def reduce_to_rule(draw: DrawFn) -> Rule:
    size = (draw(sides), draw(sides))
    return Rule(
        (draw(batches), draw(sides), draw(sides)),
        lambda y: reduce_to(y, size),
        lambda y: transpose(y).flip(1),
        lambda y: reduce_to(y, size[::-1]),
        lambda y: transpose(y).flip(1),
    )


@st.composite
def windows_rule(draw: DrawFn) -> Rule:
    """Self-attention of a map in windows, shifted, masked and padded as Swin's."""
    batch, height, width, side = draw(batches), draw(sides), draw(sides), draw(st.integers(1, 4))
    x = normal(draw, batch, height, width, 3, requires_grad=True)
    grid = plan_windows((height, width), side, draw(st.integers(0, side - 1)), draw(st.booleans()))
    turned = WindowGrid(grid.size[::-1], grid.window[::-1], grid.shift[::-1])
    return Rule(
        (batch, height, width),
        lambda y: attend_in_windows(x, y, grid),
        transpose,
        lambda y: attend_in_windows(transpose(x), y, turned),
        transpose,
        (x,),
    )


def attend_in_windows(x: Tensor, labels: Tensor, grid: WindowGrid) -> Tensor:
    tokens, cut = (partition(t, grid).unflatten(0, (len(x), -1)) for t in (x, labels))
    heads = tokens.unsqueeze(2)  # (B, n, 1, N, C)
    mask = shift_mask(grid, x.device)
    bias = torch.zeros(1, 1, 1, 1) if mask is None else mask[:, None]
    _, moved = attend(heads, heads, heads, bias, cut)
    return normalize(reverse(moved.flatten(0, 1), grid), labels)


RULES: dict[str, SearchStrategy[Rule]] = {
    "residual": residual_rule(),
    "join": join_rule(),
    "class_row": class_row_rule(),
    "pool": pool_rule(),
    "pool of a map": pool_map_rule(),
    "attend": attend_rule(has_bias=False),
    "attend with bias": attend_rule(has_bias=True),
    "attend in windows": windows_rule(),
    "mix_by_weights": mix_by_weights_rule(),
    "mix_by_kernel": mix_by_kernel_rule(),
    "merge_2x2": merge_2x2_rule(),
    "reduce_by_window": reduce_by_window_rule(),
    "reduce_to": reduce_to_rule(),
}
