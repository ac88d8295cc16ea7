"""Metrics of image classification."""

from collections.abc import Sequence

import torch
from mmengine.evaluator import BaseMetric

from tlalign_mm.registry import METRICS


@METRICS.register_module()
class TopKAccuracy(BaseMetric):
    """Percent of images whose class is among the k highest scores.

    Args:
        topk: The values of k; each gives a figure ``accuracy/top<k>``.
        collect_device: As in mmengine.
    """

    default_prefix = "accuracy"

    def __init__(self, topk: Sequence[int] = (1, 5), collect_device: str = "cpu") -> None:
        super().__init__(collect_device)
        self.topk = tuple(topk)

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Rank the true class of each prediction; keeps one number an image."""
        scores = torch.stack([sample["scores"] for sample in data_samples])  # (B, classes)
        labels = torch.stack([sample["label"] for sample in data_samples])[:, None]  # (B, 1)
        higher = (scores > scores.gather(1, labels)).sum(dim=1)  # classes ranked above the true one
        self.results.extend(higher.tolist())

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        """Turn the ranks of all images into percent."""
        ranks = torch.tensor(results)
        return {f"top{k}": 100 * (ranks < k).float().mean().item() for k in self.topk}
