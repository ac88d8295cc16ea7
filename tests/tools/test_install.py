"""tools/install.py, with pip and the creation of environments replaced."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install.py"
SETUP = "[options]\ninstall_requires =\n    torch\n[tool:pytest]\ntestpaths = tests\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """The module, its repository being an empty folder."""
    spec = importlib.util.spec_from_file_location("tlalign_install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "repo"
    root.mkdir()
    (root / "constraints.txt").write_text("torch==2.14.1\n")
    (root / "setup.cfg").write_text(SETUP)
    monkeypatch.setattr(module, "ROOT", str(root))
    monkeypatch.setattr(module, "NEEDED_GB", 0)
    return module


class FakeProcesses:
    """Stands in for subprocess.run: records the commands and plays what they would do."""

    def __init__(self):
        self.commands = []
        self.failing = None  # The word whose command fails.
        self.version = "3 11 1"
        self.cv2_errors = []

    def __call__(self, command, **kwargs):
        self.commands.append(command)
        words = " ".join(command)
        if "-m venv" in words:
            make_venv(Path(command[-1]))
        if self.failing and self.failing in words:
            return subprocess.CompletedProcess(command, 2, "", "ImportError: no such thing")
        if "import cv2" in words and self.cv2_errors:
            return subprocess.CompletedProcess(command, 1, "", self.cv2_errors.pop())
        if "version_info" in words:
            return subprocess.CompletedProcess(command, 0, self.version, "")
        return subprocess.CompletedProcess(command, 0, "torch 2.14.1\n", "")

    def ran(self, text):
        return sum(text in " ".join(command) for command in self.commands)


@pytest.fixture
def processes(monkeypatch):
    fake = FakeProcesses()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def make_venv(venv):
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin" / "python").write_text("")
    (venv / "pyvenv.cfg").write_text("version = 3.11.1\n")


def message(capsys):
    """The text printed to stderr, which has to be one line."""
    error = capsys.readouterr().err
    assert error.startswith("install: ") and error.count("\n") == 1
    return error


def test_syntax_is_that_of_old_pythons():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))
    assert any(isinstance(n, ast.FunctionDef) and n.name == "check_python" for n in tree.body)


def test_fresh_install_then_nothing_to_do(install, processes, capsys):
    assert install.main([]) == 0
    assert processes.ran("-m venv") == 1
    assert processes.ran("-e .[mm,dev]") == 1
    assert "torch 2.14.1" in capsys.readouterr().out
    processes.commands.clear()
    assert install.main([]) == 0
    assert not processes.commands
    assert "up to date (Python 3.11.1)" in capsys.readouterr().out


def test_stamp_is_replaced_in_one_step(install, processes):
    install.main([])
    venv = Path(install.ROOT) / ".venv"
    assert [path.name for path in venv.glob(install.STAMP + "*")] == [install.STAMP]


@pytest.mark.parametrize(
    ("name", "text", "current"),
    [
        ("constraints.txt", "torch==2.14.0\n", False),
        ("setup.cfg", SETUP.replace("torch", "torch>=2"), False),
        ("setup.cfg", SETUP.replace("tests", "other"), True),
        (".venv/pyvenv.cfg", "version = 3.12.1\n", False),
    ],
)
def test_stamp_follows_what_the_content_depends_on(install, processes, name, text, current):
    install.main([])
    Path(install.ROOT, name).write_text(text)
    assert install.is_current(str(Path(install.ROOT) / ".venv"), "mm,dev") is current


def test_other_extras_are_installed(install, processes):
    install.main([])
    processes.commands.clear()
    assert install.main(["--extras", "dev", "--venv", ".venv"]) == 0
    assert processes.ran("-e .[dev]") == 1
    assert not processes.ran("mmcv")


def test_interrupted_install_continues(install, processes, capsys):
    processes.failing = "pip install"
    assert install.main([]) == 1
    text = message(capsys)
    assert "pip install of tlalign_mm[mm,dev] failed" in text
    assert "run the same command again and it continues" in text
    processes.failing = None
    processes.commands.clear()
    assert install.main([]) == 0
    assert not processes.ran("-m venv")
    assert processes.ran("-e .[mm,dev]") == 1


def test_failed_update_leaves_no_stamp(install, processes):
    install.main([])
    constraints = Path(install.ROOT, "constraints.txt")
    before = constraints.read_text()
    constraints.write_text("torch==2.14.0\n")
    processes.failing = "pip install"
    assert install.main([]) == 1
    constraints.write_text(before)
    assert not install.is_current(str(Path(install.ROOT) / ".venv"), "mm,dev")


def test_keyboard_interrupt_is_one_sentence(install, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupt)
    assert install.main([]) == 130
    assert "run the same command again" in capsys.readouterr().err


def test_venv_without_pip_gets_it(install, processes):
    make_venv(Path(install.ROOT) / ".venv")
    processes.version = "3 11 0"
    assert install.main([]) == 0
    assert processes.ran("-m ensurepip") == 1
    assert processes.ran("-e .[mm,dev]") == 1


def test_old_python_is_told_what_to_do(install, processes, monkeypatch, capsys):
    Version = namedtuple("Version", "major minor micro")
    monkeypatch.setattr(sys, "version_info", Version(3, 8, 18))
    assert install.main([]) == 1
    text = message(capsys)
    assert "needs Python 3.10 or newer" in text and "3.8.18" in text
    assert "make demo PYTHON=python3.11" in text
    assert not processes.commands


def test_venv_of_an_old_python_is_refused(install, processes, capsys):
    make_venv(Path(install.ROOT) / ".venv")
    processes.version = "3 9 1"
    assert install.main([]) == 1
    text = message(capsys)
    assert "made with Python 3.9" in text and "rm -rf" in text


@pytest.mark.parametrize("kind", ["missing", "dangling", "not a program"])
def test_broken_venv_is_refused(install, kind, capsys):
    venv = Path(install.ROOT) / ".venv"
    make_venv(venv)
    python = Path(install.venv_python(str(venv)))
    python.unlink()
    if kind == "dangling":
        python.symlink_to(venv / "gone")
    elif kind == "not a program":
        python.write_text("")
    assert install.main([]) == 1
    text = message(capsys)
    assert "is broken" in text and f"rm -rf {venv}" in text


def test_stamp_does_not_hide_a_vanished_python(install, processes):
    install.main([])
    venv = Path(install.ROOT) / ".venv"
    Path(install.venv_python(str(venv))).unlink()
    assert not install.is_current(str(venv), "mm,dev")


@pytest.mark.parametrize(
    ("venv", "words"),
    [
        ("taken", "is a file where a folder is to be made"),
        ("taken/inside", "cannot create the folder"),
    ],
)
def test_folder_that_cannot_be_made(install, processes, venv, words, capsys):
    Path(install.ROOT, "taken").write_text("")
    assert install.main(["--venv", venv]) == 1
    assert words in message(capsys)
    assert not processes.commands


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_folder_without_write_permission(install, processes, capsys):
    Path(install.ROOT).chmod(0o500)
    assert install.main([]) == 1
    Path(install.ROOT).chmod(0o700)
    assert "cannot create the folder" in message(capsys)


def test_full_disk(install, processes, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**10, 9 * 10**9, 10**9))
    monkeypatch.setattr(install, "NEEDED_GB", 8)
    assert install.main([]) == 1
    assert "1.0 GB of free disk" in message(capsys)
    monkeypatch.setattr(install, "NEEDED_GB", 1)
    assert install.main([]) == 0


def test_missing_ensurepip(install, processes, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install.main([]) == 1
    assert "module `venv` is missing" in message(capsys)


def test_opencv_without_libgl_is_replaced(install, processes, capsys):
    processes.cv2_errors = [
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
    ]
    assert install.main([]) == 0
    assert processes.ran("--force-reinstall --no-deps -c constraints.txt opencv-python-headless")
    assert "libGL.so.1" in capsys.readouterr().out


def test_other_opencv_errors_are_reported(install, processes, capsys):
    processes.failing = "cv2"
    assert install.main([]) == 0
    assert not processes.ran("--force-reinstall")
    Path(install.ROOT, "constraints.txt").write_text("")
    processes.failing = "import torch"
    assert install.main([]) == 1
    assert "cannot be imported (ImportError: no such thing)" in message(capsys)


def test_works_from_another_folder(install, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert install.main([]) == 0
    assert (Path(install.ROOT) / ".venv" / install.STAMP).exists()
