"""Child runs: progress from the log, side by side, resumed, and failing with a sentence."""

import sys

import pytest

from tlalign_mm.engine.child_runs import (
    ChildRun,
    _start,
    prepare,
    read_progress,
    train_side_by_side,
)
from tlalign_mm.engine.launch import ToolError


def child(tmp_path, name: str, code: str) -> ChildRun:
    config = tmp_path / "config.py"
    config.write_text("train_cfg = dict(max_iters=4)\n")
    return ChildRun(name, [sys.executable, "-c", code], config, tmp_path / name)


@pytest.mark.parametrize(
    ("log", "max_epochs", "share"),
    [
        ("", None, 0.0),
        ("INFO - Iter(train) [ 50/400]  lr: 1\n... Iter(train) [100/400]  lr: 1", None, 0.25),
        ("Iter(val) [25/25]", None, 0.0),
        ("Epoch(train)   [2][20/40]  lr: 1", 4, 0.375),
        ("Epoch(train) [4][40/40]", 4, 1.0),
    ],
)
def test_progress_is_read_from_the_log(log: str, max_epochs: int | None, share: float) -> None:
    assert read_progress(log, max_epochs) == share


def test_runs_go_side_by_side_and_are_done_once(tmp_path) -> None:
    # each waits for the other's file: only runs that overlap can both end
    code = (
        "import pathlib, time\n"
        "d = pathlib.Path({root!r}); (d / '{me}.up').touch()\n"
        "while not (d / '{other}.up').exists(): time.sleep(0.01)\n"
        "print('Iter(train) [4/4]')"
    )
    names = [("a", "b"), ("b", "a")]
    runs = [child(tmp_path, m, code.format(root=str(tmp_path), me=m, other=o)) for m, o in names]
    train_side_by_side(runs, 1, lambda shares: None)
    assert all(run.is_done for run in runs)
    (tmp_path / "a.up").unlink()
    train_side_by_side(runs, 1, lambda shares: None)
    assert not (tmp_path / "a.up").exists(), "what is done is not run again"


def test_a_failing_run_ends_the_others_and_names_its_log(tmp_path) -> None:
    fails = child(tmp_path, "fails", "raise SystemExit('the disk is full')")
    endless = child(tmp_path, "endless", "import time; time.sleep(3600)")
    with pytest.raises(ToolError, match=r"fails ended with status 1: the disk is full \(log: "):
        train_side_by_side([fails, endless], 1, lambda shares: None)
    assert not fails.is_done and not endless.is_done


def test_a_run_that_outlived_its_parent_is_not_started_twice(tmp_path) -> None:
    run = child(tmp_path, "run", "import time; time.sleep(3600)")
    prepare(run)
    orphan = _start(run, 1)
    try:
        with pytest.raises(ToolError, match="Another process is still training in .*/run; wait"):
            train_side_by_side([run], 1, lambda shares: None)
    finally:
        orphan.kill()
        orphan.wait()


def test_a_work_dir_of_other_settings_is_not_continued(tmp_path) -> None:
    prepare(child(tmp_path, "run", "pass"))
    prepare(child(tmp_path, "run", "pass"))
    with pytest.raises(ToolError, match="other settings; delete it"):
        prepare(child(tmp_path, "run", "print('another command')"))


def test_a_pointer_to_a_checkpoint_that_is_not_there_is_dropped(tmp_path) -> None:
    run = child(tmp_path, "run", "pass")
    run.work_dir.mkdir()
    pointer = run.work_dir / "last_checkpoint"
    for content in ("", str(run.work_dir / "iter_2.pth")):
        pointer.write_text(content)
        prepare(run)
        assert not pointer.exists()
    (run.work_dir / "iter_2.pth").touch()
    pointer.write_text(str(run.work_dir / "iter_2.pth"))
    prepare(run)
    assert pointer.exists()


def test_a_run_killed_in_its_last_validation_goes_back_one_checkpoint(tmp_path) -> None:
    run = child(tmp_path, "run", "pass")  # four iterations
    run.work_dir.mkdir()
    pointer = run.work_dir / "last_checkpoint"
    for number in (2, 3, 4):
        (run.work_dir / f"iter_{number}.pth").touch()
    pointer.write_text(str(run.work_dir / "iter_4.pth"))
    prepare(run)
    assert pointer.read_text().endswith("iter_3.pth")
    for number in (2, 3):
        (run.work_dir / f"iter_{number}.pth").unlink()
    pointer.write_text(str(run.work_dir / "iter_4.pth"))
    prepare(run)
    assert not pointer.exists(), "without an earlier checkpoint it starts anew"
