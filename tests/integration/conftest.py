"""A tiny copy of the built-in data, and the stock tools run as programs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.demo import stock_tool
from tools.prepare_digits import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "digits"
    prepare(out, seed=0, train_scenes=8, val_scenes=4)
    return out


@pytest.fixture(scope="session")
def run_tool() -> Callable[..., subprocess.CompletedProcess]:
    """Run a tool from the repository's root; ``mmseg`` and ``mmdet`` mean their tools/train.py."""

    def run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
        path = stock_tool(tool) if tool in ("mmseg", "mmdet") else ROOT / tool
        return subprocess.run(
            [sys.executable, str(path), *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run


def find_config(folder: str, pattern: str) -> Path:
    (path,) = (ROOT / "configs" / folder).glob(pattern)
    return path


@pytest.fixture(scope="session")
def pretrained(digits: Path, tmp_path_factory: pytest.TempPathFactory, run_tool) -> Path:
    """Work dir of a short pretraining."""
    work_dir = tmp_path_factory.mktemp("pretrain")
    result = run_tool("tools/train.py", *pretrain_arguments(digits, work_dir))
    assert result.returncode == 0, result.stderr[-2000:]
    return work_dir


def pretrain_arguments(digits: Path, work_dir: Path, epochs: int = 2) -> list[object]:
    config = find_config("pretrain", "swin-digits_tlalign_*.py")
    options = [
        f"train_dataloader.dataset.data_root={digits / 'imagenet'}",
        f"val_dataloader.dataset.data_root={digits / 'imagenet'}",
        f"train_cfg.max_epochs={epochs}",
        "train_cfg.val_interval=1",
        "train_dataloader.batch_size=700",  # two iterations an epoch
    ]
    return [config, "--work-dir", work_dir, "--cfg-options", *options]
