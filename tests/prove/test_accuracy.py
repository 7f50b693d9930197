"""The bar itself: what passes, what fails, and why luck decides nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab.prove import accuracy
from fuselab.prove.accuracy import Bar, judge, nudged, ulp_of_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def t(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    for value in (1.0, 1.5, 2.0, 1000.0, limits.max, limits.tiny, limits.tiny * 3):
        exact = torch.tensor([[value]], dtype=torch.float64)
        expected = math.ldexp(limits.eps, math.frexp(value)[1] - 1)
        assert ulp_of_rows(exact, dtype).item() == expected
    smallest = limits.tiny * limits.eps
    zero = torch.tensor([[0.0, -0.0], [smallest, 0.0]], dtype=torch.float64)
    assert ulp_of_rows(zero, dtype).tolist() == [smallest, smallest]


def test_ulp_ignores_what_is_not_finite() -> None:
    rows = torch.tensor([[math.inf, 1.0], [math.nan, 4.0]], dtype=torch.float64)
    assert ulp_of_rows(rows, torch.float32).tolist() == [2.0**-23, 2.0**-21]


def test_two_ulp_pass_and_three_fail_where_eager_is_exact() -> None:
    exact = torch.ones(1, 4, dtype=torch.float64)
    eager = exact.float()
    for ulps, passes in ((1, True), (2, True), (3, False)):
        ours = eager.clone()
        ours[0, 2] += ulps * 2.0**-23
        found = judge(ours, eager, exact)
        assert (found.problem is None) is passes
        assert found.ours_ulp == ulps and found.eager_ulp == 0


def test_four_times_eagers_error_is_allowed_on_its_own_row_only() -> None:
    exact = torch.ones(2, 4, dtype=torch.float64)
    eager = exact.float()
    eager[0, 0] += 10 * 2.0**-23
    ours = exact.float()
    ours[0, 3] += 42 * 2.0**-23
    assert judge(ours, eager, exact).problem is None
    ours[0, 3] += 1 * 2.0**-23
    assert judge(ours, eager, exact).problem.startswith("row 0 of 2 is off by 43 ulp")
    ours = exact.float()
    ours[1, 3] += 3 * 2.0**-23  # the other row: eager is exact there
    assert judge(ours, eager, exact).problem.startswith("row 1 of 2 is off by 3 ulp")


def test_a_large_row_does_not_excuse_a_small_one() -> None:
    exact = torch.tensor([[1e6, 1e6], [1e-3, 1e-3]], dtype=torch.float64)
    eager = exact.float()
    ours = eager.clone()
    ours[1, 0] *= 1.001
    assert "row 1" in judge(ours, eager, exact).problem


def test_float64_s_zero_may_be_one_that_underflowed() -> None:
    """exp(-740) is a number, and 1 / (1 + exp(740)) is 0."""
    limits = torch.finfo(torch.float64)
    zero = t(0.0, dtype=torch.float64)
    below = t(-limits.tiny / 2, dtype=torch.float64)
    assert judge(below, zero, -zero).problem is None
    assert judge(t(limits.tiny, dtype=torch.float64), zero, zero).problem is not None
    assert judge(zero, below, below).problem is not None  # the other way a number is lost
    single = t(torch.finfo(torch.float32).tiny / 2)
    assert judge(single, t(0.0), zero).problem is not None


def test_one_dimension_is_one_row() -> None:
    exact = torch.tensor([1e6, 1e-3], dtype=torch.float64)
    ours = exact.float()
    ours[1] += 2.0**-4  # an ulp at a million
    assert judge(ours, exact.float(), exact).problem is None


@pytest.mark.parametrize(
    ("ours", "eager", "exact", "passes"),
    [
        (math.nan, math.nan, math.nan, True),
        (0.0, math.nan, math.nan, False),
        (math.nan, 0.0, 0.0, False),
        (math.inf, math.inf, math.inf, True),
        (-math.inf, math.inf, math.inf, False),
        (3.4e38, math.inf, math.inf, False),
        (math.inf, 1.0, 1.0, False),
        (math.inf, math.inf, 6e38, True),  # what the exact number rounds to
        (10000.0, math.inf, 10000.0, True),  # eager overflowed on the way, ours did not
        (9000.0, math.inf, 10000.0, False),
        (math.nan, math.inf, math.inf, False),
    ],
)
def test_nan_and_infinity_stand_where_eagers_stand(
    ours: float, eager: float, exact: float, passes: bool
) -> None:
    found = judge(t(1.0, ours), t(1.0, eager), t(1.0, exact, dtype=torch.float64))
    assert (found.problem is None) is passes


def test_an_infinity_leaves_the_rest_of_its_row_judged() -> None:
    exact = t(math.inf, 1.0, dtype=torch.float64)
    found = judge(t(math.inf, 1.1), t(math.inf, 1.0), exact)
    assert "column 1 is 1.1" in found.problem


def test_a_row_that_eager_loses_to_nan_is_not_judged() -> None:
    exact = t([1.0, 2.0], [1.0, 2.0], dtype=torch.float64)
    eager = t([math.nan, 2.0], [1.0, 2.0])
    assert judge(t([0.0, math.inf], [1.0, 2.0]), eager, exact).problem is None
    assert "row 1" in judge(t([0.0, 0.0], [1.0, 2.1]), eager, exact).problem
    assert judge(t([1.0, 2.0], [math.nan, 2.0]), eager, exact).problem is not None


def test_shape_and_dtype_are_part_of_the_answer() -> None:
    one = torch.ones(2, 1)
    assert "has shape [2]" in judge(one.squeeze(1), one, one.double()).problem
    assert "is torch.float64" in judge(one.double(), one, one.double()).problem
    assert judge(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3).double()).problem is None


def loss(values: list[Tensor]) -> list[Tensor]:
    """Binary cross entropy of logits below -100, whose logarithm is 0."""
    logit, target = values
    return [(1 - target) * logit - logit]


def test_where_eager_overflows_a_copy_shows_its_rounding() -> None:
    """1.02 times the largest number is infinite; a fused product and sum rounds 1.02 alone, and its
    error is 50 times the result's rounding."""
    logit = torch.tensor([-torch.finfo(torch.float32).max])
    target = torch.tensor([-0.02])
    fused = ((1 - target).double() * logit.double() - logit.double()).float()
    bar = Bar(loss, [logit, target], ["loss"])
    assert bar.eager[0].isinf() and bar.exact[0].isfinite()
    assert judge(fused, bar.eager[0], bar.exact[0]).problem is not None
    assert bar.judge([fused])[0].problem is None
    wrong = Bar(loss, [logit, target], ["loss"]).judge([1.001 * fused])[0]
    assert wrong.problem is not None


def gelu(values: list[Tensor]) -> list[Tensor]:
    """By its definition, whose sum cancels far left of 0."""
    return [values[0] * 0.5 * (1 + torch.erf(values[0] / math.sqrt(2)))]


def test_eagers_luck_in_a_narrow_row_decides_nothing() -> None:
    """Where gelu cancels, eager's error is anything between none and thousands of ulp."""
    lucky = None
    for place in range(4000):
        value = torch.tensor([-4.0 - place * 1e-4])
        exact = gelu([value.double()])[0]
        if (gelu([value])[0].double() - exact).abs() < exact.abs() * 2**-23:
            lucky = value
            break
    assert lucky is not None, "eager is never lucky: look for another function"
    exact = gelu([lucky.double()])[0]
    ours = (exact * (1 + 20 * 2.0**-23)).float()
    assert judge(ours, gelu([lucky])[0], exact).problem is not None
    assert Bar(gelu, [lucky], ["output"]).judge([ours])[0].problem is None


def test_copies_do_not_excuse_what_is_wrong() -> None:
    value = torch.linspace(-3, 3, 7).unsqueeze(1)
    exact = gelu([value.double()])[0]
    bar = Bar(gelu, [value], ["output"])
    assert bar.judge([exact.float()])[0].problem is None
    assert bar.judge([exact.half().float()])[0].problem is not None


def test_no_more_copies_are_made_of_a_continuous_function_than_can_decide() -> None:
    """A jump shows on few copies, the rounding of a continuous function on every one."""
    value = torch.linspace(-3, 3, 7).unsqueeze(1)

    def copies_made(function: Any, off_by: float) -> int:
        bar = Bar(function, [value], ["output"])
        rounded, made = bar.evaluate_rounded, []
        bar.evaluate_rounded = lambda *asked: made.append(None) or rounded(*asked)
        (judgement,) = bar.judge([function([value])[0] * (1 + off_by)])
        assert judgement.problem is not None
        return len(made)

    assert copies_made(gelu, 1e-2) == 8
    assert copies_made(gelu, 1e-4) == 32
    stepped = copies_made(lambda values: [values[0] * (values[0] > 0.5)], 1e-2)
    assert stepped == (1 + accuracy.GENTLE) * accuracy.COPIES


def relu_of_products(values: list[Tensor]) -> list[Tensor]:
    """The gradient of relu(outer(x, x) wᵀ) by x: it jumps where a pre-activation changes sign."""
    x, weight, upstream = values
    x = x.detach().requires_grad_()
    outer = (x[:, :, None] * x[:, None, :]).flatten(1)
    return list(torch.autograd.grad(torch.relu(outer @ weight.t()), [x], upstream))


def folded(values: list[Tensor], shift: float = 0.0) -> Tensor:
    """The same with w_ij + w_ji rounded once, as a kernel does that multiplies half as often, in
    float64 otherwise; ``shift`` moves the pre-activations."""
    x, weight, upstream = values
    width = x.shape[1]
    square = weight.view(-1, width, width)
    both = square + square.transpose(1, 2)
    row, column = torch.tril_indices(width, width).unbind()
    halves = torch.where(row == column, square[:, row, column], both[:, row, column])
    total = (x[:, row] * x[:, column]).double() @ halves.double().t() + shift
    passed = torch.where(total > 0, upstream.double(), 0.0)
    exact = square.double() + square.double().transpose(1, 2)
    return torch.einsum("bn,nij,bj->bi", passed, exact, x.double()).to(x.dtype)


def test_a_jump_is_excused_where_eager_may_take_either_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pre-activation within its own rounding is positive for one kernel, negative for another."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((500, 6), (2, 36), (500, 2))
    for _ in range(40):
        values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        with monkeypatch.context() as without:
            without.setattr(accuracy, "GENTLE", 0)
            bar = Bar(relu_of_products, values, ["gradient"])
            if bar.judge([folded(values)])[0].problem is not None:
                break
    else:
        pytest.fail("32 copies show every jump: this test shows nothing")
    assert Bar(relu_of_products, values, ["gradient"]).judge([folded(values)])[0].problem is None
    # The sign of what lies tens of roundings off is no matter of luck.
    wrong = folded(values, shift=0.5)
    judgement = Bar(relu_of_products, values, ["gradient"]).judge([wrong])[0]
    assert judgement.problem is not None and judgement.rows_missed > 5


def swiglu(values: list[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.silu(values[0]) * values[1]]


def test_a_product_may_overflow_first_where_a_number_is_so_large_that_its_square_does() -> None:
    """g u / (1 + exp(-g)) is NaN for the largest -g, where u g sigmoid(g) is 0."""
    gate, up = torch.tensor([[-3e38, 0.5, 2.0]]), torch.tensor([[2.0, 3e38, 1.0]])
    other = gate * up / (1 + torch.exp(-gate))
    assert other.isnan().tolist() == [[True, False, False]] and not other[0, 1].isinf()
    assert Bar(swiglu, [gate, up], ["output"]).judge([other])[0].problem is None
    infinite = torch.where(torch.tensor([[False, True, False]]), torch.inf, other)
    assert Bar(swiglu, [gate, up], ["output"]).judge([infinite])[0].problem is None
    # Neither the other sign, nor what does not depend on such a number, nor another number.
    for place, number in ((1, -torch.inf), (2, torch.nan), (2, torch.inf), (1, 0.0), (0, 1e33)):
        wrong = other.clone()
        wrong[0, place] = number
        assert Bar(swiglu, [gate, up], ["output"]).judge([wrong])[0].problem is not None
    moderate = torch.tensor([[-1e18, 0.5, 2.0]])
    lost = swiglu([moderate, up])[0].index_fill(1, torch.tensor([0]), torch.nan)
    assert Bar(swiglu, [moderate, up], ["output"]).judge([lost])[0].problem is not None


def relu_of_a_sum(values: list[Tensor]) -> list[Tensor]:
    """The gradient of relu(x + y / 2) by x."""
    x, y, upstream = values
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(torch.relu(x + y * 0.5), [x], upstream))


def test_the_gradient_of_a_relu_may_come_from_its_rounded_result() -> None:
    """3 units / 2 - 1 unit is half a unit, which float16 rounds to 0; eager, which rounds the
    product to 2 units, keeps it."""
    unit = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    x, y = (torch.tensor([[number, 64.0]]) * unit for number in (-1.0, 3.0))
    values = [x.half(), y.half(), torch.tensor([[-0.3, 0.7]]).half()]
    stored = torch.relu(x + y * 0.5).half()
    gradient = torch.where(stored > 0, values[2], 0)
    assert stored[0, 0] == 0 and relu_of_a_sum(values)[0][0, 0] != 0
    assert Bar(relu_of_a_sum, values, ["gradient"]).judge([gradient])[0].problem is None
    # A whole unit is no rounding's matter.
    values[0] = torch.zeros_like(values[0])
    judgement = Bar(relu_of_a_sum, values, ["gradient"]).judge([gradient])[0]
    assert judgement.problem is not None


def softmax(values: list[Tensor]) -> list[Tensor]:
    return [torch.softmax(values[0], -1)]


def test_float64_is_judged_by_float32s_error() -> None:
    value = torch.randn(4, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bar = Bar(softmax, [value], ["output"])
    other_order = torch.exp(value) / torch.exp(value.flip(-1)).sum(-1, keepdim=True)
    assert bar.judge([other_order])[0].problem is None
    assert bar.judge([softmax([value])[0].float().double()])[0].problem is not None


def test_a_missing_result_is_a_problem_unless_it_would_be_zero() -> None:
    def gradient_like(values: list[Tensor]) -> list[Tensor | None]:
        return [values[0] * 2, values[0] * 0, None]

    value = torch.ones(2, 2)
    first, second, third = Bar(gradient_like, [value], ["a", "b", "c"]).judge([None, None, value])
    assert first.problem == "is missing (None)"
    assert second.problem is None
    assert third.problem == "is not zero, eager has no gradient there"


def test_a_comparison_may_fall_either_way_within_the_rounding() -> None:
    values = torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 4.0]])
    bar = Bar(lambda values: [values[0].mean(-1) * 3 > values[1]], [values, t(0.6, 7.0)], ["mask"])
    (eager,) = bar.eager
    assert eager is not None
    flipped = torch.stack([~eager[0], eager[1]])
    other = torch.stack([eager[0], ~eager[1]])
    sums = values.double().mean(-1) * 3 - t(0.6, 7.0).double()
    assert sums[0].abs() < 1e-7
    for mask in (eager, flipped):
        (judgement,) = bar.judge([mask])
        assert judgement.problem is None
    wrong = Bar(bar.evaluate, [values, t(0.6, 7.1)], ["mask"])
    (judgement,) = wrong.judge([other])
    assert judgement.problem == "at [1] is True, eager gives False"


def test_integers_of_integers_must_be_equal() -> None:
    ids = torch.arange(6).view(2, 3)
    bar = Bar(lambda values: [values[0] % 3], [ids], ["remainder"])
    (judgement,) = bar.judge([ids % 3 + (ids == 4)])
    assert judgement.problem == "at [1, 1] is 2, eager gives 1"
    assert not judgement.curable


def test_inputs_changed_later_do_not_change_the_bar() -> None:
    value = torch.ones(2, 2)
    bar = Bar(softmax, [value], ["output"])
    value.zero_()
    value[0, 0] = 5.0
    assert bar.judge(softmax([value]))[0].problem is not None


def group_norm(values: Sequence[Any]) -> list[Tensor]:
    return [torch.nn.functional.group_norm(values[0], 2, values[1])]


def test_a_normalisation_may_give_what_its_definition_gives_where_eager_gives_nan() -> None:
    """On a CPU eager multiplies the mean by an infinite weight, and its NaN is one order of the
    arithmetic; a finite number in its place is right in none."""
    x = torch.tensor([[-1.0, 2.0, 5.0, 7.0]])
    bar = Bar(group_norm, [x, t(1.0, math.inf, 1.0, 1.0)], ["output"])
    root = torch.rsqrt(t(2.25, 1.0) + 1e-5)
    ours = t(-1.5, 1.5, -1.0, 1.0) * root.repeat_interleave(2)
    ours[1] = math.inf
    assert bar.eager[0][0, 1].isnan()
    (right,) = bar.judge([ours[None]])
    assert right.problem is None
    for wrong in (-math.inf, 3.0):
        ours[1] = wrong
        (found,) = bar.judge([ours[None]])
        assert found.problem.startswith("row 0, column 1 is")


def difference_and_bias(values: Sequence[Any]) -> list[Tensor]:
    x, weight, other, bias = values
    return [x * weight - x * other + bias]


def test_brackets_decide_also_beside_the_nan_of_an_input() -> None:
    """x (w - v) is infinite where x w - x v is NaN; a NaN of the bias shows in either."""
    x, bias = t([math.inf, 1.0, math.inf]), t([0.0, math.nan, math.nan])
    bar = Bar(difference_and_bias, [x, t([2.0] * 3), t([1.0] * 3), bias], ["output"])
    assert bar.eager[0].isnan().all()
    by_other_brackets = x * 1.0 + bias
    assert by_other_brackets[0, 0] == math.inf and bar.judge([by_other_brackets])[0].problem is None
    for place, wrong in ((0, 3.0), (1, math.inf), (1, 1.0)):
        ours = by_other_brackets.clone()
        ours[0, place] = wrong
        assert f"column {place} is" in str(bar.judge([ours])[0].problem)


def rows_seen(values: Sequence[Any]) -> list[Tensor]:
    """Return the means of the rows up to each, as products with a triangle of weights."""
    (x,) = values
    weights = torch.ones(len(x), len(x), dtype=x.dtype).tril()
    return [weights / weights.sum(-1, keepdim=True) @ x]


def test_what_does_not_depend_on_a_nan_is_a_number() -> None:
    """Row 0 does not see row 2, of which eager takes 0 times NaN; row 2 does."""
    x = t([0.1, 0.7], [0.4, 0.3], [math.nan, math.inf])
    bar = Bar(rows_seen, [x], ["output"])
    assert bar.eager[0][:2].isnan().all()
    ours = torch.stack([x[0], (x[0] + x[1]) / 2, x[2]])
    assert bar.judge([ours])[0].problem is None
    for row, column, wrong in ((0, 0, 0.1001), (1, 1, 0.0), (2, 0, 0.4), (2, 1, 0.4)):
        found = ours.clone()
        found[row, column] = wrong
        assert f"row {row}" in str(bar.judge([found])[0].problem)


@pytest.mark.parametrize("function", [torch.amax, torch.amin, torch.nanmedian, torch.nansum])
def test_a_maximum_depends_on_a_nan(function: Any) -> None:
    """A NaN may not be dropped because some number in its place would not have been the largest."""
    eager = {torch.nanmedian: torch.median, torch.nansum: torch.sum}.get(function, function)
    dims = () if function in (torch.nanmedian, torch.nansum) else (-1,)
    x = t([1.0, 2.0, 9.0, math.nan, 4.0])
    bar = Bar(lambda values: [eager(values[0], *dims)], [x], ["output"])
    (found,) = bar.judge([function(x.nan_to_num(nan=3.0), *dims)])
    assert "eager gives nan" in str(found.problem)


def loss_by_branches(values: Sequence[Any]) -> list[Tensor]:
    x = values[0].detach().requires_grad_()
    losses = torch.where(x.abs() <= 0.5, 0.5 * x * x, 0.5 * (x.abs() - 0.25))
    return [losses.detach(), *torch.autograd.grad(losses.sum(), x)]


def test_a_gradient_may_be_its_limit_where_eagers_branch_is_lost() -> None:
    """0 times the slope of the branch that is not taken, which is infinite, is eager's NaN."""
    x = t([math.inf, -math.inf, 2.0, math.nan])
    bar = Bar(loss_by_branches, [x], ["output", "gradient of x"])
    assert bar.eager[1].isnan().tolist() == [[True, True, False, True]]
    output, right = bar.eager[0], x.clamp(-0.5, 0.5)
    assert [found.problem for found in bar.judge([output, right])] == [None, None]
    for place, wrong in ((0, 0.0), (1, 0.5), (3, 0.0)):
        ours = right.clone()
        ours[0, place] = wrong
        assert "row 0" in str(bar.judge([output, ours])[1].problem)
    hidden = torch.where(x.isinf(), 7.0, output)
    assert bar.judge([hidden, right])[0].problem


def sum_of_rows(values: Sequence[Any]) -> list[Tensor]:
    return [values[0].sum(-1, keepdim=True)]


@pytest.mark.parametrize(
    "terms",
    [
        torch.full((16, 700), 0.1),
        torch.tensor([[0.3]]).expand(16, 700),
        torch.tensor([0.1, 0.0, 0.7, -0.3]).repeat(16, 200),
    ],
    ids=("equal", "stride 0", "few numbers"),
)
def test_equal_terms_may_be_added_one_after_the_other(terms: Tensor) -> None:
    ours = functools.reduce(torch.add, terms.unbind(-1))[:, None]
    bar = Bar(sum_of_rows, [terms], ["output"])
    (found,) = bar.judge([ours])
    assert found.problem is None and found.ours_ulp > 10
    halved = functools.reduce(torch.add, terms.bfloat16().unbind(-1))[:, None].float()
    assert bar.judge([halved])[0].problem is not None


def standardised(values: Sequence[Any]) -> list[Tensor]:
    (x,) = values
    return [x / (x.std(-1, correction=0, keepdim=True) + 0.1)]


def test_a_variance_may_leave_the_range_of_the_arithmetic() -> None:
    """Squares of 1e20 are infinite in float32; eager sums them in float64 on a CPU."""
    large = t(1e20, -3e20, 2e20, dtype=torch.bfloat16)
    overflown = torch.zeros_like(large)
    assert Bar(standardised, [large], ["output"]).judge([overflown])[0].problem is None
    small = t(1.0, -3.0, 2.0, dtype=torch.bfloat16)
    (judgement,) = Bar(standardised, [small], ["output"]).judge([torch.zeros_like(small)])
    assert judgement.problem is not None and "float64 says" in judgement.problem


def gradient_of_one_element(values: Sequence[Any]) -> list[Tensor]:
    x, weight, upstream = values
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        output = torch.nn.functional.layer_norm(leaf, (1,), weight.detach())
    return [*torch.autograd.grad(output, leaf, upstream.detach())]


def test_a_gradient_that_cancels_may_be_zero_in_float64() -> None:
    """The norm of one number is constant. Eager's kernel leaves the rounding of its terms there
    (5.7e-14, with AVX2 and AVX-512), and PyTorch's definition of it 0."""
    x, weight = torch.tensor([[[-196.918]], [[1.54099610824404332]]], dtype=torch.float64)
    upstream = torch.tensor([[0.66135217157045223]], dtype=torch.float64)
    bar = Bar(gradient_of_one_element, [x, weight[0], upstream], ["gradient"])
    assert bar.judge([torch.zeros_like(x)])[0].problem is None
    assert bar.judge([torch.full_like(x, 1e-9)])[0].problem is not None


def gradient_of_hardsigmoid(values: Sequence[Any]) -> list[Tensor]:
    x, upstream = values
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        output = torch.nn.functional.hardsigmoid(leaf)
    return [*torch.autograd.grad(output, leaf, upstream.detach())]


def gradient_of_elu(values: Sequence[Any]) -> list[Tensor]:
    x, upstream = values
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        output = torch.nn.functional.elu(leaf)
    return [*torch.autograd.grad(output, leaf, upstream.detach())]


def test_the_gradient_of_elu_may_take_nan_for_a_positive_number() -> None:
    """Eager gives NaN for 32 elements and the upstream gradient for the three behind them."""
    x, upstream = torch.full((35,), math.nan), torch.ones(35)
    bar = Bar(gradient_of_elu, [x, upstream], ["gradient"])
    assert bar.judge([upstream])[0].problem is None
    assert bar.judge([upstream * math.inf])[0].problem is not None
    x[0] = -1.0
    bar = Bar(gradient_of_elu, [x, upstream], ["gradient"])
    wrong = upstream.clone()
    wrong[0] = math.nan
    assert bar.judge([wrong])[0].problem is not None


def test_a_sixth_in_float64_is_no_error() -> None:
    x = torch.linspace(-2, 2, 8, dtype=torch.float64)
    upstream = torch.linspace(0.3, 1.7, 8, dtype=torch.float64)
    bar = Bar(gradient_of_hardsigmoid, [x, upstream], ["gradient"])
    assert bar.judge([upstream / 6])[0].problem is None
    assert bar.judge([upstream / 6.001])[0].problem is not None


def running_product(input: Tensor) -> Tensor:
    return torch.cumprod(input, -1)


def gradient_of_running_product(values: Sequence[Any]) -> list[Tensor | None]:
    leaf = values[0].detach().requires_grad_()
    output = running_product(leaf)
    return [output.detach(), *torch.autograd.grad(output, [leaf], torch.ones_like(output))]


@pytest.mark.parametrize(
    ("gradient", "is_right"),
    [([math.inf, 2.0], True), ([math.inf, 2.5], False), ([math.inf, math.nan], True)],
)
def test_a_product_is_differentiated_without_a_division(
    gradient: list[float], is_right: bool
) -> None:
    """Eager divides an infinite product by an infinite factor, and gives NaN for 2."""
    input = torch.tensor([[2.0, math.inf]])
    bar = Bar(gradient_of_running_product, [input], ["output", "gradient"])
    assert bar.eager[1] is not None and bar.eager[1][0, 1].isnan()
    _, judgement = bar.judge([running_product(input), torch.tensor([gradient])])
    assert (judgement.problem is None) is is_right


@pytest.mark.parametrize(
    ("third", "is_right"), [(math.inf, True), (1e30, True), (-math.inf, False)]
)
def test_a_product_may_overflow_on_the_way_in_float32(third: float, is_right: bool) -> None:
    """Eager multiplies in double on a CPU, where the product of the first two is finite."""
    input = torch.tensor([[1e30, 1e20, 1e-20]])
    bar = Bar(lambda values: [running_product(*values)], [input], ["output"])
    assert bar.eager[0] is not None and bar.eager[0].tolist()[0][1] == math.inf
    (judgement,) = bar.judge([torch.tensor([[1e30, math.inf, third]])])
    assert (judgement.problem is None) is is_right


def attention_and_gradient(values: Sequence[Any]) -> list[Tensor]:
    query, key, value, upstream = values
    query = query.detach().requires_grad_()
    output = torch.softmax(query @ key.mT * 0.3, -1) @ value
    return [output.detach(), *torch.autograd.grad(output, query, upstream)]


@pytest.mark.parametrize(("coarse", "is_right"), [(False, True), (True, False)])
def test_an_attention_takes_the_sum_of_its_gradient_from_its_output(
    coarse: bool, is_right: bool
) -> None:
    """The roundings of the product cancel where the sum is taken of the product itself, as eager
    does, and not where it is taken of the output. An output of 16 bits is too coarse for it."""
    generator = torch.Generator().manual_seed(21)
    drawn = (torch.randn(24, 2, 21, generator=generator) * 3 for _ in range(4))
    query, key, value, upstream = drawn
    bar = Bar(attention_and_gradient, [query, key, value, upstream], ["output", "gradient of q"])
    weights = torch.softmax(query @ key.mT * 0.3, -1)
    output = weights @ value
    along = (upstream * (output.bfloat16().float() if coarse else output)).sum(-1, keepdim=True)
    gradient = weights * (upstream @ value.mT - along) * 0.3 @ key
    found = bar.judge([output, gradient])
    assert found[0].problem is None
    assert (found[1].problem is None) is is_right


def test_tensors_of_one_buffer_are_copied_into_one() -> None:
    """A model's tables may lie in one buffer, of which each table alone would copy the whole."""
    buffer = torch.randn(8, 4)
    bar = Bar(lambda values: [values[0][0] + values[0][1]], [list(buffer.split(4))], ["sum"])
    first, second = bar.values[0]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([first, second]), buffer)


def test_a_moved_part_of_a_large_buffer_keeps_its_strides_alone() -> None:
    part = torch.randn(1 << 19)[:24].view(4, 6).t()
    moved = nudged(part, torch.Generator().manual_seed(0), "near", keep_strides=True)
    assert moved.stride() == part.stride()
    assert moved.untyped_storage().nbytes() == part.nbytes
    torch.testing.assert_close(moved, part, rtol=1e-5, atol=0)
