"""The stock backbones of the mm libraries: their configs, and models beside ours.

They are built by name through mmengine's registry, which imports their library; this module does
not.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

import tlalign_mm.compat  # noqa: F401  (mmdetection needs mmcv's ops; it supplies absent ones)
from tlalign_mm.backbones import Backbone
from tlalign_mm.backbones.rebuild import check_known
from tlalign_mm.checkpoints import Checkpoint, CheckpointError
from tlalign_mm.checkpoints.convert import PREFIX, read_weights, write_weights
from tlalign_mm.proof.stock_fields import CONFIGS, LIBRARIES, Sizes
from tlalign_mm.registry import MODELS

OURS: dict[str, dict[str, Any]] = {  # further fields of ours for dense tasks
    "deit": {"type": "tlalign_mm.VisionTransformer", "out_indices": (2, 5, 8, 11)},
    "swin": {"type": "tlalign_mm.SwinTransformer", "always_shift": True},
    "pvt-v2": {"type": "tlalign_mm.PyramidVisionTransformerV2"},
    "pvt": {"type": "tlalign_mm.PyramidVisionTransformer"},
}
POSITIONS = ("deit", "pvt")  # ours hold a position embedding for one img_size


def stock_config(
    architecture: Sizes, layout: str, names: Iterable[str] | None = None, **fields: Any
) -> dict[str, Any]:
    """Config of the stock backbone with exactly these sizes.

    Args:
        architecture: As ``write_weights`` gives it: our class as ``type``, and the sizes.
        layout: ``mmseg``, ``mmdet`` or ``mmpretrain``.
        names: Names of the converted tensors, with or without ``backbone.``; they tell which norms
            and class blocks there are. None stands for those of pretraining.
        fields: Further fields of the stock class, which win.

    Returns:
        Plain values that may be printed and pasted into a config.

    Raises:
        CheckpointError: If a size is unknown, or the library has no such network.
    """
    family = architecture["type"]
    if (family, layout) not in CONFIGS:
        library = LIBRARIES.get(layout, layout)
        raise CheckpointError(f"{library} has no backbone like {family}; choose another layout.")
    check_known(architecture)
    known = None if names is None else frozenset(name.removeprefix(PREFIX) for name in names)
    return {**CONFIGS[family, layout](architecture, known), **fields}


def build_stock(
    architecture: Sizes, layout: str, tensors: Mapping[str, Tensor], **fields: Any
) -> nn.Module:
    """The stock backbone without stochastic depth and with random weights.

    Args:
        architecture: As for ``stock_config``.
        layout: As for ``stock_config``.
        tensors: What will be loaded; only the names count.
        fields: Further fields of the stock class.
    """
    return ROOT.build(stock_config(architecture, layout, tensors, drop_path_rate=0.0, **fields))


def build_pair(
    arch: str, size: int, weights: dict[str, Tensor] | None = None, **fields: Any
) -> tuple[nn.Module, Backbone]:
    """Stock backbone and ours for dense tasks, with the same weights.

    Args:
        arch: ``deit-…``, ``swin-…`` (mmsegmentation's), ``pvt-…`` or ``pvt-v2-…`` (mmdetection's);
            the family alone (``deit``) where ``fields`` give the sizes.
        size: Side of the images that position embeddings are made for.
        weights: State dict of our backbone, or None for random ones.
        fields: Further fields of ours.
    """
    family = next(family for family in OURS if arch == family or arch.startswith(f"{family}-"))
    sizes = {"img_size": size} if family in POSITIONS else {}
    cfg = {"arch": None if arch == family else arch, "drop_path_rate": 0.0}
    ours = MODELS.build({**OURS[family], **sizes, **cfg, **fields})
    if weights is not None:
        ours.load_state_dict(weights)
    file = Checkpoint(ours.state_dict(), "tlalign_mm", ours.architecture)
    converted, _ = write_weights(read_weights(file, "our backbone"), "mm")
    tensors = {name.removeprefix(PREFIX): t for name, t in converted.tensors.items()}
    stock = build_stock(
        converted.architecture, converted.layout, tensors, out_indices=ours.out_indices
    )
    stock.load_state_dict(tensors)
    if converted.layout == "mmdet":
        set_published_eps(stock)
    return stock, ours


def set_published_eps(stock: nn.Module) -> list[str]:
    """Give mmdetection's PVT the 1e-5 of the official code where it has 1e-6.

    Returns:
        The norms that are changed: behind patch embeddings and spatial reductions.
    """
    norms = [
        (name, module)
        for name, module in stock.named_modules()
        if isinstance(module, nn.LayerNorm) and name.endswith(("0.norm", "attn.norm"))
    ]
    for _, module in norms:
        module.eps = 1e-5
    return [name for name, _ in norms]
