"""Every tool explains itself, with an example."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = sorted((Path(__file__).parents[2] / "tools").glob("*.py"))


@pytest.mark.parametrize("tool", TOOLS, ids=[t.name for t in TOOLS])
def test_help_holds_a_description_and_an_example(tool: Path) -> None:
    run = subprocess.run([sys.executable, tool, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "example" in run.stdout.lower() and tool.name in run.stdout.split("usage:")[1]
