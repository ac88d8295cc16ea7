"""Our tools read checkpoints as data: real runs go on exactly, malicious files run nothing."""

import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from tests.checkpoints.samples import TENSORS, Call, repack, same, save_safetensors, save_zip
from tests.checkpoints.test_files import on_gpu
from tests.checkpoints.test_unpickle import equal
from tests.pretrain.conftest import BACKBONE, image_folder  # noqa: F401
from tlalign_mm.checkpoints import CheckpointError, read
from tlalign_mm.engine.launch import run_tool
from tlalign_mm.engine.safe_loading import load_safely
from tlalign_mm.registry import MODELS
from tools import test, train

BASE = Path(__file__).parents[2] / "configs/pretrain/swin-digits_tlalign_1xb32-20e_digits.py"
DATA = "dict(batch_size=4, dataset=dict(data_root={data!r}, transform=dict(input_size=16)))"
CONFIG = f"""
_base_ = {{base!r}}
model = dict(num_classes=3, backbone=dict(
    embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=2))
train_dataloader = {DATA}
val_dataloader = {DATA}
test_dataloader = {DATA}
val_evaluator = dict(topk=(1,))
test_evaluator = dict(topk=(1,))
custom_hooks = [dict(type='EMAHook')]
"""
TIMES = ("time", "data_time")  # what a run's messages say of the clock


@pytest.fixture(autouse=True)
def loaders_of_mmengine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointLoader, "_schemes", dict(CheckpointLoader._schemes))


@pytest.fixture
def run(tmp_path, image_folder, monkeypatch) -> Callable[..., None]:  # noqa: F811
    """Runs a tool with a tiny config, as the command line does."""
    config = tmp_path / "run.py"
    config.write_text(CONFIG.format(base=str(BASE), data=str(image_folder)))
    numbers = iter(range(100))  # mmengine shares state between runs of one name

    def run(tool: object, *arguments: object, work: str = "work", **options: object) -> None:
        options = {
            "train_cfg.max_epochs": 1,
            "experiment_name": f"{work}{next(numbers)}",
            **options,
        }
        line = ["--work-dir", tmp_path / work, "--cfg-options"]
        line += [f"{key}={value}" for key, value in options.items()]
        monkeypatch.setattr(sys, "argv", list(map(str, ["tool", config, *arguments, *line])))
        run_tool(tool.main)

    return run


@pytest.fixture
def trained(run, tmp_path) -> Path:
    """The checkpoint of a run of one epoch."""
    run(train)
    return tmp_path / "work" / "epoch_1.pth"


@pytest.fixture
def infect(trained, tmp_path) -> Callable[[], Path]:
    """Makes a checkpoint of a run malicious; the folder that it would make is given."""

    def infect() -> Path:
        content = torch.load(trained, weights_only=False)
        torch.save({**content, "evil": Call(os.mkdir, str(tmp_path / "ran"))}, trained)
        return tmp_path / "ran"

    return infect


def refusal(capsys: pytest.CaptureFixture, call: Callable[[], None]) -> str:
    """The sentence with which a tool ends, with exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        call()
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_a_run_resumes_exactly_as_with_mmengine(run, trained, tmp_path, monkeypatch) -> None:
    finals = {}
    for work in ("ours", "stock"):
        shutil.copytree(trained.parent, tmp_path / work)
        (tmp_path / work / "last_checkpoint").write_text(str(tmp_path / work / "epoch_1.pth"))
        if work == "stock":
            monkeypatch.setattr(CheckpointLoader, "_schemes", STOCK)
            monkeypatch.setattr(train, "load_safely", lambda trust: None)
        run(train, "--resume", work=work, **{"train_cfg.max_epochs": 2})
        finals[work] = torch.load(tmp_path / work / "epoch_2.pth", weights_only=False)
    ours, stock = finals["ours"], finals["stock"]
    for key in ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"):
        assert equal(ours[key], stock[key]), key
    for name, buffer in stock["message_hub"]["log_scalars"].items():
        data = ours["message_hub"]["log_scalars"][name].data
        if not name.endswith(TIMES):
            assert equal(data, buffer.data), name
        assert len(data[0]) == len(buffer.data[0])
    assert ours["meta"]["iter"] == stock["meta"]["iter"] == 6
    assert not equal(stock["state_dict"], torch.load(trained, weights_only=False)["state_dict"])


STOCK = dict(CheckpointLoader._schemes)


def test_a_runs_file_is_read_with_its_raw_and_averaged_weights(trained) -> None:
    content = torch.load(trained, weights_only=False)
    average, raw = read(trained), read(trained, "model")
    assert (average.weights, raw.weights) == ("ema", "model")
    assert same(average.tensors, content["state_dict"])
    assert same(raw.tensors, {k: content["ema_state_dict"][f"module.{k}"] for k in raw.tensors})
    assert not same(average.tensors, raw.tensors)
    assert average.meta["epoch"] == 1 and average.beside["optimizer"] == "dict"


def test_all_of_a_runs_file_is_as_with_torch(trained) -> None:
    load_safely()
    ours = CheckpointLoader.load_checkpoint(str(trained), "cpu")
    stock = torch.load(trained, weights_only=False)
    assert list(ours) == list(stock)
    for key in stock.keys() - {"message_hub"}:
        assert equal(ours[key], stock[key]), key
    for name, buffer in stock["message_hub"]["log_scalars"].items():
        found = ours["message_hub"]["log_scalars"][name]
        assert type(found) is HistoryBuffer and equal(found.data, buffer.data)
        assert found.statistics("mean", 2) == buffer.statistics("mean", 2)
    assert equal(ours["message_hub"]["runtime_info"], stock["message_hub"]["runtime_info"])


def test_resuming_runs_nothing_from_a_malicious_file(run, trained, infect, capsys) -> None:
    ran = infect()
    message = refusal(capsys, lambda: run(train, "--resume", **{"train_cfg.max_epochs": 2}))
    assert f"{trained} holds posix.mkdir, which is not read since that would run code" in message
    assert not ran.exists()


def test_load_from_runs_nothing_from_a_malicious_file(run, trained, infect, capsys) -> None:
    ran = infect()
    message = refusal(capsys, lambda: run(train, work="new", load_from=trained))
    assert "holds posix.mkdir" in message and not ran.exists()


def test_testing_runs_nothing_from_a_malicious_file(run, trained, infect, capsys) -> None:
    ran = infect()
    assert "holds posix.mkdir" in refusal(capsys, lambda: run(test, trained))
    assert not ran.exists()


def test_a_backbone_runs_nothing_from_a_malicious_file(run, trained, infect, capsys) -> None:
    ran = infect()
    init = {"type": "Pretrained", "checkpoint": str(trained)}
    with pytest.raises(CheckpointError, match="holds posix.mkdir"):
        MODELS.build({**BACKBONE, "init_cfg": init}).init_weights()
    options = {f"model.backbone.init_cfg.{key}": value for key, value in init.items()}
    options["model.backbone.init_cfg._delete_"] = True
    assert "holds posix.mkdir" in refusal(capsys, lambda: run(train, work="new", **options))
    assert not ran.exists()


def test_trust_alone_lets_a_file_run(run, trained, infect) -> None:
    ran = infect()
    run(train, "--resume", "--trust", **{"train_cfg.max_epochs": 2})
    assert ran.exists() and trained.with_name("epoch_2.pth").is_file()
    ran.rmdir()
    run(test, trained, "--trust")
    assert ran.exists()


def test_a_config_inside_a_checkpoint_is_not_executed(run, trained, tmp_path) -> None:
    content = torch.load(trained, weights_only=False)
    content["meta"]["config"] = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
    torch.save(content, trained)
    run(train, "--resume", **{"train_cfg.max_epochs": 2})
    assert trained.with_name("epoch_2.pth").is_file() and not (tmp_path / "ran").exists()


def test_configs_come_back_as_plain_dicts(tmp_path) -> None:
    config = ConfigDict(a=1, b=dict(c=[dict(d=2)]))
    load_safely()
    found = CheckpointLoader.load_checkpoint(str(save_zip(tmp_path / "x.pth", {"a": config})))
    assert type(found["a"]) is dict and found["a"] == config


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu"), None, {"cuda:0": "cpu"}])
def test_tensors_go_where_they_are_asked_to(place, tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", {"state_dict": TENSORS})
    repack(path, lambda name, data: on_gpu(data) if name == "data.pkl" else data)
    load_safely()
    found = CheckpointLoader.load_checkpoint(str(path), place)["state_dict"]
    assert same(found, TENSORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", {"state_dict": TENSORS})
    load_safely()
    with pytest.raises(CheckpointError, match="cannot be moved to cuda:0"):
        CheckpointLoader.load_checkpoint(str(path), "cuda:0")


def test_a_file_may_be_written_over_while_its_tensors_are_used(tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", {"state_dict": TENSORS})
    load_safely()
    found = CheckpointLoader.load_checkpoint(str(path))["state_dict"]
    path.write_bytes(b"other")
    assert same(found, TENSORS)


def test_safetensors_are_a_state_dict_for_mmengine(tmp_path) -> None:
    path = save_safetensors(tmp_path / "x.safetensors", TENSORS)
    load_safely()
    assert same(CheckpointLoader.load_checkpoint(str(path))["state_dict"], TENSORS)
    with pytest.raises(CheckpointError, match="holds a list; name the file of a run"):
        CheckpointLoader.load_checkpoint(str(save_zip(tmp_path / "x.pth", [1])))


@pytest.mark.parametrize(
    "name",
    "s3://a/b petrel://a/b pavi://a torchvision://resnet18 modelzoo://resnet18 open-mmlab://a "
    "openmmlab://a mmcls://a later://a".split(),
)
def test_other_schemes_are_refused(name) -> None:
    CheckpointLoader.register_scheme("later://", lambda filename, map_location: {})
    load_safely()
    with pytest.raises(CheckpointError, match=f"{name} is of a scheme that is not read safely"):
        CheckpointLoader.load_checkpoint(name)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[str]:
    """Serves ``served/`` on this machine; downloads go to ``hub/``."""
    (tmp_path / "served").mkdir()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_downloads_are_read_as_data_too(server, tmp_path) -> None:
    save_zip(tmp_path / "served" / "good.pth", {"state_dict": TENSORS})
    save_zip(tmp_path / "served" / "evil.pth", {"a": Call(os.mkdir, str(tmp_path / "ran"))})
    load_safely()
    for _ in range(2):  # the second time from the folder of downloads
        assert same(CheckpointLoader.load_checkpoint(f"{server}/good.pth")["state_dict"], TENSORS)
        (tmp_path / "served" / "good.pth").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"evil\.pth holds posix\.mkdir"):
        CheckpointLoader.load_checkpoint(f"{server}/evil.pth")
    with pytest.raises(CheckpointError, match=r"none\.pth cannot be fetched \(.*404"):
        CheckpointLoader.load_checkpoint(f"{server}/none.pth")
    assert not (tmp_path / "ran").exists()
    assert sorted(os.listdir(tmp_path / "hub" / "checkpoints")) == ["evil.pth", "good.pth"]
