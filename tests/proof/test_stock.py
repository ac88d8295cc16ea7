"""Configs of the stock backbones: exactly these sizes, or one sentence that says why not."""

import ast

import pytest
from mmengine.registry import MODELS as ROOT

from tests.proof.networks import config, converted, our_file
from tlalign_mm.checkpoints import CheckpointError
from tlalign_mm.proof.stock import build_pair, stock_config
from tlalign_mm.registry import MODELS

VIT, SWIN, PVT = "VisionTransformer", "SwinTransformer", "PyramidVisionTransformer"
WAYS = [
    (VIT, "mmseg"),
    (f"{VIT} distilled", "mmseg"),
    (SWIN, "mmseg"),
    (SWIN, "mmdet"),
    (PVT, "mmdet"),
    (f"{PVT}V2", "mmdet"),
]


@pytest.mark.integration
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(("name", "layout"), WAYS)
def test_a_config_may_be_printed_and_pasted(name, layout, is_dense) -> None:
    _, _, there = converted(our_file(name, is_dense), layout)
    printed = repr(stock_config(there.architecture, layout, there.tensors))
    tensors = {n.removeprefix("backbone."): t for n, t in there.tensors.items()}
    missing, unexpected = ROOT.build(ast.literal_eval(printed)).load_state_dict(tensors, False)
    assert not unexpected
    assert all(name.startswith("norm") for name in missing)
    assert not (is_dense and missing)


def sizes(name: str, **fields) -> dict:
    return MODELS.build({**config(name), **fields}).architecture


@pytest.mark.parametrize(
    ("architecture", "layout", "message"),
    [
        (sizes(VIT), "mmdet", "mmdetection has no backbone like VisionTransformer"),
        (sizes("CaiT"), "mmpretrain", "mmpretrain has no backbone like CaiT"),
        ({**sizes(VIT), "num_heads": None}, "mmseg", "do not tell num_heads .* --arch num_heads"),
        (sizes(VIT, qkv_bias=False), "mmseg", "no attention with a bias behind it but none before"),
        (sizes(VIT, mlp_ratio=2.5), "mmseg", "no MLPs of 2.5 times the channels"),
        (sizes(SWIN, mlp_ratio=2.5), "mmdet", "no MLPs of 2.5 times the channels"),
        (sizes(PVT, num_heads=(1, 2, 3, 1)), "mmdet", "equally many channels per head"),
        (sizes(PVT, img_size=36), "mmdet", "no maps of 9x9, 5x5, 3x3, 2x2.* multiples of 32"),
        (sizes(f"{PVT}V2 linear"), "mmdet", "four stages and no linear variant"),
        (sizes("XCiT", patch_size=4), "mmpretrain", "patches of 8 or 16 pixels, not 4"),
    ],
)
def test_a_network_that_a_library_does_not_have_is_refused(architecture, layout, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        stock_config(architecture, layout)


def test_mmpretrains_configs_tell_the_form_by_the_names() -> None:
    distilled = stock_config(sizes(f"{VIT} distilled"), "mmpretrain")
    assert distilled["type"] == "mmpretrain.DistilledVisionTransformer"
    assert distilled["arch"]["feedforward_channels"] == 256 and distilled["final_norm"]
    whole = stock_config(sizes("XCiT"), "mmpretrain")
    assert (whole["cls_attn_layers"], whole["out_type"]) == (2, "cls_token")
    dense = stock_config(sizes("XCiT"), "mmpretrain", ["backbone.cls_token"])
    assert (dense["cls_attn_layers"], dense["out_type"]) == (0, "featmap")
    assert "stage_cfgs" not in stock_config(sizes(SWIN), "mmpretrain")
    swin = stock_config(sizes(SWIN, mlp_ratio=2), "mmpretrain", out_indices=(0, 1))
    assert swin["stage_cfgs"] == {"block_cfgs": {"ffn_ratio": 2}} and swin["out_indices"] == (0, 1)


@pytest.mark.integration
def test_a_pair_has_the_same_weights_and_the_published_eps() -> None:
    fields = {key: value for key, value in config(f"{PVT}V2").items() if key in PYRAMID_FIELDS}
    stock, ours = build_pair("pvt-v2", 64, **fields)
    assert stock.layers[0][0].norm.eps == ours.patch_embed.norm.eps == 1e-5
    weight = ours.stages[1].blocks[0].mlp.fc1.weight
    assert weight.equal(stock.layers[1][1][0].ffn.layers[0].weight.flatten(1))


PYRAMID_FIELDS = ("embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios")
