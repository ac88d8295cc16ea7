"""Create .venv and install the package with its tested dependencies into it.

Run it with any Python from 3.6 on, so that the check of the version can speak: only the standard
library is used and the syntax is kept old (annotations in quotes are never evaluated).
"""

import argparse
import configparser
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 10)
NEWEST_TESTED = (3, 13)
# torch for Linux brings its CUDA libraries along.
NEEDED_GB = 8 if sys.platform.startswith("linux") else 3
STAMP = "tlalign_mm.stamp"
AGAIN = "run the same command again and it continues"
MM_MODULES = ["mmengine", "mmcv", "mmseg", "mmdet"]


class InstallError(Exception):
    """Something the user has to mend; its text is one sentence that says how."""


def dotted(version: tuple) -> str:
    """Return the version as text, for example `3.10`."""
    return ".".join(str(part) for part in version)


def say(text: str) -> None:
    """Print a line at once, so that it keeps its place among the lines of pip."""
    print("install: " + text, flush=True)


def venv_python(venv: str) -> str:
    """Return the path of the interpreter inside the environment."""
    parts = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return os.path.join(venv, *parts)


def remedy(venv: str) -> str:
    """Return the end of a sentence about an environment that has to be made anew."""
    return f"remove it with `rm -rf {shlex.quote(venv)}` and run the same command again."


def fingerprint(venv: str, extras: str) -> str:
    """Hash all that the content of the environment depends on.

    The folder of the repository is part of it because an editable install points there.
    """
    digest = hashlib.sha256()
    with open(os.path.join(ROOT, "constraints.txt"), "rb") as file:
        digest.update(file.read())
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    for section in sorted(name for name in setup.sections() if name.startswith("options")):
        digest.update(repr((section, sorted(setup.items(section)))).encode())
    with open(os.path.join(venv, "pyvenv.cfg"), "rb") as file:
        digest.update(file.read())
    digest.update(repr((extras, ROOT)).encode())
    return digest.hexdigest()


def is_current(venv: str, extras: str) -> bool:
    """Tell from the stamp whether the environment is complete, without starting a process."""
    try:
        with open(os.path.join(venv, STAMP), encoding="utf-8") as file:
            stamp = file.read()
        return stamp == fingerprint(venv, extras) and os.path.exists(venv_python(venv))
    except OSError:
        return False


def made_with(venv: str) -> str:
    """Return the Python version of the environment as it was written down when it was made.

    It is printed because it may be another than the one that runs this script.
    """
    with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8") as file:
        entries = dict(line.split("=", 1) for line in file.read().splitlines() if "=" in line)
    by_name = {name.strip(): value.strip() for name, value in entries.items()}
    return by_name.get("version", "unknown")


def write_stamp(venv: str, extras: str) -> None:
    """Write the stamp in one step, so that an interruption never leaves half of one."""
    path = os.path.join(venv, STAMP)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(fingerprint(venv, extras))
    os.replace(path + ".tmp", path)


def remove_stamp(venv: str) -> None:
    """Remove an outdated stamp: from here on the content changes and may stay incomplete."""
    path = os.path.join(venv, STAMP)
    if os.path.exists(path):
        os.remove(path)


def check_python() -> None:
    """Refuse a Python that is too old for the package."""
    if sys.version_info[:2] < OLDEST:
        raise InstallError(
            f"tlalign_mm needs Python {dotted(OLDEST)} or newer and {sys.executable} is "
            f"{dotted(sys.version_info[:3])}: name a newer one, "
            "for example `make demo PYTHON=python3.11`."
        )


def run(step: str, command: "list[str]") -> None:
    """Run a command with its output shown live.

    Raises:
        InstallError: if it fails; `step` says in words what was tried.
    """
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        raise InstallError(f"{step} failed with status {status} (see the lines above): {AGAIN}.")


def create(venv: str) -> None:
    """Create the environment after checking what a fresh install needs.

    Raises:
        InstallError: if a module, a permission or disk space is missing.
    """
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise InstallError(
                f"{sys.executable} cannot create {venv} because its module `{module}` is missing: "
                f"install it (Debian, Ubuntu: `apt install python{dotted(sys.version_info[:2])}"
                "-venv`) and run the same command again."
            )
    try:
        os.makedirs(venv, exist_ok=True)
        free_gb = shutil.disk_usage(venv).free / 1e9
    except OSError as error:
        raise InstallError(
            f"cannot create the folder {venv} ({error.strerror}): make its parent a folder that "
            "you can write to and run the same command again."
        ) from None
    if free_gb < NEEDED_GB:
        raise InstallError(
            f"{venv} has {free_gb:.1f} GB of free disk and the install needs about {NEEDED_GB} GB: "
            "free some, or choose a folder on another disk with "
            "`python3 tools/install.py --venv FOLDER`."
        )
    say(f"creating {venv} with Python {dotted(sys.version_info[:3])}")
    run(f"creating {venv}", [sys.executable, "-m", "venv", venv])


def probe(venv: str) -> "tuple[tuple[int, int], bool]":
    """Ask the environment's interpreter for its version and whether it has pip.

    Raises:
        InstallError: if the interpreter is missing, does not run or is too old.
    """
    code = "import sys, importlib.util as u; v = sys.version_info; print(v[0], v[1], int(bool("
    code += "u.find_spec('pip'))))"
    try:
        command = [venv_python(venv), "-I", "-c", code]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        major, minor, has_pip = (int(word) for word in answer.split())
    except (OSError, ValueError, subprocess.CalledProcessError):
        raise InstallError(
            f"{venv} is broken (its {os.path.relpath(venv_python(venv), venv)} is missing or does "
            "not run): " + remedy(venv)
        ) from None
    if (major, minor) < OLDEST:
        raise InstallError(
            f"{venv} was made with Python {major}.{minor} and tlalign_mm needs {dotted(OLDEST)} or "
            "newer: " + remedy(venv)
        )
    return (major, minor), bool(has_pip)


def prepare(venv: str) -> "tuple[int, int]":
    """Make sure that there is a working environment with pip; return its Python version."""
    if os.path.isfile(venv):
        raise InstallError(f"{venv} is a file where a folder is to be made: move it away.")
    if not os.path.isdir(venv) or not os.listdir(venv):
        create(venv)
    if not os.access(venv, os.W_OK):
        raise InstallError(f"cannot write into {venv}: make it writable for you and run again.")
    version, has_pip = probe(venv)
    if not has_pip:  # Its creation was interrupted, or a tool made it that leaves pip out.
        run(f"adding pip to {venv}", [venv_python(venv), "-I", "-m", "ensurepip", "--upgrade"])
    return version


def pip_install(venv: str, extras: str, version: "tuple[int, int]") -> None:
    """Install the package, editable, with the tested versions of its dependencies."""
    say(f"installing tlalign_mm[{extras}] into {venv}: about 3 GB to download on Linux, minutes.")
    say("pip's lines follow; it is silent for a minute after `Installing collected packages`.")
    step = f"pip install of tlalign_mm[{extras}]"
    if version > NEWEST_TESTED:
        step += f" on Python {dotted(version)} (tested up to {dotted(NEWEST_TESTED)})"
    # -I keeps what PYTHONPATH and the user's own site-packages hold from counting as installed.
    command = [venv_python(venv), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
    run(step, command + ["--no-input", "-c", "constraints.txt", "-e", f".[{extras}]"])


def imports(venv: str, code: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of Python in the environment, away from the repository's folder."""
    command = [venv_python(venv), "-I", "-c", code]
    return subprocess.run(command, cwd=venv, check=False, capture_output=True, text=True)


def mend_opencv(venv: str) -> None:
    """Swap OpenCV for its build without windows where the machine lacks the libraries for those.

    The mm libraries require opencv-python and imaug requires opencv-python-headless; both fill
    the same folder cv2, and the first one needs libGL, which a bare machine does not have.
    """
    result = imports(venv, "import cv2")
    if result.returncode == 0 or "cannot open shared object file" not in result.stderr:
        return
    say(f"OpenCV cannot be loaded ({result.stderr.strip().splitlines()[-1]});")
    say("replacing it by opencv-python-headless, which needs no such library.")
    command = [venv_python(venv), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--force-reinstall", "--no-deps", "-c", "constraints.txt", "opencv-python-headless"]
    run("pip install of opencv-python-headless", command)


def verify(venv: str, extras: str) -> None:
    """Import the libraries and print their versions in one line."""
    modules = ["torch", "torchvision", "timm"]
    if {"mm", "openmmlab"} & set(extras.split(",")):
        mend_opencv(venv)
        modules += MM_MODULES
    pairs = ", ".join(f"'{module}', {module}.__version__" for module in modules)
    result = imports(venv, f"import {', '.join(modules)}; print({pairs})")
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"the installed libraries in {venv} cannot be imported ({reason}): " + remedy(venv)
        )
    say(result.stdout.strip().splitlines()[-1])


def install(venv: str, extras: str) -> None:
    """Bring the environment up to date, unless its stamp says that it is."""
    if is_current(venv, extras):
        say(f"{venv} is up to date (Python {made_with(venv)}).")
        return
    check_python()
    version = prepare(venv)
    remove_stamp(venv)
    pip_install(venv, extras, version)
    say("checking that the libraries can be imported")
    verify(venv, extras)
    write_stamp(venv, extras)


def main(argv: "list[str] | None" = None) -> int:
    """Read the command line, install, and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Create a virtual environment and install tlalign_mm with its tested "
        "dependencies into it. Does nothing when that is already done.",
        epilog="example: python3.11 tools/install.py --extras mm --venv /tmp/tlalign-venv",
    )
    parser.add_argument("--extras", default="mm,dev", help="extras to install (default: mm,dev)")
    parser.add_argument(
        "--venv", default=".venv", help="folder, from the repository's top (default: .venv)"
    )
    args = parser.parse_args(argv)
    try:
        install(os.path.join(ROOT, os.path.expanduser(args.venv)), args.extras.replace(" ", ""))
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"install: {error}: mend that and run the same command again.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninstall: interrupted: {AGAIN}.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
