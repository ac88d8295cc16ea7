"""The parity table and the replay: they agree with ours, and they notice a mistake."""

import pytest
import torch

from tests.layers.test_golden import assert_published, read_golden
from tlalign_mm.analysis import label_steps
from tlalign_mm.analysis.attend_steps import METHODS
from tlalign_mm.backbones import SwinTransformer
from tlalign_mm.labels import residual
from tlalign_mm.proof import parity
from tlalign_mm.proof.replay import LabelReplay
from tlalign_mm.proof.twins import TWINS, build_ours


def test_every_architecture_of_timm_is_compared() -> None:
    names = parity.comparisons()
    for arch in TWINS:
        assert f"{arch} timm" in names
    families = {twin.backbone for twin in TWINS.values()}
    assert families == {
        "VisionTransformer",
        "SwinTransformer",
        "PyramidVisionTransformerV2",
        "CaiT",
        "XCiT",
    }


@pytest.mark.parametrize("arch", ["deit-tiny", "swin-tiny", "pvt-v2-b0", "xcit-nano-12"])
def test_ours_equal_timms_in_features_labels_and_class_attention(arch: str) -> None:
    difference = parity.compare_with_timm(arch)
    assert difference.largest < 1e-5
    assert difference.shift > 1e-4, "labels must have moved to mean anything"


@pytest.mark.integration
def test_pvt_and_its_labels_equal_mmdetections() -> None:
    difference = parity.compare_dense("pvt-tiny", (96, 64))
    assert difference.largest < 1e-5
    assert difference.labels is not None and difference.shift > 1e-4


def test_a_wrong_rule_is_noticed(monkeypatch) -> None:
    wrong = lambda moved, labels: residual(moved, residual(moved, labels))  # noqa: E731
    monkeypatch.setattr("tlalign_mm.labels.stream.residual", wrong)
    assert parity.compare_with_timm("deit-tiny").labels > 1e-5


def test_the_replay_gives_the_published_labels_with_class_sized_labels() -> None:
    from timm.models import VisionTransformer

    golden = read_golden("tl_align_vit.safetensors")
    model = VisionTransformer(**golden.architecture, num_classes=golden.targets.shape[1]).eval()
    model.load_state_dict(golden.weights)
    mix = golden.paste(golden.tensors["box_tokens"] * golden.patch_size)
    own, partner = golden.targets[:, None], golden.targets[mix.partner][:, None]
    inside = golden.tensors["token_mask"].reshape(1, -1, 1)
    with torch.no_grad(), LabelReplay(model) as replay:
        replay.start(own * (1 - inside) + partner * inside, (8, 8))
        model(golden.tensors["mixed_images"])
    assert_published(replay.label(token=True), golden.tensors["aligned_label"])


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be replayed on Linear"):
        LabelReplay(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("method", label_steps.methods("deit-tiny"))
def test_every_training_step_of_the_benchmark_reaches_all_parameters(method, monkeypatch) -> None:
    reached: list[bool] = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        reached.append(all(p.grad is not None for p in group["params"]))

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    label_steps.build_step(method, "deit-tiny", batch=2, size=32)()
    assert reached == [True]


def test_transmix_is_left_out_without_a_class_token() -> None:
    assert "transmix" in label_steps.methods("deit-tiny")
    assert "transmix" not in label_steps.methods("swin-tiny")
    assert isinstance(build_ours(TWINS["swin-tiny"]), SwinTransformer)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "flex"])
def test_all_ways_of_attention_agree(method: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6, 20, 64).unbind()
    labels = torch.rand(2, 20, 2).softmax(-1)
    features, moved = METHODS[method](q, k, v, labels)
    expected_features, expected = METHODS["explicit"](q, k, v, labels)
    torch.testing.assert_close(features, expected_features, atol=1e-5, rtol=0)
    if method != "no labels":
        torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_flex_attention_agrees() -> None:  # it compiles a kernel
    q, k, v = torch.randn(3, 2, 6, 128, 64).unbind()
    labels = torch.rand(2, 128, 2).softmax(-1)
    _, moved = METHODS["flex"](q, k, v, labels)
    torch.testing.assert_close(moved, METHODS["explicit"](q, k, v, labels)[1], atol=1e-5, rtol=0)
