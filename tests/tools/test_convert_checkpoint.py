"""tools/convert_checkpoint.py through its command line: what it writes and says."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from tests.checkpoints.samples import same
from tests.checkpoints.samples import save_zip as save
from tests.checkpoints.toys import build, classifier
from tlalign_mm.checkpoints import read, read_header

SWIN, VIT = "SwinTransformer", "VisionTransformer"


@pytest.mark.parametrize("to", ["official", "mmseg", "mmdet", "mmpretrain", "timm"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_there_and_back_every_bit_is_the_same(to, suffix, swin, tmp_path, convert) -> None:
    there, back = tmp_path / f"there{suffix}", tmp_path / f"back{suffix}"
    convert(swin, there, "--to", to)
    convert(there, back, "--to", "tlalign_mm")
    found = read(back).tensors
    dense = to in ("mmseg", "mmdet")  # these have neither the last norm nor a classifier
    lost = ("head.weight", "head.bias", "norm.weight", "norm.bias") if dense else ()
    assert same(found, {n: t for n, t in classifier(SWIN).items() if n not in lost})


@pytest.mark.parametrize(("to", "key"), [("official", "model"), ("timm", "state_dict")])
def test_files_are_wrapped_as_their_readers_expect(to, key, swin, tmp_path, convert) -> None:
    convert(swin, tmp_path / "out.pth", "--to", to)
    assert torch.load(tmp_path / "out.pth", weights_only=True).keys() == {key, "meta"}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_result_says_whose_names_and_which_network(suffix, vit, tmp_path, convert) -> None:
    out = tmp_path / f"new/folder/out{suffix}"
    convert(vit, out, "--to", "mm")
    header = read_header(out)
    assert header.layout == "mmseg"
    assert header.architecture["type"] == VIT and header.architecture["embed_dim"] == 64


def test_the_report_is_printed_and_every_tensor_is_in_one_list(swin, tmp_path, convert) -> None:
    out = convert(swin, tmp_path / "out.pth", "--to", "mmseg")
    first = next(line for line in out.splitlines() if line.startswith("Converted"))
    numbers = {word: int(n) for n, word in re.findall(r"(\d+) (?:tensors )?([a-z]+)", first)}
    assert (numbers["transformed"], numbers["dropped"]) == (3, 4)
    assert sum(numbers[key] for key in ("matched", "transformed", "dropped")) == len(
        classifier(SWIN)
    )
    assert "stages.0.downsample.reduction.weight reordered for patch merging" in out


@pytest.mark.parametrize(("option", "value"), [((), 2.0), (("--weights", "model"), 1.0)])
def test_of_two_weights_the_average_is_taken_and_said(
    option, value, tmp_path, convert, swin
) -> None:
    raw = {n: torch.full_like(t, 1.0) for n, t in classifier(SWIN).items()}
    average = {n: torch.full_like(t, 2.0) for n, t in raw.items()}
    both = save(tmp_path / "both.pth", {"model": raw, "model_ema": average})
    out = convert(both, tmp_path / "out.pth", "--to", "timm", *option)
    assert ("weights: the moving average (ema)" in out) == (value == 2.0)
    assert ("weights: the raw ones (model)" in out) == (value == 1.0)
    assert read(tmp_path / "out.pth").tensors["norm.weight"].eq(value).all()


@pytest.mark.parametrize(("option", "heads"), [("keep", 2), ("drop", 0)])
def test_a_head_is_kept_or_dropped(option, heads, swin, tmp_path, convert) -> None:
    convert(swin, tmp_path / "out.pth", "--to", "timm", "--head", option)
    assert sum("head" in name for name in read(tmp_path / "out.pth").tensors) == heads


def test_what_tensors_do_not_tell_is_said_and_can_be_given(vit, tmp_path, convert) -> None:
    out = convert(vit, tmp_path / "a.pth", "--to", "mmseg")
    assert "num_heads=1 as published" in out
    out = convert(vit, tmp_path / "b.pth", "--to", "mmseg", "--arch", "num_heads=4")
    assert "as published" not in out and "num_heads=4" in out
    assert read_header(tmp_path / "b.pth").architecture["num_heads"] == 4


def test_a_prefix_can_be_named(tmp_path, convert) -> None:
    renamed = {f"net.trunk.{name}": t for name, t in build(SWIN).state_dict().items()}
    convert(
        save(tmp_path / "x.pth", renamed), tmp_path / "o.pth", "--to", "timm", "--prefix=net.trunk"
    )
    assert same(read(tmp_path / "o.pth").tensors, build(SWIN).state_dict())


def test_two_readings_are_named_and_one_is_chosen(tmp_path, convert, refusal, swin) -> None:
    convert(swin, tmp_path / "mm.pth", "--to", "mmpretrain", "--head", "drop")
    bare = {n.removeprefix("backbone."): t for n, t in read(tmp_path / "mm.pth").tensors.items()}
    source = save(tmp_path / "bare.pth", bare)
    assert "say which by --from (mmseg, mmpretrain)" in refusal(source)
    convert(source, tmp_path / "out.pth", "--to", "timm", "--from", "mmpretrain")
    assert "norm.weight" in read(tmp_path / "out.pth").tensors


def test_positions_are_resized_for_another_image_size(vit, tmp_path, convert) -> None:
    out = convert(vit, tmp_path / "out.pth", "--to", "timm", "--img-size", 48, 64)
    assert "resized (1): pos_embed (1, 5, 64) -> (1, 13, 64)" in out
    assert read(tmp_path / "out.pth").tensors["pos_embed"].shape == (1, 13, 64)
    assert read_header(tmp_path / "out.pth").architecture["img_size"] == [48, 64]
    back = convert(tmp_path / "out.pth", tmp_path / "a.pth", "--to", "mmseg", "--img-size", 32)
    assert "pos_embed (1, 13, 64) -> (1, 5, 64)" in back


def test_tables_are_resized_as_loading_into_a_larger_window_does(swin, tmp_path, convert) -> None:
    out = convert(swin, tmp_path / "out.pth", "--to", "timm", "--window-size", 7)
    assert "resized (3)" in out and "(49, 3) -> (169, 3)" in out
    larger = build(SWIN, window_size=7)
    larger.load(str(swin))
    found = read(tmp_path / "out.pth").tensors
    expected = {n: t for n, t in larger.state_dict().items() if "head" not in n}
    assert same({n: t for n, t in found.items() if "head" not in n}, expected)


def test_a_grid_that_is_no_square_needs_its_size(tmp_path, convert, refusal) -> None:
    state = build(VIT, img_size=(32, 64)).state_dict()
    source = save(tmp_path / "wide.pth", state)
    assert "do not tell img_size" in refusal(source)
    convert(source, tmp_path / "out.pth", "--to", "mmseg", "--arch", "img_size=[32,64]")
    assert read_header(tmp_path / "out.pth").architecture["img_size"] == [32, 64]
    assert "pos_embed (1, 9, 64) instead of" in refusal(source, "--arch", "img_size=[32,32]")


def segmentor(path: Path, cfg: str) -> Path:
    """A dense model with a head of one tensor, and what a run says about it."""
    state = {f"backbone.{n}": t for n, t in build(SWIN, dense=True).state_dict().items()}
    state["decode_head.conv_seg.weight"] = torch.ones(2, 4, 1, 1)
    meta = {"dataset_meta": {"classes": ("sky", "sea")}, "epoch": 7, "cfg": cfg}
    return save(path, {"state_dict": state, "meta": meta, "optimizer": {"lr": 1.0}})


def test_a_whole_model_keeps_its_other_tensors_and_its_classes(tmp_path, convert) -> None:
    source = segmentor(tmp_path / "run.pth", "model = build()\n")
    out = convert(source, tmp_path / "out.pth", "--to", "mmseg")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["state_dict"]["decode_head.conv_seg.weight"].eq(1).all()
    assert found["meta"]["dataset_meta"] == {"classes": ["sky", "sea"]}
    assert found["meta"]["epoch"] == 7 and "optimizer" not in found
    assert "cfg" not in found["meta"] and "note: the config in the file is left out" in out
    assert f"load_from = {str(tmp_path / 'out.pth')!r}" in out
    convert(source, tmp_path / "bare.pth", "--to", "mmseg", "--head", "drop")
    assert not any("decode_head" in name for name in read(tmp_path / "bare.pth").tensors)


@pytest.mark.parametrize("always", [True, False])
def test_a_note_says_where_the_stock_swin_predicts_otherwise(always, tmp_path, convert) -> None:
    backbone = f"dict(type='tlalign_mm.SwinTransformer', always_shift={always})"
    source = segmentor(tmp_path / "run.pth", f"model = dict(backbone={backbone})\n")
    out = convert(source, tmp_path / "out.pth", "--to", "mmseg")
    assert ("without always_shift" in out) != always


def test_a_note_says_that_the_mm_libraries_read_no_safetensors(swin, tmp_path, convert) -> None:
    assert (
        ".safetensors"
        in convert(swin, tmp_path / "o.safetensors", "--to", "mmseg").split("note: ")[-1]
    )
    assert "note: " not in convert(swin, tmp_path / "o.pth", "--to", "mmseg")


def test_the_printed_line_for_timm_loads_the_file(tmp_path, convert) -> None:
    backbone = MODELS.build(
        {"type": "tlalign_mm.VisionTransformer", "arch": "deit-tiny", "out_indices": ()}
    )
    source = save(tmp_path / "deit.pth", backbone.state_dict())
    out = convert(source, tmp_path / "out.pth", "--to", "timm", "--img-size", 64)
    names: dict = {}
    exec("import timm\n" + out.splitlines()[-1], names)
    assert names["model"].pos_embed.shape == (1, 17, 192)
    expected = backbone.state_dict()["blocks.11.mlp.fc2.weight"]
    assert torch.equal(names["model"].state_dict()["blocks.11.mlp.fc2.weight"], expected)
