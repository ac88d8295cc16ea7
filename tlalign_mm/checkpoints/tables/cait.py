"""CaiT: timm kept the official names, and so did we (facebookresearch/deit, ``cait_models.py``)."""

from tlalign_mm.checkpoints.keymap import Table, same, under

_MLP = ("norm1.{p}", "norm2.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}", "gamma_1", "gamma_2")
BLOCK = same(*_MLP, "attn.qkv.{p}", "attn.proj.{p}", "attn.proj_l.{p}", "attn.proj_w.{p}")
CLASS_BLOCK = same(*_MLP, "attn.q.{p}", "attn.k.{p}", "attn.v.{p}", "attn.proj.{p}")
OFFICIAL: Table = (
    *same("cls_token", "pos_embed", "patch_embed.proj.{p}", "norm.{p}", "head.{p}"),
    *under("blocks.{i}.", "blocks.{i}.", BLOCK),
    *under("blocks_token_only.{i}.", "blocks_token_only.{i}.", CLASS_BLOCK),
)
TABLES = {"tlalign_mm": OFFICIAL, "timm": OFFICIAL, "official": OFFICIAL}
