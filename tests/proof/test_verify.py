"""Verification: it builds the libraries' own models and says where those differ themselves."""

import pytest
import torch
from mmengine.registry import MODELS as ROOT
from safetensors.torch import save_file
from timm.models import deit, pvt_v2, swin_transformer

from tests.proof.networks import NETWORKS, SIZES, SWIN, converted, our_file
from tlalign_mm.checkpoints import Checkpoint, CheckpointError, read
from tlalign_mm.checkpoints.tables import TABLES
from tlalign_mm.proof import builders
from tlalign_mm.proof.anatomy import image_sizes
from tlalign_mm.proof.builders import Form, build_side
from tlalign_mm.proof.twins import randomize
from tlalign_mm.proof.verify import source_part, verify

TIMM = {"VisionTransformer", "SwinTransformer", "PyramidVisionTransformerV2", "CaiT", "XCiT"}
WAYS = [
    (name, is_dense, layout)
    for name in NETWORKS
    for is_dense in (False, True)
    for layout in TABLES[name.split()[0]]
    if (name, layout) != ("PyramidVisionTransformerV2 linear", "mmdet")
    if not (name == "CASwinTransformer" and is_dense)  # a Swin by its tensors
]


def whose(family: str, layout: str) -> str:
    if layout == "official":
        return "timm" if family in TIMM else "mmdet"
    if layout == "mmpretrain" and not builders.is_installed("mmpretrain"):
        return "our"
    return {"tlalign_mm": "our"}.get(layout, layout)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "is_dense", "layout"), WAYS)
def test_a_conversion_gives_the_same_network_there_and_back(name, is_dense, layout) -> None:
    family = name.split()[0]
    there = converted(our_file(name, is_dense), layout)
    found = verify(*there, sizes=SIZES.get(family))
    assert found.passes, found
    assert found.source.startswith("our ") and found.target.startswith(whose(family, layout))
    back = verify(*converted(there[2], "tlalign_mm", layout=layout), sizes=SIZES.get(family))
    assert back.passes, back
    assert back.source == found.target


@pytest.mark.integration
def test_everything_that_both_models_have_is_compared() -> None:
    def compared(name: str, layout: str, is_dense: bool = False) -> set[str]:
        there = converted(our_file(name, is_dense), layout)
        return {what for what, *_ in verify(*there).differences}

    stages = {"stage 1", "stage 2"}
    assert compared("SwinTransformer", "mmseg") == stages
    assert compared("SwinTransformer", "mmdet", is_dense=True) == stages | {"norm 1", "norm 2"}
    assert compared("SwinTransformer", "timm") == stages | {"norm 2", "pooled", "logits"}
    assert compared("VisionTransformer", "mmseg") == stages | {"norm 2", "pooled"}
    tokens = stages | {"pooled", "distilled", "logits"}
    assert compared("VisionTransformer distilled", "timm") == tokens


def timm_vit() -> torch.nn.Module:
    fields = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1}
    return deit.VisionTransformer(**fields, num_classes=5)


def timm_swin() -> torch.nn.Module:
    return swin_transformer.SwinTransformer(img_size=64, **SWIN, num_classes=5)


def timm_pvt_v2() -> torch.nn.Module:
    fields = NETWORKS["PyramidVisionTransformerV2"]
    return pvt_v2.PyramidVisionTransformerV2(**fields, num_classes=5)


@pytest.mark.integration
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize(
    ("build", "layout"), [(timm_vit, "mmseg"), (timm_swin, "mmseg"), (timm_pvt_v2, "mmdet")]
)
def test_a_file_that_timm_wrote_is_verified_in_an_mm_library(
    build, layout, suffix, tmp_path
) -> None:
    tensors = randomize(build()).state_dict()
    path = tmp_path / f"model.{suffix}"
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    sizes = [(64, 64), (64, 96)]
    found = verify(*converted(read(path), layout), sizes=sizes)
    assert found.passes and found.source.startswith("timm's"), found
    assert found.target.startswith(layout)


@pytest.mark.integration
def test_an_official_swin_goes_through_timms_filter_with_its_buffers() -> None:
    file, weights, there = converted(our_file("SwinTransformer"), "official")
    tensors = dict(there.tensors)
    index = torch.zeros(16, 16, dtype=torch.long)
    tensors["layers.0.blocks.0.attn.relative_position_index"] = index
    tensors["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    found = verify(*converted(Checkpoint({f"module.{n}": t for n, t in tensors.items()}), "mmdet"))
    assert found.passes and found.source == "timm's SwinTransformer"


@pytest.mark.integration
def test_the_backbone_of_a_whole_segmentor_is_verified_by_the_stock_class() -> None:
    fields = {"embed_dims": 24, "depths": (2, 2), "num_heads": (3, 6), "window_size": 4}
    stock = ROOT.build(
        {"type": "mmseg.SwinTransformer", **fields, "strides": (4, 2), "out_indices": (0, 1)}
    )
    tensors = {f"backbone.{n}": t for n, t in randomize(stock).state_dict().items()}
    tensors["decode_head.conv_seg.weight"] = torch.zeros(2, 48, 1, 1)
    for to in ("tlalign_mm", "mmdet"):
        found = verify(*converted(Checkpoint(dict(tensors)), to))
        assert found.passes and found.source == "mmseg's SwinTransformer", found


def test_swin_is_compared_where_no_library_pads_or_shifts_otherwise() -> None:
    swin = {"depths": [2, 2, 6, 2], "window_size": 7, "patch_size": 4}
    assert image_sizes(swin) == [(448, 448), (448, 672)]
    pvt = {"depths": [1] * 4, "sr_ratios": [8, 4, 2, 1], "img_size": [224, 224], "patch_size": 4}
    assert image_sizes(pvt) == [(224, 224), (256, 288)]
    assert image_sizes({"depth": 12, "img_size": [384, 384], "patch_size": 16}) == [
        (384, 384),
        (400, 416),
    ]
    assert image_sizes({"depth": 12, "patch_size": 8}) == [(224, 224), (232, 240)]


@pytest.mark.integration
def test_where_libraries_shift_differently_a_difference_is_said_to_be_theirs() -> None:
    there = converted(our_file("SwinTransformer"), "timm")
    mm = converted(Checkpoint(there[2].tensors), "mmseg")
    one_window = verify(*mm, sizes=[(32, 32)])  # the last map is one window: timm does not shift
    assert one_window.largest.value > 0.1 and one_window.largest.what == "stage 2"
    assert any("need not be the conversion's" in note for note in one_window.notes)
    agreed = verify(*mm)
    assert agreed.passes
    assert any("compared where neither is so" in note for note in agreed.notes)


@pytest.mark.integration
@pytest.mark.parametrize("size", [(32, 32), (40, 56)])
def test_ours_follows_the_dense_rule_of_windows_at_any_size(size) -> None:
    for layout in ("mmseg", "mmdet"):
        found = verify(*converted(our_file("SwinTransformer", is_dense=True), layout), sizes=[size])
        assert found.passes, found


@pytest.mark.integration
@pytest.mark.parametrize("name", ["PyramidVisionTransformer", "PyramidVisionTransformerV2"])
def test_mmdetections_other_eps_is_put_right_and_its_effect_is_said(name) -> None:
    found = verify(*converted(our_file(name), "mmdet"), sizes=[(64, 64)])
    assert found.passes
    (rule, largest), *others = found.own_rules.items()
    assert "eps of 1e-6 in 7 norms where 1e-5 is published" in rule and not others
    assert largest.value > found.tolerance
    assert rule in str(found)


@pytest.mark.integration
def test_the_distillation_token_is_left_out_of_the_reference_of_mmseg() -> None:
    file, weights, there = converted(our_file("VisionTransformer distilled"), "mmseg")
    found = verify(file, weights, there)
    assert found.passes
    assert any("compared without the distillation token" in note for note in found.notes)
    with_token = build_side(source_part(file, weights), Form(False, True, True))
    without = build_side(source_part(file, weights), Form(True, False, False))
    outputs = [side.outputs((32, 32))["stage 1"] for side in (with_token, without)]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3, "the token must matter"


@pytest.mark.integration
def test_pvt_is_compared_without_the_class_token_that_mmdetection_does_not_have() -> None:
    file, weights, there = converted(our_file("PyramidVisionTransformer"), "mmdet")
    found = verify(file, weights, there)
    assert found.passes
    assert any("compared without the class token" in note for note in found.notes)
    with_token = build_side(source_part(file, weights), Form(False, True, False))
    without = build_side(source_part(file, weights), Form(True, False, False))
    one, other = (side.outputs((64, 64)) for side in (with_token, without))
    assert torch.equal(one["stage 3"], other["stage 3"])
    assert (one["stage 4"] - other["stage 4"]).abs().max() > 1e-3, "the token must matter"


def test_timms_antialiased_positions_are_said_and_not_counted() -> None:
    found = verify(*converted(our_file("VisionTransformer"), "timm"))
    assert found.passes
    assert found.own_rules["timm antialiases positions when it resizes them"].value > 1e-3


def test_a_network_with_resized_positions_is_compared_at_their_size_alone() -> None:
    file, weights, there = converted(our_file("VisionTransformer"), "timm")
    positions = there.tensors["pos_embed"]
    grid = positions[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    grid = torch.nn.functional.interpolate(grid, (5, 6), mode="bicubic").flatten(2)
    resized = torch.cat([positions[:, :1], grid.transpose(1, 2)], 1)
    there = there._replace(
        tensors={**there.tensors, "pos_embed": resized},
        architecture={**there.architecture, "img_size": [40, 48]},
    )
    found = verify(file, weights, there)
    assert found.passes and {size for _, size, _ in found.differences} == {(40, 48)}


def test_a_network_with_resized_windows_has_nothing_to_be_compared_with() -> None:
    file, weights, there = converted(our_file("SwinTransformer"), "timm")
    there = there._replace(architecture={**there.architecture, "window_size": 8})
    with pytest.raises(CheckpointError, match="Windows of 4 tokens became windows of 8"):
        verify(file, weights, there)


@pytest.mark.parametrize(
    ("name", "layout"), [("SwinTransformer", "mmseg"), ("PyramidVisionTransformer", "official")]
)
def test_ours_stands_in_for_a_library_that_is_not_installed(name, layout, monkeypatch) -> None:
    monkeypatch.setattr(builders, "is_installed", lambda library: False)
    found = verify(*converted(our_file(name), layout))
    assert found.passes and found.target.startswith("our ")
    assert any("cannot be imported: our network stands in" in note for note in found.notes)


def test_where_ours_stands_in_every_tensor_must_have_its_place_as_well(monkeypatch) -> None:
    monkeypatch.setattr(builders, "is_installed", lambda library: False)
    file, weights, there = converted(our_file("SwinTransformer"), "mmseg")
    more = {**there.tensors, "stages.9.norm.bias": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"1 have no place \['stages.9.norm.bias'\]"):
        verify(file, weights, there._replace(tensors=more))
