import pytest
import torch

from tests.compat import plain_ops
from tlalign_mm.compat import focal, install_mmcv_ext

pytest.importorskip("mmcv")
if not install_mmcv_ext():
    pytest.skip("mmcv brings its compiled ops", allow_module_level=True)

from mmcv.ops import sigmoid_focal_loss, softmax_focal_loss  # noqa: E402

CLASSES = 4
CLASS_WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(5, CLASSES, generator=generator, dtype=torch.float64)).requires_grad_()


def assert_same_values_and_gradients(actual, expected, logits):
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), logits), torch.autograd.grad(expected.sum(), logits)
    )


class TestSigmoidFocalLoss:
    @pytest.mark.parametrize("gamma", [0.0, 1.5, 2.0])
    def test_equals_the_plain_one(self, logits, gamma):
        target = torch.tensor([0, 3, 1, CLASSES, -1])  # the last two are background
        actual = sigmoid_focal_loss(logits, target, gamma, 0.25, None, "none")
        expected = plain_ops.sigmoid_focal_loss(logits, target, gamma, 0.25)
        assert_same_values_and_gradients(actual, expected, logits)

    def test_class_weights(self, logits):
        target = torch.tensor([0, 3, 1, 2, 2])
        actual = sigmoid_focal_loss(logits, target, 2.0, 0.25, CLASS_WEIGHT, "none")
        expected = plain_ops.sigmoid_focal_loss(logits, target, 2.0, 0.25, CLASS_WEIGHT)
        assert_same_values_and_gradients(actual, expected, logits)

    @pytest.mark.parametrize("reduction, divisor", [("mean", 5), ("sum", 1)])
    def test_reductions(self, logits, reduction, divisor):
        target = torch.tensor([0, 3, 1, 2, 2])
        actual = sigmoid_focal_loss(logits, target, 2.0, 0.25, None, reduction)
        expected = plain_ops.sigmoid_focal_loss(logits, target, 2.0, 0.25).sum() / divisor
        assert_same_values_and_gradients(actual, expected, logits)

    def test_saturated_logits_are_finite_and_still_learn(self):
        logits = torch.tensor([[-200.0, 200.0]], requires_grad=True)  # both as wrong as can be
        loss = sigmoid_focal_loss(logits, torch.tensor([0]), 2.0, 0.25, None, "none")
        loss.sum().backward()
        assert loss.isfinite().all()
        torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.75]]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_low_precision_computes_in_float32(self, logits, dtype):
        target = torch.tensor([0, 3, 1, CLASSES, 2])
        low = logits.detach().to(dtype).requires_grad_()
        loss = sigmoid_focal_loss(low, target, 2.0, 0.25, None, "none")
        exact = sigmoid_focal_loss(low.float(), target, 2.0, 0.25, None, "none")
        assert torch.equal(loss, exact.to(dtype))

    def test_refuses_a_target_above_background(self, logits):
        with pytest.raises(ValueError, match="must not exceed 4"):
            sigmoid_focal_loss(logits, torch.full((5,), CLASSES + 1))

    @pytest.mark.parametrize("background", [-1, CLASSES])
    def test_refuses_to_weight_background(self, logits, background):
        with pytest.raises(ValueError, match="class weights"):
            sigmoid_focal_loss(logits, torch.full((5,), background), 2.0, 0.25, CLASS_WEIGHT)

    def test_no_rows(self):
        loss = sigmoid_focal_loss(torch.zeros(0, 4), torch.zeros(0).long(), 2.0, 0.25, None, "none")
        assert loss.shape == (0, 4)


class TestSoftmaxFocalLoss:
    @pytest.mark.parametrize("weight", [None, CLASS_WEIGHT])
    @pytest.mark.parametrize("gamma", [0.0, 1.5, 2.0])
    def test_equals_the_plain_one(self, logits, gamma, weight):
        target = torch.tensor([0, 3, 1, 2, -1])  # the last row is left out
        actual = softmax_focal_loss(logits, target, gamma, 0.25, weight, "sum")
        expected = plain_ops.softmax_focal_loss(logits, target, gamma, 0.25, weight).sum()
        assert_same_values_and_gradients(actual, expected, logits)

    @pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
    def test_a_certain_prediction_has_a_finite_gradient(self, gamma):
        logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
        softmax_focal_loss(logits, torch.tensor([0, 0]), gamma).backward()
        assert logits.grad.isfinite().all()

    def test_writes_one_loss_per_row(self):
        output = torch.full((2,), 7.0)
        probabilities = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        target, no_weight = torch.tensor([0, 0]), torch.zeros(0)
        focal.softmax_focal_loss_forward(probabilities, target, no_weight, output, 2.0, 1.0)
        torch.testing.assert_close(output, torch.tensor([0.25 * 0.693147, 0.0]))

    def test_refuses_a_target_above_the_classes(self, logits):
        with pytest.raises(ValueError, match="must not exceed 3"):
            softmax_focal_loss(logits, torch.full((5,), CLASSES))
