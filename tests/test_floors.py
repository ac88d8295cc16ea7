"""Imports point downwards: a file may import from floors below its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tlalign_mm"
FLOORS = [
    {"registry", "compat"},
    {"checkpoints"},
    {"labels"},
    {"layers"},
    {"backbones", "necks"},
    {"proof"},
    {"pretrain"},
    {"engine", "analysis"},
]
MM_LIBRARIES = {"mmseg", "mmdet", "mmpretrain"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively"
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def floor_of(name: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


def home_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def breaches(file: Path, modules: set[str]) -> list[str]:
    home = home_of(file)
    ours = [m.split(".")[1] for m in modules if m.startswith("tlalign_mm.")]
    return [name for name in ours if name != home and floor_of(name) >= floor_of(home)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_downwards(file: Path) -> None:
    modules = imported_modules(file)
    if file == PACKAGE / "__init__.py":
        assert not modules, "importing the package must stay free of everything"
        return
    assert not breaches(file, modules)
    assert not {m.split(".")[0] for m in modules} & MM_LIBRARIES


def test_a_breach_is_found() -> None:
    assert breaches(PACKAGE / "labels/mixing.py", {"tlalign_mm.backbones.swin"}) == ["backbones"]
    assert breaches(PACKAGE / "engine/launch.py", {"tlalign_mm.analysis.curves"}) == ["analysis"]
    assert not breaches(PACKAGE / "backbones/swin.py", {"tlalign_mm.labels.stream"})


@pytest.mark.parametrize("floor", ["labels", "layers"])
def test_the_method_needs_torch_and_timm_layers_alone(floor: str) -> None:
    allowed = {"math", "torch", "timm.layers", "numpy", "typing", "collections", "tlalign_mm"}
    for file in (PACKAGE / floor).rglob("*.py"):
        for module in imported_modules(file):
            assert any(module == a or module.startswith(a + ".") for a in allowed), (file, module)


def test_matplotlib_is_imported_by_the_analysis_alone() -> None:
    users = {home_of(f) for f in FILES if any("matplotlib" in m for m in imported_modules(f))}
    assert users == {"analysis"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, tlalign_mm; print('torch' in sys.modules, 'mmengine' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
