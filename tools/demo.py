"""The whole chain on real handwritten digits, on one CPU, in minutes.

Prepares the data, pretrains a small Swin with area labels and with TL-Align, trains UperNet with
mmsegmentation's own tools/train.py and Cascade Mask R-CNN with mmdetection's, each from random
weights and from the TL-Align backbone, then writes summary.json and report.html. What is done is
not done again; an interrupted step goes on where its last checkpoint left it.

Example:
    python tools/demo.py --work-dir work_dirs/demo
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tlalign_mm.analysis.curves import read_last
from tlalign_mm.engine.child_runs import ChildRun, train_side_by_side
from tlalign_mm.engine.launch import ToolError, run_tool

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("data/digits")
PRETRAIN = Path("configs/pretrain")
UPERNET = Path("configs/upernet")
CASCADE = Path("configs/cascade_mask_rcnn")
CONFIGS = {
    "pretrain_area": PRETRAIN / "swin-digits_cutmix_1xb32-20e_digits.py",
    "pretrain_tl_align": PRETRAIN / "swin-digits_tlalign_1xb32-20e_digits.py",
    "segmentation_scratch": UPERNET / "swin-digits_upernet_1xb8-300_scenes-128x128.py",
    "segmentation_pretrained": UPERNET / "swin-digits-tlalign_upernet_1xb8-300_scenes-128x128.py",
    "detection_scratch": CASCADE / "swin-digits_cascade-mask-rcnn_1xb4-200_scenes-128x128.py",
    "detection_pretrained": CASCADE
    / "swin-digits-tlalign_cascade-mask-rcnn_1xb4-200_scenes-128x128.py",
}
EXPECTED_SECONDS = {  # on two CPU cores; only the time left depends on it
    "data": 10,
    "pretrain": 130,
    "segmentation": 130,
    "detection": 115,
    "report": 15,
}
FREE_BYTES = 10**9
MOST_THREADS = 8  # of a run; more do not help networks this small
PACKAGES = (
    "tlalign-mm torch torchvision timm onedl-mmengine onedl-mmcv onedl-mmsegmentation "
    "onedl-mmdetection mmengine mmcv-lite mmcv mmsegmentation mmdet numpy scikit-learn"
).split()


class Score(NamedTuple):
    """A figure of the summary: where it is reported, and what turns it into percent."""

    key: str
    factor: float


SCORES = {
    "pretrain": {"top1": Score("accuracy/top1", 1)},
    "segmentation": {"mIoU": Score("mIoU", 1)},
    "detection": {
        "bbox_mAP": Score("coco/bbox_mAP", 100),
        "segm_mAP": Score("coco/segm_mAP", 100),
    },
}


class Progress:
    """One line that says where the demo is and how long it will still take."""

    def __init__(self, finished: set[str]) -> None:
        self.finished = finished  # steps that earlier calls did
        self.started = time.monotonic()
        self.spent: dict[str, float] = {}  # seconds of each step that this call took part in
        self.last_line = 0.0

    def start(self, step: str) -> None:
        """Begin a step."""
        self.started = time.monotonic()
        self.update(step, {})

    def update(self, step: str, shares: dict[str, float]) -> None:
        """Rewrite the line; where output is no terminal, add one every 15 seconds."""
        number = list(EXPECTED_SECONDS).index(step) + 1
        runs = "  ".join(f"{name} {share:4.0%}" for name, share in shares.items())
        left = f"about {self._left(step, shares) / 60:.0f} min left in all"
        line = f"[{number}/{len(EXPECTED_SECONDS)}] {step:<13}{runs:<34}{left}"
        if sys.stdout.isatty():
            print(f"\r{line:<96}", end="", flush=True)
        elif time.monotonic() - self.last_line > 15 or not shares:
            self.last_line = time.monotonic()
            print(line, flush=True)

    def finish(self, step: str, outcome: str = "done in") -> float:
        """End a step and return its seconds."""
        seconds = time.monotonic() - self.started
        self.spent[step] = seconds
        number = list(EXPECTED_SECONDS).index(step) + 1
        line = f"[{number}/{len(EXPECTED_SECONDS)}] {step:<13}{outcome} {seconds:.0f} s"
        print(f"\r{line:<96}" if sys.stdout.isatty() else line, flush=True)
        return seconds

    def _left(self, step: str, shares: dict[str, float]) -> float:
        pace = self._pace()
        expected, elapsed = EXPECTED_SECONDS[step] * pace, time.monotonic() - self.started
        share = min(shares.values(), default=0.0)
        here = elapsed / share - elapsed if share > 0.1 else max(expected - elapsed, 0.0)
        later = list(EXPECTED_SECONDS)[list(EXPECTED_SECONDS).index(step) + 1 :]
        waiting = [EXPECTED_SECONDS[name] for name in later if name not in self.finished]
        return here + pace * sum(waiting)

    def _pace(self) -> float:
        """How much slower than expected the trained steps were, 1 before the first."""
        trained = {k: s for k, s in self.spent.items() if k in SCORES and s > 5}
        expected = sum(EXPECTED_SECONDS[step] for step in trained)
        return sum(trained.values()) / expected if trained else 1.0


def child_run(name: str, work_dir: Path) -> ChildRun:
    """The command of one training run; the dense ones are the stock tools of their library."""
    step, config = name.split("_", 1)[0], CONFIGS[name]
    folder = work_dir / name
    tool = {"segmentation": stock_tool("mmseg"), "detection": stock_tool("mmdet")}.get(step)
    options = {
        "segmentation": [f"val_evaluator.output_dir={folder / 'predictions'}"],
        "detection": [f"val_evaluator.outfile_prefix={folder / 'predictions'}"],
    }.get(step, [])
    if name.endswith("_pretrained"):
        backbone = work_dir / "pretrain_tl_align/backbone.safetensors"
        options = [*options, f"model.backbone.init_cfg.checkpoint={backbone}"]
    command = [sys.executable, str(tool or "tools/train.py"), str(config), "--resume"]
    command += ["--work-dir", str(folder), *(["--cfg-options", *options] if options else [])]
    return ChildRun(name, command, config, folder)


def stock_tool(package: str) -> Path:
    """``tools/train.py`` inside an installed mm library.

    Raises:
        FileNotFoundError: If the library is not installed.
    """
    spec = find_spec(package)
    if spec is None:
        raise FileNotFoundError(f"{package} is not installed; run `make install`.")
    return Path(spec.submodule_search_locations[0]) / ".mim/tools/train.py"


def call_tool(tool: str, *arguments: str) -> None:
    """Run another tool of this folder.

    Raises:
        ToolError: If it fails; it has said why.
    """
    status = subprocess.run([sys.executable, tool, *arguments]).returncode
    if status:
        raise ToolError(f"{tool} ended with status {status}; mend it, then run this again.")


def check_room(work_dir: Path) -> None:
    """Fail early where nothing can be written.

    Raises:
        OSError: If the folder cannot be written or the disk is nearly full.
    """
    for folder in (work_dir, DATA.parent):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable; make it so or name another folder.")
        if shutil.disk_usage(folder).free < FREE_BYTES:
            raise OSError(f"Less than 1 GB is free on the disk of {folder}; free some first.")


def step_runs(step: str, work_dir: Path) -> list[ChildRun]:
    """The training runs of a step, the baseline first."""
    return [child_run(name, work_dir) for name in CONFIGS if name.startswith(step)]


def train_step(step: str, work_dir: Path, progress: Progress) -> float:
    """Train the runs of a step side by side and return all seconds spent on it so far."""
    runs = step_runs(step, work_dir)
    spent = work_dir / f"{step}.seconds"
    before = float(spent.read_text()) if spent.is_file() else 0.0
    if all(run.is_done for run in runs):
        return before
    threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // len(runs)))

    def report(shares: dict[str, float]) -> None:
        progress.update(step, {name.removeprefix(step + "_"): s for name, s in shares.items()})

    progress.start(step)
    outcome = "stopped after"
    try:
        train_side_by_side(runs, threads, report)
        outcome = "done in"
    finally:
        total = before + progress.finish(step, outcome)
        spent.write_text(f"{total:.1f}")
    return total


def summarize(work_dir: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Collect the last figures of all runs, in percent."""
    summary: dict[str, Any] = {}
    for name in CONFIGS:
        step, variant = name.split("_", 1)
        summary.setdefault(step, {})[variant] = {
            figure: round(read_last(work_dir / name, score.key) * score.factor, 2)
            for figure, score in SCORES[step].items()
        }
    summary["seconds"] = {step: round(value, 1) for step, value in seconds.items()}
    summary["versions"] = {"python": sys.version.split()[0], **installed_versions()}
    return summary


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def print_table(summary: dict[str, Any]) -> None:
    """Print the figures, a line each."""
    print(f"\n{'':<16}{'figure':<12}{'baseline':>20}{'TL-Align':>12}")
    for step, figures in SCORES.items():
        (first, baseline), (_, ours) = summary[step].items()
        for figure in figures:
            left = f"{first} {baseline[figure]:.2f}"
            print(f"{step:<16}{figure + ' %':<12}{left:>20}{ours[figure]:>12.2f}")
    total = sum(summary["seconds"].values())
    print(f"{'all':<16}{'seconds':<12}{total:>20.0f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("work_dirs/demo"), help="where everything goes"
    )
    work_dir = parser.parse_args().work_dir
    os.chdir(ROOT)  # the configs' paths are seen from there
    check_room(work_dir)
    finished = {step for step in SCORES if all(run.is_done for run in step_runs(step, work_dir))}
    progress, seconds = Progress(finished), {}
    progress.start("data")
    call_tool("tools/prepare_digits.py", "--out", str(DATA))
    seconds["data"] = progress.finish("data")
    for step in SCORES:
        seconds[step] = train_step(step, work_dir, progress)
    summary_file, report_file = work_dir / "summary.json", work_dir / "report.html"
    trained = max((work_dir / name / "done").stat().st_mtime for name in CONFIGS)
    if not all(f.is_file() and f.stat().st_mtime > trained for f in (summary_file, report_file)):
        progress.start("report")
        write_json(summary_file, summarize(work_dir, seconds))
        call_tool("tools/demo_report.py", str(work_dir))
        progress.finish("report")
    print_table(json.loads(summary_file.read_text()))
    print(f"Pictures: {report_file}\nFigures:  {summary_file}")


if __name__ == "__main__":
    run_tool(main)
