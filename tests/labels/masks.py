"""Mixed batches of every kind: boxes, scattered pixels, soft shares, MixUp, nothing mixed."""

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from tlalign_mm.labels import MixParams, draw_cutmix


@st.composite
def mixed_batches(draw: DrawFn, batch: int, size: tuple[int, int]) -> MixParams:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    noise = torch.rand(batch, 1, *size, generator=generator)
    kind = draw(st.sampled_from(["box", "pixels", "soft", "constant", "unmixed"]))
    if kind == "box":
        return draw_cutmix(batch, size, generator, per_sample=True)
    masks = {
        "pixels": noise.round(),
        "soft": noise,
        "constant": noise[..., :1, :1].expand_as(noise),
        "unmixed": torch.zeros_like(noise),
    }
    return MixParams(torch.randperm(batch, generator=generator), masks[kind])


def cell(mask: Tensor, row: int, column: int, side: int) -> list[float]:
    """The pixels of one patch, those beyond the edge of the image left out."""
    height, width = mask.shape
    return [
        mask[y, x].item()
        for y in range(row * side, min((row + 1) * side, height))
        for x in range(column * side, min((column + 1) * side, width))
    ]
