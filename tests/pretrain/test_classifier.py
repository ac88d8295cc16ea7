"""The classifier: its targets, its losses and its predictions."""

import pytest
import torch
import torch.nn.functional as F

from tlalign_mm.labels import area_labels, class_targets, smoothed_one_hot, token_labels


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (4, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return {"inputs": inputs, "labels": torch.tensor([0, 1, 2, 0])}


def expected_loss(model, data, shares: torch.Tensor) -> torch.Tensor:
    targets = smoothed_one_hot(data["labels"], 3, 0.1)
    targets = class_targets(shares, targets, data["mix"].partner)
    logits = model(data["inputs"], mode="tensor")
    return F.cross_entropy(logits, targets)


def test_the_area_target_is_plain_cutmix(build_classifier, batch) -> None:
    model = build_classifier(target="area")
    data = model.data_preprocessor(batch, training=True)
    losses = model(**data, mode="loss")
    torch.testing.assert_close(losses["loss"], expected_loss(model, data, area_labels(data["mix"])))
    assert losses["lam_rmse"] == 0


def test_the_tl_align_target_is_what_the_backbone_carries(build_classifier, batch) -> None:
    model = build_classifier(target="tl_align")
    data = model.data_preprocessor(batch, training=True)
    token = token_labels(data["mix"], 4)
    carried = model.backbone.forward_features(data["inputs"], token).token_labels
    losses = model(**data, mode="loss")
    torch.testing.assert_close(losses["loss"], expected_loss(model, data, carried))
    assert losses["lam_rmse"] > 0, "attention moves content, so the ratios differ"


VIT = {
    "type": "tlalign_mm.VisionTransformer",
    "embed_dim": 8,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "img_size": 16,
    "drop_path_rate": 0.0,
    "out_indices": (),
}


def test_the_transmix_target_is_half_area_half_class_attention(build_classifier, batch) -> None:
    model = build_classifier(target="transmix", backbone=VIT)
    data = model.data_preprocessor(batch, training=True)
    attention = model.backbone.forward_features(data["inputs"], None, True).class_attention
    own = 1 - data["mix"].mask[:, 0, ::4, ::4]
    seen = (attention * own).sum((1, 2)) / attention.sum((1, 2))
    lam = (data["mix"].lam + seen) / 2
    losses = model(**data, mode="loss")
    expected = expected_loss(model, data, torch.stack([lam, 1 - lam], 1))
    torch.testing.assert_close(losses["loss"], expected)
    assert losses["lam_rmse"] > 0


def test_transmix_needs_a_class_token(build_classifier) -> None:
    with pytest.raises(ValueError, match="needs a class token, which SwinTransformer has not"):
        build_classifier(target="transmix")


def test_both_targets_agree_on_unmixed_images(build_classifier, batch) -> None:
    losses = []
    for target in ("area", "tl_align"):
        torch.manual_seed(0)
        mixer = {"type": "tlalign_mm.CutMix", "prob": 0.0}
        preprocessor = {"type": "tlalign_mm.MixDataPreprocessor", "mixer": mixer}
        model = build_classifier(target=target, data_preprocessor=preprocessor)
        data = model.data_preprocessor(batch, training=True)
        losses.append(model(**data, mode="loss")["loss"])
    torch.testing.assert_close(*losses)


def test_only_the_loss_is_summed(build_classifier, batch) -> None:
    model = build_classifier()
    losses = model(**model.data_preprocessor(batch, training=True), mode="loss")
    total, logged = model.parse_losses(losses)
    assert total == losses["loss"]
    assert {"loss", "lam_area", "lam_target", "lam_rmse"} == set(logged)


def test_predictions_hold_scores_and_the_true_label(build_classifier, batch) -> None:
    model = build_classifier().eval()
    data = model.data_preprocessor(batch, training=False)
    assert data["mix"] is None
    predictions = model(**data, mode="predict")
    torch.testing.assert_close(
        torch.stack([p["scores"] for p in predictions]).sum(1), torch.ones(4)
    )
    assert [p["label"].item() for p in predictions] == [0, 1, 2, 0]


def test_an_unknown_target_is_named(build_classifier) -> None:
    with pytest.raises(ValueError, match="target='cutmix' is unknown; choose one of area"):
        build_classifier(target="cutmix")
