"""Measure what labels cost, and how fast the backbones are, as ratios of steps run in turn.

Examples:
  python tools/benchmark.py labels --arch deit-small --batch 16
  python tools/benchmark.py labels --arch deit-small --batch 4 --size 384 512 --json labels.json
  python tools/benchmark.py labels --arch swin-tiny --batch 128 --device cuda --amp bf16
  python tools/benchmark.py dense --arch deit-small --size 512
  python tools/benchmark.py attend --tokens 196 1024

labels  a training step with area, TransMix and TL-Align labels, and with TL-Align as published,
        against plain CutMix on timm's model
dense   forward pass and training step of a backbone against mmsegmentation's or mmdetection's own,
        with the same weights
attend  ways to compute attention that moves labels, forward and backward

Times are medians over rounds in which every step ran once, one after the other; ratios are medians
of the ratios within a round. Memory is the peak of a process of its own, weights, gradients and
optimizer states included.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tlalign_mm.analysis import attend_steps, dense_steps, label_steps
from tlalign_mm.analysis.measure import (
    Step,
    alternate,
    environment,
    peak_memory,
    summarize,
    table,
    write_json,
)
from tlalign_mm.engine.launch import ToolError, run_tool
from tlalign_mm.proof.twins import TWINS

Row = dict[str, Any]
DENSE_ARCHS = [f"{name}-{size}" for name in ("deit", "swin") for size in ("tiny", "small", "base")]
DENSE_ARCHS += [f"pvt-{size}" for size in ("tiny", "small", "medium", "large")]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    cuda = torch.cuda.is_available()
    shared.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    shared.add_argument("--rounds", type=int, default=10, help="rounds that count (default: 10)")
    shared.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    labels = commands.add_parser("labels", parents=[shared], help="what labels cost in training")
    labels.add_argument("--arch", choices=list(TWINS), default="deit-small")
    labels.add_argument("--batch", type=int, default=16, help="images a step, even (default: 16)")
    labels.add_argument("--size", type=int, nargs="+", default=[224], help="sides of the images")
    labels.add_argument("--amp", choices=["bf16", "fp16"], help="autocast to this precision")
    dense = commands.add_parser("dense", parents=[shared], help="against the stock backbones")
    dense.add_argument("--arch", choices=DENSE_ARCHS, default="deit-small")
    dense.add_argument("--batch", type=int, default=2, help="images a step (default: 2)")
    dense.add_argument("--size", type=int, default=512, help="side of the images (default: 512)")
    attend = commands.add_parser("attend", parents=[shared], help="ways to move labels")
    attend.add_argument("--tokens", type=int, nargs="+", default=[196, 1024])
    attend.add_argument("--batch", type=int, default=4, help="images a step (default: 4)")
    attend.add_argument("--amp", choices=["bf16", "fp16"], help="tensors of this precision")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.batch < 1:
        parser.error("--rounds and --batch must be at least 1")
    if args.command == "labels" and args.batch % 2:
        parser.error(f"--batch {args.batch} must be even: timm's mixing pairs the images")
    return args


def compare(
    names: Sequence[str], build: Callable[..., Step], arguments: tuple, args: argparse.Namespace
) -> list[Row]:
    """Time and memory of the steps ``build(name, *arguments)``; the first one is the base."""
    memory = {}
    for name in names:
        say(f"memory of {name}")
        memory[name] = peak_memory(build, name, *arguments, device=args.device)
    steps = {name: build(name, *arguments) for name in names}
    rounds = []
    for seconds in alternate(steps, args.rounds, args.device):
        rounds.append(seconds)
        left = (args.rounds - len(rounds)) * sum(seconds.values())
        say(f"round {len(rounds)} of {args.rounds}, {left:.0f} s left")
    say("")
    return [
        {
            "method": name,
            "ms": 1000 * summary["seconds"],
            "x time": summary["time_ratio"],
            "MiB": memory[name],
            "x memory": memory[name] / memory[names[0]],
            "rounds": summary["rounds"],
        }
        for name, summary in summarize(rounds, names[0]).items()
    ]


def say(message: str) -> None:
    """Show progress in one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def measure_labels(args: argparse.Namespace) -> list[Row]:
    rows = []
    for size in args.size:
        arguments = (args.arch, args.batch, size, args.amp, args.device)
        result = compare(label_steps.methods(args.arch), label_steps.build_step, arguments, args)
        rows += [{"arch": args.arch, "size": size, "batch": args.batch, **r} for r in result]
    return rows


def measure_dense(args: argparse.Namespace) -> list[Row]:
    rows = []
    for mode in ("forward", "step"):
        arguments = (args.arch, mode, args.batch, args.size, args.device)
        result = compare(dense_steps.NAMES, dense_steps.build_step, arguments, args)
        rows += [{"arch": args.arch, "size": args.size, "what": mode, **r} for r in result]
    return rows


def measure_attend(args: argparse.Namespace) -> list[Row]:
    rows = []
    for tokens in args.tokens:
        arguments = (args.batch, tokens, args.amp, args.device)
        result = compare(list(attend_steps.METHODS), attend_steps.build_step, arguments, args)
        rows += [{"tokens": tokens, "batch": args.batch, **r} for r in result]
    return rows


def main() -> None:
    args = parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ToolError("--device cuda, but torch sees no CUDA device; leave the option out.")
    measure = {"labels": measure_labels, "dense": measure_dense, "attend": measure_attend}
    rows = measure[args.command](args)
    print(table(rows))
    where = environment(args.device)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    if args.json:
        command = [a for a in sys.argv[1:] if a not in ("--json", str(args.json))]
        write_json(args.json, {"command": command, "environment": where, "rows": rows})


if __name__ == "__main__":
    run_tool(main)
