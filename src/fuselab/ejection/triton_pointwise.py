"""Write the Triton functions of kernels whose programs own tiles of elements."""

from __future__ import annotations

from collections.abc import Sequence

from fuselab.ejection.functions import TRITON_REDUCTIONS
from fuselab.ejection.loops import Apply, Axis, Expression, Load, Position, Size, walk
from fuselab.ejection.plan import KernelPlan, Operand
from fuselab.ejection.triton_functions import Function, sweeps_to_reduce
from fuselab.ejection.walked_windows import launched_operands

_OF_NUMBERS = frozenset({"add", "sub", "mul", "neg"})  # what Python computes from integers


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
        return [
            f"{one.name}_strides" for one in launched_operands(self.plan) if self.has_place(one)
        ]

    def has_place(self, operand: Operand) -> bool:
        return operand.is_stored or self.has(operand, self.all_axes)

    def body(self) -> None:
        self.write(
            "element, is_row, is_column = tile("
            "sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)"
        )
        self.store_elements()

    def store_elements(self) -> None:
        self.define(self.values_of(self.plan.stored))
        for one in self.plan.stored:
            self.store(one)

    def place(self, operand: Operand) -> str:
        return f"offset(element, {operand.name}_strides)" if self.has_place(operand) else ""

    def mask(self, operand: Operand) -> str:
        return "is_row & is_column"


class Windows(Pointwise):
    """A kernel that reduces small windows: each element of a tile walks over its own."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.all_axes = self.row_axes
        self.loop_names = {
            axis: self.namer.name(plan.axis_names[axis]) for axis in plan.kernel.column_axes
        }

    def docstring(self) -> str:
        window = self.loops(self.plan.kernel.column_axes)
        return f"{super().docstring()} Each element walks over its window ({window})."

    @property
    def exists(self) -> str:
        return ""  # the window of an element that does not exist is that of no result

    def value(self, one: Expression) -> str:
        if isinstance(one, Size) and self.plan.value_names.get(one) == "columns":
            return str(one.size)
        return super().value(one)

    def store_elements(self) -> None:
        for depth in range(1, sweeps_to_reduce(self.plan) + 1):
            self.walk_over_window(depth)
        super().store_elements()

    def walk_over_window(self, depth: int) -> None:
        """Write the loops that compute the reductions of this depth."""
        reduced = [one for one in self.plan.reductions if self.plan.depth(one) == depth]
        terms = [one.operand for one in reduced]
        axes = self.plan.kernel.column_axes
        self.define(self.without(axes, terms))
        self.point_at_rows(terms)
        for one in reduced:
            name, neutral = self.plan.value_names[one], self.neutral_of(one)
            sizes = "(BLOCK_ROWS, BLOCK_COLUMNS)"
            self.write(f"{name} = tl.full({sizes}, {neutral}, {self.dtype_of(one)})")
        outer, pointed = dict(self.known), dict(self.pointed)
        for place, axis in enumerate(axes):
            name = self.loop_names[axis]
            self.known[Position((axis,))] = self.position_text(name, terms)
            self.write(f"for {name} in tl.static_range({axis.size}):")
            self.indent += 1
            self.define(self.without(axes[place + 1 :], terms))
            if axis is not axes[-1]:
                self.advance_pointers(axis, terms)
        self.define(terms)
        for one in reduced:
            name = self.plan.value_names[one]
            step, _ = TRITON_REDUCTIONS[one.function]
            term = self.term(one)
            added = f"{name} += {term}" if one.function == "sum" else ""
            self.write(added or f"{name} = {step.format(name, term)}")
        self.indent -= len(axes)
        self.pointed, self.advanced = pointed, {}
        self.known = outer | {one: self.plan.value_names[one] for one in reduced}

    def position_text(self, name: str, values: Sequence[Expression]) -> str:
        """Return the text of a position in a window: a number, or a tensor where ``values`` are
        such positions, or compute from them alone what Python does not compute from numbers."""

        def is_of_window(one: Expression) -> bool:
            axes = self.plan.axes_of(one)
            return bool(axes) and axes <= self.column_axes

        of_tensors = [
            one
            for one in walk(values)
            if isinstance(one, Apply) and one.function not in _OF_NUMBERS and is_of_window(one)
        ]
        is_tensor = of_tensors or any(map(is_of_window, values))
        return f"tl.full((1, 1), {name}, tl.int32)" if is_tensor else name

    def advance_pointers(self, axis: Axis, values: Sequence[Expression]) -> None:
        """Write pointers to where a line of the windows begins, in what ``values`` are made of: the
        places in it are constants then, which a load takes beside a pointer."""
        for one in walk(values, self.known, parts=self.children):
            operand = self.operand_of(one)
            if operand is None or operand not in self.pointed:
                continue
            parts = self.parted(operand, one in self.guards)
            own = [each for each in parts if self.plan.axes_of(each[2]) == {axis}]
            if own:
                name = f"{operand.name}_line"
                if operand in self.advanced:  # a loop may not change what the one outside begins at
                    name = self.namer.name(name)
                self.write(f"{name} = {self.pointed[operand]} + {self.within(own)}")
                self.pointed[operand] = name
                self.advanced[operand] = [*self.advanced.get(operand, []), *own]

    def without(self, inner: Sequence[Axis], values: Sequence[Expression]) -> list[Expression]:
        """Return the named values that ``values`` are made of and that do not change along the
        loops ``inner``."""
        return [
            one
            for one in walk(values, self.known, parts=self.children)
            if isinstance(one, (Apply, Load))
            and one in self.plan.value_names
            and not self.plan.axes_of(one) & {*inner}
        ]
