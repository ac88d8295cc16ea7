"""Ours to any layout and back is bit-equal, and what a layout has no place for is named."""

import pytest
import torch
from torch import Tensor

from tests.checkpoints.toys import TOYS, WAYS, build, classifier
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read_weights, write_weights
from tlalign_mm.checkpoints.tables import LAYOUTS, TABLES

CLASS = {"cls_token", "dist_token", "norm.weight", "norm.bias"}
LOST = {  # what a layout has no place for, by toy and layout
    ("VisionTransformer distilled", "mmseg"): {"dist_token"},
    ("PyramidVisionTransformer", "mmdet"): CLASS,
    ("SwinTransformer", "mmseg"): CLASS,
    ("SwinTransformer", "mmdet"): CLASS,
}


def there(tensors: dict[str, Tensor], layout: str, **kwargs: object) -> Checkpoint:
    return write_weights(read_weights(Checkpoint(tensors), "file"), layout, **kwargs)[0]


def back(file: Checkpoint, layout: str | None = None) -> dict[str, Tensor]:
    return read_weights(Checkpoint(file.tensors), "file", layout=layout).tensors


@pytest.mark.parametrize(("toy", "dense", "layout"), WAYS)
def test_there_and_back_is_bit_equal(toy, dense, layout) -> None:
    tensors = build(toy, dense).state_dict()
    file = there(tensors, layout)
    found = back(file, layout)
    lost = {name for name in tensors if name not in found}
    if toy == "CASwinTransformer":  # elsewhere its body is a Swin without the class block
        expected = {n for n in tensors if n.startswith(("class_block", "cls_token", "norm."))}
        assert lost <= expected
    elif layout in ("timm", "mmpretrain") and toy == "SwinTransformer" and dense:
        assert lost == {n for n in tensors if n.startswith("norm")}  # one final norm there
    else:
        assert lost <= LOST.get((toy, layout), set())
    assert found.keys() <= tensors.keys()
    for name, tensor in found.items():
        if name == "pos_embed" and lost:  # without the distillation token's row
            tensor = torch.cat([tensor[:, :1], tensors[name][:, 1:2], tensor[:, 1:]], 1)
        if name == "pos_embed2" and lost:  # without the class token's row
            tensor = torch.cat([tensors[name][:, :1], tensor], 1)
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(
    ("toy", "layout"), [(t, x) for t, d, x in WAYS if not d and x not in ("mmseg", "mmdet")]
)
def test_heads_go_there_and_back(toy, layout) -> None:
    tensors = classifier(toy)
    found = back(there(tensors, layout), layout)
    assert found.keys() == tensors.keys()
    for name in ("head.weight", "head.bias"):
        assert torch.equal(found[name], tensors[name])
    without = back(there(tensors, layout, keep_head=False), layout)
    assert without.keys() == {n for n in tensors if not n.startswith("head")}


@pytest.mark.parametrize(("toy", "dense", "layout"), WAYS)
def test_the_layout_is_told_by_the_keys(toy, dense, layout) -> None:
    """Files of the same names share a table; where two tables are possible, both are named."""
    file = there(build(toy, dense).state_dict(), layout)
    try:
        found = read_weights(Checkpoint(file.tensors), "file").layout
    except CheckpointError as error:
        assert "may be" in str(error) and f"({'mmseg, mmpretrain'})" in str(error)
        assert (toy, layout) == ("SwinTransformer", "mmpretrain")
        return
    assert TABLES[found.family][found.name] in (
        TABLES[found.family][layout],
        TABLES[found.family]["tlalign_mm"] if layout in ("timm", "official") else None,
        TABLES[found.family].get("mmseg") if layout == "mmpretrain" and dense else None,
        TABLES[found.family].get("timm") if layout == "tlalign_mm" else None,
    )


def test_mm_is_the_library_that_has_the_network() -> None:
    assert there(build("VisionTransformer").state_dict(), "mm").layout == "mmseg"
    assert there(build("PyramidVisionTransformer").state_dict(), "mm").layout == "mmdet"
    both = there(build("SwinTransformer").state_dict(), "mm")
    assert all(name.startswith("backbone.") for name in both.tensors), "as both libraries read it"
    with pytest.raises(CheckpointError, match="Neither mmsegmentation nor mmdetection"):
        there(build("XCiT").state_dict(), "mm")


@pytest.mark.parametrize("toy", TOYS)
def test_a_layout_without_the_network_is_refused_with_those_that_have_it(toy) -> None:
    tables = TABLES[toy.split()[0]]
    for layout in set(LAYOUTS) - set(tables):
        with pytest.raises(CheckpointError, match=f"in the layout {layout}; it exists in"):
            there(build(toy).state_dict(), layout)


def test_an_unknown_key_is_named() -> None:
    tensors = {**build("VisionTransformer").state_dict(), "blocks.0.gate": torch.zeros(1)}
    weights = read_weights(Checkpoint(tensors), "file")
    assert weights.translation.unknown == ["blocks.0.gate"]
    assert weights.report("file").unexplained == ["blocks.0.gate"]


def test_another_network_is_refused_with_its_keys() -> None:
    with pytest.raises(CheckpointError, match=r"none of the known networks.*layer1\.0\.conv1"):
        read_weights(Checkpoint({"layer1.0.conv1.weight": torch.zeros(1)}), "resnet.pth")


def test_old_timm_files_hold_the_downsampling_a_stage_earlier() -> None:
    """PITFALLS A2: both layouts of timm, also without a head, which fooled timm itself."""
    ours = build("SwinTransformer").state_dict()
    old = {
        name.replace("layers.1.downsample", "layers.0.downsample"): tensor
        for name, tensor in ours.items()
    }
    old["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    old["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16)
    weights = read_weights(Checkpoint(old), "file")
    assert weights.layout.name == "official" and not weights.translation.unknown
    assert len(weights.translation.dropped) == 2
    assert back(Checkpoint(old)).keys() == ours.keys()


def test_position_index_is_that_of_the_module() -> None:
    from timm.models.swin_transformer import WindowAttention

    from tlalign_mm.checkpoints.tables.swin import position_index

    for window in (1, 2, 4, 7):
        theirs = WindowAttention(8, 2, window_size=(window, window)).relative_position_index
        assert torch.equal(position_index(window), theirs)


@pytest.mark.parametrize("side", [32, 64, 96, 224])
def test_the_class_row_of_pvt_is_found_at_any_resolution(side) -> None:
    """PITFALLS A11: the public converter finds it at 224 pixels only."""
    tensors = build("PyramidVisionTransformer", img_size=side).state_dict()
    rows = tensors["pos_embed2"].shape[1]
    assert there(tensors, "mmdet").tensors["layers.1.1.0.pos_embed"].shape[1] == rows - 1
    bare = {name: t for name, t in tensors.items() if name not in CLASS}  # as official detection
    assert there(bare, "mmdet").tensors["layers.1.1.0.pos_embed"].shape[1] == rows - 1
    dense = build("PyramidVisionTransformer", True, img_size=side).state_dict()
    assert there(dense, "mmdet").tensors["layers.1.1.0.pos_embed"].shape[1] == rows - 1


def test_the_rest_of_a_dense_model_goes_with_its_backbone_between_dense_layouts() -> None:
    body = {f"backbone.{n}": t for n, t in build("SwinTransformer", True).state_dict().items()}
    whole = {**body, "decode_head.conv.weight": torch.ones(1), "head.cls.weight": torch.ones(2)}
    del whole["head.cls.weight"]
    stock = there(whole, "mmseg")
    assert "decode_head.conv.weight" in stock.tensors
    assert "backbone.stages.0.downsample.reduction.weight" in stock.tensors
    again = there(stock.tensors, "tlalign_mm")
    assert again.tensors.keys() == whole.keys()
    assert all(torch.equal(again.tensors[name], whole[name]) for name in whole)
    dropped = write_weights(read_weights(Checkpoint(whole), "file"), "timm")[1].dropped
    assert "decode_head.conv.weight" in dropped


def test_swin_of_a_detector_is_read_as_mmdetections() -> None:
    stock = there(build("SwinTransformer", True).state_dict(), "mmdet").tensors
    whole = {**stock, "roi_head.bbox_head.0.fc.weight": torch.ones(1)}
    assert read_weights(Checkpoint(whole), "file").layout.name == "mmdet"
