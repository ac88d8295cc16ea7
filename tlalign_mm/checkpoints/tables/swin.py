"""Swin Transformer: timm (0.9 and newer) names it as we do.

The official repository and timm before 0.9 hold a downsampling in the stage before it; the mm
libraries merge patches by ``nn.Unfold``, whose channels come before its neighbours. Sources:
microsoft/Swin-Transformer, huggingface/pytorch-image-models, ``swin_converter`` of mmdetection.
"""

import torch
from torch import Tensor

from tlalign_mm.checkpoints.keymap import Op, Rule, Table, same, under


def _to_unfold(tensor: Tensor) -> Tensor:
    """(…, 4C) neighbours of one column after the other to (…, C4) row after row."""
    return tensor.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :].transpose(-1, -2).flatten(-2)


def _from_unfold(tensor: Tensor) -> Tensor:
    """(…, C4) to (…, 4C), the inverse."""
    return tensor.unflatten(-1, (-1, 4)).transpose(-1, -2)[..., [0, 2, 1, 3], :].flatten(-2)


UNFOLD = Op("reordered for patch merging", _to_unfold, _from_unfold)
BUFFERS: Table = (
    Rule(None, "layers.{i}.blocks.{j}.attn_mask"),
    Rule(None, "layers.{i}.blocks.{j}.attn.relative_position_index"),
)
BLOCK = same(
    "norm1.{p}",
    "attn.qkv.{p}",
    "attn.proj.{p}",
    "attn.relative_position_bias_table",
    "norm2.{p}",
    "mlp.fc1.{p}",
    "mlp.fc2.{p}",
)
_BODY: Table = (
    *same("patch_embed.proj.{p}", "patch_embed.norm.{p}", "norm.{p}"),
    *under("layers.{i}.blocks.{j}.", "layers.{i}.blocks.{j}.", BLOCK),
    *BUFFERS,
)
_DOWNSAMPLE = same("reduction.weight", "norm.{p}")
OURS: Table = (
    *_BODY,
    *under("layers.{i}.downsample.", "layers.{i}.downsample.", _DOWNSAMPLE),
    *same("norm{i}.{p}", "head.{p}"),
)
TIMM: Table = (
    *_BODY,
    *under("layers.{i}.downsample.", "layers.{i}.downsample.", _DOWNSAMPLE),
    Rule("norm{i}.{p}", None),
    Rule("head.{p}", "head.fc.{p}"),
)
OFFICIAL: Table = (
    *_BODY,
    *under("layers.{i+1}.downsample.", "layers.{i}.downsample.", _DOWNSAMPLE),
    *same("norm{i}.{p}", "head.{p}"),
)
_MM_BLOCK: Table = (
    *same("norm1.{p}", "norm2.{p}"),
    Rule("attn.qkv.{p}", "attn.w_msa.qkv.{p}"),
    Rule("attn.proj.{p}", "attn.w_msa.proj.{p}"),
    Rule("attn.relative_position_bias_table", "attn.w_msa.relative_position_bias_table"),
    Rule(None, "attn.w_msa.relative_position_index"),
    Rule("mlp.fc1.{p}", "ffn.layers.0.0.{p}"),
    Rule("mlp.fc2.{p}", "ffn.layers.1.{p}"),
)
_MM: Table = (
    Rule("patch_embed.proj.{p}", "patch_embed.projection.{p}"),
    *same("patch_embed.norm.{p}"),
    *under("layers.{i}.blocks.{j}.", "stages.{i}.blocks.{j}.", _MM_BLOCK),
    Rule(
        "layers.{i+1}.downsample.reduction.weight", "stages.{i}.downsample.reduction.weight", UNFOLD
    ),
    Rule("layers.{i+1}.downsample.norm.{p}", "stages.{i}.downsample.norm.{p}", UNFOLD),
)
DENSE: Table = (
    *_MM,
    *same("norm{i}.{p}"),
    Rule("norm.{p}", None),
    Rule("head.{p}", None),
)
MMPRETRAIN: Table = (
    *_MM,
    Rule("norm.{p}", "norm{last}.{p}"),
    Rule("norm{i}.{p}", None),
    Rule("head.{p}", "head.fc.{p}"),
)
TABLES = {
    "tlalign_mm": OURS,
    "timm": TIMM,
    "official": OFFICIAL,
    "mmseg": DENSE,
    "mmdet": DENSE,
    "mmpretrain": MMPRETRAIN,
}
_CLASS = ("cls_token", "class_block.{rest}")
CA_TABLES = {  # only the body of the class-attention variant exists elsewhere
    "tlalign_mm": (*OURS, *same(*_CLASS)),
    "mmseg": (*DENSE, *(Rule(name, None) for name in _CLASS)),
    "mmdet": (*DENSE, *(Rule(name, None) for name in _CLASS)),
}


def add_position_index(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors with the buffer that the mm libraries save beside every bias table."""
    name = "attn.w_msa.relative_position_bias_table"
    tables = {key: tensor for key, tensor in tensors.items() if key.endswith(name)}
    indices = {
        key.replace("bias_table", "index"): position_index(round(len(table) ** 0.5 + 1) // 2)
        for key, table in tables.items()
    }
    return tensors | indices


def position_index(window: int) -> Tensor:
    """(window², window²) row of the bias table for every pair of tokens (Swin, section 3.2)."""
    rows, columns = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    rows, columns = rows.flatten(), columns.flatten()
    down = rows[:, None] - rows[None] + window - 1
    across = columns[:, None] - columns[None] + window - 1
    return down * (2 * window - 1) + across
