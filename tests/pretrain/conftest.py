"""A tiny classifier and a tiny data set in ImageNet's layout."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tlalign_mm.pretrain import ImageClassifier

BACKBONE = {
    "type": "tlalign_mm.SwinTransformer",
    "embed_dim": 8,
    "depths": (1, 1),
    "num_heads": (1, 2),
    "window_size": 2,
    "drop_path_rate": 0.0,
    "out_indices": (),
}
PREPROCESSOR = {
    "type": "tlalign_mm.MixDataPreprocessor",
    "mixer": {"type": "tlalign_mm.CutMix", "per_sample": True},
}


@pytest.fixture
def build_classifier() -> Callable[..., ImageClassifier]:
    def build(**kwargs: object) -> ImageClassifier:
        defaults = {"backbone": BACKBONE, "num_classes": 3, "data_preprocessor": PREPROCESSOR}
        return ImageClassifier(**{**defaults, **kwargs})

    return build


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two splits of three classes with four images each; the class decides the colour."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(3):
            folder = tmp_path / "images" / split / f"class_{label}"
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 60, (16, 16, 3))
                pixels[..., label] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "images"
