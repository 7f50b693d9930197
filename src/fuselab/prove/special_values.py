"""NaN and infinities: where they may stand in a result, beside where eager's stand; and the numbers
that results have which do not depend on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.op import tensors_in
from fuselab.prove.arguments import mapped

Results = Sequence[Tensor | None]

_HOW = ("ones", "above", "below", "any")  # numbers in the place of what is not finite
_FAR = (2.0**60, 2.0**90)  # numbers in the place of infinities; their squares fit into float64
_CLOSE = 2.0**-30  # of a limit: how near its two values lie to each other


@dataclass(frozen=True)
class Others:
    """Further computations of one result, which say what is right where eager gives no number.

    Attributes:
        composed: float64's, with normalisations and products by their definitions in simpler
            operators. Its numbers may stand where eager has NaN.
        calm: float64's with a number in the place of every NaN of the inputs. Where it is not
            finite either, brackets decide between an infinity and NaN.
        narrow: that of the definitions in the dtype of the arithmetic. Where it overflows on the
            way, a kernel that computes in this dtype may too: eager squares and multiplies in
            double on a CPU.
        free: the numbers that do not depend on what the inputs hold that is not finite, and NaN
            elsewhere. They may stand where eager has NaN: 0 * NaN behind a causal mask.
        large: 1 where the result depends on a number whose square overflows in the dtype of the
            arithmetic, and 0 elsewhere. There g * u / (1 + exp(-g)) overflows where
            u * g * sigmoid(g) does not, and is NaN where both of its terms overflow.
    """

    composed: Tensor
    calm: Tensor
    narrow: Tensor
    free: Tensor
    large: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Others:
        """Return the same with ``function`` applied to each."""
        several = (self.composed, self.calm, self.narrow, self.free, self.large)
        return Others(*map(function, several))

    def completed(self, exact: Tensor) -> Tensor:
        """Return float64's result with the definition's numbers where it is NaN, or else with those
        that are free of it; a result must then be near to them."""
        if not exact.is_floating_point():
            return exact
        for numbers in (self.composed, self.free):
            exact = torch.where(exact.isnan() & numbers.isfinite(), numbers, exact)
        return exact


def without_specials(values: Sequence[Any], how: str, of: int | None = None) -> list[Any]:
    """Return the values with a number in the place of every NaN and infinity, or of those alone
    that the tensor with the number ``of`` holds: 1 for "ones", and for "above", "below" and "any"
    one of its own for each, which is larger than all others, smaller than all, or neither."""
    tensors = [value.detach() for value in tensors_in(values) if value.is_floating_point()]
    most = max((_largest(value) for value in tensors), default=0.0)
    generator = torch.Generator().manual_seed(_HOW.index(how))
    count = itertools.count()

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (next(count) != of and of is not None) or not value.is_floating_point():
            return value
        chance = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        number = {
            "ones": torch.ones_like(chance),
            "above": (chance + 2) * (most + 1),
            "below": (chance + 2) * -(most + 1),
            "any": chance * 2 - 1,
        }[how].to(value.device, value.dtype)
        kept = value.detach()
        return torch.where(kept.isfinite(), kept, number).requires_grad_(value.requires_grad)

    return mapped(filled, values)


def _largest(value: Tensor) -> float:
    numbers = value[value.isfinite()].abs()
    return float(numbers.amax()) if numbers.numel() else 0.0


def without_large(values: Sequence[Any]) -> list[Any] | None:
    """Return float64 values with 1, of the same sign, in the place of every number whose square
    overflows in float32, the arithmetic of all narrower dtypes; None where there is none."""
    limit = torch.finfo(torch.float32).max ** 0.5
    found = False

    def calm(value: Any) -> Any:
        nonlocal found
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        kept = value.detach()
        large = (kept.abs() > limit) & kept.isfinite()
        found |= bool(large.any())
        return torch.where(large, kept.sign(), kept).requires_grad_(value.requires_grad)

    replaced = mapped(calm, values)
    return replaced if found else None


def free_numbers(evaluate: Callable[[Sequence[Any]], Results], values: Sequence[Any]) -> Results:
    """Return every result's numbers that are the same whatever numbers stand in the place of NaN
    and infinities in ``values``, which are float64, or of those in one tensor of them; NaN
    elsewhere."""
    tensors = tensors_in(values)
    special = [
        place
        for place, value in enumerate(tensors)
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    found: Results = []
    for of in (None, *(special if len(special) > 1 else ())):
        agreed = _agreed([evaluate(without_specials(values, how, of)) for how in _HOW], 0.0)
        found = list(map(_completed, found or agreed, agreed))
    return found


def _completed(known: Tensor | None, other: Tensor | None) -> Tensor | None:
    return known if known is None or other is None else torch.where(known.isnan(), other, known)


def limits(evaluate: Callable[[Sequence[Any]], Results], values: Sequence[Any]) -> Results:
    """Return every result's limit as what is infinite in ``values``, which are float64, grows
    without bound; NaN where there is none, or where a NaN reaches."""

    def finite(bound: float) -> list[Any]:
        return mapped(
            lambda value: (
                torch.where(
                    value.isinf(), value.detach().sign() * bound, value.detach()
                ).requires_grad_(value.requires_grad)
                if isinstance(value, Tensor) and value.is_floating_point()
                else value
            ),
            values,
        )

    return _agreed([evaluate(finite(bound)) for bound in _FAR], _CLOSE)


def _agreed(several: Sequence[Results], tolerance: float) -> Results:
    """Return the first of several results where all are finite and within ``tolerance`` of it, and
    NaN elsewhere."""
    found: list[Tensor | None] = []
    for first, *others in zip(*several, strict=True):
        if first is None or not first.is_floating_point() or any(one is None for one in others):
            found.append(
                None if first is None else torch.full_like(first, torch.nan, dtype=torch.float64)
            )
            continue
        same = first.isfinite()
        for other in others:
            same &= (other - first).abs() <= tolerance * first.abs()
        found.append(torch.where(same, first.detach(), torch.nan))
    return found


def misplaced(
    ours: Tensor,
    eager: Tensor,
    exact: Tensor,
    lost: Tensor,
    others: Others | None,
) -> str | None:
    """Return what is wrong with NaN and infinities in ``ours`` outside of the rows that are
    ``lost``, or None."""
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    special = ~(ours.isfinite() & eager.isfinite())
    wrong = special & ~(same | _stands_like(ours, exact)) & ~lost[:, None]
    if others is not None:
        wrong &= ~(eager.isnan() & _stands_like(ours, others.composed))
        wrong &= ~(eager.isnan() & ours.isfinite() & others.free.isfinite())
        wrong &= ~(_stands_like(ours, others.narrow) & ~others.narrow.to(ours.dtype).isfinite())
        wrong &= ~_by_other_brackets(ours, eager, exact, others)
        wrong &= ~((others.large > 0) & (ours.isnan() | (ours == exact.sign() * math.inf)))
    if not bool(wrong.any()):
        return None
    row, column = (int(value) for value in wrong.nonzero()[0])
    return (
        f"row {row}, column {column} is {float(ours[row, column])} where eager gives "
        f"{float(eager[row, column])} and float64 {float(exact[row, column])}"
    )


def _by_other_brackets(ours: Tensor, eager: Tensor, exact: Tensor, others: Others) -> Tensor:
    """Return where an infinity stands for a NaN or a NaN for an infinity of eager's, float64's and
    the definition's, also without the NaN of the inputs: how the terms are bracketed decides
    between them."""
    infinite = ours.isinf() & eager.isnan() & exact.isnan()
    infinite &= others.composed.isnan() & others.calm.isnan()
    exact, calm = exact.to(ours.dtype), others.calm.to(ours.dtype)
    undefined = ours.isnan() & ~eager.isfinite() & ~exact.isfinite() & ~calm.isfinite()
    return infinite | undefined


def _stands_like(ours: Tensor, truth: Tensor) -> Tensor:
    """Return where ``ours`` is the rounded ``truth``, or both are finite or both NaN."""
    rounded = truth.to(ours.dtype)
    return (
        (ours == rounded)
        | (ours.isnan() & rounded.isnan())
        | (ours.isfinite() & rounded.isfinite())
    )
