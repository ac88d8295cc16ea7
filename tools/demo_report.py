"""Write the report of a finished demo: one HTML file that explains itself.

Example:
    python tools/demo_report.py work_dirs/demo
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from mmengine.config import Config

from tlalign_mm.analysis.curves import plot_curves, read_curve
from tlalign_mm.analysis.mixing import MixedBatch, mix_and_record, plot_label_maps, plot_ratios
from tlalign_mm.analysis.predictions import plot_detections, plot_segmentations
from tlalign_mm.analysis.report import Section, write_report
from tlalign_mm.engine.launch import run_tool
from tlalign_mm.registry import DATASETS, MODELS

DIGITS = [str(digit) for digit in range(10)]
SHOWN_SCENES = [0, 1, 2, 3]
BASELINES = {
    "pretrain": "area labels",
    "segmentation": "random weights",
    "detection": "random weights",
}


def load_mixed(work_dir: Path) -> tuple[MixedBatch, torch.Tensor, torch.Tensor]:
    """Mix validation digits and follow their labels through the trained TL-Align backbone."""
    config = next((work_dir / "pretrain_tl_align").glob("*.py"))  # the Runner's own dump
    cfg = Config.fromfile(config)
    model = MODELS.build(cfg.model)
    model.backbone.load(str(work_dir / "pretrain_tl_align/backbone.safetensors"))
    dataset = DATASETS.build(cfg.val_dataloader.dataset)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    images = torch.stack([dataset[int(i)]["inputs"] for i in order])
    preprocessor = model.data_preprocessor
    batch = preprocessor({"inputs": images, "labels": order}, training=False)["inputs"]
    return mix_and_record(model.backbone, batch), preprocessor.mean, preprocessor.std


def method_sections(work_dir: Path) -> list[Section]:
    """What mixing does to labels: examples, then all validation images at once."""
    batch, mean, std = load_mixed(work_dir)
    difference = (batch.area - batch.aligned).abs()
    middle = ((batch.area > 0.15) & (batch.area < 0.85)).nonzero().flatten()
    rows = middle[difference[middle].argsort(descending=True)][:5].tolist()
    figure, axes = plt.subplots(figsize=(5, 5))
    plot_ratios(axes, batch)
    return [
        Section(
            "Mixed images and their label maps",
            "CutMix pastes a box of a partner into an image. λ is the share that stays the image's "
            "own. The usual label counts pixels (λ area).\n"
            "Inside the network attention moves content between tokens. TL-Align gives every token "
            "a label and moves it with the same attention; the maps show the partner's share of "
            "each token: blue is all own image, red is all partner. The mean of the last map is "
            "the label that the network trains with (λ aligned).\n"
            "Shown are the five validation images where the two differ most, of those that keep "
            "between 15 % and 85 % of their area.",
            plot_label_maps(batch, rows, mean, std),
        ),
        Section(
            "λ by area against λ aligned",
            "Each dot is a mixed validation image in the trained TL-Align network. On the gray "
            "line both labels agree; far from it, the pixel count misjudges what the network sees.",
            figure,
        ),
    ]


def curves_section(work_dir: Path) -> Section:
    """Loss and accuracy of both pretrainings."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    runs = {"area labels": "pretrain_area", "TL-Align": "pretrain_tl_align"}
    losses = {name: read_curve(work_dir / run, "loss") for name, run in runs.items()}
    top1 = {name: read_curve(work_dir / run, "accuracy/top1") for name, run in runs.items()}
    plot_curves(left, losses, "iteration", "training loss on mixed images")
    plot_curves(right, top1, "epoch", "top-1 % on unmixed validation images")
    figure.tight_layout()
    return Section(
        "Pretraining",
        "The same seed, length and images; only the label of mixed images differs. The losses are "
        "against different targets, so compare the accuracies.",
        figure,
    )


def dense_curves(work_dir: Path, task: str) -> Figure:
    """Training loss of a dense task from random weights and from the pretrained backbone."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    runs = {"from random weights": "scratch", "from the TL-Align backbone": "pretrained"}
    curves = {name: read_curve(work_dir / f"{task}_{run}", "loss") for name, run in runs.items()}
    plot_curves(axes, curves, "iteration", "training loss")
    figure.tight_layout()
    return figure


def dense_sections(work_dir: Path, data: Path) -> list[Section]:
    """Predictions beside the truth."""
    scenes = sorted((data / "ade20k/images/validation").glob("*.jpg"))
    masks = {
        "truth": data / "ade20k/annotations/validation",
        "from random weights": work_dir / "segmentation_scratch/predictions",
        "from TL-Align": work_dir / "segmentation_pretrained/predictions",
    }
    detections = {
        "from random weights": work_dir / "detection_scratch/predictions.segm.json",
        "from TL-Align": work_dir / "detection_pretrained/predictions.segm.json",
    }
    annotations = data / "coco/annotations/instances_val2017.json"
    return [
        Section(
            "Segmentation: UperNet",
            "Trained by mmsegmentation's own tools/train.py on scenes of digits; every colour is a "
            "digit, the ground stays unpainted.",
            plot_segmentations([scenes[i] for i in SHOWN_SCENES], masks, DIGITS),
        ),
        Section("Segmentation: training", "", dense_curves(work_dir, "segmentation")),
        Section(
            "Detection: Cascade Mask R-CNN",
            "Trained by mmdetection's own tools/train.py on the same scenes; boxes and masks with "
            "a score of at least 0.3. Both runs are short, so far from what the model can do.",
            plot_detections(annotations, data / "coco/val2017", detections, SHOWN_SCENES),
        ),
        Section("Detection: training", "", dense_curves(work_dir, "detection")),
    ]


def result_section(work_dir: Path) -> Section:
    """All figures of the summary in one table."""
    summary = json.loads((work_dir / "summary.json").read_text())
    rows = [["", "figure", "baseline", "TL-Align"]]
    for task, baseline_title in BASELINES.items():
        baseline, ours = summary[task].values()
        rows += [
            [task, f"{figure} %", f"{baseline[figure]:.2f} ({baseline_title})", f"{value:.2f}"]
            for figure, value in ours.items()
        ]
    return Section(
        "Results",
        "A small Swin Transformer was pretrained on 1,437 handwritten digits, once with area "
        "labels and once with token-aligned labels (TL-Align). The TL-Align backbone then started "
        "a segmentation and a detection model on scenes composed of such digits; no digit of a "
        "training image or scene appears in a validation one.\n"
        "Each figure is of one run with one seed: small differences are chance.",
        table=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work_dir", type=Path, help="work dir of the demo")
    parser.add_argument("--data", type=Path, default=Path("data/digits"), help="its data")
    args = parser.parse_args()
    sections = [
        result_section(args.work_dir),
        *method_sections(args.work_dir),
        curves_section(args.work_dir),
        *dense_sections(args.work_dir, args.data),
    ]
    title = "Token-aligned labels, from pretraining to dense tasks"
    print(f"Wrote {write_report(args.work_dir / 'report.html', title, sections)}")


if __name__ == "__main__":
    run_tool(main)
