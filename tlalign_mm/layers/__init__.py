"""Modules that backbones are built from; every one moves features and labels together.

Modules that mix tokens are ``forward(x, token_labels=None) -> (x, token_labels)``, always a pair.
"""

from tlalign_mm.layers.attention import Attention, ClassAttention, attend, attention_row
from tlalign_mm.layers.block import Block, run_block
from tlalign_mm.layers.swin import PatchMerging, SwinStage, WindowAttention

__all__ = [
    "Attention",
    "Block",
    "ClassAttention",
    "PatchMerging",
    "SwinStage",
    "WindowAttention",
    "attend",
    "attention_row",
    "run_block",
]
