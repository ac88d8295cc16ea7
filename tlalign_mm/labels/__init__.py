"""The method as pure tensor functions: mixing, the label stream and the targets.

Shape letters used in this folder: B images, N tokens, C channels, K label channels, H and W a
token or pixel grid. Channel 0 of a label is the share of the image itself, channel 1 the share of
its partner (K = 2); no function but ``mixing.token_labels`` and ``targets`` looks at K.
"""

from tlalign_mm.labels.contribution import mix_by_kernel, mix_by_weights
from tlalign_mm.labels.mixing import MixParams, apply_mix, area_labels, draw_cutmix, token_labels
from tlalign_mm.labels.reduction import merge_2x2, reduce_by_window, reduce_to
from tlalign_mm.labels.stream import class_row, join, normalize, pool, residual
from tlalign_mm.labels.targets import class_targets, smoothed_one_hot, transmix_labels

__all__ = [
    "MixParams",
    "apply_mix",
    "area_labels",
    "class_row",
    "class_targets",
    "draw_cutmix",
    "join",
    "merge_2x2",
    "mix_by_kernel",
    "mix_by_weights",
    "normalize",
    "pool",
    "reduce_by_window",
    "reduce_to",
    "residual",
    "smoothed_one_hot",
    "token_labels",
    "transmix_labels",
]
