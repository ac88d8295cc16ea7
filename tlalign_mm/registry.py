"""Child registries of mmengine's, scope ``tlalign_mm``.

A config names a type with its scope (``type='tlalign_mm.SwinTransformer'``); mmengine then imports
this module and the locations below by itself, whatever the default scope is.
"""

from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import METRICS as MMENGINE_METRICS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

MODELS = Registry(
    "model",
    parent=MMENGINE_MODELS,
    scope="tlalign_mm",
    locations=["tlalign_mm.backbones", "tlalign_mm.pretrain"],
)
DATASETS = Registry(
    "dataset", parent=MMENGINE_DATASETS, scope="tlalign_mm", locations=["tlalign_mm.pretrain"]
)
METRICS = Registry(
    "metric", parent=MMENGINE_METRICS, scope="tlalign_mm", locations=["tlalign_mm.pretrain"]
)
HOOKS = Registry("hook", parent=MMENGINE_HOOKS, scope="tlalign_mm", locations=["tlalign_mm.engine"])
# Batch mixing has no root in mmengine.
MIXERS = Registry("mixer", scope="tlalign_mm", locations=["tlalign_mm.pretrain"])
