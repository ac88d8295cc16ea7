"""PyramidVisionTransformer: the contract, parity with mmdet's, and a replay of the official one."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backbones.contract import BackboneContract, mixed_labels
from tlalign_mm.backbones import Backbone, PyramidVisionTransformer
from tlalign_mm.backbones.pvt import ARCHITECTURES
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write
from tlalign_mm.compat import install_mmcv_ext

SMALL = {
    "embed_dims": (16, 32),
    "depths": (1, 2),
    "num_heads": (1, 2),
    "mlp_ratios": (4, 2),
    "sr_ratios": (4, 1),
    "img_size": 32,
}


def build(**kwargs: object) -> PyramidVisionTransformer:
    """A small model for dense tasks, with biases that would show a mistake."""
    torch.manual_seed(0)
    backbone = PyramidVisionTransformer(**{**SMALL, **kwargs}).eval()
    for name, parameter in backbone.named_parameters():
        if "bias" in name or "embed" in name or "token" in name:
            nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    return backbone.requires_grad_(False)


class TestContract(BackboneContract):
    strides = (4, 8)
    channels = (16, 32)

    def build(self, **kwargs: object) -> Backbone:
        return PyramidVisionTransformer(**{**SMALL, "out_indices": (0, 1), **kwargs})

    def test_pretrained_weights_are_really_those_of_the_file(self, tmp_path: Path) -> None:
        source = build(out_indices=())
        dense = self.build()
        report = load(dense, tmp_path, source.state_dict(), source.architecture)
        tensors = source.state_dict()
        tensors["pos_embed2"] = tensors["pos_embed2"][:, 1:]
        assert all(torch.equal(tensors[n], tensor) for n, tensor in dense.state_dict().items())
        assert report.resized == {"pos_embed2": ((1, 17, 32), (1, 16, 32))}
        assert set(report.dropped) == {"cls_token", "norm.weight", "norm.bias"}


def load(backbone: Backbone, folder: Path, tensors: dict, architecture: dict | None = None):
    path = write(folder / "file.safetensors", Checkpoint(tensors, "tlalign_mm", architecture))
    return backbone.load(str(path))


def mmdet_twin(ours: PyramidVisionTransformer) -> nn.Module:
    """mmdet's model with our weights; its embedding norms and key norms get the official eps."""
    install_mmcv_ext()
    backbones = pytest.importorskip("mmdet.models.backbones")
    fields = ours.architecture
    theirs = backbones.PyramidVisionTransformer(
        pretrain_img_size=fields["img_size"][0],
        embed_dims=fields["embed_dims"][0],
        num_stages=2,
        num_layers=fields["depths"],
        num_heads=fields["num_heads"],
        patch_sizes=[4, 2],
        strides=[4, 2],
        sr_ratios=fields["sr_ratios"],
        mlp_ratios=fields["mlp_ratios"],
        out_indices=(0, 1),
    ).eval()
    for name, module in theirs.named_modules():
        if name.endswith((".0.norm", ".attn.norm")):
            module.eps = 1e-5
    theirs.load_state_dict(mmdet_names(ours.state_dict()), strict=True)
    return theirs


def mmdet_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        first, *rest = name.split(".")
        part, layer = first[:-1], f"layers.{int(first[-1]) - 1}"
        inner = ".".join(rest)
        if part == "patch_embed":
            renamed[f"{layer}.0.{inner.replace('proj', 'projection')}"] = tensor
        elif part == "pos_embed":
            renamed[f"{layer}.1.0.pos_embed"] = tensor
        else:
            block, inner = f"{layer}.1.{int(rest[0]) + 1}", ".".join(rest[1:])
            if inner.startswith("attn.kv"):
                continue
            if inner.startswith("attn.q."):
                kv = tensors[name.replace("attn.q.", "attn.kv.")]
                inner, tensor = f"attn.attn.in_proj_{rest[-1]}", torch.cat([tensor, kv])
            if inner.startswith("mlp."):
                tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
                inner = inner.replace("mlp.fc1", "ffn.layers.0").replace("mlp.fc2", "ffn.layers.3")
            inner = inner.replace("attn.proj", "attn.attn.out_proj")
            renamed[f"{block}.{inner}"] = tensor
    return renamed


@pytest.mark.parametrize("size", [(32, 32), (64, 96), (16, 48), (40, 24)])
def test_maps_equal_mmdets(size: tuple[int, int]) -> None:
    ours = build()
    theirs, images = mmdet_twin(ours), torch.randn(2, 3, *size)
    for one, other in zip(ours(images), theirs(images), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


class Replay:
    """The official classification model and the label rules, written out over its tensors."""

    def __init__(self, model: PyramidVisionTransformer) -> None:
        self.w = model.state_dict()
        self.fields = model.architecture

    def run(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Class features, the class token's label and its attention to all patches."""
        last = len(self.fields["depths"])
        for i, depth in enumerate(self.fields["depths"], 1):
            x = self.conv(x, f"patch_embed{i}.proj")
            labels = F.avg_pool2d(labels, 2) if i > 1 else labels
            size = x.shape[2:]
            x = self.norm(x.flatten(2).mT, f"patch_embed{i}.norm", 1e-5)
            pos, y = self.w[f"pos_embed{i}"], labels.flatten(2).mT
            if i == last:
                x = torch.cat([self.w["cls_token"].expand(len(x), 1, -1), x], 1)
                y = torch.cat([y.mean(1, keepdim=True), y], 1)
                pos = torch.cat([pos[:, :1], self.interpolate(pos[:, 1:], size)], 1)
            else:
                pos = self.interpolate(pos, size)
            x = x + pos
            for j in range(depth):
                x, y, attention = self.block(x, y, i, f"block{i}.{j}.", size)
            if i < last:
                x, labels = x.mT.unflatten(2, size), y.mT.unflatten(2, size)
        return self.norm(x, "norm", 1e-6)[:, 0], y[:, 0], attention[:, 0, 1:]

    def block(
        self, x: Tensor, y: Tensor, stage: int, name: str, size: torch.Size
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(x, f"{name}norm1", 1e-6)
        keys, key_labels, ratio = normed, y, self.fields["sr_ratios"][stage - 1]
        if ratio > 1:
            keys = self.conv(normed.mT.unflatten(2, size), f"{name}attn.sr").flatten(2).mT
            keys = self.norm(keys, f"{name}attn.norm", 1e-5)
            key_labels = F.avg_pool2d(y.mT.unflatten(2, size), ratio).flatten(2).mT
        q = self.linear(normed, f"{name}attn.q")
        k, v = self.linear(keys, f"{name}attn.kv").chunk(2, -1)
        heads = self.fields["num_heads"][stage - 1]
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        attention = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        moved = (attention @ v).transpose(1, 2).flatten(2)
        x = x + self.linear(moved, f"{name}attn.proj")
        hidden = self.linear(self.norm(x, f"{name}norm2", 1e-6), f"{name}mlp.fc1")
        x, attention = x + self.linear(F.gelu(hidden), f"{name}mlp.fc2"), attention.mean(1)
        return x, (attention @ key_labels + y) / 2, attention

    def interpolate(self, pos: Tensor, size: torch.Size) -> Tensor:
        side = math.isqrt(pos.shape[1])
        grid = pos.mT.unflatten(2, (side, side))
        return F.interpolate(grid, size, mode="bilinear").flatten(2).mT

    def conv(self, x: Tensor, name: str) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.conv2d(x, weight, self.w[f"{name}.bias"], stride=weight.shape[2:])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)


@pytest.mark.parametrize("size", [(32, 32), (64, 96), (16, 48), (40, 24)])
def test_pooling_equals_a_replay_of_the_official_model(size: tuple[int, int]) -> None:
    backbone = build(out_indices=())
    images, labels = torch.randn(2, 3, *size), mixed_labels(backbone, 2, size)
    pooled = backbone.forward_features(images, labels, class_attention=True)
    label_map = labels.unflatten(1, (size[0] // 4, size[1] // 4)).permute(0, 3, 1, 2)
    features, label, attention = Replay(backbone).run(images, label_map)
    torch.testing.assert_close(pooled.features, features, atol=1e-5, rtol=0)
    torch.testing.assert_close(pooled.token_labels, label, atol=1e-6, rtol=0)
    torch.testing.assert_close(pooled.class_attention.flatten(1), attention, atol=1e-6, rtol=0)


# of mmdet's models, with class token, its position and the final norm on top
PARAMETERS = [12_716_288, 23_972_864, 43_695_104, 60_856_320]


@pytest.mark.parametrize(("arch", "count"), zip(ARCHITECTURES, PARAMETERS, strict=True))
def test_published_sizes(arch: str, count: int) -> None:
    with torch.device("meta"):
        backbone = PyramidVisionTransformer(arch, out_indices=())
    assert sum(p.numel() for p in backbone.parameters()) == count
    assert backbone.pos_embed4.shape == (1, 50, 512)


def official(slot: bool, side: int, **extra: Tensor) -> dict[str, Tensor]:
    """Tensors as in a file without metadata, for square images of ``8 * side`` pixels."""
    tensors = build(img_size=8 * side, out_indices=() if slot else (0, 1)).state_dict()
    kept = {n: t for n, t in tensors.items() if n != "cls_token" and not n.startswith("norm.")}
    return {**kept, **extra}


def resized(tokens: Tensor, side: int, grid: tuple[int, int]) -> Tensor:
    tokens = tokens.mT.unflatten(2, (side, side))
    return F.interpolate(tokens, grid, mode="bilinear", align_corners=False).flatten(2).mT


CLASSIFIER = {
    "cls_token": torch.zeros(1, 1, 32),
    "norm.weight": torch.ones(32),
    "norm.bias": torch.zeros(32),
    "head.weight": torch.zeros(10, 32),
    "head.bias": torch.zeros(10),
}


@pytest.mark.parametrize("extra", [{}, CLASSIFIER], ids=["detection", "classification"])
@pytest.mark.parametrize("side", [3, 4, 7, 12])
def test_the_class_slot_is_dropped_at_any_image_size(
    tmp_path: Path, side: int, extra: dict[str, Tensor]
) -> None:
    tensors, dense = official(True, side, **extra), build()
    report = load(dense, tmp_path, tensors)
    assert set(report.dropped) == extra.keys()
    first, last = tensors["pos_embed1"], tensors["pos_embed2"][:, 1:]
    torch.testing.assert_close(dense.pos_embed1, resized(first, 2 * side, (8, 8)))
    torch.testing.assert_close(dense.pos_embed2, resized(last, side, (4, 4)))


def test_a_slot_is_told_from_a_patch_where_counts_collide(tmp_path: Path) -> None:
    dense = build(img_size=(16, 40))  # 2 x 5 patches, as many as 3 x 3 and a class token
    tensors = official(True, 3, **CLASSIFIER)
    load(dense, tmp_path, tensors)
    last = tensors["pos_embed2"][:, 1:]
    torch.testing.assert_close(dense.pos_embed2, resized(last, 3, (2, 5)))
    again = build(img_size=(16, 40))
    again.load_state_dict(dense.state_dict())
    assert torch.equal(again.pos_embed2, dense.pos_embed2)


@pytest.mark.parametrize("out_indices", [(), (0, 1)])
def test_files_that_name_their_size_may_be_of_any_shape(
    tmp_path: Path, out_indices: tuple[int, ...]
) -> None:
    source = build(img_size=(24, 56), out_indices=out_indices)
    target = build(out_indices=out_indices)
    load(target, tmp_path, source.state_dict(), source.architecture)
    slot = int(not out_indices)
    grid = source.pos_embed2[:, slot:].mT.unflatten(2, (3, 7))
    expected = F.interpolate(grid, (4, 4), mode="bilinear").flatten(2).mT
    torch.testing.assert_close(target.pos_embed2[:, slot:], expected)
    torch.testing.assert_close(target.pos_embed2[:, :slot], source.pos_embed2[:, :slot])


def test_dense_weights_cannot_be_pretrained_further(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing \['cls_token'"):
        load(build(out_indices=()), tmp_path, build().state_dict())


def test_frozen_stages_hold_their_tokens_and_positions() -> None:
    backbone = PyramidVisionTransformer(**SMALL, out_indices=(), frozen_stages=1)
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert {"cls_token", "pos_embed2", "norm.weight", "patch_embed2.proj.weight"} <= trained
    assert not any(name.startswith(("patch_embed1", "pos_embed1", "block1")) for name in trained)


def test_a_stage_begins_at_the_depth_of_the_block_before() -> None:
    backbone = PyramidVisionTransformer(**SMALL, out_indices=())
    depths = {name: backbone.get_layer_depth(name)[0] for name, _ in backbone.named_parameters()}
    assert depths["patch_embed1.norm.weight"] == depths["pos_embed1"] == 0
    assert depths["block1.0.attn.sr.weight"] == depths["patch_embed2.proj.bias"] == 1
    assert depths["pos_embed2"] == depths["cls_token"] == 1
    assert depths["block2.1.mlp.fc1.weight"] == 3 and depths["norm.weight"] == 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "pvt-huge"}, "arch='pvt-huge' is unknown"),
        ({"embed_dims": (8,)}, "fields depths, num_heads, mlp_ratios, sr_ratios"),
        ({**SMALL, "mlp_ratios": (4,)}, "one entry a stage"),
        ({**SMALL, "num_heads": (3, 4)}, r"num_heads\[0\]=3 must divide 16"),
        ({**SMALL, "sr_ratios": (4, 2), "out_indices": ()}, "must end in 1 for pretraining"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidVisionTransformer(**kwargs)
