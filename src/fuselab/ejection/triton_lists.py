"""Write the Triton functions of kernels that are launched once for all tensors of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuselab.ejection.functions import TRITON_REDUCTIONS, triton_neutral
from fuselab.ejection.loops import Load, Reduced
from fuselab.ejection.plan import KernelPlan, Operand
from fuselab.ejection.triton_functions import Function, Rows
from fuselab.ejection.triton_pointwise import Pointwise
from fuselab.ejection.triton_text import listed

_LEFT = 128  # what so many programs have left is read at once


def _tensors(plan: KernelPlan) -> list[str]:
    """Return the lines of the parameters for tensors."""
    return [
        "    # read: a tuple with each list's tensors",
        *listed([f"{one.name}_pointers" for one in plan.loads]),
        "    # written",
        *listed([f"{one.name}_pointers" for one in plan.stored]),
    ]


def _choose_pointers(function: Function, is_vector: Callable[[Operand], bool]) -> None:
    """Write the choice of the tensors that a program works on; neighbouring elements of some of
    them are loaded at once."""
    for one in function.plan.operands:
        is_packed = "PACKED" if is_vector(one) else "False"
        chosen = f"of_member({one.name}_pointers, member, {is_packed})"
        function.write(f"{function.pointer(one)} = {chosen}")


class OfLists(Pointwise):
    """A kernel without reductions for all tensors of lists: a program owns a block of the elements
    of one of them."""

    constants = ("COMPUTE", "ROUNDED", "WIDE", "PACKED", "BLOCK")

    def signature(self) -> list[str]:
        constants = listed([f"{name}: tl.constexpr" for name in self.constants])
        return [
            *_tensors(self.plan),
            "    # the first program and the number of elements of each tensor",
            *listed(["firsts", "counts"]),
            "    # chosen by the launcher",
            *constants,
        ]

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        return f"Compute {names}. A program owns BLOCK elements of one tensor of each list."

    def body(self) -> None:
        self.write(
            "member, element, is_row, is_column = of_lists(firsts, counts, PACKED, BLOCK, WIDE)"
        )
        _choose_pointers(self, self.has_place)
        self.define(self.values_of(self.plan.stored))
        for one in self.plan.stored:
            self.store(one)

    def place(self, operand: Operand) -> str:
        return "element" if self.has_place(operand) else ""

    def mask(self, operand: Operand) -> str:
        return "is_column"


class RowsOfLists(Rows):
    """A kernel with reductions for all tensors of lists: a program owns rows of one of them."""

    constants = (
        *("COMPUTE", "ROUNDED", "WIDE", "PACKED", "ONE_ROW", "SWEEP", "SHARED", "SHARE"),
        *("BLOCK_ROWS", "BLOCK_COLUMNS"),
    )

    def signature(self) -> list[str]:
        return [
            *_tensors(self.plan),
            "    # what programs that share rows leave for the next sweep",
            "    partials_pointer,",
            "    # of each tensor: its first program in this launch and in those that leave",
            "    # shares, its rows and its columns",
            *listed(["firsts", "first_shares", "row_counts", "column_counts"]),
            "    # chosen by the launcher",
            *listed([f"{name}: tl.constexpr" for name in self.constants]),
        ]

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        return (
            f"Compute {names}. A program owns BLOCK_ROWS rows of one tensor of each list and "
            "sweeps over their columns, BLOCK_COLUMNS at a time; where programs are SHARED, over "
            "SHARE of them. Each sweep is then a launch of its own, and SWEEP is its number."
        )

    def body(self) -> None:
        self.write(
            "member, row, is_row, start, columns, first, end, first_share, shares = rows_of_lists("
            "firsts, first_shares, row_counts, column_counts, PACKED, ONE_ROW, SHARED, SHARE, "
            "BLOCK_ROWS, BLOCK_COLUMNS, WIDE)"
        )
        _choose_pointers(self, lambda one: self.has(one, self.column_axes))
        self.row_pointers()
        self.sweeps()

    def place(self, operand: Operand) -> str:
        on_rows, on_columns = self.on_rows(operand), self.has(operand, self.column_axes)
        row = "start" if on_columns else "row"
        return " + ".join([*([row] if on_rows else []), *(["column"] if on_columns else [])])

    def row_pointers(self) -> None:
        for one in filter(self.has_row_pointer, (*self.plan.loads, *self.written)):
            self.write(f"{one.name}_row = {self.pointer(one)} + start")

    def address(self, operand: Operand, is_guarded: bool = False) -> str:
        if self.has_row_pointer(operand):
            return f"{operand.name}_row + column"
        return super().address(operand, is_guarded)

    def once(self, one: Load) -> tuple[str, ...]:
        return ()

    def open_block(self, block: str) -> None:
        self.write(f"column = {block} * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]")
        self.write("is_column = column < columns")
        self.write("exists = is_row & is_column")

    def load_partials(self, reduced: Sequence[Reduced], place: int, depth: int) -> None:
        """Write the loop over what the programs of a row have left of a sweep's reductions."""
        names = [self.plan.value_names[one] for one in reduced]
        neutrals = [triton_neutral(one.function, one.kind) for one in reduced]
        for name, neutral in zip(names, neutrals, strict=True):
            self.write(f"{name} = tl.full((BLOCK_ROWS, {_LEFT}), {neutral}, COMPUTE)")
        self.write(f"for turn in range(0, shares, {_LEFT}):")
        self.indent += 1
        for number, (one, name, neutral) in enumerate(zip(reduced, names, neutrals, strict=True)):
            left = (
                f"load_left(partials_pointer, first_share, turn, shares, {place + number}, "
                f"{len(self.plan.reductions)}, {neutral}, BLOCK_ROWS, {_LEFT})"
            )
            step, _ = TRITON_REDUCTIONS[one.function]
            added = f"{name} += {left}" if one.function == "sum" else ""
            self.write(added or f"{name} = {step.format(name, left)}")
        self.indent -= 1

    def ends_sweep(self, depth: int) -> str:
        return f"SWEEP == {depth}"

    def store_partial(self, number: int, name: str) -> None:
        count = len(self.plan.reductions)
        self.write(f"store_left(partials_pointer, {number}, {count}, {name}, BLOCK_ROWS)")

    def store_rows(self, operands: Sequence[Operand]) -> None:
        """Write the stores of rows' results, which may lie where all threads have to read first."""
        if operands and any(one.index and self.on_rows(one) for one in self.plan.loads):
            self.write("tl.debug_barrier()")
        super().store_rows(operands)
