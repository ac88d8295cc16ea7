"""Vision transformers with the label stream, one architecture a file."""

from tlalign_mm.backbones.base import Backbone, Pooled
from tlalign_mm.backbones.swin import SwinTransformer
from tlalign_mm.backbones.vit import VisionTransformer

__all__ = ["Backbone", "Pooled", "SwinTransformer", "VisionTransformer"]
