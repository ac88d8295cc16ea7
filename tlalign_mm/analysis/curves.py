"""Training curves from the scalars that mmengine's LocalVisBackend writes."""

import json
from pathlib import Path

from matplotlib.axes import Axes

Curve = list[tuple[int, float]]


def read_curve(work_dir: str | Path, key: str) -> Curve:
    """Read one figure over the steps of a run; a resumed run continues its earlier parts.

    Args:
        work_dir: Work dir of the run.
        key: Name of the figure, for example ``loss`` or ``accuracy/top1``.

    Returns:
        (step, value) in the order of the steps; what was computed twice counts the later time.
    """
    points: dict[int, float] = {}
    for file in sorted(Path(work_dir).glob("*/vis_data/scalars.json")):
        for line in file.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a run that was killed leaves half a line at the end
                continue
            if key in record:
                points[record["step"]] = record[key]
    return sorted(points.items())


def read_last(work_dir: str | Path, key: str) -> float:
    """Read the last value of a figure.

    Raises:
        ValueError: If the run never reported it.
    """
    curve = read_curve(work_dir, key)
    if not curve:
        raise ValueError(
            f"The run in {work_dir} reported no {key!r}; delete the folder, run again."
        )
    return curve[-1][1]


def plot_curves(axes: Axes, curves: dict[str, Curve], xlabel: str, ylabel: str) -> None:
    """Plot named curves in the order given."""
    for name, curve in curves.items():
        steps, values = zip(*curve, strict=True) if curve else ((), ())
        axes.plot(steps, values, label=name, marker="." if len(curve) < 30 else None)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend()
