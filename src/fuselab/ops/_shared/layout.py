"""The loop nest that a pointwise kernel walks, from the strides of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_RANK = 5
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Nest:
    """The loop sizes and, for every operand, its strides in elements; outermost dimension first.

    The nest follows the output's memory order, so the output's offset is the loop counter itself.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total

    def padded(self, rank: int = MAX_RANK) -> Nest:
        """Return the nest with outer dimensions of size 1 added up to ``rank``."""
        missing = rank - len(self.sizes)
        return Nest(
            (1,) * missing + self.sizes,
            tuple((0,) * missing + strides for strides in self.strides),
        )

    @property
    def is_flat(self) -> bool:
        """Whether every operand has the output's memory order, so that one offset serves all."""
        return all(strides == (1,) for strides in self.strides)

    def needs_64_bit_offsets(self) -> bool:
        """Return whether an offset into the output or any operand exceeds 2^31 - 1 elements."""
        furthest = [
            sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True))
            for strides in self.strides
        ]
        return max(self.numel, *furthest) > _INT32_MAX


def nest(output: Tensor, operands: Sequence[tuple[int, ...]]) -> Nest:
    """Return the fewest loops that walk ``output`` (dense, not empty) in memory order.

    Args:
        output: fixes the order; its own strides need not be among ``operands``.
        operands: strides of every operand in the output's shape, 0 where broadcast.

    Dimensions of size 1 are dropped. Neighbouring dimensions that every operand walks with one
    step become one loop.
    """
    order = sorted(
        (dim for dim, size in enumerate(output.shape) if size != 1),
        key=output.stride,
        reverse=True,
    )
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for dim in order:
        size = output.shape[dim]
        step = tuple(strides[dim] for strides in operands)
        if steps and all(
            outer == inner * size for outer, inner in zip(steps[-1], step, strict=True)
        ):
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    if not sizes:
        sizes, steps = [1], [(1,) * len(operands)]
    return Nest(tuple(sizes), tuple(zip(*steps, strict=True)))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory without gap or overlap, in any order."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(step for step in steps if step[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def row_strides(rows: int, columns: int, matrix: Tensor) -> tuple[int, int]:
    """Return the strides of a (rows, columns) tensor. The stride of a dimension of size 1 is
    arbitrary; it is chosen such that the elements look contiguous if they are."""
    row, column = matrix.stride()
    if columns == 1:
        column = row
    if rows == 1:
        row = column * columns
    return row, column
