"""What "right" means: the error against float64, row by row, next to the error that eager makes.

The bar. Let ``exact`` be the reference in float64 on the same inputs, ``eager`` the reference in
the working dtype, ``ours`` the implementation. A row is a slice along the last dimension; a tensor
with fewer than two dimensions is one row. On every row

    max |ours - exact|  <=  4 * max |eager - exact|  +  2 ulp

where ulp is the distance between neighbouring numbers of the output's dtype at the largest finite
magnitude of ``exact`` in that row (never another row's), at least the smallest subnormal. NaN and
infinities stand where eager's stand, with their sign; where ``ours`` differs from eager there, it
must be what ``exact`` rounds to (an intermediate sum that overflows in eager's 16 bits need not).

Two details keep honest kernels from failing by chance. In a narrow row eager may be exact by luck:
where a row misses the bar, eager's error is taken again on copies of the inputs moved by a few
ulp, with float64 on the same copies, and the largest counts. And where the working dtype is
float64, ``eager`` is ``exact``: eager's error is then that of float32 on the inputs rounded to
float32, times 2^-29, the ratio of the two roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FACTOR = 4.0
ULPS = 2.0
COPIES = 48
_FLOAT32_TO_FLOAT64 = 2.0**-29
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_BITS |= {torch.float64: torch.int64}


@dataclass(frozen=True)
class Judgement:
    """One tensor against the bar: worst errors in ulp of their row, and what is wrong, if any."""

    ours_ulp: float
    eager_ulp: float
    problem: str | None = None
    curable: bool = False  # a larger error of eager would pass it


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as (rows, width); fewer than two dimensions are one row."""
    if tensor.ndim < 2:
        return tensor.reshape(1, -1)
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def ulp_of_rows(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbours of ``dtype`` at each row's largest finite magnitude, float64."""
    limits = torch.finfo(dtype)
    finite = torch.where(torch.isfinite(exact), exact, 0.0).abs().clamp(max=limits.max)
    largest = finite.amax(dim=1).clamp(min=limits.tiny)
    _, exponent = torch.frexp(largest)
    return torch.ldexp(torch.full_like(largest, limits.eps), exponent - 1)


def error_of_rows(measured: Tensor, exact: Tensor) -> Tensor:
    """Largest |measured - exact| of each row over the places where both are finite, float64."""
    error = (measured.double() - exact).abs()
    return torch.where(torch.isfinite(error), error, 0.0).amax(dim=1)


def judge(
    ours: Tensor, eager: Tensor, exact: Tensor, eager_error: Tensor | None = None
) -> Judgement:
    """``ours`` against the bar; ``eager_error`` (per row, absolute) replaces eager's own if larger.

    ``ours`` and ``eager`` have the working dtype, ``exact`` is float64; shapes must agree.
    """
    if ours.shape != eager.shape:
        return Judgement(
            math.inf, 0.0, f"has shape {list(ours.shape)}, eager has {list(eager.shape)}"
        )
    if ours.dtype != eager.dtype:
        return Judgement(math.inf, 0.0, f"is {ours.dtype}, eager gives {eager.dtype}")
    if ours.device != eager.device:
        return Judgement(math.inf, 0.0, f"lies on {ours.device}, eager's on {eager.device}")
    if ours.numel() == 0:
        return Judgement(0.0, 0.0)
    if not ours.dtype.is_floating_point:
        same = torch.equal(ours, eager)
        return Judgement(0.0, 0.0, None if same else f"differs from eager's {ours.dtype} values")
    ours, eager, exact = (as_rows(value.detach()) for value in (ours, eager, exact))
    ulp = ulp_of_rows(exact, ours.dtype)
    error = error_of_rows(ours, exact)
    allowance = error_of_rows(eager, exact)
    if eager_error is not None:
        allowance = torch.maximum(allowance, eager_error.to(allowance.device))
    worst = float((error / ulp).max())
    worst_eager = float((allowance / ulp).max())
    misplaced = _misplaced(ours, eager, exact)
    if misplaced is not None:
        return Judgement(math.inf, worst_eager, misplaced)
    bad = error > FACTOR * allowance + ULPS * ulp
    if not bool(bad.any()):
        return Judgement(worst, worst_eager)
    row = int((error / (FACTOR * allowance + ULPS * ulp)).argmax())
    column = int(_error(ours[row], exact[row]).argmax())
    off, eager_off = (f"{float(value[row] / ulp[row]):.3g}" for value in (error, allowance))
    problem = (
        f"row {row} of {len(ours)} is off by {off} ulp where eager is off by {eager_off}: "
        f"column {column} is {float(ours[row, column]):.9g}, "
        f"float64 says {float(exact[row, column]):.9g}"
    )
    return Judgement(worst, worst_eager, problem, curable=True)


def _error(ours: Tensor, exact: Tensor) -> Tensor:
    return torch.nan_to_num((ours.double() - exact).abs(), nan=0.0, posinf=0.0)


def _misplaced(ours: Tensor, eager: Tensor, exact: Tensor) -> str | None:
    """What is wrong with NaN and infinities, or None."""
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    rounded = exact.to(ours.dtype)
    right = (ours == rounded) | (ours.isnan() & rounded.isnan())
    finite_like_exact = ours.isfinite() & rounded.isfinite()
    special = ~(ours.isfinite() & eager.isfinite())
    wrong = special & ~(same | right | finite_like_exact)
    if not bool(wrong.any()):
        return None
    row, column = (int(value) for value in wrong.nonzero()[0])
    return (
        f"row {row}, column {column} is {float(ours[row, column])} where eager gives "
        f"{float(eager[row, column])} and float64 {float(exact[row, column])}"
    )


def upcast(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A floating tensor or a floating dtype raised to ``dtype``; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    return value


def nudged(value: Any, generator: torch.Generator) -> Any:
    """A floating tensor with every ordinary element moved by at most 3 ulp; anything else as it is.

    Zeros, infinities, NaN and the largest finite numbers stay, so that special values keep their
    places.
    """
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    plain = value.detach().contiguous()
    bits = plain.view(_BITS[plain.dtype])
    step = torch.randint(-3, 4, plain.shape, generator=generator).to(bits.device, bits.dtype)
    moved = (bits + step).view(plain.dtype)
    ordinary = moved.isfinite() & plain.isfinite() & (plain.abs() > torch.finfo(plain.dtype).tiny)
    moved = torch.where(ordinary & (moved.sign() == plain.sign()), moved, plain)
    return moved.requires_grad_(value.requires_grad)


Evaluate = Callable[[Sequence[Any]], Sequence[Tensor | None]]


class Bar:
    """The bar for one set of inputs: eager's and float64's results, computed before ours runs.

    ``evaluate(values)`` runs the reference on ``values`` (arguments, then upstream gradients where
    gradients are judged) and returns every result; ``values`` are upcast here for float64.
    """

    def __init__(self, evaluate: Evaluate, values: Sequence[Any], names: Sequence[str]) -> None:
        self.evaluate, self.names = evaluate, names
        # Copies: an implementation that writes to its inputs must not spoil what it is judged by.
        self.values = [
            value.detach().clone() if isinstance(value, Tensor) else value for value in values
        ]
        for copy, value in zip(self.values, values, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                copy.requires_grad_()
        self.eager = list(evaluate(self.values))
        self.exact = list(evaluate([upcast(value) for value in self.values]))
        self.eager_error = [
            _estimate(eager, error)
            for eager, error in zip(self.eager, self._float32_error(None), strict=True)
        ]

    def _float32_error(self, generator: torch.Generator | None) -> list[Tensor | None]:
        """Per result and row: float32's error times 2^-29 where the result is float64, else None.

        With ``generator``, on a copy of the inputs moved by a few ulp of float32.
        """
        if not any(value is not None and value.dtype == torch.float64 for value in self.eager):
            return [None] * len(self.eager)
        single = [
            upcast(value, torch.float32) if _is_float64(value) else value for value in self.values
        ]
        if generator is not None:
            single = [nudged(value, generator) for value in single]
        eager = self.evaluate(single)
        exact = self.evaluate([upcast(value) for value in single])
        return [
            None
            if ours is None or truth is None or not ours.is_floating_point()
            else error_of_rows(as_rows(ours.detach()), as_rows(truth.detach()))
            * _FLOAT32_TO_FLOAT64
            if ours.numel()
            else None
            for ours, truth in zip(eager, exact, strict=True)
        ]

    def judge(self, results: Sequence[Tensor | None]) -> list[Judgement]:
        """Every result against the bar, with eager measured again where luck may decide."""
        judgements = [self._judge_one(place, ours) for place, ours in enumerate(results)]
        if not any(judgement.curable for judgement in judgements):
            return judgements
        generator = torch.Generator().manual_seed(len(self.values))
        for _ in range(COPIES):
            self._measure_copy(generator)
            judgements = [
                self._judge_one(place, results[place]) if judgement.curable else judgement
                for place, judgement in enumerate(judgements)
            ]
            if not any(judgement.curable for judgement in judgements):
                break
        return judgements

    def _judge_one(self, place: int, ours: Tensor | None) -> Judgement:
        eager, exact = self.eager[place], self.exact[place]
        if eager is None or exact is None:
            # Where eager has no gradient, zeros are as good as none.
            extra = ours is not None and bool(ours.any())
            return Judgement(
                0.0, 0.0, "is not zero, eager has no gradient there" if extra else None
            )
        if ours is None:
            missing = bool(eager.any()) or bool(exact.any())
            return Judgement(math.inf, 0.0, "is missing (None)") if missing else Judgement(0.0, 0.0)
        return judge(ours, eager, exact, self.eager_error[place])

    def _measure_copy(self, generator: torch.Generator) -> None:
        copy = [nudged(value, generator) for value in self.values]
        eager = self.evaluate(copy)
        exact = self.evaluate([upcast(value) for value in copy])
        single = self._float32_error(generator)
        for place, known in enumerate(self.eager_error):
            ours, truth = eager[place], exact[place]
            if ours is None or truth is None or not ours.is_floating_point() or not ours.numel():
                continue
            error = error_of_rows(as_rows(ours.detach()), as_rows(truth.detach()))
            for other in (known, single[place]):
                error = error if other is None else torch.maximum(error, other)
            self.eager_error[place] = error


def _is_float64(value: Any) -> bool:
    return (
        value == torch.float64
        if isinstance(value, torch.dtype)
        else (isinstance(value, Tensor) and value.dtype == torch.float64)
    )


def _estimate(eager: Tensor | None, error: Tensor | None) -> Tensor | None:
    """float32's scaled error, only where the result itself is float64."""
    return error if eager is not None and eager.dtype == torch.float64 else None
