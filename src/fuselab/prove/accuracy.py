"""Judge accuracy: each row's error against float64 is compared with the error that eager makes.

The bar. Let ``exact`` be the reference in float64 on the same inputs, ``eager`` the reference in
the working dtype, ``ours`` the implementation. A row is a slice along the last dimension; a tensor
with fewer than two dimensions is one row. On every row

    max |ours - exact|  <=  4 * max |eager - exact|  +  2 ulp

where ulp is the distance between neighbouring numbers of the output's dtype at the largest finite
magnitude of ``exact`` in that row (never another row's), at least the smallest subnormal. NaN and
infinities stand where eager's stand, with their sign; where ``ours`` differs from eager there, it
must be what ``exact`` rounds to (an intermediate sum that overflows in eager's 16 bits need not
overflow in ours). Where it is no NaN of the inputs that shows, brackets decide between an infinity
and NaN: one may stand for the other where eager and ``exact`` have either, also with numbers in the
place of the inputs' NaN, and normalisations and products may give what their definition by simpler
operators gives, which overflows where the dtype of the arithmetic does. A row in which eager has
NaN and ``exact`` has a number is not judged: there an intermediate value leaves the working dtype's
range (the variance of the largest numbers), and no order of the arithmetic that keeps to that dtype
can be asked to come out right.

A correct kernel must not fail by chance, but eager may be exact by luck: in a narrow row, where
terms cancel, or at the kink of a ReLU; and on a CPU it adds float32 in pairs, or in double. So
where a row misses the bar, eager's error on it becomes the largest of: its own error, and that of
the definitions of normalisations and norms; its errors on up to ``COPIES`` copies of the inputs
(and of the upstream gradient), where every other copy is moved by at most 3 ulp and the rest by at
most a sixteenth, in the strides of the inputs or contiguous; and the change of float64's result
when its inputs and every intermediate result move by the rounding of the arithmetic
(``fuselab.prove.rounding``: 2^-23, for float64 2^-52, times the root of its length for a sum). No
more copies are made once every row passes. A kernel that computes in fewer bits than it should has
thousands of times these errors.

Integer and boolean results must be equal to eager's. Where they are not, and they are computed from
floating tensors, as a comparison is, an element is right too if float64 gives it, on the inputs
themselves or moved by the rounding of the arithmetic, or eager on a copy that is moved by at most
3 ulp.

A few rows can still miss the bar where the function jumps. The gradient of a ReLU whose
pre-activation is smaller than its own rounding is one of two values, for eager as for any kernel,
and only a copy on which eager takes the other side shows it. A move of 3 ulp changes a
pre-activation of many terms by several times its rounding, so few of those copies are near enough.
Where at most ``FEW_ROWS`` rows, or at most a quarter of all rows, still miss the bar, ``GENTLE``
times as many copies follow, in which a quarter of the elements moves by one ulp.

Where the working dtype is float64, ``exact`` rounds like ``eager`` and is no better. Eager's error
is then float32's on the inputs rounded to float32, times 2^-29, the ratio of the two roundings, and
64 times it is allowed instead of 4 times: float32 is exact where a function saturates (tanh is 1
from 9 on) while float64 still loses digits there. Where terms cancel (1 - tanh^2, a softmax's
gradient), both float64 results are off by the rounding of the cancelled terms, which the moved
intermediate results show.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.arguments import Storages, copy_of_storage, mapped
from fuselab.prove.definitions import Composed
from fuselab.prove.rounding import Rounded, steps
from fuselab.prove.special_values import (
    Others,
    free_numbers,
    limits,
    misplaced,
    without_large,
    without_specials,
)
from fuselab.runtime.dispatch.overlap import overlaps_itself

FACTOR = 4.0
FACTOR_FLOAT64 = 64.0
ULPS = 2.0
COPIES = 32
GENTLE = 8  # a multiple of COPIES: how many copies with one-ulp moves follow
FEW_ROWS = 4
# After so many copies, a share of the bar of a continuous function that no more copies explain.
BEYOND = {8: 1024.0, COPIES: 8.0}
_FLOAT32_TO_FLOAT64 = 2.0**-29
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_BITS |= {torch.float64: torch.int64}


@dataclass(frozen=True)
class Judgement:
    """The result of judging one tensor: its worst row, and what is wrong, if anything.

    ``share_of_bar`` is our error over the allowed error (above 1 it fails; it is infinite where
    something other than rounding is wrong). The worst row is the one with the largest share.
    ``ours_ulp`` and ``eager_ulp`` are the two errors on that row, in ulp of that row; where a
    gradient cancels, both may be huge and still right.
    """

    ours_ulp: float
    eager_ulp: float
    problem: str | None = None
    share_of_bar: float = 0.0
    curable: bool = False  # a larger error of eager would make it pass
    rows_missed: int = 0  # number of rows above their bar, if that is the problem
    rows: int = 0

    @property
    def may_jump(self) -> bool:
        """Whether the bar is met, or missed in so few rows that a jump of the function may be
        why."""
        few = max(FEW_ROWS, self.rows // 4)
        return self.problem is None or (self.curable and self.rows_missed <= few)


def as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as (rows, width); a tensor of fewer than two dimensions becomes one row."""
    if tensor.ndim < 2:
        return tensor.reshape(1, -1)
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def ulp_of_rows(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of ``dtype`` at each row's largest finite
    magnitude, as float64 of shape (rows,)."""
    limits = torch.finfo(dtype)
    largest = magnitude_of_rows(exact).clamp(min=limits.tiny, max=limits.max)
    _, exponent = torch.frexp(largest)
    return torch.ldexp(torch.full_like(largest, limits.eps), exponent - 1)


def magnitude_of_rows(rows: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row; 0 where a row has no finite element."""
    return torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0).abs_().amax(dim=1)


def error_of_rows(measured: Tensor, exact: Tensor) -> Tensor:
    """Return each row's largest |measured - exact| over the elements where both are finite, as
    float64 of shape (rows,)."""
    return _error(measured, exact).amax(dim=1)


def judge(
    ours: Tensor,
    eager: Tensor,
    exact: Tensor,
    eager_error: Tensor | None = None,
    slack: float = 1.0,
    agreed: Tensor | None = None,
    others: Others | None = None,
) -> Judgement:
    """Judge ``ours`` against the bar.

    ``ours`` and ``eager`` have the working dtype, ``exact`` is float64; shapes must agree.
    ``eager_error`` (per row, absolute) replaces eager's own error where it is larger. The bar
    becomes ``slack`` times as wide. ``agreed`` tells which elements of an integer or boolean result
    are right although eager gives another value. ``others`` says what else may stand in the place
    of NaN and infinities.
    """
    if ours.shape != eager.shape:
        return _failed(f"has shape {list(ours.shape)}, eager has {list(eager.shape)}")
    if ours.dtype != eager.dtype:
        return _failed(f"is {ours.dtype}, eager gives {eager.dtype}")
    if ours.device != eager.device:
        return _failed(f"lies on {ours.device}, eager's on {eager.device}")
    if ours.numel() == 0:
        return Judgement(0.0, 0.0)
    if not ours.dtype.is_floating_point:
        wrong = ours != eager if agreed is None else (ours != eager) & ~agreed
        if not bool(wrong.any()):
            return Judgement(0.0, 0.0)
        place = tuple(wrong.nonzero()[0].tolist())
        problem = f"at {list(place)} is {ours[place].item()}, eager gives {eager[place].item()}"
        rows = as_rows(wrong).any(dim=1)
        missed = int(rows.sum())
        return Judgement(math.inf, 0.0, problem, math.inf, agreed is not None, missed, len(rows))
    ours, eager, exact = (as_rows(value.detach()) for value in (ours, eager, exact))
    others = None if others is None else others.mapped(lambda value: as_rows(value.detach()))
    truth = exact if others is None else others.completed(exact)
    if ours.dtype == torch.float64:
        # What says that it is 0 is float64 itself, by a formula that may underflow on the way.
        is_tiny = (truth == 0) & (ours.abs() < torch.finfo(torch.float64).tiny)
        ours = torch.where(is_tiny, truth, ours)
    ulp = ulp_of_rows(truth, ours.dtype)
    error = error_of_rows(ours, truth)
    allowance = error_of_rows(eager, exact)
    if eager_error is not None:
        allowance = torch.maximum(allowance, eager_error.detach().to(allowance.device))
    factor = FACTOR_FLOAT64 if ours.dtype == torch.float64 else FACTOR
    share = error / (slack * (factor * allowance + ULPS * ulp))
    where_wrong = None
    if not (_all_finite(ours) and _all_finite(eager)):
        lost = (eager.isnan() & exact.isfinite()).any(dim=1)
        share[lost] = 0.0
        where_wrong = misplaced(ours, eager, exact, lost, others)
    row = int(share.argmax())
    worst, worst_eager = (float(value[row] / ulp[row]) for value in (error, allowance))
    if where_wrong is not None:
        return _failed(where_wrong, worst_eager)
    worst_share = float(share[row])
    if worst_share <= 1:
        return Judgement(worst, worst_eager, None, worst_share)
    column = int(_error(ours[row], truth[row]).argmax())
    problem = (
        f"row {row} of {len(ours)} is off by {worst:.3g} ulp where eager is off by "
        f"{worst_eager:.3g} and {worst / worst_share:.3g} are allowed: "
        f"column {column} is {float(ours[row, column]):.9g}, "
        f"float64 says {float(truth[row, column]):.9g}"
    )
    missed = int((share > 1).sum())
    return Judgement(worst, worst_eager, problem, worst_share, True, missed, len(ours))


def _failed(problem: str, eager_ulp: float = 0.0) -> Judgement:
    """Return the judgement of a result with a fault that is no rounding error."""
    return Judgement(math.inf, eager_ulp, problem, math.inf)


def _error(ours: Tensor, exact: Tensor) -> Tensor:
    return (ours.double() - exact).abs_().nan_to_num_(nan=0.0, posinf=0.0)


def _all_finite(values: Tensor) -> bool:
    """Return whether all elements are finite, in one pass over them."""
    return all(math.isfinite(float(end)) for end in values.aminmax())


def upcast(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Convert a floating tensor or a floating dtype to ``dtype``; return anything else
    unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    return value


def in_single_precision(values: Sequence[Any]) -> list[Any]:
    """Return the values with everything that is float64 in float32."""
    return mapped(
        lambda value: upcast(value, torch.float32) if _is_float64(value) else value, values
    )


def evaluations(values: Sequence[Any]) -> list[list[Any]]:
    """Return the lists of values that a bar for ``values`` evaluates at first, in their order."""
    found = [list(values), mapped(upcast, values)]
    if any(map(_is_float64, [*tensors_in(values), *values])):
        single = in_single_precision(values)
        found += [single, mapped(upcast, single)]
    return found


def nudged(value: Any, generator: torch.Generator, how: str, keep_strides: bool = False) -> Any:
    """Return a floating tensor with its ordinary elements moved; return anything else unchanged.

    The result is contiguous, or has the strides of ``value`` where ``keep_strides`` is True and its
    elements share no memory.

    ``how`` is "near" (each by at most 3 ulp), "far" (each by at most a sixteenth) or "gentle" (a
    quarter of them by one ulp). Zeros, infinities, NaN and subnormal numbers stay, so that special
    values keep their places. The largest finite numbers move only with "far", and only towards
    zero: where eager overflows on them, a copy on which it does not overflow shows its error.
    """
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    plain = value.detach().contiguous()
    if how == "far":
        chance = torch.rand(plain.shape, generator=generator, device=generator.device)
        moved = plain * (1 + (chance * 2 - 1) / 16).to(plain.device, plain.dtype)
    else:
        low, high = (-3, 4) if how == "near" else (0, 8)
        step = torch.randint(low, high, plain.shape, generator=generator, device=generator.device)
        if how == "gentle":
            step = (step == 0).long() - (step == 1).long()
        bits = plain.view(_BITS[plain.dtype])
        moved = (bits + step.to(bits.device, bits.dtype)).view(plain.dtype)
    limits = torch.finfo(plain.dtype)
    ordinary = (plain.abs() > limits.tiny) & moved.isfinite()
    if how != "far":
        ordinary &= plain.abs() < limits.max
    moved = torch.where(ordinary & (moved.sign() == plain.sign()), moved, plain)
    if keep_strides and not value.is_contiguous() and not overlaps_itself(value):
        if value.untyped_storage().nbytes() > 2 * value.nbytes + _SURROUNDING_BYTES:
            like = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        else:
            like = copy_of_storage(value.detach())
        moved = like.copy_(moved)
    return moved.requires_grad_(value.requires_grad)


def rerounded(value: Any, generator: torch.Generator, alike: bool = False) -> Any:
    """Return a value for float64's reference, moved by the rounding of the arithmetic: by 2^-23 of
    itself, or by 2^-52 where it is float64 already; equal elements ``alike`` or not.

    A number other than 0 moves by the arithmetic's smallest subnormal number at least, and none
    becomes infinite.
    """
    wide = upcast(value)
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return wide
    wide = wide.detach()
    seed = int(torch.randint(1 << 40, (), generator=generator, device=generator.device))
    step = steps(wide, seed, alike)
    limits = torch.finfo(torch.float64 if value.dtype == torch.float64 else torch.float32)
    size = (wide.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    moved = wide + torch.where(wide == 0, 0.0, step * size)
    moved = torch.where(moved.isfinite(), moved, wide)
    return moved.requires_grad_(value.requires_grad)


Evaluate = Callable[[Sequence[Any]], Sequence[Tensor | None]]
EvaluateRounded = Callable[
    [int, float, bool, float, Sequence[Any]], tuple[Sequence[Tensor | None], bool]
]
EvaluateAll = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Tensor | None]]]
Errors = list[Tensor | None]
_SURROUNDING_BYTES = 1 << 20  # more around a tensor, as a buffer of all tables, are not copied


class Bar:
    """The bar for one set of inputs: eager's and float64's results, computed before ours runs.

    ``evaluate(values)`` runs the reference on ``values`` (arguments, then upstream gradients where
    gradients are judged) and returns every result. For float64, the floating tensors in ``values``
    are upcast here, including those inside sequences; integer tensors are left unchanged. The bar
    is ``slack`` times as wide. ``composed(values)`` does what ``evaluate`` does, with
    normalisations computed by simpler operators; by default in this process. ``together`` takes
    several ``values`` at once, where that is faster.
    """

    def __init__(
        self,
        evaluate: Evaluate,
        values: Sequence[Any],
        names: Sequence[str],
        slack: float = 1.0,
        composed: Evaluate | None = None,
        together: EvaluateAll | None = None,
        rounded: EvaluateRounded | None = None,
    ) -> None:
        self.evaluate, self.names, self.slack = evaluate, names, slack
        self.copies, self.gentle = COPIES, GENTLE
        self.evaluate_all = together or self._one_by_one
        self.evaluate_composed = composed or self._evaluate_composed
        self.evaluate_rounded = rounded or self._evaluate_rounded
        # An implementation that writes to its inputs must not change what it is judged by. Strides
        # stay: they decide the order in which eager's kernels add.
        known: Storages = {}
        self.values = mapped(lambda value: _copy(value, known), values)
        eager, exact = self.evaluate_all([self.values, mapped(upcast, self.values)])
        self.eager, self.exact = list(eager), list(exact)
        # Made where NaN differ.
        self.others: list[Others | None] = [None] * len(self.eager)
        self.eager_error = [
            _estimate(eager, error)
            for eager, error in zip(
                self.eager, self._float32_error(lambda value: value), strict=True
            )
        ]

    def with_few_copies(self, copies: int) -> Bar:
        """Return this bar, which measures eager's error on ``copies`` copies and as many with
        one-ulp moves; for large inputs, whose long rows need few."""
        self.copies, self.gentle = min(copies, COPIES), 1
        return self

    def _float32_error(self, move: Callable[[Any], Any]) -> Errors:
        """Compute, per result and row, float32's error times 2^-29 on a copy of the inputs that
        ``move`` moves; None for a result that is not floating, or for all results if none is
        float64."""
        if not any(value is not None and value.dtype == torch.float64 for value in self.eager):
            return [None] * len(self.eager)
        single = mapped(move, in_single_precision(self.values))
        measured, exact = self.evaluate_all([single, mapped(upcast, single)])
        return [
            None if error is None else error * _FLOAT32_TO_FLOAT64
            for error in _errors(measured, exact)
        ]

    def judge(self, results: Sequence[Tensor | None]) -> list[Judgement]:
        """Judge every result, measuring eager's error again on copies where luck may decide."""
        self.agreed = [self._first_agreed(place, ours) for place, ours in enumerate(results)]
        judgements = [self._judge_one(place, ours) for place, ours in enumerate(results)]
        if all(judgement.problem is None for judgement in judgements):
            return judgements
        self._compare_definitions()
        judgements = [self._judge_one(place, ours) for place, ours in enumerate(results)]
        if not any(judgement.curable for judgement in judgements):
            return judgements
        self.jumps = not all(map(_is_moderate, tensors_in(self.values)))
        # The copies of a large case are drawn in milliseconds on the device of the results.
        device = next((value.device for value in self.eager if value is not None), "cpu")
        is_double = any(map(_is_float64, self.eager))
        generator = torch.Generator(device).manual_seed(len(self.values))
        for number in range((1 + self.gentle) * self.copies):
            if number == self.copies and not all(judgement.may_jump for judgement in judgements):
                break
            how = ("near", "far")[number % 2]
            if number >= self.copies:
                how = "far" if is_double and number % 2 else "gentle"
            self._measure_copy(generator, how, number, results)
            judgements = [
                self._judge_one(place, results[place]) if judgement.curable else judgement
                for place, judgement in enumerate(judgements)
            ]
            if all(self._is_decided(judgement, number + 1) for judgement in judgements):
                break
        return judgements

    def _is_decided(self, judgement: Judgement, copies: int) -> bool:
        """Return whether no further copy can change a judgement after so many: it is met, or has
        another fault than an error, or the function is continuous and the bar is missed by more
        than further copies add to it."""
        is_beyond = any(
            copies >= made and judgement.share_of_bar > share for made, share in BEYOND.items()
        )
        return not judgement.curable or (is_beyond and not self.jumps)

    def _one_by_one(self, several: Sequence[Sequence[Any]]) -> list[Sequence[Tensor | None]]:
        return [self.evaluate(values) for values in several]

    def _evaluate_composed(self, values: Sequence[Any]) -> Sequence[Tensor | None]:
        with Composed():
            return self.evaluate(values)

    def _evaluate_rounded(
        self, seed: int, unit: float, alike: bool, lost: float, values: Sequence[Any]
    ) -> tuple[Sequence[Tensor | None], bool]:
        with Rounded(seed, unit, alike, lost) as moved:
            return self.evaluate(values), moved.jumps

    def _judge_one(self, place: int, ours: Tensor | None) -> Judgement:
        eager, exact = self.eager[place], self.exact[place]
        if eager is None or exact is None:
            # Where eager has no gradient, zeros are as good as None.
            if ours is not None and bool(ours.any()):
                return _failed("is not zero, eager has no gradient there")
            return Judgement(0.0, 0.0)
        if ours is None:
            if bool(eager.any()) or bool(exact.any()):
                return _failed("is missing (None)")
            return Judgement(0.0, 0.0)
        return judge(
            *(ours, eager, exact, self.eager_error[place], self.slack),
            *(self.agreed[place], self.others[place]),
        )

    def _compare_definitions(self) -> None:
        """Count as errors of eager's those of the definitions by simpler operators, and keep what
        these give, and what float64 gives without the NaN of the inputs."""
        narrow = self.evaluate_composed(mapped(_widened, self.values))
        composed = self.evaluate_composed(mapped(upcast, self.values))
        calm: Sequence[Tensor | None] = self.exact
        if any(bool(value.isnan().any()) for value in tensors_in(self.values)):
            calm = self.evaluate(mapped(_without_nan, mapped(upcast, self.values)))
        self.free = self._free_numbers()
        large = self._large_numbers()
        truth = list(self.exact)
        for place, found in enumerate(zip(composed, calm, narrow, self.free, large, strict=True)):
            exact = truth[place]
            if exact is not None and all(one is not None for one in found):
                others = self.others[place] = Others(*(one for one in found if one is not None))
                truth[place] = others.completed(exact)
        for place, error in enumerate(_errors(narrow, truth)):
            self._allow(place, error)
        self.has_free = any(
            free is not None and exact is not None and bool((exact.isnan() & free.isfinite()).any())
            for free, exact in zip(self.free, self.exact, strict=True)
        )

    def _free_numbers(self) -> Sequence[Tensor | None]:
        """Return the numbers of every result that do not depend on NaN and infinities of the
        inputs, where float64 gives NaN; of gradients also those to which they tend as the
        infinities grow."""
        blank = [
            None if exact is None else torch.full_like(exact, math.nan, dtype=torch.float64)
            for exact in self.exact
        ]
        lost = [exact is not None and bool(exact.isnan().any()) for exact in self.exact]
        if not any(lost) or all(map(_is_finite, tensors_in(self.values))):
            return blank
        values = mapped(upcast, self.values)
        free = list(free_numbers(self.evaluate, values))
        is_gradient = [name.startswith("gradient of ") for name in self.names]
        if any(map(operator.and_, lost, is_gradient)):
            for place, limit in enumerate(limits(self.evaluate, values)):
                known = free[place]
                if is_gradient[place] and limit is not None and known is not None:
                    free[place] = torch.where(known.isnan(), limit, known)
        return free

    def _large_numbers(self) -> Sequence[Tensor | None]:
        """Return 1 where a result depends on a number whose square overflows in the dtype of the
        arithmetic, and 0 elsewhere."""
        is_double = any(map(_is_float64, self.eager))
        values = None if is_double else without_large(mapped(upcast, self.values))
        calm = self.exact if values is None else self.evaluate(values)
        return [
            None if exact is None or other is None else (exact != other).double()
            for exact, other in zip(self.exact, calm, strict=True)
        ]

    def _allow(self, place: int, *errors: Tensor | None) -> None:
        """Raise eager's error on each row to the largest of ``errors``."""
        known = [error for error in (self.eager_error[place], *errors) if error is not None]
        if known:
            self.eager_error[place] = torch.stack(known).amax(0)

    def _first_agreed(self, place: int, ours: Tensor | None) -> Tensor | None:
        """Return which elements of an integer or boolean result are float64's, or None if the
        result is floating or no argument is."""
        exact = self.exact[place]
        if (
            ours is None
            or exact is None
            or ours.is_floating_point()
            or ours.shape != exact.shape
            or not any(value.is_floating_point() for value in tensors_in(self.values))
        ):
            return None
        return ours == exact.to(ours.device)

    def _measure_copy(
        self,
        generator: torch.Generator,
        how: str,
        number: int,
        results: Sequence[Tensor | None],
    ) -> None:
        """Measure eager's error on a moved copy of the inputs, and the effect of one more rounding,
        and keep the larger errors; note which integers of ``results`` the copies give.

        By its ``number``, half of the copies have the strides of the arguments, and in half of the
        roundings equal numbers move alike.
        """
        alike = number % 4 in (0, 3)

        def move(value: Any) -> Any:
            return nudged(value, generator, how, keep_strides=number % 4 < 2)

        copy = mapped(move, self.values)
        exact, on_copy = self.evaluate_all([mapped(upcast, copy), copy])
        is_double = any(map(_is_float64, self.eager))
        seed = int(torch.randint(1 << 40, (), generator=generator, device=generator.device))
        unit = torch.finfo(torch.float64 if is_double else torch.float32).eps
        moved, jumps = self.evaluate_rounded(
            seed,
            unit,
            alike,
            self._lost() if alike else 0.0,
            mapped(lambda value: rerounded(value, generator, alike), self.values),
        )
        self.jumps |= jumps
        others = (moved,) if how == "far" else (moved, on_copy)
        for ours, agreed, *found in zip(results, self.agreed, *others, strict=True):
            for other in found:
                if agreed is not None and ours is not None and other is not None:
                    agreed |= ours == other.to(ours.device)
        if self.has_free:
            self._measure_free(generator, how, seed, unit)
        measured = _errors(on_copy, exact), _errors(moved, self.exact), self._float32_error(move)
        for place, errors in enumerate(zip(*measured, strict=True)):
            self._allow(place, *errors)

    def _lost(self) -> float:
        """Return the largest number that becomes 0 in the narrowest dtype of the results."""
        kinds = {one.dtype for one in self.eager if one is not None and one.is_floating_point()}
        limits = [torch.finfo(dtype) for dtype in kinds]
        return max((one.smallest_normal * one.eps / 2 for one in limits), default=0.0)

    def _measure_free(self, generator: torch.Generator, how: str, seed: int, unit: float) -> None:
        """Measure eager's error, and the effect of one more rounding, on a copy with numbers in the
        place of NaN and infinities, at the elements that do not depend on them."""
        calm = without_specials(
            mapped(lambda value: nudged(value, generator, how), self.values), "ones"
        )
        exact, on_copy = self.evaluate_all([mapped(upcast, calm), calm])
        rounded = mapped(lambda value: rerounded(value, generator), calm)
        moved, _ = self.evaluate_rounded(seed, unit, False, 0.0, rounded)
        truths = [
            None if one is None or free is None else torch.where(free.isfinite(), one, math.nan)
            for one, free in zip(exact, self.free, strict=True)
        ]
        for place, errors in enumerate(
            zip(_errors(on_copy, truths), _errors(moved, truths), strict=True)
        ):
            self._allow(place, *errors)


def _copy(value: Any, known: Storages) -> Any:
    """Copy a tensor to memory of its own, with its strides; return anything else unchanged."""
    return copy_of_storage(value, known) if isinstance(value, Tensor) else value


def _errors(measured: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> Errors:
    """Return the largest error of each row of each result; None where a result is missing, empty or
    not floating."""
    return [
        error_of_rows(as_rows(ours.detach()), as_rows(truth.detach()))
        if ours is not None and truth is not None and ours.is_floating_point() and ours.numel()
        else None
        for ours, truth in zip(measured, exact, strict=True)
    ]


def _without_nan(value: Any) -> Any:
    """Return a tensor with 1 in the place of every NaN; return anything else unchanged."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    return torch.where(value.isnan(), 1.0, value.detach()).requires_grad_(value.requires_grad)


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


def _is_moderate(value: Tensor) -> bool:
    """Return whether no product of two elements comes near to an overflow, which is a jump."""
    if not value.is_floating_point() or not value.numel():
        return True
    return bool(value.detach().abs().amax() <= torch.finfo(value.dtype).max ** 0.5 / 16)


def _widened(value: Any) -> Any:
    """Return a value of 16 bits in float32, the dtype of its arithmetic."""
    dtype = getattr(value, "dtype", value)
    return upcast(value, torch.float32) if dtype in _SIXTEEN_BITS else value


def _is_float64(value: Any) -> bool:
    return (
        value == torch.float64
        if isinstance(value, torch.dtype)
        else (isinstance(value, Tensor) and value.dtype == torch.float64)
    )


def _estimate(eager: Tensor | None, error: Tensor | None) -> Tensor | None:
    """Return float32's scaled error where the result itself is float64, otherwise None."""
    return error if eager is not None and eager.dtype == torch.float64 else None
