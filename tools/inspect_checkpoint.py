"""Say what a checkpoint file is, without running anything of it or reading its numbers.

Examples:
  python tools/inspect_checkpoint.py work_dirs/run/epoch_20.pth
  python tools/inspect_checkpoint.py model.safetensors --json

Format and size; whether the file is plain data, and what it asks for where it is not; whose names
the tensors have, and all possible readings where there are several; the network and its fields,
with those marked that tensors do not tell; what lies beside the weights. Ends with status 2 only
where the file cannot be read at all.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from tlalign_mm.engine.launch import run_tool

if TYPE_CHECKING:
    from tlalign_mm.checkpoints import Checkpoint, Header

FIRST = 6  # names that are printed of a long list


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SRC", help="file to read, or an index of shards")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    found = inspect(args.source)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    lines = list(_lines(found))
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        print(f"{title:{width}}  {text}")


def inspect(path: str) -> dict[str, Any]:
    """What a file is, in plain values.

    Raises:
        CheckpointError: If it is missing or damaged, or holds no weights.
    """
    import torch

    from tlalign_mm.checkpoints import Checkpoint, read_header

    header = read_header(path)
    tensors = {
        name: torch.empty(shape, dtype=header.dtypes[name], device="meta")
        for name, shape in header.shapes.items()
    }
    file = Checkpoint(tensors, header.layout, header.architecture, header.weights)
    return {
        "file": path,
        "format": header.format,
        "size": header.size,
        "safe": not header.unsafe,
        "unsafe": list(header.unsafe),
        "weights": header.weights,
        **_counts(header),
        **(_networks(file, path) if tensors else {"readings": [], "error": None}),
        "keys": list(tensors)[:FIRST],
        "beside": dict(header.beside),
        "meta": {k: v for k, v in header.meta.items() if isinstance(v, int | float | str)},
        "classes": _classes(header.meta),
    }


def _counts(header: "Header") -> dict[str, Any]:
    floating = [prod(s) for n, s in header.shapes.items() if header.dtypes[n].is_floating_point]
    kinds = Counter(str(dtype).removeprefix("torch.") for dtype in header.dtypes.values())
    return {"tensors": len(header.shapes), "parameters": sum(floating), "dtypes": dict(kinds)}


def _networks(file: "Checkpoint", path: str) -> dict[str, Any]:
    """Every reading of the names, or why there is none."""
    from tlalign_mm.checkpoints import CheckpointError, backbone_part
    from tlalign_mm.checkpoints.convert import HEADS
    from tlalign_mm.checkpoints.layouts import detect

    try:
        part = backbone_part(file.tensors, None, path)
    except CheckpointError as error:
        return {"readings": [], "error": str(error)}
    heads = [name for name in part.rest if name.startswith(HEADS)]
    rest = [name for name in part.rest if name not in heads]
    found = [reading.name for reading in detect([*part.tensors, *heads], rest)]
    layouts = [file.layout] if file.layout else found
    return {
        "prefix": part.prefix,
        "heads": dict(Counter(name.split(".")[0] for name in part.rest)),
        "readings": [_reading(file, path, layout) for layout in layouts],
        "error": None if layouts else "none of the known networks",
    }


def _reading(file: "Checkpoint", path: str, layout: str) -> dict[str, Any]:
    from tlalign_mm.backbones.rebuild import published_name
    from tlalign_mm.checkpoints import CheckpointError, read_weights

    try:
        weights = read_weights(file, path, layout=layout)
    except CheckpointError as error:
        return {"layout": layout, "error": str(error)}
    fields, assumed = weights.architecture
    head = weights.tensors.get("head.weight")
    return {
        "layout": layout,
        "names": str(weights.layout),
        "arch": published_name(fields),
        "architecture": fields,
        "assumed": list(assumed),
        "head": None if head is None else len(head),
        "unexplained": list(weights.translation.unknown),
        "error": None,
    }


def _classes(meta: Mapping[str, Any]) -> list[str] | None:
    dataset = meta.get("dataset_meta")
    dataset = dataset if isinstance(dataset, Mapping) else meta
    found = dataset.get("classes", dataset.get("CLASSES"))
    return [str(name) for name in found] if isinstance(found, list) else None


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Titles and what is to be said."""
    yield "file", f"{found['file']}: {found['format']}, {found['size'] / 1e6:.1f} MB"
    if found["safe"]:
        yield "safe", "yes, plain data"
    else:
        yield "safe", f"NO, it asks for {_list(found['unsafe'])}; nothing of that was run"
    if found["weights"]:
        yield "weights", f"{found['weights']} of model and ema, which are both there"
    kinds = ", ".join(f"{kind} {count}" for kind, count in found["dtypes"].items())
    yield "tensors", f"{found['tensors']} ({kinds}), {found['parameters'] / 1e6:.2f} M parameters"
    for reading in found["readings"]:
        yield from _reading_lines(reading)
    if len(found["readings"]) > 1:
        yield "note", "several readings are possible; choose by --from or init_cfg's layout"
    if found["error"]:
        yield "network", f"unknown: {found['error']}; first names {_list(found['keys'])}"
    if found.get("prefix"):
        yield "prefix", found["prefix"]
    if found.get("heads"):
        yield "heads", ", ".join(f"{name} ({n} tensors)" for name, n in found["heads"].items())
    if found["classes"]:
        yield "classes", f"{len(found['classes'])}: {_list(found['classes'])}"
    if found["beside"]:
        yield "beside", ", ".join(f"{key}: {word}" for key, word in found["beside"].items())
    short = {k: v for k, v in found["meta"].items() if len(str(v)) <= 40}
    if short:
        yield "meta", ", ".join(f"{key}={value}" for key, value in short.items())


def _reading_lines(reading: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if reading["error"]:
        yield "names", f"{reading['layout']}, but: {reading['error']}"
        return
    yield "names", reading["names"]
    fields = dict(reading["architecture"])
    name = reading["arch"] or f"a {fields['type']} of no published size"
    del fields["type"]
    yield "network", f"{name}: {', '.join(f'{key}={value}' for key, value in fields.items())}"
    if reading["assumed"]:
        yield "assumed", f"{', '.join(reading['assumed'])}: as published, tensors do not tell"
    if reading["head"]:
        yield "classifier", f"{reading['head']} classes"
    if reading["unexplained"]:
        yield "unexplained", _list(reading["unexplained"])


def _list(names: Sequence[str]) -> str:
    more = f", … and {len(names) - FIRST} more" if len(names) > FIRST else ""
    return ", ".join(names[:FIRST]) + more


if __name__ == "__main__":
    run_tool(main)
