"""Pyramid Vision Transformer with the label stream.

Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions (ICCV
2021, https://arxiv.org/abs/2102.12122). Parameter names are those of the official code
(https://github.com/whai362/PVT), so its state dicts load by name, classifier aside.
"""

import math
from typing import Any

import torch
from timm.layers import Mlp, to_2tuple, trunc_normal_
from torch import Tensor, nn

from tlalign_mm.backbones.base import Backbone, Pooled, init_linear, to_nchw
from tlalign_mm.backbones.fields import check_heads, check_stages, resolve
from tlalign_mm.labels import stream
from tlalign_mm.layers import Block, PyramidEmbed, SpatialReductionAttention, run_block
from tlalign_mm.layers.pos_embed import fit_pos_embed, resize_pos_embed
from tlalign_mm.registry import MODELS

_COMMON: dict[str, Any] = {
    "embed_dims": (64, 128, 320, 512),
    "num_heads": (1, 2, 5, 8),
    "mlp_ratios": (8, 8, 4, 4),
    "sr_ratios": (8, 4, 2, 1),
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "pvt-tiny": {**_COMMON, "depths": (2, 2, 2, 2)},
    "pvt-small": {**_COMMON, "depths": (3, 4, 6, 3)},
    "pvt-medium": {**_COMMON, "depths": (3, 4, 18, 3)},
    "pvt-large": {**_COMMON, "depths": (3, 8, 27, 3)},
}
STAGE_PARTS = ("patch_embed", "pos_embed", "block")  # of a stage, in the order of the data


@MODELS.register_module()
class PyramidVisionTransformer(Backbone):
    """Pyramid Vision Transformer for pretraining and for dense tasks.

    For pretraining a class token joins the last stage; dense tasks have neither class token nor
    final norm, as in the official detection code.

    Args:
        arch: One of ``pvt-tiny``, ``pvt-small``, ``pvt-medium``, ``pvt-large``; fields that are
            given win over it.
        embed_dims: Channels of each stage.
        depths: Blocks of each stage.
        num_heads: Attention heads of each stage.
        mlp_ratios: Hidden channels of each stage's MLPs over its channels.
        sr_ratios: Side of the window of tokens that makes one key, for each stage.
        img_size: Side or (height, width) that the position embeddings are made for; images of
            another size interpolate them.
        patch_size: Side of a patch in pixels; every later stage halves the map.
        qkv_bias: Whether query, key and value have a bias.
        drop_path_rate: Stochastic depth of the last block; linear from 0 over all blocks.
        out_indices: Stages whose maps ``forward`` returns (default: all); ``()`` for pretraining.
        frozen_stages: -1 for none, 0 for the patch embedding, i for the first i stages as well.
        with_cp: Recompute blocks in the backward pass to save memory.
        init_cfg: ``dict(type='Pretrained', checkpoint=…)``, another one of mmengine's, or None.

    Raises:
        ValueError: If ``arch`` is unknown, a field is missing or fields do not fit each other.
    """

    dropped_keys = (r"norm\.(weight|bias)", r"head\..*", "cls_token")
    has_class_token = True

    def __init__(
        self,
        arch: str | None = None,
        embed_dims: tuple[int, ...] | None = None,
        depths: tuple[int, ...] | None = None,
        num_heads: tuple[int, ...] | None = None,
        mlp_ratios: tuple[float, ...] | None = None,
        sr_ratios: tuple[int, ...] | None = None,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        qkv_bias: bool = True,
        drop_path_rate: float = 0.1,
        out_indices: tuple[int, ...] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        sizes = resolve(
            type(self).__name__,
            ARCHITECTURES,
            arch,
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            sr_ratios=sr_ratios,
        )
        check_stages(**sizes)
        dims, depths = sizes["embed_dims"], sizes["depths"]
        check_heads(dims, sizes["num_heads"])
        out_indices = tuple(range(len(depths)) if out_indices is None else out_indices)
        if not out_indices and sizes["sr_ratios"][-1] != 1:
            raise ValueError(
                f"sr_ratios={sizes['sr_ratios']} must end in 1 for pretraining: the class token "
                "joins the last stage and is part of no window."
            )
        architecture = {**sizes, "img_size": list(to_2tuple(img_size))}
        architecture |= {"patch_size": patch_size, "qkv_bias": qkv_bias}
        stride = patch_size * 2 ** (len(depths) - 1)
        super().__init__(
            architecture, dims, patch_size, stride, out_indices, frozen_stages, with_cp, init_cfg
        )
        self.grids = stage_grids(to_2tuple(img_size), patch_size, len(depths))
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").split(depths)
        for i in range(len(depths)):
            self._add_stage(i, rates[i].tolist())
        if not self.out_indices:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dims[-1]))
            trunc_normal_(self.cls_token, std=0.02)
            self.norm = nn.LayerNorm(dims[-1], 1e-6)
        self.apply(init_linear)
        self._register_load_state_dict_pre_hook(self._fit_on_load)
        self.freeze()

    def _add_stage(self, i: int, rates: list[float]) -> None:
        """Modules of stage ``i`` under their official names, which count from 1."""
        sizes = self.architecture
        dim, in_dim = sizes["embed_dims"][i], sizes["embed_dims"][i - 1] if i else 3
        embed = PyramidEmbed(in_dim, dim, 2 if i else self.patch_size)
        self.add_module(f"patch_embed{i + 1}", embed)
        height, width = self.grids[i]
        pos_embed = nn.Parameter(torch.zeros(1, self._prefix(i) + height * width, dim))
        self.register_parameter(f"pos_embed{i + 1}", trunc_normal_(pos_embed, std=0.02))
        blocks = nn.ModuleList(
            Block(
                dim,
                SpatialReductionAttention(
                    dim, sizes["num_heads"][i], sizes["sr_ratios"][i], qkv_bias=sizes["qkv_bias"]
                ),
                Mlp(dim, int(dim * sizes["mlp_ratios"][i])),
                rate,
                norm_eps=1e-6,
            )
            for rate in rates
        )
        self.add_module(f"block{i + 1}", blocks)

    def _prefix(self, i: int) -> int:
        """Class tokens in stage ``i``."""
        return int(not self.out_indices and i == len(self.num_features) - 1)

    def _stage(self, i: int) -> tuple[PyramidEmbed, nn.Parameter, nn.ModuleList]:
        return tuple(getattr(self, f"{part}{i + 1}") for part in STAGE_PARTS)

    def _run(
        self, images: Tensor, token_labels: Tensor | None = None, class_attention: bool = False
    ) -> tuple[list[Tensor], Pooled | None]:
        x, maps = images.permute(0, 2, 3, 1), []  # (B, H, W, 3)
        for i in range(self.num_reached):
            x, token_labels = self._embed(i, x, token_labels)
            if self._prefix(i):
                return maps, self._pool(x, token_labels, class_attention)
            for block in self._stage(i)[2]:
                x, token_labels = run_block(block, x, token_labels, self.with_cp)
            if i in self.out_indices:
                maps.append(to_nchw(x))
        return maps, None

    def _embed(
        self, i: int, x: Tensor, token_labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Patches of stage ``i`` with their positions; labels come on the first stage's patches."""
        embed, pos_embed, _ = self._stage(i)
        x, reduced = embed(x, token_labels if i else None)
        grid = (x.shape[1], x.shape[2])
        patches = resize_pos_embed(pos_embed[:, self._prefix(i) :], self.grids[i], grid, "bilinear")
        return x + patches.unflatten(1, grid), reduced if i else token_labels

    def _pool(self, x: Tensor, token_labels: Tensor | None, class_attention: bool) -> Pooled:
        """The last stage with a class token, whose row is the image's."""
        grid, row = (x.shape[1], x.shape[2]), None
        _, pos_embed, blocks = self._stage(len(self.num_features) - 1)
        token = (self.cls_token + pos_embed[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([token.to(x.dtype), x.flatten(1, 2)], dim=1)  # (B, 1 + N, C)
        if token_labels is not None:
            token_labels = stream.join(token_labels.flatten(1, 2))
        for block in blocks:
            if class_attention and block is blocks[-1]:
                row = block.class_attention(x).unflatten(1, grid)
            x, token_labels = run_block(block, x, token_labels, self.with_cp)
        label = None if token_labels is None else token_labels[:, 0]
        return Pooled(self.norm(x[:, 0]), label, row)

    def stage_modules(self) -> list[list[nn.Module]]:
        """The first patch embedding, then each stage; the last has the final norm."""
        stages = [[self._stage(i)[2]] for i in range(len(self.num_features))]
        for i, stage in enumerate(stages[1:], 1):
            stage.append(self._stage(i)[0])
        if not self.out_indices:
            stages[-1].append(self.norm)
        return [[self.patch_embed1], *stages]

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Position embeddings go with their patches, the class token with the last stage."""
        groups = super().stage_parameters()
        for i in range(len(self.num_features)):
            groups[i + 1 if i else 0].append(self._stage(i)[1])
        if not self.out_indices:
            groups[-1].append(self.cls_token)
        return groups

    def _num_blocks(self) -> int:
        return sum(self.architecture["depths"])

    def _depth_of(self, parts: list[str]) -> int | None:
        depths, part = self.architecture["depths"], parts[0].rstrip("0123456789")
        if part == "cls_token":
            return sum(depths[:-1])
        if part not in STAGE_PARTS:
            return None
        before = sum(depths[: int(parts[0].removeprefix(part)) - 1])
        return before + (int(parts[1]) + 1 if part == "block" else 0)

    def fit(self, tensors: dict[str, Tensor], source: dict[str, Any]) -> dict[str, Tensor]:
        """Resize the position embeddings from the grids that the file names."""
        if "img_size" not in source:
            return tensors
        fitted = dict(tensors)
        grids = stage_grids(source["img_size"], source["patch_size"], len(self.grids))
        for i, (theirs, ours) in enumerate(zip(grids, self.grids, strict=True)):
            name = f"pos_embed{i + 1}"
            if name in fitted:
                prefix = fitted[name].shape[1] - math.prod(theirs)
                fitted[name] = fit_pos_embed(fitted[name], prefix, prefix, ours, theirs, "bilinear")
        return fitted

    def _fit_on_load(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Fit position embeddings of another image size; drop a class slot that is not needed."""
        for i, grid in enumerate(self.grids):
            name = f"{prefix}pos_embed{i + 1}"
            theirs = i == len(self.grids) - 1 and name in state_dict
            theirs = int(theirs and self._has_class_slot(state_dict, prefix, name))
            if name in state_dict and theirs >= self._prefix(i):  # a slot cannot be made up
                state_dict[name] = fit_pos_embed(
                    state_dict[name], theirs, self._prefix(i), grid, mode="bilinear"
                )

    def _has_class_slot(self, state_dict: dict[str, Any], prefix: str, name: str) -> bool:
        """Whether the last embedding of a file starts with the class token's position.

        Official detection weights hold that position without a class token, so the number of
        patches must tell.
        """
        if f"{prefix}cls_token" in state_dict:
            return True
        patches, own = state_dict[name].shape[1] - 1, math.prod(self.grids[-1])
        is_square = patches > 0 and math.isqrt(patches) ** 2 == patches
        return patches + 1 != own and (patches == own or is_square)


def stage_grids(
    img_size: tuple[int, int], patch_size: int, num_stages: int
) -> list[tuple[int, int]]:
    """Token maps (height, width) of all stages; a side that is no multiple is rounded up."""
    strides = [patch_size * 2**i for i in range(num_stages)]
    return [tuple(-(-side // stride) for side in img_size) for stride in strides]
