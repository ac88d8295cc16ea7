"""The README is true: what it names exists, and its Python runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"(?:configs|tools|docs|tests|tlalign_mm)/[\w./-]+\.\w+", README))
    assert len(named) > 5
    assert not [path for path in named if not (ROOT / path).is_file() and ".mim" not in path]


def test_make_targets_that_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def test_the_example_that_follows_labels_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (example,) = [block for block in blocks if block.startswith("import torch\n")]
    exec(example, {})
    assert "(4, 56, 56, 2)" in capsys.readouterr().out
