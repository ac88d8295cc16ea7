"""Data set, preprocessor and metric."""

import numpy as np
import pytest
import torch

from tlalign_mm.pretrain import ImageFolder, MixDataPreprocessor, TopKAccuracy

MIXER = {"type": "tlalign_mm.CutMix", "per_sample": True}


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 256, (4, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return {"inputs": inputs, "labels": torch.arange(4)}


def test_images_come_as_bytes_with_the_class_of_their_folder(image_folder) -> None:
    data = ImageFolder(str(image_folder), "val", {"input_size": 16, "crop_pct": 1.0})
    assert len(data) == 12
    assert data.classes == ["class_0", "class_1", "class_2"]
    for i in range(12):
        sample = data[i]
        assert sample["inputs"].dtype == torch.uint8 and sample["inputs"].shape == (3, 16, 16)
        brightest = sample["inputs"].float().mean(dim=(1, 2)).argmax().item()
        assert sample["labels"] == brightest, "the class decides the colour"


def test_a_missing_folder_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/train does not exist; prepare the data"):
        ImageFolder(str(tmp_path / "nowhere"), "train", {"input_size": 16})


def test_a_folder_without_images_is_named(tmp_path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="train holds no image; it needs a folder a class"):
        ImageFolder(str(tmp_path), "train", {"input_size": 16})


def test_numbered_classes_are_in_the_order_of_their_labels(image_folder) -> None:
    for old, new in (("class_0", "10"), ("class_1", "2"), ("class_2", "1")):
        (image_folder / "val" / old).rename(image_folder / "val" / new)
    data = ImageFolder(str(image_folder), "val", {"input_size": 16, "crop_pct": 1.0})
    assert data.classes == ["1", "2", "10"]
    colors = {"10": 0, "2": 1, "1": 2}  # of the renamed folders
    for i in range(12):
        brightest = data[i]["inputs"].float().mean(dim=(1, 2)).argmax().item()
        assert colors[data.classes[data[i]["labels"]]] == brightest


def test_normalisation_is_that_of_imagenet() -> None:
    out = MixDataPreprocessor()(batch(), training=True)
    mean = torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
    torch.testing.assert_close(out["inputs"], (batch()["inputs"].float() - mean) / std)
    assert out["mix"] is None


def test_mixing_happens_in_training_alone_and_pastes_the_partner() -> None:
    preprocessor = MixDataPreprocessor(mixer=MIXER)
    plain = preprocessor(batch(), training=False)
    mixed = preprocessor(batch(), training=True)
    assert plain["mix"] is None
    mask = mixed["mix"].mask.bool().expand_as(plain["inputs"])
    partner = plain["inputs"][mixed["mix"].partner]
    assert torch.equal(mixed["inputs"], torch.where(mask, partner, plain["inputs"]))
    assert mask.any()


def test_a_restored_state_continues_the_sequence_of_draws() -> None:
    one = MixDataPreprocessor(mixer=MIXER, seed=3)
    one(batch(), training=True)
    other = MixDataPreprocessor(mixer=MIXER, seed=4)
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        first, second = one(batch(), training=True), other(batch(), training=True)
        assert torch.equal(first["mix"].mask, second["mix"].mask)


def test_accuracy_counts_true_classes_among_the_highest_scores() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.random((50, 8)), rng.integers(0, 8, 50)
    metric = TopKAccuracy(topk=(1, 3))
    for part in np.array_split(np.arange(50), 4):
        metric.process(
            {},
            [{"scores": torch.tensor(scores[i]), "label": torch.tensor(labels[i])} for i in part],
        )
    found = metric.evaluate(50)
    for k in (1, 3):
        hits = [labels[i] in scores[i].argsort()[::-1][:k] for i in range(50)]
        assert found[f"accuracy/top{k}"] == pytest.approx(100 * np.mean(hits))
