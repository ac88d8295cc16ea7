"""A backbone from the sizes that a checkpoint tells."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tlalign_mm.backbones import ca_swin, cait, pvt, pvt_v2, swin, vit, xcit
from tlalign_mm.backbones.base import Backbone
from tlalign_mm.checkpoints import CheckpointError
from tlalign_mm.registry import MODELS

MODULES = {
    "VisionTransformer": vit,
    "SwinTransformer": swin,
    "CASwinTransformer": ca_swin,
    "PyramidVisionTransformer": pvt,
    "PyramidVisionTransformerV2": pvt_v2,
    "CaiT": cait,
    "XCiT": xcit,
}


def rebuild(
    architecture: Mapping[str, Any], names: Iterable[str], device: str = "cpu", **fields: Any
) -> Backbone:
    """Build the backbone that has these tensors.

    Args:
        architecture: Its class as ``type``, and its sizes.
        names: Names of its tensors: one with a final norm is built for pretraining, any other one
            for dense tasks, at the stages whose norms there are.
        device: ``meta`` for names and shapes alone.
        fields: Further fields of the constructor, which win.

    Raises:
        CheckpointError: If a size is unknown, naming it.
    """
    check_known(architecture)
    cfg = {**architecture, "type": f"tlalign_mm.{architecture['type']}", "drop_path_rate": 0.0}
    names = set(names)
    if "norm.weight" in names or architecture["type"] == "PyramidVisionTransformerV2":
        cfg["out_indices"] = ()
    elif norms := [i for i in range(9) if f"norm{i}.weight" in names]:
        cfg["out_indices"] = tuple(norms)
    with torch.device(device):
        return MODELS.build({**cfg, **fields})


def check_known(architecture: Mapping[str, Any]) -> None:
    """Refuse an architecture that the tensors leave open.

    Raises:
        CheckpointError: If a size is unknown, naming it.
    """
    unknown = [key for key, value in architecture.items() if _is_unknown(value)]
    if unknown:
        raise CheckpointError(
            f"The tensors do not tell {', '.join(unknown)} of this {architecture['type']}; give "
            f"it, for example --arch {unknown[0]}=…."
        )


def published_name(architecture: Mapping[str, Any]) -> str | None:
    """The ``arch`` of our class that has these sizes, patches and windows aside."""
    module = MODULES[architecture["type"]]
    found = [
        name
        for name, sizes in module.ARCHITECTURES.items()
        if all(_plain(architecture.get(k, v)) == _plain(v) for k, v in sizes.items())
    ]
    return found[0] if found else None


def _is_unknown(value: Any) -> bool:
    return value is None or isinstance(value, list) and None in value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value
