"""Written files are whole or not there, plain for every reader, and read back as they were."""

import errno
import importlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoints.samples import TENSORS, same
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read, write

MODULE = importlib.import_module(
    "tlalign_mm.checkpoints.write"
)  # the package's write is a function
ARCHITECTURE = {"type": "SwinTransformer", "depths": (2, 2), "drop": 0.1, "norm": None}
META = {"dataset_meta": {"classes": ("cat",), "palette": [[0, 1, 2]]}, "epoch": 3}
FULL = Checkpoint(TENSORS, "tlalign_mm", ARCHITECTURE, meta=META)
SUFFIXES = [".safetensors", ".pth", ".pt", ".bin"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_says_what_it_holds(suffix, tmp_path) -> None:
    path = write(tmp_path / "new" / f"x{suffix}", FULL)
    found = read(path)
    assert same(found.tensors, TENSORS)
    assert found.layout == "tlalign_mm"
    assert found.architecture == {**ARCHITECTURE, "depths": [2, 2]}
    assert found.meta == {"dataset_meta": {"classes": ["cat"], "palette": [[0, 1, 2]]}, "epoch": 3}
    assert os.listdir(path.parent) == [path.name], "no partial file is left"
    again = read(write(tmp_path / f"y{suffix}", found))
    assert same(again.tensors, TENSORS) and again[1:3] == found[1:3] and again.meta == found.meta


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_without_words_has_none(suffix, tmp_path) -> None:
    found = read(write(tmp_path / f"x{suffix}", Checkpoint(TENSORS)))
    assert (found.layout, found.architecture, found.meta) == (None, None, {})


def test_stock_torch_reads_what_is_written(tmp_path) -> None:
    content = torch.load(write(tmp_path / "x.pth", FULL), weights_only=True)
    assert same(content["state_dict"], TENSORS) and list(content) == ["state_dict", "meta"]
    assert content["meta"]["layout"] == "tlalign_mm" and content["meta"]["epoch"] == 3
    content = torch.load(write(tmp_path / "x.pth", FULL, wrapper="model"), weights_only=True)
    assert same(content["model"], TENSORS)
    content = torch.load(write(tmp_path / "x.pth", FULL, wrapper=None), weights_only=True)
    assert same(content, TENSORS)


def test_stock_safetensors_reads_what_is_written(tmp_path) -> None:
    path = write(tmp_path / "x.safetensors", FULL)
    assert same(load_file(path), TENSORS)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt" and metadata["layout"] == "tlalign_mm"
    assert json.loads(metadata["architecture"])["depths"] == [2, 2]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_tied_sliced_and_turned_tensors_are_written_whole(suffix, tmp_path) -> None:
    whole = torch.arange(6000.0).reshape(2, 3000)
    tensors = {
        "whole": whole,
        "tied": whole,
        "first": whole[0],
        "second": whole[1],
        "turned": whole.T,
        "expanded": whole[:1].expand(2, 3000),
        "scalar": torch.tensor(3, dtype=torch.int8),
        "parameter": torch.nn.Parameter(whole[:, :2]),
        "empty": torch.zeros(0, 3),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    path = write(tmp_path / f"x{suffix}", Checkpoint(tensors))
    assert same(read(path).tensors, tensors)
    one = write(tmp_path / f"y{suffix}", Checkpoint({"first": whole[0, :1]}))
    assert one.stat().st_size < 3000, "of a slice only the slice is written"


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_tensors_that_are_whole_are_not_copied(suffix, tmp_path, monkeypatch) -> None:
    written = {}
    owner, writer = {".pth": (torch, "save"), ".safetensors": (MODULE, "save_file")}[suffix]

    def spy(content: dict, path: Path, *_: object) -> None:
        written.update(content.get("state_dict", content))
        path.touch()

    monkeypatch.setattr(owner, writer, spy)
    write(tmp_path / f"x{suffix}", Checkpoint(TENSORS))
    assert all(written[k].data_ptr() == TENSORS[k].data_ptr() for k in TENSORS)


def test_other_suffixes_are_refused(tmp_path) -> None:
    for name in ("x.txt", "x", "x.pkl"):
        with pytest.raises(CheckpointError, match=r"must end in \.safetensors, \.pth, \.pt, \.bin"):
            write(tmp_path / name, FULL)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_an_existing_file_is_kept_where_asked(suffix, tmp_path) -> None:
    path = write(tmp_path / f"x{suffix}", FULL, overwrite=False)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"exists already; .* --force"):
        write(path, Checkpoint({"other": torch.ones(1)}), overwrite=False)
    assert path.read_bytes() == before
    write(path, Checkpoint({"other": torch.ones(1)}))
    assert list(read(path).tensors) == ["other"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_is_written_over_the_one_that_is_read(suffix, tmp_path) -> None:
    path = write(tmp_path / f"x{suffix}", FULL)
    found = read(path)
    write(path, found._replace(tensors=dict(reversed(found.tensors.items()))))
    assert same(read(path).tensors, TENSORS) and same(found.tensors, TENSORS)


@pytest.mark.parametrize(
    ("owner", "step"),
    [(torch, "save"), (MODULE, "save_file"), (os, "fsync"), (os, "replace")],
    ids=["torch.save", "save_file", "os.fsync", "os.replace"],
)
def test_a_disk_that_fills_leaves_the_old_file(owner, step, tmp_path, monkeypatch) -> None:
    path = tmp_path / ("x.safetensors" if step == "save_file" else "x.pth")
    before = write(path, FULL).read_bytes()

    def full_disk(*arguments: object) -> None:
        for partial in (a for a in arguments if isinstance(a, Path) and a != path):
            partial.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, step, full_disk)
    with pytest.raises(CheckpointError) as error:
        write(path, Checkpoint({"other": torch.zeros(1)}))
    assert f"Cannot write {path} (No space left on device)" in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


LIMITED = """
import resource, signal, sys, torch
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(sys.argv[1], Checkpoint({"x": torch.zeros(1_000_000)}))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs limits of file sizes")
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_real_end_of_space_leaves_the_old_file(suffix, tmp_path) -> None:
    path = write(tmp_path / f"x{suffix}", FULL)
    before = path.read_bytes()
    run = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"Cannot write {path} (") and run.stdout.count("\n") == 1
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_numbers_that_safetensors_lacks_are_one_sentence(tmp_path) -> None:
    checkpoint = Checkpoint({"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"x\.safetensors \(a type of number .* \.pth file"):
        write(tmp_path / "x.safetensors", checkpoint)
    assert not os.listdir(tmp_path)
    assert same(read(write(tmp_path / "x.pth", checkpoint)).tensors, checkpoint.tensors)


def test_an_interruption_leaves_no_partial_file(tmp_path, monkeypatch) -> None:
    def interrupted(content: dict, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x.pth", FULL)
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot write .*x\.pth \(.*\); free space or mend"):
        write(tmp_path / "file" / "x.pth", FULL)
