"""The method as pure tensor functions: mixing, the label stream and the targets.

Shape letters used in this folder: B images, N tokens, C channels, K label channels, H and W a
token or pixel grid. Channel 0 of a label is the share of the image itself, channel 1 the share of
its partner (K = 2); no function but ``mixing.token_labels`` and ``targets`` looks at K.
"""

from tlalign_mm.labels.mixing import MixParams, apply_mix, area_labels, draw_cutmix, token_labels
from tlalign_mm.labels.stream import merge_2x2, normalize, pool, residual
from tlalign_mm.labels.targets import class_targets, smoothed_one_hot

__all__ = [
    "MixParams",
    "apply_mix",
    "area_labels",
    "class_targets",
    "draw_cutmix",
    "merge_2x2",
    "normalize",
    "pool",
    "residual",
    "smoothed_one_hot",
    "token_labels",
]
