"""The vector functions of cpu_math.h against PyTorch's in a wider format."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fuselab.runtime.cpp_source import CppSource, i64

SOURCE = CppSource(Path(__file__).with_name("cpu_math_check.cpp"))
FUNCTIONS = (
    *("abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "relu", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sqrt", "tanh"),
)
NAMES = {torch.float32: "float", torch.float64: "double"}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-30, -1e-30, 1e-42, 1e38, -1e38, 88.8, -104.1]
SPECIAL += [float("inf"), float("-inf"), float("nan"), 1.41421356, 0.70710678, 0.4142, -0.2928]


@pytest.fixture(scope="module", autouse=True)
def built():
    """Compile all functions at once."""
    SOURCE.prebuild([f"apply<functions::{f}, {n}>" for f in FUNCTIONS for n in NAMES.values()])


def inputs(dtype):
    """Return numbers of every magnitude, those around 1 closely, and special ones."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(200_000, generator=generator, dtype=torch.float64)
    wide = normal[:100_000] * torch.exp2(torch.linspace(-60, 60, 100_000, dtype=torch.float64))
    near = 1 + normal[:50_000] * 0.3
    every = torch.cat([normal * 3, wide, near, torch.tensor(SPECIAL, dtype=torch.float64)])
    return torch.cat([every, every.new_zeros(-len(every) % 16)]).to(dtype)


def computed(function, values):
    output = torch.empty_like(values)
    name = f"apply<functions::{function}, {NAMES[values.dtype]}>"
    SOURCE.launch(name, (values, output, i64(len(values))))
    return output


def expected_of(function, values):
    """Return the values in float64. PyTorch's sigmoid becomes 0 where exp(-x) overflows."""
    values = values.double()
    if function == "sigmoid":
        return values.clamp(max=0).exp() / (1 + (-values.abs()).exp())
    return getattr(torch, function)(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_within_two_ulp(function, dtype):
    values = inputs(dtype)
    expected = expected_of(function, values)
    actual = computed(function, values)
    rounded = expected.to(dtype)
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    assert torch.equal(actual.isnan(), rounded.isnan())
    assert torch.equal(actual.isinf(), rounded.isinf())
    ulp = (torch.nextafter(rounded.abs(), rounded.new_tensor(torch.inf)) - rounded.abs()).double()
    error = ((actual.double() - expected.double()).abs() / ulp).masked_fill(same, 0)
    worst = error.nan_to_num(0).argmax()
    bar = 2.5 if dtype == torch.float32 else 4  # PyTorch's own float64 functions err by 1 to 2
    assert error[worst] <= bar, (values[worst], actual[worst], expected[worst])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("function", ["sin", "cos"])
def test_angles_near_multiples_of_a_quarter_turn(function, dtype):
    """Such an angle less its quarter turns is small, and all of its digits must be right."""
    angles = torch.arange(-8000, 8000, dtype=torch.float64) * (torch.pi / 2)
    values = angles[angles.abs() < 8192].to(dtype)
    values = torch.cat([values, values.new_full((-len(values) % 16,), 9000.0)])
    expected = torch.tensor(
        [getattr(math, function)(one) for one in values.tolist()], dtype=torch.float64
    )
    actual = computed(function, values).double()
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 0.0}
    if dtype == torch.float64:
        expected = getattr(torch, function)(values)
    torch.testing.assert_close(actual, expected, **near)


@pytest.mark.parametrize("largest", [1e4, 1e6, 1e9, 3e38])
@pytest.mark.parametrize("function", ["sin", "cos"])
def test_large_angles(function, largest):
    drawn = torch.rand(4096, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = ((drawn * 2 - 1) * largest).float()
    quarters = (torch.arange(1, 4097) * 127.0 * (torch.pi / 2)).clamp(max=largest).float()
    for angles in (values, quarters):
        expected = [getattr(math, function)(one) for one in angles.tolist()]
        near = {"rtol": 4 * torch.finfo(torch.float32).eps, "atol": 0.0}
        exact = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(computed(function, angles).double(), exact, **near)


@pytest.mark.parametrize("function", ["abs", "erf", "expm1", "log1p", "round", "sin", "tanh"])
def test_zeros_keep_the_sign_that_pytorch_gives_them(function):
    values = torch.tensor([0.0, -0.0] * 8)
    assert torch.equal(
        computed(function, values).signbit(), getattr(torch, function)(values).signbit()
    )
