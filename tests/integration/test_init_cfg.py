"""A config's ``init_cfg`` takes a file of any layout, in every library, and says what it loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import Dataset

import tlalign_mm.compat  # noqa: F401  (mmdetection needs mmcv's ops)
from tests.checkpoints.toys import DENSE, TOYS, WAYS, build, classifier
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read_weights, write, write_weights

pytestmark = pytest.mark.integration

# a distilled network is another one without its token
KEPT = [(toy, x) for toy, dense, x in WAYS if dense and (toy[-9:], x) != ("distilled", "mmseg")]
HEAD = {
    "type": "mmseg.FCNHead",
    "in_channels": 128,
    "channels": 8,
    "num_classes": 3,
    "norm_cfg": {"type": "BN"},
    "in_index": -1,
}


def file_of(tensors: dict[str, Tensor], layout: str, path: Path) -> str:
    """A file in this layout, which says nothing about itself."""
    checkpoint, _ = write_weights(read_weights(Checkpoint(tensors), "source"), layout)
    return str(write(path, Checkpoint(checkpoint.tensors)))


def backbone_cfg(toy: str, **init_cfg: Any) -> dict[str, Any]:
    family = toy.split()[0]
    return {
        "type": f"tlalign_mm.{family}",
        **TOYS[toy],
        "out_indices": DENSE.get(family, (0, 1)),
        "init_cfg": {"type": "Pretrained", **init_cfg},
    }


def segmentor(toy: str, **init_cfg: Any) -> nn.Module:
    cfg = {"type": "mmseg.EncoderDecoder", "backbone": backbone_cfg(toy, **init_cfg)}
    with DefaultScope.overwrite_default_scope("mmseg"):
        model = MODELS.build({**cfg, "decode_head": HEAD})
        model.init_weights()
    return model


@pytest.mark.parametrize(("toy", "layout"), KEPT)
def test_every_layout_loads_into_a_segmentor(toy, layout, tmp_path, caplog) -> None:
    tensors = build(toy, dense=True).state_dict()
    path = file_of(tensors, layout, tmp_path / "any.pth")
    with caplog.at_level(logging.INFO):
        model = segmentor(toy, checkpoint=path, layout=layout)
    own = model.backbone.state_dict()
    norms = {name for name in own if name.startswith("norm")}  # a layout may lack dense norms
    assert all(torch.equal(own[name], tensors[name]) for name in own.keys() - norms)
    assert own.keys() <= tensors.keys()


def test_mmdetection_and_pretraining_load_the_same_file(tmp_path) -> None:
    tensors = classifier("SwinTransformer")
    path = file_of(tensors, "official", tmp_path / "swin.pth")
    detector = {
        "type": "mmdet.RetinaNet",
        "backbone": backbone_cfg("SwinTransformer", checkpoint=path),
        "neck": {"type": "mmdet.FPN", "in_channels": [24, 48], "out_channels": 8, "num_outs": 2},
        "bbox_head": {
            "type": "mmdet.RetinaHead",
            "num_classes": 2,
            "in_channels": 8,
            "stacked_convs": 1,
            "feat_channels": 8,
            "anchor_generator": {
                "type": "mmdet.AnchorGenerator",
                "ratios": [1.0],
                "scales": [4],
                "strides": [4, 8],
            },
            "bbox_coder": {"type": "mmdet.DeltaXYWHBBoxCoder"},
        },
    }
    backbone = {**backbone_cfg("SwinTransformer", checkpoint=path), "out_indices": ()}
    pretraining = {"type": "tlalign_mm.ImageClassifier", "backbone": backbone, "num_classes": 5}
    for scope, cfg in (("mmdet", detector), ("tlalign_mm", pretraining)):
        with DefaultScope.overwrite_default_scope(scope):
            model = MODELS.build(cfg)
            model.init_weights()
        own = model.backbone.state_dict()
        taken = [name for name in own if name in tensors]
        assert len(taken) == len(own) - (4 if scope == "mmdet" else 0), "all but the dense norms"
        assert all(torch.equal(own[name], tensors[name]) for name in taken)


def test_the_report_is_printed(tmp_path, monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("tlalign_mm.backbones.base.print_log", lambda text, **_: lines.append(text))
    path = file_of(classifier("SwinTransformer"), "official", tmp_path / "swin.pth")
    segmentor("SwinTransformer", checkpoint=path)
    (report,) = lines
    assert f"Loaded {path} (SwinTransformer as named by the official repository" in report
    assert "dropped on purpose (4): norm.weight" in report and "0 unexplained" in report
    assert "left at initialisation (4): norm0.weight" in report
    assert "100.00 %" not in report, "the norms are parameters too"


def test_prefix_and_strict_are_honoured(tmp_path) -> None:
    tensors = build("SwinTransformer", dense=True).state_dict()
    two = {f"{net}.net.{name}": tensor for net in ("a", "b") for name, tensor in tensors.items()}
    path = str(write(tmp_path / "two.pth", Checkpoint(two)))
    model = segmentor("SwinTransformer", checkpoint=path, prefix="b.net")
    assert torch.equal(model.backbone.state_dict()["norm1.weight"], tensors["norm1.weight"])
    for init_cfg in ({}, {"prefix": "c"}):
        with pytest.raises(CheckpointError, match=r"two\.pth"):
            segmentor("SwinTransformer", checkpoint=path, **init_cfg)
    odd = {name: tensor for name, tensor in tensors.items() if "attn.proj" not in name}
    odd["layers.0.gate"] = torch.zeros(1)
    path = str(write(tmp_path / "odd.pth", Checkpoint(odd)))
    with pytest.raises(CheckpointError, match=r"6 tensors are missing .* 1 unexpected"):
        segmentor("SwinTransformer", checkpoint=path)
    segmentor("SwinTransformer", checkpoint=path, strict=False)


def test_a_field_that_init_cfg_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"init_cfg has the unknown fields \['map'\]"):
        segmentor("SwinTransformer", checkpoint="x.pth", map="cpu")


class OneImage(Dataset):
    """A data set of one image."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.zeros(3, 32, 32), "labels": 0}


def run(work_dir: Path, tensors: dict[str, Tensor], **cfg: Any) -> dict[str, Tensor]:
    """Weights after a training that changes nothing."""
    path = str(write(work_dir / "init.pth", Checkpoint(tensors)))
    backbone = {**backbone_cfg("SwinTransformer", checkpoint=path), "out_indices": ()}
    runner = Runner(
        **{
            "model": {
                "type": "tlalign_mm.ImageClassifier",
                "backbone": backbone,
                "num_classes": 5,
                "data_preprocessor": {"type": "tlalign_mm.MixDataPreprocessor"},
            },
            "train_dataloader": {
                "dataset": OneImage(),
                "batch_size": 1,
                "collate_fn": {"type": "default_collate"},
                "sampler": {"type": "mmengine.DefaultSampler", "shuffle": False},
            },
            "train_cfg": {"by_epoch": False, "max_iters": 1},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}},
            "work_dir": str(work_dir),
            "default_hooks": {"logger": None, "checkpoint": None},
            "default_scope": "mmengine",
            "log_level": "ERROR",
            "experiment_name": work_dir.name,
            **cfg,
        }
    )
    runner.train()
    return {name: t.clone() for name, t in runner.model.backbone.state_dict().items()}


def test_load_from_wins_over_init_cfg(tmp_path) -> None:
    """The initial weights come first, and a run's own weights replace them."""
    tensors = build("SwinTransformer").state_dict()
    doubled = {f"backbone.{name}": 2 * tensor for name, tensor in tensors.items()}
    other = write(tmp_path / "other.pth", Checkpoint(doubled))
    alone = run(tmp_path / "alone", tensors)
    assert all(torch.equal(alone[name], tensors[name]) for name in tensors)
    both = run(tmp_path / "both", tensors, load_from=str(other))
    assert all(torch.equal(both[name], 2 * tensors[name]) for name in tensors)
