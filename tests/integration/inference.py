"""Predictions of a trained file through the mm libraries' own entries; also run as a program, with
the parts of this package named that must not be imported."""

import importlib.abc
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Blocked(importlib.abc.MetaPathFinder):
    """Makes importing a module, or anything below it, fail."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, *_: object) -> None:
        if any(name == blocked or name.startswith(f"{blocked}.") for blocked in self.names):
            raise ImportError(f"{name} is blocked")


def segment(file: str | Path) -> list[Tensor]:
    """Class logits of an image."""
    from mmengine.config import Config
    from mmseg.apis import init_model

    meta = torch.load(file, weights_only=False)["meta"]
    model = init_model(Config.fromstring(meta["cfg"], ".py"), str(file), device="cpu")
    assert list(model.dataset_meta["classes"]) == ["ground", "one", "two"]
    images = torch.randn(2, 3, 64, 80, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [model(images, mode="tensor")]


def detect(file: str | Path) -> list[Tensor]:
    """Boxes, scores, labels and masks of an image."""
    from mmdet.apis import DetInferencer

    import tlalign_mm.compat  # noqa: F401  (mmcv may have no compiled ops; no part of the backbone)

    inferencer = DetInferencer(weights=str(file), device="cpu", show_progress=False)
    assert list(inferencer.model.dataset_meta["classes"]) == ["one", "two"]
    image = np.random.default_rng(1).integers(0, 255, (64, 80, 3), np.uint8)
    (sample,) = inferencer(image, return_datasamples=True, no_save_vis=True)["predictions"]
    found = sample.pred_instances
    return [torch.as_tensor(found[key]) for key in ("bboxes", "scores", "labels", "masks")]


PREDICT = {"mmseg": segment, "mmdet": detect}

if __name__ == "__main__":
    library, source, out, *blocked = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.meta_path.insert(0, Blocked(*blocked))
    torch.set_num_threads(1)
    torch.save(PREDICT[library](source), out)
