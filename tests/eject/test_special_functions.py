"""Special functions that kernels compute by series, and constants, in both precisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def digamma_and_trigamma(x):
    return torch.digamma(x), torch.polygamma(1, x)


def inverse_error_function(x):
    return torch.erfinv(x / 32), torch.lgamma(x)


def constants_in_calls(x):
    return (
        x.clamp(min=0.1).log(),
        torch.pow(x.abs() + 0.5, 0.3),
        torch.where(x > 0, 0.1, x),
        torch.fmod(x, 0.3) + x.clamp(-0.6, 0.2),
    )


PLACES = torch.tensor([[0.3, -0.7, 1.0, 5.5, 20.0, -3.4, 0.5, 1e-3, -11.25, 31.9]])


@pytest.mark.parametrize("language", ["triton", "cpp"])
@pytest.mark.parametrize(
    "function",
    [digamma_and_trigamma, inverse_error_function, constants_in_calls],
    ids=lambda one: one.__name__,
)
def test_values_in_both_precisions(
    function: Callable[..., Any], language: str, tmp_path: Path
) -> None:
    folder = eject(function, PLACES, out=tmp_path / function.__name__, inference=True)
    # In float32 pi x is rounded at -11.25 before its sine is taken, as PyTorch does.
    for dtype, digits in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = PLACES.to(dtype)
        if language == "triton":
            found = interpreter.run(f"{folder}/op.py:forward_triton", x)
        else:
            found = load_op(str(folder)).implementations["cpp"].forward(x)
        for one, exact in zip(found, function(x.double()), strict=True):
            torch.testing.assert_close(one.double(), exact, rtol=digits, atol=digits)
