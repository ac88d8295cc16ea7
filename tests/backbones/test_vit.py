"""VisionTransformer: the contract, parity with timm's and mmsegmentation's, position embeddings."""

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled as TimmDistilled
from timm.models.vision_transformer import VisionTransformer as TimmViT

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, VisionTransformer
from tlalign_mm.backbones.vit import ARCHITECTURES
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write
from tlalign_mm.proof.replay import LabelReplay
from tlalign_mm.proof.stock import build_pair
from tlalign_mm.proof.twins import copy_weights, randomize

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 4, "img_size": 32}
ATOL = 1e-5


class TestContract(BackboneContract):
    strides = (4, 4)
    channels = (24, 24)
    compile_backend = "aot_eager"

    def build(self, **kwargs: object) -> Backbone:
        return VisionTransformer(**{**SMALL, "out_indices": (0, 1), **kwargs})


class TestDistilledContract(TestContract):
    test_blocks_compile_without_graph_breaks = None  # the same blocks as above

    def build(self, **kwargs: object) -> Backbone:
        return super().build(**{"distilled": True, "final_norm": True, **kwargs})


def twins(distilled: bool = False) -> tuple[TimmViT, VisionTransformer]:
    """timm's model and ours with the same weights, loaded by name and strictly."""
    theirs = (TimmDistilled if distilled else TimmViT)(**SMALL, num_classes=7).eval()
    randomize(theirs)
    ours = VisionTransformer(**SMALL, distilled=distilled, out_indices=()).eval()
    copy_weights(theirs, ours)
    return theirs, ours


@torch.no_grad()
def test_features_and_logits_equal_timms() -> None:
    theirs, ours = twins()
    images = torch.randn(2, 3, 32, 32)
    logits = theirs.head(ours.forward_features(images).features)
    torch.testing.assert_close(logits, theirs(images), atol=ATOL, rtol=0)


@torch.no_grad()
def test_both_tokens_of_a_distilled_model_equal_timms() -> None:
    theirs, ours = twins(distilled=True)
    images = torch.randn(2, 3, 32, 32)
    pooled = ours.forward_features(images)
    logits = (theirs.head(pooled.features) + theirs.head_dist(pooled.distilled)) / 2
    torch.testing.assert_close(logits, theirs(images), atol=ATOL, rtol=0)


@pytest.mark.parametrize("distilled", [False, True])
@torch.no_grad()
def test_labels_and_class_attention_equal_a_replay_on_timm(distilled: bool) -> None:
    theirs, ours = twins(distilled)
    images, labels = torch.randn(2, 3, 32, 32), mixed_labels(ours, 2, (32, 32))
    pooled = ours.forward_features(images, labels, class_attention=True)
    with LabelReplay(theirs) as replay:
        replay.start(labels, (8, 8))
        theirs(images)
    torch.testing.assert_close(pooled.token_labels, replay.label(token=True), atol=1e-6, rtol=0)
    attention = pooled.class_attention.flatten(1)
    torch.testing.assert_close(attention, replay.class_row, atol=1e-6, rtol=0)


@torch.no_grad()
def test_deit_tiny_equals_timms_at_224() -> None:
    theirs = randomize(timm.create_model("deit_tiny_patch16_224", num_classes=0)).eval()
    ours = VisionTransformer("deit-tiny", out_indices=()).eval()
    copy_weights(theirs, ours)
    images = torch.randn(1, 3, 224, 224)
    features = ours.forward_features(images).features
    torch.testing.assert_close(features, theirs(images), atol=ATOL, rtol=0)


@pytest.mark.integration
@pytest.mark.parametrize("size", [(32, 32), (33, 50), (20, 64)])
@torch.no_grad()
def test_maps_equal_mmsegmentations(size: tuple[int, int]) -> None:
    weights = randomize(VisionTransformer(**SMALL)).state_dict()
    stock, ours = build_pair("deit", 32, weights, **SMALL, out_indices=(0, 1))
    ours.eval(), stock.eval()
    images = torch.randn(2, 3, *size)
    for one, other in zip(ours(images), stock(images), strict=True):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_arch_has_timms_tensors(arch: str) -> None:
    name = arch.replace("-", "_") + "_patch16_224"
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=0).state_dict()
        ours = VisionTransformer(arch, out_indices=()).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_positions_of_another_size_are_interpolated_on_loading() -> None:
    source = VisionTransformer(**SMALL, out_indices=())
    target = VisionTransformer(**{**SMALL, "img_size": (48, 24)}, out_indices=())
    target.load_state_dict(source.state_dict())
    assert target.pos_embed.shape == (1, 1 + 12 * 6, 24)
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])
    # a constant stays constant under interpolation
    torch.nn.init.constant_(source.pos_embed, 0.5)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target.pos_embed, torch.full_like(target.pos_embed, 0.5))


def test_a_non_square_source_is_known_from_the_file_and_refused_otherwise(tmp_path) -> None:
    source = VisionTransformer(**{**SMALL, "img_size": (32, 48)}, out_indices=())
    path = tmp_path / "backbone.safetensors"
    write(path, Checkpoint(source.state_dict(), "tlalign_mm", source.architecture))
    target = VisionTransformer(**SMALL, out_indices=())
    report = target.load(str(path))
    assert report.resized == {"pos_embed": ((1, 97, 24), (1, 65, 24))}
    same_rows = VisionTransformer(**{**SMALL, "img_size": (32, 24)}, out_indices=())
    same_rows.load(str(path))
    halves = source.pos_embed[:, 1:].unflatten(1, (8, 12)).unflatten(2, (6, 2)).mean(3)
    rows = same_rows.pos_embed[:, 1:].unflatten(1, (8, 6))
    assert torch.corrcoef(torch.stack([halves.flatten(), rows.flatten()]))[0, 1] > 0.9
    with pytest.raises(ValueError, match="do not fill a grid of 9x9; name the checkpoint's"):
        target.load_state_dict(source.state_dict())


def test_a_distilled_file_loads_without_its_distillation_token(tmp_path) -> None:
    source = VisionTransformer(**SMALL, distilled=True, out_indices=())
    path = tmp_path / "backbone.safetensors"
    write(path, Checkpoint(source.state_dict()))
    target = VisionTransformer(**SMALL, out_indices=())
    report = target.load(str(path))
    assert report.dropped == ["dist_token"] and report.coverage == 100
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(target.pos_embed[:, 1:], source.pos_embed[:, 2:])


def test_a_plain_file_does_not_pass_for_a_distilled_one(tmp_path) -> None:
    path = tmp_path / "backbone.safetensors"
    write(path, Checkpoint(VisionTransformer(**SMALL, out_indices=()).state_dict()))
    with pytest.raises(CheckpointError, match="distilled is False there and True here"):
        VisionTransformer(**SMALL, distilled=True, out_indices=()).load(str(path))


def test_the_final_norm_is_an_option_of_the_last_map() -> None:
    torch.manual_seed(0)
    plain = VisionTransformer(**SMALL, out_indices=(0, 1)).eval()
    normed = VisionTransformer(**SMALL, out_indices=(0, 1), final_norm=True).eval()
    normed.load_state_dict(plain.state_dict(), strict=False)
    images = torch.randn(1, 3, 32, 32)
    (first, last), (same, other) = plain(images), normed(images)
    assert torch.equal(first, same)
    torch.testing.assert_close(normed.norm(last.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), other)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "deit-huge"}, "arch='deit-huge' is unknown to VisionTransformer"),
        ({"embed_dim": 24}, "needs arch=… or the fields depth, num_heads"),
        ({**SMALL, "num_heads": 5}, r"num_heads\[0\]=5 must divide 24"),
        ({**SMALL, "out_indices": (2,)}, "out_indices=.* must lie in 0 … 1"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**kwargs)
