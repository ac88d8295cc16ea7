"""Whose names a state dict has: told by its keys, never by its file name."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tlalign_mm.checkpoints.errors import CheckpointError

DETECTOR = ("rpn_head.", "roi_head.", "bbox_head.", "mask_head.", "panoptic_")
DESCRIPTIONS = {
    "tlalign_mm": "this package",
    "timm": "timm 0.9 and newer",
    "official": "the official repository",
    "mmseg": "mmsegmentation",
    "mmdet": "mmdetection",
    "mmpretrain": "mmpretrain",
}
ALSO = {  # who else uses the very same names
    ("VisionTransformer", "timm"): "official DeiT, TL-Align and TransMix use the same names",
    ("SwinTransformer", "timm"): "this package uses the same names",
    ("SwinTransformer", "official"): "timm before 0.9 uses the same names",
    ("SwinTransformer", "mmseg"): "mmdetection uses the same names",
    ("PyramidVisionTransformer", "official"): "this package uses the same names",
    ("PyramidVisionTransformerV2", "timm"): "this package uses the same names",
    ("CaiT", "timm"): "the official repository uses the same names",
    ("XCiT", "timm"): "this package uses the same names",
}


class Layout(NamedTuple):
    """Whose names, and of which network.

    Attributes:
        family: Our class for the network.
        name: One of ``LAYOUTS``.
    """

    family: str
    name: str

    def __str__(self) -> str:
        also = f" ({ALSO[self]})" if self in ALSO else ""
        return f"{self.family} as named by {DESCRIPTIONS[self.name]}{also}"


class Signature(NamedTuple):
    """Keys that tell a layout: patterns of names that all occur, and of names that do not."""

    layout: Layout
    needs: tuple[str, ...]
    lacks: tuple[str, ...] = ()


def _signature(family: str, name: str, *needs: str, lacks: tuple[str, ...] = ()) -> Signature:
    return Signature(Layout(family, name), needs, lacks)


_VIT, _SWIN, _CA = "VisionTransformer", "SwinTransformer", "CASwinTransformer"
_PVT, _PVT2 = "PyramidVisionTransformer", "PyramidVisionTransformerV2"
_TABLE = r"layers\.\d+\.blocks\.\d+\.attn\.relative_position_bias_table"
_CLASS = r"class_block\..*"
_OLD = r"layers\.0\.downsample\..*"
_DENSE_NORM = r"norm\d\.weight"
_QKV = r"blocks\.\d+\.attn\.qkv\.weight"
_PARTS = (r"blocks\.\d+\.attn\.(proj_l\.weight|temperature|relative_position_bias_table)",)
_V2_MLP = r"mlp\.dwconv"
SIGNATURES = (
    _signature(_VIT, "timm", "cls_token", "pos_embed", _QKV, lacks=_PARTS),
    _signature(_VIT, "mmseg", r"layers\.\d+\.attn\.attn\.in_proj_weight", r"layers\.\d+\.ln1\..*"),
    _signature(_VIT, "mmpretrain", r"layers\.\d+\.attn\.qkv\.weight", r"layers\.\d+\.ln1\..*"),
    _signature(_SWIN, "official", _TABLE, _OLD, lacks=(_CLASS,)),
    _signature(_SWIN, "tlalign_mm", _TABLE, _DENSE_NORM, lacks=(_CLASS, _OLD)),
    _signature(_SWIN, "tlalign_mm", _TABLE, r"head\.weight", lacks=(_CLASS, _OLD, _DENSE_NORM)),
    _signature(_SWIN, "timm", _TABLE, lacks=(_CLASS, _OLD, _DENSE_NORM, r"head\.weight")),
    _signature(_CA, "tlalign_mm", _TABLE, _CLASS),
    _signature(_SWIN, "mmseg", r"stages\.\d+\.blocks\.\d+\.attn\.w_msa\.qkv\.weight"),
    _signature(_PVT, "official", r"pos_embed1", r"block1\.\d+\.attn\.q\.weight"),
    _signature(_PVT, "mmdet", r"layers\.0\.1\.0\.pos_embed"),
    _signature(_PVT2, "official", rf"block1\.\d+\.{_V2_MLP}\.dwconv\.weight"),
    _signature(_PVT2, "timm", rf"stages\.0\.blocks\.\d+\.{_V2_MLP}\.weight"),
    _signature(_PVT2, "mmdet", r"layers\.0\.1\.0\.attn\.attn\.in_proj_weight", r"layers\.0\.2\..*"),
    _signature("CaiT", "timm", r"blocks\.\d+\.attn\.proj_l\.weight"),
    _signature("XCiT", "official", r"pos_embeder\..*", r"blocks\.\d+\.attn\.temperature"),
    _signature("XCiT", "timm", r"pos_embed\.token_.*", r"blocks\.\d+\.attn\.temperature"),
    _signature("XCiT", "mmpretrain", r"xca_layers\.\d+\.attn\.temperature"),
)


def detect(names: Iterable[str], beside: Iterable[str] = ()) -> list[Layout]:
    """Every reading of these keys; one, unless the keys do not tell.

    Args:
        names: Keys of the backbone.
        beside: Keys of the rest of the model.

    Returns:
        The possible layouts, none where the network is unknown.
    """
    names, beside = list(names), list(beside)
    found = [s.layout for s in SIGNATURES if _all(s.needs, names) and not _any(s.lacks, names)]
    return [reading for layout in found for reading in _mm_readings(layout, names, beside)]


def choose(
    names: Iterable[str], beside: Iterable[str], source: str, asked: str | None = None
) -> Layout:
    """The one reading, by the user's word where there are several.

    Args:
        names: Keys of the backbone.
        beside: Keys of the rest of the model.
        source: The file, for messages.
        asked: Layout that the user or the file's metadata names, or None.

    Raises:
        CheckpointError: If the network is unknown, or the layout is not clear or not what is asked.
    """
    names = list(names)
    readings = detect(names, beside)
    if not readings:
        raise CheckpointError(
            f"Checkpoint {source} holds none of the known networks: its keys are like "
            f"{', '.join(names[:3])}; name a file of DeiT, Swin, PVT, CaiT or XCiT."
        )
    families = {reading.family for reading in readings}
    if asked is not None and len(families) == 1:
        return Layout(families.pop(), asked)
    if len(readings) > 1:
        choices = " or ".join(str(reading) for reading in readings)
        options = ", ".join(reading.name for reading in readings)
        raise CheckpointError(
            f"Checkpoint {source} may be {choices}; say which by --from ({options}), in a config "
            "by init_cfg=dict(…, layout=…)."
        )
    return readings[0]


def _mm_readings(layout: Layout, names: list[str], beside: list[str]) -> list[Layout]:
    """Swin has the same names in three mm libraries; the last norm means different things."""
    if layout != Layout(_SWIN, "mmseg"):
        return [layout]
    if _any((r"head\.fc\..*",), names):
        return [Layout(_SWIN, "mmpretrain")]
    if any(key.startswith(DETECTOR) for key in beside):
        return [Layout(_SWIN, "mmdet")]
    stages = {int(match[1]) for name in names if (match := re.match(r"stages\.(\d+)\.", name))}
    norms = {int(match[1]) for name in names if (match := re.match(r"norm(\d)\.", name))}
    if norms == {max(stages)} and not beside:
        return [layout, Layout(_SWIN, "mmpretrain")]
    return [layout]


def _any(patterns: tuple[str, ...], names: list[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


def _all(patterns: tuple[str, ...], names: list[str]) -> bool:
    return all(_any((pattern,), names) for pattern in patterns)
