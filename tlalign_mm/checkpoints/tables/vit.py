"""Vision transformer (DeiT): timm, official DeiT, TL-Align and TransMix name it as we do.

Sources: facebookresearch/deit, huggingface/pytorch-image-models, mmsegmentation's
``tools/model_converters/vit2mmseg.py``, mmpretrain's ``VisionTransformer``.
"""

import torch
from torch import Tensor

from tlalign_mm.checkpoints.keymap import Rule, Table, same, under

HEADS = same("head.{p}", "head_dist.{p}")
BLOCK = same(
    "norm1.{p}", "attn.qkv.{p}", "attn.proj.{p}", "norm2.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}"
)
TIMM: Table = (
    *same("cls_token", "dist_token", "pos_embed", "patch_embed.proj.{p}", "norm.{p}"),
    *under("blocks.{i}.", "blocks.{i}.", BLOCK),
    *HEADS,
)
_MM_MLP: Table = (
    Rule("norm1.{p}", "ln1.{p}"),
    Rule("norm2.{p}", "ln2.{p}"),
    Rule("mlp.fc1.{p}", "ffn.layers.0.0.{p}"),
    Rule("mlp.fc2.{p}", "ffn.layers.1.{p}"),
)
_MM: Table = (
    *same("cls_token", "pos_embed"),
    Rule("patch_embed.proj.{p}", "patch_embed.projection.{p}"),
    Rule("norm.{p}", "ln1.{p}"),
    *under("blocks.{i}.", "layers.{i}.", _MM_MLP),
)
MMSEG: Table = (
    *_MM,
    Rule("blocks.{i}.attn.qkv.{p}", "layers.{i}.attn.attn.in_proj_{p}"),
    Rule("blocks.{i}.attn.proj.{p}", "layers.{i}.attn.attn.out_proj.{p}"),
    Rule("dist_token", None),
    Rule("head.{p}", None),
    Rule("head_dist.{p}", None),
)
MMPRETRAIN: Table = (
    *_MM,
    *same("dist_token"),
    *under("blocks.{i}.", "layers.{i}.", same("attn.qkv.{p}", "attn.proj.{p}")),
    Rule("head.{p}", "head.layers.head.{p}"),
    Rule("head_dist.{p}", "head.layers.head_dist.{p}"),
)
TABLES = {
    "tlalign_mm": TIMM,
    "timm": TIMM,
    "official": TIMM,
    "mmseg": MMSEG,
    "mmpretrain": MMPRETRAIN,
}


def drop_distillation_slot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors without the distillation token's position, for layouts without that token."""
    if "dist_token" not in tensors or "pos_embed" not in tensors:
        return tensors
    positions = tensors["pos_embed"]
    return {**tensors, "pos_embed": torch.cat([positions[:, :1], positions[:, 2:]], dim=1)}
