"""Compare our backbones with their references: timm's models and the mm libraries' own backbones.

Examples:
  python tools/parity.py
  python tools/parity.py --arch swin-tiny pvt-tiny --json parity.json
  python tools/parity.py --conversions
  python tools/parity.py --conversions --arch swin-tiny

A line for each architecture: the largest absolute difference of pooled features (timm) or maps
(mmsegmentation's and mmdetection's own backbones; in units of their standard deviation where that
exceeds 1), of labels against a replay on the reference with explicit attention, and of class
attention. Weights are random and the same on both sides. `shift` is how far the aligned label went
from the area label.

With --conversions a line for each architecture and layout: the weights go there and come back bit
for bit, but for what the layout has no place for (`dropped`), and the model that is built there
makes the same of two images as ours (`features`: the largest difference of the maps of all stages
and, where both have them, norms, pooled features and logits). `own_rule` is the difference where
that library computes otherwise with the same weights: timm antialiases positions that it resizes,
mmdetection's PVT has another eps in some norms.

Ends with status 1 where a difference exceeds the tolerance or weights do not come back.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlalign_mm.analysis.measure import environment, table, write_json
from tlalign_mm.engine.launch import run_tool
from tlalign_mm.proof.conversions import conversions
from tlalign_mm.proof.parity import comparisons


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    archs = sorted({name.split()[0] for name in (*comparisons(), *conversions())})
    parser.add_argument("--arch", nargs="+", choices=archs, metavar="ARCH", help=", ".join(archs))
    parser.add_argument(
        "--conversions", action="store_true", help="convert checkpoints to every layout and back"
    )
    parser.add_argument("--tolerance", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.conversions:
        found = [row for rows in _run(conversions(), args.arch) for row in rows]
        failed = [row for row in found if not row.passes(args.tolerance)]
        worst = max(found, key=lambda row: row.features or 0.0)
        end = f"{worst.features or 0:.1e} ({worst.arch}, {worst.layout}); {len(failed)} failed"
    else:
        found = _run(comparisons(), args.arch)
        failed = [row for row in found if not row.largest <= args.tolerance]
        worst = max(found, key=lambda row: row.largest)
        end = f"{worst.largest:.1e} ({worst.arch}, {worst.reference})"
    rows = [row._asdict() for row in found]
    print(table(rows))
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    if args.json:
        write_json(args.json, {"environment": environment(), "rows": rows})
    print(f"largest difference: {end}")
    if failed:
        sys.exit(1)


def _run(jobs: Mapping[str, Callable[[], Any]], archs: Sequence[str] | None) -> list[Any]:
    """Results of the jobs of these architectures, with a line of progress on a terminal."""
    wanted = {n: job for n, job in jobs.items() if not archs or n.split()[0] in archs}
    found = []
    for i, (name, job) in enumerate(wanted.items()):
        if sys.stderr.isatty():
            print(f"\r\033[K{i + 1} of {len(wanted)}: {name}", end="", file=sys.stderr, flush=True)
        found.append(job())
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return found


if __name__ == "__main__":
    run_tool(main)
