"""Configs beside weights are read and changed as text; nothing of them is run."""

import pytest
from mmengine.config import Config

from tlalign_mm.engine.config_text import backbone_config, to_source, with_backbone

BACKBONE = {"type": "tlalign_mm.SwinTransformer", "depths": [2, 2], "out_indices": (0, 1)}
CONFIG = {
    "custom_imports": {"imports": ["tlalign_mm.compat", "math"], "allow_failed_imports": False},
    "default_scope": "mmdet",
    "model": {
        "type": "Detector",
        "backbone": BACKBONE,
        "neck": {"type": "FPN", "add_extra_convs": False, "norm_cfg": None},
    },
    "optim_wrapper": {"paramwise_cfg": {"custom_keys": {"a.b": {"lr_mult": 0.1}}}},
}
TEXT = Config(CONFIG).pretty_text


def load(text: str) -> dict:
    return Config.fromstring(text, ".py").to_dict()


def test_the_backbone_is_read_as_mmengine_reads_it() -> None:
    assert backbone_config(TEXT) == load(TEXT)["model"]["backbone"] == BACKBONE


def test_only_the_backbone_and_the_imports_of_this_package_change() -> None:
    stock = {"type": "mmdet.SwinTransformer", "depths": [2, 2], "init_cfg": None}
    changed = load(with_backbone(TEXT, stock))
    assert changed["model"]["backbone"] == stock
    assert changed["custom_imports"]["imports"] == ["math"]
    assert changed["model"]["neck"] == CONFIG["model"]["neck"]
    assert changed["optim_wrapper"] == CONFIG["optim_wrapper"]


def test_imports_of_this_package_alone_go_and_stay_where_it_is_needed() -> None:
    imports = {"imports": ["tlalign_mm.compat"]}
    text = Config({**CONFIG, "custom_imports": imports}).pretty_text
    assert "custom_imports" not in with_backbone(text, {"type": "mmdet.SwinTransformer"})
    assert "tlalign_mm.compat" in with_backbone(text, BACKBONE)


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"model = dict()",
        "model = (",
        "model = dict(type='X')",
        "model = build(backbone=dict(type='X'))",
        "model = dict(backbone=base)",
        "model = dict(backbone=dict(type=__import__('os').getcwd()))",
        "model = dict(backbone=dict(type='X', **more))",
        "\0",
    ],
)
def test_what_is_no_plain_backbone_is_none(text: object) -> None:
    assert backbone_config(text) is None


def test_nothing_of_a_config_is_run(tmp_path) -> None:
    mark = tmp_path / "ran"
    text = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n{TEXT}"
    assert backbone_config(text) == BACKBONE
    assert with_backbone(text, BACKBONE) is not None
    assert not mark.exists()


@pytest.mark.parametrize("value", [{"a": (1,), "b": [{"c": None}]}, (), [1.5, "x"], True, {}])
def test_source_gives_the_value_back(value: object) -> None:
    assert eval(to_source(value)) == value
