"""Pyramid Vision Transformer: version 1 has official names here, version 2 timm's.

Sources: whai362/PVT, huggingface/pytorch-image-models (``pvt_v2``), ``pvt_convert`` of
mmdetection, whose MLPs are 1x1 convolutions and whose query, key and value are one matrix.
"""

from torch import Tensor

from tlalign_mm.checkpoints.keymap import Op, Rule, Table, same, under

CONV = Op("linear to 1x1 convolution", lambda t: t[:, :, None, None], lambda t: t.flatten(1))
_REDUCTION = ("attn.sr.{p}", "attn.norm.{p}")
_ATTENTION = ("norm1.{p}", "attn.q.{p}", "attn.kv.{p}", "attn.proj.{p}", *_REDUCTION, "norm2.{p}")
BLOCK = same(*_ATTENTION, "mlp.fc1.{p}", "mlp.fc2.{p}")
_EMBED = same("proj.{p}", "norm.{p}")
_MM_EMBED: Table = (Rule("proj.{p}", "projection.{p}"), Rule("norm.{p}", "norm.{p}"))


def _mm_block(second: str) -> Table:
    """A block of mmdetection; ``second`` is the index of the MLP's second layer."""
    return (
        *same("norm1.{p}", *_REDUCTION, "norm2.{p}"),
        Rule(("attn.q.{p}", "attn.kv.{p}"), "attn.attn.in_proj_{p}", shares=(1, 2)),
        Rule("attn.proj.{p}", "attn.attn.out_proj.{p}"),
        Rule("mlp.fc1.weight", "ffn.layers.0.weight", CONV),
        Rule("mlp.fc1.bias", "ffn.layers.0.bias"),
        Rule("mlp.fc2.weight", f"ffn.layers.{second}.weight", CONV),
        Rule("mlp.fc2.bias", f"ffn.layers.{second}.bias"),
    )


OFFICIAL: Table = (
    *under("patch_embed{i}.", "patch_embed{i}.", _EMBED),
    *under("block{i}.{j}.", "block{i}.{j}.", BLOCK),
    *same("pos_embed{i}", "cls_token", "norm.{p}", "head.{p}"),
)
MMDET: Table = (
    *under("patch_embed{i+1}.", "layers.{i}.0.", _MM_EMBED),
    Rule("pos_embed{i+1}", "layers.{i}.1.0.pos_embed"),
    *under("block{i+1}.{j}.", "layers.{i}.1.{j+1}.", _mm_block("3")),
    Rule("cls_token", None),
    Rule("norm.{p}", None),
    Rule("head.{p}", None),
)
TABLES = {"tlalign_mm": OFFICIAL, "official": OFFICIAL, "mmdet": MMDET}

_V2_BLOCK: Table = (*BLOCK, *same("mlp.dwconv.{p}"))
V2_TIMM: Table = (
    *under("patch_embed.", "patch_embed.", _EMBED),
    *under("stages.{i}.downsample.", "stages.{i}.downsample.", _EMBED),
    *under("stages.{i}.blocks.{j}.", "stages.{i}.blocks.{j}.", _V2_BLOCK),
    *same("stages.{i}.norm.{p}", "head.{p}"),
)
V2_OFFICIAL: Table = (
    *under("patch_embed.", "patch_embed1.", _EMBED),
    *under("stages.{i}.downsample.", "patch_embed{i+1}.", _EMBED),
    *under("stages.{i}.blocks.{j}.", "block{i+1}.{j}.", BLOCK),
    Rule("stages.{i}.blocks.{j}.mlp.dwconv.{p}", "block{i+1}.{j}.mlp.dwconv.dwconv.{p}"),
    Rule("stages.{i}.norm.{p}", "norm{i+1}.{p}"),
    *same("head.{p}"),
)
V2_MMDET: Table = (
    *under("patch_embed.", "layers.0.0.", _MM_EMBED),
    *under("stages.{i}.downsample.", "layers.{i}.0.", _MM_EMBED),
    *under("stages.{i}.blocks.{j}.", "layers.{i}.1.{j}.", _mm_block("4")),
    Rule("stages.{i}.blocks.{j}.mlp.dwconv.{p}", "layers.{i}.1.{j}.ffn.layers.1.{p}"),
    Rule("stages.{i}.norm.{p}", "layers.{i}.2.{p}"),
    Rule("head.{p}", None),
)
V2_TABLES = {
    "tlalign_mm": V2_TIMM,
    "timm": V2_TIMM,
    "official": V2_OFFICIAL,
    "mmdet": V2_MMDET,
}


def drop_class_slot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of version 1 without the class token's position, for layouts without it.

    The first stage has no such position, and every stage halves the side of its square map; so the
    number of rows tells for any resolution whether the last one has it.
    """
    stages = sorted(int(key[9:]) for key in tensors if key[:9] == "pos_embed" and key[9:].isdigit())
    if len(stages) < 2:
        return tensors
    first, last = (f"pos_embed{stage}" for stage in (stages[0], stages[-1]))
    rows = tensors[last].shape[1]
    halvings = 4 ** (stages[-1] - stages[0])
    has_slot = "cls_token" in tensors or (rows - 1) * halvings == tensors[first].shape[1]
    return {**tensors, last: tensors[last][:, 1:]} if has_slot else tensors
