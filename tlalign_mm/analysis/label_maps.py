"""Where each token's label comes from, block by block."""

import torch
from torch import Tensor, nn

from tlalign_mm.backbones import Backbone


@torch.no_grad()
def record_token_labels(
    backbone: Backbone, images: Tensor, token_labels: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Run the backbone and keep the label map behind every stage.

    Args:
        backbone: A backbone built for pretraining.
        images: (B, 3, H, W) mixed and normalised images.
        token_labels: (B, N, K) their labels on the patch grid.

    Returns:
        For each stage the labels (B, H', W', K), and the pooled label (B, K).
    """
    maps: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        maps.append(output[1])

    stages = [modules[0] for modules in backbone.stage_modules()[1:]]
    handles = [stage.register_forward_hook(keep) for stage in stages]
    training = backbone.training
    backbone.eval()
    try:
        pooled = backbone.forward_features(images, token_labels).token_labels
    finally:
        backbone.train(training)
        for handle in handles:
            handle.remove()
    return maps, pooled
