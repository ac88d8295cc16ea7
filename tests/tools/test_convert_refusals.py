"""tools/convert_checkpoint.py on bad input: one sentence, status 2, the target untouched."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints.samples import Call, same, save_shards
from tests.checkpoints.samples import save_zip as save
from tests.checkpoints.toys import build, classifier
from tlalign_mm.checkpoints import read, read_header
from tools import convert_checkpoint

TOOL = Path(convert_checkpoint.__file__)
SWIN, VIT = "SwinTransformer", "VisionTransformer"


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
        (("--arch", "num_heads=[1,2"), "num_heads=[1,2 cannot be read"),
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
    monkeypatch.setattr("tlalign_mm.proof.verify.verify.__defaults__", (None, -1.0))
    assert "do not use the result" in refusal(swin, "--verify", to="official")


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
