"""Tables of keys are read in both directions, and say what they cannot explain."""

import pytest
import torch

from tlalign_mm.checkpoints import CheckpointError
from tlalign_mm.checkpoints.keymap import Op, Rule, same, to_ours, to_theirs, under

A, B = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)


def test_numbers_are_shifted_by_the_offset_and_back() -> None:
    table = (Rule("layers.{i+1}.{j}.down.{p}", "stages.{i}.{j}.down.{p}"),)
    found = to_theirs({"layers.3.0.down.weight": A}, table)
    assert list(found.tensors) == ["stages.2.0.down.weight"]
    assert list(to_ours(found.tensors, table).tensors) == ["layers.3.0.down.weight"]
    assert to_theirs({"layers.0.0.down.weight": A}, table).unknown == ["layers.0.0.down.weight"]


def test_a_part_ends_at_the_dot_and_the_rest_does_not() -> None:
    assert to_ours({"a.b.c": A}, same("a.{p}")).unknown == ["a.b.c"]
    assert list(to_ours({"a.b.c": A}, same("a.{rest}")).tensors) == ["a.b.c"]


def test_the_last_stage_is_a_placeholder() -> None:
    table = (Rule("norm.{p}", "norm{last}.{p}"),)
    assert list(to_theirs({"norm.bias": A}, table, last=3).tensors) == ["norm3.bias"]
    assert to_ours({"norm2.bias": A}, table, last=3).unknown == ["norm2.bias"]


def test_the_first_rule_that_matches_wins() -> None:
    table = (Rule("a.x", "special"), *same("a.{p}"))
    assert list(to_theirs({"a.x": A, "a.y": B}, table).tensors) == ["special", "a.y"]


def test_several_of_ours_are_rows_of_one_of_theirs() -> None:
    table = (Rule(("q.{p}", "kv.{p}"), "in_{p}", shares=(1, 2)),)
    for ours in ({"q.w": A, "kv.w": B}, {"kv.w": B, "q.w": A}):
        joined = to_theirs(ours, table)
        assert torch.equal(joined.tensors["in_w"], torch.cat([A, B]))
        assert "q.w" in joined.transformed["in_w"]
        back = to_ours(joined.tensors, table)
        assert torch.equal(back.tensors["q.w"], A) and torch.equal(back.tensors["kv.w"], B)


def test_a_part_without_its_partner_is_unknown() -> None:
    table = (Rule(("q.{p}", "kv.{p}"), "in_{p}", shares=(1, 2)),)
    assert to_theirs({"q.w": A}, table).unknown == ["q.w"]


def test_rows_that_cannot_be_split_are_refused_by_name() -> None:
    table = (Rule(("q.{p}", "kv.{p}"), "in_{p}", shares=(1, 2)),)
    with pytest.raises(CheckpointError, match=r"in_w of shape \(4, 3\) cannot be split into 3"):
        to_ours({"in_w": B}, table)


def test_values_pass_an_operation_and_its_inverse() -> None:
    table = (Rule("a", "b", Op("made a row", lambda t: t[None], lambda t: t[0])),)
    found = to_theirs({"a": A}, table)
    assert found.tensors["b"].shape == (1, 2, 3) and found.transformed == {"b": "made a row"}
    assert torch.equal(to_ours(found.tensors, table).tensors["a"], A)


def test_an_operation_on_an_odd_shape_is_refused_by_name() -> None:
    table = (Rule("a", "b", Op("split in fours", lambda t: t, lambda t: t.unflatten(-1, (4, -1)))),)
    with pytest.raises(CheckpointError, match=r"Tensor a has shape \(2, 3\)"):
        to_ours({"b": A}, table)


def test_what_is_dropped_on_purpose_is_not_unknown() -> None:
    table = (Rule(None, "buffer.{i}"), Rule("ours.{i}", None))
    there = to_ours({"buffer.1": A, "other": A}, table)
    assert (there.dropped, there.unknown) == (["buffer.1"], ["other"])
    here = to_theirs({"ours.1": A, "buffer.1": A}, table)
    assert (here.dropped, here.unknown) == (["ours.1"], ["buffer.1"])


def test_two_tensors_of_one_name_are_refused() -> None:
    table = (Rule("a", "x"), Rule("a", "y"))
    with pytest.raises(CheckpointError, match="Two tensors of the file are a"):
        to_ours({"x": A, "y": B}, table)


def test_a_prefix_goes_before_every_name_of_a_table() -> None:
    inner = (Rule("a", "b"), Rule(("q", "k"), "qk", shares=(1, 1)), Rule(None, "c"))
    assert under("o.", "t.", inner) == (
        Rule("o.a", "t.b"),
        Rule(("o.q", "o.k"), "t.qk", shares=(1, 1)),
        Rule(None, "t.c"),
    )
