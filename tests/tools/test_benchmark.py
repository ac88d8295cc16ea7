"""tools/benchmark.py and tools/parity.py: their command lines, tables and records."""

import json

import pytest

from tlalign_mm.proof.parity import Difference
from tools import benchmark, parity


@pytest.fixture
def without_processes(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "peak_memory", lambda *_, **__: 100.0)


def run(tool, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tool", *arguments])
    tool.main()


def test_labels_prints_a_line_for_each_method(
    without_processes, monkeypatch, capsys, tmp_path
) -> None:
    record = tmp_path / "labels.json"
    options = "labels --arch deit-tiny --batch 2 --size 32 48 --rounds 2 --device cpu"
    run(benchmark, monkeypatch, *options.split(), "--json", str(record))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| deit")]
    assert len(lines) == 2 * 5
    written = json.loads(record.read_text())
    assert [row["method"] for row in written["rows"][:2]] == ["cutmix (timm)", "area"]
    assert written["rows"][0]["x time"] == 1.0 and written["rows"][0]["rounds"] == 2
    assert {"torch", "timm", "threads", "device"} <= written["environment"].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("labels --batch 3", "--batch 3 must be even"),
        ("labels --rounds 0", "--rounds and --batch must be at least 1"),
        ("labels --arch swin-huge", "invalid choice: 'swin-huge'"),
    ],
)
def test_wrong_options_are_named(options: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse_args(options.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("largest", "status"), [(9e-6, None), (2e-5, 1), (float("nan"), 1)])
def test_parity_fails_beyond_the_tolerance(largest, status, monkeypatch, capsys) -> None:
    line = Difference("deit-tiny", "timm", "224x224", 5.5, largest, 0.0, None, 0.01)
    monkeypatch.setattr(parity, "comparisons", lambda: {"deit-tiny timm": lambda: line})
    if status is None:
        run(parity, monkeypatch)
    else:
        with pytest.raises(SystemExit) as stop:
            run(parity, monkeypatch)
        assert stop.value.code == status
    assert "deit-tiny" in capsys.readouterr().out
