"""Registered mixers: the settings of a draw, ready for a config."""

import torch

from tlalign_mm.labels import MixParams, draw_cutmix
from tlalign_mm.registry import MIXERS


@MIXERS.register_module()
class CutMix:
    """Paste a box of the partner (Yun et al., ICCV 2019, https://arxiv.org/abs/1905.04899).

    Args:
        alpha: Both parameters of the Beta distribution of the nominal ratio.
        prob: Probability that a batch (or a sample) is mixed.
        cell: Side in pixels of the cells that boxes are aligned to.
        per_sample: Draw a box for every sample rather than one for the batch.
    """

    def __init__(
        self, alpha: float = 1.0, prob: float = 1.0, cell: int = 1, per_sample: bool = False
    ) -> None:
        self.settings = {"alpha": alpha, "prob": prob, "cell": cell, "per_sample": per_sample}

    def draw(self, batch_size: int, size: tuple[int, int], generator: torch.Generator) -> MixParams:
        """Draw the parameters of a batch of images of ``size`` (height, width)."""
        return draw_cutmix(batch_size, size, generator, **self.settings)
