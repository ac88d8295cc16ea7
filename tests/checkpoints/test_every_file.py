"""Every backbone loads every kind of file: formats, wrappers, prefixes and layouts."""

from functools import lru_cache
from itertools import cycle

import pytest
import torch
from torch import Tensor

from tests.checkpoints.samples import CASES, write_sample
from tests.checkpoints.toys import TOYS, build
from tlalign_mm.backbones import Backbone
from tlalign_mm.checkpoints import Checkpoint, read_weights, write, write_weights
from tlalign_mm.checkpoints.tables import TABLES

LAYOUTS = {  # of each toy, those that keep all that a pretrained network has
    toy: cycle([name for name in TABLES[toy.split()[0]] if name not in ("mmseg", "mmdet")])
    for toy in TOYS
}
NAMES = list(TOYS)
# A toy meets every format, every wrapper and every prefix; the kinds of file take turns.
TABLE = sorted(
    (toy, *case, next(LAYOUTS[toy])) for toy, case in zip(cycle(NAMES), CASES, strict=False)
)


@lru_cache(maxsize=1)
def target(toy: str) -> Backbone:
    return build(toy)


@lru_cache(maxsize=2)
def source(toy: str, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights under our names, and under theirs without the mm libraries' container."""
    ours = {name: tensor * 2 for name, tensor in build(toy).state_dict().items()}
    theirs = write_weights(read_weights(Checkpoint(ours), "source"), layout)[0].tensors
    return ours, {name.removeprefix("backbone."): t for name, t in theirs.items()}


def test_all_pairs_meet() -> None:
    for column in (1, 2, 3):
        values = {case[column - 1] for case in CASES}
        assert {(row[0], row[column]) for row in TABLE} == {(t, v) for t in TOYS for v in values}


@pytest.mark.parametrize(
    ("toy", "form", "wrapper", "prefix", "layout"), TABLE, ids=lambda part: str(part) or "bare"
)
def test_every_file_is_loaded(toy, form, wrapper, prefix, layout, tmp_path) -> None:
    ours, theirs = source(toy, layout)
    path = write_sample(tmp_path / "x.pth", form, wrapper, prefix, theirs)
    backbone = target(toy)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
    report = backbone.load(str(path), layout=layout)
    assert report.coverage == 100 and not report.unexplained
    state = backbone.state_dict()
    assert all(torch.equal(state[name], ours[name]) for name in state)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("dense", [False, True])
def test_what_is_written_with_its_architecture_is_loaded(dense, toy, tmp_path) -> None:
    source = build(toy, dense)
    checkpoint = Checkpoint(source.state_dict(), "tlalign_mm", source.architecture)
    path = write(tmp_path / "own.safetensors", checkpoint)
    report = build(toy, dense).load(str(path))
    assert report.coverage == 100 and not report.unexplained
