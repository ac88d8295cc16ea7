"""Loading accounts for every tensor, and fails on what it cannot explain."""

import pytest
import torch
from torch import nn

from tlalign_mm.backbones import SwinTransformer
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, Report, load_state, write

SMALL = {"embed_dim": 24, "depths": (1, 1), "num_heads": (3, 6), "window_size": 4}


def model() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})


def test_every_tensor_is_accounted_for() -> None:
    tensors = {k: v for k, v in model().state_dict().items() if not k.startswith("norm")}
    tensors |= {"fc.weight": torch.zeros(1)}
    target = model()
    report = load_state(target, tensors, Report("file"), dropped=[r"fc\..*"], initial=[r"norm\..*"])
    assert report.matched == ["a.weight", "a.bias", "head.weight", "head.bias"]
    assert report.dropped == ["fc.weight"]
    assert report.initial == ["norm.weight", "norm.bias"]
    assert report.coverage == pytest.approx(100 * 30 / 38)
    assert torch.equal(target["a"].weight, tensors["a.weight"])
    assert "4 tensors matched" in str(report) and "norm.weight" in str(report)


def test_unexplained_tensors_fail_and_are_named() -> None:
    tensors = {**model().state_dict(), "layers.0.weight": torch.zeros(1)}
    del tensors["a.bias"]
    with pytest.raises(CheckpointError, match=r"missing \['a.bias'\].*\['layers.0.weight'\]"):
        load_state(model(), tensors, Report("file"))
    report = load_state(model(), tensors, Report("file"), strict=False)
    assert (report.missing, report.unexpected) == (["a.bias"], ["layers.0.weight"])


def test_too_little_coverage_fails() -> None:
    tensors = {"norm.weight": torch.ones(4)}
    with pytest.raises(CheckpointError, match="covers 10.5 %"):
        load_state(model(), tensors, Report("file"), initial=[".*"])


def test_a_wrong_shape_fails_with_the_tensor_named() -> None:
    tensors = {**model().state_dict(), "a.weight": torch.zeros(5, 4)}
    with pytest.raises(CheckpointError, match="a.weight"):
        load_state(model(), tensors, Report("file"), strict=False)


def test_resized_tensors_are_listed_with_both_shapes() -> None:
    tensors = SwinTransformer(**SMALL, out_indices=(0, 1)).state_dict()
    target = SwinTransformer(**{**SMALL, "window_size": 7}, out_indices=(0, 1))
    report = load_state(target, tensors, Report("file"))
    assert report.resized == {
        f"layers.{i}.blocks.0.attn.relative_position_bias_table": ((49, heads), (169, heads))
        for i, heads in enumerate((3, 6))
    }


def test_a_file_of_another_architecture_is_refused_by_its_fields(tmp_path) -> None:
    source = SwinTransformer(**SMALL)
    path = write(
        tmp_path / "x.safetensors",
        Checkpoint(source.state_dict(), "tlalign_mm", source.architecture),
    )
    target = SwinTransformer(**{**SMALL, "embed_dim": 48, "num_heads": (4, 8)})
    with pytest.raises(CheckpointError, match="embed_dim is 24 there and 48 here"):
        target.load(str(path))
