"""Sizes of a network, read from the shapes of its tensors under our names.

What shapes cannot say is assumed as published and named as such: the number of heads where all
published models have 64 channels a head, the key windows of the linear PVT v2, XCiT's token norm.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tlalign_mm.checkpoints.errors import CheckpointError

HEAD_DIM = 64  # channels a head of every published DeiT, PVT and PVT v2 (but B0: 32)


class Architecture(NamedTuple):
    """Fields of our class that give these shapes.

    Attributes:
        fields: ``type`` and the fields; None for what neither shapes nor publications tell.
        assumed: Fields that shapes do not tell.
    """

    fields: dict[str, Any]
    assumed: tuple[str, ...] = ()

    @property
    def known(self) -> dict[str, Any]:
        """Fields that the shapes prove."""
        return {key: value for key, value in self.fields.items() if key not in self.assumed}


class _Shapes:
    """Shapes by name, with the few questions that all families ask."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def of(self, name: str, dims: int) -> tuple[int, ...]:
        shape = self.shapes.get(name)
        if shape is None or len(shape) != dims:
            found = "is missing" if shape is None else f"has shape {shape}"
            raise CheckpointError(
                f"Tensor {name} {found}, but {dims} dimensions tell the architecture; name a whole "
                "file of a known network."
            )
        return shape

    def count(self, template: str) -> int:
        """Blocks under ``template``, whose {} is their index; they must be numbered throughout."""
        pattern = re.compile(re.escape(template).replace(r"\{\}", r"(\d+)") + r"\..*")
        indices = {int(match[1]) for name in self.shapes if (match := pattern.fullmatch(name))}
        missing = sorted(set(range(len(indices))) - indices)
        if missing:
            raise CheckpointError(
                f"{template.format(missing[0])} is missing between its neighbours; the file is not "
                "whole."
            )
        return len(indices)

    def mlp_ratio(self, block: str, dim: int) -> float:
        ratio = self.of(f"{block}.mlp.fc1.weight", 2)[0] / dim
        return int(ratio) if ratio == int(ratio) else ratio


def infer(family: str, tensors: Mapping[str, Tensor]) -> Architecture:
    """Fields of the network that has these tensors.

    Args:
        family: Our class.
        tensors: State dict under our names; values are not read.

    Raises:
        CheckpointError: If tensors that tell a size are missing or odd.
    """
    fields, assumed = INFER[family](_Shapes(tensors))
    return Architecture({"type": family, **fields}, assumed)


Found = tuple[dict[str, Any], tuple[str, ...]]


def _vit(shapes: _Shapes) -> Found:
    dim, patch = _patches(shapes, "patch_embed")
    prefix = 2 if "dist_token" in shapes else 1
    fields = {
        "embed_dim": dim,
        "depth": shapes.count("blocks.{}"),
        "num_heads": _heads([dim])[0],
        "distilled": prefix == 2,
        "img_size": _img_size(shapes.of("pos_embed", 3)[1] - prefix, patch),
        "patch_size": patch,
        "mlp_ratio": shapes.mlp_ratio("blocks.0", dim),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
    }
    return fields, ("num_heads",)


def _swin(shapes: _Shapes) -> Found:
    dim, patch = _patches(shapes, "patch_embed")
    depths = [shapes.count(f"layers.{i}.blocks.{{}}") for i in range(shapes.count("layers.{}"))]
    tables = [
        shapes.of(f"layers.{i}.blocks.0.attn.relative_position_bias_table", 2)
        for i in range(len(depths))
    ]
    fields = {
        "embed_dim": dim,
        "depths": depths,
        "num_heads": [heads for _, heads in tables],
        "window_size": (math.isqrt(tables[0][0]) + 1) // 2,
        "patch_size": patch,
        "mlp_ratio": shapes.mlp_ratio("layers.0.blocks.0", dim),
    }
    return fields, ()


def _ca_swin(shapes: _Shapes) -> Found:
    fields, assumed = _swin(shapes)
    fields["depths"][-1] += 1  # the class-attention block counts
    return fields, assumed


def _pvt(shapes: _Shapes) -> Found:
    stages = []
    while shapes.count(f"block{len(stages) + 1}.{{}}"):  # they count from 1
        stages.append(f"block{len(stages) + 1}")
    embeds = [_patches(shapes, f"patch_embed{i + 1}") for i in range(len(stages))]
    dims, patch = [dim for dim, _ in embeds], embeds[0][1]
    fields = {
        **_pyramid(shapes, stages, dims),
        "img_size": _img_size(shapes.of("pos_embed1", 3)[1], patch),
        "patch_size": patch,
        "qkv_bias": "block1.0.attn.q.bias" in shapes,
    }
    return fields, ("num_heads",)


def _pvt_v2(shapes: _Shapes) -> Found:
    stages = [f"stages.{i}.blocks" for i in range(shapes.count("stages.{}"))]
    dims = [shapes.of(f"{stage}.0.norm1.weight", 1)[0] for stage in stages]
    fields = _pyramid(shapes, stages, dims)
    linear = f"{stages[-1]}.0.attn.sr.weight" in shapes and fields["sr_ratios"][0] == 1
    assumed = ("num_heads",)
    if linear:
        fields["sr_ratios"] = [8, 4, 2, 1][: len(stages)]
        assumed = ("num_heads", "sr_ratios")
    qkv_bias = "stages.0.blocks.0.attn.q.bias" in shapes
    return {**fields, "linear": linear, "qkv_bias": qkv_bias}, assumed


def _pyramid(shapes: _Shapes, stages: list[str], dims: list[int]) -> dict[str, Any]:
    reductions = [f"{stage}.0.attn.sr.weight" for stage in stages]
    return {
        "embed_dims": dims,
        "depths": [shapes.count(f"{stage}.{{}}") for stage in stages],
        "num_heads": _heads(dims),
        "mlp_ratios": [shapes.mlp_ratio(f"{s}.0", d) for s, d in zip(stages, dims, strict=True)],
        "sr_ratios": [shapes.of(n, 4)[-1] if n in shapes else 1 for n in reductions],
    }


def _cait(shapes: _Shapes) -> Found:
    dim, patch = _patches(shapes, "patch_embed")
    fields = {
        "embed_dim": dim,
        "depth": shapes.count("blocks.{}"),
        "num_heads": shapes.of("blocks.0.attn.proj_l.weight", 2)[0],
        "img_size": _img_size(shapes.of("pos_embed", 3)[1], patch),
        "patch_size": patch,
        "mlp_ratio": shapes.mlp_ratio("blocks.0", dim),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
    }
    blocks = shapes.count("blocks_token_only.{}")
    return fields | ({"depth_token_only": blocks} if blocks else {}), ()


def _xcit(shapes: _Shapes) -> Found:
    dim = shapes.of("norm.weight" if "norm.weight" in shapes else "blocks.0.norm1.weight", 1)[0]
    convolutions = [
        n for n in shapes.shapes if re.fullmatch(r"patch_embed\.proj\.\d+\.0\.weight", n)
    ]
    fields = {
        "embed_dim": dim,
        "depth": shapes.count("blocks.{}"),
        "num_heads": shapes.of("blocks.0.attn.temperature", 3)[0],
        "tokens_norm": dim != 128,  # nano alone goes without
        "patch_size": 2 ** len(convolutions),  # every one halves the map
        "mlp_ratio": shapes.mlp_ratio("blocks.0", dim),
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
    }
    blocks = shapes.count("cls_attn_blocks.{}")
    return fields | ({"cls_attn_layers": blocks} if blocks else {}), ("tokens_norm",)


INFER: dict[str, Callable[[_Shapes], Found]] = {
    "VisionTransformer": _vit,
    "SwinTransformer": _swin,
    "CASwinTransformer": _ca_swin,
    "PyramidVisionTransformer": _pvt,
    "PyramidVisionTransformerV2": _pvt_v2,
    "CaiT": _cait,
    "XCiT": _xcit,
}


def _patches(shapes: _Shapes, name: str) -> tuple[int, int]:
    """Channels and side of a square patch."""
    dim, _, height, width = shapes.of(f"{name}.proj.weight", 4)
    if height != width:
        raise CheckpointError(f"{name}.proj has patches of {height}x{width} pixels, not square.")
    return dim, height


def _heads(dims: list[int]) -> list[int | None]:
    """As published: heads of 64 channels, in PVT v2-B0 of 32."""
    head_dim = 32 if dims[0] == 32 else HEAD_DIM
    return [dim // head_dim if dim % head_dim == 0 else None for dim in dims]


def _img_size(patches: int, patch_size: int) -> list[int] | None:
    """Side twice where the patches are a square; None where the grid is anyone's guess."""
    side = math.isqrt(max(patches, 0))
    return [side * patch_size] * 2 if side and side**2 == patches else None
