"""Write the built-in data: real handwritten digits, and scenes composed of them.

The 1,797 digits that scikit-learn ships become a classification set in ImageNet's layout. Scenes of
128x128 pixels hold one to eight of them at different sizes, with overlaps, on textured ground; the
same scenes are written in ADE20K's layout (PNG masks) and in COCO's (boxes and RLE masks). No digit
of a training image or scene appears in a validation one.

Example:
    python tools/prepare_digits.py --out data/digits --train-scenes 400 --val-scenes 100
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from tlalign_mm.engine.launch import run_tool

IMAGE_SIDE = 40
SCENE_SIDE = 128
VAL_DIGITS = 360
IMAGE_DIGIT_SIDES = (30, 41)  # range of the digit's side in a classification image, in pixels
SCENE_DIGIT_SIDES = (28, 53)  # and in a scene
MOST_HIDDEN = 0.4  # share of a digit that later ones may cover
MANIFEST = "manifest.json"
ADE_SPLITS = {"train": "training", "val": "validation"}
COCO_SPLITS = {"train": "train2017", "val": "val2017"}


class Scene(NamedTuple):
    """A composed image; instances are numbered from 1 in the order they were pasted.

    Attributes:
        image: (H, W, 3) uint8.
        instance_map: (H, W) number of the instance that is visible, 0 for the ground.
        digits: The digit of each instance.
    """

    image: np.ndarray
    instance_map: np.ndarray
    digits: list[int]


def load_splits(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Split the digits by class: name of the split to ((n, 8, 8) ink in [0, 1], (n,) digit)."""
    data = load_digits()
    train, val = train_test_split(
        np.arange(len(data.target)), test_size=VAL_DIGITS, stratify=data.target, random_state=seed
    )
    ink = data.images / 16
    return {name: (ink[i], data.target[i]) for name, i in (("train", train), ("val", val))}


def resize_ink(ink: np.ndarray, side: int) -> np.ndarray:
    """Enlarge (8, 8) ink to (side, side), still in [0, 1]."""
    image = Image.fromarray(ink.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(image), 0, 1)


def textured_ground(side: int, rng: np.random.Generator) -> np.ndarray:
    """(side, side, 3) float dark ground: colour noise at coarse, middle and fine scale."""
    ground = np.zeros((side, side, 3))
    for pixels, weight in ((40, 40), (10, 20), (2, 10)):  # side of a cell of noise, its strength
        cells = -(-side // pixels)
        noise = (rng.random((cells, cells, 3)) * 255).astype(np.uint8)
        scaled = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
        ground += (np.asarray(scaled) / 255 - 0.5) * weight
    return np.clip(ground + rng.uniform(20, 80, 3), 0, 255)


def paint(ground: np.ndarray, alpha: np.ndarray, rng: np.random.Generator) -> None:
    """Blend light ink of a random colour into (h, w, 3) ground, in place."""
    ground += alpha[..., None] * (rng.uniform(150, 255, 3) - ground)


def compose_scene(ink: np.ndarray, digits: np.ndarray, rng: np.random.Generator) -> Scene:
    """Paste one to eight digits on textured ground; the masks are exact."""
    image = textured_ground(SCENE_SIDE, rng)
    instance_map = np.zeros((SCENE_SIDE, SCENE_SIDE), np.uint8)
    pasted: list[int] = []
    areas = [0]  # pixels of each instance when it was pasted
    for _ in range(rng.integers(1, 9)):
        index = rng.integers(len(ink))
        alpha = resize_ink(ink[index], int(rng.integers(*SCENE_DIGIT_SIDES)))
        place = _find_place(alpha, instance_map, areas, rng)
        if place is None:
            continue
        visible = alpha > 0.5
        paint(image[place], alpha, rng)
        pasted.append(int(digits[index]))
        areas.append(int(visible.sum()))
        instance_map[place][visible] = len(pasted)
    return Scene(image.round().astype(np.uint8), instance_map, pasted)


def _find_place(
    alpha: np.ndarray, instance_map: np.ndarray, areas: list[int], rng: np.random.Generator
) -> tuple[slice, slice] | None:
    """A place that hides no earlier digit by more than ``MOST_HIDDEN``, or None after 20 tries."""
    side = len(alpha)
    for _ in range(20):
        top, left = rng.integers(0, SCENE_SIDE - side + 1, 2)
        place = (slice(top, top + side), slice(left, left + side))
        after = instance_map.copy()
        after[place][alpha > 0.5] = len(areas)
        left_over = np.bincount(after.ravel(), minlength=len(areas) + 1)[1 : len(areas)]
        if all(left_over >= (1 - MOST_HIDDEN) * np.array(areas[1:])):
            return place
    return None


def write_classification(
    root: Path, split: str, ink: np.ndarray, digits: np.ndarray, rng: np.random.Generator
) -> None:
    """ImageNet's layout, a folder a class: each digit once, inked on textured ground."""
    for i, (one, digit) in enumerate(zip(ink, digits, strict=True)):
        folder = root / "imagenet" / split / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        image = textured_ground(IMAGE_SIDE, rng)
        side = int(rng.integers(*IMAGE_DIGIT_SIDES))
        top, left = rng.integers(0, IMAGE_SIDE - side + 1, 2)
        paint(image[top : top + side, left : left + side], resize_ink(one, side), rng)
        Image.fromarray(image.round().astype(np.uint8)).save(folder / f"digit_{i:04d}.png")


def write_scenes(root: Path, split: str, scenes: list[Scene]) -> None:
    """ADE20K's and COCO's layouts of the same scenes."""
    images = root / "ade20k/images" / ADE_SPLITS[split]
    masks = root / "ade20k/annotations" / ADE_SPLITS[split]
    coco_images = root / "coco" / COCO_SPLITS[split]
    for folder in (images, masks, coco_images, root / "coco/annotations"):
        folder.mkdir(parents=True, exist_ok=True)
    for i, scene in enumerate(scenes):
        name = f"scene_{i:04d}"
        Image.fromarray(scene.image).save(images / f"{name}.jpg", quality=95)
        shutil.copyfile(images / f"{name}.jpg", coco_images / f"{name}.jpg")
        Image.fromarray(semantic_map(scene)).save(masks / f"{name}.png")
    annotations = root / "coco/annotations" / f"instances_{COCO_SPLITS[split]}.json"
    annotations.write_text(json.dumps(coco_annotations(scenes)))


def semantic_map(scene: Scene) -> np.ndarray:
    """(H, W) uint8 as ADE20K numbers classes: 0 nothing, 1 ground, 2 to 11 the digits."""
    return np.array([1, *(digit + 2 for digit in scene.digits)], np.uint8)[scene.instance_map]


def coco_annotations(scenes: list[Scene]) -> dict[str, Any]:
    """COCO's instance annotations; category ids are digit + 1."""
    images, annotations = [], []
    for i, scene in enumerate(scenes):
        images.append(
            {"id": i, "file_name": f"scene_{i:04d}.jpg", "height": SCENE_SIDE, "width": SCENE_SIDE}
        )
        for number, digit in enumerate(scene.digits, start=1):
            rle = coco_mask.encode(np.asfortranarray(scene.instance_map == number))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": i,
                    "category_id": digit + 1,
                    "bbox": coco_mask.toBbox(rle).tolist(),
                    "area": int(coco_mask.area(rle)),
                    "iscrowd": 0,
                    "segmentation": {"size": rle["size"], "counts": rle["counts"].decode()},
                }
            )
    categories = [{"id": digit + 1, "name": f"digit {digit}"} for digit in range(10)]
    return {"images": images, "annotations": annotations, "categories": categories}


def count_files(root: Path) -> int:
    """Files of a data folder, the manifest aside."""
    return sum(path.is_file() for path in root.rglob("*")) - (root / MANIFEST).is_file()


def is_complete(out: Path, settings: dict[str, int]) -> bool:
    """Whether ``out`` holds this very data, whole.

    Raises:
        ValueError: If something else, or only a part, lies there.
    """
    if not out.exists():
        return False
    manifest = out / MANIFEST
    found = json.loads(manifest.read_text()) if manifest.is_file() else {}
    if found.get("settings") != settings or found.get("files") != count_files(out):
        raise ValueError(
            f"Data folder {out} is incomplete or was made with other settings; delete it "
            f"(rm -r {out}) and run this again."
        )
    return True


def prepare(out: Path, seed: int, train_scenes: int, val_scenes: int) -> None:
    """Write everything beside ``out``, then move it into place, so ``out`` is never half written.

    Raises:
        ValueError: If ``out`` holds something else, or only a part.
    """
    settings = {"seed": seed, "train_scenes": train_scenes, "val_scenes": val_scenes}
    if is_complete(out, settings):
        print(f"{out} is complete already.")
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number, (split, (ink, digits)) in enumerate(load_splits(seed).items()):
        write_classification(partial, split, ink, digits, np.random.default_rng([seed, number]))
        count = settings[f"{split}_scenes"]
        rngs = (np.random.default_rng([seed, number, 1, i]) for i in range(count))
        progress = tqdm(rngs, f"{split} scenes", total=count, ncols=80)
        write_scenes(partial, split, [compose_scene(ink, digits, rng) for rng in progress])
    manifest = {"settings": settings, "files": count_files(partial)}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    partial.replace(out)
    print(f"Wrote {manifest['files']} files to {out}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data/digits"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the scenes")
    parser.add_argument("--train-scenes", type=int, default=400, help="scenes to train on")
    parser.add_argument("--val-scenes", type=int, default=100, help="scenes to validate on")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.train_scenes, args.val_scenes)


if __name__ == "__main__":
    run_tool(main)
