"""Dense forward passes and training steps of the stock backbones and of ours."""

import torch

from tlalign_mm.analysis.measure import Step
from tlalign_mm.proof.stock import build_pair

NAMES = ("stock", "tlalign_mm")


def build_step(name: str, arch: str, mode: str, batch: int, size: int, device: str) -> Step:
    """A step over random images.

    Args:
        name: One of ``NAMES``.
        arch: ``deit-…``, ``swin-…`` or ``pvt-…``.
        mode: ``forward`` (evaluation, no gradients) or ``step`` (forward, backward, AdamW).
        batch: Images a step.
        size: Side of the images in pixels.
        device: ``cpu`` or ``cuda``.
    """
    torch.manual_seed(0)
    model = build_pair(arch, size)[NAMES.index(name)].to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    if mode == "forward":
        model.eval()

        @torch.no_grad()
        def forward() -> None:
            model(images)

        return forward
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        sum(x.square().mean() for x in model(images)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
