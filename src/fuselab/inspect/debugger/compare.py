"""The comparison of a kernel's result with a torch expression: the largest difference and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import TargetError


def evaluated(expression: str, names: Mapping[str, Any]) -> Any:
    """Return a torch expression of the arguments' names. Raises TargetError."""
    known = {"torch": torch, "F": torch.nn.functional, "math": math, **names}
    try:
        return eval(expression, {"__builtins__": __builtins__}, known)
    except Exception as error:
        raise TargetError(
            f"--against '{expression}': {type(error).__name__}: {error}; it knows torch, F and "
            f"{', '.join(names)}."
        ) from error


def widened(value: Any) -> Any:
    """Return a floating tensor in float64, and anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def compared_all(
    outputs: Sequence[tuple[str, Tensor]], expression: str, names: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the comparisons of named results with an expression: of each result with its place
    in a tuple, or of the first one with a tensor.

    The expression is computed in float64, and once more in the arguments' own dtypes. Raises
    TargetError.
    """
    expected = evaluated(expression, {key: widened(value) for key, value in names.items()})
    eager = evaluated(expression, names)
    if not isinstance(expected, tuple | list):
        expected, eager, outputs = [expected], [eager], outputs[:1]
    if len(expected) != len(outputs):
        raise TargetError(
            f"--against '{expression}' gives a tuple of {len(expected)} for {len(outputs)} "
            f"result{'s' if len(outputs) > 1 else ''} ({', '.join(name for name, _ in outputs)})."
        )
    return [
        compared(name, result, expression, wide, own)
        for (name, result), wide, own in zip(outputs, expected, eager, strict=True)
    ]


def compared(
    name: str, result: Tensor, expression: str, expected: Any, eager: Any
) -> dict[str, Any]:
    """Return the largest difference between ``result`` and the expression, and where it is.

    ``expected`` is the expression in float64, ``eager`` in the arguments' own dtypes: that has the
    error which plain PyTorch makes. ``within`` says whether the difference is at most 4 times that
    and 2 units in the last place, the bar of ``fuselab check``.
    """
    if not isinstance(expected, Tensor) or not isinstance(eager, Tensor):
        raise TargetError(f"--against '{expression}' gives a {type(expected).__name__}, no tensor.")
    if expected.shape != result.shape:
        raise TargetError(
            f"--against '{expression}' has shape {tuple(expected.shape)}, and {name} "
            f"{tuple(result.shape)}."
        )
    if not result.numel():
        return {"name": name, "expression": expression, "numel": 0, "within": True}
    wide = expected.double()
    difference = _difference(result.double(), wide)
    own = _difference(eager.to(result.dtype).double(), wide)
    largest = int(difference.flatten().argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(largest), result.shape)]
    at = tuple(place)
    bound = 4 * float(own.max()) + 2 * _ulp(wide[at], result.dtype)
    worst = float(difference[at])
    return {
        "name": name,
        "expression": expression,
        "numel": result.numel(),
        "difference": worst,
        "at": place,
        "kernel": float(result[at]),
        "expected": float(wide[at]),
        "eager_difference": float(own.max()),
        "different": int((difference > bound).sum()),
        "within": worst <= bound,
    }


def _difference(value: Tensor, expected: Tensor) -> Tensor:
    """Return absolute differences: 0 where both are NaN or the same infinity, infinite where only
    one is."""
    same = (value == expected) | (value.isnan() & expected.isnan())
    found = (value - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where(same, torch.zeros_like(found), found)


def _ulp(value: Tensor, dtype: torch.dtype) -> float:
    """Return the distance between ``value`` and the next number of a floating dtype; 0 for whole
    numbers."""
    if not dtype.is_floating_point or not bool(value.isfinite()):
        return 0.0
    facts = torch.finfo(dtype)
    exponent = math.frexp(max(abs(float(value)), facts.tiny))[1]
    return float(facts.eps) * 2.0 ** (exponent - 1)
