"""linear_sigmoid and linear_binary_cross_entropy on the CPU: kernels, contract, errors."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from logit_cases import LAYOUTS, SHAPES, assert_each_loss, assert_infinite_targets, check, operands
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.errors import DifferentiationError, DtypeError, ShapeError, UnknownNameError
from fuselab.fusion.expression import Expression
from fuselab.fusion.match import Pattern, find
from fuselab.fusion.trace import Call, trace_forward
from fuselab.ops import linear_binary_cross_entropy, linear_sigmoid
from fuselab.ops.linear_binary_cross_entropy.op import OP as LOSS
from fuselab.ops.linear_sigmoid.cpu_launch import backward, forward
from fuselab.ops.linear_sigmoid.op import OP as SIGMOID
from fuselab.runtime.dispatch import choose

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
REDUCTIONS = (None, "none", "mean", "sum")


@dtypes
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shapes(dtype, reduction):
    for rows, depth in SHAPES:
        check(forward, backward, *operands(rows, depth, dtype), reduction)
    check(forward, backward, *operands(20, 40, dtype, bias=False), reduction)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    input, weight, bias, target = operands(40, 40)
    upstream = LAYOUTS[layout](input)[:, :1]
    weight = LAYOUTS[layout](weight.expand(2, 40))[:1]
    target = target.expand(40, 3).clone()[:, 1:2]
    check(forward, backward, LAYOUTS[layout](input), weight, bias, upstreams=(upstream,))
    args = (LAYOUTS[layout](input), weight, bias, target, "none")
    check(forward, backward, *args, upstreams=(upstream,))


@dtypes
def test_targets_of_another_dtype_promote(dtype):
    input, weight, bias, target = operands(30, 50, dtype)
    for other in DTYPES:
        check(forward, backward, input, weight, bias, target.to(other), "mean")


def test_losses_where_a_probability_would_round():
    assert_each_loss(forward)


def test_gradient_keeps_its_digits_where_the_probability_is_nearly_the_target():
    z = torch.tensor([[20.0], [30.0], [60.0]])
    args = torch.ones(3, 1), z, torch.ones(1, 1), None, "sum"
    (grad, *_) = backward((True, False, False), torch.ones(()), *args)
    torch.testing.assert_close(grad.double(), -torch.sigmoid(-z.double()), rtol=4e-7, atol=0)


def test_the_truth_keeps_its_digits_in_both_tails():
    """Loss, first and second derivative by the logit, against sixty digits."""
    import mpmath  # beside sympy, which PyTorch requires

    mpmath.mp.dps = 60
    one = torch.ones(1, 1, dtype=torch.float64)
    for value in (-200.0, -45.0, -9.0, -0.5, 0.0, 0.5, 9.0, 45.0, 200.0):
        for wanted in (0.0, 0.25, 1.0, -0.02):
            z = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
            target = torch.tensor([[wanted]], dtype=torch.float64)
            loss = LOSS.reference(z, one, None, target, "none")
            (first,) = torch.autograd.grad(loss, z, create_graph=True)
            (second,) = torch.autograd.grad(first, z)
            x, t = mpmath.mpf(value), mpmath.mpf(wanted)
            small = mpmath.exp(-abs(x)) / (1 + mpmath.exp(-abs(x)))
            slope = (1 - t) - small if value > 0 else small - t
            linear = (1 - t) * x if value > 0 else -t * x
            exact = (linear + mpmath.log1p(mpmath.exp(-abs(x))), slope, small * (1 - small))
            for found, truth in zip((loss, first, second), exact, strict=True):
                error = abs(mpmath.mpf(found.item()) - truth)
                assert error <= 1e-15 * max(abs(truth), abs(t) * abs(x)), (value, wanted)


def test_the_formulas_second_derivative_keeps_its_digits_in_both_tails():
    """In float32 y (1 - y) of a y near 1 is off by 900 ulp at a logit of 8."""
    for value in (-12.0, -8.0, -1.0, 1.0, 8.0, 12.0):
        for wanted in (0.0, 0.7, 1.0):
            given = [torch.tensor([[number]]) for number in (value, 1.0, wanted)]
            input, weight, target = given
            input.requires_grad_()
            grads = LOSS.gradient.reference(
                (True, False, False, False), torch.ones(1, 1), input, weight, None, target, "none"
            )
            (second,) = torch.autograd.grad(grads[0], input)
            small = torch.sigmoid(torch.tensor(-abs(value), dtype=torch.float64))
            exact = small * (1 - small)
            assert abs(second.item() - exact) <= 4e-7 * exact, (value, wanted)


def test_infinite_targets_in_the_gradients_formulas():
    def formulas(needs, grad, target, input, weight, bias, reduction):
        return LOSS.gradient.reference(
            (*needs, False), grad, input, weight, bias, target, reduction
        )

    assert_infinite_targets(formulas)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sums_do_not_depend_on_threads(reduction):
    input, weight, bias, target = operands(5000, 33)
    saved = torch.sigmoid(F.linear(input, weight, bias)) if reduction is None else target
    more = () if reduction is None else (bias, reduction)
    upstream = torch.ones(()) if reduction in ("mean", "sum") else torch.ones(5000, 1)
    rest = () if reduction is None else (target, reduction)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            grads = backward((True, True, True), upstream, saved, input, weight, *more)
            results.append((forward(input, weight, bias, *rest), *grads))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_first_and_second_derivatives(reduction):
    input, weight, bias, target = operands(3, 5, torch.float64)
    leaves = [value.requires_grad_() for value in (input, weight, bias)]

    def fused(input, weight, bias):
        if reduction is None:
            return linear_sigmoid(input, weight, bias)
        return linear_binary_cross_entropy(input, weight, bias, target, reduction)

    assert torch.autograd.gradcheck(fused, leaves)
    assert torch.autograd.gradgradcheck(fused, leaves)


def test_the_gradients_formulas():
    for dtype in (*DTYPES, torch.float64):
        for shape in ((9, 4), (1, 1)):
            args = operands(*shape, dtype)
            check(SIGMOID.reference, SIGMOID.gradient.reference, *args)

            def of_loss(needs, grad, target, input, weight, bias, reduction):
                formula = LOSS.gradient.reference
                return formula((*needs, False), grad, input, weight, bias, target, reduction)[:3]

            for reduction in ("none", "mean", "sum"):
                check(LOSS.reference, of_loss, *args, reduction)


def test_leading_dimensions_and_empty():
    _, weight, bias, _ = operands(1, 6)
    for shape in ((6,), (2, 3, 6), (0, 6), (2, 0, 6)):
        input = torch.randn(shape, requires_grad=True)
        target = torch.ones(*shape[:-1], 1)
        output = linear_sigmoid(input, weight, bias)
        loss = linear_binary_cross_entropy(input, weight, bias, target, "sum")
        torch.testing.assert_close(output, torch.sigmoid(F.linear(input, weight, bias)))
        for result in (output.sum(), loss):
            assert torch.autograd.grad(result, input)[0].shape == shape
        with torch.no_grad():
            torch.testing.assert_close(linear_sigmoid(input, weight, bias), output)
    assert linear_binary_cross_entropy(torch.empty(0, 6), weight, bias, torch.empty(0, 1)).isnan()


def test_autocast_is_that_of_the_layers():
    input, weight, bias, target = operands(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(input, weight, bias)
        output = linear_sigmoid(input, weight, bias)
        loss = linear_binary_cross_entropy(input, weight, bias, target)
        theirs = F.binary_cross_entropy_with_logits(logits, target)
    assert output.dtype == torch.bfloat16
    # Eager rounds the logit to bfloat16.
    torch.testing.assert_close(output, torch.sigmoid(logits), rtol=1e-2, atol=0)
    assert loss.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("op", [SIGMOID, LOSS], ids=lambda op: op.short_name)
def test_rewrites_compute_what_the_reference_does(op):
    input, weight, bias, target = operands(4, 5, torch.float64)
    values = {"input": input, "weight": weight, "bias": bias, "target": target}
    reductions = set()
    for rewrite in op.rewrites:
        args = [values[name] for name in inspect.signature(rewrite.pattern).parameters]
        call = op.bind(rewrite.call(*args))
        torch.testing.assert_close(rewrite.pattern(*args), op.reference(*call))
        reductions.add(call[-1] if op is LOSS else None)
    assert reductions == ({"none", "mean", "sum"} if op is LOSS else {None})


def test_fuse_finds_the_loss_behind_a_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 1)

        def forward(self, input, target):
            return F.binary_cross_entropy_with_logits(self.last(input), target)

    module, args = Model(), (torch.randn(4, 5), torch.ones(4, 1))
    traced = trace_forward("", module, Call(args, {}))
    patterns = [Pattern(LOSS, rewrite) for rewrite in LOSS.rewrites]
    (match, *_) = find(Expression(traced.graph, traced.module), patterns)
    assert LOSS.bind(match.rewrite.call(**match.bindings))[-1] == "mean"
    assert len(match.origins) == 2


def test_costs_count_every_byte_once():
    input, weight, bias, target = operands(8, 16, torch.bfloat16)
    cost = SIGMOID.cost(input, weight, bias)
    assert (cost.bytes_read, cost.bytes_written) == (2 * (8 * 16 + 16 + 1), 2 * 8)
    back = SIGMOID.cost_backward(input, weight, bias)
    assert (back.bytes_read, back.bytes_written) == (2 * (144 + 16), 2 * (8 * 16 + 16 + 1))
    cost = LOSS.cost(input, weight, bias, target.float(), "mean")
    assert (cost.bytes_read, cost.bytes_written) == (2 * (8 * 16 + 16 + 1) + 4 * 8, 4)
    back = LOSS.cost_backward(input, weight, bias, target.float(), "mean")
    assert (back.bytes_read, back.bytes_written) == (cost.bytes_read + 4, 2 * (8 * 16 + 16 + 1))


def test_errors_name_the_argument():
    input, weight, bias, target = operands(4, 5)
    with pytest.raises(ShapeError, match=r"'weight'.*\(2, 5\).*\(1, 5\)"):
        linear_sigmoid(input, weight.expand(2, 5))
    with pytest.raises(ShapeError, match=r"'bias'.*\(4,\).*\(1,\) or None"):
        linear_sigmoid(input, weight, torch.zeros(4))
    with pytest.raises(DtypeError, match=r"'input' is torch.int64"):
        linear_sigmoid(input.long(), weight)
    with pytest.raises(ShapeError, match=r"'target'.*\(4,\).*\(4, 1\)"):
        linear_binary_cross_entropy(input, weight, bias, target[:, 0])
    with pytest.raises(DtypeError, match=r"'target' is torch.bool.*target.float\(\) gives it"):
        linear_binary_cross_entropy(input, weight, bias, target > 0)
    with pytest.raises(UnknownNameError) as refused:
        linear_binary_cross_entropy(input, weight, bias, target, "men")
    assert (refused.value.kind, refused.value.name) == ("reduction", "men")
    assert "mean" in refused.value.known
    with pytest.raises(DifferentiationError, match=r"'target'.*detach it"):
        linear_binary_cross_entropy(input, weight, bias, target.requires_grad_())


@pytest.mark.parametrize(
    ("dtype", "depth", "wanted"),
    [
        (torch.float32, 256, "cuda"),
        (torch.bfloat16, 256, "cuda"),
        (torch.float32, 1025, "triton"),
        (torch.bfloat16, 1025, "triton"),  # the CUDA kernels end at 1024
        (torch.float64, 256, "reference"),
    ],
)
def test_what_auto_takes_on_a_gpu(dtype, depth, wanted):
    with FakeTensorMode():
        input, weight, target = (
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape in ((8, depth), (1, depth), (8, 1))
        )
        assert choose(SIGMOID, (input, weight, None)) == wanted
        assert choose(LOSS, (input, weight, None, target, "mean")) == wanted
