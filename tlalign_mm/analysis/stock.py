"""The stock dense backbones of mmsegmentation and mmdetection beside ours, with the same weights.

They are built by name through mmengine's registry, which imports their library; this module does
not. The key maps are those of the libraries' own converters.
"""

import re
from typing import Any

import torch
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

import tlalign_mm.compat  # noqa: F401  (mmdetection needs mmcv's ops; it supplies absent ones)
from tlalign_mm.backbones import Backbone
from tlalign_mm.registry import MODELS

State = dict[str, Tensor]


def build_pair(
    arch: str, size: int, weights: State | None = None, **fields: Any
) -> tuple[nn.Module, Backbone]:
    """Stock backbone and ours for dense tasks.

    Args:
        arch: ``deit-…``, ``swin-…`` (mmsegmentation's) or ``pvt-…`` (mmdetection's, version 1); the
            family alone (``deit``) where ``fields`` give the sizes.
        size: Side of the images that position embeddings are made for.
        weights: State dict of our backbone, or None for random ones.
        fields: Further fields of ours.
    """
    family = arch.split("-")[0]
    name = None if arch == family else arch
    ours = MODELS.build(OURS[family](name, size) | fields)
    if weights is not None:
        ours.load_state_dict(weights)
    stock = ROOT.build(STOCK[family](ours, size))
    theirs = TO_STOCK[family](ours.state_dict())
    missing, unexpected = stock.load_state_dict(theirs, strict=False)
    missing = [name for name in missing if not name.endswith("relative_position_index")]
    unexpected = [name for name in unexpected if name not in ("norm.weight", "norm.bias")]
    if family == "pvt":  # mmdetection sets 1e-6 here, the official code and ours 1e-5
        for name, module in stock.named_modules():
            if isinstance(module, nn.LayerNorm) and name.endswith(("0.norm", "attn.norm")):
                module.eps = 1e-5
    if missing or unexpected:
        raise RuntimeError(f"Stock {arch}: missing {missing}, unexpected {unexpected}.")
    return stock, ours


def _our_vit(arch: str | None, size: int) -> dict[str, Any]:
    return {
        "type": "tlalign_mm.VisionTransformer",
        "arch": arch,
        "img_size": size,
        "drop_path_rate": 0.0,
        "out_indices": (2, 5, 8, 11),
    }


def _our_swin(arch: str | None, size: int) -> dict[str, Any]:
    return {
        "type": "tlalign_mm.SwinTransformer",
        "arch": arch,
        "drop_path_rate": 0.0,
        "always_shift": True,
    }


def _our_pvt(arch: str | None, size: int) -> dict[str, Any]:
    return {
        "type": "tlalign_mm.PyramidVisionTransformer",
        "arch": arch,
        "img_size": size,
        "drop_path_rate": 0.0,
    }


def _stock_vit(ours: Backbone, size: int) -> dict[str, Any]:
    sizes = ours.architecture
    return {
        "type": "mmseg.VisionTransformer",
        "img_size": (size, size),
        "patch_size": sizes["patch_size"],
        "patch_bias": True,
        "embed_dims": sizes["embed_dim"],
        "num_layers": sizes["depth"],
        "num_heads": sizes["num_heads"],
        "out_indices": ours.out_indices,
        "norm_cfg": {"type": "LN", "eps": 1e-6},
        "interpolate_mode": "bicubic",
    }


def _stock_swin(ours: Backbone, size: int) -> dict[str, Any]:
    sizes = ours.architecture
    return {
        "type": "mmseg.SwinTransformer",
        "pretrain_img_size": size,
        "patch_size": sizes["patch_size"],
        "strides": (sizes["patch_size"], 2, 2, 2)[: len(sizes["depths"])],
        "embed_dims": sizes["embed_dim"],
        "depths": sizes["depths"],
        "num_heads": sizes["num_heads"],
        "window_size": sizes["window_size"],
        "out_indices": ours.out_indices,
        "drop_path_rate": 0.0,
    }


def _stock_pvt(ours: Backbone, size: int) -> dict[str, Any]:
    sizes = ours.architecture
    return {
        "type": "mmdet.PyramidVisionTransformer",
        "pretrain_img_size": size,
        "embed_dims": sizes["embed_dims"][0],
        "num_stages": len(sizes["depths"]),
        "num_layers": sizes["depths"],
        "num_heads": [d // sizes["embed_dims"][0] for d in sizes["embed_dims"]],
        "strides": (sizes["patch_size"], 2, 2, 2)[: len(sizes["depths"])],
        "patch_sizes": (sizes["patch_size"], 2, 2, 2)[: len(sizes["depths"])],
        "paddings": (0,) * len(sizes["depths"]),
        "sr_ratios": sizes["sr_ratios"],
        "mlp_ratios": sizes["mlp_ratios"],
        "out_indices": ours.out_indices,
        "drop_path_rate": 0.0,
    }


def swin_to_stock(state: State) -> State:
    """Mmsegmentation's Swin: merged neighbours are ordered by channel first there."""
    stock = {}
    for name, tensor in state.items():
        if "relative_position_index" in name:
            continue
        if match := re.fullmatch(r"layers\.(\d+)\.downsample\.(.*)", name):
            name = f"stages.{int(match[1]) - 1}.downsample.{match[2]}"
            neighbours = tensor.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :]
            tensor = neighbours.transpose(-1, -2).flatten(-2)
        name = re.sub(r"^layers\.", "stages.", name).replace(".attn.", ".attn.w_msa.")
        name = name.replace("mlp.fc1", "ffn.layers.0.0").replace("mlp.fc2", "ffn.layers.1")
        stock[name.replace("patch_embed.proj.", "patch_embed.projection.")] = tensor
    return stock


def vit_to_stock(state: State) -> State:
    """Mmsegmentation's vision transformer."""
    renames = {
        "patch_embed.proj.": "patch_embed.projection.",
        "blocks.": "layers.",
        ".norm1.": ".ln1.",
        ".norm2.": ".ln2.",
        ".attn.qkv.": ".attn.attn.in_proj_",
        ".attn.proj.": ".attn.attn.out_proj.",
        ".mlp.fc1.": ".ffn.layers.0.0.",
        ".mlp.fc2.": ".ffn.layers.1.",
    }
    stock = {}
    for name, tensor in state.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        stock[re.sub(r"^norm\.", "ln1.", name)] = tensor
    return stock


def pvt_to_stock(state: State) -> State:
    """Mmdetection's PVT version 1: query and key-value in one, MLPs as 1x1 convolutions."""
    stock = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"patch_embed(\d)\.(proj|norm)\.(.*)", name):
            part = {"proj": "projection", "norm": "norm"}[match[2]]
            stock[f"layers.{int(match[1]) - 1}.0.{part}.{match[3]}"] = tensor
        elif match := re.fullmatch(r"pos_embed(\d)", name):
            stock[f"layers.{int(match[1]) - 1}.1.0.pos_embed"] = tensor
        elif match := re.fullmatch(r"block(\d)\.(\d+)\.(.*)", name):
            prefix, rest = f"layers.{int(match[1]) - 1}.1.{int(match[2]) + 1}.", match[3]
            if rest.startswith("attn.kv."):
                continue
            if rest.startswith("attn.q."):
                tensor = torch.cat([tensor, state[name.replace("attn.q.", "attn.kv.")]])
            if rest in ("mlp.fc1.weight", "mlp.fc2.weight"):
                tensor = tensor[:, :, None, None]
            rest = rest.replace("attn.q.", "attn.attn.in_proj_")
            rest = rest.replace("attn.proj.", "attn.attn.out_proj.")
            rest = rest.replace("mlp.fc1.", "ffn.layers.0.").replace("mlp.fc2.", "ffn.layers.3.")
            stock[prefix + rest] = tensor
    return stock


OURS = {"deit": _our_vit, "swin": _our_swin, "pvt": _our_pvt}
STOCK = {"deit": _stock_vit, "swin": _stock_swin, "pvt": _stock_pvt}
TO_STOCK = {"deit": vit_to_stock, "swin": swin_to_stock, "pvt": pvt_to_stock}
