"""CaiT with the label stream.

Going deeper with Image Transformers (ICCV 2021, https://arxiv.org/abs/2103.17239). Parameter names
are timm's, which are the official ones, so a timm state dict loads by name, classifier aside.
"""

from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed, to_2tuple, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, resolve
from tlalign_mm.layers import (
    ClassAttentionBlock,
    LayerScaleBlock,
    TalkingHeadAttention,
    read_class,
    run_block,
)
from tlalign_mm.layers.pos_embed import fit_pos_embed, resize_pos_embed
from tlalign_mm.registry import MODELS

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cait-xxs24": {"embed_dim": 192, "depth": 24, "num_heads": 4, "init_values": 1e-5},
    "cait-xxs36": {"embed_dim": 192, "depth": 36, "num_heads": 4, "init_values": 1e-5},
    "cait-xs24": {"embed_dim": 288, "depth": 24, "num_heads": 6, "init_values": 1e-5},
    "cait-s24": {"embed_dim": 384, "depth": 24, "num_heads": 8, "init_values": 1e-5},
    "cait-s36": {"embed_dim": 384, "depth": 36, "num_heads": 8, "init_values": 1e-6},
    "cait-m36": {"embed_dim": 768, "depth": 36, "num_heads": 16, "init_values": 1e-6},
    "cait-m48": {"embed_dim": 768, "depth": 48, "num_heads": 16, "init_values": 1e-6},
}


@MODELS.register_module()
class CaiT(Backbone):
    """CaiT for pretraining and for dense tasks; a stage is a patch block.

    Patch tokens pass ``depth`` blocks without a class token; it joins only afterwards, in the
    class-attention blocks, which dense models do without.

    Args:
        arch: One of ``cait-xxs24``, ``cait-xxs36``, ``cait-xs24``, ``cait-s24``, ``cait-s36``,
            ``cait-m36``, ``cait-m48``; fields that are given win over it.
        embed_dim: Channels.
        depth: Number of patch blocks.
        num_heads: Attention heads.
        init_values: What the scales of all branches start with (default: that of ``arch``, or 1e-5
            without one).
        depth_token_only: Number of class-attention blocks.
        img_size: Side or (height, width) that the position embedding is made for; images of
            another size interpolate it.
        patch_size: Side of a patch in pixels.
        mlp_ratio: Hidden channels of the MLP over its channels.
        qkv_bias: Whether query, key and value have a bias.
        drop_path_rate: Stochastic depth of every patch block; the class-attention blocks have none.
        out_indices: Patch blocks whose maps ``forward`` returns, without a norm (default: the
            last); ``()`` for pretraining.
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
        init_values: float | None = None,
        depth_token_only: int = 2,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_path_rate: float = 0.1,
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
            init_values=init_values if arch or init_values is not None else 1e-5,
        )
        init_values = sizes.pop("init_values")  # fixes no shape
        dim, depth, num_heads = sizes["embed_dim"], sizes["depth"], sizes["num_heads"]
        check_heads([dim], [num_heads])
        if depth_token_only < 1:
            raise ValueError(f"depth_token_only={depth_token_only} must be at least 1.")
        architecture = {**sizes, "img_size": list(to_2tuple(img_size)), "patch_size": patch_size}
        architecture |= {"depth_token_only": depth_token_only}
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
        self.grid = tuple(-(-side // patch_size) for side in to_2tuple(img_size))
        self.patch_embed = PatchEmbed(
            None, patch_size, 3, dim, output_fmt="NHWC", dynamic_img_pad=True
        )
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], dim))
        self.blocks = nn.ModuleList(
            LayerScaleBlock(
                dim,
                TalkingHeadAttention(dim, num_heads, qkv_bias),
                Mlp(dim, int(dim * mlp_ratio)),
                init_values,
                drop_path_rate,
            )
            for _ in range(depth)
        )
        if self.out_indices:  # a file's class token is of no use to maps
            self.free_fields = ("depth_token_only",)
            self.dropped_keys += (r"cls_token", r"blocks_token_only\..*", r"norm\.(weight|bias)")
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.blocks_token_only = nn.ModuleList(
                ClassAttentionBlock(dim, num_heads, mlp_ratio, qkv_bias, init_values)
                for _ in range(depth_token_only)
            )
            self.norm = nn.LayerNorm(dim, 1e-6)
        self.apply(init_linear)
        for token in self._embedding_parameters():
            trunc_normal_(token, std=0.02)
        self._register_load_state_dict_pre_hook(self._fit_on_load)
        self.freeze()

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x = self.patch_embed(images)  # (B, H, W, C)
        grid, maps = (x.shape[1], x.shape[2]), []
        x = x.flatten(1, 2) + resize_pos_embed(self.pos_embed, self.grid, grid)
        if token_labels is not None:
            token_labels = token_labels.flatten(1, 2)
        for i, block in enumerate(self.blocks[: self.num_reached]):
            x, token_labels = run_block(block, x, token_labels, self.with_cp)
            if i in self.out_indices:
                maps.append(to_nchw(x.unflatten(1, grid)))
        if self.out_indices:
            return maps, None
        x, token_labels, row = read_class(
            self.cls_token, self.blocks_token_only, x, token_labels, class_attention, self.with_cp
        )
        row = None if row is None else row.unflatten(1, grid)
        return maps, Pooled(self.norm(x), token_labels, row)

    def _embedding_parameters(self) -> list[nn.Parameter]:
        return [self.pos_embed] if self.out_indices else [self.cls_token, self.pos_embed]

    def stage_modules(self) -> list[list[nn.Module]]:
        """The patch embedding, then each patch block, the last one with all that follows it."""
        stages = [[block] for block in self.blocks]
        if not self.out_indices:
            stages[-1] += [self.blocks_token_only, self.norm]
        return [[self.patch_embed], *stages]

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Class token and position embedding belong to the patch embedding."""
        embedding, *stages = super().stage_parameters()
        return [[*embedding, *self._embedding_parameters()], *stages]

    def _num_blocks(self) -> int:
        return len(self.blocks) + (0 if self.out_indices else len(self.blocks_token_only))

    def _depth_of(self, parts: list[str]) -> int | None:
        if parts[0] in ("patch_embed", "pos_embed", "cls_token"):
            return 0
        before = {"blocks": 0, "blocks_token_only": len(self.blocks)}.get(parts[0])
        return None if before is None else before + int(parts[1]) + 1

    def fit(self, tensors: dict[str, Tensor], source: dict[str, Any]) -> dict[str, Tensor]:
        """Resize the position embedding from the grid that the file names, non-square included."""
        tensors = dict(tensors)
        if "img_size" in source:
            grid = tuple(-(-side // source["patch_size"]) for side in source["img_size"])
            self._fit_on_load(tensors, "", source=grid)
        return tensors

    def _fit_on_load(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *_: Any,
        source: tuple[int, int] | None = None,
    ) -> None:
        """Fit the position embedding of another image size."""
        name = f"{prefix}pos_embed"
        if name in state_dict:
            state_dict[name] = fit_pos_embed(state_dict[name], 0, 0, self.grid, source)
