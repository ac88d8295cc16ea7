"""Checkpoint files of every format are read, and what is none is refused in one sentence."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoints.samples import (
    CASES,
    FORMATS,
    TENSORS,
    repack,
    same,
    save_legacy,
    save_safetensors,
    save_shards,
    save_zip,
    write_sample,
)
from tlalign_mm.checkpoints import (
    CheckpointError,
    backbone_part,
    check_finite,
    read,
    read_header,
)

NAMES = {
    "zip": "torch zip",
    "legacy": "torch legacy",
    "tar": "torch tar",
    "safetensors": "safetensors",
    "shards": "sharded safetensors",
    "shards_bin": "sharded torch zip",
}


def sentence(path: Path) -> str:
    """The error for a file; reading its header gives the same."""
    errors = []
    for reader in (read, read_header):
        with pytest.raises(CheckpointError) as error:
            reader(path)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert errors[0].endswith(".") and "\n" not in errors[0]
    return errors[0]


@pytest.mark.parametrize(("form", "wrapper", "prefix"), CASES, ids=["-".join(c) for c in CASES])
def test_every_format_wrapper_and_prefix_gives_the_backbone(
    form, wrapper, prefix, tmp_path
) -> None:
    path = write_sample(tmp_path / "x", form, wrapper, prefix, TENSORS)
    assert same(backbone_part(read(path).tensors).tensors, TENSORS)
    header = read_header(path)
    assert header.format == NAMES[form] and not header.unsafe
    assert backbone_part(header.shapes).tensors == {k: tuple(t.shape) for k, t in TENSORS.items()}
    assert set(header.dtypes.values()) == {t.dtype for t in TENSORS.values()}


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_the_bytes_decide_and_not_the_suffix(form, tmp_path) -> None:
    for suffix in (".pth", ".safetensors", ".bin", ".anything", ""):
        path = FORMATS[form](tmp_path / f"x{suffix}", TENSORS)
        assert same(read(path).tensors, TENSORS)


@pytest.mark.parametrize("form", ["zip", "legacy", "tar"])
def test_a_file_saved_on_a_gpu_is_read_on_the_cpu(form, tmp_path) -> None:
    path = FORMATS[form](tmp_path / "x.pth", TENSORS)
    if form == "zip":
        repack(path, lambda name, data: on_gpu(data) if name == "data.pkl" else data)
    elif form == "legacy":
        path.write_bytes(on_gpu(path.read_bytes()))
    assert b"cuda:0" in path.read_bytes()
    found = read(path).tensors
    assert same(found, TENSORS)
    assert {t.device.type for t in found.values()} == {"cpu"}


def on_gpu(pickled: bytes) -> bytes:
    """The same pickle with the storages' device replaced."""
    old, new = (b"X" + struct.pack("<I", len(t)) + t for t in (b"cpu", b"cuda:0"))
    assert old in pickled
    return pickled.replace(old, new)


def test_tied_sliced_and_expanded_tensors_keep_their_values(tmp_path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": whole,
        "tied": whole,
        "slice": whole[1],
        "column": whole[:, 2],
        "turned": whole.T,
        "expanded": whole[:1, :1].expand(5, 5),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "parameter": nn.Parameter(whole),
    }
    for save in (save_zip, save_legacy):
        found = read(save(tmp_path / "x.pth", tensors)).tensors
        assert same(found, tensors)
        assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.parametrize(
    "dtype",
    "float64 float16 bfloat16 int8 uint8 int16 int32 complex64 float8_e4m3fn float8_e5m2".split(),
)
def test_every_type_of_number_survives(dtype, tmp_path) -> None:
    tensors = {"x": torch.tensor([1.0, -2.0, 0.5]).abs().to(getattr(torch, dtype))}
    for form in ("zip", "legacy") if "complex" in dtype else ("zip", "legacy", "safetensors"):
        path = FORMATS[form](tmp_path / form, tensors)
        assert same(read(path).tensors, tensors)
        assert read_header(path).dtypes == {"x": tensors["x"].dtype}


def test_reading_does_not_change_the_file(tmp_path) -> None:
    for form in ("zip", "legacy", "safetensors"):
        path = FORMATS[form](tmp_path / form, TENSORS)
        read(path).tensors["patch_embed.proj.weight"].fill_(7)
        assert same(read(path).tensors, TENSORS)


def test_the_header_of_safetensors_is_read_without_the_data(tmp_path) -> None:
    """The data are a hole in the file, larger than any memory."""
    length = 2**40
    header = {"x": {"dtype": "F32", "shape": [length // 4], "data_offsets": [0, length]}}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("rb+") as file:
        file.truncate(8 + len(text) + length)
    found = read_header(path)
    assert found.shapes == {"x": (length // 4,)} and found.size == 8 + len(text) + length


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_a_header_of_torch_does_not_depend_on_the_data(save, tmp_path) -> None:
    path = save(tmp_path / "x.pth", {"x": torch.ones(1000)})
    before = read_header(path)
    data = torch.ones(1000).numpy().tobytes()
    assert data in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(data, b"\xff" * 4000))
    assert read_header(path) == before


def test_a_folder_with_one_index_is_read_as_that_index(tmp_path) -> None:
    index = save_shards(tmp_path / "model", TENSORS)
    assert same(read(index.parent).tensors, TENSORS)
    shards = index.parent.glob("*.safetensors")
    assert read_header(index.parent).size == sum(file.stat().st_size for file in shards)
    (index.parent / "other.index.json").write_text("{}")
    assert "model.safetensors.index.json, other.index.json" in sentence(index.parent)


def test_a_missing_shard_or_tensor_is_named(tmp_path) -> None:
    index = save_shards(tmp_path / "model", TENSORS)
    save_safetensors(index.parent / "model-1.safetensors", {"other": torch.ones(1)})
    assert "model-1.safetensors holds norm.weight, which it does not" in sentence(index)
    (index.parent / "model-1.safetensors").unlink()
    assert "names the shard model-1.safetensors, which is not beside it" in sentence(index)


def test_an_index_does_not_lead_out_of_its_folder(tmp_path) -> None:
    save_safetensors(tmp_path / "secret.safetensors", TENSORS)
    index = save_shards(tmp_path / "model", TENSORS)
    index.write_text(json.dumps({"weight_map": {"mask": "../secret.safetensors"}}))
    assert "../secret.safetensors, which lies elsewhere" in sentence(index)


HTML = b"<!DOCTYPE html>\n<html><body>404: not found</body></html>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (HTML, "holds HTML, not a checkpoint, probably a failed download"),
        (b"\n <html>" + b" " * 600, "holds HTML"),
        (b"Not found\n", "holds text, not a checkpoint"),
        (b'{"error": "Not found"}', "holds JSON, not a checkpoint"),
        (b'{"weight_map": 3}', "is incomplete or damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "fetch it with git lfs pull"),
        (b"\x1f\x8b\x08\x00", "is compressed with gzip"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (bytes(range(128, 256)), "has 128 bytes in no format of checkpoints"),
        (struct.pack("<Q", 50) + b'{"x":', "(13 bytes; its header alone takes 50)"),
        (struct.pack("<Q", 5) + b'{"x":', "is incomplete or damaged"),
        (struct.pack("<Q", 2) + b"{}", "holds no state dict"),
        (b"\x80\x02", "is incomplete or damaged (2 bytes"),
        (b"PK\5\6" + bytes(18), "that torch.save did not write (it holds nothing)"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_sentence(content, message, tmp_path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    assert message in sentence(path) and str(path) in sentence(path)


def test_missing_files_folders_and_closed_files_are_refused(tmp_path, monkeypatch) -> None:
    assert "x.pth does not exist" in sentence(tmp_path / "x.pth")
    assert "is a folder with no index" in sentence(tmp_path)
    assert "is no file" in sentence(Path("/dev/null"))
    path = save_zip(tmp_path / "x.pth", TENSORS)

    def closed(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    assert "cannot be opened (Permission denied)" in sentence(path)


@pytest.mark.parametrize("form", ["zip", "legacy", "tar", "safetensors"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_truncated_files_say_how_long_they_are(form, part, tmp_path) -> None:
    path = FORMATS[form](tmp_path / "x.pth", {"x": torch.ones(100, 1000)})
    size = int(part * path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    assert f"is incomplete or damaged ({size} bytes" in sentence(path)


def test_archives_of_other_programs_are_told_apart(tmp_path) -> None:
    path = tmp_path / "x.pth"
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    assert "is a TorchScript archive, which is a program" in sentence(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.pth", b"x")
    assert "that torch.save did not write (it holds model.pth); unpack it" in sentence(path)
    save_zip(path, TENSORS)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert same(read(path).tensors, TENSORS)


def test_tensors_of_odd_kinds_are_refused_by_name(tmp_path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for tensor, kind in (
        (quantised, "a quantised tensor"),
        (torch.eye(2).to_sparse(), "a sparse tensor"),
        (torch.ones(2, device="meta"), "a tensor without data"),
    ):
        path = save_zip(tmp_path / "x.pth", {"model": {"a.b": tensor, "c": torch.ones(1)}})
        assert f"holds {kind} at a.b, which is not read" in sentence(path)


def test_a_file_without_tensors_says_what_it_holds(tmp_path) -> None:
    assert "(it holds epoch, args)" in sentence(save_zip(tmp_path / "x", {"epoch": 3, "args": {}}))
    assert "(it is a list)" in sentence(save_zip(tmp_path / "x", [1, 2]))
    nested = {"generator": TENSORS, "discriminator": TENSORS}
    assert "(it holds generator, discriminator)" in sentence(save_zip(tmp_path / "x", nested))


def test_numbers_that_are_none_are_named() -> None:
    check_finite({"a": torch.ones(2), "b": torch.tensor([1]), "c": torch.zeros(0)}, "x.pth")
    for value in (float("nan"), float("inf"), float("-inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
            bad = {"a": torch.ones(2), "b.c": torch.tensor([1.0, value]).to(dtype)}
            with pytest.raises(CheckpointError, match=r"x.pth holds NaN or infinity in b\.c;"):
                check_finite(bad, "x.pth")
    nan = torch.tensor([float("nan")])
    with pytest.raises(CheckpointError, match="in a0, a1, a2, a3 and 2 more"):
        check_finite({f"a{i}": nan for i in range(6)}, "x.pth")
    with pytest.raises(CheckpointError, match="in a;"):
        check_finite({"a": nan.to(torch.float8_e4m3fn)}, "x.pth")


def test_the_package_is_imported_without_mmengine() -> None:
    code = (
        "import sys; sys.modules['mmengine'] = None; import tlalign_mm.checkpoints as c; "
        "print(c.read.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "read", run.stderr
