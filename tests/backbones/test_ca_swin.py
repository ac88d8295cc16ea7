"""CASwinTransformer: the contract, Swin's files, and replays with class attention written out."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.backbones.contract import BackboneContract, mixed_labels
from tests.backbones.test_swin import SMALL, ExplicitLabels
from tests.backbones.test_swin import twins as swin_twins
from tlalign_mm.backbones import Backbone, CASwinTransformer, SwinTransformer
from tlalign_mm.backbones.ca_swin import ARCHITECTURES
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write


class TestContract(BackboneContract):
    strides = (4, 8)
    channels = (24, 48)

    def build(self, **kwargs: object) -> Backbone:
        return CASwinTransformer(**{**SMALL, "init_values": 1.0, "out_indices": (0, 1), **kwargs})


def file_of(source: Backbone, path: Path) -> str:
    checkpoint = Checkpoint(source.state_dict(), "tlalign_mm", source.architecture)
    return str(write(path / "file.safetensors", checkpoint))


def twins(path: Path) -> tuple[TimmSwin, CASwinTransformer]:
    """timm's Swin without its last block, and ours with its weights and a class-attention block."""
    theirs, swin = swin_twins(32)
    theirs.layers[-1].blocks = theirs.layers[-1].blocks[:-1]
    ours = CASwinTransformer(**SMALL, out_indices=()).eval()
    ours.load(file_of(swin, path))
    for name, parameter in ours.class_block.named_parameters():
        if "gamma" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:  # attention that is not flat
            nn.init.normal_(parameter, std=0.3)
    return theirs, ours


def class_row(ours: CASwinTransformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, C) and head-wise attention (B, h, 1 + N) of the class token."""
    w, heads = ours.state_dict(), SMALL["num_heads"][-1]
    p = {name.removeprefix("class_block."): tensor for name, tensor in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    u = torch.cat([w["cls_token"].expand(len(tokens), -1, -1), tokens], 1)
    token, u = u[:, 0], norm(u, "norm1")
    width = u.shape[-1] // heads
    rows, gathered = [], []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        q, k, v = (linear(u, f"attn.{name}")[..., part] for name in "qkv")
        row = (q[:, :1] @ k.transpose(1, 2) / width**0.5).softmax(-1)  # (B, 1, 1 + N)
        rows.append(row[:, 0])
        gathered.append((row @ v)[:, 0])
    token = token + p["gamma_1"] * linear(torch.cat(gathered, -1), "attn.proj")
    hidden = F.gelu(linear(norm(token, "norm2"), "mlp.fc1"))
    token = token + p["gamma_2"] * linear(hidden, "mlp.fc2")
    return norm(token, "norm"), torch.stack(rows, 1)


def test_a_swin_file_loads_but_for_its_last_block(tmp_path: Path) -> None:
    _, swin = swin_twins(32)
    ours = CASwinTransformer(**SMALL, out_indices=())
    report = ours.load(file_of(swin, tmp_path))
    assert report.dropped and all(n.startswith("layers.1.blocks.1.") for n in report.dropped)
    assert {n.split(".")[0] for n in report.initial} == {"cls_token", "class_block"}
    assert not report.missing and not report.unexpected and not report.resized
    theirs = swin.state_dict()
    assert all(
        torch.equal(tensor, theirs[n]) for n, tensor in ours.state_dict().items() if n in theirs
    )


def test_a_pretrained_file_loads_into_the_dense_model(tmp_path: Path) -> None:
    ours = CASwinTransformer(**SMALL, out_indices=())
    dense = CASwinTransformer(**SMALL)
    report = dense.load(file_of(ours, tmp_path))
    assert {n.split(".")[0] for n in report.dropped} == {"cls_token", "class_block", "norm"}
    assert {n.split(".")[0] for n in report.initial} == {"norm0", "norm1"}
    assert not hasattr(dense, "class_block") and not hasattr(dense, "cls_token")


def test_dense_maps_are_those_of_the_shorter_swin() -> None:
    dense = CASwinTransformer(**SMALL).eval()
    swin = SwinTransformer(**{**SMALL, "depths": (2, 1)}).eval()
    swin.load_state_dict(dense.state_dict(), strict=True)
    images = torch.randn(2, 3, 40, 52)
    for one, other in zip(dense(images), swin(images), strict=True):
        assert torch.equal(one, other)


def test_other_files_are_refused(tmp_path: Path) -> None:
    deeper = SwinTransformer(**{**SMALL, "depths": (2, 3)}, out_indices=())
    with pytest.raises(CheckpointError, match="another architecture: depths"):
        CASwinTransformer(**SMALL, out_indices=()).load(file_of(deeper, tmp_path))
    ours = CASwinTransformer(**SMALL, out_indices=())
    with pytest.raises(CheckpointError, match="is a CASwinTransformer, not a SwinTransformer"):
        SwinTransformer(**SMALL).load(file_of(ours, tmp_path))
    with pytest.raises(CheckpointError, match=r"depths is \[2, 3\] there and \[2, 2\] here"):
        bare = Checkpoint(deeper.state_dict(), "tlalign_mm")
        CASwinTransformer(**SMALL).load(str(write(tmp_path / "bare.safetensors", bare)))


def test_features_and_class_attention_equal_a_plain_replay(tmp_path: Path) -> None:
    theirs, ours = twins(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    tokens = theirs.layers(theirs.patch_embed(images)).flatten(1, 2)  # (B, N, C)
    features, rows = class_row(ours, tokens)
    pooled = ours.forward_features(images, class_attention=True)
    torch.testing.assert_close(pooled.features, features, atol=1e-5, rtol=0)
    row = rows.mean(1)[:, 1:].unflatten(1, (4, 4))
    torch.testing.assert_close(pooled.class_attention, row, atol=1e-6, rtol=0)


def test_labels_equal_a_replay_with_explicit_attention(tmp_path: Path) -> None:
    theirs, ours = twins(tmp_path)
    images, labels = torch.randn(2, 3, 32, 32), mixed_labels(ours, 2, (32, 32))
    replay = ExplicitLabels(theirs, labels, 32)
    tokens = theirs.layers(theirs.patch_embed(images)).flatten(1, 2)
    attention = class_row(ours, tokens)[1].mean(1)[:, None]  # (B, 1, 1 + N)
    token_labels = replay.labels.flatten(1, 2)
    mean = token_labels.mean(1, keepdim=True)
    expected = (attention @ torch.cat([mean, token_labels], 1) + mean) / 2
    moved = ours.forward_features(images, labels).token_labels
    torch.testing.assert_close(moved, expected[:, 0], atol=1e-6, rtol=0)
    assert (moved - labels.mean(1)).abs().max() > 1e-3, "the image's area moved"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_class_attention_is_cheaper_than_the_block_it_replaces(arch: str) -> None:
    with torch.device("meta"):
        ours = CASwinTransformer(arch, out_indices=())
        swin = SwinTransformer(arch.removeprefix("ca-"), out_indices=())
        last = torch.randn(1, 7, 7, swin.num_features[-1])
        tokens = torch.randn(1, 50, swin.num_features[-1])
    assert [len(stage.blocks) for stage in ours.layers] == [*ours.architecture["depths"][:3], 1]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, swin)]
    # Swin's table of positions against two scales and the class token
    dim, heads = swin.num_features[-1], swin.architecture["num_heads"][-1]
    assert sizes[1] - sizes[0] == 13**2 * heads - 3 * dim > 0
    counts = []
    for block, x in ((ours.class_block, tokens), (swin.layers[-1].blocks[-1], last)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            block(x)
        counts.append(counter.get_total_flops())
    assert counts[0] < 0.25 * counts[1]


def test_stochastic_depth_ends_at_the_last_window_block() -> None:
    ours = CASwinTransformer(**SMALL, drop_path_rate=0.2, out_indices=())
    rates = [block.drop_path1.drop_prob for stage in ours.layers for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2])
    assert ours.class_block.drop_path1.drop_prob == 0


def test_pretraining_freezes_and_orders_token_and_block() -> None:
    def trained(frozen_stages: int) -> set[str]:
        ours = CASwinTransformer(**SMALL, out_indices=(), frozen_stages=frozen_stages)
        return {n.split(".")[0] for n, p in ours.named_parameters() if p.requires_grad}

    assert trained(1) == {"layers", "class_block", "norm"}
    assert trained(2) == {"norm"}
    ours = CASwinTransformer(**SMALL, out_indices=())
    depths = {name: ours.get_layer_depth(name) for name, _ in ours.named_parameters()}
    assert depths["cls_token"] == (0, 6)
    assert depths["layers.1.blocks.0.mlp.fc1.weight"] == (3, 6)
    assert depths["class_block.attn.q.weight"] == (4, 6)
    assert depths["norm.weight"] == (5, 6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"arch": "swin-tiny"}, "arch='swin-tiny' is unknown to CASwinTransformer"),
        ({**SMALL, "depths": (2, 0)}, "must end in at least 1"),
        ({**SMALL, "num_heads": (3,)}, "one entry a stage"),
    ],
)
def test_wrong_fields_are_named(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CASwinTransformer(**kwargs)
