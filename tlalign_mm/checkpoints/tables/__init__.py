"""One table of keys per family and layout, with our layout as the hub."""

from torch import Tensor

from tlalign_mm.checkpoints.keymap import Table
from tlalign_mm.checkpoints.tables import cait, pvt, swin, vit, xcit

LAYOUTS = ("tlalign_mm", "timm", "official", "mmseg", "mmdet", "mmpretrain")
TABLES: dict[str, dict[str, Table]] = {  # by our class
    "VisionTransformer": vit.TABLES,
    "SwinTransformer": swin.TABLES,
    "CASwinTransformer": swin.CA_TABLES,
    "PyramidVisionTransformer": pvt.TABLES,
    "PyramidVisionTransformerV2": pvt.V2_TABLES,
    "CaiT": cait.TABLES,
    "XCiT": xcit.TABLES,
}


def before_leaving(family: str, layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors without the positions of tokens that the layout does not have."""
    if (family, layout) == ("VisionTransformer", "mmseg"):
        return vit.drop_distillation_slot(tensors)
    if (family, layout) == ("PyramidVisionTransformer", "mmdet"):
        return pvt.drop_class_slot(tensors)
    return tensors


def after_leaving(family: str, layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors with the buffers that the layout saves."""
    if "Swin" in family and layout in ("mmseg", "mmdet", "mmpretrain"):
        return swin.add_position_index(tensors)
    return tensors
