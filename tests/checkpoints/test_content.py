"""What a file holds is told apart: raw and averaged weights, what lies beside them, backbones."""

import argparse
from collections import OrderedDict

import numpy as np
import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from torch import nn

from tests.checkpoints.samples import TENSORS, save_safetensors, save_zip
from tlalign_mm.checkpoints import CheckpointError, backbone_part, read, read_header

RAW = {"a.weight": torch.zeros(2), "b": torch.zeros(1)}
AVERAGE = {"a.weight": torch.ones(2), "b": torch.ones(1)}
BOTH = {
    "deit": {"model": RAW, "model_ema": AVERAGE, "optimizer": {}},
    "timm": {"state_dict": RAW, "state_dict_ema": AVERAGE, "epoch": 3},
    "dino": {"student": {f"module.{k}": v for k, v in RAW.items()}, "teacher": AVERAGE},
    "nested": {"model": {"state_dict": RAW, "state_dict_ema": AVERAGE}},
    "deeper": {"model": {"state_dict": RAW}, "model_ema": {"state_dict": AVERAGE}},
    "other": {"state_dict": RAW, "ema_state_dict": AVERAGE},
}


def kind(tensors: dict) -> str:
    return {0.0: "model", 1.0: "ema"}[float(tensors["b"])]


@pytest.mark.parametrize("content", BOTH)
def test_of_two_weights_the_average_is_taken_unless_asked_otherwise(content, tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", BOTH[content])
    for asked, expected in ((None, "ema"), ("ema", "ema"), ("model", "model")):
        found = read(path, asked)
        assert kind(found.tensors) == found.weights == expected
        assert found.tensors.keys() == RAW.keys()
        assert read_header(path, asked).weights == expected


@pytest.mark.parametrize("asked", [None, "model", "ema"])
def test_the_hook_of_mmengine_saves_the_average_as_state_dict(asked, tmp_path) -> None:
    """The average's wrapper counts in ``steps``; its hook swaps values, not names."""
    net = nn.Linear(1, 1)
    average = ExponentialMovingAverage(net).state_dict()
    content = {
        "state_dict": OrderedDict(weight=torch.ones(1, 1), bias=torch.ones(1)),
        "ema_state_dict": OrderedDict((k, torch.zeros_like(v)) for k, v in average.items()),
        "message_hub": {},
    }
    assert set(average) == {"module.weight", "module.bias", "steps"}
    found = read(save_zip(tmp_path / "x.pth", content), asked)
    assert found.weights == (asked or "ema")
    assert float(found.tensors["bias"]) == (found.weights == "ema")
    assert found.tensors.keys() == {"weight", "bias"}
    other = "state_dict" if asked == "model" else "ema_state_dict"
    assert found.beside[other] == ("ema" if asked == "model" else "model") + " weights"


def test_weights_that_are_not_there_are_an_error(tmp_path) -> None:
    for content, absent, present in (
        ({"model": RAW}, "ema", "model weights under 'model'"),
        ({"teacher": RAW}, "model", "ema weights under 'teacher'"),
        (RAW, "ema", "model weights"),
    ):
        path = save_zip(tmp_path / "x.pth", content)
        assert read(path).weights is None
        with pytest.raises(CheckpointError, match=f"no {absent} weights, only {present}"):
            read(path, absent)
    with pytest.raises(CheckpointError, match="'average' of .* ask for model or ema"):
        read(path, "average")
    flat = save_safetensors(tmp_path / "x.safetensors", RAW)
    with pytest.raises(CheckpointError, match="no ema weights"):
        read(flat, "ema")


def test_what_lies_beside_the_weights_is_described(tmp_path) -> None:
    content = {
        "model": RAW,
        "optimizer": {"state": {}},
        "args": argparse.Namespace(lr=1),
        "epoch": 300,
        "acc": np.float64(81.5),
        "name": "deit",
        "text": "x" * 1000,
        "loss": torch.ones(2, 3),
        "scaler": None,
        "backbone": RAW,
    }
    assert read(save_zip(tmp_path / "x.pth", content)).beside == {
        "optimizer": "dict",
        "args": "Namespace",
        "epoch": "300",
        "acc": "81.5",
        "name": "'deit'",
        "text": "str",
        "loss": "tensor (2, 3)",
        "scaler": "None",
        "backbone": "dict",
    }
    assert read(save_zip(tmp_path / "x.pth", {**RAW, "epoch": 3})).beside == {"epoch": "3"}


def test_what_a_file_says_about_itself_is_kept_in_plain_values(tmp_path) -> None:
    deep: list = []
    deep.append(deep)
    meta = {
        "dataset_meta": {"classes": ("cat", "dog"), "palette": [[1, 2, 3]]},
        "epoch": np.int64(3),
        "seed": None,
        "cfg": "model = dict()",
        "array": np.zeros(3),
        "deep": [[deep] * 50] * 50,
        3: "no name",
    }
    found = read(save_zip(tmp_path / "x.pth", {"state_dict": RAW, "meta": meta}))
    assert found.meta["deep"]
    assert {k: v for k, v in found.meta.items() if k != "deep"} == {
        "dataset_meta": {"classes": ["cat", "dog"], "palette": [[1, 2, 3]]},
        "epoch": 3,
        "seed": None,
        "cfg": "model = dict()",
    }
    assert (found.layout, found.architecture) == (None, None)


def test_wrappers_in_names_go_wherever_they_stand(tmp_path) -> None:
    names = (
        "module._orig_mod.a.weight",
        "layers.0.module.b.weight",
        "layers._orig_mod.c._checkpoint_wrapped_module.weight",
        "module",
    )
    found = read(save_zip(tmp_path / "x.pth", {n: torch.ones(1) for n in names})).tensors
    assert list(found) == ["a.weight", "layers.0.b.weight", "layers.c.weight", "module"]


def test_names_that_become_equal_are_an_error(tmp_path) -> None:
    path = save_zip(tmp_path / "x.pth", {"a.b": torch.ones(1), "module.a.b": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"holds a\.b twice, once as module\.a\.b"):
        read(path)


def test_counters_are_no_weights(tmp_path) -> None:
    counters = {"steps": torch.tensor(3), "n_averaged": torch.tensor(4)}
    path = save_zip(tmp_path / "x.pth", {"model_ema": {**RAW, **counters}})
    assert read(path).tensors.keys() == RAW.keys()
    assert "norm.num_batches_tracked" in read(save_zip(path, TENSORS)).tensors
    with pytest.raises(CheckpointError, match="holds no weights"):
        read(save_zip(path, counters))


@pytest.mark.parametrize(
    ("before", "rest"),
    [
        ("", []),
        ("backbone.", ["decode_head.conv.weight", "auxiliary_head.x", "neck.y"]),
        ("model.backbone.encoder.", ["model.roi_head.x", "head.weight"]),
        ("encoder.", ["decoder.blocks.0.x"]),
        ("teacher.backbone.", ["teacher.head.x"]),
        ("backbone.", ["encoder.layers.0.x", "decoder.layers.0.x", "bbox_head.y"]),
    ],
)
def test_the_backbone_of_a_whole_model_is_found(before, rest) -> None:
    inside = {"patch_embed.proj.weight": (4, 3), "layers.0.blocks.0.norm1.weight": (4,)}
    part = backbone_part({**{before + k: v for k, v in inside.items()}, **dict.fromkeys(rest)})
    assert part.prefix == before and part.tensors == inside and list(part.rest) == rest


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        (["student.backbone.a", "teacher.backbone.a"], "student.", "teacher."),
        (["model.x", "model_ema.x"], "model.", "model_ema."),
        (["model.student.x", "model.teacher.x"], "model.student.", "model.teacher."),
        (["backbone.x", "model.x"], "backbone.", "model."),
    ],
)
def test_two_possible_backbones_are_both_named(names, first, second) -> None:
    tensors = dict.fromkeys(names)
    with pytest.raises(CheckpointError, match=f"Both {first} and {second} in x.pth .* prefix="):
        backbone_part(tensors, source="x.pth")
    chosen = names[1].rsplit(".", 1)[0]
    assert backbone_part(tensors, chosen).prefix == f"{chosen}."
    assert list(backbone_part(tensors, chosen).rest) == names[:1]


def test_a_prefix_is_taken_as_it_is_given() -> None:
    tensors = {"a.backbone.x": 1, "a.y": 2, "ab.z": 3}
    for prefix in ("a", "a."):
        part = backbone_part(tensors, prefix)
        assert part.tensors == {"backbone.x": 1, "y": 2} and part.rest == {"ab.z": 3}
    assert backbone_part(tensors, "module.a").prefix == "a."
    assert backbone_part(tensors, "").tensors == tensors
    with pytest.raises(CheckpointError, match=r"prefix 'b\.'; its names begin with a\., ab\.;"):
        backbone_part(tensors, "b")
