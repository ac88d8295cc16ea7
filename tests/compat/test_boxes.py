import numpy as np
import pytest
import torch

from tests.compat import plain_ops
from tlalign_mm.compat import boxes as box_ops
from tlalign_mm.compat import install_mmcv_ext

pytest.importorskip("mmcv")
if not install_mmcv_ext():
    pytest.skip("mmcv brings its compiled ops", allow_module_level=True)

from mmcv.ops import batched_nms, bbox_overlaps, nms, soft_nms  # noqa: E402


def random_boxes(n, seed=0):
    """Boxes with sides of 4 to 14 pixels in a field of 30, and distinct scores."""
    generator = torch.Generator().manual_seed(seed)
    corner = 16 * torch.rand(n, 2, generator=generator)
    size = 4 + 10 * torch.rand(n, 2, generator=generator)
    return torch.cat([corner, corner + size], dim=1), torch.rand(n, generator=generator)


class TestNms:
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7])
    def test_equals_the_plain_one(self, threshold, offset):
        boxes, scores = random_boxes(40)
        dets, kept = nms(boxes, scores, threshold, offset)
        assert kept.tolist() == plain_ops.nms(boxes, scores, threshold, offset)
        assert torch.equal(dets, torch.cat([boxes, scores[:, None]], dim=1)[kept])

    def test_offset_counts_the_last_pixel(self):
        boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 4]])  # IoU 0.5 with, 0.44 without
        scores = torch.tensor([0.9, 0.8])
        assert len(nms(boxes, scores, 0.45, offset=0)[1]) == 2
        assert len(nms(boxes, scores, 0.45, offset=1)[1]) == 1

    @pytest.mark.parametrize("tenths", range(1, 10))
    def test_an_overlap_equal_to_the_threshold_is_kept(self, tenths):
        boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, tenths]])
        assert len(nms(boxes, torch.tensor([0.9, 0.8]), tenths / 10)[1]) == 2

    def test_equal_scores_keep_their_order(self):
        boxes, _ = random_boxes(40)
        _, kept = nms(boxes, torch.ones(40), 0.3)
        assert kept.tolist() == plain_ops.nms(boxes, torch.ones(40), 0.3)

    def test_boxes_without_area_do_not_suppress_each_other(self):
        _, kept = nms(torch.ones(3, 4), torch.tensor([0.1, 0.3, 0.2]), 0.5)
        assert kept.tolist() == [1, 2, 0]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_takes_every_float_dtype(self, dtype):
        boxes, scores = (t.to(dtype) for t in random_boxes(40))
        dets, kept = nms(boxes, scores, 0.3)
        assert dets.dtype == dtype
        assert kept.tolist() == plain_ops.nms(boxes, scores, 0.3)

    def test_scores_finer_than_the_boxes_decide(self):
        scores = torch.tensor([0.5, 0.5 + 1e-12], dtype=torch.float64)
        _, kept = nms(torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 4]]), scores, 0.5)
        assert kept.tolist() == [1]

    def test_takes_numpy_arrays(self):
        boxes, scores = random_boxes(10)
        dets, kept = nms(boxes.numpy(), scores.numpy(), 0.3)
        assert isinstance(dets, np.ndarray) and isinstance(kept, np.ndarray)
        assert kept.tolist() == plain_ops.nms(boxes, scores, 0.3)

    def test_takes_strided_boxes_that_require_a_gradient(self):
        boxes, scores = random_boxes(10)
        strided = boxes.t().contiguous().t().requires_grad_()
        dets, kept = nms(strided, scores, 0.3)
        assert kept.tolist() == plain_ops.nms(boxes, scores, 0.3)
        dets[:, :4].sum().backward()
        assert strided.grad.sum(dim=1).nonzero()[:, 0].tolist() == sorted(kept.tolist())

    def test_filters_by_score_and_number(self):
        boxes, scores = random_boxes(40)
        expected = [i for i in plain_ops.nms(boxes, scores, 0.3) if scores[i] > 0.4]
        _, kept = nms(boxes, scores, 0.3, score_threshold=0.4, max_num=2)
        assert len(expected) > 2
        assert kept.tolist() == expected[:2]

    def test_no_boxes_no_indices(self):
        dets, kept = nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
        assert dets.shape == (0, 5)
        assert kept.shape == (0,) and kept.dtype == torch.int64

    def test_works_under_autocast(self):
        boxes, scores = random_boxes(40)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, kept = nms(boxes, scores, 0.3)
        assert kept.tolist() == plain_ops.nms(boxes, scores, 0.3)


class TestBatchedNms:
    def plain(self, boxes, scores, classes, threshold):
        kept = [
            int(members[k])
            for members in ((classes == c).nonzero()[:, 0] for c in classes.unique())
            for k in plain_ops.nms(boxes[members], scores[members], threshold)
        ]
        return sorted(kept, key=lambda i: -scores[i])

    @pytest.mark.parametrize("split_thr", [10000, 5])
    def test_classes_do_not_suppress_each_other(self, split_thr):
        boxes, scores = random_boxes(40)
        classes = torch.arange(40) % 3
        config = dict(type="nms", iou_threshold=0.3, split_thr=split_thr)
        dets, kept = batched_nms(boxes, scores, classes, config)
        assert kept.tolist() == self.plain(boxes, scores, classes, 0.3)
        assert torch.equal(dets, torch.cat([boxes, scores[:, None]], dim=1)[kept])

    @pytest.mark.parametrize("split_thr", [10000, 5])
    def test_max_num_and_score_threshold(self, split_thr):
        boxes, scores = random_boxes(40)
        classes = torch.arange(40) % 3
        config = dict(iou_threshold=0.3, score_threshold=0.5, max_num=4, split_thr=split_thr)
        _, kept = batched_nms(boxes, scores, classes, config)
        expected = [i for i in self.plain(boxes, scores, classes, 0.3) if scores[i] > 0.5]
        assert len(expected) > 4
        assert kept.tolist() == expected[:4]

    def test_class_agnostic(self):
        boxes, scores = random_boxes(40)
        config = dict(iou_threshold=0.3)
        _, kept = batched_nms(boxes, scores, torch.arange(40) % 3, config, class_agnostic=True)
        assert kept.tolist() == plain_ops.nms(boxes, scores, 0.3)

    @pytest.mark.parametrize("config", [None, dict(type="nms", iou_threshold=0.5)])
    def test_empty(self, config):
        no_classes = torch.zeros(0, dtype=torch.long)
        dets, kept = batched_nms(
            torch.zeros(0, 4), torch.zeros(0), no_classes, config, class_agnostic=True
        )
        assert dets.shape == (0, 5) and kept.shape == (0,)

    def test_half_precision(self):
        boxes, scores = (t.half() for t in random_boxes(10))
        dets, _ = batched_nms(boxes, scores, torch.arange(10) % 2, dict(iou_threshold=0.3))
        assert dets.dtype == torch.float16

    def test_soft_nms_as_its_type(self):
        boxes, scores = random_boxes(10)
        config = dict(type="soft_nms", iou_threshold=0.3, min_score=0.05)
        dets, kept = batched_nms(boxes, scores, torch.zeros(10).long(), config)
        expected = plain_ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, "linear")
        assert kept.tolist() == [i for i, _ in expected]
        assert torch.equal(dets[:, :4], boxes[kept])


class TestSoftNms:
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
    def test_equals_the_plain_one(self, method, offset):
        boxes, scores = random_boxes(40)
        dets, kept = soft_nms(boxes, scores, 0.3, 0.5, 0.1, method, offset)
        expected = plain_ops.soft_nms(boxes, scores, 0.3, 0.5, 0.1, method, offset)
        assert 1 < len(expected) < 40
        assert kept.tolist() == [i for i, _ in expected]
        torch.testing.assert_close(dets[:, 4], torch.tensor([s for _, s in expected]))
        assert torch.equal(dets[:, :4], boxes[kept])

    def test_breaks_ties_as_the_compiled_op(self):
        boxes, scores = random_boxes(40)
        scores = (scores * 4).ceil() / 4
        _, kept = soft_nms(boxes, scores, 0.3, method="naive")
        expected = plain_ops.soft_nms(boxes, scores, 0.3, 0.5, 1e-3, "naive")
        assert kept.tolist() == [i for i, _ in expected]

    def test_leaves_its_arguments_as_they_are(self):
        boxes, scores = random_boxes(10)
        before = boxes.clone(), scores.clone()
        soft_nms(boxes, scores)
        assert torch.equal(boxes, before[0]) and torch.equal(scores, before[1])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_takes_other_float_dtypes(self, dtype):
        boxes, scores = (t.to(dtype) for t in random_boxes(10))
        dets, kept = soft_nms(boxes, scores, min_score=0.05)
        expected = plain_ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, "linear")
        assert kept.tolist() == [i for i, _ in expected]
        assert dets.dtype == dtype

    def test_takes_numpy_arrays_and_no_boxes(self):
        dets, kept = soft_nms(np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
        assert dets.shape == (0, 5) and kept.shape == (0,)


class TestBboxOverlaps:
    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("mode", ["iou", "iof"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equals_the_plain_one(self, dtype, mode, offset):
        first, second = (random_boxes(n, seed=n)[0].to(dtype) for n in (4, 5))
        expected = [
            [plain_ops.iou(a, b, offset, mode == "iof") for b in second.tolist()]
            for a in first.tolist()
        ]
        actual = bbox_overlaps(first, second, mode, offset=offset)
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=dtype))

    def test_aligned_is_the_diagonal(self):
        first, second = random_boxes(4, seed=1)[0], random_boxes(4, seed=2)[0]
        pairs = bbox_overlaps(first, second, aligned=True)
        assert torch.equal(pairs, bbox_overlaps(first, second).diagonal())

    def test_half_precision_does_not_overflow(self):
        boxes = torch.tensor([[0.0, 0, 400, 400]]).half()  # the area is beyond half's largest
        assert bbox_overlaps(boxes, boxes).item() == 1

    def test_writes_into_its_argument(self):
        out = torch.full((1, 1), 7.0)
        assert box_ops.bbox_overlaps(torch.ones(1, 4), torch.eye(1, 4), out, 1, False, 1) is None
        assert out.item() != 7
