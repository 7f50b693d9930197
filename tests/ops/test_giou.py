"""The generalized IoU losses: values, gradients, refusals, and the C++ kernels."""

from __future__ import annotations

import pytest
import torch
from giou_cases import (
    COUNTS,
    REDUCTIONS,
    assert_right,
    by_hand,
    layouts,
    padded_batch,
    pairs,
    same,
    special_pairs,
    tying_pairs,
)

from fuselab.errors import DtypeError, ShapeError, UnknownNameError
from fuselab.ops import generalized_box_iou_loss, padded_generalized_box_iou_loss
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.generalized_box_iou_loss import configs, cpu_launch, cuda_launch, layout
from fuselab.ops.generalized_box_iou_loss import reference as plain
from fuselab.runtime.fallback import strict

DTYPES = FLOATING
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


# Values


@implementations
@dtypes
def test_values_worked_out_by_hand(dtype, implementation):
    first, second, expected = by_hand(dtype)
    ours = generalized_box_iou_loss(first, second, implementation=implementation)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=4e-7)
    assert ours[0].item() == pytest.approx(1 + 7 / 9, abs=1e-6)  # not 0.78: 1 - GIoU
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        ours = generalized_box_iou_loss(first, second, reduction, implementation=implementation)
        assert ours.item() == pytest.approx(value.item(), rel=1e-6)


@implementations
def test_eps_stands_in_both_denominators(implementation):
    """With eps 1: 1 - (0 / (2 + 1) - 7 / (9 + 1)) and 1 - (1 / (7 + 1) - 2 / (9 + 1))."""
    first, second, _ = by_hand(torch.float32)
    ours = generalized_box_iou_loss(first, second, eps=1.0, implementation=implementation)
    torch.testing.assert_close(ours[:2], torch.tensor([1.7, 1.075]))


@implementations
def test_the_values_of_torchvision(implementation):
    """Those of torchvision 0.28.0, bit by bit: corners and sides are 0 to 10 sevenths."""
    steps = torch.arange(64, dtype=torch.float32).reshape(8, 2, 4).remainder(11) / 7
    first, second = torch.cat((steps[..., :2], steps[..., :2] + steps[..., 2:]), -1).unbind(1)
    ours = generalized_box_iou_loss(first, second, implementation=implementation)
    expected = "190.4a78 1e6.2f54 100.0 169.069 199.9998 1a5.a5a6 192.4924 17c.1f08"
    assert ours.tolist() == [float.fromhex(value) / 256 for value in expected.split()]


@implementations
def test_equal_boxes_have_no_loss_and_areas_do_not_overflow(implementation):
    """The area of a float16 box of side 300 is past 65504."""
    boxes = torch.tensor([[0.0, 0.0, 300.0, 300.0], [1.5, 2.5, 400.0, 1000.0]], dtype=torch.float16)
    ours = generalized_box_iou_loss(boxes, boxes.clone(), implementation=implementation)
    assert ours.tolist() == [0.0, 0.0]


@implementations
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_boxes(reduction, implementation):
    first, second = (torch.empty(0, 3, 4, requires_grad=True) for _ in range(2))
    ours = generalized_box_iou_loss(first, second, reduction, implementation=implementation)
    assert ours.shape == ((0, 3) if reduction == "none" else ())
    assert ours.sum().item() == 0
    ours.sum().backward()
    assert first.grad is not None and first.grad.shape == (0, 3, 4)


@implementations
def test_padding_does_not_count(implementation):
    pred, target, losses = by_hand(torch.float32)
    pred, target = pred.view(1, -1, 4), target.view(1, -1, 4).clone()
    target[0, 2:] = 0
    pred.requires_grad_()
    ours = padded_generalized_box_iou_loss(pred, target, implementation=implementation)
    assert ours.item() == pytest.approx(losses[:2].mean().item(), rel=1e-6)
    ours.backward()
    assert pred.grad is not None
    assert not pred.grad[0, 2:].any() and pred.grad[0, :2].abs().amin(1).gt(0).all()
    # As the mean of the two boxes alone.
    alone = pred.detach()[0, :2].requires_grad_()
    generalized_box_iou_loss(alone, target[0, :2], "mean").backward()
    torch.testing.assert_close(pred.grad[0, :2], alone.grad)


@implementations
def test_nothing_but_padding_has_no_loss_and_no_gradient(implementation):
    pred, target = pairs(3, 5)
    target[..., 3] = -0.0
    pred[0] = float("nan")
    pred.requires_grad_(), target.requires_grad_()
    ours = padded_generalized_box_iou_loss(pred, target, implementation=implementation)
    assert ours.item() == 0
    ours.backward(torch.tensor(3.0))
    for grad in (pred.grad, target.grad):
        assert grad is not None and torch.equal(grad, torch.zeros(3, 5, 4))


@implementations
def test_what_stands_in_padding_does_not_matter(implementation):
    pred, target = padded_batch(4, 31)
    valid = target[..., 3] > 0
    clean = [torch.where(valid[..., None], boxes, 0.0) for boxes in (pred, target)]
    results = []
    for inputs in ((pred, target), clean):
        leaves = [boxes.clone().requires_grad_() for boxes in inputs]
        loss = padded_generalized_box_iou_loss(*leaves, implementation=implementation)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.isfinite(ours).all() and torch.equal(ours, expected)


# Gradients


@implementations
def test_ties_share_the_gradient_as_torch_max_does(implementation):
    """By hand, with eps 0 and C = U, where the loss changes by -dI / U + I dU / U² + (dC - dU) / C.

    Equal boxes of side 2: I = U = 4. Moving x2 of the first adds 2 to its area and half of that to
    I and to C, so dI = dU = dC = 1 and the loss stays. Moved apart by 1 along x: I = 2, U = 6. x2
    is the inner edge, dI = 2 and dU = dC = 0: -2 / 6. x1 is the outer one, dI = 0 and dU = dC = -2:
    -4 / 36. y2 ties, dI = 1 / 2 and dU = dC = 3 / 2: -1 / 12 + 3 / 36 = 0."""
    first = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.0]], requires_grad=True)
    second = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0]])
    loss = generalized_box_iou_loss(first, second, eps=0.0, implementation=implementation)
    (grad,) = torch.autograd.grad(loss.sum(), first)
    expected = torch.tensor([[0.0] * 4, [-4 / 36, 0.0, -2 / 6, 0.0]])
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


@implementations
def test_two_backward_calls_give_the_same(implementation):
    first, second = (boxes.requires_grad_() for boxes in pairs(7))
    for loss in (
        generalized_box_iou_loss(first, second, "mean", implementation=implementation),
        padded_generalized_box_iou_loss(first, second, implementation=implementation),
    ):
        before, after = (
            torch.autograd.grad(loss, (first, second), retain_graph=True) for _ in range(2)
        )
        assert all(torch.equal(*both) for both in zip(before, after, strict=True))
        assert all(grad.abs().max() > 0 for grad in before)


@implementations
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_first_and_second_derivatives_against_differences(reduction, implementation):
    first, second = (boxes.requires_grad_() for boxes in pairs(2, 3, dtypes=(torch.float64,) * 2))

    def function(first, second):
        if reduction == "padded":
            return padded_generalized_box_iou_loss(first, second, implementation=implementation)
        return generalized_box_iou_loss(
            first, second, reduction, 0.25, implementation=implementation
        )

    assert torch.autograd.gradcheck(function, (first, second))
    assert torch.autograd.gradgradcheck(function, (first, second))


def test_the_gradient_formula_is_that_of_autograd_on_ties_and_special_values():
    for first, second in (tying_pairs(500, torch.float64), special_pairs(torch.float64)):
        leaves = [boxes.clone().requires_grad_() for boxes in (first, second)]
        loss = plain.generalized_box_iou_loss(*leaves)
        grad = torch.linspace(-1, 1, len(first), dtype=torch.float64)
        expected = torch.autograd.grad(loss, leaves, grad)
        ours = plain.generalized_box_iou_loss_backward(
            (True, True), grad, first, second, "none", 1e-7
        )
        for one, other in zip(ours, expected, strict=True):
            assert one is not None and torch.equal(one.isnan(), other.isnan())
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-9, equal_nan=True)


# The C++ kernels


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cpp_counts(reduction):
    for count in COUNTS:
        assert_right(cpu_launch, *pairs(count, seed=count), reduction)
    # Several threads, a last tile of one.
    assert_right(cpu_launch, *pairs(17, 257), reduction)


@dtypes
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cpp_mixed_dtypes_ties_and_special_values(dtype, reduction):
    for types in ((dtype, torch.float32), (torch.float32, dtype)):
        assert_right(cpu_launch, *pairs(3, 21, dtypes=types), reduction)
    assert_right(cpu_launch, *tying_pairs(300, dtype), reduction)
    assert_right(cpu_launch, *special_pairs(dtype), reduction)
    assert_right(cpu_launch, *padded_batch(5, 21, dtypes=(dtype, dtype)), reduction)


@pytest.mark.parametrize("layout", layouts())
def test_cpp_layouts(layout):
    first, second = layouts()[layout]
    for reduction in ("none", "padded"):
        assert_right(cpu_launch, first, second, reduction)


def test_cpp_upstream_gradients_of_any_stride():
    first, second = pairs(9, 14)
    for grad in (
        torch.randn(14, 9).t(),
        torch.randn(9, 28)[:, ::2],
        torch.randn(9, 1).expand(9, 14),
        torch.randn(14).expand(9, 14),
    ):
        for ours, expected in zip(
            cpu_launch.backward((True, True), grad, first, second, "none", 1e-7),
            cpu_launch.backward((True, True), grad.contiguous(), first, second, "none", 1e-7),
            strict=True,
        ):
            assert ours is not None and expected is not None and same(ours, expected)


def test_cpp_sums_do_not_depend_on_the_number_of_threads():
    first, second = pairs(20_001)
    threads = torch.get_num_threads()
    sums = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        sums.append(cpu_launch.forward(first, second, "sum", 1e-7).item())
    torch.set_num_threads(threads)
    assert sums[0] == sums[1] == sums[2]


# Bad input


def test_refusals_name_the_argument():
    boxes = torch.rand(3, 4)
    for call, error, words in (
        (lambda: generalized_box_iou_loss(boxes[:, :3], boxes), ShapeError, r"'boxes1'.*\(3, 3\)"),
        (lambda: generalized_box_iou_loss(boxes, boxes[:2]), ShapeError, "'boxes2'.*expand"),
        (lambda: generalized_box_iou_loss(torch.tensor(1.0), boxes), ShapeError, "'boxes1'"),
        (lambda: generalized_box_iou_loss(boxes, boxes.int()), DtypeError, r"'boxes2'.*float\(\)"),
        (lambda: generalized_box_iou_loss(boxes, boxes, "average"), UnknownNameError, "mean"),
        (lambda: padded_generalized_box_iou_loss(boxes, boxes[:2]), ShapeError, "'target'"),
        (lambda: padded_generalized_box_iou_loss(boxes.int(), boxes), DtypeError, "'pred'"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=words):
                call()


# PyTorch around them


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_under_torch_compile_with_any_eps(reduction):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def step(first, second, eps):
        return 2 * generalized_box_iou_loss(first, second, reduction, eps)

    first, second = pairs(5, 7)
    for eps in (0.5, 0.25, 0.125):
        expected = 2 * plain.generalized_box_iou_loss(first, second, reduction, eps)
        torch.testing.assert_close(step(first, second, eps), expected)
    assert len(graphs) <= 2


def test_vmap_of_grad():
    pred, target = pairs(3, 6)
    grads = torch.func.vmap(torch.func.grad(padded_generalized_box_iou_loss))(pred, target)
    for sample in range(3):
        leaf = pred[sample].clone().requires_grad_()
        padded_generalized_box_iou_loss(leaf, target[sample]).backward()
        torch.testing.assert_close(grads[sample], leaf.grad)


# Launching on a GPU, without one


def test_64_bit_offsets_are_chosen_by_the_furthest_element():
    boxes = torch.empty(1, 4).expand(2**29, 4)
    where = layout.pairs(boxes, boxes)
    assert where.needs_64_bit_offsets(0)  # the contiguous gradients have 2^31 elements
    few = torch.empty_strided((2, 4), (2**31, 1), device="meta")
    assert layout.pairs(few, few).needs_64_bit_offsets(0)
    near = torch.empty_strided((2, 4), (4, 1))
    assert not layout.pairs(near, near).needs_64_bit_offsets(1024)


def test_whole_boxes_are_read_where_they_are_aligned():
    boxes = torch.empty(64, 4)
    assert layout.pairs(boxes, boxes).is_aligned and layout.pairs(boxes, boxes).is_dense
    padded = torch.empty(64, 8)[:, :4]
    assert layout.pairs(boxes, padded).is_aligned and not layout.pairs(boxes, padded).is_dense
    for other in (
        torch.empty(257)[1:].view(64, 4),
        torch.empty(64, 5)[:, :4],
        torch.empty(4, 64).t(),
    ):
        assert not layout.pairs(boxes, other).is_aligned
    spread = cuda_launch._spread(layout.pairs(boxes, boxes), 1)
    assert spread == ("int32_t", 1, "true", 1)


def test_tuning_has_the_defaults_first_and_each_once():
    for dtype in DTYPES:
        boxes = torch.empty(9, 4, dtype=dtype)
        for reduction in REDUCTIONS:
            for found in (configs.cuda, configs.triton):
                candidates = found(boxes, boxes, reduction)
                assert len(set(candidates)) == len(candidates) > 2
            threads_bytes = configs.cuda(boxes, boxes, reduction)[0].boxes * 4 * dtype.itemsize
            reduced = reduction != "none" and dtype != torch.float64
            assert threads_bytes == (32 if reduced or dtype == torch.float64 else 16)
