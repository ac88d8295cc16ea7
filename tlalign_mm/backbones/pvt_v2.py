"""Pyramid Vision Transformer v2 with the label stream.

PVT v2: Improved Baselines with Pyramid Vision Transformer (CVMJ 2022,
https://arxiv.org/abs/2106.13797). Parameter names are timm's, so a timm state dict loads by name,
classifier aside.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, check_stages, resolve
from tlalign_mm.labels import stream
from tlalign_mm.layers import (
    Block,
    ConvMlp,
    OverlapEmbed,
    PyramidStage,
    SpatialReductionAttention,
)
from tlalign_mm.registry import MODELS

_COMMON: dict[str, Any] = {
    "embed_dims": (64, 128, 320, 512),
    "num_heads": (1, 2, 5, 8),
    "mlp_ratios": (8, 8, 4, 4),
    "sr_ratios": (8, 4, 2, 1),
    "linear": False,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "pvt-v2-b0": {**_COMMON, "embed_dims": (32, 64, 160, 256), "depths": (2, 2, 2, 2)},
    "pvt-v2-b1": {**_COMMON, "depths": (2, 2, 2, 2)},
    "pvt-v2-b2": {**_COMMON, "depths": (3, 4, 6, 3)},
    "pvt-v2-b2-linear": {**_COMMON, "depths": (3, 4, 6, 3), "linear": True},
    "pvt-v2-b3": {**_COMMON, "depths": (3, 4, 18, 3)},
    "pvt-v2-b4": {**_COMMON, "depths": (3, 8, 27, 3)},
    "pvt-v2-b5": {**_COMMON, "depths": (3, 6, 40, 3), "mlp_ratios": (4, 4, 4, 4)},
}
PATCH_SIZE = 4  # pixels between the tokens of the first map; its patches of 7 pixels overlap


@MODELS.register_module()
class PyramidVisionTransformerV2(Backbone):
    """Pyramid Vision Transformer v2 for pretraining and for dense tasks.

    Args:
        arch: One of ``pvt-v2-b0`` to ``pvt-v2-b5`` or ``pvt-v2-b2-linear``; fields that are given
            win over it.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Attention heads of each stage.
        mlp_ratios: Hidden channels of each stage's MLPs over its channels.
        sr_ratios: Side of the window of tokens that makes one key, for each stage.
        linear: Pool keys to 7 x 7 instead, at a cost linear in the image.
        qkv_bias: Whether query, key and value have a bias.
        drop_path_rate: Stochastic depth of the last block; linear from 0 over all blocks.
        out_indices: Stages whose maps ``forward`` returns (default: all); ``()`` for pretraining.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i stages as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    dropped_keys = (r"head\..*",)

    def __init__(
        self,
        arch: str | None = None,
        embed_dims: tuple[int, ...] | None = None,
        depths: tuple[int, ...] | None = None,
        num_heads: tuple[int, ...] | None = None,
        mlp_ratios: tuple[float, ...] | None = None,
        sr_ratios: tuple[int, ...] | None = None,
        linear: bool | None = None,
        qkv_bias: bool = True,
        drop_path_rate: float = 0.1,
        out_indices: tuple[int, ...] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        per_stage = {
            "embed_dims": embed_dims,
            "depths": depths,
            "num_heads": num_heads,
            "mlp_ratios": mlp_ratios,
            "sr_ratios": sr_ratios,
        }
        linear = linear if arch or linear is not None else False
        sizes = resolve(type(self).__name__, ARCHITECTURES, arch, **per_stage, linear=linear)
        check_stages(**{name: sizes[name] for name in per_stage})
        dims, depths = sizes["embed_dims"], sizes["depths"]
        check_heads(dims, sizes["num_heads"])
        super().__init__(
            {**sizes, "qkv_bias": qkv_bias},
            dims,
            PATCH_SIZE,
            PATCH_SIZE * 2 ** (len(depths) - 1),
            tuple(range(len(depths)) if out_indices is None else out_indices),
            frozen_stages,
            with_cp,
            init_cfg,
        )
        self.patch_embed = OverlapEmbed(3, dims[0], kernel=7, stride=PATCH_SIZE)
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").split(depths)
        self.stages = nn.ModuleList(
            self._make_stage(i, rates[i].tolist()) for i in range(len(depths))
        )
        self.apply(init_linear)
        self.apply(init_conv)
        self.freeze()

    def _make_stage(self, i: int, rates: list[float]) -> PyramidStage:
        sizes = self.architecture
        dim, linear = sizes["embed_dims"][i], sizes["linear"]
        downsample = (
            OverlapEmbed(sizes["embed_dims"][i - 1], dim, kernel=3, stride=2) if i else None
        )
        blocks = (
            Block(
                dim,
                SpatialReductionAttention(
                    dim, sizes["num_heads"][i], sizes["sr_ratios"][i], linear, sizes["qkv_bias"]
                ),
                ConvMlp(dim, int(dim * sizes["mlp_ratios"][i]), extra_relu=linear),
                rate,
                norm_eps=1e-6,
            )
            for rate in rates
        )
        return PyramidStage(dim, downsample, blocks, self.with_cp)

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x, _ = self.patch_embed(images.permute(0, 2, 3, 1))  # labels are on these patches already
        maps = []
        for i, stage in enumerate(self.stages[: self.num_reached]):
            x, token_labels = stage(x, token_labels)
            if i in self.out_indices:
                maps.append(to_nchw(x))
        if self.out_indices:
            return maps, None
        label = None if token_labels is None else stream.pool(token_labels)
        return maps, Pooled(x.mean(dim=(1, 2)), label)

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each stage."""
        return [[self.patch_embed], *([stage] for stage in self.stages)]

    def _num_blocks(self) -> int:
        return sum(self.architecture["depths"])

    def _depth_of(self, parts: list[str]) -> int | None:
        """Patches of a stage go with the block before it, its norm with its last block."""
        depths = self.architecture["depths"]
        if parts[0] == "patch_embed":
            return 0
        if parts[0] != "stages":
            return None
        i, part = int(parts[1]), parts[2]
        if part == "norm":
            return sum(depths[: i + 1])
        return sum(depths[:i]) + (int(parts[3]) + 1 if part == "blocks" else 0)


def init_conv(module: nn.Module) -> None:
    """Normal kernels by fan-out and zero biases, as the official code."""
    if isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
        nn.init.zeros_(module.bias)
