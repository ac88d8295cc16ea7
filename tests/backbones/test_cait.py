"""CaiT: the contract, parity with timm's own model, and the label stream replayed on it."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models.cait import Cait as TimmCait
from timm.models.cait import ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn
from torch import Tensor, nn

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, CaiT
from tlalign_mm.backbones.cait import ARCHITECTURES
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write

SMALL = {"embed_dim": 24, "depth": 3, "num_heads": 3, "patch_size": 4, "img_size": 32}
ATOL = 1e-5


class TestContract(BackboneContract):
    strides = (4, 4)
    channels = (24, 24)

    def build(self, **kwargs: object) -> Backbone:
        fields = {**SMALL, "depth": 2, "init_values": 1.0, "out_indices": (0, 1)}
        return CaiT(**{**fields, **kwargs})


def randomise(model: nn.Module) -> None:
    """What is 0, or next to it, at initialisation would hide mistakes."""
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.3)
        elif "gamma" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif "proj_l" in name or "proj_w" in name:  # heads really mix, weights really are signed
            nn.init.normal_(parameter)
        elif any(part in name for part in (".qkv.", ".q.", ".k.")):  # attention that is not flat
            nn.init.normal_(parameter, std=0.3)


def twins() -> tuple[TimmCait, CaiT]:
    """timm's model and ours with the same weights, loaded by name and strictly."""
    torch.manual_seed(0)
    theirs = TimmCait(num_classes=0, **SMALL).eval()
    randomise(theirs)
    ours = CaiT(**SMALL, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def save(model: nn.Module, path: Path) -> str:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return str(write(path / "file.safetensors", Checkpoint(tensors, "tlalign_mm")))


def test_features_equal_timms() -> None:
    theirs, ours = twins()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(
        ours.forward_features(images).features, theirs(images), atol=ATOL, rtol=0
    )


def test_maps_equal_timms(tmp_path: Path) -> None:
    theirs, _ = twins()
    ours = CaiT(**SMALL, out_indices=(0, 2)).eval()
    report = ours.load(save(theirs, tmp_path))
    assert report.coverage == 100
    assert {name.split(".")[0] for name in report.dropped} == {
        "cls_token",
        "blocks_token_only",
        "norm",
    }
    images = torch.randn(2, 3, 32, 32)
    expected = theirs.forward_intermediates(images, indices=[0, 2], intermediates_only=True)
    for one, other in zip(ours(images), expected, strict=True):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=0)


def test_cait_xxs24_equals_timms_at_224() -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("cait_xxs24_224", num_classes=0).eval()
    for name, parameter in theirs.named_parameters():
        if "gamma" in name:
            nn.init.ones_(parameter)
    ours = CaiT("cait-xxs24", out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        found, expected = ours.forward_features(images).features, theirs(images)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


class ExplicitLabels:
    """Replays the label stream on timm's modules: hooks catch what multiplies the values."""

    def __init__(self, model: TimmCait, labels: Tensor) -> None:
        self.labels = labels  # (B, N, K) of the patch tokens
        self.cls_label = None
        for module in model.modules():
            if isinstance(module, TalkingHeadAttn | ClassAttn):
                module.fused_attn = False
                module.attn_drop.register_forward_pre_hook(self.catch)
            elif isinstance(module, LayerScaleBlock):
                module.register_forward_hook(self.align_patches)
            elif isinstance(module, LayerScaleBlockClassAttn):
                module.register_forward_hook(self.align_class)

    def catch(self, _module: object, inputs: tuple) -> None:
        self.weights = inputs[0].detach()  # (B, h, N, M)

    def align_patches(self, *_: object) -> None:
        contribution = self.weights.abs() / self.weights.abs().sum(-1, keepdim=True)
        self.labels = (contribution.mean(1) @ self.labels + self.labels) / 2

    def align_class(self, *_: object) -> None:
        mean = self.labels.mean(1, keepdim=True)
        cls_label = mean if self.cls_label is None else self.cls_label  # (B, 1, K)
        moved = self.weights.mean(1) @ torch.cat([cls_label, self.labels], 1)
        self.cls_label = (moved + cls_label) / 2


def test_labels_and_class_attention_equal_a_replay_on_timm() -> None:
    theirs, ours = twins()
    images, labels = torch.randn(2, 3, 32, 32), mixed_labels(ours, 2, (32, 32))
    replay = ExplicitLabels(theirs, labels)
    theirs(images)
    pooled = ours.forward_features(images, labels, class_attention=True)
    torch.testing.assert_close(pooled.token_labels, replay.cls_label[:, 0], atol=1e-6, rtol=0)
    assert (pooled.token_labels - labels.mean(1)).abs().max() > 1e-3, "the image's area moved"
    row = replay.weights.mean(1)[:, 0, 1:].unflatten(1, (8, 8))
    torch.testing.assert_close(pooled.class_attention, row, atol=1e-6, rtol=0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_size_has_timms_parameters(arch: str) -> None:
    name = arch.replace("-", "_")
    with torch.device("meta"):
        theirs = next(
            timm.create_model(f"{name}_{size}", num_classes=0, img_size=224)
            for size in (224, 384, 448)
            if timm.is_model(f"{name}_{size}")
        )
        ours = CaiT(arch, out_indices=())
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (theirs, ours)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("arch", ["cait-xxs24", "cait-s36"])
def test_scales_start_as_in_timm(arch: str) -> None:
    theirs = timm.create_model(f"{arch.replace('-', '_')}_384", img_size=32, depth=1)
    ours = CaiT(arch, depth=1, out_indices=(), img_size=32)
    for one, other in (
        (ours.blocks[0], theirs.blocks[0]),
        (ours.blocks_token_only[1], theirs.blocks_token_only[1]),
    ):
        assert torch.equal(one.gamma_1, other.gamma_1) and torch.equal(one.gamma_2, other.gamma_2)


def test_stochastic_depth_is_constant_over_the_patch_blocks() -> None:
    backbone = CaiT(**SMALL, drop_path_rate=0.3, out_indices=())
    assert [block.drop_path1.drop_prob for block in backbone.blocks] == [0.3] * 3
    assert all(block.drop_path1.drop_prob == 0 for block in backbone.blocks_token_only)


def test_a_position_embedding_of_another_size_is_resized(tmp_path: Path) -> None:
    theirs, square = twins()
    ours = CaiT(**{**SMALL, "img_size": (48, 24)}, out_indices=()).eval()
    report = ours.load(save(theirs, tmp_path))
    assert list(report.resized) == ["pos_embed"]
    images = torch.randn(1, 3, 48, 24)  # resized on loading there, in every forward pass here
    found, expected = ours.forward_features(images), square.forward_features(images)
    torch.testing.assert_close(found.features, expected.features)


def test_a_grid_of_as_many_patches_is_resized_from_the_one_that_the_file_names(
    tmp_path: Path,
) -> None:
    wide = CaiT(**{**SMALL, "img_size": (24, 48)}, out_indices=())
    checkpoint = Checkpoint(wide.state_dict(), "tlalign_mm", wide.architecture)
    tall = CaiT(**{**SMALL, "img_size": (48, 24)}, out_indices=())
    tall.load(str(write(tmp_path / "wide.safetensors", checkpoint)))
    grid = wide.pos_embed.mT.unflatten(2, (6, 12))
    expected = nn.functional.interpolate(grid, (12, 6), mode="bicubic").flatten(2).mT
    torch.testing.assert_close(tall.pos_embed, expected)


def test_a_pretraining_model_wants_all_class_blocks(tmp_path: Path) -> None:
    path = save(twins()[0], tmp_path)
    for blocks in (1, 3):
        with pytest.raises(CheckpointError, match=f"only is 2 there and {blocks} here"):
            CaiT(**SMALL, depth_token_only=blocks, out_indices=()).load(path)


def test_pretraining_freezes_and_orders_what_follows_the_blocks() -> None:
    backbone = CaiT(**SMALL, out_indices=(), frozen_stages=2)
    trained = {n.split(".")[0] for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {"blocks", "blocks_token_only", "norm"}
    depths = {name: backbone.get_layer_depth(name) for name, _ in backbone.named_parameters()}
    assert depths["cls_token"] == (0, 7)
    assert depths["blocks.2.gamma_1"] == (3, 7)
    assert depths["blocks_token_only.1.attn.q.weight"] == (5, 7)
    assert depths["norm.weight"] == (6, 7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "cait-xl"}, "arch='cait-xl' is unknown"),
        ({"embed_dim": 24}, "needs arch=… or the fields depth, num_heads"),
        ({**SMALL, "num_heads": 5}, r"num_heads\[0\]=5 must divide 24"),
        ({**SMALL, "depth_token_only": 0}, "depth_token_only=0 must be at least 1"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaiT(**kwargs)
