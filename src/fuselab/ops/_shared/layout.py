"""From tensors to the loop nest that a pointwise kernel walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_RANK = 5
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Nest:
    """Loop sizes and, for every operand, its strides in elements; outermost dimension first.

    The nest follows the output's memory: the output's offset simply counts up.
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
        """The same nest with outer dimensions of size 1 added up to ``rank``."""
        missing = rank - len(self.sizes)
        return Nest(
            (1,) * missing + self.sizes,
            tuple((0,) * missing + strides for strides in self.strides),
        )

    @property
    def is_flat(self) -> bool:
        """Whether every operand counts up as the output does."""
        return all(strides == (1,) for strides in self.strides)

    def needs_64_bit_offsets(self) -> bool:
        """Whether an offset into the output or into any operand passes 2^31 - 1 elements."""
        furthest = [
            sum((size - 1) * stride for size, stride in zip(self.sizes, strides, strict=True))
            for strides in self.strides
        ]
        return max(self.numel, *furthest) > _INT32_MAX


def nest(output: Tensor, operands: Sequence[tuple[int, ...]]) -> Nest:
    """The fewest loops that walk ``output`` (dense, not empty) in memory order.

    Args:
        output: fixes the order; its own strides need not appear.
        operands: strides of every operand in the output's shape, 0 where broadcast.

    Dimensions of size 1 go; neighbours that every operand steps through evenly become one.
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
    """Whether the elements fill their stretch of memory without gap or overlap, in any order."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(step for step in steps if step[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def row_strides(rows: int, columns: int, matrix: Tensor) -> tuple[int, int]:
    """Strides of a (rows, columns) tensor; those of dimensions of size 1 chosen so that the
    elements look contiguous where they are."""
    row, column = matrix.stride()
    if columns == 1:
        column = row
    if rows == 1:
        row = column * columns
    return row, column
