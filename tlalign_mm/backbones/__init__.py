"""Vision transformers with the label stream, one architecture a file."""

from tlalign_mm.backbones.base import Backbone, Pooled
from tlalign_mm.backbones.swin import SwinTransformer

__all__ = ["Backbone", "Pooled", "SwinTransformer"]
