"""Figures draw what they are given: label maps, curves, predictions, one self-contained report."""

import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image

from tlalign_mm.analysis.curves import plot_curves, read_curve, read_last
from tlalign_mm.analysis.label_maps import record_token_labels
from tlalign_mm.analysis.mixing import mix_and_record, plot_label_maps, plot_ratios
from tlalign_mm.analysis.predictions import plot_detections, plot_segmentations
from tlalign_mm.analysis.report import Section, write_report
from tlalign_mm.backbones import SwinTransformer
from tools.prepare_digits import prepare


@pytest.fixture
def backbone() -> SwinTransformer:
    torch.manual_seed(0)
    return SwinTransformer(
        embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4, out_indices=()
    )


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "digits"
    prepare(out, seed=0, train_scenes=1, val_scenes=2)
    return out


def test_recorded_maps_end_in_the_pooled_label(backbone) -> None:
    labels = torch.rand(2, 16, 3).softmax(-1)
    maps, pooled = record_token_labels(backbone, torch.randn(2, 3, 16, 16), labels)
    assert [tuple(m.shape) for m in maps] == [(2, 4, 4, 3), (2, 2, 2, 3)]
    torch.testing.assert_close(maps[-1].mean(dim=(1, 2)), pooled)
    assert backbone.training, "the mode is put back"
    assert not any(stage._forward_hooks for stage in backbone.layers), "no hook is left"


def test_a_mixed_batch_holds_area_and_aligned_shares(backbone) -> None:
    batch = mix_and_record(backbone, torch.randn(6, 3, 16, 16))
    assert [tuple(m.shape[1:]) for m in batch.maps] == [(4, 4), (4, 4), (2, 2)]
    torch.testing.assert_close(batch.maps[0].mean(dim=(1, 2)), batch.area)
    torch.testing.assert_close(batch.maps[-1].mean(dim=(1, 2)), batch.aligned)


def test_label_maps_show_three_pictures_and_every_stage(backbone) -> None:
    batch = mix_and_record(backbone, torch.randn(6, 3, 16, 16))
    figure = plot_label_maps(batch, [0, 2], torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    assert len(figure.axes) == 2 * (3 + 3)
    assert f"λ area {1 - batch.area[0]:.2f}" in [axis.get_xlabel() for axis in figure.axes]
    assert all(axis.images for axis in figure.axes)


def test_the_scatter_states_the_rmse(backbone) -> None:
    batch = mix_and_record(backbone, torch.randn(6, 3, 16, 16))
    _, axes = plt.subplots()
    plot_ratios(axes, batch)
    rmse = (batch.area - batch.aligned).square().mean().sqrt().item()
    assert any(f"RMSE {rmse:.3f}" in text.get_text() for text in axes.get_legend().get_texts())


def test_curves_of_a_resumed_run_are_joined(tmp_path) -> None:
    def write(stamp: str, *lines: str) -> None:
        folder = tmp_path / stamp / "vis_data"
        folder.mkdir(parents=True)
        (folder / "scalars.json").write_text("\n".join(lines))

    record = lambda step, loss: json.dumps({"loss": loss, "step": step})  # noqa: E731
    write("20260101_000000", record(1, 3.0), record(2, 2.0), '{"loss": 9')  # killed while writing
    write("20260101_000100", record(2, 1.9), record(3, 1.0))
    assert read_curve(tmp_path, "loss") == [(1, 3.0), (2, 1.9), (3, 1.0)]
    assert read_last(tmp_path, "loss") == 1.0
    with pytest.raises(ValueError, match="reported no 'mIoU'"):
        read_last(tmp_path, "mIoU")
    _, axes = plt.subplots()
    plot_curves(axes, {"run": read_curve(tmp_path, "loss")}, "step", "loss")
    assert axes.lines[0].get_ydata().tolist() == [3.0, 1.9, 1.0]


def test_segmentations_are_painted_where_the_mask_says(digits) -> None:
    image = digits / "ade20k/images/validation/scene_0000.jpg"
    masks = digits / "ade20k/annotations/validation"
    figure = plot_segmentations([image], {"truth": masks}, [str(i) for i in range(10)])
    plain, painted = (np.asarray(axis.images[0].get_array()) for axis in figure.axes)
    changed = (plain != painted).any(-1)
    assert np.array_equal(changed, np.asarray(Image.open(masks / "scene_0000.png")) > 1)


def test_detections_below_the_score_are_left_out(digits, tmp_path) -> None:
    annotations = digits / "coco/annotations/instances_val2017.json"
    truth = json.loads(annotations.read_text())["annotations"]
    scored = [{**a, "score": s} for a, s in zip(truth[:2], (0.9, 0.1), strict=True)]
    (tmp_path / "found.json").write_text(json.dumps(scored))
    figure = plot_detections(
        annotations, digits / "coco/val2017", {"found": tmp_path / "found.json"}, [0]
    )
    image, true, found = figure.axes
    assert len(image.patches) == 0
    assert len(true.patches) == sum(a["image_id"] == 0 for a in truth)
    assert len(found.patches) == 1


def test_the_report_is_one_file_that_needs_no_other(tmp_path) -> None:
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    sections = [
        Section("A <title>", "one line\nanother", figure),
        Section("Table", "", table=[["name", "figure"], ["a & b", "1"]]),
    ]
    page = write_report(tmp_path / "report.html", "Report", sections).read_text()
    assert "A &lt;title&gt;" in page and "<p>another</p>" in page and "a &amp; b" in page
    assert re.findall(r'(?:src|href)="([^"]{0,15})', page) == ["data:image/png;"]
    assert not plt.get_fignums(), "figures are closed"
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]
