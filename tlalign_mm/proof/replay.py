"""The label stream replayed on timm's own models, as an oracle and as the published formulation.

Hooks catch the explicit attention of each block, before dropout, and move labels with plain matrix
products, without ``tlalign_mm.labels`` or ``attend``. Class-sized labels give the formulation that
TL-Align was published in (https://arxiv.org/abs/2210.06455, section 3.2).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timm.models.cait import Cait
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer, window_partition, window_reverse
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

Move = Callable[[Tensor], Tensor]  # head mean of the attention (B, N, M) to moved labels


class LabelReplay:
    """Follow labels through one forward pass of a timm model.

    A context manager, since it leaves hooks on the model:

        with LabelReplay(model) as replay:
            replay.start(token_labels, grid)
            features = model(images)
            label = replay.label(token=True)

    Raises:
        TypeError: If the model's class is none of those that timm and this package share.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hooks: list = []
        self.class_row: Tensor | None = None
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        follow = {
            VisionTransformer: _follow_vit,
            SwinTransformer: _follow_swin,
            PyramidVisionTransformerV2: _follow_pvt_v2,
            Cait: _follow_cait,
            Xcit: _follow_xcit,
        }
        kind = next((kind for kind in follow if isinstance(model, kind)), None)
        if kind is None:
            raise TypeError(f"Labels cannot be replayed on {type(model).__name__}.")
        self.num_prefix = 0
        follow[kind](self, model)

    def __enter__(self) -> "LabelReplay":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def start(self, token_labels: Tensor, grid: tuple[int, int]) -> None:
        """Take the labels (B, N, K) of the patch grid; prefix tokens get their mean."""
        self.labels, self.grid = token_labels, grid
        self.join(self.num_prefix)

    def join(self, number: int) -> None:
        """Put tokens with the mean label in front."""
        mean = self.labels.mean(1, keepdim=True)
        self.labels = torch.cat([mean] * number + [self.labels], 1)

    def label(self, token: bool) -> Tensor:
        """(B, K): the first token's label, or the mean of all."""
        return self.labels[:, 0] if token else self.labels.mean(1)

    def on_attention(self, dropout: nn.Module, move: Move, signed: bool = False) -> None:
        """Move labels when ``dropout`` receives the weights (B, h, N, M) of an attention."""

        def hook(_module: nn.Module, inputs: tuple[Tensor]) -> None:
            weights = inputs[0].detach().clone()
            if signed:
                weights = weights.abs() / weights.abs().sum(-1, keepdim=True)
            self.labels = (move(weights.mean(1)).float() + self.labels) / 2

        self.hooks.append(dropout.register_forward_pre_hook(hook))

    def on_class_attention(self, dropout: nn.Module) -> None:
        """Move the class token's label alone when ``dropout`` receives (B, h, 1, 1 + N)."""

        def hook(_module: nn.Module, inputs: tuple[Tensor]) -> None:
            row = inputs[0].detach().clone().mean(1)  # (B, 1, 1 + N)
            self.class_row = row[:, 0, 1:]
            moved = (row @ self.labels + self.labels[:, :1]) / 2
            self.labels = torch.cat([moved, self.labels[:, 1:]], 1)

        self.hooks.append(dropout.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, change: Callable[[], None]) -> None:
        """Call ``change`` behind a module."""
        self.hooks.append(module.register_forward_hook(lambda *_: change()))

    def pool_map(self, kernel: int, stride: int, padding: int = 0) -> Tensor:
        """Average the label map (B, H W, K) over windows, as a token list."""
        label_map = self.labels.transpose(1, 2).unflatten(2, self.grid)
        pooled = F.avg_pool2d(label_map, kernel, stride, padding, count_include_pad=False)
        self.pooled_grid = tuple(pooled.shape[2:])
        return pooled.flatten(2).transpose(1, 2)


def _follow_vit(replay: LabelReplay, model: VisionTransformer) -> None:
    replay.num_prefix = model.num_prefix_tokens

    def move(attention: Tensor) -> Tensor:
        replay.class_row = attention[:, 0, replay.num_prefix :]
        return attention @ replay.labels

    for block in model.blocks:
        replay.on_attention(block.attn.attn_drop, move)


def _follow_swin(replay: LabelReplay, model: SwinTransformer) -> None:
    def merge() -> None:
        replay.labels = replay.pool_map(2, 2)
        replay.grid = replay.pooled_grid

    def in_windows(block: nn.Module) -> Move:
        window, shift = block.window_size, block.shift_size

        def move(attention: Tensor) -> Tensor:
            label_map = replay.labels.unflatten(1, replay.grid)
            rolled = label_map.roll((-shift[0], -shift[1]), (1, 2))
            height, width = replay.grid
            short = (-height % window[0], -width % window[1])
            padded = F.pad(rolled, (0, 0, 0, short[1], 0, short[0]))  # timm rolls, then pads
            moved = attention @ window_partition(padded, window).flatten(1, 2)
            moved = moved / moved.sum(-1, keepdim=True)  # padding has no label
            size = (height + short[0], width + short[1])
            moved = window_reverse(moved.unflatten(1, window), window, *size)
            return moved[:, :height, :width].roll(tuple(shift), (1, 2)).flatten(1, 2)

        return move

    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            replay.after(stage.downsample, merge)
        for block in stage.blocks:
            replay.on_attention(block.attn.attn_drop, in_windows(block))


def _follow_pvt_v2(replay: LabelReplay, model: PyramidVisionTransformerV2) -> None:
    def embed() -> None:
        replay.labels = replay.pool_map(3, 2, 1)
        replay.grid = replay.pooled_grid

    def over_keys(attn: nn.Module) -> Move:
        ratio = attn.sr.kernel_size[0] if attn.sr is not None else 1

        def move(attention: Tensor) -> Tensor:
            if attn.pool is None:
                return attention @ replay.pool_map(ratio, ratio)
            label_map = replay.labels.transpose(1, 2).unflatten(2, replay.grid)
            return attention @ F.adaptive_avg_pool2d(label_map, 7).flatten(2).transpose(1, 2)

        return move

    for stage in model.stages:
        if stage.downsample is not None:
            replay.after(stage.downsample, embed)
        for block in stage.blocks:
            replay.on_attention(block.attn.attn_drop, over_keys(block.attn))


def _follow_cait(replay: LabelReplay, model: Cait) -> None:
    for block in model.blocks:
        replay.on_attention(block.attn.attn_drop, lambda a: a @ replay.labels, signed=True)
    _follow_class_blocks(replay, model.blocks[-1], model.blocks_token_only)


def _follow_class_blocks(replay: LabelReplay, before: nn.Module, blocks: nn.ModuleList) -> None:
    replay.after(before, lambda: replay.join(1))
    for block in blocks:
        replay.on_class_attention(block.attn.attn_drop)


def _follow_xcit(replay: LabelReplay, model: Xcit) -> None:
    def convolve(label_map: Tensor, kernel: Tensor) -> Tensor:
        """(B, K, H, W) under the channel mean of |kernel|, borders counted by what exists."""
        weight = kernel.detach().abs().mean(0).flatten()
        ones = torch.ones_like(label_map[:1, :1])
        shifted, present = (
            F.unfold(t.flatten(0, 1)[:, None], kernel.shape[2:], padding=kernel.shape[-1] // 2)
            for t in (label_map, ones)
        )  # (B K, kh kw, H W)
        moved = (shifted * weight[:, None]).sum(1) / (present * weight[:, None]).sum(1)
        return moved.view_as(label_map)

    def interact(lpi: nn.Module) -> Callable[[], None]:
        def change() -> None:
            label_map = replay.labels.transpose(1, 2).unflatten(2, replay.grid)
            moved = convolve(convolve(label_map, lpi.conv1.weight), lpi.conv2.weight)
            replay.labels = (moved.flatten(2).transpose(1, 2) + replay.labels) / 2

        return change

    for block in model.blocks:
        replay.after(block.local_mp, interact(block.local_mp))
    _follow_class_blocks(replay, model.blocks[-1], model.cls_attn_blocks)


class StockPVTReplay:
    """The label stream replayed on mmdetection's PVT (version 1), whose attention returns weights.

    Args:
        model: The stock backbone.
        sr_ratios: Side of the window that makes one key, for each stage.
    """

    def __init__(self, model: nn.Module, sr_ratios: list[int]) -> None:
        self.hooks = []
        for i, ((embed, blocks, *_), ratio) in enumerate(zip(model.layers, sr_ratios, strict=True)):
            if i:
                self.hooks.append(embed.register_forward_hook(lambda *_: self.reduce()))
            for block in blocks[1:]:
                move = partial(self.move, ratio)
                self.hooks.append(block.attn.attn.register_forward_hook(move))

    def __enter__(self) -> "StockPVTReplay":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def start(self, token_labels: Tensor) -> None:
        """Take the label map (B, H, W, K) of the patch grid."""
        self.labels = token_labels

    def reduce(self, ratio: int = 2) -> None:
        """Halve the map."""
        self.labels = self.pooled(ratio)

    def pooled(self, ratio: int) -> Tensor:
        """Mean over windows of the map."""
        return F.avg_pool2d(self.labels.permute(0, 3, 1, 2), ratio).permute(0, 2, 3, 1)

    def move(self, ratio: int, _module: nn.Module, _inputs: tuple, output: tuple) -> None:
        """Move labels with the head mean of the weights (B, N, M) that the attention returned."""
        moved = output[1] @ self.pooled(ratio).flatten(1, 2)
        self.labels = (moved.unflatten(1, self.labels.shape[1:3]) + self.labels) / 2
