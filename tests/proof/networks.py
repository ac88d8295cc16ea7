"""Small networks of every family with all of their tensors, as files that say what they are."""

from typing import Any

import torch

from tlalign_mm.checkpoints import Checkpoint, Weights, read_weights, write_weights
from tlalign_mm.proof.twins import randomize
from tlalign_mm.registry import MODELS

PYRAMID = {  # mmdetection's PVT v2 always has four stages
    "embed_dims": (32, 64, 96, 128),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 2, 3, 4),
    "mlp_ratios": (2, 2, 1, 1),
    "sr_ratios": (4, 2, 2, 1),
}
VIT = {"embed_dim": 64, "depth": 2, "num_heads": 1, "img_size": 32, "patch_size": 8}
SWIN = {"embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6), "window_size": 4}
NETWORKS: dict[str, dict[str, Any]] = {
    "VisionTransformer": VIT,
    "VisionTransformer distilled": {**VIT, "distilled": True},
    "SwinTransformer": SWIN,
    "CASwinTransformer": SWIN,
    "PyramidVisionTransformer": {**PYRAMID, "img_size": 64},
    "PyramidVisionTransformerV2": PYRAMID,
    "PyramidVisionTransformerV2 linear": {**PYRAMID, "linear": True, "sr_ratios": (8, 4, 2, 1)},
    "CaiT": {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8},
    "XCiT": {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8},
}
# of images, where positions and windows do not tell; the default would be 224 pixels
SIZES = {"PyramidVisionTransformerV2": [(64, 64), (64, 96)], "XCiT": [(32, 32), (40, 48)]}


def config(name: str, is_dense: bool = False) -> dict[str, Any]:
    cfg = {"type": f"tlalign_mm.{name.split()[0]}", **NETWORKS[name], "drop_path_rate": 0.0}
    return cfg if is_dense else {**cfg, "out_indices": ()}


def our_file(name: str, is_dense: bool = False) -> Checkpoint:
    ours = randomize(MODELS.build(config(name, is_dense)))
    tensors = dict(ours.state_dict())
    generator = torch.Generator().manual_seed(3)
    for head in [] if is_dense else ["head", "head_dist"][: 1 + name.endswith("distilled")]:
        tensors[f"{head}.weight"] = torch.randn(5, ours.num_features[-1], generator=generator)
        tensors[f"{head}.bias"] = torch.randn(5, generator=generator)
    return Checkpoint(tensors, "tlalign_mm", ours.architecture)


def converted(file: Checkpoint, to: str, **how: Any) -> tuple[Checkpoint, Weights, Checkpoint]:
    """What ``verify`` takes."""
    weights = read_weights(file, "a.pth", **how)
    return file, weights, write_weights(weights, to)[0]
