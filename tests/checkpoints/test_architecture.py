"""Sizes are read from shapes; what shapes do not tell is named as assumed."""

import pytest
import torch

from tests.checkpoints.toys import TOYS, build
from tlalign_mm.backbones.rebuild import published_name, rebuild
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read_weights
from tlalign_mm.checkpoints.architecture import infer
from tlalign_mm.checkpoints.convert import with_fields


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("toy", TOYS)
def test_shapes_tell_the_architecture(toy, dense) -> None:
    backbone = build(toy, dense)
    found = infer(toy.split()[0], backbone.state_dict())
    told = {k: v for k, v in found.fields.items() if k not in found.assumed}
    assert told == {k: v for k, v in backbone.architecture.items() if k in told}
    free = {"num_heads", "sr_ratios", "tokens_norm", "depth_token_only", "cls_attn_layers"}
    assert backbone.architecture.keys() - told.keys() <= free


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("toy", TOYS)
def test_the_network_is_built_again_from_its_tensors(toy, dense) -> None:
    tensors = build(toy, dense).state_dict()
    found = read_weights(Checkpoint(tensors), "file").architecture
    again = rebuild(found.fields, tensors, device="meta")
    shapes = {name: tensor.shape for name, tensor in again.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in tensors.items()}


def test_heads_of_odd_channels_are_unknown_until_the_user_says_them() -> None:
    tensors = build("VisionTransformer", embed_dim=24, num_heads=3).state_dict()
    weights = read_weights(Checkpoint(tensors), "file")
    assert weights.architecture.fields["num_heads"] is None
    with pytest.raises(CheckpointError, match=r"do not tell num_heads.*--arch num_heads="):
        rebuild(weights.architecture.fields, tensors)
    said = with_fields(weights, {"num_heads": 3}).architecture
    assert rebuild(said.fields, tensors).architecture["num_heads"] == 3


def test_a_grid_that_is_no_square_is_unknown() -> None:
    tensors = build("VisionTransformer", img_size=(32, 64)).state_dict()
    weights = read_weights(Checkpoint(tensors), "file")
    assert weights.architecture.fields["img_size"] is None
    fields = with_fields(weights, {"img_size": [32, 64]}).architecture.fields
    assert rebuild(fields, tensors).grid == (2, 4)


def test_what_contradicts_the_tensors_is_refused() -> None:
    weights = read_weights(Checkpoint(build("SwinTransformer").state_dict()), "file")
    with pytest.raises(CheckpointError, match="window_size is 7 .* and 4 by its tensors"):
        with_fields(weights, {"window_size": 7})


def test_a_hole_in_the_blocks_is_named() -> None:
    tensors = build("VisionTransformer", depth=3).state_dict()
    holed = {name: t for name, t in tensors.items() if not name.startswith("blocks.1.")}
    with pytest.raises(CheckpointError, match=r"file: blocks\.1 is missing"):
        read_weights(Checkpoint(holed), "file")


def test_a_missing_embedding_is_named() -> None:
    tensors = dict(build("VisionTransformer").state_dict())
    del tensors["patch_embed.proj.weight"]
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight is missing"):
        read_weights(Checkpoint(tensors), "file")


def test_shapes_alone_are_enough() -> None:
    tensors = {n: torch.empty_like(t, device="meta") for n, t in build("XCiT").state_dict().items()}
    assert read_weights(Checkpoint(tensors), "file").architecture.fields["depth"] == 2


def test_published_sizes_have_a_name() -> None:
    found = rebuild({"type": "SwinTransformer", "arch": "swin-small"}, (), device="meta")
    assert published_name(found.architecture) == "swin-small"
    assert published_name({**found.architecture, "embed_dim": 100}) is None
    deit = {"type": "VisionTransformer", "embed_dim": 192, "depth": 12, "num_heads": 3}
    assert published_name({**deit, "distilled": True}) == "deit-tiny-distilled"
