"""timm's own classes with any sizes, and official files through timm's own filters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models import cait, deit, pvt_v2, swin_transformer, vision_transformer, xcit
from torch import Tensor, nn

from tlalign_mm.proof.anatomy import Size, image_sizes
from tlalign_mm.proof.sides import Side
from tlalign_mm.proof.stock_fields import whole_patches

Sizes = Mapping[str, Any]


def build_timm_model(
    architecture: Sizes, tensors: Mapping[str, Tensor], num_classes: int, is_official: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build timm's class with these sizes.

    Args:
        architecture: Our class as ``type``, and the sizes.
        tensors: timm's or official ones.
        num_classes: Of its classifiers, 0 for none.
        is_official: Whether the tensors have official names.

    Returns:
        The model, and the tensors under its names by timm's own filter.
    """
    build, read = MODELS[architecture["type"]]
    model = build(architecture, tensors, num_classes=num_classes)
    return model, read(dict(tensors), model) if is_official else dict(tensors)


def take_any_size(side: Side) -> None:
    """Let a timm model that is built for one image size run on any."""
    family = side.architecture["type"]
    if family in ("VisionTransformer", "CaiT"):
        _free_positions(side, family)
    elif family == "SwinTransformer":
        _follow_size(side)


def _free_positions(side: Side, family: str) -> None:
    """Interpolate positions as mmsegmentation and this package do; timm's way is its own rule."""
    model, patch = side.model, side.architecture["patch_size"]
    prefix = 0 if family == "CaiT" else model.num_prefix_tokens
    positions, source = model.pos_embed.detach(), tuple(model.patch_embed.grid_size)
    model.patch_embed.strict_img_size = False

    def prepare(size: Size, own: bool) -> None:
        target = (size[0] // patch, size[1] // patch)
        resize = _antialiased if own else _plain
        model.pos_embed = nn.Parameter(resize(positions, prefix, source, target))

    side.prepare = prepare
    if family == "CaiT":
        side.notes.append("timm's CaiT takes one image size; for others its positions are resized")
    else:
        side.own_rule = "timm antialiases positions when it resizes them"


def _follow_size(side: Side) -> None:
    """Swin again for every size: its masks are made for one, and its windows do not grow."""
    built = [image_sizes(side.architecture)[0]]

    def prepare(size: Size, own: bool) -> None:
        if size == built[0]:
            return
        classes = side.model.num_classes
        model = _swin(side.architecture, {}, img_size=size, num_classes=classes)
        model.double().load_state_dict(side.model.state_dict())
        side.model, built[0] = model, size

    side.prepare = prepare


def _plain(positions: Tensor, prefix: int, source: Size, target: Size) -> Tensor:
    grid = positions[:, prefix:].transpose(1, 2).unflatten(2, source)
    resized = F.interpolate(grid, target, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :prefix], resized.flatten(2).transpose(1, 2)], dim=1)


def _antialiased(positions: Tensor, prefix: int, source: Size, target: Size) -> Tensor:
    return resample_abs_pos_embed(positions, list(target), list(source), prefix)


def _vit(sizes: Sizes, tensors: Mapping[str, Tensor], **fields: Any) -> nn.Module:
    kind = deit.VisionTransformerDistilled if sizes["distilled"] else deit.VisionTransformer
    return kind(img_size=whole_patches(sizes), **_isotropic(sizes), **fields)


def _cait(sizes: Sizes, tensors: Mapping[str, Tensor], **fields: Any) -> nn.Module:
    return cait.Cait(
        img_size=whole_patches(sizes),
        depth_token_only=_count("blocks_token_only", tensors),
        mlp_ratio_token_only=sizes["mlp_ratio"],
        **_isotropic(sizes),
        **fields,
    )


def _xcit(sizes: Sizes, tensors: Mapping[str, Tensor], **fields: Any) -> nn.Module:
    return xcit.Xcit(
        cls_attn_layers=_count("cls_attn_blocks", tensors),
        tokens_norm=sizes["tokens_norm"],
        **_isotropic(sizes),
        **fields,
    )


def _isotropic(sizes: Sizes) -> dict[str, Any]:
    names = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias")
    return {name: sizes[name] for name in names}


def _count(blocks: str, tensors: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{blocks}.")})


def _swin(sizes: Sizes, tensors: Mapping[str, Tensor], **fields: Any) -> nn.Module:
    names = ("patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio")
    return swin_transformer.SwinTransformer(
        **{"img_size": image_sizes(sizes)[0], **{name: sizes[name] for name in names}, **fields},
        weight_init="skip",
    )


def _pvt_v2(sizes: Sizes, tensors: Mapping[str, Tensor], **fields: Any) -> nn.Module:
    names = ("embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios", "linear", "qkv_bias")
    return pvt_v2.PyramidVisionTransformerV2(**{name: sizes[name] for name in names}, **fields)


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "VisionTransformer": (_vit, vision_transformer.checkpoint_filter_fn),
    "SwinTransformer": (_swin, swin_transformer.checkpoint_filter_fn),
    "PyramidVisionTransformerV2": (_pvt_v2, pvt_v2.checkpoint_filter_fn),
    "CaiT": (_cait, cait.checkpoint_filter_fn),
    "XCiT": (_xcit, xcit.checkpoint_filter_fn),
}
