"""Small networks of every family, for pretraining and for dense tasks."""

from typing import Any

import torch
from torch import Tensor

from tlalign_mm.backbones import Backbone
from tlalign_mm.checkpoints.tables import TABLES
from tlalign_mm.proof.twins import randomize
from tlalign_mm.registry import MODELS

PYRAMID = {"embed_dims": (64, 128), "depths": (1, 2), "num_heads": (1, 2), "mlp_ratios": (2, 1)}
TOYS: dict[str, dict[str, Any]] = {
    "VisionTransformer": {"embed_dim": 64, "depth": 2, "num_heads": 1, "img_size": 32},
    "VisionTransformer distilled": {
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 1,
        "img_size": 32,
        "distilled": True,
    },
    "SwinTransformer": {
        "embed_dim": 24,
        "depths": (2, 1),
        "num_heads": (3, 6),
        "window_size": 4,
    },
    "CASwinTransformer": {
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (3, 6),
        "window_size": 4,
    },
    "PyramidVisionTransformer": {**PYRAMID, "sr_ratios": (4, 1), "img_size": 32},
    "PyramidVisionTransformerV2": {**PYRAMID, "sr_ratios": (4, 2)},
    "PyramidVisionTransformerV2 linear": {**PYRAMID, "sr_ratios": (8, 4), "linear": True},
    "CaiT": {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32},
    "XCiT": {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8},
}
DENSE = {"SwinTransformer": (0, 1), "CASwinTransformer": (0, 1)}
# Every way out: a toy, whether it is dense, and the layout.
WAYS = [
    (toy, dense, layout)
    for toy in TOYS
    for dense in (False, True)
    for layout in TABLES[toy.split()[0]]
    if (toy, layout) != ("PyramidVisionTransformerV2 linear", "mmdet")
]


def build(toy: str, dense: bool = False, **fields: Any) -> Backbone:
    """The network with weights under which every parameter matters."""
    family = toy.split()[0]
    out_indices = DENSE.get(family, (0, 1)) if dense else ()
    cfg = {"type": f"tlalign_mm.{family}", **TOYS[toy], "out_indices": out_indices, **fields}
    return randomize(MODELS.build(cfg)).eval()


def classifier(toy: str) -> dict[str, Tensor]:
    """Weights of a pretrained network with its heads, under our names."""
    backbone = build(toy)
    heads = ["head"] + ["head_dist"] * toy.endswith("distilled")
    generator = torch.Generator().manual_seed(3)
    channels = backbone.num_features[-1]
    found = dict(backbone.state_dict())
    for head in heads:
        found[f"{head}.weight"] = torch.randn(5, channels, generator=generator)
        found[f"{head}.bias"] = torch.randn(5, generator=generator)
    return found
