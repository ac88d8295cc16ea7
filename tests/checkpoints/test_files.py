"""Checkpoint files: what is written is read back, and nothing else is taken for a checkpoint."""

import os
import pickle

import pytest
import torch

from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read, write

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_file_says_what_it_holds(tmp_path) -> None:
    architecture = {"type": "SwinTransformer", "depths": [2, 2]}
    path = write(
        tmp_path / "new" / "x.safetensors", Checkpoint(TENSORS, "tlalign_mm", architecture)
    )
    found = read(path)
    assert same(found.tensors, TENSORS)
    assert (found.layout, found.architecture) == ("tlalign_mm", architecture)
    assert os.listdir(path.parent) == ["x.safetensors"], "no partial file is left"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.safetensors", Checkpoint(TENSORS))

    def full_disk(tensors: dict, partial: object, metadata: dict) -> None:
        partial.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("tlalign_mm.checkpoints.files.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        write(path, Checkpoint({"other": torch.zeros(1)}))
    assert same(read(path).tensors, TENSORS)
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"state_dict": t}, lambda t: {"model": t}])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.backbone."])
def test_wrapped_and_prefixed_pickles_are_read(tmp_path, wrap, prefix) -> None:
    content = {prefix + name: tensor for name, tensor in TENSORS.items()}
    torch.save(wrap(content), tmp_path / "x.pth")
    assert same(read(tmp_path / "x.pth").tensors, TENSORS)


def test_of_a_whole_model_only_the_backbone_is_read(tmp_path) -> None:
    content = {"backbone.a": torch.ones(1), "decode_head.b": torch.zeros(1)}
    torch.save({"state_dict": content}, tmp_path / "x.pth")
    assert list(read(tmp_path / "x.pth").tensors) == ["a"]


class Evil:
    def __reduce__(self):
        return os.mkdir, (Evil.target,)


def test_code_in_a_file_never_runs(tmp_path) -> None:
    Evil.target = str(tmp_path / "ran")
    torch.save({"state_dict": TENSORS, "evil": Evil()}, tmp_path / "x.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Evil()))
    for name in ("x.pth", "raw.pth"):
        with pytest.raises(CheckpointError, match="would run code"):
            read(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize(
    ("cut", "message"), [(0, "is empty"), (100, "incomplete"), (None, "does not exist")]
)
def test_files_that_are_not_whole_are_refused_by_name(tmp_path, suffix, cut, message) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix == "pth":
        torch.save(TENSORS, path)
    else:
        write(path, Checkpoint(TENSORS))
    content = path.read_bytes()
    path.unlink() if cut is None else path.write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_file_without_tensors_is_refused(tmp_path) -> None:
    torch.save({"epoch": 3}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        read(tmp_path / "x.pth")
