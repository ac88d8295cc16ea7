"""tools/inspect_checkpoint.py says what a file is, and runs or reads nothing more of it."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from tests.checkpoints.samples import Call, save_shards
from tests.checkpoints.toys import build, classifier
from tlalign_mm.checkpoints import Checkpoint, read, read_weights, write, write_weights
from tlalign_mm.engine.launch import run_tool
from tools import inspect_checkpoint

SWIN, VIT = "SwinTransformer", "VisionTransformer"


@pytest.fixture
def inspect(capsys) -> Callable[[Path], tuple[str, dict]]:
    """Run the tool both ways; returns what it prints, and its JSON."""

    def run(path: Path) -> tuple[str, dict]:
        inspect_checkpoint.main([str(path)])
        text = capsys.readouterr().out
        inspect_checkpoint.main([str(path), "--json"])
        return text, json.loads(capsys.readouterr().out)

    return run


def save(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_a_classifier_of_timm_is_known_by_its_tensors(tmp_path, inspect) -> None:
    weights = read_weights(Checkpoint(classifier(SWIN)), "toy")
    tensors = write_weights(weights, "timm")[0].tensors
    text, found = inspect(save(tmp_path / "swin.pth", tensors))
    (reading,) = found["readings"]
    assert reading["layout"] == "timm" and reading["head"] == 5
    assert reading["architecture"]["depths"] == [2, 1] and reading["assumed"] == []
    assert found["format"] == "torch zip" and found["safe"] and found["prefix"] == ""
    assert found["tensors"] == len(tensors) and found["dtypes"] == {"float32": len(tensors)}
    assert found["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["size"] == (tmp_path / "swin.pth").stat().st_size
    assert "timm 0.9 and newer (this package uses the same names)" in text
    assert "embed_dim=24, depths=[2, 1]" in text


def test_a_published_architecture_has_its_name_and_what_is_assumed_is_said(
    tmp_path, inspect
) -> None:
    cfg = {"type": "tlalign_mm.VisionTransformer", "arch": "deit-tiny", "out_indices": ()}
    text, found = inspect(save(tmp_path / "deit.pth", MODELS.build(cfg).state_dict()))
    (reading,) = found["readings"]
    assert reading["arch"] == "deit-tiny" and reading["assumed"] == ["num_heads"]
    assert "official DeiT, TL-Align and TransMix use the same names" in text
    assert "num_heads: as published, tensors do not tell" in text


def test_a_run_of_a_segmentor_is_described_with_all_that_lies_beside(tmp_path, inspect) -> None:
    state = {f"backbone.{n}": t for n, t in build(SWIN, dense=True).state_dict().items()}
    state |= {"decode_head.conv_seg.weight": torch.ones(3, 4, 1, 1)}
    meta = {"epoch": 2, "iter": 40, "dataset_meta": {"classes": ("sky", "sea")}, "cfg": "x = 1\n"}
    content = {"state_dict": state, "optimizer": {"state": {}}, "meta": meta}
    content["ema_state_dict"] = {f"module.{n}": t for n, t in state.items()} | {
        "steps": torch.tensor(1)
    }
    text, found = inspect(save(tmp_path / "run.pth", content))
    assert found["weights"] == "ema" and "ema of model and ema" in text
    assert found["prefix"] == "backbone." and found["heads"] == {"decode_head": 1}
    assert found["readings"][0]["layout"] == "tlalign_mm"
    assert found["beside"] == {
        "optimizer": "dict",
        "meta": "dict",
        "ema_state_dict": "model weights",
    }
    assert found["classes"] == ["sky", "sea"] and "2: sky, sea" in text
    assert "epoch=2, iter=40" in text


def test_a_pretraining_run_of_this_package_has_our_names(tmp_path, inspect) -> None:
    named = {n if n.startswith("head") else f"backbone.{n}": t for n, t in classifier(SWIN).items()}
    _, found = inspect(save(tmp_path / "run.pth", {"state_dict": named, "args": Namespace(lr=1)}))
    (reading,) = found["readings"]
    assert (reading["layout"], reading["head"], reading["unexplained"]) == ("tlalign_mm", 5, [])
    assert found["beside"] == {"args": "Namespace"}


def test_of_a_safetensors_file_the_header_is_read_alone(tmp_path, inspect, monkeypatch) -> None:
    backbone = build(SWIN)
    path = write(
        tmp_path / "x.safetensors",
        Checkpoint(backbone.state_dict(), "tlalign_mm", backbone.architecture),
    )
    monkeypatch.setattr("tlalign_mm.checkpoints.shards.safe_open", None)
    _, found = inspect(path)
    assert found["format"] == "safetensors"
    assert found["readings"][0]["architecture"] == json.loads(json.dumps(backbone.architecture))


def test_shards_are_described_as_one_file(tmp_path, inspect) -> None:
    _, found = inspect(save_shards(tmp_path / "shards", build(VIT).state_dict()))
    assert found["format"] == "sharded safetensors"
    assert found["tensors"] == len(build(VIT).state_dict())


def test_both_readings_are_given_where_two_are_possible(tmp_path, inspect) -> None:
    weights = read_weights(Checkpoint(classifier(SWIN)), "toy")
    written = write_weights(weights, "mmpretrain", keep_head=False)[0].tensors
    bare = {name.removeprefix("backbone."): tensor for name, tensor in written.items()}
    text, found = inspect(save(tmp_path / "bare.pth", bare))
    assert [reading["layout"] for reading in found["readings"]] == ["mmseg", "mmpretrain"]
    assert "several readings are possible" in text


def test_an_unknown_network_is_said_to_be_so_with_its_first_names(tmp_path, inspect) -> None:
    text, found = inspect(save(tmp_path / "r50.pth", {"conv1.weight": torch.ones(4, 3, 7, 7)}))
    assert found["readings"] == [] and found["error"] == "none of the known networks"
    assert "unknown: none of the known networks; first names conv1.weight" in text


def test_a_network_with_a_hole_is_named_with_what_is_wrong(tmp_path, inspect) -> None:
    state = {n: t for n, t in build(VIT).state_dict().items() if not n.startswith("blocks.0")}
    text, found = inspect(save(tmp_path / "hole.pth", state))
    assert "missing between its neighbours" in found["readings"][0]["error"]
    assert "timm, but: " in text


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_an_unsafe_pickle_asks_for_is_named_and_not_run(wrapped, tmp_path, inspect) -> None:
    mark = tmp_path / "ran"
    call = Call(os.mkdir, str(mark))
    content = {"state_dict": build(VIT).state_dict(), "hook": call} if wrapped else call
    text, found = inspect(save(tmp_path / "bad.pth", content))
    assert not found["safe"] and found["unsafe"] == [f"{os.mkdir.__module__}.mkdir"]
    assert f"NO, it asks for {os.mkdir.__module__}.mkdir" in text
    assert bool(found["readings"]) == wrapped
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\3\4 and no more"])
def test_a_file_that_cannot_be_read_ends_with_status_2(content, tmp_path, capsys) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run_tool(lambda: inspect_checkpoint.main([str(path)]))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "x.pth" in line


def test_the_program_describes_what_the_converter_reads(tmp_path) -> None:
    path = save(tmp_path / "vit.pth", {"model": build(VIT).state_dict()})
    tool = Path(inspect_checkpoint.__file__)
    run = subprocess.run([sys.executable, tool, path, "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    fields = read_weights(read(path), str(path)).architecture.fields
    assert json.loads(run.stdout)["readings"][0]["architecture"] == fields
