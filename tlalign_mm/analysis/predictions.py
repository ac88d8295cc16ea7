"""Pictures of predictions beside the truth, from files in ADE20K's and COCO's form."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image
from pycocotools import mask as coco_mask

Color = tuple[float, float, float]


def class_colors(num_classes: int) -> list[Color]:
    """Distinct colours, the same for every picture."""
    colors = [*plt.get_cmap("tab10").colors, *plt.get_cmap("Set3").colors]
    return [colors[i % len(colors)] for i in range(num_classes)]


def plot_segmentations(
    images: list[Path], mask_dirs: dict[str, Path], classes: list[str]
) -> Figure:
    """A row an image: the image, then each folder's mask of the same name painted over it.

    Args:
        images: Image files.
        mask_dirs: Title of the column to the folder of its PNG masks, in ADE20K's numbers: 0
            nothing, 1 the ground (left unpainted), from 2 on the ``classes``.
        classes: Names of the classes from number 2 on.
    """
    colors = class_colors(len(classes))
    figure, axes = _columns(len(images), ["image", *mask_dirs])
    for row, path in zip(axes, images, strict=True):
        picture = np.asarray(Image.open(path).convert("RGB")) / 255
        row[0].imshow(picture)
        for axis, folder in zip(row[1:], mask_dirs.values(), strict=True):
            mask = np.asarray(Image.open(folder / f"{path.stem}.png"))
            painted = picture.copy()
            for number, color in enumerate(colors, start=2):
                _paint(painted, mask == number, color)
            axis.imshow(painted)
    _legend(figure, classes, colors)
    return figure


def plot_detections(
    annotations: Path,
    image_dir: Path,
    detections: dict[str, Path],
    image_ids: list[int],
    min_score: float = 0.3,
) -> Figure:
    """A row an image: the true instances, then each file's detections.

    Args:
        annotations: COCO annotation file.
        image_dir: Folder of its images.
        detections: Title of the column to a COCO results file with masks.
        image_ids: Which images.
        min_score: Lowest score that is drawn.
    """
    truth = json.loads(annotations.read_text())
    names = {image["id"]: image["file_name"] for image in truth["images"]}
    classes = {category["id"]: category["name"] for category in truth["categories"]}
    colors = dict(zip(classes, class_colors(len(classes)), strict=True))
    sources = [truth["annotations"], *(json.loads(p.read_text()) for p in detections.values())]
    figure, axes = _columns(len(image_ids), ["image", "truth", *detections])
    for row, image_id in zip(axes, image_ids, strict=True):
        picture = np.asarray(Image.open(image_dir / names[image_id]).convert("RGB")) / 255
        row[0].imshow(picture)
        for axis, source in zip(row[1:], sources, strict=True):
            mine = [
                instance
                for instance in source
                if instance["image_id"] == image_id and instance.get("score", 1) >= min_score
            ]
            _draw_instances(axis, picture, mine, colors)
    _legend(figure, list(classes.values()), list(colors.values()))
    return figure


def _draw_instances(
    axis: Axes, picture: np.ndarray, instances: list[dict[str, Any]], colors: dict[int, Color]
) -> None:
    painted = picture.copy()
    for instance in instances:
        color = colors[instance["category_id"]]
        _paint(painted, coco_mask.decode(instance["segmentation"]).astype(bool), color)
        x, y, width, height = coco_mask.toBbox(instance["segmentation"])
        axis.add_patch(Rectangle((x, y), width, height, fill=False, color=color, lw=1.2))
    axis.imshow(painted)


def _paint(picture: np.ndarray, mask: np.ndarray, color: Color, opacity: float = 0.8) -> None:
    picture[mask] = (1 - opacity) * picture[mask] + opacity * np.array(color)


def _columns(num_rows: int, titles: list[str]) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(
        num_rows, len(titles), figsize=(2.3 * len(titles), 2.3 * num_rows + 0.7), squeeze=False
    )
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure, axes


def _legend(figure: Figure, classes: list[str], colors: list[Color]) -> None:
    patches = [Patch(color=color, label=name) for name, color in zip(classes, colors, strict=True)]
    figure.legend(handles=patches, loc="lower center", ncols=5, fontsize=9)
    figure.tight_layout(rect=(0, 0.7 / figure.get_figheight(), 1, 1))
