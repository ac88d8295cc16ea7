"""The table of conversions: every layout that has the network, there and back."""

import json

import pytest
import torch

from tests.proof.networks import NETWORKS, config, converted, our_file
from tlalign_mm.checkpoints import write_weights
from tlalign_mm.checkpoints.tables import TABLES
from tlalign_mm.proof import conversions as module
from tlalign_mm.proof.anatomy import Size
from tlalign_mm.proof.builders import is_installed
from tlalign_mm.proof.conversions import Conversion, conversions, convert_all, is_back
from tools import parity

LINE = Conversion("swin-tiny", "dense", "mmseg", 9, 2, "head", "yes", 9e-6, "mmseg", None)


@pytest.fixture
def small_images(monkeypatch) -> None:
    """Of networks that take any; the default would be 224 pixels."""

    def sizes(source, target) -> list[Size]:
        return [(64, 64), (64, 96)]

    monkeypatch.setattr(module, "comparable_sizes", sizes)


def test_every_published_size_is_converted() -> None:
    names = conversions()
    for size in ("tiny", "small", "base"):
        assert f"swin-{size} pretraining" in names and f"swin-{size} dense" in names
        assert f"deit-{size} pretraining" in names and f"deit-{size}-distilled dense" in names
    for size in ("tiny", "small", "medium", "large"):
        assert f"pvt-{size} pretraining" in names and f"pvt-{size} dense" in names
    for size in ("b0", "b1", "b2", "b2-linear", "b3", "b4", "b5"):
        assert f"pvt-v2-{size} pretraining" in names
    assert {"cait-xxs24 pretraining", "xcit-small-12 pretraining"} <= names.keys()


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "CASwinTransformer"])
def test_every_layout_gives_the_weights_back_and_the_same_network(name, small_images) -> None:
    lines = list(convert_all(name, config(name)))
    expected = TABLES[name.split()[0]].keys() - {"tlalign_mm"}
    expected -= {"mmdet"} if name.endswith("linear") else set()
    assert {line.layout for line in lines} == expected
    for line in lines:
        assert line.bit_equal == "yes" and line.passes(1e-5), line
        if line.layout != "mmpretrain" or is_installed("mmpretrain"):
            assert line.features is not None and line.compared_with != "–"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("VisionTransformer", {"mmseg"}),
        ("SwinTransformer", {"mmseg", "mmdet"}),
        ("PyramidVisionTransformer", {"mmdet"}),
    ],
)
def test_dense_networks_go_to_the_dense_libraries(name, layouts) -> None:
    lines = list(convert_all(name, config(name, is_dense=True)))
    assert {line.layout for line in lines} == layouts
    assert all(line.form == "dense" and not line.dropped for line in lines)
    assert all(line.passes(1e-5) for line in lines)


@pytest.mark.integration
def test_what_a_layout_has_no_place_for_is_listed() -> None:
    def dropped(name: str) -> dict[str, str]:
        return {line.layout: line.dropped for line in convert_all(name, config(name))}

    assert dropped("VisionTransformer distilled") == {
        "timm": "",
        "official": "",
        "mmseg": "dist_token, head, head_dist, a row of pos_embed",
        "mmpretrain": "",
    }
    assert dropped("PyramidVisionTransformer") == {
        "official": "",
        "mmdet": "cls_token, norm, head, a row of pos_embed4",
    }


@pytest.mark.parametrize(
    ("name", "layout"), [("SwinTransformer", "official"), ("PyramidVisionTransformer", "mmdet")]
)
def test_weights_that_do_not_come_back_are_noticed(name, layout) -> None:
    _, weights, there = converted(our_file(name), layout)
    _, translation = write_weights(weights, layout)
    assert is_back(weights, there, translation)
    first = next(iter(there.tensors))
    other = {**there.tensors, first: torch.nextafter(there.tensors[first], torch.tensor(9.0))}
    assert not is_back(weights, there._replace(tensors=other), translation)
    less = {n: t for n, t in there.tensors.items() if not n.endswith("norm1.bias")}
    assert not is_back(weights, there._replace(tensors=less), translation)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, None),
        ({"features": None, "compared_with": "–"}, None),
        ({"features": 2e-5}, 1),
        ({"features": float("nan")}, 1),
        ({"bit_equal": "no"}, 1),
    ],
)
def test_the_tool_fails_where_a_line_does(change, status, monkeypatch, capsys, tmp_path) -> None:
    line = LINE._replace(**change)
    monkeypatch.setattr(parity, "conversions", lambda: {"swin-tiny dense": lambda: [line]})
    record = tmp_path / "conversions.json"
    options = ["--conversions", "--arch", "swin-tiny", "--json", str(record)]
    if status is None:
        parity.main(options)
    else:
        with pytest.raises(SystemExit) as stop:
            parity.main(options)
        assert stop.value.code == status
    assert "| swin-tiny | dense | mmseg  | 9 " in capsys.readouterr().out
    assert json.loads(record.read_text())["rows"][0]["layout"] == "mmseg"
