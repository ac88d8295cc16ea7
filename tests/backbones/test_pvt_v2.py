"""PyramidVisionTransformerV2: the contract, and parity with timm's own model."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.pvt_v2 import Block as TimmBlock
from timm.models.pvt_v2 import PyramidVisionTransformerV2 as TimmPVT
from torch import Tensor

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, PyramidVisionTransformerV2
from tlalign_mm.backbones.pvt_v2 import ARCHITECTURES

SMALL = {
    "embed_dims": (16, 32),
    "depths": (1, 2),
    "num_heads": (2, 4),
    "mlp_ratios": (4, 2),
    "sr_ratios": (4, 2),
}
SIZES = [(32, 32), (64, 48), (33, 50), (30, 75)]


class TestContract(BackboneContract):
    strides = (4, 8)
    channels = (16, 32)

    def build(self, **kwargs: object) -> Backbone:
        return PyramidVisionTransformerV2(**{**SMALL, "out_indices": (0, 1), **kwargs})


class TestLinearContract(TestContract):
    def build(self, **kwargs: object) -> Backbone:
        return super().build(linear=True, **kwargs)


def twins(linear: bool) -> tuple[TimmPVT, PyramidVisionTransformerV2]:
    """timm's model and ours with the same weights, loaded by name and strictly."""
    torch.manual_seed(0)
    theirs = TimmPVT(num_classes=0, linear=linear, **SMALL).eval()
    for name, parameter in theirs.named_parameters():
        if "bias" in name:  # zero at initialisation, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim == 2:  # sharper attention than at initialisation
            torch.nn.init.normal_(parameter, std=0.2)
    ours = PyramidVisionTransformerV2(**SMALL, linear=linear, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs.requires_grad_(False), ours


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_features_and_maps_equal_timms(size: tuple[int, int], linear: bool) -> None:
    theirs, ours = twins(linear)
    images = torch.randn(2, 3, *size)
    features = ours.forward_features(images).features
    torch.testing.assert_close(features, theirs(images), atol=1e-5, rtol=0)
    dense = PyramidVisionTransformerV2(**SMALL, linear=linear).eval()
    dense.load_state_dict(theirs.state_dict(), strict=True)
    expected = theirs.forward_intermediates(images, intermediates_only=True)
    for one, other in zip(dense(images), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["pvt-v2-b0", "pvt-v2-b2-linear"])
def test_published_sizes_equal_timms_at_224(arch: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(timm_name(arch), num_classes=0).eval()
    ours = PyramidVisionTransformerV2(arch, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        features = ours.forward_features(images).features
        torch.testing.assert_close(features, theirs(images), atol=1e-5, rtol=0)


def timm_name(arch: str) -> str:
    return arch.replace("-", "_").replace("linear", "li")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_published_size_has_timms_tensors(arch: str) -> None:
    with torch.device("meta"):
        ours = PyramidVisionTransformerV2(arch, out_indices=())
        theirs = timm.create_model(timm_name(arch), num_classes=0)
    shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes
    heads = [block.attn.num_heads for stage in theirs.stages for block in stage.blocks]
    assert heads == [block.attn.num_heads for stage in ours.stages for block in stage.blocks]
    epsilons = [m.eps for m in theirs.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert epsilons == [m.eps for m in ours.modules() if isinstance(m, torch.nn.LayerNorm)]


class ExplicitLabels:
    """Replays the label stream on timm's modules: hooks catch each block's softmax."""

    def __init__(self, model: TimmPVT, label_map: Tensor) -> None:
        self.labels = label_map.permute(0, 3, 1, 2)  # (B, K, H, W)
        for module in model.modules():
            if isinstance(module, TimmBlock):
                module.attn.fused_attn = False
                module.attn.attn_drop.register_forward_hook(self.catch)
                module.register_forward_hook(self.align)
        for stage in model.stages[1:]:
            stage.downsample.register_forward_hook(self.merge)

    def catch(self, _module: object, _inputs: tuple, output: Tensor) -> None:
        self.attention = output.mean(1)  # (B, N, M)

    def align(self, block: TimmBlock, _inputs: tuple, _output: Tensor) -> None:
        if block.attn.pool is not None:
            keys = block.attn.pool(self.labels)
        elif block.attn.sr is not None:
            keys = F.avg_pool2d(self.labels, block.attn.sr.stride)
        else:
            keys = self.labels
        moved = keys.flatten(2) @ self.attention.mT  # (B, K, N)
        self.labels = (moved.view_as(self.labels) + self.labels) / 2

    def merge(self, *_: object) -> None:
        ones = torch.ones_like(self.labels)
        total, number = (F.avg_pool2d(x, 3, 2, 1) for x in (self.labels, ones))
        self.labels = total / number


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_labels_equal_a_replay_with_explicit_attention_on_timm(
    size: tuple[int, int], linear: bool
) -> None:
    theirs, ours = twins(linear)
    images, labels = torch.randn(2, 3, *size), mixed_labels(ours, 2, size)
    replay = ExplicitLabels(theirs, labels.unflatten(1, [-(-side // 4) for side in size]))
    theirs(images)
    moved = ours.forward_features(images, labels).token_labels
    torch.testing.assert_close(moved, replay.labels.mean((2, 3)), atol=1e-6, rtol=0)


def test_maps_smaller_than_the_reduction_ratio_have_one_key() -> None:
    backbone = PyramidVisionTransformerV2(**SMALL, out_indices=()).eval()
    images, labels = torch.randn(2, 3, 8, 12), mixed_labels(backbone, 2, (8, 12))
    moved = backbone.forward_features(images, labels).token_labels
    start = labels.unflatten(1, (2, 3))
    first = (start + start.mean((1, 2), keepdim=True)) / 2
    padded = F.pad(first, (0, 0, 1, 1, 1, 1))
    cells = [padded[:, :3, i : i + 3].flatten(1, 2) for i in (0, 2)]
    last = torch.stack([cell.sum(1) / n for cell, n in zip(cells, (4, 4), strict=True)], 1)
    torch.testing.assert_close(moved, last.mean(1))  # attention to one key keeps the mean


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "pvt-v2-b9"}, "arch='pvt-v2-b9' is unknown"),
        ({"embed_dims": (8,)}, "fields depths, num_heads, mlp_ratios, sr_ratios"),
        ({**SMALL, "sr_ratios": (4,)}, "one entry a stage"),
        ({**SMALL, "num_heads": (3, 4)}, r"num_heads\[0\]=3 must divide 16"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidVisionTransformerV2(**kwargs)


def test_drop_path_grows_over_all_blocks() -> None:
    backbone = PyramidVisionTransformerV2(**SMALL, drop_path_rate=0.2)
    rates = [block.drop_path1.drop_prob for stage in backbone.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2])


def test_a_stage_begins_at_the_depth_of_the_block_before() -> None:
    backbone = PyramidVisionTransformerV2(**SMALL)
    depths = {name: backbone.get_layer_depth(name)[0] for name, _ in backbone.named_parameters()}
    assert depths["patch_embed.norm.weight"] == 0
    assert depths["stages.0.blocks.0.attn.sr.weight"] == depths["stages.0.norm.weight"] == 1
    assert depths["stages.1.downsample.proj.weight"] == 1
    assert depths["stages.1.blocks.1.mlp.dwconv.weight"] == depths["stages.1.norm.bias"] == 3
