"""Compare our backbones with their references: timm's models and the stock dense backbones.

Examples:
  python tools/parity.py
  python tools/parity.py --arch swin-tiny pvt-tiny --json parity.json

A line for each architecture: the largest absolute difference of pooled features (timm) or maps
(mmsegmentation's and mmdetection's own backbones; in units of their standard deviation where that
exceeds 1), of labels against a replay on the reference with explicit attention, and of class
attention. Weights are random and the same on both sides. `shift` is how far the aligned label went
from the area label. Ends with status 1 where a difference exceeds the tolerance.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tlalign_mm.analysis.measure import environment, table, write_json
from tlalign_mm.analysis.parity import comparisons
from tlalign_mm.engine.launch import run_tool


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    archs = sorted({name.split()[0] for name in comparisons()})
    parser.add_argument("--arch", nargs="+", choices=archs, metavar="ARCH", help=", ".join(archs))
    parser.add_argument("--tolerance", type=float, default=1e-5, help="default: 1e-5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here as well")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    wanted = {
        name: compare
        for name, compare in comparisons().items()
        if not args.arch or name.split()[0] in args.arch
    }
    found = []
    for i, (name, compare) in enumerate(wanted.items()):
        if sys.stderr.isatty():
            print(f"\r\033[K{i + 1} of {len(wanted)}: {name}", end="", file=sys.stderr, flush=True)
        found.append(compare())
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    rows = [difference._asdict() for difference in found]
    print(table(rows))
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    if args.json:
        write_json(args.json, {"environment": environment(), "rows": rows})
    worst = max(found, key=lambda difference: difference.largest)
    print(f"largest difference: {worst.largest:.1e} ({worst.arch}, {worst.reference})")
    if not worst.largest <= args.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    run_tool(main)
