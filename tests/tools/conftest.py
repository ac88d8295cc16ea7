"""Small files for the tools that read checkpoints, and the converter run on good and bad input."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.samples import save_zip as save
from tests.checkpoints.toys import classifier
from tlalign_mm.engine.launch import run_tool
from tools import convert_checkpoint


@pytest.fixture
def swin(tmp_path) -> Path:
    return save(tmp_path / "swin.pth", {"state_dict": classifier("SwinTransformer")})


@pytest.fixture
def vit(tmp_path) -> Path:
    return save(tmp_path / "vit.pth", {"model": classifier("VisionTransformer")})


@pytest.fixture
def convert(capsys) -> Callable[..., str]:
    """Run the tool; returns what it prints."""

    def run(*arguments: object) -> str:
        convert_checkpoint.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys, tmp_path) -> Callable[..., str]:
    """Run the tool on bad input; returns its sentence, once it has left the target alone."""

    def run(source: Path, *arguments: object, to: str = "timm") -> str:
        target = tmp_path / "target.pth"
        target.write_bytes(b"before")
        argv = [source, target, "--to", to, "--force", *arguments]
        with pytest.raises(SystemExit) as stop:
            run_tool(lambda: convert_checkpoint.main([str(argument) for argument in argv]))
        assert stop.value.code == 2
        assert target.read_bytes() == b"before" and not list(tmp_path.glob("*.partial"))
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and line.endswith(".")
        return line

    return run
