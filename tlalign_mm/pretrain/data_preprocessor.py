"""From a batch of the data loader to what the classifier takes: move, normalise, mix."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.dist import get_rank
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from tlalign_mm.labels import MixParams, apply_mix
from tlalign_mm.registry import MIXERS, MODELS


@MODELS.register_module()
class MixDataPreprocessor(BaseDataPreprocessor):
    """Normalise images on the device and, in training, mix them.

    The mixing generator belongs to this module's state, so a resumed run continues its sequence.

    Args:
        mean: Mean of each channel on the 0 to 255 scale.
        std: Standard deviation of each channel on the same scale.
        mixer: Config of a mixer, or None for plain images.
        seed: Seed of the mixing draws; each rank adds its number.
    """

    def __init__(
        self,
        mean: Sequence[float] = (123.675, 116.28, 103.53),
        std: Sequence[float] = (58.395, 57.12, 57.375),
        mixer: dict | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.mixer = MIXERS.build(mixer) if mixer else None
        self.generator = torch.Generator().manual_seed(seed + get_rank())

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        """Prepare a collated batch.

        Args:
            data: ``inputs`` (B, 3, H, W) uint8 and ``labels`` (B,).
            training: Mix, where there is a mixer.

        Returns:
            ``inputs`` (B, 3, H, W) float32, ``labels`` (B,) and ``mix``: ``MixParams`` or None.
        """
        data = self.cast_data(data)
        images = (data["inputs"].float() - self.mean) / self.std
        mix = None
        if training and self.mixer is not None:
            size = (images.shape[2], images.shape[3])
            drawn = self.mixer.draw(len(images), size, self.generator)
            mix = MixParams(*(tensor.to(images.device) for tensor in drawn))
            images = apply_mix(images, mix)
        return {"inputs": images, "labels": data["labels"], "mix": mix}

    def get_extra_state(self) -> Tensor:
        """State of the mixing generator, a byte tensor."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Continue the mixing sequence from a saved state."""
        self.generator.set_state(state.cpu())
