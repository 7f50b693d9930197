"""Triton functions that also sum over their rows, as the gradient of a normalisation's weight does.

A program owns several blocks of rows and adds each to one sum for every column. What the programs
leave is added up by a second function, in a fixed order.
"""

from __future__ import annotations

import re

from fuselab.ejection.loops import Expression, Load, children
from fuselab.ejection.plan import KernelPlan, Operand
from fuselab.ejection.triton_functions import LAUNCHES, Function, Rows, partial_results
from fuselab.ejection.triton_text import listed


class _Summing(Rows):
    """A function whose programs leave sums over their rows."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.summed = [one for one in plan.stored if one.node in plan.sums]
        self.sums = {one: self.namer.name(f"{one.name}_sum") for one in self.summed}

    @property
    def written(self) -> tuple[Operand, ...]:
        return tuple(one for one in self.plan.stored if one not in self.sums)

    def computed(self) -> str:
        """Return the first words of the docstring: all that the function computes."""
        names = ", ".join(one.name for one in self.written)
        sums = ", ".join(one.name for one in self.summed)
        return f"Compute {names}{', and ' if names else ''}the sums over the rows of {sums}."

    def start_sums(self) -> None:
        for name in self.sums.values():
            self.write(f"{name} = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)")

    def open_rows(self) -> None:
        """Write the head of the loop over the program's blocks of rows."""
        self.write("first_turn, end_turn = share_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS)")
        self.write("for turn in range(first_turn, end_turn):")
        self.indent += 1
        self.write(
            "row, is_row = turn_of_rows("
            "turn, row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)"
        )

    def term_of(self, operand: Operand) -> str:
        """Return the text of what a block adds to a sum."""
        assert operand.node is not None
        return f"tl.where(exists, {self.value(self.plan.stores[operand.node])}, 0.0)"

    def leave_sums(self) -> None:
        count = len(self.summed)
        for place, name in enumerate(self.sums.values()):
            self.write(f"store_share(sums_pointer, {place}, {count}, {name}, column_sizes)")

    def workspaces(self) -> list[str]:
        """Return the lines of the parameters for what programs leave."""
        return [
            f"    # what programs leave for {self.plan.name}_sums to add up",
            "    sums_pointer,",
        ]


class SummingRows(_Summing):
    """A kernel with reductions and sums over its rows."""

    partials = "turn_partials"

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.nested = 0

    def docstring(self) -> str:
        kernel = self.plan.kernel
        return (
            f"{self.computed()} A program owns blocks of BLOCK_ROWS rows "
            f"({self.loops(kernel.row_axes)}), one after the other, and sweeps over their columns "
            f"({self.loops(kernel.column_axes)}), BLOCK_COLUMNS at a time. {LAUNCHES}"
        )

    def sizes(self) -> list[str]:
        return [*self.workspaces(), *super().sizes()]

    def body(self) -> None:
        self.share_of_columns()
        self.start_sums()
        self.open_rows()
        count = partial_results(self.plan)
        self.write("if PARTS > 1:")
        self.write(
            f"    turn_partials = partials_of_turn("
            f"partials_pointer, turn - first_turn, {count}, BLOCK_ROWS, PARTS)"
        )
        self.row_pointers()
        self.sweeps()
        self.indent -= 1 + self.nested
        self.write("if PARTS == 0:")
        self.indent += 1
        self.leave_sums()

    def end_launch(self) -> None:
        self.write("else:")
        self.indent += 1
        self.nested += 1

    def store(self, operand: Operand) -> None:
        if operand not in self.sums:
            super().store(operand)
            return
        name, place = self.sums[operand], self.summed.index(operand)
        self.write(
            f"{name} = add_rows({name}, {self.term_of(operand)}, sums_pointer, {place}, "
            f"{len(self.summed)}, column, column_sizes, is_column, turn > first_turn, PARTS)"
        )


class SummingColumns(_Summing):
    """A kernel with sums over its rows and no other reductions: its columns need no sweep."""

    constants = ("COMPUTE", "ROUNDED", "WIDE", "NESTED_ROWS", "BLOCK_ROWS", "BLOCK_COLUMNS")

    def docstring(self) -> str:
        kernel = self.plan.kernel
        return (
            f"{self.computed()} A program owns BLOCK_COLUMNS columns "
            f"({self.loops(kernel.column_axes)}) and blocks of BLOCK_ROWS rows "
            f"({self.loops(kernel.row_axes)}), one after the other."
        )

    def sizes(self) -> list[str]:
        return [*self.workspaces(), *self.loop_parameters()]

    def body(self) -> None:
        self.write(
            "column, is_column = block_of_columns("
            "tl.program_id(1), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE)"
        )
        if any(name == "columns" for name in self.plan.value_names.values()):
            self.write("columns = numel(column_sizes)")
        self.define(self.without_rows())
        self.start_sums()
        self.open_rows()
        self.write("exists = is_row & is_column")
        self.row_pointers()
        self.define(self.values_of(self.plan.stored))
        for one in self.plan.stored:
            self.store(one)
        self.indent -= 1
        self.leave_sums()

    def without_rows(self) -> list[Expression]:
        """Return the largest named values that the rows do not change."""
        found: list[Expression] = []

        def visit(one: Expression) -> None:
            if self.plan.axes_of(one) & self.row_axes:
                for child in children(one):
                    visit(child)
            elif one in self.plan.value_names and one not in found:
                found.append(one)
            else:
                for child in children(one):
                    visit(child)

        for value in self.plan.stores.values():
            visit(value)
        return found

    def masks(self, one: Load) -> str:
        axes = self.plan.axes_of(one)
        if not axes & self.row_axes and axes & self.column_axes:
            return "is_column, is_column"
        return super().masks(one)

    def once(self, one: Load) -> tuple[str, ...]:
        return ()

    def store(self, operand: Operand) -> None:
        if operand in self.sums:
            self.write(f"{self.sums[operand]} += {self.term_of(operand)}")
        else:
            super().store(operand)


class SumsOfShares(Function):
    """The function that adds up what the programs of a summing function leave."""

    constants = ("COMPUTE", "WIDE", "BLOCK_SHARES", "BLOCK_COLUMNS")

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.summed = [one for one in plan.stored if one.node in plan.sums]
        self.firsts = []  # it reads none of the kernel's operands

    def text(self) -> str:
        text = super().text()
        return re.sub(rf"(?m)^def {self.plan.name}\(", f"def {self.plan.name}_sums(", text)

    def decorator(self) -> str:
        return '@triton.jit(do_not_specialize=["shares"])'

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.summed)
        several = len(self.summed) > 1
        return (
            f"Compute {names} from the sums that the programs of {self.plan.name} left. A program "
            f"owns BLOCK_COLUMNS columns ({self.loops(self.plan.kernel.column_axes)}) and adds up "
            "BLOCK_SHARES programs' sums at a time."
            + (" The second index of a program says which of the sums." if several else "")
        )

    def signature(self) -> list[str]:
        strides = [f"{one.name}_column_strides" for one in self.summed]
        return [
            "    # read",
            "    sums_pointer,",
            "    # written",
            *listed([self.pointer(one) for one in self.summed]),
            "    # how many programs left sums; the sizes of the loops, what divides by them, and",
            "    # the strides in them",
            *listed(["shares", "column_sizes", "column_divisors", *strides]),
            "    # chosen by the launcher",
            *listed([f"{name}: tl.constexpr" for name in self.constants]),
        ]

    def body(self) -> None:
        self.write(
            "column, is_column = block_of_columns("
            "tl.program_id(0), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE)"
        )
        count = len(self.summed)
        for place, one in enumerate(self.summed):
            if count > 1:
                self.write(f"if tl.program_id(1) == {place}:")
                self.indent += 1
            self.write(
                f"{one.name} = sum_of_shares(sums_pointer, {place}, {count}, shares, column_sizes, "
                "COMPUTE, BLOCK_SHARES, BLOCK_COLUMNS)"
            )
            self.write(
                f"tl.store({self.pointer(one)} + offset(column, {one.name}_column_strides), "
                f"{one.name}.to({self.pointer(one)}.dtype.element_ty), is_column)"
            )
            self.indent -= count > 1
