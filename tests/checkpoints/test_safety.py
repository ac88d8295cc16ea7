"""Whatever a pickle asks for, nothing of it is run, and what it asks for is named."""

import argparse
import copyreg
import importlib
import os
import pickle
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoints.samples import TENSORS, Call, same, save_legacy, save_tar, save_zip, unpickle
from tlalign_mm.checkpoints import CheckpointError, read, read_header
from tlalign_mm.checkpoints.files import read_content
from tlalign_mm.checkpoints.torch_files import load
from tlalign_mm.checkpoints.unpickle import Foreign


def attacks(target: Path) -> dict[str, object]:
    folder = str(target)
    code = f"__import__('os').mkdir({folder!r})"
    return {
        "posix.mkdir": Call(os.mkdir, folder),
        "builtins.eval": [1, (Call(eval, code),)],
        "builtins.exec": {"state_dict": {"a": Call(exec, code)}},
        "builtins.getattr": Call(getattr, "a", "join"),
        "builtins.__import__": Call(__import__, "this"),
        "torch.hub.load": Call(torch.hub.load, folder, "x"),
        "torch.jit._serialization.load": Call(torch.jit.load, folder),
        "numpy.load": Call(np.load, folder),
    }


@pytest.mark.parametrize("attack", attacks(Path()))
@pytest.mark.parametrize("form", ["zip", "legacy", "tar", "pickle"])
def test_calls_are_never_made_and_are_named(form, attack, tmp_path) -> None:
    content = {"state_dict": dict(TENSORS), "beside": attacks(tmp_path / "ran")[attack]}
    path = tmp_path / "x.pth"
    if form == "pickle":
        path.write_bytes(pickle.dumps(content["beside"]))
    else:
        {"zip": save_zip, "legacy": save_legacy, "tar": save_tar}[form](path, content)
    for reader in (read, read_content):
        with pytest.raises(CheckpointError) as error:
            reader(path)
        assert f"{path} holds {attack}, which is not read since that would run" in str(error.value)
        assert "--trust" in str(error.value)
    header = read_header(path)
    assert header.unsafe == [attack]
    if form != "pickle":
        assert header.shapes.keys() == TENSORS.keys()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        (b"cos\nsystem\n(S'x'\ntR.", "os.system"),
        (b"(S'x'\nios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\nS'x'\no.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.", "os.system"),
        (b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00x\x85\x81.", "os.system"),
        (b"\x80\x04cos\nsystem\nX\x01\x00\x00\x00x\x85}\x92.", "os.system"),
        (b"ccollections\ndefaultdict\n(cos\nsystem\ntR.", "os.system"),
        (b"ccopyreg\n_reconstructor\n(cos\nsystem\nc__builtin__\nobject\nNtR.", "os.system"),
        (b"c__builtin__\ngetattr\n(cargparse\nNamespace\nS'__init__'\ntR.", "builtins.getattr"),
        (b"cargparse\nNamespace.__init__\n.", "argparse.Namespace.__init__"),
        (b"ccollections\nOrderedDict.fromkeys\n.", "collections.OrderedDict.fromkeys"),
        (b"cnumpy\ndtype\n(S'O8'\ntR.", "numpy.dtype('O8')"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\nI0\ntR.", "os.system"),
    ],
)
def test_every_way_to_name_and_call_is_watched(pickled, name) -> None:
    assert name in unpickle(pickled)[1]


@pytest.mark.parametrize(
    "pickled",
    [
        b"cargparse\nNamespace\n(dS'__init__'\nI1\nsb.",  # changes a class
        b"cargparse\nNamespace\n(N(dS'error'\nI1\nstb.",  # the same, by slots
        b"\x80\x05\x97.",  # a buffer from outside
        b"\x80\x02\x82\x01.",  # the registry of extensions
        b"\x80\x02(K\x01K\x02e.",  # elements for nothing
        b"\x80\x02K\x01q\x00K\x02s.",
        b"\x80\x02\x85.",
        b"\x80\x02h\x05.",
        b"\x80\x02K\x01K\x02R.",
        b"\x80\x02.",
    ],
)
def test_pickles_that_are_not_sound_are_damaged_files(pickled, tmp_path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(pickled if pickled[:1] == b"\x80" else b"\x80\x02" + pickled)
    with pytest.raises(CheckpointError, match="is incomplete or damaged"):
        read(path)
    assert vars(argparse.Namespace()) == {}


def test_a_state_does_not_reach_methods_or_the_registry_of_extensions() -> None:
    ordered, unsafe = unpickle(b"ccollections\nOrderedDict\n)R(dS'get'\nI1\nsS'_metadata'\nI2\nsb.")
    assert vars(ordered) == {"_metadata": 2} and not unsafe
    copyreg.add_extension("os", "system", 251)
    try:
        with pytest.raises(pickle.UnpicklingError, match="extension 251"):
            unpickle(b"\x80\x02\x82\xfb.")
    finally:
        copyreg.remove_extension("os", "system", 251)


def test_the_source_in_an_old_file_of_a_module_is_not_compared(tmp_path, monkeypatch) -> None:
    path = save_legacy(tmp_path / "x.pth", Net())
    assert b"class Net" in path.read_bytes()
    monkeypatch.setattr(torch.serialization, "get_source_lines_and_file", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's answer to a failed comparison
        assert isinstance(load(path, "pickle").value, Foreign)


def test_no_pickle_takes_more_memory_than_its_size_allows(tmp_path) -> None:
    huge = 10**12
    for pickled in (
        pickle.dumps(Call(bytearray, huge), 2),
        pickle.dumps(Call(np.ndarray, (huge,)), 2).replace(b"numpy\nndarray", b"numpy\ndtype"),
        b"\x80\x04\x8d" + struct.pack("<Q", huge) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", huge) + b"x.",
    ):
        (tmp_path / "x.pth").write_bytes(pickled)
        with pytest.raises(CheckpointError):
            read(tmp_path / "x.pth")


def test_a_tensor_cannot_be_larger_than_its_storage(tmp_path) -> None:
    four = torch.storage.TypedStorage(
        wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32, _internal=True
    )
    for size, stride in (((10**6,), (1,)), ((10**12,), (0,)), ((2, 2), (1, 10**9))):
        content = {"x": Call(torch._utils._rebuild_tensor_v2, four, 0, size, stride, False, {})}
        path = save_zip(tmp_path / "x.pth", content)
        for reader in (read, read_header):
            with pytest.raises(CheckpointError, match="larger than its storage"):
                reader(path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)


def test_a_whole_pickled_module_is_named_by_its_class(tmp_path) -> None:
    for content in (Net(), {"model": Net(), "epoch": 3}):
        path = save_zip(tmp_path / "x.pth", content)
        with pytest.raises(CheckpointError, match=r"whole model of class \S+\.Net instead of a"):
            read(path)
        assert f"{Net.__module__}.Net" in read_header(path).unsafe
        assert read(path, trust=True).tensors.keys() == {"fc.weight", "fc.bias"}


def test_trust_alone_runs_what_a_file_asks_for(tmp_path) -> None:
    ran = tmp_path / "ran"
    path = save_zip(tmp_path / "x.pth", {"model": TENSORS, "evil": Call(os.mkdir, str(ran))})
    with pytest.raises(CheckpointError):
        read(path)
    assert not ran.exists()
    assert same(read(path, trust=True).tensors, TENSORS)
    assert ran.exists()
    with pytest.raises(CheckpointError, match="cannot be unpickled .FileExistsError"):
        read(path, trust=True)


def test_trust_reads_a_safe_file_without_running_anything(tmp_path, monkeypatch) -> None:
    path = save_zip(tmp_path / "x.pth", {"model": TENSORS})
    monkeypatch.setattr(importlib.import_module("tlalign_mm.checkpoints.files"), "_run", None)
    assert same(read(path, trust=True).tensors, TENSORS)
