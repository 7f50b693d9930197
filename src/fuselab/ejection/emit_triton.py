"""Triton source of the kernels of a package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from fuselab.ejection.fold import fold
from fuselab.ejection.functions import TRITON, TRITON_REDUCTIONS
from fuselab.ejection.loops import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Reduced,
    Size,
    walk,
)
from fuselab.ejection.plan import KernelPlan, Namer, Operand

LONG = 60  # characters; a longer operand gets a name
_INSIDE = re.compile(r"(?<=[(,]) ?\{(\d)\}(?=[,)])")


def source(title: str, plans: Sequence[KernelPlan]) -> str:
    """Return the text of ``triton_kernels.py``."""
    bodies = [text for plan in plans for text in kernels_of(plan)]
    whole = "\n\n\n".join(bodies)
    helpers = [
        name
        for name in ("column_offset", "larger", "product", "row_offset", "smaller")
        if re.search(rf"\b{name}\b", whole)
    ]
    lines = [f'"""{title}"""', "", "import triton", "import triton.language as tl"]
    if "libdevice." in whole:
        lines.append("from triton.language.extra import libdevice")
    lines += ["", f"from fuselab.runtime.triton_loops import {', '.join(helpers)}", "", "", ""]
    return "\n".join(lines) + whole + "\n"


def kernels_of(plan: KernelPlan) -> list[str]:
    """Return the source of each Triton function of a kernel."""
    if not plan.reductions:
        return [_Pointwise(plan).text()]
    return [_InOneBlock(plan).text(), _InBlocks(plan).text()]


class _Function:
    """One @triton.jit function."""

    suffix = ""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.lines: list[str] = []
        self.indent = 1
        self.known: dict[Expression, str] = {}  # values that have a name in the present scope
        self.namer = Namer([*plan.value_names.values(), *(one.name for one in plan.operands)])
        self.row_axes = frozenset(plan.kernel.row_axes)
        self.column_axes = frozenset(plan.kernel.column_axes)

    # --- the frame

    def signature(self) -> list[str]:
        plan = self.plan
        tensors = [self.pointer(one) for one in plan.operands if one.node is not None]
        read = [self.pointer(one) for one in plan.loads if one.node is not None]
        written = tensors[len(read) :]
        lines: list[str] = []
        for names, what in ((read, "read"), (written, "written")):
            if names:
                lines.append(f"    # {what}")
                text = ", ".join(names) + ","
                lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
        if plan.numbers:
            lines += [f"    {', '.join(plan.numbers.values())},"]
        lines += [
            "    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,"
        ]
        for one in plan.operands:
            steps = " ".join(f"{one.name}_stride_{step}," for step in range(7))
            lines += textwrap.wrap(steps, 96, initial_indent="    ", subsequent_indent="    ")
        lines += [
            "    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,",
            "    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,",
        ]
        return lines

    def decorator(self) -> str:
        plan = self.plan
        never = [*plan.numbers.values(), "rows", "row_size_1", "row_size_2", "column_size_1"]
        never += [f"{one.name}_stride_{step}" for one in plan.operands for step in (0, 1, 4)]
        loose = [f"{one.name}_stride_6" for one in plan.operands]
        listed = textwrap.fill(
            f"do_not_specialize=[{', '.join(map(repr, never))}],", 96, subsequent_indent="    "
        )
        aligned = textwrap.fill(
            f"do_not_specialize_on_alignment=[{', '.join(map(repr, loose))}],",
            96,
            subsequent_indent="    ",
        )
        options = textwrap.indent(f"{listed}\n{aligned}", "    ").replace("'", '"')
        return f"@triton.jit(\n{options}\n)  # fmt: skip"

    def text(self) -> str:
        self.body()
        head = [self.decorator(), f"def {self.plan.name}{self.suffix}("]
        doc = textwrap.fill(
            self.docstring(), 96, initial_indent='    """', subsequent_indent="    "
        )
        return "\n".join([*head, *self.signature(), "):  # fmt: skip", f'{doc}"""', *self.lines])

    def write(self, line: str) -> None:
        self.lines += fold("    " * self.indent + line)

    def pointer(self, operand: Operand) -> str:
        return f"{operand.name}_pointer"

    def docstring(self) -> str:
        raise NotImplementedError

    def body(self) -> None:
        raise NotImplementedError

    # --- places

    def loops(self, axes: Iterable[object]) -> str:
        names = [self.plan.axis_names[axis] for axis in axes]  # type: ignore[index]
        return ", ".join(names) or "the whole"

    def write_rows(self, tile: str) -> None:
        """Define this program's rows."""
        self.write(f"row = {tile} * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]")
        self.write("if WIDE:")
        self.write(
            f"    row = {tile}.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]"
        )

    def write_row_offsets(self) -> None:
        for one in self.plan.operands:
            if self.has(one, self.row_axes):
                self.write(f"{one.name}_row = {self.row_offset(one)}")

    def row_offset(self, operand: Operand) -> str:
        steps = ", ".join(f"{operand.name}_stride_{step}" for step in range(4))
        return f"row_offset(row, row_size_1, row_size_2, row_size_3, {steps}, ROW_LOOPS)"

    def has(self, operand: Operand, axes: frozenset[object]) -> bool:
        return any(axis in axes for entry in operand.index for axis in entry)

    def place(self, operand: Operand) -> str:
        """Return the offset of the operand's elements in the present tile."""
        parts = [f"{operand.name}_row"] if self.has(operand, self.row_axes) else []
        if operand.is_stored and not any(operand.index):
            return "row"  # a single element: the only row's
        if self.has(operand, self.column_axes):
            steps = ", ".join(f"{operand.name}_stride_{step}" for step in range(4, 7))
            parts.append(
                f"column_offset(column, column_size_1, column_size_2, {steps}, COLUMN_LOOPS)"
            )
        return " + ".join(parts)

    def named_place(self, operand: Operand, place: str) -> str:
        """Return a short text of the offset; a long one gets a line of its own."""
        if "(" not in place and len(place) < 40:
            return place
        self.write(f"{operand.name}_offset = {place}")
        return f"{operand.name}_offset"

    def mask(self, operand: Operand) -> str:
        on_rows = self.has(operand, self.row_axes)
        on_columns = self.has(operand, self.column_axes)
        if on_rows and on_columns:
            return "exists"
        if on_rows or (operand.is_stored and not on_columns):
            return "row < rows"
        return "column < columns" if on_columns else ""

    # --- values

    def define(self, expressions: Sequence[Expression]) -> None:
        """Write the statements after which each of ``expressions`` has a text."""
        for one in walk(expressions, self.known):
            if isinstance(one, (Load, Position)):
                self.load(one)
            elif isinstance(one, Reduced):
                self.reduce(one)
            elif isinstance(one, Apply) and one in self.plan.value_names:
                name = self.plan.value_names[one]
                self.write(f"{name} = {self.formula(one)}")
                self.known[one] = name

    def load(self, one: Load | Position) -> None:
        name = self.plan.value_names[one]
        operand = next(operand for operand in self.plan.loads if operand.name == name)
        place, mask = self.place(operand), self.mask(operand)
        if isinstance(one, Position):
            self.write(f"{name} = {place or 0}")
        else:
            pointer = self.pointer(operand) + (
                f" + {self.named_place(operand, place)}" if place else ""
            )
            masked = f", {mask}" if mask else ""
            cast = ".to(COMPUTE)" if one.tensor.kind == "float" else ""
            if one.tensor.kind == "bool":
                cast = " != 0"
            self.write(f"{name} = tl.load({pointer}{masked}){cast}")
        self.known[one] = name

    def reduce(self, one: Reduced) -> None:
        raise NotImplementedError

    def value(self, one: Expression) -> str:
        """Return the text of a value; ``define`` has written what it needs."""
        if one in self.known:
            return self.known[one]
        if isinstance(one, Constant):
            return _constant(one.value)
        if isinstance(one, Size):
            named = self.plan.numbers.get(one) or self.plan.value_names.get(one)
            return named or str(one.size)
        assert isinstance(one, Apply)
        return self.formula(one)

    def formula(self, one: Apply) -> str:
        template = TRITON[one.function]
        texts = []
        for place, operand in enumerate(one.operands):
            text = self.value(operand)
            is_repeated = template.count(f"{{{place}}}") > 1
            if isinstance(operand, Apply) and operand not in self.known:
                if len(text) > LONG or is_repeated:
                    text = self.named(operand, text)
                elif needs_parentheses(one, place, operand):
                    text = f"({text})"
            elif text.startswith("-") and place:
                text = f"({text})"  # a negative constant
            texts.append(text)
        return template.format(*texts)

    def named(self, one: Apply, text: str) -> str:
        """Give a value a name in a line of its own, and return the name."""
        name = self.namer.name(self.plan.kernel.names.get(one, one.function))
        self.write(f"{name} = {text}")
        self.known[one] = name
        return name

    def store(self, operand: Operand) -> None:
        assert operand.node is not None
        value = self.value(self.plan.stores[operand.node])
        place, mask = self.place(operand), self.mask(operand)
        pointer = self.pointer(operand) + (
            f" + {self.named_place(operand, place)}" if place else ""
        )
        masked = f", {mask}" if mask else ""
        if not re.fullmatch(r"[\w.]+(\([^()]*\))?", value):
            self.write(f"{operand.name} = {value}")
            value = operand.name
        if not isinstance(self.plan.stores[operand.node], Constant):
            value += f".to({self.pointer(operand)}.dtype.element_ty)"
        self.write(f"tl.store({pointer}, {value}{masked})")

    def stored(self, on_columns: bool) -> list[Operand]:
        return [one for one in self.plan.stored if self.has(one, self.column_axes) == on_columns]

    def values_of(self, operands: Sequence[Operand]) -> list[Expression]:
        return [self.plan.stores[one.node] for one in operands if one.node is not None]


# How tightly the outermost operation of a function's text binds; calls and names most.
_BINDING = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "not", "to_bool"), 1),
    **dict.fromkeys(("or",), 2),
    **dict.fromkeys(("xor",), 3),
    **dict.fromkeys(("and",), 4),
    **dict.fromkeys(("add", "sub"), 5),
    **dict.fromkeys(("mul", "div", "reciprocal", "rsqrt", "sigmoid"), 6),
    "neg": 7,
}
_CALL = 9


def needs_parentheses(outer: Apply, place: int, operand: Apply) -> bool:
    """Return whether the text of ``operand`` needs parentheses as an operand of ``outer``."""
    template = TRITON[outer.function]
    if place in {int(found[1]) for found in _INSIDE.finditer(template)}:
        return False  # it stands between the commas of a call
    inner, around = (_BINDING.get(one.function, _CALL) for one in (operand, outer))
    if around == _CALL:
        return inner < _CALL  # a method's object
    return inner < around or (inner == around and (place > 0 or around <= 1))


def _constant(value: float | int | bool) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float('{value}')"
    return repr(value)


class _Pointwise(_Function):
    """A kernel without reductions: a program owns a tile; the columns are the innermost loop."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.all_axes = self.row_axes | self.column_axes

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        return (
            f"Compute {names}. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the "
            "columns are the innermost loop, the rows all others."
        )

    def body(self) -> None:
        self.write("across = tl.cdiv(columns, BLOCK_COLUMNS)")
        self.write("tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across")
        self.write_rows("tile_row")
        self.write("column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]")
        self.write("if WIDE:")
        self.write(
            "    column = tile_column.to(tl.int64) * BLOCK_COLUMNS"
            " + tl.arange(0, BLOCK_COLUMNS)[None, :]"
        )
        self.write("exists = (row < rows) & (column < columns)")
        values = self.values_of(self.plan.stored)
        self.define(values)
        for one in self.plan.stored:
            self.store(one)

    def place(self, operand: Operand) -> str:
        if not self.has(operand, self.all_axes):
            return "row + column" if operand.is_stored else ""  # a single element
        self.write(f"{operand.name}_row = {self.row_offset(operand)}")
        return f"{operand.name}_row + column * {operand.name}_stride_6"

    def mask(self, operand: Operand) -> str:
        is_masked = operand.is_stored or self.has(operand, self.all_axes)
        return "exists" if is_masked else ""


class _Rows(_Function):
    """A kernel with reductions: a program owns rows and sweeps over their columns."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.depth = max(plan.depth(one) for one in plan.reductions)

    def reduced_at(self, depth: int) -> list[Reduced]:
        return [one for one in self.plan.reductions if self.plan.depth(one) == depth]

    def varies(self, one: Expression) -> bool:
        return bool(self.plan.axes_of(one) & self.column_axes)


class _InOneBlock(_Rows):
    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        kernel = self.plan.kernel
        return (
            f"Compute {names}. A program owns BLOCK_ROWS rows ({self.loops(kernel.row_axes)}) with "
            f"all of their columns ({self.loops(kernel.column_axes)}), which fit in one block, so "
            "that every element is read once."
        )

    def body(self) -> None:
        self.write_rows("tl.program_id(0)")
        self.write("column = tl.arange(0, BLOCK_COLUMNS)[None, :]")
        self.write("exists = (row < rows) & (column < columns)")
        self.write_row_offsets()
        self.define(self.values_of(self.plan.stored))
        for one in self.plan.stored:
            self.store(one)

    def reduce(self, one: Reduced) -> None:
        neutral, _, total = TRITON_REDUCTIONS[one.function]
        name = self.plan.value_names[one]
        operand = f"tl.where(exists, {self.value(one.operand)}, {neutral})"
        self.write(f"{name} = {total.format(operand)}[:, None]")
        self.known[one] = name


class _InBlocks(_Rows):
    suffix = "_in_blocks"

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        kernel = self.plan.kernel
        sweeps = self.depth + bool(self.stored(True))
        return (
            f"Compute {names}. A program owns BLOCK_ROWS rows ({self.loops(kernel.row_axes)}) and "
            f"sweeps {['', 'once', 'twice'][sweeps] if sweeps < 3 else f'{sweeps} times'} over "
            f"their columns ({self.loops(kernel.column_axes)}), BLOCK_COLUMNS at a time."
        )

    def body(self) -> None:
        self.write_rows("tl.program_id(0)")
        self.write_row_offsets()
        for depth in range(1, self.depth + 1):
            self.sweep(depth)
        on_rows = self.stored(False)
        self.define(self.values_of(on_rows))
        for one in on_rows:
            self.store(one)
        on_columns = self.stored(True)
        if on_columns:
            self.open_sweep()
            outer = dict(self.known)
            self.define(self.values_of(on_columns))
            for one in on_columns:
                self.store(one)
            self.known = outer
            self.indent -= 1

    def open_sweep(self) -> None:
        self.write("for start in range(0, columns, BLOCK_COLUMNS):")
        self.indent += 1
        self.write("column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]")
        self.write("if WIDE:")
        self.write("    column = column.to(tl.int64)")
        self.write("exists = (row < rows) & (column < columns)")

    def sweep(self, depth: int) -> None:
        reduced = self.reduced_at(depth)
        constant = [
            found
            for one in reduced
            for found in walk([one.operand])
            if not self.varies(found)
            and isinstance(found, (Apply, Load))
            and found in self.plan.value_names
        ]
        self.define(constant)
        for one in reduced:
            neutral, _, _ = TRITON_REDUCTIONS[one.function]
            name = self.plan.value_names[one]
            self.write(f"{name}_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), {neutral}, COMPUTE)")
        self.open_sweep()
        outer = dict(self.known)
        self.define([one.operand for one in reduced])
        for one in reduced:
            neutral, step, _ = TRITON_REDUCTIONS[one.function]
            name = f"{self.plan.value_names[one]}_so_far"
            operand = f"tl.where(exists, {self.value(one.operand)}, {neutral})"
            self.write(f"{name} = {step.format(name, operand)}")
        self.known = outer
        self.indent -= 1
        for one in reduced:
            _, _, total = TRITON_REDUCTIONS[one.function]
            name = self.plan.value_names[one]
            self.write(f"{name} = {total.format(f'{name}_so_far')}[:, None]")
            self.known[one] = name
