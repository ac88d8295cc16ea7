"""SwinTransformer: the contract, and parity with timm's own model."""

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.swin_transformer import SwinTransformerBlock as TimmBlock
from torch import Tensor

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, SwinTransformer
from tlalign_mm.labels import merge_2x2, pool, residual
from tlalign_mm.labels.windows import partition, plan_windows, reverse
from tlalign_mm.proof.stock import build_pair
from tlalign_mm.proof.twins import randomize

SMALL = {"embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6), "window_size": 4}


class TestContract(BackboneContract):
    strides = (4, 8)
    channels = (24, 48)

    def build(self, **kwargs: object) -> Backbone:
        return SwinTransformer(**{**SMALL, "out_indices": (0, 1), **kwargs})


def twins(size: int) -> tuple[TimmSwin, SwinTransformer]:
    """timm's model and ours with the same weights, loaded by name and strictly."""
    torch.manual_seed(0)
    theirs = TimmSwin(img_size=size, patch_size=4, num_classes=0, **SMALL).eval()
    for name, parameter in theirs.named_parameters():
        if "bias" in name:  # zero at initialisation, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.5)
    ours = SwinTransformer(**SMALL, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


@pytest.mark.parametrize("size", [32, 64, 96])
def test_features_equal_timms(size: int) -> None:
    theirs, ours = twins(size)
    images = torch.randn(2, 3, size, size)
    expected = theirs(images)
    torch.testing.assert_close(ours.forward_features(images).features, expected, atol=1e-5, rtol=0)


def test_swin_tiny_equals_timms_at_224() -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0).eval()
    ours = SwinTransformer("swin-tiny", out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = theirs(images)
        torch.testing.assert_close(
            ours.forward_features(images).features, expected, atol=1e-5, rtol=0
        )


class ExplicitLabels:
    """Replays the label stream on timm's modules: hooks catch each block's softmax."""

    def __init__(self, model: TimmSwin, labels: Tensor, size: int) -> None:
        self.labels = labels.unflatten(1, (size // 4, size // 4))
        for module in model.modules():
            if isinstance(module, TimmBlock):
                module.attn.fused_attn = False
                module.attn.softmax.register_forward_hook(self.catch)
                module.register_forward_hook(self.align)
        for stage in model.layers[1:]:
            stage.downsample.register_forward_hook(self.merge)

    def catch(self, _module: object, _inputs: tuple, output: Tensor) -> None:
        self.attention = output.mean(1)  # (B*n, N, N)

    def align(self, block: TimmBlock, _inputs: tuple, _output: Tensor) -> None:
        size = tuple(self.labels.shape[1:3])
        grid = plan_windows(size, SMALL["window_size"], block.shift_size[0])
        moved = reverse(self.attention @ partition(self.labels, grid), grid)
        self.labels = residual(moved, self.labels)

    def merge(self, *_: object) -> None:
        self.labels = merge_2x2(self.labels)


@pytest.mark.parametrize("size", [32, 64])
def test_labels_equal_a_replay_with_explicit_attention_on_timm(size: int) -> None:
    theirs, ours = twins(size)
    images, labels = torch.randn(2, 3, size, size), mixed_labels(ours, 2, (size, size))
    replay = ExplicitLabels(theirs, labels, size)
    theirs(images)
    moved = ours.forward_features(images, labels).token_labels
    torch.testing.assert_close(moved, pool(replay.labels), atol=1e-6, rtol=0)


def test_padding_shares_attention_but_carries_no_label() -> None:
    torch.manual_seed(0)
    block = SwinTransformer(**SMALL).layers[0].blocks[0]
    x, labels = torch.randn(1, 5, 6, 24), torch.rand(1, 5, 6, 2).softmax(-1)
    _, moved = block(x, labels)
    grid = plan_windows((5, 6), 4, 0)
    assert grid.is_padded
    eye = torch.eye(16).expand(grid.num_windows, 16, 16)
    _, attention = block.attn.attend_windows(
        partition(block.norm1(x), grid), grid, eye
    )  # (n, N, N)
    weights = attention * partition(torch.ones(1, 5, 6, 1), grid).mT  # real keys only
    weights = weights / weights.sum(-1, keepdim=True)
    expected = residual(reverse(weights @ partition(labels, grid), grid), labels)
    torch.testing.assert_close(moved, expected)


@pytest.mark.integration
@pytest.mark.parametrize("size", [(64, 64), (33, 50), (16, 70)])
@torch.no_grad()
def test_maps_equal_mmsegmentations_with_padding_and_shift(size: tuple[int, int]) -> None:
    weights = randomize(SwinTransformer(**SMALL)).state_dict()
    stock, ours = build_pair("swin", 64, weights, **SMALL)
    ours.eval(), stock.eval()
    images = torch.randn(2, 3, *size)
    for one, other in zip(ours(images), stock(images), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arch", "window_size", "name"),
    [
        ("swin-tiny", 7, "swin_tiny_patch4_window7_224"),
        ("swin-small", 7, "swin_small_patch4_window7_224"),
        ("swin-base", 12, "swin_base_patch4_window12_384"),
        ("swin-large", 7, "swin_large_patch4_window7_224"),
        ("swin-large", 12, "swin_large_patch4_window12_384"),
    ],
)
def test_every_arch_has_timms_tensors(arch: str, window_size: int, name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=0).state_dict()
        ours = SwinTransformer(arch, window_size=window_size, out_indices=()).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_always_shift_changes_maps_of_one_window_only() -> None:
    torch.manual_seed(0)
    one = SwinTransformer(**SMALL, out_indices=(0, 1)).eval()
    other = SwinTransformer(**SMALL, out_indices=(0, 1), always_shift=True).eval()
    other.load_state_dict(one.state_dict())
    big, small = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 32, 32)
    for a, b in zip(one(big), other(big), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(one(small)[1], other(small)[1], atol=1e-3)


def test_a_table_of_another_window_is_resized_on_loading() -> None:
    source = SwinTransformer(**SMALL)
    target = SwinTransformer(**{**SMALL, "window_size": 7})
    target.load_state_dict(source.state_dict())
    table = target.layers[0].blocks[0].attn.relative_position_bias_table
    assert table.shape == (13**2, 3)
    assert table.std() > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "swin-huge"}, "arch='swin-huge' is unknown"),
        ({"embed_dim": 24}, "needs arch=… or the fields depths, num_heads"),
        ({**SMALL, "num_heads": (3,)}, "one entry a stage"),
        ({**SMALL, "num_heads": (5, 6)}, r"num_heads\[0\]=5 must divide 24"),
        ({**SMALL, "out_indices": (0, 2)}, "out_indices=.* must lie in 0 … 1"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwinTransformer(**kwargs)


def test_fields_win_over_arch() -> None:
    backbone = SwinTransformer("swin-tiny", depths=(1, 1, 1, 1))
    assert [len(stage.blocks) for stage in backbone.layers] == [1, 1, 1, 1]
    assert backbone.num_features == [96, 192, 384, 768]


def test_pooling_a_dense_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out_indices=\(\)"):
        SwinTransformer(**SMALL, out_indices=(0, 1)).forward_features(torch.randn(1, 3, 32, 32))
