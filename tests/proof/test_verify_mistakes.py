"""Verification: it finds a wrong conversion, and says where it shows first."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.proof.networks import SIZES, converted, our_file
from tlalign_mm.checkpoints import CheckpointError
from tlalign_mm.checkpoints.tables import TABLES
from tlalign_mm.checkpoints.tables.swin import UNFOLD
from tlalign_mm.proof.verify import Difference, Verification, verify

Change = Callable[[Tensor], Tensor]
VIT, SWIN, PVT = "VisionTransformer", "SwinTransformer", "PyramidVisionTransformer"
DISTILLED = f"{VIT} distilled"


def thirds_moved(tensor: Tensor) -> Tensor:
    return tensor.roll(len(tensor) // 3, 0)


def positions_shifted(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 1)


def negative(tensor: Tensor) -> Tensor:
    return -tensor


def double(tensor: Tensor) -> Tensor:
    return 2 * tensor


MISTAKES: list[tuple[str, str, str, str, Change]] = [  # the last but one: where it shows first
    (VIT, "timm", "pos_embed", "stage 1", positions_shifted),
    (VIT, "timm", "head.bias", "logits", negative),
    (VIT, "mmseg", "layers.0.attn.attn.in_proj_bias", "stage 1", thirds_moved),
    (VIT, "mmseg", "ln1.weight", "norm 2", double),
    (DISTILLED, "timm", "dist_token", "stage 1", negative),
    (DISTILLED, "timm", "head_dist.weight", "logits", negative),
    (DISTILLED, "mmseg", "pos_embed", "stage 1", positions_shifted),
    (SWIN, "mmseg", "stages.0.downsample.reduction.weight", "stage 2", UNFOLD.to_ours),
    (SWIN, "mmdet", "stages.0.downsample.norm.bias", "stage 2", UNFOLD.to_ours),
    (SWIN, "timm", "layers.1.downsample.norm.bias", "stage 2", negative),
    (SWIN, "official", "head.weight", "logits", negative),
    (PVT, "mmdet", "layers.0.1.1.attn.attn.in_proj_weight", "stage 1", thirds_moved),
    (PVT, "mmdet", "layers.3.1.0.pos_embed", "stage 4", positions_shifted),
    (PVT, "official", "block2.0.attn.kv.bias", "stage 2", negative),
    (f"{PVT}V2", "mmdet", "layers.0.2.bias", "norm 1", negative),
    ("CaiT", "timm", "blocks_token_only.0.attn.q.weight", "pooled", negative),
    ("XCiT", "official", "cls_attn_blocks.0.attn.qkv.weight", "pooled", thirds_moved),
    ("XCiT", "timm", "blocks.0.local_mp.bn.running_var", "stage 1", double),
]


@pytest.mark.integration
@pytest.mark.parametrize(("network", "layout", "name", "where", "change"), MISTAKES)
def test_a_mistake_is_found_where_it_shows_first(network, layout, name, where, change) -> None:
    file, weights, there = converted(our_file(network), layout)
    tensors = {n.removeprefix("backbone."): t for n, t in there.tensors.items()}
    tensors[name] = change(tensors[name]).clone()
    found = verify(file, weights, there._replace(tensors=tensors), sizes=SIZES.get(network))
    first = next(difference for difference in found.differences if difference.value > 1e-5)
    assert first.what == where and not found.passes
    with pytest.raises(CheckpointError, match="differ by .* more than 1e-05; check --from"):
        found.check()


@pytest.mark.integration
def test_a_mistake_of_a_table_is_found_though_the_weights_come_back(monkeypatch) -> None:
    forgetful = tuple(rule._replace(op=None) for rule in TABLES["SwinTransformer"]["mmseg"])
    monkeypatch.setitem(TABLES["SwinTransformer"], "mmseg", forgetful)
    file, weights, there = converted(our_file("SwinTransformer"), "mmseg")
    found = verify(file, weights, there)
    assert found.largest.what == "stage 2" and found.largest.value > 0.1
    assert "NOT the same network" in str(found)


@pytest.mark.parametrize("layout", ["timm", "tlalign_mm"])
def test_every_tensor_must_have_its_place(layout) -> None:
    file, weights, there = converted(our_file("VisionTransformer"), layout)
    without = {n: t for n, t in there.tensors.items() if n != "blocks.1.norm1.bias"}
    with pytest.raises(CheckpointError, match=r"1 are missing \['blocks.1.norm1.bias'\]"):
        verify(file, weights, there._replace(tensors=without))
    more = {**there.tensors, "blocks.1.norm9.bias": torch.zeros(64)}
    with pytest.raises(CheckpointError, match=r"1 have no place \['blocks.1.norm9.bias'\]"):
        verify(file, weights, there._replace(tensors=more))
    odd = {**there.tensors, "blocks.1.norm1.bias": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"do not fit .*blocks.1.norm1.bias"):
        verify(file, weights, there._replace(tensors=odd))


def test_a_difference_that_is_no_number_does_not_pass() -> None:
    sizes = [Difference("stage 1", (8, 8), float("nan")), Difference("stage 2", (8, 8), 1.0)]
    found = Verification("one", "other", sizes)
    assert not found.passes and found.largest.what == "stage 1"
