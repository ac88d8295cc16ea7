"""Our backbone and rules give the values of the published formulations (golden files)."""

from pathlib import Path
from typing import NamedTuple

import pytest
import timm.models
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from tlalign_mm.backbones import VisionTransformer
from tlalign_mm.labels import (
    MixParams,
    apply_mix,
    area_labels,
    class_targets,
    residual,
    smoothed_one_hot,
    token_labels,
    transmix_labels,
)
from tlalign_mm.layers import attend

DATA = Path(__file__).parent.parent / "data"


class Golden(NamedTuple):
    """A golden file, taken apart.

    Attributes:
        tensors: Inputs and outputs by name.
        weights: State dict under timm's names, classifier included.
        sizes: What the metadata says, as numbers.
    """

    tensors: dict[str, Tensor]
    weights: dict[str, Tensor]
    sizes: dict[str, float]

    @property
    def patch_size(self) -> int:
        return int(self.sizes["patch_size"])

    @property
    def architecture(self) -> dict[str, int]:
        names = ("patch_size", "embed_dim", "depth", "num_heads")
        return {name: int(self.sizes[name]) for name in names} | {
            "img_size": int(self.sizes["image_size"])
        }

    @property
    def targets(self) -> Tensor:
        return smoothed_one_hot(
            self.tensors["class_index"].long(),
            int(self.sizes["num_classes"]),
            self.sizes["label_smoothing"],
        )

    def paste(self, box: Tensor) -> MixParams:
        """Mix with the batch flipped; the box is y1, y2, x1, x2 in pixels."""
        images, (y1, y2, x1, x2) = self.tensors["images"], box.tolist()
        mask = torch.zeros_like(images[:, :1])
        mask[..., y1:y2, x1:x2] = 1
        return MixParams(torch.arange(len(images)).flip(0), mask)

    def backbone(self) -> VisionTransformer:
        backbone = VisionTransformer(**self.architecture, out_indices=()).eval()
        ours = {name: t for name, t in self.weights.items() if not name.startswith("head.")}
        backbone.load_state_dict(ours)
        return backbone

    def logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weights["head.weight"], self.weights["head.bias"])


def read_golden(name: str) -> Golden:
    with safe_open(DATA / name, "pt") as file:
        sizes = {key: float(value) for key, value in file.metadata().items()}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    prefix = "state_dict."
    return Golden(
        {k: t for k, t in tensors.items() if not k.startswith(prefix)},
        {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)},
        sizes,
    )


def assert_published(ours: Tensor, published: Tensor) -> None:
    torch.testing.assert_close(ours, published, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def tl_align() -> Golden:
    return read_golden("tl_align_vit.safetensors")


@pytest.fixture(scope="module")
def aligned_mix(tl_align: Golden) -> MixParams:
    return tl_align.paste(tl_align.tensors["box_tokens"] * tl_align.patch_size)


@pytest.fixture(scope="module")
def transmix() -> Golden:
    return read_golden("transmix_vit.safetensors")


@pytest.fixture(scope="module")
def pixel_mix(transmix: Golden) -> MixParams:
    return transmix.paste(transmix.tensors["box_pixels"])


def test_tl_align_mixes_as_published(tl_align: Golden, aligned_mix: MixParams) -> None:
    golden = tl_align.tensors
    torch.testing.assert_close(apply_mix(golden["images"], aligned_mix), golden["mixed_images"])
    torch.testing.assert_close(aligned_mix.lam, golden["area_ratio"].expand(4))
    labels = token_labels(aligned_mix, tl_align.patch_size)
    assert torch.equal(labels[0, :, 1], golden["token_mask"])


def test_tl_align_block_by_block_on_timms_model(tl_align: Golden, aligned_mix: MixParams) -> None:
    golden = tl_align.tensors
    sizes = tl_align.architecture
    model = timm.models.VisionTransformer(**sizes, num_classes=tl_align.targets.shape[1]).eval()
    model.load_state_dict(tl_align.weights)
    tokens = token_labels(aligned_mix, tl_align.patch_size)
    labels = torch.cat([area_labels(aligned_mix)[:, None], tokens], 1)  # class token first
    x = model._pos_embed(model.patch_embed(golden["mixed_images"]))
    for block, expected in zip(model.blocks, golden["cls_label_per_block"], strict=True):
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        _, moved = attend(q, k, v, token_labels=labels)
        labels = residual(moved, labels)
        x = block(x)
        expanded = class_targets(labels[:, 0], tl_align.targets, aligned_mix.partner)
        assert_published(expanded, expected)


def test_tl_align_end_to_end(tl_align: Golden, aligned_mix: MixParams) -> None:
    golden = tl_align.tensors
    pooled = tl_align.backbone().forward_features(
        apply_mix(golden["images"], aligned_mix), token_labels(aligned_mix, tl_align.patch_size)
    )
    label = class_targets(pooled.token_labels, tl_align.targets, aligned_mix.partner)
    assert_published(label, golden["aligned_label"])
    logits = tl_align.logits(pooled.features)
    assert_published(logits, golden["logits"])
    assert_published(F.cross_entropy(logits, label), golden["loss"])


def test_transmix_mixes_as_published(transmix: Golden, pixel_mix: MixParams) -> None:
    golden = transmix.tensors
    torch.testing.assert_close(apply_mix(golden["images"], pixel_mix), golden["mixed_images"])
    torch.testing.assert_close(pixel_mix.lam, golden["area_ratio"].expand(4))  # the own image's
    label = class_targets(area_labels(pixel_mix), transmix.targets, pixel_mix.partner)
    assert_published(label, golden["area_label"])


def test_transmix_end_to_end(transmix: Golden, pixel_mix: MixParams) -> None:
    golden, backbone = transmix.tensors, transmix.backbone()
    mixed = apply_mix(golden["images"], pixel_mix)
    pooled = backbone.forward_features(mixed, class_attention=True)
    assert_published(pooled.class_attention.flatten(1), golden["class_attention"])
    assert_published(transmix.logits(pooled.features), golden["logits"])
    shares = transmix_labels(pooled.class_attention, pixel_mix, backbone.stride)
    label = class_targets(shares, transmix.targets, pixel_mix.partner)
    assert_published(label, golden["transmix_label"])
    # the published token mask is the nearest pixel; exact coverage gives another label
    shares = transmix_labels(
        pooled.class_attention, pixel_mix, backbone.stride, token_mask="coverage"
    )
    other = class_targets(shares, transmix.targets, pixel_mix.partner)
    assert (other - golden["transmix_label"]).abs().max() > 1e-3
