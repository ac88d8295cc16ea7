"""Published architectures as a pair of models: timm's own and ours, with the same weights."""

from typing import Any, NamedTuple

import timm
import torch
from torch import nn

from tlalign_mm.backbones import Backbone
from tlalign_mm.registry import MODELS


class Twin(NamedTuple):
    """Where an architecture is found on both sides.

    Attributes:
        timm_name: Name of timm's model.
        backbone: Name of our class.
        arch: Its ``arch``.
        fields: Fields beside ``arch``.
    """

    timm_name: str
    backbone: str
    arch: str
    fields: dict[str, Any] = {}


TWINS: dict[str, Twin] = {
    **{
        f"deit-{size}": Twin(f"deit_{size}_patch16_224", "VisionTransformer", f"deit-{size}")
        for size in ("tiny", "small", "base")
    },
    **{
        f"deit-{size}-distilled": Twin(
            f"deit_{size}_distilled_patch16_224", "VisionTransformer", f"deit-{size}-distilled"
        )
        for size in ("tiny", "small", "base")
    },
    **{
        f"swin-{size}": Twin(f"swin_{size}_patch4_window7_224", "SwinTransformer", f"swin-{size}")
        for size in ("tiny", "small", "base")
    },
    **{
        f"pvt-v2-b{i}": Twin(f"pvt_v2_b{i}", "PyramidVisionTransformerV2", f"pvt-v2-b{i}")
        for i in range(6)
    },
    "pvt-v2-b2-linear": Twin("pvt_v2_b2_li", "PyramidVisionTransformerV2", "pvt-v2-b2-linear"),
    "cait-xxs24": Twin("cait_xxs24_224", "CaiT", "cait-xxs24"),
    "cait-s24": Twin("cait_s24_224", "CaiT", "cait-s24"),
    "xcit-nano-12": Twin("xcit_nano_12_p16_224", "XCiT", "xcit-nano-12"),
    "xcit-small-12": Twin("xcit_small_12_p16_224", "XCiT", "xcit-small-12"),
    "xcit-nano-12-p8": Twin("xcit_nano_12_p8_224", "XCiT", "xcit-nano-12", {"patch_size": 8}),
}
FIXED_SIZE = ("VisionTransformer", "SwinTransformer", "CaiT")  # timm builds these for one img_size
POSITIONS = ("VisionTransformer", "CaiT")  # ours hold a position embedding for one img_size


def our_config(twin: Twin, size: int = 224) -> dict[str, Any]:
    """Config of our backbone for pretraining, without stochastic depth as timm's default."""
    img_size = {"img_size": size} if twin.backbone in POSITIONS else {}
    cfg = {"type": f"tlalign_mm.{twin.backbone}", "arch": twin.arch, **twin.fields, **img_size}
    return {**cfg, "out_indices": (), "drop_path_rate": 0.0}


def build_ours(twin: Twin, size: int = 224) -> Backbone:
    """Our backbone for pretraining, with random weights."""
    return MODELS.build(our_config(twin, size))


def build_timm(twin: Twin, size: int = 224, num_classes: int = 0) -> nn.Module:
    """Timm's model with random weights."""
    img_size = {"img_size": size} if twin.backbone in FIXED_SIZE else {}
    return timm.create_model(twin.timm_name, num_classes=num_classes, **img_size)


def copy_weights(theirs: nn.Module, ours: Backbone) -> None:
    """Load timm's weights into ours by name.

    Raises:
        RuntimeError: If any name or shape beside the classifiers differs.
    """
    weights = {n: t for n, t in theirs.state_dict().items() if not n.startswith("head")}
    ours.load_state_dict(weights, strict=True)


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights under which every parameter matters.

    Fresh models hide mistakes: their biases are zero, their layer scales tiny and their attention
    almost uniform. Matrices get the standard deviation that keeps the variance, vectors vary around
    the value that they are made with (0 for biases, 1 for norms and scales), and so do the running
    statistics of batch norms. Returns the model.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("weight") and parameter.ndim > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            is_scale = parameter.ndim == 1 and not name.endswith("bias") or "temperature" in name
            parameter.copy_(0.3 * noise + is_scale)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            noise = torch.randn(buffer.shape, generator=generator)
            buffer.copy_(0.3 * noise if name.endswith("mean") else (0.3 * noise).exp())
    return model
