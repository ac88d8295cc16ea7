"""XCiT with the label stream.

XCiT: Cross-Covariance Image Transformers (NeurIPS 2021, https://arxiv.org/abs/2106.09681).
Parameter names are timm's, so a timm state dict loads by name, classifier aside.
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, resolve
from tlalign_mm.layers import (
    ConvPatchEmbed,
    FourierPositions,
    XCABlock,
    XCiTClassBlock,
    read_class,
    run_xca_block,
)
from tlalign_mm.registry import MODELS

SHALLOW = {"depth": 12, "eta": 1.0, "tokens_norm": True}
DEEP = {"depth": 24, "eta": 1e-5, "tokens_norm": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "xcit-nano-12": {**SHALLOW, "embed_dim": 128, "num_heads": 4, "tokens_norm": False},
    "xcit-tiny-12": {**SHALLOW, "embed_dim": 192, "num_heads": 4},
    "xcit-small-12": {**SHALLOW, "embed_dim": 384, "num_heads": 8},
    "xcit-tiny-24": {**DEEP, "embed_dim": 192, "num_heads": 4},
    "xcit-small-24": {**DEEP, "embed_dim": 384, "num_heads": 8},
    "xcit-medium-24": {**DEEP, "embed_dim": 512, "num_heads": 8},
    "xcit-large-24": {**DEEP, "embed_dim": 768, "num_heads": 16},
}


@MODELS.register_module()
class XCiT(Backbone):
    """XCiT for pretraining and for dense tasks; a stage is a cross-covariance block.

    Patch tokens pass ``depth`` blocks without a class token; it joins only afterwards, in the
    class-attention blocks, which dense models do without. Positions need no image size.

    Args:
        arch: One of ``xcit-nano-12``, ``xcit-tiny-12``, ``xcit-small-12``, ``xcit-tiny-24``,
            ``xcit-small-24``, ``xcit-medium-24``, ``xcit-large-24``; fields that are given win
            over it.
        embed_dim: Channels.
        depth: Number of cross-covariance blocks.
        num_heads: Attention heads.
        eta: What the scales of all branches start with (default: that of ``arch``, or 1 without
            one).
        tokens_norm: Whether class-attention blocks normalise patch tokens a second time (default:
            that of ``arch``, or true without one).
        cls_attn_layers: Number of class-attention blocks.
        patch_size: Side of a patch in pixels: 16 or 8 (published), or 4.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        drop_path_rate: Stochastic depth of every cross-covariance block; the class-attention blocks
            have none.
        out_indices: Cross-covariance blocks whose maps ``forward`` returns, without a norm
            (default: the last); ``()`` for pretraining.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i blocks as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    dropped_keys = (r"head\..*",)
    has_class_token = True

    def __init__(
        self,
        arch: str | None = None,
        embed_dim: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        eta: float | None = None,
        tokens_norm: bool | None = None,
        cls_attn_layers: int = 2,
        patch_size: int = 16,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path_rate: float = 0.05,
        out_indices: tuple[int, ...] = (-1,),
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        sizes = resolve(
            type(self).__name__,
            ARCHITECTURES,
            arch,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            eta=eta if arch or eta is not None else 1.0,
            tokens_norm=tokens_norm if arch or tokens_norm is not None else True,
        )
        eta = sizes.pop("eta")  # an initial value, which files may differ in
        dim, depth, num_heads = sizes["embed_dim"], sizes["depth"], sizes["num_heads"]
        check_heads([dim], [num_heads])
        if patch_size not in (4, 8, 16):
            raise ValueError(f"patch_size={patch_size} must be 4, 8 or 16.")
        if cls_attn_layers < 1:
            raise ValueError(f"cls_attn_layers={cls_attn_layers} must be at least 1.")
        architecture = {**sizes, "cls_attn_layers": cls_attn_layers, "patch_size": patch_size}
        architecture |= {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias}
        super().__init__(
            architecture,
            [dim] * depth,
            patch_size,
            patch_size,
            out_indices,
            frozen_stages,
            with_cp,
            init_cfg,
        )
        self.patch_embed = ConvPatchEmbed(patch_size, dim)
        self.pos_embed = FourierPositions(dim)
        self.blocks = nn.ModuleList(
            XCABlock(dim, num_heads, mlp_ratio, qkv_bias, eta, drop_path_rate) for _ in range(depth)
        )
        if self.out_indices:  # a file's class token is of no use to maps
            self.free_fields = ("cls_attn_layers", "tokens_norm")
            self.dropped_keys += (r"cls_token", r"cls_attn_blocks\..*", r"norm\.(weight|bias)")
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            trunc_normal_(self.cls_token, std=0.02)
            self.cls_attn_blocks = nn.ModuleList(
                XCiTClassBlock(dim, num_heads, mlp_ratio, qkv_bias, eta, sizes["tokens_norm"])
                for _ in range(cls_attn_layers)
            )
            self.norm = nn.LayerNorm(dim, 1e-6)
        self.apply(init_linear)
        self.freeze()

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x, maps = self.patch_embed(images), []  # (B, H, W, C)
        grid = (x.shape[1], x.shape[2])
        x = x + self.pos_embed(*grid)
        for i, block in enumerate(self.blocks[: self.num_reached]):
            x, token_labels = run_xca_block(block, x, token_labels, self.with_cp)
            if i in self.out_indices:
                maps.append(to_nchw(x))
        if self.out_indices:
            return maps, None
        if token_labels is not None:
            token_labels = token_labels.flatten(1, 2)
        x, token_labels, row = read_class(
            self.cls_token,
            self.cls_attn_blocks,
            x.flatten(1, 2),
            token_labels,
            class_attention,
            self.with_cp,
        )
        row = None if row is None else row.unflatten(1, grid)
        return maps, Pooled(self.norm(x), token_labels, row)

    def stage_modules(self) -> list[list[nn.Module]]:
        """Patch embedding and positions, then each block, the last one with all that follows it."""
        stages = [[block] for block in self.blocks]
        if not self.out_indices:
            stages[-1] += [self.cls_attn_blocks, self.norm]
        return [[self.patch_embed, self.pos_embed], *stages]

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """The class token belongs to the patch embedding."""
        embedding, *stages = super().stage_parameters()
        tokens = [] if self.out_indices else [self.cls_token]
        return [[*embedding, *tokens], *stages]

    def _num_blocks(self) -> int:
        return len(self.blocks) + (0 if self.out_indices else len(self.cls_attn_blocks))

    def _depth_of(self, parts: list[str]) -> int | None:
        if parts[0] in ("patch_embed", "pos_embed", "cls_token"):
            return 0
        before = {"blocks": 0, "cls_attn_blocks": len(self.blocks)}.get(parts[0])
        return None if before is None else before + int(parts[1]) + 1
