"""Convert a checkpoint from one library's names to another's, and account for every tensor.

Examples:
  python tools/convert_checkpoint.py deit_small.pth deit_small_mmseg.pth --to mmseg --verify
  python tools/convert_checkpoint.py swin_tiny.safetensors swin_tiny_mmdet.pth --to mmdet
  python tools/convert_checkpoint.py work_dirs/run/iter_80000.pth stock.pth --to mmseg
  python tools/convert_checkpoint.py deit.pth deit_384.pth --to timm --img-size 384

SRC is read whatever its format, wrappers and prefixes are; whose names it has and which network it
is are told by its tensors. A whole segmentor or detector stays whole: its other tensors, classes
and config go along, with the backbone replaced. DST is a .safetensors or a .pth file, written whole
or not at all. Nothing of a file is run unless --trust says so.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tlalign_mm.checkpoints.tables import LAYOUTS
from tlalign_mm.engine.launch import run_tool

if TYPE_CHECKING:  # the backbones take seconds to import, which a wrong option need not wait for
    from tlalign_mm.checkpoints import Checkpoint
    from tlalign_mm.engine.conversion import Converted, Request

STOCK = ("mmseg", "mmdet", "mmpretrain")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC", help="file to read, or an index of shards")
    parser.add_argument("target", metavar="DST", help="file to write: .safetensors, .pth or .pt")
    parser.add_argument("--to", required=True, choices=(*LAYOUTS, "mm"), help="whose names")
    parser.add_argument(
        "--from", dest="layout", choices=LAYOUTS, help="whose names SRC has, where two are possible"
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=[],
        metavar="NAME | KEY=VALUE",
        help="published architecture or single fields, for what tensors do not tell: "
        "deit-small, num_heads=6, img_size=[224,336]",
    )
    parser.add_argument(
        "--weights", choices=("model", "ema"), help="of a file with both (default: ema)"
    )
    parser.add_argument("--prefix", help="what stands before the backbone's names in SRC")
    parser.add_argument(
        "--head",
        choices=("keep", "drop"),
        default="keep",
        help="a classifier's head, or all of a dense model but its backbone (default: keep)",
    )
    parser.add_argument(
        "--img-size", nargs="+", type=int, metavar="N", help="resize position embeddings: H [W]"
    )
    parser.add_argument("--window-size", type=int, metavar="N", help="resize tables of Swin's bias")
    parser.add_argument(
        "--verify", action="store_true", help="run both models and compare their features"
    )
    parser.add_argument("--force", action="store_true", help="write over an existing DST")
    parser.add_argument("--trust", action="store_true", help="run the code that SRC asks for")
    parser.add_argument(
        "--no-strict", action="store_true", help="go on where tensors stay unexplained"
    )
    args = parser.parse_args(argv)
    if args.img_size and len(args.img_size) > 2:
        parser.error("--img-size takes one or two numbers: H [W]")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    from tlalign_mm.checkpoints import write
    from tlalign_mm.engine.conversion import check_target, convert

    check_target(args.source, args.target, args.force)
    done = convert(args.source, _request(args))
    backbone = _backbone(done)
    checkpoint = _with_config(done, backbone)
    print(done.report)
    for note in _notes(args.target, done, checkpoint):
        print(f"note: {note}")
    if args.verify:
        _verify(done)
    wrapper = "model" if done.layout.name == "official" else "state_dict"
    write(args.target, checkpoint, wrapper, overwrite=args.force)
    print(f"Wrote {args.target}: {done.layout}. Use it by:")
    print("\n".join(_usage(done, args.target, backbone)))


def _request(args: argparse.Namespace) -> "Request":
    from mmengine.config import DictAction

    from tlalign_mm.engine.conversion import Request

    names = [value for value in args.arch if "=" not in value]
    if len(names) > 1:
        raise ValueError(f"--arch takes one name, not {', '.join(names)}.")
    pairs = [value for value in args.arch if "=" in value]
    fields = argparse.Namespace(fields={})
    try:
        DictAction(["--arch"], "fields", nargs="+")(None, fields, pairs)
    except AssertionError as error:  # of brackets that do not match
        raise ValueError(f"--arch {' '.join(pairs)} cannot be read; write KEY=[1,2].") from error
    size = args.img_size and (args.img_size[0], args.img_size[-1])
    return Request(
        to=args.to,
        layout=args.layout,
        prefix=args.prefix,
        weights=args.weights,
        arch=names[0] if names else None,
        fields=fields.fields,
        keep_head=args.head == "keep",
        img_size=size,
        window_size=args.window_size,
        strict=not args.no_strict,
        trust=args.trust,
    )


def _backbone(done: "Converted") -> dict[str, Any] | None:
    """Config of the backbone that takes the weights in an mm library."""
    from tlalign_mm.engine.usage import carry, our_backbone

    if done.layout.name == "tlalign_mm":
        return carry(done, our_backbone(done))
    if done.layout.name not in STOCK:
        return None
    from tlalign_mm.proof.stock import stock_config

    fields = done.checkpoint.architecture
    return carry(done, stock_config(fields, done.layout.name, done.checkpoint.tensors))


def _with_config(done: "Converted", backbone: dict[str, Any] | None) -> "Checkpoint":
    """What to write, a whole model's config with its new backbone included."""
    from tlalign_mm.engine.config_text import with_backbone

    text = done.source.meta.get("cfg")
    changed = with_backbone(text, backbone) if backbone and done.is_whole else None
    if changed is None:
        return done.checkpoint
    return done.checkpoint._replace(meta={**done.checkpoint.meta, "cfg": changed})


def _notes(target: str, done: "Converted", checkpoint: "Checkpoint") -> Iterator[str]:
    """What the user should know beside the report."""
    from tlalign_mm.engine.usage import is_ours

    family, library = done.layout.family, done.layout.name
    fields, assumed = done.weights.architecture
    if told := ", ".join(f"{key}={fields[key]}" for key in assumed):
        yield f"{told} as published, tensors do not tell; give another value by --arch."
    if library in STOCK and target.endswith(".safetensors"):
        yield "the mm libraries' own loaders read no .safetensors; name DST .pth for them."
    if done.is_whole and "cfg" in done.source.meta and "cfg" not in checkpoint.meta:
        yield "the config in the file is left out, for it has no model.backbone of plain values."
    if library in STOCK and "tlalign_mm" in checkpoint.meta.get("cfg", ""):
        yield "the config still names tlalign_mm, outside the backbone; remove that for training."
    if not done.is_whole or library not in ("mmseg", "mmdet"):
        return
    ours = done.config if done.config and is_ours(done.config) else None
    if "Swin" in family and ours and not ours.get("always_shift"):
        yield (
            "trained without always_shift, predictions differ where a stage's map fits into one "
            "window: the stock Swin shifts there too."
        )
    if family == "PyramidVisionTransformer" and ours:
        yield "mmdetection's norms have 1e-6 where this package has 1e-5; predictions differ a bit."


def _verify(done: "Converted") -> None:
    """Compare the models of SRC and of the result; nothing is written where they differ."""
    from tlalign_mm.proof.verify import verify

    found = verify(done.file, done.source, done.checkpoint)
    print(found)
    found.check()


def _usage(done: "Converted", target: str, backbone: dict[str, Any] | None) -> list[str]:
    from tlalign_mm.engine.usage import mm_lines, torch_lines

    return mm_lines(done, target, backbone) if backbone else torch_lines(done, target)


if __name__ == "__main__":
    run_tool(main)
