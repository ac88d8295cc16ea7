"""Loading accounts for every tensor, and fails on what it cannot explain."""

import pytest
import torch
from torch import nn

from tests.checkpoints.toys import build
from tlalign_mm.backbones import SwinTransformer, VisionTransformer
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


def test_the_report_says_which_weights_were_taken(tmp_path) -> None:
    raw = build("VisionTransformer").state_dict()
    average = {name: 2 * tensor for name, tensor in raw.items()}
    path = str(tmp_path / "deit.pth")
    torch.save({"model": raw, "model_ema": average, "epoch": 3}, path)
    backbone = build("VisionTransformer")
    for weights, taken, tensors in ((None, "ema", average), ("model", "model", raw)):
        report = backbone.load(path, weights=weights)
        assert report.weights == taken and f"({taken})" in str(report).splitlines()[1]
        assert torch.equal(backbone.norm.weight, tensors["norm.weight"])


def test_a_published_segmenter_gives_its_encoder(tmp_path) -> None:
    """PITFALLS D5: the decoder has no place in a backbone, and is named as left out."""
    encoder = {f"encoder.{k}": v for k, v in build("VisionTransformer").state_dict().items()}
    whole = {**encoder, "decoder.head.weight": torch.ones(3, 64)}
    torch.save({"model": whole, "n_cls": 3}, tmp_path / "checkpoint.pth")
    report = build("VisionTransformer", dense=True).load(str(tmp_path / "checkpoint.pth"))
    assert report.dropped == ["decoder.head.weight", "norm.weight", "norm.bias"]
    assert report.coverage == 100


def test_the_network_is_told_by_the_tensors_not_by_the_name(tmp_path) -> None:
    """PITFALLS A15: published links were swapped."""
    path = str(write(tmp_path / "swin.pth", Checkpoint(build("VisionTransformer").state_dict())))
    with pytest.raises(CheckpointError, match="is a VisionTransformer, not a SwinTransformer"):
        build("SwinTransformer").load(path, strict=False)


@pytest.mark.parametrize(("depth", "strict"), [(1, True), (3, True), (3, False)])
def test_deeper_and_shallower_files_are_refused(depth, strict, tmp_path) -> None:
    tensors = build("VisionTransformer", depth=depth).state_dict()
    path = str(write(tmp_path / "deit.pth", Checkpoint(tensors)))
    target = build("VisionTransformer")
    if not strict:
        assert target.load(path, strict=False).unexpected[0] == "blocks.2.norm1.weight"
        return
    with pytest.raises(CheckpointError, match=f"depth is {depth} there and 2 here"):
        target.load(path)


def test_a_file_of_nan_leaves_the_model_as_it_was(tmp_path) -> None:
    tensors = {**build("VisionTransformer").state_dict()}
    tensors["norm.weight"] = torch.full((64,), float("nan"))
    path = str(write(tmp_path / "deit.pth", Checkpoint(tensors)))
    target = build("VisionTransformer")
    before = target.norm.weight.clone()
    with pytest.raises(CheckpointError, match=r"deit\.pth holds NaN or infinity in norm\.weight"):
        target.load(path, strict=False)
    assert torch.equal(target.norm.weight, before)


def test_a_shape_that_does_not_fit_leaves_the_model_as_it_was() -> None:
    target = VisionTransformer(embed_dim=24, depth=1, num_heads=3, out_indices=())
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    tensors["norm.bias"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"norm\.bias"):
        load_state(target, tensors, Report("file"))
    assert all(torch.equal(tensor, before[k]) for k, tensor in target.state_dict().items())
