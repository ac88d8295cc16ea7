"""The built-in data: exact masks, both layouts the same, no digit in both splits, never half."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tools import prepare_digits as data

TRAIN, VAL = 6, 3


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "digits"
    data.prepare(out, seed=0, train_scenes=TRAIN, val_scenes=VAL)
    return out


def scenes(count: int = 30) -> list[data.Scene]:
    ink, digits = data.load_splits(0)["val"]
    return [data.compose_scene(ink, digits, np.random.default_rng(i)) for i in range(count)]


def test_all_digits_are_used_once_and_no_split_shares_one() -> None:
    splits = data.load_splits(0)
    train, val = ({ink.tobytes() for ink in inks} for inks, _ in splits.values())
    assert sum(len(digits) for _, digits in splits.values()) == 1797
    assert len(train) + len(val) == 1797
    assert not train & val
    assert set(splits["val"][1]) == set(range(10))


def test_scenes_hold_one_to_eight_visible_digits_of_varied_size_with_overlaps() -> None:
    counts, sides, covered = [], [], 0
    for scene in scenes():
        counts.append(len(scene.digits))
        sizes = [np.count_nonzero(scene.instance_map == i + 1) for i in range(len(scene.digits))]
        assert min(sizes) > 0
        sides += [np.ptp(np.nonzero(scene.instance_map == i + 1)[0]) for i in range(len(sizes))]
        edges = np.diff(scene.instance_map.astype(int), axis=1)
        left = scene.instance_map[:, :-1]
        covered += bool(((edges != 0) & (left > 0) & (left + edges > 0)).any())
    assert min(counts) >= 1 and max(counts) <= 8 and len(set(counts)) > 4
    assert max(sides) > 1.5 * min(sides)
    assert covered > 3, "some digits touch or cover others"


def test_the_same_seed_writes_the_same_data(written, tmp_path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    data.prepare(again, seed=0, train_scenes=TRAIN, val_scenes=VAL)
    data.prepare(other, seed=1, train_scenes=TRAIN, val_scenes=VAL)
    name = "ade20k/annotations/training/scene_0000.png"
    assert (again / name).read_bytes() == (written / name).read_bytes()
    assert (other / name).read_bytes() != (written / name).read_bytes()


def test_classification_is_in_imagenets_layout(written) -> None:
    files = list((written / "imagenet").glob("*/*/*.png"))
    assert len(files) == 1797
    assert {f.parent.name for f in files} == {str(d) for d in range(10)}
    assert Image.open(files[0]).size == (data.IMAGE_SIDE,) * 2


@pytest.mark.parametrize(("split", "count"), [("train", TRAIN), ("val", VAL)])
def test_both_dense_layouts_describe_the_same_scenes(written, split, count) -> None:
    coco = COCO(written / f"coco/annotations/instances_{split}2017.json")
    ade = {"train": "training", "val": "validation"}[split]
    assert len(coco.imgs) == count
    for image_id, image in coco.imgs.items():
        stem = image["file_name"].removesuffix(".jpg")
        mask = np.asarray(Image.open(written / f"ade20k/annotations/{ade}/{stem}.png"))
        semantic = np.ones((128, 128), int)  # the ground
        for annotation in coco.imgToAnns[image_id]:
            instance = coco.annToMask(annotation).astype(bool)
            assert annotation["area"] == instance.sum()
            rows, columns = np.nonzero(instance)
            x, y, width, height = annotation["bbox"]
            assert (x, y) == (columns.min(), rows.min())
            assert (width, height) == (np.ptp(columns) + 1, np.ptp(rows) + 1)
            assert (semantic[instance] == 1).all(), "visible masks do not overlap"
            semantic[instance] = annotation["category_id"] + 1
        assert np.array_equal(mask, semantic)
        one = (written / f"coco/{split}2017/{stem}.jpg").read_bytes()
        assert one == (written / f"ade20k/images/{ade}/{stem}.jpg").read_bytes()


def test_what_is_complete_is_not_written_again(written, capsys) -> None:
    before = (written / data.MANIFEST).stat().st_mtime_ns
    data.prepare(written, seed=0, train_scenes=TRAIN, val_scenes=VAL)
    assert "complete already" in capsys.readouterr().out
    assert (written / data.MANIFEST).stat().st_mtime_ns == before


def test_half_a_folder_is_refused(written, tmp_path) -> None:
    out = tmp_path / "digits"
    shutil.copytree(written, out)
    next((out / "imagenet/train/3").iterdir()).unlink()
    with pytest.raises(ValueError, match="is incomplete or was made with other settings; delete"):
        data.prepare(out, seed=0, train_scenes=TRAIN, val_scenes=VAL)


def test_an_interrupted_write_leaves_nothing_under_the_name(tmp_path, monkeypatch) -> None:
    out = tmp_path / "digits"

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(data, "write_scenes", full_disk)
    with pytest.raises(OSError, match="No space"):
        data.prepare(out, seed=0, train_scenes=TRAIN, val_scenes=VAL)
    assert not out.exists()
    monkeypatch.undo()
    data.prepare(out, seed=0, train_scenes=TRAIN, val_scenes=VAL)
    assert json.loads((out / data.MANIFEST).read_text())["settings"]["seed"] == 0
