"""VisionTransformer: the contract, parity with timm's own model, and the label stream on it."""

from tests.backbones.contract import BackboneContract
from tlalign_mm.backbones import Backbone, VisionTransformer

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 4}


class TestContract(BackboneContract):
    strides = (4, 4)
    channels = (24, 24)

    def build(self, **kwargs: object) -> Backbone:
        return VisionTransformer(**{**SMALL, "img_size": 32, "out_indices": (0, 1), **kwargs})


class TestDistilledContract(TestContract):
    def build(self, **kwargs: object) -> Backbone:
        return super().build(distilled=True, final_norm=True, **kwargs)
