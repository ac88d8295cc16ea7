"""The demo: its commands, its summary and its messages (training itself is replaced)."""

import json
import re
import sys
from pathlib import Path

import pytest

from tlalign_mm.engine.launch import ToolError
from tools import demo

FIGURES = {
    "pretrain": {"accuracy/top1": 97.0},
    "segmentation": {"mIoU": 30.0},
    "detection": {"coco/bbox_mAP": 0.25, "coco/segm_mAP": 0.2},
}


def finished_run(work_dir: Path, name: str) -> None:
    vis_data = work_dir / name / "20260101_000000/vis_data"
    vis_data.mkdir(parents=True)
    record = {"step": 1, **FIGURES[name.split("_")[0]]}
    (vis_data / "scalars.json").write_text(json.dumps(record) + "\n")
    (work_dir / name / "done").touch()


@pytest.fixture
def calls(tmp_path, monkeypatch) -> list:
    """Run the demo with child processes replaced: trainings finish at once, tools are recorded."""
    made: list = []

    def train(runs, threads, report) -> None:
        made.append([run.title for run in runs])
        report({run.title: 0.5 for run in runs})
        for run in runs:
            finished_run(tmp_path, run.title)

    def call(tool: str, *arguments: str) -> None:
        made.append(tool)
        if tool.endswith("demo_report.py"):
            (tmp_path / "report.html").write_text("report")

    monkeypatch.setattr(demo, "train_side_by_side", train)
    monkeypatch.setattr(demo, "call_tool", call)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--work-dir", str(tmp_path)])
    return made


def test_configs_exist_and_pair_a_baseline_with_ours() -> None:
    for name, config in demo.CONFIGS.items():
        assert (demo.ROOT / config).is_file()
        assert ("tlalign" in config.name) == name.endswith(("_tl_align", "_pretrained"))


def test_dense_runs_are_the_stock_tools_and_start_from_the_tl_align_backbone(tmp_path) -> None:
    for step, library in (("segmentation", "mmseg"), ("detection", "mmdet")):
        command = demo.child_run(f"{step}_pretrained", tmp_path).command
        assert command[1].endswith(f"{library}/.mim/tools/train.py")
        assert "--resume" in command
        checkpoint = tmp_path / "pretrain_tl_align/backbone.safetensors"
        assert f"model.backbone.init_cfg.checkpoint={checkpoint}" in command
        scratch = demo.child_run(f"{step}_scratch", tmp_path).command
        assert not any("init_cfg" in word for word in scratch)


def test_summary_and_table_hold_percent(calls, tmp_path, capsys) -> None:
    demo.main()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["pretrain"] == {"area": {"top1": 97.0}, "tl_align": {"top1": 97.0}}
    assert summary["segmentation"]["pretrained"] == {"mIoU": 30.0}
    assert summary["detection"]["scratch"] == {"bbox_mAP": 25.0, "segm_mAP": 20.0}
    assert set(summary["seconds"]) == {"data", "pretrain", "segmentation", "detection"}
    assert summary["versions"]["torch"]
    printed = capsys.readouterr().out
    assert re.search(r"segmentation\s+mIoU %\s+scratch 30.00\s+30.00", printed)
    assert "min left in all" in printed and "report.html" in printed


def test_a_second_call_trains_and_draws_nothing(calls, tmp_path, capsys) -> None:
    demo.main()
    del calls[:]
    demo.main()
    assert calls == ["tools/prepare_digits.py"], "only the data is looked at"
    printed = capsys.readouterr().out
    assert "top1 %" in printed
    assert printed.split("about ")[-1].startswith("0 min left"), "finished steps are not counted"


def test_a_run_that_was_deleted_is_trained_again_and_the_report_renewed(calls, tmp_path) -> None:
    demo.main()
    del calls[:]
    (tmp_path / "detection_scratch/done").unlink()
    (tmp_path / "detection_scratch").rename(tmp_path / "old")
    (tmp_path / "detection_pretrained").rename(tmp_path / "older")
    demo.main()
    assert ["detection_scratch", "detection_pretrained"] in calls
    assert calls[-1] == "tools/demo_report.py"


def test_a_full_disk_is_said_before_anything_starts(calls, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "FREE_BYTES", 10**18)
    with pytest.raises(OSError, match="Less than 1 GB is free"):
        demo.main()
    assert not calls


def test_a_missing_library_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="mmnothing is not installed; run `make install`"):
        demo.stock_tool("mmnothing")


def test_a_failing_tool_ends_the_demo(monkeypatch) -> None:
    with pytest.raises(ToolError, match="nowhere.py ended with status 2"):
        demo.call_tool("nowhere.py")


def test_seconds_of_an_interrupted_step_are_added_up(calls, tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "train_side_by_side", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.main()
    assert re.search(r"pretrain +stopped after 0 s", capsys.readouterr().out)
    (tmp_path / "pretrain.seconds").write_text("100.0")
    demo.main()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seconds"]["pretrain"] >= 100
