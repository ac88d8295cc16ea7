"""Fields of the mm libraries' own backbones, from the sizes of ours."""

from collections.abc import Mapping
from typing import Any

from tlalign_mm.backbones.pvt import stage_grids
from tlalign_mm.checkpoints import CheckpointError

Sizes = Mapping[str, Any]
Names = frozenset[str] | None  # of the converted tensors; None stands for those of pretraining
EPS = {"type": "LN", "eps": 1e-6}
LIBRARIES = {"mmseg": "mmsegmentation", "mmdet": "mmdetection", "mmpretrain": "mmpretrain"}


def _vit_mmseg(sizes: Sizes, names: Names) -> dict[str, Any]:
    _require_bias(sizes, "mmsegmentation")
    return {
        "type": "mmseg.VisionTransformer",
        "img_size": whole_patches(sizes),
        "patch_size": sizes["patch_size"],
        "embed_dims": sizes["embed_dim"],
        "num_layers": sizes["depth"],
        "num_heads": sizes["num_heads"],
        "mlp_ratio": _whole(sizes["mlp_ratio"], "mmsegmentation"),
        "patch_bias": True,
        "final_norm": names is not None and "ln1.weight" in names,
        "norm_cfg": dict(EPS),
        "interpolate_mode": "bicubic",
    }


def _vit_mmpretrain(sizes: Sizes, names: Names) -> dict[str, Any]:
    dim = sizes["embed_dim"]
    arch = {
        "embed_dims": dim,
        "num_layers": sizes["depth"],
        "num_heads": sizes["num_heads"],
        "feedforward_channels": int(dim * sizes["mlp_ratio"]),
    }
    has_norm = names is None or "ln1.weight" in names
    return {
        "type": f"mmpretrain.{'Distilled' * sizes['distilled']}VisionTransformer",
        "arch": arch,
        "img_size": whole_patches(sizes),
        "patch_size": sizes["patch_size"],
        "qkv_bias": sizes["qkv_bias"],
        "final_norm": has_norm,
        "norm_cfg": dict(EPS),
        "interpolate_mode": "bicubic",
    }


def _swin_dense(sizes: Sizes, names: Names) -> dict[str, Any]:
    stages = len(sizes["depths"])
    norms = tuple(i for i in range(stages) if f"norm{i}.weight" in (names or ()))
    return {
        "embed_dims": sizes["embed_dim"],
        "patch_size": sizes["patch_size"],
        "window_size": sizes["window_size"],
        "mlp_ratio": sizes["mlp_ratio"],
        "depths": list(sizes["depths"]),
        "num_heads": list(sizes["num_heads"]),
        "strides": [sizes["patch_size"], *[2] * (stages - 1)],
        "out_indices": norms or tuple(range(stages)),
    }


def _swin_mmseg(sizes: Sizes, names: Names) -> dict[str, Any]:
    return {"type": "mmseg.SwinTransformer", **_swin_dense(sizes, names)}


def _swin_mmdet(sizes: Sizes, names: Names) -> dict[str, Any]:
    return {
        "type": "mmdet.SwinTransformer",
        **_swin_dense(sizes, names),
        "mlp_ratio": _whole(sizes["mlp_ratio"], "mmdetection"),
        "convert_weights": False,
    }


def _swin_mmpretrain(sizes: Sizes, names: Names) -> dict[str, Any]:
    other_mlps = {"stage_cfgs": {"block_cfgs": {"ffn_ratio": sizes["mlp_ratio"]}}}
    return {
        "type": "mmpretrain.SwinTransformer",
        "arch": {
            "embed_dims": sizes["embed_dim"],
            "depths": list(sizes["depths"]),
            "num_heads": list(sizes["num_heads"]),
        },
        "patch_size": sizes["patch_size"],
        "window_size": sizes["window_size"],
        "out_indices": (len(sizes["depths"]) - 1,),
        **({} if sizes["mlp_ratio"] == 4 else other_mlps),
    }


def _pvt(sizes: Sizes, names: Names) -> dict[str, Any]:
    _require_bias(sizes, "mmdetection")
    dims, heads, stages = sizes["embed_dims"], sizes["num_heads"], len(sizes["depths"])
    per_head = dims[0] // heads[0]
    if list(dims) != [per_head * number for number in heads]:
        raise CheckpointError(
            f"mmdetection's PVT has equally many channels per head in every stage, which "
            f"{list(dims)} channels and {list(heads)} heads do not give; choose another layout."
        )
    return {
        "embed_dims": per_head,
        "num_stages": stages,
        "num_layers": list(sizes["depths"]),
        "num_heads": list(heads),
        "sr_ratios": list(sizes["sr_ratios"]),
        "mlp_ratios": [_whole(ratio, "mmdetection") for ratio in sizes["mlp_ratios"]],
        "out_indices": tuple(range(stages)),
        "convert_weights": False,
    }


def _pvt_mmdet(sizes: Sizes, names: Names) -> dict[str, Any]:
    found = _pvt(sizes, names)
    img_size, patch, stages = tuple(sizes["img_size"]), sizes["patch_size"], found["num_stages"]
    stride = patch * 2 ** (stages - 1)
    if any(side % stride for side in img_size):
        grids = ", ".join(f"{h}x{w}" for h, w in stage_grids(img_size, patch, stages))
        raise CheckpointError(
            f"mmdetection's PVT has no maps of {grids}, which are those of {img_size[0]}x"
            f"{img_size[1]} pixels; convert a file made for multiples of {stride}."
        )
    strides = [patch, *[2] * (stages - 1)]
    return {
        "type": "mmdet.PyramidVisionTransformer",
        "pretrain_img_size": img_size,
        **found,
        "patch_sizes": strides,
        "strides": strides,
        "paddings": [0] * stages,
    }


def _pvt_v2_mmdet(sizes: Sizes, names: Names) -> dict[str, Any]:
    found = _pvt(sizes, names)
    if found["num_stages"] != 4 or sizes["linear"]:
        raise CheckpointError(
            "mmdetection's PVT v2 has four stages and no linear variant; use "
            "tlalign_mm.PyramidVisionTransformerV2 in its configs."
        )
    return {"type": "mmdet.PyramidVisionTransformerV2", **found, "strides": [4, 2, 2, 2]}


def _xcit_mmpretrain(sizes: Sizes, names: Names) -> dict[str, Any]:
    if sizes["patch_size"] not in (8, 16):
        raise CheckpointError(
            f"mmpretrain's XCiT has patches of 8 or 16 pixels, not {sizes['patch_size']}; choose "
            "another layout."
        )
    is_dense = names is not None and "norm.weight" not in names
    return {
        "type": "mmpretrain.XCiT",
        "patch_size": sizes["patch_size"],
        "embed_dims": sizes["embed_dim"],
        "depth": sizes["depth"],
        "cls_attn_layers": 0 if is_dense else sizes["cls_attn_layers"],
        "num_heads": sizes["num_heads"],
        "mlp_ratio": sizes["mlp_ratio"],
        "qkv_bias": sizes["qkv_bias"],
        "tokens_norm": sizes["tokens_norm"],
        "final_norm": not is_dense,
        "out_type": "featmap" if is_dense else "cls_token",
    }


def _whole(ratio: float, library: str) -> int:
    """The ratio of an MLP; these classes multiply by it and build layers of the product."""
    if ratio != int(ratio):
        raise CheckpointError(
            f"{library} has no MLPs of {ratio} times the channels, only of whole multiples; choose "
            "another layout."
        )
    return int(ratio)


def _require_bias(sizes: Sizes, library: str) -> None:
    """Torch's attention, which these classes use, gives all its layers a bias or none."""
    if not sizes["qkv_bias"]:
        raise CheckpointError(
            f"{library} has no attention with a bias behind it but none before; choose another "
            "layout."
        )


def whole_patches(sizes: Sizes) -> tuple[int, int]:
    """Image size with as many whole patches as ours has with padding."""
    patch = sizes["patch_size"]
    height, width = (-(-side // patch) * patch for side in sizes["img_size"])
    return height, width


CONFIGS = {
    ("VisionTransformer", "mmseg"): _vit_mmseg,
    ("VisionTransformer", "mmpretrain"): _vit_mmpretrain,
    ("SwinTransformer", "mmseg"): _swin_mmseg,
    ("SwinTransformer", "mmdet"): _swin_mmdet,
    ("SwinTransformer", "mmpretrain"): _swin_mmpretrain,
    ("PyramidVisionTransformer", "mmdet"): _pvt_mmdet,
    ("PyramidVisionTransformerV2", "mmdet"): _pvt_v2_mmdet,
    ("XCiT", "mmpretrain"): _xcit_mmpretrain,
}
