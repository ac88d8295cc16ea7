"""The label stream on timm's vision transformer gives the published values (golden file)."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models import VisionTransformer
from torch import Tensor

from tlalign_mm.labels import (
    MixParams,
    apply_mix,
    area_labels,
    class_targets,
    residual,
    smoothed_one_hot,
    token_labels,
)
from tlalign_mm.layers import attend

GOLDEN = Path(__file__).parent.parent / "data/tl_align_vit.safetensors"
PATCH = 4


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.fixture(scope="module")
def mix(golden: dict[str, Tensor]) -> MixParams:
    y1, y2, x1, x2 = (golden["box_tokens"] * PATCH).tolist()
    mask = torch.zeros(4, 1, 32, 32)
    mask[..., y1:y2, x1:x2] = 1
    return MixParams(torch.arange(4).flip(0), mask)


def test_mixing_equals_the_published_code(golden: dict[str, Tensor], mix: MixParams) -> None:
    torch.testing.assert_close(apply_mix(golden["images"], mix), golden["mixed_images"])
    torch.testing.assert_close(mix.lam, golden["area_ratio"].float().expand(4))
    assert torch.equal(token_labels(mix, PATCH)[0, :, 1], golden["token_mask"].float())


def test_aligned_labels_equal_the_published_code(golden: dict[str, Tensor], mix: MixParams) -> None:
    model = VisionTransformer(
        img_size=32, patch_size=PATCH, embed_dim=48, depth=4, num_heads=3, num_classes=10
    ).eval()
    prefix = "state_dict."
    weights = {k.removeprefix(prefix): v for k, v in golden.items() if k.startswith(prefix)}
    model.load_state_dict(weights)
    targets = smoothed_one_hot(golden["class_index"].long(), 10, 0.1)
    labels = torch.cat(
        [area_labels(mix)[:, None], token_labels(mix, PATCH)], 1
    )  # class token first
    x = model._pos_embed(model.patch_embed(golden["mixed_images"]))
    for block, expected in zip(model.blocks, golden["cls_label_per_block"], strict=True):
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        _, moved = attend(q, k, v, token_labels=labels)
        labels = residual(moved, labels)
        x = block(x)
        expanded = class_targets(labels[:, 0], targets, mix.partner)
        torch.testing.assert_close(expanded, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(expanded, golden["aligned_label"], atol=1e-5, rtol=0)
    logits = model.head(model.norm(x)[:, 0])
    torch.testing.assert_close(F.cross_entropy(logits, expanded), golden["loss"], atol=1e-5, rtol=0)
