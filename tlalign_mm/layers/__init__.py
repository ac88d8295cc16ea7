"""Modules that backbones are built from; every one moves features and labels together.

Modules that mix tokens are ``forward(x, token_labels=None) -> (x, token_labels)``, always a pair.
"""

from tlalign_mm.layers.attention import Attention, ClassAttention, attend, attention_row
from tlalign_mm.layers.block import Block, run_block
from tlalign_mm.layers.cait import (
    ClassAttentionBlock,
    LayerScaleBlock,
    TalkingHeadAttention,
    read_class,
)
from tlalign_mm.layers.pvt import (
    ConvMlp,
    OverlapEmbed,
    PyramidEmbed,
    PyramidStage,
    SpatialReductionAttention,
)
from tlalign_mm.layers.swin import PatchMerging, SwinStage, WindowAttention
from tlalign_mm.layers.xcit import (
    ConvPatchEmbed,
    CrossCovarianceAttention,
    FourierPositions,
    LocalPatchInteraction,
    XCABlock,
    XCiTClassBlock,
    run_xca_block,
)

__all__ = [
    "Attention",
    "Block",
    "ClassAttention",
    "ClassAttentionBlock",
    "ConvMlp",
    "ConvPatchEmbed",
    "CrossCovarianceAttention",
    "FourierPositions",
    "LayerScaleBlock",
    "LocalPatchInteraction",
    "OverlapEmbed",
    "PatchMerging",
    "PyramidEmbed",
    "PyramidStage",
    "SpatialReductionAttention",
    "SwinStage",
    "TalkingHeadAttention",
    "WindowAttention",
    "XCABlock",
    "XCiTClassBlock",
    "attend",
    "attention_row",
    "read_class",
    "run_block",
    "run_xca_block",
]
