"""Modules that backbones are built from; every one moves features and labels together.

Modules that mix tokens are ``forward(x, token_labels=None) -> (x, token_labels)``, always a pair.
"""

from tlalign_mm.layers.attention import attend
from tlalign_mm.layers.swin import PatchMerging, SwinBlock, WindowAttention

__all__ = ["PatchMerging", "SwinBlock", "WindowAttention", "attend"]
