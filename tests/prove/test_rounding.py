"""Rounding by another computation: what moves, how far, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.prove.rounding import Rounded, chance_of_equal_terms, steps

UNIT = 2.0**-23


def moved(function: Callable[[Tensor], Tensor], input: Tensor, unit: float = UNIT) -> Tensor:
    """Return twenty results, each computed with other roundings."""
    found = []
    for seed in range(20):
        with Rounded(1000 * seed, unit):
            found.append(function(input.clone()))
    return torch.stack(found)


def test_a_product_moves_by_one_rounding_at_most() -> None:
    x = torch.tensor([3.0, -5.0, 0.0], dtype=torch.float64)
    steps = (moved(lambda value: value * 7.0, x) / (x * 7.0) - 1) / UNIT
    assert set(steps[:, 0].round(decimals=3).abs().tolist()) == {0.0, 1.0}
    assert (moved(lambda value: value * 7.0, x)[:, 2] == 0).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x]),
        torch.relu,
        torch.neg,
        lambda x: x.amax(-1),
        lambda x: x.t().contiguous(),
        lambda x: x[:, ::2].clone(),
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x.sort(-1)[0],
    ],
)
def test_what_copies_or_chooses_moves_nothing(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (moved(function, x) == function(x)).all()


def test_what_writes_in_place_is_moved_in_place() -> None:
    x = torch.ones(1000, dtype=torch.float64)
    found = moved(lambda value: value.mul_(3.0), x)
    assert set(((found - 3) / (3 * UNIT)).round(decimals=3).unique().tolist()) == {-1.0, 0.0, 1.0}


def test_a_sum_moves_by_the_root_of_its_length() -> None:
    terms = torch.arange(1, 1201, dtype=torch.float64)
    sizes = ((moved(torch.sum, terms) - 720600) / (UNIT * 10 * 720600)).round(decimals=3)
    assert set(sizes.abs().tolist()) == {0.0, 1.0}
    ones = torch.ones(1200, dtype=torch.float64)  # whose roundings have one sign
    sizes = ((moved(torch.sum, ones) - 1200) / (UNIT * 200 * 1200)).round(decimals=2)
    assert set(sizes.abs().tolist()) == {0.0, 1.0}
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(600)
    sizes = (moved(torch.sum, signs) / (UNIT * 10 * 1200**0.5)).round(decimals=3)
    assert set(sizes.abs().tolist()) == {0.0, 1.0}
    short = (moved(torch.sum, terms[:3]) - 6) / (UNIT * 6)  # one rounding of the result at least
    assert set(short.round(decimals=3).abs().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("terms", "dims", "chances"),
    [
        ([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [1], [1.0, 0.0]),
        ([[2.0, 2.0, 0.0, 0.0], [2.0, 2.0, -2.0, 5.0]], [1], [1 / 6, 0.0]),  # 0 is added exactly
        ([[1.0, 2.0], [1.0, 2.0]], [0], [1.0, 1.0]),
        ([[1.0, 2.0], [1.0, 2.0]], [], 1 / 3),
        ([[1.0, 1.0], [1.0, 1.0]], [-1, 0], 1.0),
        ([3.0], [0], 0.0),
        (3.0, [], 0.0),
    ],
)
def test_equal_terms_are_counted(terms: Any, dims: list[int], chances: Any) -> None:
    found = chance_of_equal_terms(torch.tensor(terms, dtype=torch.float64), dims, False)
    torch.testing.assert_close(found, torch.tensor(chances, dtype=torch.float64))


def test_a_long_sum_shows_its_equal_terms_in_a_part_of_them() -> None:
    rows = torch.rand(100, 1, generator=torch.Generator().manual_seed(0)).double()
    found = chance_of_equal_terms(rows.expand(100, 1000), [], False)
    assert 0.005 < found.item() < 0.011  # each number is 1,000 of 100,000 terms


def test_equal_numbers_move_alike_if_asked_to() -> None:
    x = torch.tensor([0.3, 0.3, -0.3, 0.0, 0.7], dtype=torch.float64).repeat(50)
    for seed in range(20):
        step = steps(x, seed, True).view(50, 5)
        assert (step == step[0]).all() and step[0, 0] == step[0, 1] == -step[0, 2]
        assert not step[:, 3].any()
    assert {steps(x[:1], seed, True).item() for seed in range(20)} == {-1, 0, 1}
    assert (steps(x, 0, False).view(50, 5).float().std(0) > 0.5).all()


def test_a_product_of_matrices_moves_as_a_sum_of_its_terms() -> None:
    one = torch.ones(3, 48, dtype=torch.float64)
    sizes = (moved(lambda value: value @ value.T, one) - 48) / (UNIT * 2 * 48)
    assert set(sizes.round(decimals=3).abs().unique().tolist()) == {0.0, 1.0}


def test_terms_that_cancel_show_their_rounding() -> None:
    """The loss is 1e-85, the difference of two terms of 200, which float64 holds to 1e-14."""

    def loss(logits: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(logits + 1))

    x = torch.full((4,), -200.0, dtype=torch.float64)
    assert loss(x).item() < 1e-80
    largest = moved(loss, x, 2.0**-52).abs().max().item()
    assert 1e-14 < largest < 1e-12


def test_subnormal_numbers_move_by_the_smallest_one() -> None:
    x = torch.full((100,), 2.0**-1070, dtype=torch.float64)
    steps = (moved(lambda value: value * 2.0, x, 2.0**-52) - 2.0**-1069) / 2.0**-1074
    assert set(steps.unique().tolist()) == {-1.0, 0.0, 1.0}


def test_random_numbers_are_drawn_as_without_moves() -> None:
    """A mask that dropped other elements would allow any error."""
    x = torch.ones(64, dtype=torch.float64)
    for draw in (lambda: torch.bernoulli(x / 2), lambda: F.dropout(x, 0.5, True)):
        torch.manual_seed(3)
        plain = draw()
        torch.manual_seed(3)
        with Rounded(5, UNIT):
            found = draw()
        assert (found - plain).abs().max() <= 8 * UNIT and 0 < plain.count_nonzero() < 64


def smooth_gradients(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    hidden = F.gelu(F.layer_norm(x, x.shape[-1:])) + F.silu(x) * torch.softmax(x, -1)
    found: Tensor = torch.autograd.grad(hidden.square().mean(), x)[0]
    return found


def ramp_gradients(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    found: Tensor = torch.autograd.grad(torch.relu(x @ x.T).sum(), x)[0]
    return found


@pytest.mark.parametrize(
    ("function", "jumps"),
    [
        (smooth_gradients, False),
        (ramp_gradients, True),
        (torch.relu, False),
        (lambda x: x.sort(-1)[0], True),
        (lambda x: torch.where(x > 0, x, x * x), True),
        (lambda x: torch.where(x.new_ones(x.shape).bool(), x, -x)[:, ::2].contiguous(), True),
        (lambda x: torch.div(x, 0.3), False),
        (lambda x: torch.div(x, 0.3, rounding_mode="floor"), True),
        (lambda x: torch.round(x * 100), True),
        (lambda x: x.to(torch.float32).to(torch.int64).double(), True),
    ],
)
def test_a_run_says_whether_anything_in_it_can_jump(
    function: Callable[[Tensor], Tensor], jumps: bool
) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Rounded(0, UNIT) as moved:
        function(x)
    assert moved.jumps is jumps


def test_zeros_without_memory_stay_zeros() -> None:
    """Autograd gives the derivative of a sign as a tensor that has no memory to move."""
    input = torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True)
    with Rounded(0, 2.0**-23):
        (slope,) = torch.autograd.grad((input.abs() * input).sum(), input, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), input)
    torch.testing.assert_close(second, 2 * input.detach().sign(), rtol=2.0**-20, atol=0)


def test_terms_of_a_sum_above_what_float32_counts_are_looked_at() -> None:
    """The last of them had an index in float32, which was one too large."""
    terms = torch.ones((1 << 24) + 366_144)
    assert float(chance_of_equal_terms(terms, [], False)) == 1
