"""Every shipped config loads, its file name and header are true, and its model builds."""

import re
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if "_base_" not in p.parts)
IDS = [str(p.relative_to(ROOT / "configs")) for p in CONFIGS]


def load(path: Path) -> Config:
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    return cfg


def backbone_of(cfg: Config) -> dict:
    return cfg.model.backbone


def pretrain_config_of(path: Path) -> Path:
    """The config whose backbone a dense one starts from, by the name before the first dash pair."""
    method = "tlalign" if "-tlalign_" in path.name else "cutmix"
    return next((ROOT / "configs/pretrain").glob(f"swin-digits_{method}_*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_the_model_builds(path: Path) -> None:
    cfg = load(path)
    backbone = backbone_of(cfg)
    assert backbone.type.startswith("tlalign_mm."), "types carry their scope"
    backbone.pop("init_cfg", None)  # its file appears with the pretraining
    model = MODELS.build(cfg.model)
    assert type(model.backbone).__module__.startswith("tlalign_mm.")


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_the_header_states_command_and_published_number(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    assert "Command: " in header and "Published number: " in header
    for named in re.findall(r"configs/\S+\.py", header):
        assert named == str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_the_file_name_states_batch_and_length(path: Path) -> None:
    cfg = load(path)
    batch, length, unit = re.search(r"_1xb(\d+)-(\d+)(e?)_", path.name).groups()
    assert cfg.train_dataloader.batch_size == int(batch)
    assert cfg.train_cfg["max_epochs" if unit else "max_iters"] == int(length)
    ends = [s.end for s in cfg.param_scheduler]
    assert max(ends) == int(length), "the schedule ends with the training"


DENSE = [p for p in CONFIGS if "pretrain" not in p.parts]


@pytest.mark.parametrize("path", DENSE, ids=[p.name for p in DENSE])
def test_dense_backbones_are_those_of_the_pretraining(path: Path) -> None:
    dense = backbone_of(load(path))
    pretrained = backbone_of(load(pretrain_config_of(path)))
    for field in ("embed_dim", "depths", "num_heads", "window_size", "patch_size"):
        assert dense[field] == pretrained[field]


@pytest.mark.parametrize("folder", ["upernet", "cascade_mask_rcnn"])
def test_scratch_and_pretrained_differ_in_the_weights_alone(folder: str) -> None:
    pairs = {"-tlalign_" in p.name: load(p) for p in DENSE if folder in p.parts}
    scratch, pretrained = pairs[False].to_dict(), pairs[True].to_dict()
    scratch["model"]["backbone"].pop("init_cfg")
    init_cfg = pretrained["model"]["backbone"].pop("init_cfg")
    assert init_cfg == {"type": "Pretrained", "checkpoint": pretrained.pop("pretrained")}
    assert scratch == pretrained


def test_area_and_tl_align_differ_in_the_target_alone() -> None:
    area, aligned = (load(p).to_dict() for p in CONFIGS if "pretrain" in p.parts)
    assert (area["model"].pop("target"), aligned["model"].pop("target")) == ("area", "tl_align")
    assert area == aligned


@pytest.mark.parametrize("path", DENSE, ids=[p.name for p in DENSE])
def test_classes_and_heads_agree(path: Path) -> None:
    cfg = load(path)
    classes = cfg.train_dataloader.dataset.metainfo.classes
    heads = []
    for name in ("decode_head", "auxiliary_head", "roi_head"):
        head = cfg.model.get(name)
        if head is not None:
            boxes = head.get("bbox_head", [])
            heads += [head] if "num_classes" in head else [*boxes, head.mask_head]
    assert heads and all(head.num_classes == len(classes) for head in heads)
    assert cfg.val_dataloader.dataset.metainfo.classes == classes
