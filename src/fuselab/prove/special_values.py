"""NaN and infinities: where they may stand in a result, beside where eager's stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    composed: Tensor
    calm: Tensor
    narrow: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Others:
        """Return the same with ``function`` applied to each."""
        return Others(*map(function, (self.composed, self.calm, self.narrow)))

    def completed(self, exact: Tensor) -> Tensor:
        """Return float64's result with the definition's numbers where it is NaN, which a result
        must then be near to."""
        if not exact.is_floating_point():
            return exact
        return torch.where(exact.isnan() & self.composed.isfinite(), self.composed, exact)


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
        wrong &= ~(_stands_like(ours, others.narrow) & ~others.narrow.to(ours.dtype).isfinite())
        wrong &= ~_by_other_brackets(ours, eager, exact, others)
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
