"""XCiT: timm names it as we do; official files join query, key and value of the class attention.

Sources: facebookresearch/xcit, huggingface/pytorch-image-models, mmpretrain's ``XCiT``.
"""

from tlalign_mm.checkpoints.keymap import Rule, Table, same, under

_SHARED = ("norm1.{p}", "norm2.{p}", "gamma1", "gamma2", "attn.proj.{p}")
_MLP = same("mlp.fc1.{p}", "mlp.fc2.{p}")
_MM_MLP: Table = (
    Rule("mlp.fc1.{p}", "ffn.layers.0.0.{p}"),
    Rule("mlp.fc2.{p}", "ffn.layers.1.{p}"),
)
_BLOCK = same(*_SHARED, "norm3.{p}", "gamma3", "attn.temperature", "attn.qkv.{p}")
_LOCAL = same("local_mp.conv1.{p}", "local_mp.bn.{p}", "local_mp.conv2.{p}")
_MM_LOCAL: Table = (
    Rule("local_mp.conv1.{p}", "local_mp.conv1.conv.{p}"),
    Rule("local_mp.bn.{p}", "local_mp.conv1.bn.{p}"),
    Rule("local_mp.conv2.{p}", "local_mp.conv2.conv.{p}"),
)
_CLASS = same(*_SHARED)
_CLASS_QKV = same("attn.q.{p}", "attn.k.{p}", "attn.v.{p}")
_JOINED: Table = (
    Rule(("attn.q.{p}", "attn.k.{p}", "attn.v.{p}"), "attn.qkv.{p}", shares=(1, 1, 1)),
)
_TOP = same("cls_token", "norm.{p}")
_STEM = same("patch_embed.proj.{i}.0.weight", "patch_embed.proj.{i}.1.{p}")
_MM_STEM: Table = tuple(  # an activation has a place of its own in ours
    Rule(f"patch_embed.proj.{2 * k}.{n}.{{p}}", f"patch_embed.proj.{k}.{part}.{{p}}")
    for k in range(4)
    for n, part in ((0, "conv"), (1, "bn"))
)
TIMM: Table = (
    *_TOP,
    *_STEM,
    *same("pos_embed.token_projection.{p}", "head.{p}"),
    *under("blocks.{i}.", "blocks.{i}.", _BLOCK + _MLP + _LOCAL),
    *under("cls_attn_blocks.{i}.", "cls_attn_blocks.{i}.", _CLASS + _MLP + _CLASS_QKV),
)
OFFICIAL: Table = (
    *_TOP,
    *_STEM,
    Rule("pos_embed.token_projection.{p}", "pos_embeder.token_projection.{p}"),
    *same("head.{p}"),
    *under("blocks.{i}.", "blocks.{i}.", _BLOCK + _MLP + _LOCAL),
    *under("cls_attn_blocks.{i}.", "cls_attn_blocks.{i}.", _CLASS + _MLP + _JOINED),
)
MMPRETRAIN: Table = (
    *_TOP,
    *_MM_STEM,
    Rule("pos_embed.token_projection.{p}", "pos_embed.token_projection.conv.{p}"),
    Rule("head.{p}", "head.fc.{p}"),
    *under("blocks.{i}.", "xca_layers.{i}.", _BLOCK + _MM_MLP + _MM_LOCAL),
    *under("cls_attn_blocks.{i}.", "ca_layers.{i}.", _CLASS + _MM_MLP + _CLASS_QKV),
)
TABLES = {"tlalign_mm": TIMM, "timm": TIMM, "official": OFFICIAL, "mmpretrain": MMPRETRAIN}
