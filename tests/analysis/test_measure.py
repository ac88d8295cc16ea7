"""Measuring: steps run in turn, ratios are taken within a round, memory in a process of its own."""

import json

import pytest
import torch

from tlalign_mm.analysis.measure import alternate, peak_memory, summarize, table, write_json


def test_every_step_runs_once_a_round_in_turning_order() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    rounds = list(alternate(steps, rounds=3, warmup=1))
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert [list(r) for r in rounds] == [["a", "b", "c"]] * 3
    assert all(seconds > 0 for r in rounds for seconds in r.values())


def test_ratios_are_taken_within_a_round() -> None:
    # the machine was three times slower in the second round; the ratio does not see it
    rounds = [{"base": 1.0, "x": 1.1}, {"base": 3.0, "x": 3.3}, {"base": 1.0, "x": 1.1}]
    summary = summarize(rounds, "base")
    assert summary["x"]["time_ratio"] == pytest.approx(1.1)
    assert summary["x"]["seconds"] == 1.1
    assert summary["base"] == {"seconds": 1.0, "time_ratio": 1.0, "rounds": 3}


def hold(mebibytes: int):
    def step() -> None:
        torch.ones(mebibytes * 2**18).sum()

    return step


def fail(_: int):
    raise ValueError("no such step")


def test_peak_memory_sees_what_a_step_allocates() -> None:
    assert 180 < peak_memory(hold, 200) < 260


def test_a_step_that_cannot_be_built_is_named(capfd) -> None:
    with pytest.raises(RuntimeError, match=r"memory of fail\(1,\) failed"):
        peak_memory(fail, 1)
    assert "no such step" in capfd.readouterr().err


def test_the_table_is_markdown_and_the_record_is_json(tmp_path) -> None:
    rows = [{"arch": "a", "x": 1.23456, "n": None}, {"arch": "bb", "x": 2e-7, "n": 0.0}]
    assert table(rows).splitlines() == [
        "| arch | x       | n |",
        "|------|---------|---|",
        "| a    | 1.235   |   |",
        "| bb   | 2.0e-07 | 0 |",
    ]
    write_json(tmp_path / "a.json", {"rows": rows})
    assert json.loads((tmp_path / "a.json").read_text()) == {"rows": rows}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
