"""Vision transformers with the label stream, one architecture a file."""

from tlalign_mm.backbones.base import Backbone, Pooled
from tlalign_mm.backbones.cait import CaiT
from tlalign_mm.backbones.pvt import PyramidVisionTransformer
from tlalign_mm.backbones.pvt_v2 import PyramidVisionTransformerV2
from tlalign_mm.backbones.swin import SwinTransformer
from tlalign_mm.backbones.vit import VisionTransformer

__all__ = [
    "Backbone",
    "CaiT",
    "Pooled",
    "PyramidVisionTransformer",
    "PyramidVisionTransformerV2",
    "SwinTransformer",
    "VisionTransformer",
]
