"""XCiT: the contract, parity with timm's own model, and the label stream replayed on it."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models.cait import ClassAttn
from timm.models.xcit import LPI, XCABlock
from timm.models.xcit import ClassAttentionBlock as TimmClassBlock
from timm.models.xcit import Xcit as TimmXcit
from torch import Tensor, nn

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, XCiT
from tlalign_mm.backbones.xcit import ARCHITECTURES
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write

SMALL = {"embed_dim": 24, "depth": 3, "num_heads": 3}
ATOL = 1e-5


class TestContract(BackboneContract):
    strides = (4, 4)
    channels = (24, 24)

    def build(self, **kwargs: object) -> Backbone:
        fields = {"depth": 2, "patch_size": 4, "out_indices": (0, 1)}
        return XCiT(**{**SMALL, **fields, **kwargs})


class TestNanoContract(BackboneContract):
    strides = (4,)
    channels = (24,)
    test_blocks_compile_without_graph_breaks = None  # slow, and the branch is one line

    def build(self, **kwargs: object) -> Backbone:
        fields = {"depth": 1, "cls_attn_layers": 1, "patch_size": 4, "tokens_norm": False}
        return XCiT(**{**SMALL, **fields, **kwargs})


def randomise(model: nn.Module) -> None:
    """What is 0, 1 or next to it at initialisation would hide mistakes."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or "mean" in name:
            nn.init.normal_(tensor.data, std=0.3)
        elif "gamma" in name or "temperature" in name or "var" in name or "norm" in name:
            nn.init.uniform_(tensor.data, 0.7, 1.3)
        elif "attn" in name:  # attention that is not flat
            nn.init.normal_(tensor.data, std=0.3)


def twins(patch_size: int, tokens_norm: bool = True) -> tuple[TimmXcit, XCiT]:
    """timm's model and ours with the same weights, loaded by name and strictly."""
    torch.manual_seed(0)
    fields = {**SMALL, "patch_size": patch_size, "tokens_norm": tokens_norm}
    theirs = TimmXcit(num_classes=0, **fields).eval()
    randomise(theirs)
    ours = XCiT(**fields, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def save(model: nn.Module, path: Path) -> str:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return str(write(path / "file.safetensors", Checkpoint(tensors, "tlalign_mm")))


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 64), (48, 112), (33, 50)])
@pytest.mark.parametrize("patch_size", [8, 16])
@pytest.mark.parametrize("tokens_norm", [False, True])
def test_features_equal_timms(patch_size: int, size: tuple[int, int], tokens_norm: bool) -> None:
    theirs, ours = twins(patch_size, tokens_norm)
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(
        ours.forward_features(images).features, theirs(images), atol=ATOL, rtol=0
    )


@torch.no_grad()
def test_features_of_a_training_step_equal_timms() -> None:
    theirs, ours = twins(8)
    images = torch.randn(2, 3, 48, 64)
    for block in ours.blocks:
        block.drop_path1, block.drop_path2, block.drop_path3 = (nn.Identity() for _ in range(3))
    found, expected = ours.train().forward_features(images).features, theirs.train()(images)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    expected = dict(theirs.named_buffers())
    assert len(expected) > 0
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


@torch.no_grad()
def test_maps_equal_timms(tmp_path: Path) -> None:
    theirs, _ = twins(8)
    ours = XCiT(**SMALL, patch_size=8, out_indices=(0, 2)).eval()
    report = ours.load(save(theirs, tmp_path))
    assert report.coverage == 100
    dropped = {name.split(".")[0] for name in report.dropped}
    assert dropped == {"cls_token", "cls_attn_blocks", "norm"}
    images = torch.randn(2, 3, 48, 64)
    expected = theirs.forward_intermediates(images, indices=[0, 2], intermediates_only=True)
    for one, other in zip(ours(images), expected, strict=True):
        torch.testing.assert_close(one, other, atol=ATOL, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("patch_size", "side"), [(16, 224), (8, 112)])
def test_xcit_nano_equals_timms(patch_size: int, side: int) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(f"xcit_nano_12_p{patch_size}_224", num_classes=0).eval()
    ours = XCiT("xcit-nano-12", patch_size=patch_size, out_indices=()).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(1, 3, side, side)
    found, expected = ours.forward_features(images).features, theirs(images)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


class ExplicitLabels:
    """Replays the label stream on timm's modules: hooks catch kernels and probabilities."""

    def __init__(self, model: TimmXcit, labels: Tensor, grid: tuple[int, int]) -> None:
        self.labels = labels  # (B, N, K) of the patch tokens
        self.grid = grid
        self.cls_label = labels.new_zeros(0)
        for module in model.modules():
            if isinstance(module, LPI):
                module.register_forward_hook(self.convolve)
            elif isinstance(module, ClassAttn):
                module.fused_attn = False
                module.attn_drop.register_forward_pre_hook(self.catch)
            elif isinstance(module, XCABlock | TimmClassBlock):
                module.register_forward_hook(self.add)

    def convolve(self, module: LPI, *_: object) -> None:
        self.moved = self.labels
        for conv in (module.conv1, module.conv2):
            self.moved = self.matrix(conv.weight) @ self.moved

    def matrix(self, kernel: Tensor) -> Tensor:
        """(N, N) share of each token in what a kernel gathers at each other."""
        height, width = self.grid
        mean = kernel.detach().abs().mean((0, 1)).tolist()
        matrix = torch.zeros(height, width, height, width)
        for y in range(height):
            for x in range(width):
                for i in range(max(y - 1, 0), min(y + 2, height)):
                    for j in range(max(x - 1, 0), min(x + 2, width)):
                        matrix[y, x, i, j] = mean[i - y + 1][j - x + 1]
        matrix = matrix.view(height * width, -1)
        return matrix / matrix.sum(-1, keepdim=True)

    def catch(self, _module: object, inputs: tuple) -> None:
        self.row = inputs[0].detach().mean(1)  # (B, 1, 1 + N)

    def add(self, module: nn.Module, *_: object) -> None:
        if isinstance(module, XCABlock):
            self.labels = (self.moved + self.labels) / 2
            self.cls_label = self.labels.mean(1, keepdim=True)  # for the first class block
        else:
            moved = self.row @ torch.cat([self.cls_label, self.labels], 1)
            self.cls_label = (moved + self.cls_label) / 2


@torch.no_grad()
@pytest.mark.parametrize(("patch_size", "size"), [(8, (64, 64)), (8, (32, 56)), (16, (64, 100))])
def test_labels_and_class_attention_equal_a_replay_on_timm(
    patch_size: int, size: tuple[int, int]
) -> None:
    theirs, ours = twins(patch_size)
    images, labels = torch.randn(2, 3, *size), mixed_labels(ours, 2, size)
    grid = tuple(-(-side // patch_size) for side in size)
    replay = ExplicitLabels(theirs, labels, grid)
    theirs(images)
    pooled = ours.forward_features(images, labels, class_attention=True)
    torch.testing.assert_close(pooled.token_labels, replay.cls_label[:, 0], atol=1e-6, rtol=0)
    assert (pooled.token_labels - labels.mean(1)).abs().max() > 1e-3, "the image's area moved"
    row = replay.row[:, 0, 1:].unflatten(1, grid)
    torch.testing.assert_close(pooled.class_attention, row, atol=1e-6, rtol=0)


@pytest.mark.parametrize("patch_size", [8, 16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_size_has_timms_parameters(arch: str, patch_size: int) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(f"{arch.replace('-', '_')}_p{patch_size}_224", num_classes=0)
        ours = XCiT(arch, patch_size=patch_size, out_indices=())
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (theirs, ours)]
    assert shapes[0] == shapes[1]
    assert ours.cls_attn_blocks[0].tokens_norm == theirs.cls_attn_blocks[0].tokens_norm


@pytest.mark.parametrize(("arch", "eta"), [("xcit-tiny-12", 1.0), ("xcit-tiny-24", 1e-5)])
def test_scales_start_as_in_timm(arch: str, eta: float) -> None:
    theirs = timm.create_model(f"{arch.replace('-', '_')}_p16_224", depth=1)
    ours = XCiT(arch, depth=1, out_indices=())
    for name, parameter in ours.named_parameters():
        if "gamma" in name:
            assert torch.equal(parameter, theirs.get_parameter(name))
            assert torch.equal(parameter, torch.full_like(parameter, eta))


def test_stochastic_depth_is_constant_over_the_patch_blocks() -> None:
    backbone = XCiT(**SMALL, drop_path_rate=0.3, out_indices=())
    for block in backbone.blocks:
        rates = [path.drop_prob for path in (block.drop_path1, block.drop_path2, block.drop_path3)]
        assert rates == [0.3] * 3
    assert all(block.drop_path1.drop_prob == 0 for block in backbone.cls_attn_blocks)


def test_running_statistics_stay_where_frozen_and_move_once_elsewhere() -> None:
    statistics = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        backbone = XCiT(**SMALL, drop_path_rate=0.0, frozen_stages=1, with_cp=with_cp).train()
        before = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
        sum(x.sum() for x in backbone(torch.randn(2, 3, 64, 64))).backward()
        statistics.append(dict(backbone.named_buffers()))
        moved = {n for n, b in backbone.named_buffers() if not torch.equal(b, before[n])}
        assert {name.rsplit(".", 2)[0] for name in moved} == {
            "blocks.1.local_mp",
            "blocks.2.local_mp",
        }
    for name, buffer in statistics[0].items():
        assert torch.equal(buffer, statistics[1][name])


def test_a_pretraining_model_wants_all_class_blocks(tmp_path: Path) -> None:
    path = save(twins(16)[0], tmp_path)
    for layers in (1, 3):
        with pytest.raises(CheckpointError, match=f"layers is 2 there and {layers} here"):
            XCiT(**SMALL, cls_attn_layers=layers, out_indices=()).load(path)


def test_files_of_another_patch_or_token_norm_are_refused(tmp_path: Path) -> None:
    source = XCiT(**SMALL, out_indices=())
    path = tmp_path / "file.safetensors"
    write(path, Checkpoint(source.state_dict(), "tlalign_mm", source.architecture))
    for field, value in (("patch_size", 8), ("tokens_norm", False)):
        with pytest.raises(CheckpointError, match=f"{field} is .* there and {value} here"):
            XCiT(**{**SMALL, field: value}, out_indices=()).load(str(path))
    XCiT(**SMALL, eta=1e-5, out_indices=()).load(str(path))


def test_pretraining_freezes_and_orders_what_follows_the_blocks() -> None:
    backbone = XCiT(**SMALL, out_indices=(), frozen_stages=2)
    trained = {n.split(".")[0] for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {"blocks", "cls_attn_blocks", "norm"}
    expected = {
        "cls_token": 0,
        "pos_embed.token_projection.weight": 0,
        "blocks.2.gamma1": 3,
        "cls_attn_blocks.1.attn.q.weight": 5,
        "norm.weight": 6,
    }
    assert {name: backbone.get_layer_depth(name) for name in expected} == {
        name: (depth, 7) for name, depth in expected.items()
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "xcit-huge"}, "arch='xcit-huge' is unknown"),
        ({"embed_dim": 24}, "needs arch=… or the fields depth, num_heads"),
        ({**SMALL, "num_heads": 5}, r"num_heads\[0\]=5 must divide 24"),
        ({**SMALL, "patch_size": 32}, "patch_size=32 must be 4, 8 or 16"),
        ({**SMALL, "cls_attn_layers": 0}, "cls_attn_layers=0 must be at least 1"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        XCiT(**kwargs)


def test_fields_win_over_arch() -> None:
    with torch.device("meta"):
        backbone = XCiT("xcit-nano-12", depth=2, tokens_norm=True, eta=0.1, out_indices=())
    assert len(backbone.blocks) == 2
    assert backbone.cls_attn_blocks[0].tokens_norm
