"""Pickles are read as data: known types come back as they were, nothing else is ever called."""

import argparse
import datetime
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import HistoryBuffer
from torch import nn

from tests.checkpoints.samples import TENSORS, Call, repack, save_legacy, save_zip, unpickle
from tlalign_mm.checkpoints import CheckpointError, read
from tlalign_mm.checkpoints.files import read_content
from tlalign_mm.checkpoints.unpickle import Foreign

DATA = {
    "text": "é\U0001f600",
    "bytes": b"\x00\xff",
    "numbers": [0, -1, 255, 65536, -(2**31), 2**70, -(2**70), 1.5, float("inf"), True, None, 2j],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "set": {1, 2},
    "frozen": frozenset({"a"}),
    "bytearray": bytearray(b"abc"),
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {3: [4]}),
    "counter": Counter("aab"),
    "range": range(2, 9, 3),
    "slice": slice(1, None),
    "date": datetime.date(2024, 2, 29),
    "time": datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc),  # noqa: UP017
    "delta": datetime.timedelta(days=1, microseconds=3),
    "args": argparse.Namespace(lr=0.1, opt="adamw", nested=argparse.Namespace(a=None)),
    "float64": np.float64(0.1),
    "int32": np.int32(-3),
    "bool": np.bool_(True),
    "dtype": np.dtype(">f4"),
}
ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array([1, 2], ">i2"),
    np.array(["ab", "c"]),
    np.zeros((0, 3), np.float32),
    np.array(3.5),
]


def equal(one: object, other: object) -> bool:
    """Whether two contents are of the same types and values, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_come_back_from_every_protocol(protocol) -> None:
    value, unsafe = unpickle(pickle.dumps(DATA, protocol))
    assert value == DATA and not unsafe
    assert {k: type(v) for k, v in value.items()} == {k: type(v) for k, v in DATA.items()}
    assert value["default"].default_factory is list


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_come_back_from_every_protocol(protocol) -> None:
    arrays, unsafe = unpickle(pickle.dumps(ARRAYS, protocol))
    assert not unsafe and equal(arrays, pickle.loads(pickle.dumps(ARRAYS, protocol)))


def test_what_is_shared_in_a_pickle_is_shared_afterwards() -> None:
    inner: list = [1]
    inner.append(inner)
    (first, second), _ = unpickle(pickle.dumps((inner, inner), 2))
    assert first is second and first[1] is first


def test_paths_of_every_system_are_read_on_this_one() -> None:
    for path in (pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("C:/a"), Path("x")):
        value, unsafe = unpickle(pickle.dumps(path, 2))
        assert str(value) == str(path) and not unsafe
    windows = pickle.dumps(pathlib.PureWindowsPath("C:\\runs"), 2)
    value, unsafe = unpickle(windows.replace(b"PureWindowsPath", b"WindowsPath"))
    assert str(value) == "C:\\runs" and not unsafe
    newest = pickle.dumps(Path("x"), 2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert unpickle(newest) == (pathlib.PurePosixPath("x"), [])


def test_pickles_of_python_2_are_read() -> None:
    assert unpickle(b"\x80\x02}U\x03keyU\x03\xff\xfe\xfds.") == ({"key": "\xff\xfe\xfd"}, [])
    old = b"c__builtin__\nset\n((lp0\nI1\natR."
    assert unpickle(old) == ({1}, [])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_history_of_mmengine_comes_back_and_leaves_its_class_alone(protocol) -> None:
    buffer = HistoryBuffer([1.0, 2.0], [1, 3], max_length=7)
    pickled = pickle.dumps({"loss": buffer}, protocol)
    before = dict(HistoryBuffer._statistics_methods)
    found, unsafe = unpickle(pickled)
    assert not unsafe and type(found["loss"]) is HistoryBuffer
    assert found["loss"].max_length == 7 and found["loss"].statistics("mean") == 0.75
    assert HistoryBuffer._statistics_methods == before


def test_configs_of_mmengine_are_harmless() -> None:
    config = ConfigDict(a=1, b=dict(c=[1, dict(d=2)]))
    found, unsafe = unpickle(pickle.dumps([config, Config(dict(a=1))], 2))
    assert not unsafe
    assert type(found[0]) is dict and found[0] == {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert isinstance(found[1], Foreign) and found[1].name.endswith(".Config")


def test_the_content_is_that_of_torch(tmp_path) -> None:
    """Content of a training: tensors, an optimizer's state, settings, states of generators."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    content = {
        "model": net.state_dict(),
        "parameters": dict(net.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "args": argparse.Namespace(size=torch.Size([1, 2]), dtype=torch.float16),
        "device": torch.device("cpu"),
    }
    for save in (save_zip, save_legacy):
        path = save(tmp_path / "x.pth", content)
        found, expected = read_content(path), torch.load(path, weights_only=False)
        assert equal(found, expected)
        assert found["model"]._metadata == expected["model"]._metadata
        assert isinstance(found["parameters"]["0.weight"], nn.Parameter)


def test_a_record_that_is_gone_is_a_damaged_file(tmp_path) -> None:
    for lost in ("data/0", "data.pkl"):
        path = save_zip(tmp_path / "x.pth", {"model": TENSORS})
        repack(path, lambda name, data, lost=lost: None if name == lost else data)
        with pytest.raises(CheckpointError, match="is incomplete or damaged|did not write"):
            read(path)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", TENSORS)
    repack(path, lambda name, data: b"big" if name == "byteorder" else data)
    with pytest.raises(CheckpointError, match="is big-endian"):
        read(path)


def test_an_unknown_object_is_inert() -> None:
    value, unsafe = unpickle(pickle.dumps({"x": Call(eval, "1"), "y": 2}, 2))
    assert isinstance(value["x"], Foreign) and value["x"].name == "builtins.eval"
    assert value["y"] == 2 and unsafe == ["builtins.eval"]
