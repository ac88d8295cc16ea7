"""Time and peak memory of steps that are compared with each other.

Absolute times say little on a shared machine; ratios of steps that ran one after the other, round
by round, do. Memory is measured in a process of its own for each step.
"""

import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], None]


def alternate(
    steps: Mapping[str, Step], rounds: int, device: str = "cpu", warmup: int = 1
) -> Iterator[dict[str, float]]:
    """Run all steps round by round, in turning order.

    Args:
        steps: What to time, by name.
        rounds: How many rounds to yield.
        device: ``cpu`` or ``cuda``.
        warmup: Rounds that are run and not yielded.

    Yields:
        Seconds of each step in this round.
    """
    names = list(steps)
    for i in range(warmup + rounds):
        seconds = dict.fromkeys(names, 0.0)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            gc.collect()
            _synchronize(device)
            start = time.perf_counter()
            steps[name]()
            _synchronize(device)
            seconds[name] = time.perf_counter() - start
        if i >= warmup:
            yield seconds


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def summarize(rounds: Sequence[Mapping[str, float]], base: str) -> dict[str, dict[str, float]]:
    """Median seconds of each step, and the median over rounds of its ratio to ``base``."""
    return {
        name: {
            "seconds": statistics.median(r[name] for r in rounds),
            "time_ratio": statistics.median(r[name] / r[base] for r in rounds),
            "rounds": len(rounds),
        }
        for name in rounds[0]
    }


def peak_memory(build: Callable[..., Step], *args: Any, device: str = "cpu") -> float:
    """Build a step in a new process, run it twice, and say the most memory that it took.

    Args:
        build: A function of a module; called with ``args`` it returns the step.
        args: Its arguments.
        device: ``cpu``: growth of the process's resident memory since torch was imported;
            ``cuda``: what the allocator held at most.

    Returns:
        MiB, weights, gradients and optimizer states included.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report_peak, args=(sender, build, args, device))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"Measuring the memory of {build.__name__}{args} failed.") from None
    finally:
        child.join()


def _report_peak(sender: Any, build: Callable[..., Step], args: tuple, device: str) -> None:
    before = _peak(device)
    step = build(*args)
    step()
    step()
    sender.send(_peak(device) - before)


def _peak(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.is_file():  # Linux; its ru_maxrss would count the parent process as well
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10  # KiB
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a figure depends on: versions, threads and the device."""
    versions = {}
    for name in ("torch", "timm", "onedl-mmsegmentation", "onedl-mmdetection"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        **versions,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record at once or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(partial, path)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a table in Markdown."""
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if value == 0:
            return "0"
        if abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
