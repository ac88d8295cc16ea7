"""Two thousand damaged files: each is read or refused by our error, soon and in little memory."""

import argparse
import json
import random
import resource
import signal
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from tests.checkpoints.samples import FORMATS, TENSORS, repack, save_legacy, save_zip
from tlalign_mm.checkpoints import CheckpointError, backbone_part, check_finite, read, read_header

EACH = 100
MEGABYTE = 1024  # in the kilobytes that the system counts
CONTENT = {
    "model": OrderedDict({f"module.backbone.{k}": v for k, v in TENSORS.items()}),
    "model_ema": {**TENSORS, "half": torch.ones(4).half()[1:3], "steps": torch.tensor(3)},
    "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
    "args": argparse.Namespace(lr=0.1, name="é"),
    "hub": OrderedDict(loss=HistoryBuffer([1.0, 2.0], [1, 1])),
    "best": np.float64(0.5),
    "meta": {"classes": ("a", "b"), "epoch": 3},
}
NUMBERS = [0, 1, 255, -1, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 10**10]


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_at_start(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data[:1500]) + data[1500:]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Leave a part out, or put it in twice, or somewhere else."""
    a, b, c = (rng.randrange(len(data)) for _ in range(3))
    part = data[min(a, b) : min(a, b) + rng.randrange(1, 40)]
    return data[:c] + part + data[c + rng.choice([0, len(part)]) :]


def number(rng: random.Random, data: bytes) -> bytes:
    """Put an extreme number of a pickle, a header or a record in the place of another one."""
    form = rng.choice(["<B", "<H", "<i", "<q"])
    size = struct.calcsize(form)
    value = rng.choice(NUMBERS) % (1 << 8 * size)
    place = rng.randrange(len(data) - size)
    return data[:place] + value.to_bytes(size, "little") + data[place + size :]


def longer(rng: random.Random, pickled: bytes) -> bytes:
    """Replace a small number of a pickle, such as a length, by a large one."""
    places = [i for i in range(len(pickled) - 2) if pickled[i : i + 1] == b"K"]
    place = rng.choice(places)
    value = rng.choice(NUMBERS).to_bytes(9, "little", signed=True)
    return pickled[:place] + b"\x8a\x09" + value + pickled[place + 2 :]


def rename(rng: random.Random, data: bytes) -> bytes:
    """Change names inside without changing lengths."""
    names = [b"module", b"backbone", b"weight", b"torch", b"_rebuild", b"Storage", b"model", b"cpu"]
    names = [name for name in names if name in data]
    old = rng.choice(names)
    new = bytes(rng.choice(b"abcdefgh._/\x00\xff0") for _ in old)
    return data.replace(old, new, rng.choice([1, 2, -1]))


def header(rng: random.Random, data: bytes) -> bytes:
    """Change an entry of the header of a safetensors file; its length is right again."""
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    name = rng.choice(list(entries))
    change = rng.randrange(4)
    if change == 0 or name == "__metadata__":
        entries[rng.choice(["", "a", "__metadata__", "\ud800"])] = entries.pop(name)
    elif change == 1:
        entries[name]["dtype"] = rng.choice(["F64", "I8", "F4", "F8_E4M3", "x", None, 3])
    elif change == 2:
        entries[name]["shape"] = [rng.choice(NUMBERS) for _ in range(rng.randrange(3))]
    else:
        entries[name]["data_offsets"] = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def in_pickle(change: Callable[[random.Random, bytes], bytes]) -> Callable:
    """Change the pickle in a zip archive; its checksum is right again."""

    def changed(rng: random.Random, path: Path) -> None:
        repack(path, lambda name, data: change(rng, data) if name == "data.pkl" else data)

    return changed


def in_file(change: Callable[[random.Random, bytes], bytes]) -> Callable:
    def changed(rng: random.Random, path: Path) -> None:
        path.write_bytes(change(rng, path.read_bytes()))

    return changed


def in_names(rng: random.Random, path: Path) -> None:
    """Rename or lose records of a zip archive."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(records))
    data = records.pop(name)
    if rng.random() < 0.7:
        records[rng.choice(["x", "x/data.pkl", name + "0", "a/b/data.pkl", "é"])] = data
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, data)


CASES = [
    *[("zip", f"{c.__name__} in the pickle", in_pickle(c)) for c in (flip, splice, longer, rename)],
    ("zip", "records", in_names),
    *[("zip", c.__name__, in_file(c)) for c in (flip, cut, number)],
    *[("legacy", c.__name__, in_file(c)) for c in (flip_at_start, cut, splice, number, rename)],
    *[("tar", c.__name__, in_file(c)) for c in (flip, cut, number)],
    *[("safetensors", c.__name__, in_file(c)) for c in (flip, cut, number, header)],
    *[("shards", c.__name__, in_file(c)) for c in (flip, cut)],
]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """End what hangs with an error."""

    def stop(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(path: Path) -> tuple[str, str]:
    """Whether the header and the file are read or refused; the values of what is read are used."""
    results = []
    for reader in (read_header, read):
        try:
            found = reader(path)
            tensors = found.tensors if reader is read else found.shapes
            backbone_part(tensors)
            results.append("read")
            if reader is read:
                check_finite(tensors, "x")
        except CheckpointError as error:
            assert str(error).endswith(".") and "\n" not in str(error), str(error)
            results.append("refused")
    return results[0], results[1]


def test_there_are_two_thousand_files() -> None:
    assert EACH * len(CASES) >= 2000


@pytest.mark.parametrize(
    ("form", "change"), [c[::2] for c in CASES], ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_damaged_files_are_read_or_refused(form, change, tmp_path) -> None:
    flat = form in ("safetensors", "shards")
    path = FORMATS[form](tmp_path / "x", TENSORS if flat else CONTENT)
    sound = path.read_bytes()
    assert outcome(path) == ("read", "read")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = set()
    for seed in range(EACH):
        path.write_bytes(sound)
        change(random.Random(seed), path)
        with limit(seconds=20):
            seen.add(outcome(path))
    assert any("refused" in results for results in seen), "the damage goes unnoticed"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * MEGABYTE


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_a_claim_of_ten_gigabytes_takes_no_memory(save, tmp_path) -> None:
    path = save(tmp_path / "x.pth", {"x": torch.ones(200)})
    data = path.read_bytes()
    assert data.count(b"K\xc8") >= 2  # the lengths of storage and tensor
    large = b"J" + struct.pack("<i", 2_000_000_000)
    if save is save_zip:
        repack(path, lambda name, d: d.replace(b"K\xc8", large) if name == "data.pkl" else d)
    else:
        path.write_bytes(data.replace(b"K\xc8", large))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * MEGABYTE
