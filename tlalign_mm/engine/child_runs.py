"""Train in child processes, side by side, and see how far they are."""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mmengine.config import Config

from tlalign_mm.engine.launch import ToolError

ITERATIONS = re.compile(r"Iter\(train\)\s+\[\s*(\d+)/(\d+)\]")
EPOCHS = re.compile(r"Epoch\(train\)\s+\[(\d+)\]\[\s*(\d+)/(\d+)\]")
POLL_SECONDS = 0.5


class ChildRun(NamedTuple):
    """A training run with a command of its own.

    Attributes:
        title: Name for messages.
        command: Program and arguments; it must resume what lies in ``work_dir``.
        config: Path of the mm config that it trains.
        work_dir: Its work dir.
    """

    title: str
    command: list[str]
    config: Path
    work_dir: Path

    @property
    def log(self) -> Path:
        """Everything that the child printed."""
        return self.work_dir / "train.log"

    @property
    def is_done(self) -> bool:
        """Whether the run came to its end earlier."""
        return (self.work_dir / "done").is_file()


def prepare(run: ChildRun) -> None:
    """Create the work dir, or make sure that what lies there is this run and can be resumed.

    Raises:
        ToolError: If the work dir belongs to another command or another config.
    """
    run.work_dir.mkdir(parents=True, exist_ok=True)
    cfg = Config.fromfile(run.config)
    text = json.dumps(run.command[1:]) + cfg.pretty_text
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    stamp = run.work_dir / "run.sha256"
    if stamp.is_file() and stamp.read_text() != fingerprint:
        raise ToolError(
            f"{run.work_dir} was trained with other settings; delete it (rm -r {run.work_dir}) and "
            "run this again."
        )
    stamp.write_text(fingerprint)
    _mend_pointer(run.work_dir, cfg.train_cfg.get("max_epochs") or cfg.train_cfg.max_iters)


def _mend_pointer(work_dir: Path, length: int) -> None:
    """Make ``last_checkpoint`` name a checkpoint from which the run comes to its end.

    mmengine writes it after the checkpoint, so it may be cut off. And a run that was killed in its
    last validation must not resume at its very end: it would stop there without validating.
    """
    pointer = work_dir / "last_checkpoint"
    if not pointer.is_file():
        return
    last = Path(pointer.read_text())
    if last.is_file() and _number(last) < length:
        return
    kind = last.stem.split("_")[0]  # iter or epoch
    earlier = [p for p in work_dir.glob(f"{kind}_*.pth") if _number(p) < length]
    if last.is_file() and earlier:
        pointer.write_text(str(max(earlier, key=_number)))
    else:
        pointer.unlink()


def _number(checkpoint: Path) -> int:
    """Iteration or epoch in the name of a checkpoint, as in ``iter_200.pth``."""
    return int(checkpoint.stem.rsplit("_", 1)[1])


def read_progress(log: str, max_epochs: int | None) -> float:
    """Share of the training that a log of mmengine shows as done.

    Args:
        log: Text of the log.
        max_epochs: Epochs of the run, or None where it counts iterations.
    """
    if max_epochs is None:
        found = ITERATIONS.findall(log)
        return int(found[-1][0]) / int(found[-1][1]) if found else 0.0
    found = EPOCHS.findall(log)
    if not found:
        return 0.0
    epoch, iteration, length = map(int, found[-1])
    return (epoch - 1 + iteration / length) / max_epochs


def train_side_by_side(
    runs: list[ChildRun], threads: int, report: Callable[[dict[str, float]], None]
) -> None:
    """Train all runs at once and wait; one that fails, or an interruption, ends the others.

    Args:
        runs: What to train; those that are done are passed over.
        threads: CPU threads of each.
        report: Called twice a second with the share that each run has done.

    Raises:
        ToolError: If a run fails; its log is named.
    """
    waiting = [run for run in runs if not run.is_done]
    for run in waiting:
        prepare(run)
    epochs = {r.title: Config.fromfile(r.config).train_cfg.get("max_epochs") for r in waiting}
    starts = {run.title: run.log.stat().st_size if run.log.is_file() else 0 for run in waiting}
    children: dict[str, subprocess.Popen] = {}
    try:
        for run in waiting:
            children[run.title] = _start(run, threads)
        while any(child.poll() is None for child in children.values()):
            report({r.title: _progress(r, starts[r.title], epochs[r.title]) for r in waiting})
            for run in waiting:
                if children[run.title].poll():
                    raise ToolError(_failure(run, children[run.title].returncode))
            time.sleep(POLL_SECONDS)
    finally:
        for child in children.values():
            child.terminate()
            child.wait()
    for run in waiting:
        if children[run.title].returncode:
            raise ToolError(_failure(run, children[run.title].returncode))
        (run.work_dir / "done").touch()


def _start(run: ChildRun, threads: int) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with run.log.open("ab") as log:
        try:  # the child inherits the lock with its output, so it holds even if we are killed
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(
                f"Another process is still training in {run.work_dir}; wait for it or stop it, "
                "then run the same command again."
            ) from None
        return subprocess.Popen(
            run.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )


def _progress(run: ChildRun, start: int, max_epochs: int | None) -> float:
    with run.log.open("rb") as log:
        log.seek(start)
        return read_progress(log.read().decode(errors="replace"), max_epochs)


def _failure(run: ChildRun, status: int) -> str:
    lines = run.log.read_text(errors="replace").strip().splitlines() or ["no output"]
    return (
        f"{run.title} ended with status {status}: {lines[-1].strip()[:300]} (log: {run.log}); "
        "mend it, then run the same command again to continue."
    )
