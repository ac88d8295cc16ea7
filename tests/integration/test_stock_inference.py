"""Trained dense models go to the stock libraries and back: same predictions, same bits."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.logging import HistoryBuffer
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor

import tests.integration.inference as inference
import tlalign_mm.compat  # noqa: F401  (mmdetection needs mmcv's ops)
from tlalign_mm.checkpoints import Checkpoint, read, write
from tlalign_mm.engine.config_text import backbone_config
from tlalign_mm.proof.twins import randomize
from tools import convert_checkpoint

pytestmark = pytest.mark.integration

SWIN = {
    "type": "tlalign_mm.SwinTransformer",
    "embed_dim": 24,
    "depths": [2, 1, 2],
    "num_heads": [3, 6, 12],
    "window_size": 4,
    "always_shift": True,
    "out_indices": [1, 2],
    "frozen_stages": 1,
    "drop_path_rate": 0.2,
}
VIT = {
    "type": "tlalign_mm.VisionTransformer",
    "embed_dim": 64,
    "depth": 3,
    "num_heads": 4,  # its tensors alone would say 1
    "img_size": [64, 80],
    "patch_size": 8,
    "out_indices": [0, -1],
}
PVT = {
    "type": "tlalign_mm.PyramidVisionTransformer",
    "embed_dims": [16, 32],
    "depths": [1, 2],
    "num_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "sr_ratios": [2, 1],
    "img_size": 64,
}
SIZES = {"type", "embed_dim", "embed_dims", "depth", "depths", "num_heads", "window_size"}
SIZES |= {"img_size", "patch_size", "mlp_ratios", "sr_ratios"}
NORM = {"type": "BN", "momentum": 0.01}
PARTS = ("tlalign_mm.backbones", "tlalign_mm.checkpoints")  # mmdetection may need the ops of compat
CASES = {  # library, backbone, its channels, what must not be imported, tolerance
    "mmseg swin": ("mmseg", SWIN, [48, 96], ("tlalign_mm",), 1e-5),
    "mmseg vit": ("mmseg", VIT, [64, 64], ("tlalign_mm",), 1e-5),
    "mmdet swin": ("mmdet", SWIN, [48, 96], PARTS, 1e-5),
    # mmdetection's norms behind patches and reductions have 1e-6, the official ones 1e-5
    "mmdet pvt": ("mmdet", PVT, [16, 32], PARTS, 5e-3),
}


def segmentor(backbone: dict[str, Any], channels: list[int]) -> dict[str, Any]:
    head = {"in_channels": channels, "in_index": [0, 1], "channels": 16, "num_classes": 3}
    loss = {"type": "CrossEntropyLoss", "loss_weight": 1.0}
    fcn = {"in_channels": channels[1], "in_index": 1, "channels": 8, "num_classes": 3}
    model = {
        "type": "EncoderDecoder",
        "data_preprocessor": {"type": "SegDataPreProcessor", "mean": [0.0] * 3, "std": [1.0] * 3},
        "backbone": backbone,
        "decode_head": {"type": "UPerHead", **head, "norm_cfg": NORM, "loss_decode": loss},
        "auxiliary_head": {"type": "FCNHead", **fcn, "norm_cfg": NORM, "loss_decode": loss},
        "test_cfg": {"mode": "whole"},
    }
    return {"default_scope": "mmseg", "model": model}


def detector(backbone: dict[str, Any], channels: list[int]) -> dict[str, Any]:
    model = get_config("mmdet::_base_/models/mask-rcnn_r50_fpn.py").model
    strides = [8, 16] if "embed_dim" in backbone else [4, 8]
    roi = {"out_channels": 8, "featmap_strides": strides}
    model.backbone = backbone
    model.neck.update(in_channels=channels, out_channels=8, num_outs=2)
    model.rpn_head.update(in_channels=8, feat_channels=8)
    model.rpn_head.anchor_generator.strides = strides
    model.roi_head.bbox_roi_extractor.update(roi)
    model.roi_head.mask_roi_extractor.update(roi)
    model.roi_head.bbox_head.update(in_channels=8, fc_out_channels=16, num_classes=2)
    model.roi_head.mask_head.update(in_channels=8, conv_out_channels=8, num_classes=2, num_convs=1)
    model.test_cfg.rpn.update(nms_pre=50, max_per_img=20)
    model.test_cfg.rcnn.update(max_per_img=10)
    pipeline = [
        {"type": "LoadImageFromFile"},
        {"type": "Resize", "scale": (80, 64), "keep_ratio": True},
        {
            "type": "PackDetInputs",
            "meta_keys": ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor"),
        },
    ]
    return {
        "default_scope": "mmdet",
        "custom_imports": {"imports": ["tlalign_mm.compat"], "allow_failed_imports": False},
        "model": model,
        "test_dataloader": {"dataset": {"type": "CocoDataset", "pipeline": pipeline}},
        "visualizer": {"type": "DetLocalVisualizer", "name": "visualizer"},
    }


def save_as_the_runner_does(path: Path, library: str, cfg: Config) -> dict[str, Tensor]:
    init_default_scope(library)
    state = randomize(MODELS.build(cfg.model), seed=1).state_dict()
    classes = ("ground", "one", "two")[library == "mmdet" :]
    meta = {
        "cfg": cfg.pretty_text,
        "epoch": 1,
        "iter": 20,
        "seed": 0,
        "dataset_meta": {"classes": classes, "palette": [[0, 0, 0]] * len(classes)},
    }
    hub = {"log_scalars": {"loss": HistoryBuffer([1.0], [1])}, "runtime_info": {}}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}
    torch.save(
        {"meta": meta, "state_dict": state, "message_hub": hub, "optimizer": optimizer}, path
    )
    return state


def train(case: str, path: Path) -> dict[str, Tensor]:
    """Write the file of a run; returns its tensors."""
    library, backbone, channels, *_ = CASES[case]
    make = {"mmseg": segmentor, "mmdet": detector}[library]
    return save_as_the_runner_does(path, library, Config(make(backbone, channels)))


def predict_without(blocked: tuple[str, ...], library: str, file: Path) -> list[Tensor]:
    out = file.with_suffix(".predictions")
    run = subprocess.run(
        [sys.executable, inference.__file__, library, str(file), str(out), *blocked],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return torch.load(out)


def convert(source: Path, target: Path, to: str) -> Path:
    convert_checkpoint.main([str(source), str(target), "--to", to])
    return target


@pytest.mark.parametrize("case", CASES)
def test_the_stock_library_predicts_the_same_without_this_package(case: str, tmp_path) -> None:
    library, _, _, blocked, tolerance = CASES[case]
    train(case, tmp_path / "run.pth")
    stock = convert(tmp_path / "run.pth", tmp_path / "stock.pth", library)
    theirs = predict_without(blocked, library, stock)
    for found, own in zip(theirs, inference.PREDICT[library](tmp_path / "run.pth"), strict=True):
        assert found.shape == own.shape and len(own) > 0
        if own.dtype == torch.bool:  # masks
            assert (found != own).float().mean() <= tolerance
        else:
            torch.testing.assert_close(found, own, rtol=tolerance, atol=tolerance)


def test_without_conversion_the_stock_library_needs_this_package(tmp_path) -> None:
    train("mmseg swin", tmp_path / "run.pth")
    with pytest.raises(RuntimeError, match="tlalign_mm.SwinTransformer is not in"):
        predict_without(("tlalign_mm",), "mmseg", tmp_path / "run.pth")


@pytest.mark.parametrize("case", CASES)
def test_back_again_every_tensor_and_the_config_are_as_before(case: str, tmp_path) -> None:
    library, backbone, *_ = CASES[case]
    before = train(case, tmp_path / "run.pth")
    stock = convert(tmp_path / "run.pth", tmp_path / "stock.pth", library)
    back = convert(stock, tmp_path / "back.pth", "tlalign_mm")
    after = torch.load(back, weights_only=True)
    expected = {n: t for n, t in before.items() if not n.startswith("data_preprocessor.")}
    assert after["state_dict"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in after["state_dict"].items())
    assert after["meta"]["dataset_meta"] == torch.load(stock)["meta"]["dataset_meta"]
    found = backbone_config(after["meta"]["cfg"])
    count = len(backbone["depths"]) if "depths" in backbone else backbone["depth"]
    assert found["out_indices"] == tuple(i % count for i in backbone.get("out_indices", range(2)))
    lists = {key: list(value) for key, value in found.items() if isinstance(value, tuple)}
    known = {
        key: value for key, value in backbone.items() if key not in ("img_size", "out_indices")
    }
    assert {key: (found | lists)[key] for key in known} == known


V2 = {
    "type": "tlalign_mm.PyramidVisionTransformerV2",
    "embed_dims": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 3, 4],
    "mlp_ratios": [2, 2, 2, 2],
    "sr_ratios": [8, 4, 2, 1],
}


@pytest.mark.parametrize(
    ("library", "backbone"),
    [("mmseg", SWIN), ("mmdet", SWIN), ("mmseg", VIT), ("mmdet", PVT)] + [("mmdet", V2)],
)
def test_the_printed_backbone_loads_the_file_by_its_stock_init_weights(
    library: str, backbone: dict, tmp_path, capsys
) -> None:
    fields = {key: value for key, value in backbone.items() if key in SIZES}
    ours = randomize(MODELS.build({**fields, "out_indices": ()}), seed=1)
    source = write(
        tmp_path / "a.pth", Checkpoint(ours.state_dict(), "tlalign_mm", ours.architecture)
    )
    convert(source, tmp_path / "b.pth", library)
    config = Config.fromstring(capsys.readouterr().out.partition("Use it by:\n")[2], ".py")
    stock = MODELS.build(config.backbone)
    stock.init_weights()
    found = {
        name.removeprefix("backbone."): t for name, t in read(tmp_path / "b.pth").tensors.items()
    }
    state = stock.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    assert {n for n in state.keys() - found.keys() if not n.startswith("norm")} == set()


@pytest.mark.parametrize("case", ["mmseg swin", "mmdet swin"])
def test_back_again_our_library_predicts_the_same_bits(case: str, tmp_path) -> None:
    library = CASES[case][0]
    train(case, tmp_path / "run.pth")
    stock = convert(tmp_path / "run.pth", tmp_path / "stock.pth", library)
    back = convert(stock, tmp_path / "back.pth", "tlalign_mm")
    before, after = (inference.PREDICT[library](f) for f in (tmp_path / "run.pth", back))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
