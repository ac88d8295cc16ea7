"""Vision transformers with the label stream, one architecture a file."""

from tlalign_mm.backbones.base import Backbone, Pooled
from tlalign_mm.backbones.ca_swin import CASwinTransformer
from tlalign_mm.backbones.cait import CaiT
from tlalign_mm.backbones.pvt import PyramidVisionTransformer
from tlalign_mm.backbones.pvt_v2 import PyramidVisionTransformerV2
from tlalign_mm.backbones.swin import SwinTransformer
from tlalign_mm.backbones.vit import VisionTransformer
from tlalign_mm.backbones.xcit import XCiT

__all__ = [
    "Backbone",
    "CASwinTransformer",
    "CaiT",
    "Pooled",
    "PyramidVisionTransformer",
    "PyramidVisionTransformerV2",
    "SwinTransformer",
    "VisionTransformer",
    "XCiT",
]
