"""The chain at its shortest: pretrain, export, load into the stock tools of mmseg and mmdet."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import find_config, pretrain_arguments
from tlalign_mm.checkpoints import read

pytestmark = pytest.mark.integration

SHORT = [
    "train_cfg.max_iters=2",
    "train_cfg.val_interval=2",
    "default_hooks.logger.interval=1",
    "default_hooks.checkpoint.interval=1",
    "train_dataloader.batch_size=2",
]
TASKS = {
    "mmseg": ("upernet", "ade20k", {"mIoU"}),
    "mmdet": ("cascade_mask_rcnn", "coco/", {"coco/bbox_mAP", "coco/segm_mAP"}),
}


def scalars(work_dir: Path) -> list[dict]:
    files = sorted(work_dir.glob("*/vis_data/scalars.json"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def data_options(digits: Path, layout: str) -> list[str]:
    root = f"{digits}/{layout}"
    options = [f"{split}_dataloader.dataset.data_root={root}" for split in ("train", "val")]
    if layout == "coco/":
        options.append(f"val_evaluator.ann_file={root}annotations/instances_val2017.json")
    return options


def test_pretraining_logs_ratios_and_exports_the_backbone(pretrained: Path) -> None:
    log = scalars(pretrained)
    training = [line for line in log if "loss" in line]
    assert training and all(
        {"lam_area", "lam_target", "lam_rmse"} <= line.keys() for line in training
    )
    assert [line["accuracy/top1"] for line in log if "accuracy/top1" in line]
    for name in ("backbone.safetensors", "backbone_best.safetensors"):
        checkpoint = read(pretrained / name)
        assert checkpoint.layout == "tlalign_mm"
        assert checkpoint.architecture["type"] == "SwinTransformer"
        assert "norm.weight" in checkpoint.tensors and "head.weight" not in checkpoint.tensors


def test_the_export_is_the_backbone_of_the_last_checkpoint(pretrained: Path) -> None:
    exported = read(pretrained / "backbone.safetensors").tensors
    run = torch.load(pretrained / "epoch_2.pth", weights_only=False)["state_dict"]
    for name, tensor in exported.items():
        assert torch.equal(tensor, run[f"backbone.{name}"])


def test_resuming_goes_on_at_the_next_epoch(digits, pretrained, tmp_path, run_tool) -> None:
    first = run_tool("tools/train.py", *pretrain_arguments(digits, tmp_path, epochs=1))
    assert first.returncode == 0, first.stderr[-2000:]
    arguments = pretrain_arguments(digits, tmp_path, epochs=2)
    resumed = run_tool("tools/train.py", arguments[0], "--resume", *arguments[1:])
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert re.findall(r"Epoch\(train\)\s+\[(\d)\]", resumed.stdout + resumed.stderr) == ["2"]


def test_testing_a_checkpoint_gives_the_accuracy_of_the_run(digits, pretrained, tmp_path, run_tool):
    config = find_config("pretrain", "swin-digits_tlalign_*.py")
    result = run_tool(
        "tools/test.py",
        config,
        pretrained / "epoch_2.pth",
        *("--work-dir", tmp_path),
        *("--cfg-options", f"test_dataloader.dataset.data_root={digits / 'imagenet'}"),
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (found,) = re.findall(r"accuracy/top1: ([\d.]+)", result.stdout + result.stderr)
    expected = [line["accuracy/top1"] for line in scalars(pretrained) if "accuracy/top1" in line]
    assert float(found) == pytest.approx(expected[-1], abs=1e-3)


@pytest.mark.parametrize("library", TASKS)
def test_the_stock_tool_trains_from_the_exported_backbone(
    library, digits, pretrained, tmp_path, run_tool
) -> None:
    folder, layout, figures = TASKS[library]
    checkpoint = pretrained / "backbone.safetensors"
    result = run_tool(
        library,
        find_config(folder, "*-tlalign_*.py"),
        *("--work-dir", tmp_path, "--cfg-options", *SHORT, *data_options(digits, layout)),
        f"model.backbone.init_cfg.checkpoint={checkpoint}",
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-2000:]
    assert f"Loaded {checkpoint}" in output
    assert "99.9" in output.split(f"Loaded {checkpoint}")[1].split("% of the parameters")[0]
    log = scalars(tmp_path)
    assert all(line["loss"] == line["loss"] for line in log if "loss" in line), "no NaN"
    assert figures <= log[-1].keys()
    assert (tmp_path / "iter_2.pth").is_file()


@pytest.mark.parametrize("library", TASKS)
def test_a_missing_backbone_file_ends_the_stock_tool_with_its_name(
    library, digits, tmp_path, run_tool
) -> None:
    folder, layout, _ = TASKS[library]
    result = run_tool(
        library,
        find_config(folder, "*-tlalign_*.py"),
        *("--work-dir", tmp_path, "--cfg-options", *SHORT, *data_options(digits, layout)),
        "model.backbone.init_cfg.checkpoint=nowhere.safetensors",
    )
    assert result.returncode != 0
    assert "Checkpoint nowhere.safetensors does not exist" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("tool", ["tools/train.py", "tools/test.py"])
def test_a_missing_config_is_one_sentence(tool, run_tool) -> None:
    result = run_tool(tool, "configs/nowhere.py", *(["x.pth"] if "test" in tool else []))
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: Config configs/nowhere.py does not exist; name a file under configs/, seen from "
        "here."
    )


def test_missing_data_is_one_sentence(tmp_path, run_tool) -> None:
    arguments = pretrain_arguments(tmp_path / "digits", tmp_path / "run")
    result = run_tool("tools/train.py", *arguments)
    assert result.returncode == 2
    assert "digits/imagenet/train does not exist; prepare the data" in result.stderr
    assert "Traceback" not in result.stderr
