"""Write the Triton functions of kernels without reductions."""

from __future__ import annotations

from fuselab.ejection.plan import KernelPlan, Operand
from fuselab.ejection.triton_functions import Function


class Pointwise(Function):
    """A kernel without reductions: a program owns a tile of the loops."""

    constants: tuple[str, ...] = (
        *("COMPUTE", "ROUNDED", "WIDE", "COLUMN_LOOPS", "BLOCK_ROWS", "BLOCK_COLUMNS"),
    )

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.all_axes = self.row_axes | self.column_axes

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        return (
            f"Compute {names}. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the "
            "columns are the last COLUMN_LOOPS loops, the rows all others."
        )

    def sizes(self) -> list[str]:
        return [
            "    # the rows and columns, the sizes of the loops, outermost first, what divides by",
            "    # them, and the strides of each tensor in them",
            *self.listed_with("counts", "sizes", "divisors"),
        ]

    def strides(self) -> list[str]:
        return [f"{one.name}_strides" for one in self.plan.operands if self.has_place(one)]

    def has_place(self, operand: Operand) -> bool:
        return operand.is_stored or self.has(operand, self.all_axes)

    def body(self) -> None:
        self.write(
            "element, is_row, is_column = tile("
            "sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)"
        )
        self.define(self.values_of(self.plan.stored))
        for one in self.plan.stored:
            self.store(one)

    def place(self, operand: Operand) -> str:
        return f"offset(element, {operand.name}_strides)" if self.has_place(operand) else ""

    def mask(self, operand: Operand) -> str:
        return "is_row & is_column"
