"""What a user writes to build the network that a converted file holds."""

from collections.abc import Mapping
from typing import Any

from tlalign_mm.backbones.rebuild import MODULES, published_name
from tlalign_mm.checkpoints.layouts import Layout
from tlalign_mm.engine.config_text import to_source
from tlalign_mm.engine.conversion import Converted

DENSE = ("out_indices", "drop_path_rate")
CARRIED = {  # fields that mean the same here and there
    ("SwinTransformer", "mmseg"): (*DENSE, "frozen_stages", "with_cp"),
    ("SwinTransformer", "mmdet"): (*DENSE, "frozen_stages", "with_cp"),
    ("VisionTransformer", "mmseg"): (*DENSE, "with_cp", "final_norm"),
    ("PyramidVisionTransformer", "mmdet"): DENSE,
    ("PyramidVisionTransformerV2", "mmdet"): DENSE,
}
TIMM_NAMES = {
    "VisionTransformer": "{arch}_patch{patch_size}_224",
    "SwinTransformer": "{arch}_patch{patch_size}_window7_224",
    "PyramidVisionTransformerV2": "{arch}",
    "CaiT": "{arch}_*",
    "XCiT": "{arch}_p{patch_size}_224",
}


def our_backbone(done: Converted) -> dict[str, Any]:
    """Config of our backbone with the architecture of a conversion."""
    fields = dict(done.checkpoint.architecture or {})
    family, arch = fields.pop("type"), published_name(done.checkpoint.architecture)
    if arch:
        sizes = MODULES[family].ARCHITECTURES[arch]
        fields = {"arch": arch, **{k: v for k, v in fields.items() if k not in sizes}}
    if family == "SwinTransformer" and done.source.layout.name in ("mmseg", "mmdet"):
        fields["always_shift"] = True  # as these libraries do, at any size
    return {"type": f"tlalign_mm.{family}", **fields}


def carry(done: Converted, backbone: Mapping[str, Any]) -> dict[str, Any]:
    """A backbone's config with what the trained model's own config says of its use.

    Args:
        done: The conversion; without a config in its file nothing changes.
        backbone: Config of the backbone that takes the weights.
    """
    if done.config is None:
        return dict(backbone)
    fields, target = done.checkpoint.architecture, done.layout.name
    if target == "tlalign_mm" and is_ours(done.config):
        names = done.config.keys() - backbone.keys() - {"arch", "init_cfg"} - fields.keys()
    else:
        library = done.source.layout.name if target == "tlalign_mm" else target
        names = CARRIED.get((fields["type"], library), DENSE)
    kept = {name: done.config[name] for name in sorted(names) if name in done.config}
    return {**backbone, **kept, "out_indices": _out_indices(done.config, fields)}


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a backbone's config names one of this package."""
    return str(config.get("type")).startswith("tlalign_mm.")


def _out_indices(config: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Stages counted from the front; all of a pyramid or the last block where nothing is said."""
    count = len(fields["depths"]) if "depths" in fields else fields["depth"]
    given = config.get("out_indices")
    if given is None:
        given = range(count) if "depths" in fields else (-1,)
    return tuple(i % count for i in ([given] if isinstance(given, int) else given))


def mm_lines(done: Converted, target: str, backbone: Mapping[str, Any]) -> list[str]:
    """The backbone for a config, with the file as its initialisation or as the whole model."""
    if done.is_whole:
        return [f"load_from = {target!r}", *_paste(backbone)]
    init = {"type": "Pretrained", "checkpoint": target}
    if done.layout.name == "mmpretrain":
        init["prefix"] = "backbone"
    return _paste({**backbone, "init_cfg": init})


def _paste(backbone: Mapping[str, Any]) -> list[str]:
    fields = [f"    {key}={to_source(value)}," for key, value in backbone.items()]
    return ["backbone=dict(", *fields, ")"]


def torch_lines(done: Converted, target: str) -> list[str]:
    """How a model outside the mm libraries takes the file."""
    if done.layout.name == "official":
        key = "" if target.endswith(".safetensors") else "['model']"
        call = "safetensors.torch.load_file" if not key else "torch.load"
        return [f"model.load_state_dict({call}({target!r}){key})"]
    name = timm_name(done.layout, done.checkpoint.architecture)
    if name is None:
        return [f"timm.models.load_checkpoint(model, {target!r})  # no published model of timm"]
    if "norm.weight" not in done.checkpoint.tensors:
        return [
            f"model = timm.create_model({name!r}, num_classes=0)",
            f"timm.models.load_checkpoint(model, {target!r}, strict=False)  # has no final norm",
        ]
    arguments = {**_timm_fields(done, name), "checkpoint_path": target}
    inside = ", ".join(f"{key}={to_source(value)}" for key, value in arguments.items())
    return [f"model = timm.create_model({name!r}, {inside})"]


def timm_name(layout: Layout, fields: Mapping[str, Any]) -> str | None:
    """Timm's name of a published architecture, or None."""
    import timm

    arch = published_name(fields)
    if arch is None or layout.family not in TIMM_NAMES:
        return None
    arch = arch.replace("-linear", "-li").replace("-", "_")
    found = timm.list_models(TIMM_NAMES[layout.family].format(**{**fields, "arch": arch}))
    return found[0] if found else None


def _timm_fields(done: Converted, name: str) -> dict[str, Any]:
    """Arguments of ``timm.create_model`` beside the name."""
    fields, tensors = done.checkpoint.architecture, done.checkpoint.tensors
    head = next((tensors[n] for n in ("head.fc.weight", "head.weight") if n in tensors), None)
    found: dict[str, Any] = {"num_classes": 0 if head is None else len(head)}
    size = fields.get("img_size")
    if size and not name.endswith(f"_{size[0]}") or size and size[0] != size[1]:
        found["img_size"] = tuple(size)
    if fields.get("window_size", 7) != 7:  # timm's windows are never larger than a map
        side = fields["window_size"] * fields["patch_size"] * 8
        found |= {"window_size": fields["window_size"], "img_size": (side, side)}
    return found
