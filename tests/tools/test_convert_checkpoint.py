"""tools/convert_checkpoint.py through its command line: results, reports, and bad input."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from tests.checkpoints.samples import Call, same, save_shards
from tests.checkpoints.toys import build, classifier
from tlalign_mm.checkpoints import read, read_header
from tlalign_mm.engine.launch import run_tool
from tools import convert_checkpoint

TOOL = Path(convert_checkpoint.__file__)
SWIN, VIT = "SwinTransformer", "VisionTransformer"


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture
def swin(tmp_path) -> Path:
    return save(tmp_path / "swin.pth", {"state_dict": classifier(SWIN)})


@pytest.fixture
def vit(tmp_path) -> Path:
    return save(tmp_path / "vit.pth", {"model": classifier(VIT)})


@pytest.fixture
def convert(capsys) -> Callable[..., str]:
    """Run the tool; returns what it prints."""

    def run(*arguments: object) -> str:
        convert_checkpoint.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys, tmp_path) -> Callable[..., str]:
    """Run the tool on bad input; returns its sentence, once it has left the target alone."""

    def run(source: Path, *arguments: object, to: str = "timm") -> str:
        target = tmp_path / "target.pth"
        target.write_bytes(b"before")
        argv = [source, target, "--to", to, "--force", *arguments]
        with pytest.raises(SystemExit) as stop:
            run_tool(lambda: convert_checkpoint.main([str(argument) for argument in argv]))
        assert stop.value.code == 2
        assert target.read_bytes() == b"before" and not list(tmp_path.glob("*.partial"))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and line.endswith(".")
        return line

    return run


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "pvt-tiny"), "--arch pvt-tiny is no VisionTransformer, but the file is"),
        (("--arch", "deit-small"), "embed_dim is 384 by --arch and 64 by its tensors"),
        (("--arch", "depth=3"), "depth is 3 by --arch and 2 by its tensors"),
        (("--arch", "windows=3"), "--arch names windows, which a VisionTransformer does not have"),
        (("--arch", "num_heads=5"), "num_heads[0]=5 must divide 64 channels"),
        (("--arch", "num_heads=many"), "--arch"),
        (("--arch", "deit-tiny", "deit-small"), "--arch takes one name"),
        (("--window-size", "7"), "leave --window-size out"),
        (("--prefix", "neck"), "has the prefix 'neck.'"),
        (("--weights", "ema"), "holds no ema weights"),
    ],
)
def test_options_that_contradict_the_file_are_named(arguments, message, vit, refusal) -> None:
    assert message in refusal(vit, *arguments)


def without(state: dict, *patterns: str) -> dict:
    return {n: t for n, t in state.items() if not any(re.match(p, n) for p in patterns)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without(s, r"blocks\.1\.mlp\.fc2"), "blocks.1.mlp.fc2.weight"),
        (lambda s: without(s, r"blocks\.0\."), "is missing between its neighbours"),
        (lambda s: s | {"blocks.1.gamma": torch.ones(2)}, "unexplained ['blocks.1.gamma']"),
        (lambda s: s | {"blocks.0.mlp.fc1.bias": torch.ones(7)}, "odd sizes, blocks.0.mlp.fc1"),
        (lambda s: {"conv1.weight": torch.ones(2, 2)}, "none of the known networks"),
        (lambda s: s | {"norm.bias": torch.full((64,), torch.nan)}, "NaN or infinity in norm.bias"),
    ],
    ids=["part missing", "hole", "unknown tensor", "odd size", "other network", "nan"],
)
def test_a_file_that_is_no_whole_network_is_refused(change, message, tmp_path, refusal) -> None:
    line = refusal(save(tmp_path / "odd.pth", change(classifier(VIT))))
    assert message in line and "odd.pth" in line


def test_no_strict_leaves_out_what_nothing_explains(tmp_path, convert) -> None:
    odd = save(tmp_path / "odd.pth", classifier(VIT) | {"blocks.1.gamma": torch.ones(2)})
    out = convert(odd, tmp_path / "out.pth", "--to", "timm", "--no-strict")
    assert "unexplained (1): blocks.1.gamma" in out
    assert same(read(tmp_path / "out.pth").tensors, classifier(VIT))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html><html>404", "holds HTML"),
        (b"Not found", "holds text"),
        (None, "is incomplete or damaged"),
    ],
)
def test_what_is_no_checkpoint_is_refused(content, message, vit, tmp_path, refusal) -> None:
    source = tmp_path / "download.pth"
    source.write_bytes(vit.read_bytes()[:-2000] if content is None else content)
    line = refusal(source)
    assert message in line and "download.pth" in line


def test_a_missing_file_or_shard_is_named(tmp_path, refusal) -> None:
    assert "nowhere.pth does not exist" in refusal(tmp_path / "nowhere.pth")
    index = save_shards(tmp_path / "shards", build(VIT).state_dict())
    (tmp_path / "shards/model-1.safetensors").unlink()
    assert "model-1.safetensors" in refusal(index)


def test_a_pickle_that_would_run_code_is_refused_unless_trusted(tmp_path, convert, refusal) -> None:
    mark = tmp_path / "ran"
    source = save(tmp_path / "bad.pth", {"model": classifier(VIT), "x": Call(os.mkdir, str(mark))})
    assert "--trust" in refusal(source) and not mark.exists()
    convert(source, tmp_path / "out.pth", "--to", "timm", "--trust")
    assert mark.exists()


def test_a_full_disk_leaves_nothing_behind(vit, refusal, monkeypatch) -> None:
    def fill(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fill)
    assert "No space left on device" in refusal(vit)


def test_no_file_is_overwritten_without_being_told_to(vit, tmp_path, convert) -> None:
    target = tmp_path / "out.pth"
    target.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"out.pth exists already; .*--force"):
        convert(vit, target, "--to", "timm")
    assert target.read_bytes() == b"mine"
    with pytest.raises(ValueError, match="is the file to be read"):
        convert(vit, vit, "--to", "timm", "--force")
    with pytest.raises(ValueError, match="must end in .safetensors"):
        convert(vit, tmp_path / "out.bin.gz", "--to", "timm")
    convert(vit, target, "--to", "timm", "--force")
    assert same(read(target).tensors, classifier(VIT))


def test_verification_is_printed_and_a_difference_keeps_the_target(
    swin, tmp_path, convert, refusal, monkeypatch
) -> None:
    out = convert(swin, tmp_path / "out.pth", "--to", "official", "--verify")
    assert "the same network" in out and "largest difference" in out
    monkeypatch.setattr("tlalign_mm.analysis.verify.verify.__defaults__", (None, -1.0))
    assert "do not use the result" in refusal(swin, "--verify", to="official")


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


def test_the_program_ends_with_status_0_or_2(vit, tmp_path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, TOOL, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    good = run(vit, tmp_path / "out.safetensors", "--to", "mm")
    assert good.returncode == 0, good.stderr
    assert read_header(tmp_path / "out.safetensors").layout == "mmseg"
    bad = run(tmp_path / "none.pth", tmp_path / "other.pth", "--to", "mm")
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1
    assert not (tmp_path / "other.pth").exists()
