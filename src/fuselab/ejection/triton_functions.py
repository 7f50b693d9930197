"""The functions of ``triton_kernels.py``: one for each kernel of a package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from fuselab.ejection.fold import fold
from fuselab.ejection.functions import TRITON, TRITON_REDUCTIONS, TRITON_SCANS, triton_neutral
from fuselab.ejection.guards import chosen_outside, guarded_children, guards_of, unguarded
from fuselab.ejection.loops import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Reduced,
    Scanned,
    Size,
    children,
    element_kind,
    walk,
)
from fuselab.ejection.pairs import pairs_of
from fuselab.ejection.plan import KernelPlan, Namer, Operand
from fuselab.ejection.triton_text import (
    constant_text,
    is_power_of_two,
    is_rounded_as_argument,
    listed,
    needs_parentheses,
    stands_in_a_call,
)
from fuselab.runtime.sweep import CHOSEN

# A position that a kernel computes in a tensor: what depends on the row, the sign of what depends
# on the column, this, and the name of the stride.
Part = tuple[Expression, str, Expression, str]
LAUNCHES = (
    "If PARTS programs share a row, each sweep is a launch of its own, and SWEEP is its number. "
    "A launch of the negative number joins what that sweep left; JOINED sweeps have been joined."
)
_OF_POSITIONS = frozenset({"where", "neg", "abs", "add", "sub", "mul", "intdiv"})
BITS_OF_POSITIONS = (
    "INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32",
    "LAST: tl.constexpr = 9223372036854775807 if WIDE else 2147483647",
)
LONG = 60  # characters; a longer operand gets a name


def sweeps_to_reduce(plan: KernelPlan) -> int:
    """Return how many sweeps of a kernel reduce."""
    return max(map(plan.depth, plan.reductions), default=0)


def is_small(value: Expression) -> bool:
    """Return whether an integer is a constant, a position or a truth value, so that float64 holds
    as many of them as there are elements."""
    if isinstance(value, Apply) and value.function in ("where", "neg"):
        return all(map(is_small, value.operands[value.function == "where" :]))
    if isinstance(value, Apply):
        return value.function == "to_int" and element_kind(value.operands[0]) == "bool"
    if isinstance(value, Constant):
        return abs(value.value) < 2**20
    return isinstance(value, (Position, Size))


def is_of_positions(one: Reduced | Scanned) -> bool:
    """Return whether a reduction is the first or the last of some positions."""
    return one.kind == "int" and one.function in ("amin", "amax") and _is_position(one.operand)


def _is_position(value: Expression) -> bool:
    """Return whether an integer is computed from positions and sizes alone."""
    if isinstance(value, Apply) and value.function in _OF_POSITIONS:
        return all(map(_is_position, value.operands[value.function == "where" :]))
    return not isinstance(value, Apply) and is_small(value)


def partial_results(plan: KernelPlan) -> int:
    """Return how many values a program leaves for each row that it shares: the reductions, and for
    squared deviations the number of its columns."""
    return len(plan.reductions) + bool(plan.deviations)


def is_not_negative(one: Apply) -> bool:
    """Return whether a condition says that an integer is not negative."""
    least = one.operands[-1]
    is_zero = isinstance(least, Constant) and least.value == 0
    return one.function == "ge" and is_zero and element_kind(one.operands[0]) == "int"


def cast_of(one: Load) -> str:
    """Return the text behind a load that makes the elements what the kernel computes with."""
    return {"float": ".to(COMPUTE)", "bool": " != 0"}.get(one.tensor.kind, "")


def stores_in_a_sweep_of_its_own(plan: KernelPlan) -> bool:
    """Return whether results with an element for each column need the last reduction of all."""
    columns = frozenset(plan.kernel.column_axes)
    values = [
        plan.stores[one.node]
        for one in plan.stored
        if one.node is not None and any(axis in columns for entry in one.index for axis in entry)
    ]
    return any(plan.depth(value) == sweeps_to_reduce(plan) for value in values)


def idle_sweeps(plan: KernelPlan) -> int:
    """Return how many sweeps of a kernel load no element of a column, as one that finds the target
    of a loss."""
    columns = frozenset(plan.kernel.column_axes)

    def reads(values: Sequence[Expression]) -> bool:
        stack, seen = list(values), set[Expression]()
        while stack:
            one = stack.pop()
            if one in seen or (isinstance(one, Reduced) and one not in plan.picks):
                continue  # known from an earlier sweep
            seen.add(one)
            if isinstance(one, Load) and plan.axes_of(one) & columns:
                return True
            stack += children(one)
        return False

    found = 0
    for depth in range(1, sweeps_to_reduce(plan) + 1):
        found += not reads([one.operand for one in plan.reductions if plan.depth(one) == depth])
    if stores_in_a_sweep_of_its_own(plan):
        found += not reads([plan.stores[one.node] for one in plan.stored if one.node is not None])
    return found


class Function:
    """One @triton.jit function."""

    constants: tuple[str, ...]  # the parameters that are compiled in

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.lines: list[str] = []
        self.indent = 1
        self.known: dict[Expression, str] = {}  # values that have a name in the present scope
        self.column = "column"  # the text of the position along the columns
        self.prefix = ""  # of the names of values at a picked column
        self.namer = Namer([*plan.value_names.values(), *(one.name for one in plan.operands)])
        self.row_axes = frozenset(plan.kernel.row_axes)
        self.column_axes = frozenset(plan.kernel.column_axes)
        pairs = pairs_of(plan)
        self.guards = guards_of(list(plan.stores.values()))
        self.outside = chosen_outside(self.guards, list(plan.stores.values()))
        self.partners = dict([*pairs, *((other, one) for one, other in pairs)])
        self.firsts = [one for one, _ in pairs]
        # The names of pointers to where the windows of operands begin, and what those hold already
        # of the positions in a window.
        self.pointed: dict[Operand, str] = {}
        self.advanced: dict[Operand, list[Part]] = {}

    @property
    def written(self) -> tuple[Operand, ...]:
        """The results that the function itself stores."""
        return self.plan.stored

    # --- the frame

    def text(self) -> str:
        for one in self.firsts:
            self.write(f"{self.pointer(one)} = of_pairs({self.pointer(one)}, PAIRED)")
        reduced: list[Reduced | Scanned] = [*self.plan.reductions, *self.plan.scans]
        if any(map(is_of_positions, reduced)):
            for line in BITS_OF_POSITIONS:
                self.write(line)
        self.body()
        doc = textwrap.fill(
            self.docstring(), 96, initial_indent='    """', subsequent_indent="    "
        )
        head = [self.decorator(), f"def {self.plan.name}(", *self.signature(), "):  # fmt: skip"]
        return "\n".join([*head, f'{doc}"""', *self.lines])

    def decorator(self) -> str:
        """Return the decorator. A size that is a number of the arithmetic is no reason to compile
        the kernel again; of one that positions are computed with, the compiler has to know whether
        16 divides it, so that neighbours are loaded together."""
        if not self.plan.numbers or any(CHOSEN in one.pattern for one in self.plan.loads):
            return "@triton.jit"
        names = ", ".join(f'"{name}"' for name in self.plan.numbers.values())
        return f"@triton.jit(do_not_specialize=[{names}])"

    def signature(self) -> list[str]:
        read = [self.pointer(one) for one in self.plan.loads if one.node is not None]
        written = [self.pointer(one) for one in self.written]
        lines: list[str] = []
        for names, what in ((read, "read"), (written, "written")):
            if names:
                lines += [f"    # {what}", *listed(names)]
        lines += [*self.sizes(), *listed(self.strides())]
        lines.append("    # chosen by the launcher")
        flags = [*(["PAIRED"] if self.firsts else []), *(["UNROLL"] if self.has_windows else [])]
        constants = [*flags, *self.constants]
        return [*lines, *listed([f"{name}: tl.constexpr" for name in constants])]

    def sizes(self) -> list[str]:
        """Return the lines of the parameters between the tensors and the strides."""
        raise NotImplementedError

    def listed_with(self, *loops: str) -> list[str]:
        """Return lines with the numbers that the kernel computes with and the parameters of its
        loops."""
        return listed([*self.plan.numbers.values(), *self.plan.steps, *loops])

    def strides(self) -> list[str]:
        """Return the names of the strides, in the order of the operands."""
        raise NotImplementedError

    def write(self, line: str) -> None:
        self.lines += fold("    " * self.indent + line)

    def space(self) -> None:
        """Write an empty line, but not behind the head of a block."""
        if not self.lines[-1].endswith(":"):
            self.lines.append("")

    def pointer(self, operand: Operand) -> str:
        return f"{operand.name}_pointer"

    def docstring(self) -> str:
        raise NotImplementedError

    def body(self) -> None:
        raise NotImplementedError

    has_windows = False  # whether the columns are those of windows, which are computed positions

    # --- places

    def loops(self, axes: Iterable[object]) -> str:
        names = [self.plan.axis_names[axis] for axis in axes]  # type: ignore[index]
        return ", ".join(names) or "the whole"

    def has(self, operand: Operand, axes: frozenset[object]) -> bool:
        return any(axis in axes for entry in operand.index for axis in entry)

    def place(self, operand: Operand) -> str:
        """Return the text of the offset of the operand's elements; empty for a single element."""
        raise NotImplementedError

    def address(self, operand: Operand, is_guarded: bool = False) -> str:
        """Return the text of the operand's addresses. Offsets are added up before the pointer is,
        because they have 32 bits where that is enough, and a pointer 64."""
        if operand in self.pointed:
            advanced = self.advanced.get(operand, [])
            parts = [one for one in self.parted(operand, is_guarded) if one not in advanced]
            return " + ".join(filter(None, (self.pointed[operand], self.within(parts))))
        place, chosen = self.place(operand), self.chosen_places(operand, is_guarded)
        offsets = " + ".join(filter(None, (place, *chosen)))
        if chosen and "+" in offsets:
            offsets = f"({offsets})"
        return " + ".join(filter(None, (self.pointer(operand), offsets)))

    def chosen_places(self, operand: Operand, is_guarded: bool) -> list[str]:
        """Return the texts of the offsets that the kernel computes itself."""
        texts = []
        for chosen, step in operand.chosen:
            value = unguarded(chosen) if is_guarded else chosen
            text = self.value(value)
            if isinstance(value, Apply) and value not in self.known:
                text = self.named(value, text)
            texts.append(f"{text} * {step}")
        return texts

    def loaded(self, operand: Operand, one: Load) -> str:
        """Return the text of the operand's elements."""
        guard = self.guards.get(one)
        if guard is not None:
            is_inside = self.value(guard)
            place = self.address(operand, is_guarded=True)
            other = f", {constant_text(self.outside[one].value)}" if one in self.outside else ""
            return f"load_inside({place}, {self.masks(one)}, {is_inside}{other})"
        if self.place(operand) or self.plan.axes_of(one):
            masks = ", ".join((self.masks(one), *self.once(one)))
            return f"load({self.address(operand)}, {masks})"
        return f"tl.load({self.address(operand)})"

    def masks(self, one: Load) -> str:
        """Return the texts of which rows and which columns of a load exist."""
        return "is_row, is_column"

    def once(self, one: Load) -> tuple[str, ...]:
        """Return the text of whether a load's elements are read once, if the launcher says so."""
        return ()

    def mask(self, operand: Operand) -> str:
        """Return the text of the mask of the operand's elements; empty for a single element."""
        raise NotImplementedError

    def within(self, parts: Sequence[Part]) -> str:
        """Return the text of the offset in a window that these parts are; empty if there are
        none."""
        texts = [
            f"{sign} {self.in_parentheses(column)} * {step}" for _, sign, column, step in parts
        ]
        offset = re.sub(r"^\+ |(?<=^-) ", "", " ".join(texts))
        return f"({offset})" if len(parts) > 1 or offset.startswith("-") else offset

    def parted(self, operand: Operand, is_guarded: bool) -> list[Part]:
        """Return the positions that the kernel computes in a tensor, none if one is no sum or
        difference of what depends on the row and on the column, as one that is made safe."""
        found = []
        for chosen, step in operand.chosen:
            value = unguarded(chosen) if is_guarded else chosen
            if not isinstance(value, Apply) or value.function not in ("add", "sub"):
                return []
            row, column = value.operands
            if value.function == "add" and not self._is_of_rows(row):
                row, column = column, row
            if not self._is_of_rows(row) or self.plan.axes_of(column) & self.row_axes:
                return []
            found.append((row, "+" if value.function == "add" else "-", column, step))
        return found

    def _is_of_rows(self, one: Expression) -> bool:
        return not self.plan.axes_of(one) & self.column_axes

    def point_at_rows(self, values: Sequence[Expression]) -> None:
        """Write pointers to where the windows of the rows begin, in what ``values`` are made of:
        what the columns add to them is the same for all rows."""
        for one in walk(values):
            operand = self.operand_of(one)
            if operand is None or operand in self.pointed or self.has(operand, self.column_axes):
                continue
            if not (parts := self.parted(operand, one in self.guards)):
                continue
            self.define([row for row, _, _, _ in parts])
            offsets = [f"{self.in_parentheses(row)} * {step}" for row, _, _, step in parts]
            place = " + ".join([*filter(None, [self.place(operand)]), *offsets])
            self.write(f"{operand.name}_row = {self.pointer(operand)} + ({place})")
            self.pointed[operand] = f"{operand.name}_row"

    def operand_of(self, one: Expression) -> Operand | None:
        """Return the operand of which a value is an element; None of any other value."""
        name = self.plan.value_names.get(one) if isinstance(one, Load) else None
        return next((each for each in self.plan.loads if each.name == name), None)

    def in_parentheses(self, one: Expression) -> str:
        text = self.value(one)
        return text if text.isidentifier() else f"({text})"

    # --- values

    def children(self, one: Expression) -> tuple[Expression, ...]:
        """Return what the text of an expression is made of."""
        return guarded_children(one, self.guards)

    def define(self, expressions: Sequence[Expression]) -> None:
        """Write the statements after which each of ``expressions`` has a text."""
        for one in walk(expressions, self.known, parts=self.children):
            if one in self.known:
                continue  # it was loaded with its partner
            if isinstance(one, (Load, Position)):
                self.load(one)
            elif isinstance(one, Reduced):
                self.reduce(one)
            elif isinstance(one, Scanned):
                self.scan(one)
            elif (element := self.loaded_with_outside(one)) is not None:
                self.known[one] = self.known[element]
            elif isinstance(one, Apply) and one in self.plan.value_names:
                name = self.name_of(one)
                self.write(f"{name} = {self.formula(one)}")
                self.known[one] = name

    def loaded_with_outside(self, one: Expression) -> Load | None:
        """Return the load that gives a value, if that is an element where a condition holds, and a
        number that the load gives elsewhere."""
        if not isinstance(one, Apply) or one.function != "where":
            return None
        condition, element, _ = one.operands
        is_it = element in self.outside and self.guards[element] is condition
        return element if is_it and isinstance(element, Load) else None

    @property
    def exists(self) -> str:
        """The text of which elements of a tile exist, as far as a reduction has to know; empty if
        it takes those of all that do."""
        return "exists"

    def term(self, one: Reduced | Scanned) -> str:
        """Return the text of what a tile adds to a reduction."""
        value = self.value(one.operand)
        element = self.loaded_with_outside(one.operand)
        # Where there is no column, the load gives what changes nothing, too.
        if (
            element is not None
            and self.plan.axes_of(element) & self.column_axes
            and constant_text(self.outside[element].value) == self.neutral_of(one)
        ):
            return value
        if one.kind == "int":
            value = f"({value}).to({self.dtype_of(one)})"
        return f"tl.where({self.exists}, {value}, {self.neutral_of(one)})" if self.exists else value

    def dtype_of(self, one: Reduced | Scanned) -> str:
        """Return the text of the dtype of a reduction: positions have as many bits as all others of
        the kernel, other integers 64."""
        if one.kind != "int":
            return "COMPUTE"
        return "INDEX" if is_of_positions(one) else "tl.int64"

    def neutral_of(self, one: Reduced | Scanned) -> str:
        """Return the text of the number that changes no result of a reduction."""
        if is_of_positions(one) and one.function in ("amin", "amax"):
            return "LAST" if one.function == "amin" else "-LAST"
        return triton_neutral(one.function, one.kind)

    def name_of(self, one: Expression) -> str:
        """Return the name of a value, which is another one at a picked column."""
        name = self.plan.value_names[one]
        return self.namer.name(f"{self.prefix}{name}") if self.prefix else name

    def load(self, one: Load | Position) -> None:
        known = self.plan.value_names[one]
        operand = next(operand for operand in self.plan.loads if operand.name == known)
        name = self.name_of(one)
        if isinstance(one, Position):
            self.write(f"{name} = {self.place(operand) or 0}")
        else:
            cast = cast_of(one)
            if operand in self.partners:
                self.load_pair(operand, cast)
            else:
                self.write(f"{name} = {self.loaded(operand, one)}{cast}")
        self.known[one] = name

    def load_pair(self, operand: Operand, cast: str) -> None:
        """Write the load of an operand and of the one that lies between its elements."""
        first, second = self.in_order(operand)
        loads = {name: one for one, name in self.plan.value_names.items() if isinstance(one, Load)}
        names = f"{first.name}, {second.name}"
        places = f"{self.address(first)}, {self.address(second)}"
        self.write(f"{names} = load_pairs({places}, {self.masks(loads[first.name])}, PAIRED)")
        if cast:
            self.write(f"{names} = {first.name}{cast}, {second.name}{cast}")
        self.known |= {loads[one.name]: one.name for one in (first, second)}

    def in_order(self, operand: Operand) -> tuple[Operand, Operand]:
        """Return the pair of an operand, the one whose elements come first."""
        pair = operand, self.partners[operand]
        return pair if operand in self.firsts else pair[::-1]

    def reduce(self, one: Reduced) -> None:
        raise NotImplementedError

    def scan(self, one: Scanned) -> None:
        raise NotImplementedError

    def value(self, one: Expression) -> str:
        """Return the text of a value; ``define`` has written what it needs."""
        if one in self.known:
            return self.known[one]
        if isinstance(one, Constant):
            return constant_text(one.value)
        if isinstance(one, Size):
            named = self.plan.numbers.get(one) or self.plan.value_names.get(one)
            return named or str(one.size)
        assert isinstance(one, Apply)
        return self.formula(one)

    def formula(self, one: Apply) -> str:
        if one.function == "and" and (conditions := self.conditions(one)) is not None:
            return conditions
        by = one.operands[-1]
        if one.function == "div" and isinstance(by, Constant) and is_power_of_two(by.value):
            one = Apply("mul", (one.operands[0], Constant(1 / by.value)), one.kind)
        template = TRITON[one.function]
        # Of numbers alone Triton computes in float32, whatever the arithmetic's dtype.
        is_of_numbers = one.kind == "float" and not any(
            isinstance(operand, (Apply, Load, Reduced, Scanned)) for operand in one.operands
        )
        texts = []
        for place, operand in enumerate(one.operands):
            text = self.value(operand)
            if is_of_numbers and isinstance(operand, Size):
                text = f"tl.cast({text}, COMPUTE)"
            elif one.kind == "float" and is_rounded_as_argument(one, place):
                text = f"tl.full((1, 1), {text}, COMPUTE)"
            is_repeated = template.count(f"{{{place}}}") > 1
            if isinstance(operand, Apply) and operand not in self.known:
                if len(text) > LONG or is_repeated:
                    text = self.named(operand, text)
                elif needs_parentheses(one, place, operand):
                    text = f"({text})"
            elif text.startswith("-") and place and not stands_in_a_call(template, place):
                text = f"({text})"  # a negative constant
            texts.append(text)
        return template.format(*texts)

    def conditions(self, one: Apply) -> str | None:
        """Return the text of conditions that hold together, where two of them say that a position
        is in a dimension; None if no two do."""
        parts: list[Expression] = []
        stack: list[Expression] = [one]
        while stack:
            part = stack.pop()
            if isinstance(part, Apply) and part.function == "and" and part not in self.known:
                stack += reversed(part.operands)
            else:
                parts.append(part)
        below = {
            part.operands[0]: part
            for part in parts
            if isinstance(part, Apply) and part.function == "lt" and part not in self.known
        }
        texts: list[str] = []
        both: set[Expression] = set()
        for part in parts:
            if not isinstance(part, Apply) or part in self.known:
                texts.append(self.value(part))
            elif is_not_negative(part) and part.operands[0] in below:
                other = below[part.operands[0]]
                both.add(other)
                texts.append(
                    f"is_in({self.value(part.operands[0])}, {self.value(other.operands[1])})"
                )
            elif part not in both:
                texts.append(f"({self.value(part)})")
        return " & ".join(texts) if both else None

    def named(self, one: Apply, text: str) -> str:
        """Give a value a name in a line of its own, and return the name."""
        name = self.namer.name(self.plan.kernel.names.get(one, one.function))
        self.write(f"{name} = {text}")
        self.known[one] = name
        return name

    def store(self, operand: Operand) -> None:
        assert operand.node is not None
        if operand in self.partners:
            self.store_pair(operand)
            return
        value = self.value(self.plan.stores[operand.node])
        if not re.fullmatch(r"[\w.]+(\([^()]*\))?", value):
            self.write(f"{operand.name} = {value}")
            value = operand.name
        if not isinstance(self.plan.stores[operand.node], Constant):
            value += f".to({self.pointer(operand)}.dtype.element_ty)"
        self.write(f"tl.store({self.address(operand)}, {value}, {self.mask(operand)})")

    def store_pair(self, operand: Operand) -> None:
        """Write the store of an operand and of the one that lies between its elements, once."""
        pair = self.in_order(operand)
        if operand is pair[0]:
            return
        for one in pair:
            assert one.node is not None
            value = self.value(self.plan.stores[one.node])
            if value != one.name:
                self.write(f"{one.name} = {value}")
        places = ", ".join(map(self.address, pair))
        names = ", ".join(one.name for one in pair)
        self.write(f"store_pairs({places}, {names}, {self.mask(operand)}, PAIRED)")

    def stored(self, on_columns: bool) -> list[Operand]:
        return [one for one in self.plan.stored if self.has(one, self.column_axes) == on_columns]

    def values_of(self, operands: Sequence[Operand]) -> list[Expression]:
        return [self.plan.stores[one.node] for one in operands if one.node is not None]


class Rows(Function):
    """A kernel with reductions: a program owns rows and sweeps over their columns."""

    constants: tuple[str, ...] = (
        "COMPUTE",
        "ROUNDED",
        "WIDE",
        "NESTED_ROWS",
        "NESTED_COLUMNS",
        "SWEEP",
        "PARTS",
        "JOINED",
        "ONCE",
        "BLOCK_ROWS",
        "BLOCK_COLUMNS",
    )
    partials = "partials_pointer"

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.depth = sweeps_to_reduce(plan)
        self.stores_in_last_reduction = not stores_in_a_sweep_of_its_own(plan)
        self.has_windows = any(one.chosen for one in plan.loads) and not any(
            one.node is not None and self.has(one, self.column_axes) for one in plan.operands
        )

    def docstring(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        kernel = self.plan.kernel
        sweeps = self.depth + stores_in_a_sweep_of_its_own(self.plan)
        often = ["", "once", "twice"][sweeps] if sweeps < 3 else f"{sweeps} times"
        return (
            f"Compute {names}. A program owns BLOCK_ROWS rows ({self.loops(kernel.row_axes)}) and "
            f"sweeps {often} over their columns ({self.loops(kernel.column_axes)}), BLOCK_COLUMNS "
            f"at a time. {LAUNCHES}"
        )

    def sizes(self) -> list[str]:
        return [
            "    # what programs that share rows leave for the next sweep",
            "    partials_pointer,",
            *self.loop_parameters(),
        ]

    def loop_parameters(self) -> list[str]:
        return [
            "    # the sizes of the loops, outermost first, what divides by them, and the strides",
            "    # of each tensor in them",
            *self.listed_with("row_sizes", "row_divisors", "column_sizes", "column_divisors"),
        ]

    def strides(self) -> list[str]:
        names = []
        for one in (*self.plan.loads, *self.written):
            if self.on_rows(one):
                names.append(f"{one.name}_row_strides")
            if self.has(one, self.column_axes):
                names.append(f"{one.name}_column_strides")
        return names

    def on_rows(self, operand: Operand) -> bool:
        """Return whether the operand's place depends on the row. A result without dimensions is
        that of the only row."""
        is_single = operand.is_stored and not any(operand.index)
        return is_single or self.has(operand, self.row_axes)

    def place(self, operand: Operand) -> str:
        parts = []
        if self.on_rows(operand):
            parts.append(f"offset(row, {operand.name}_row_strides)")
        if self.has(operand, self.column_axes):
            parts.append(f"offset({self.column}, {operand.name}_column_strides)")
        return " + ".join(parts)

    def loaded(self, operand: Operand, one: Load) -> str:
        axes = self.plan.axes_of(one)
        if not axes & self.column_axes and axes & self.row_axes and one not in self.guards:
            return f"load_rows({self.address(operand)}, is_row)"
        return super().loaded(operand, one)

    def address(self, operand: Operand, is_guarded: bool = False) -> str:
        if self.has_row_pointer(operand):
            offset = f"offset({self.column}, {operand.name}_column_strides)"
            places = offset, *self.chosen_places(operand, is_guarded)
            return " + ".join((f"{operand.name}_row", *places))
        return super().address(operand, is_guarded)

    def children(self, one: Expression) -> tuple[Expression, ...]:
        if isinstance(one, Reduced) and one in self.plan.picks:
            return (self.plan.picks[one].index,)
        return super().children(one)

    def masks(self, one: Load) -> str:
        return "is_row, is_picked" if self.prefix else super().masks(one)

    def reduce(self, one: Reduced) -> None:
        """Write the computation of a value at the single column that a sum consists of."""
        picked = self.plan.picks[one]
        self.define(self.constant_in([picked.value]))
        index = self.value(picked.index)
        if isinstance(picked.index, Apply) and picked.index not in self.known:
            index = self.named(picked.index, index)
        self.write(f"is_picked = is_row & ({index} >= 0) & ({index} < numel(column_sizes))")
        outer, scope = dict(self.known), (self.column, self.prefix)
        self.column, self.prefix = f"({index},)", "picked_"
        self.define([picked.value])
        name = self.plan.value_names[one]
        self.write(f"{name} = tl.where(is_picked, {self.value(picked.value)}, 0.0)")
        self.known = {**outer, one: name}
        self.column, self.prefix = scope

    def once(self, one: Load) -> tuple[str, ...]:
        if self.prefix:
            return ()
        loops = self.row_axes | self.column_axes
        return ("ONCE",) if self.plan.axes_of(one) >= loops else ()

    def has_row_pointer(self, operand: Operand) -> bool:
        is_tensor = operand.node is not None
        return is_tensor and self.on_rows(operand) and self.has(operand, self.column_axes)

    def mask(self, operand: Operand) -> str:
        on_rows, on_columns = self.on_rows(operand), self.has(operand, self.column_axes)
        if on_rows and on_columns:
            return "exists"
        return "is_row" if on_rows else "is_column" if on_columns else ""

    def body(self) -> None:
        self.write(
            "row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)"
        )
        self.share_of_columns()
        self.row_pointers()
        self.sweeps()

    def share_of_columns(self) -> None:
        self.write(
            "first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)"
        )
        if any(name == "columns" for name in self.plan.value_names.values()):
            self.write("columns = numel(column_sizes)")
        if self.plan.deviations:
            loops = "column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS"
            self.write(f"in_share = columns_between(first, end, {loops})")
            self.write(f"in_first = columns_between(first, first + 1, {loops})")

    def row_pointers(self) -> None:
        for one in filter(self.has_row_pointer, (*self.plan.loads, *self.written)):
            offset = f"offset(row, {one.name}_row_strides)"
            self.write(f"{one.name}_row = {self.pointer(one)} + {offset}")

    def sweeps(self) -> None:
        """Write the sweeps over the columns, and the stores."""
        place = 0
        for depth in range(1, self.depth + 1):
            self.reducing_sweep(depth, place)
            place += len(self.reduced_at(depth))
        on_columns = self.stored(True)
        if on_columns and not self.stores_in_last_reduction:
            self.space()
            self.define(self.constant_in(self.values_of(on_columns)))
            self.point_at_rows(self.values_of(on_columns))
            self.open_sweep(self.values_of(on_columns))
            self.store_all(on_columns)
            self.indent -= 1
        # Stores to rows come last: a store ends what the compiler knows of loaded elements.
        on_rows = self.stored(False)
        self.define(self.values_of(on_rows))
        self.store_rows(on_rows)

    def store_rows(self, operands: Sequence[Operand]) -> None:
        for one in operands:
            self.store(one)

    def ends_sweep(self, depth: int) -> str:
        """Return the text of whether the program ends with the sweep of this number."""
        return f"SWEEP == {depth} or SWEEP == -{depth}"

    def reduced_at(self, depth: int) -> list[Reduced]:
        return [one for one in self.plan.reductions if self.plan.depth(one) == depth]

    def reducing_sweep(self, depth: int, place: int) -> None:
        """Write a sweep that reduces; ``place`` is the number of its first reduction."""
        reduced = self.reduced_at(depth)
        deviations = [one for one in reduced if one in self.plan.deviations]
        exponentials = [one for one in reduced if one in self.plan.exponentials]
        largest = [self.plan.exponentials[one].largest for one in exponentials]
        names = [self.plan.value_names[one] for one in reduced]
        self.space()
        self.define(self.constant_in(list(map(self.terms_of, reduced))))
        self.point_at_rows(list(map(self.terms_of, reduced)))
        self.write(f"if SWEEP == 0 or SWEEP == {depth}:")
        self.indent += 1
        for one, name in zip(reduced, names, strict=True):
            self.write(
                f"{name} = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), {self.neutral_of(one)}, "
                f"{self.dtype_of(one)})"
            )
        self.means_of_first_block(deviations)
        stores_here = depth == self.depth and self.stores_in_last_reduction
        stored = self.values_of(self.stored(True)) if stores_here else []
        self.open_sweep([*map(self.terms_of, reduced), *stored])
        outer = dict(self.known)
        self.define(list(map(self.terms_of, reduced)))
        for one, name in zip(reduced, names, strict=True):
            if one not in (*deviations, *exponentials, *largest):
                step, _ = TRITON_REDUCTIONS[one.function]
                operand = self.term(one)
                added = f"{name} += {operand}" if one.function == "sum" else ""
                self.write(added or f"{name} = {step.format(name, operand)}")
        self.add_squares(deviations)
        for one, most in zip(exponentials, largest, strict=True):
            both = self.with_largest(one)
            self.write(f"{both} = with_exponentials({both}, {self.term(most)}, ROUNDED, PARTS)")
        if stores_here:
            self.store_all(self.stored(True))
        self.known = outer
        self.indent -= 1
        for one in deviations:
            name, total = (self.plan.value_names[each] for each in (one, self.plan.deviations[one]))
            self.write(
                f"{name} = squares_about_mean({name}, {total}, {self.about(one)}, in_share, PARTS)"
            )
        self.indent -= 1
        self.write("else:")
        self.indent += 1
        self.load_partials(reduced, place, depth)
        self.indent -= 1
        for one, name in zip(reduced, names, strict=True):
            _, total = TRITON_REDUCTIONS[one.function]
            if one in exponentials:
                both = self.with_largest(one)
                self.write(f"{both} = joined_exponentials({both}, ROUNDED, PARTS)")
            elif one not in (*deviations, *largest):
                self.write(f"{name} = of_rows({total.format(name)})")
            self.known[one] = name
        self.write(f"if {self.ends_sweep(depth)}:")
        self.indent += 1
        for number, name in enumerate(names, place):
            self.store_partial(number, name)
        if deviations:
            self.store_partial(len(self.plan.reductions), "in_share")
        self.indent -= 1
        self.end_launch()
        if exponentials:
            self.define([self.plan.exponentials[one].shift for one in exponentials])
            self.write("if PARTS != 0:")
            self.indent += 1
            for one in exponentials:
                name, shifted = self.plan.value_names[one], self.plan.exponentials[one]
                both = f"{self.value(shifted.largest)}, {self.value(shifted.shift)}"
                self.write(f"{name} = shifted_exponentials({name}, {both}, ROUNDED)")
            self.indent -= 1
            self.write("else:  # the terms of a row are still in registers")
            self.indent += 1
            self.sum_exponentials(exponentials)
            self.indent -= 1

    def sum_exponentials(self, exponentials: Sequence[Reduced]) -> None:
        """Write the sums of exponentials of rows that are one block."""
        self.open_sweep([one.operand for one in exponentials])
        outer = dict(self.known)
        self.define([one.operand for one in exponentials])
        names = [self.plan.value_names[one] for one in exponentials]
        for one, name in zip(exponentials, names, strict=True):
            self.write(f"{name} += {self.term(one)}")
        self.known = outer
        self.indent -= 1
        for name in names:
            self.write(f"{name} = of_rows(tl.sum({name}, 1))")

    def with_largest(self, one: Reduced) -> str:
        """Return the names of the largest term and of the sum of exponentials that refers to it."""
        names = self.plan.value_names
        return f"{names[self.plan.exponentials[one].largest]}, {names[one]}"

    def load_partials(self, reduced: Sequence[Reduced], place: int, depth: int) -> None:
        """Write the loads of what the programs of a row have left of a sweep's reductions; of the
        squared deviations, they are added up."""
        has_integers = any(one.kind == "int" for one in self.plan.reductions)

        def load(name: str, number: int, dtype: str = "COMPUTE") -> None:
            cast = f".to({dtype})" if has_integers else ""
            partials = f"{self.partials}, {number}, BLOCK_ROWS, PARTS, JOINED >= {depth}"
            self.write(f"{name} = load_partials({partials}){cast}")

        for number, one in enumerate(reduced, place):
            load(self.plan.value_names[one], number, self.dtype_of(one))
        if not any(one in self.plan.deviations for one in reduced):
            return
        load("in_shares", len(self.plan.reductions))
        for one in reduced:
            if one in self.plan.deviations:
                name = self.plan.value_names[one]
                total = self.plan.value_names[self.plan.deviations[one]]
                self.write(f"{name} = joined_squares({name}, {total}, in_shares)")
        self.write("in_share = of_rows(tl.sum(in_shares, 1))")

    def store_partial(self, number: int, name: str) -> None:
        partials = f"{self.partials}, {number}"
        self.write(f"store_partial({partials}, {name}, BLOCK_ROWS, PARTS, SWEEP < 0)")

    def terms_of(self, one: Reduced) -> Expression:
        """Return what a sweep computes for a reduction: for squared deviations, what deviates, and
        for exponentials, of what the largest is found."""
        if one in self.plan.exponentials:
            return self.plan.exponentials[one].largest.operand
        return self.plan.deviations.get(one, one).operand

    def about(self, squares: Reduced) -> str:
        """Return the name of what a sweep takes for the mean: that of the first block."""
        return f"{self.plan.value_names[squares]}_about"

    def means_of_first_block(self, deviations: Sequence[Reduced]) -> None:
        """Write what is taken for the mean of terms until all are added up: that of the first
        block. It is computed before the sweep, whose turns then need not wait for one another."""
        if not deviations:
            return
        self.write("# Deviations are from the first block's mean, and corrected after the sweep.")
        for one in deviations:
            self.write(f"{self.about(one)} = tl.full((BLOCK_ROWS, 1), 0.0, COMPUTE)")
        self.write("if first < end:")
        self.indent += 1
        self.open_block("first")
        outer = dict(self.known)
        self.define(list(map(self.terms_of, deviations)))
        for one in deviations:
            total = self.plan.value_names[self.plan.deviations[one]]
            terms = f"{total} + tl.where(exists, {self.value(self.terms_of(one))}, 0.0)"
            self.write(f"{self.about(one)} = mean_of_block({terms}, in_first, PARTS)")
        self.known = outer
        self.indent -= 1

    def add_squares(self, deviations: Sequence[Reduced]) -> None:
        """Write what a block adds to the squared deviations."""
        for one in deviations:
            name = self.plan.value_names[one]
            self.write(f"{name}_terms = {self.value(self.terms_of(one))} - {self.about(one)}")
            self.write(f"{name} += tl.where(exists, {name}_terms * {name}_terms, 0.0)")

    def end_launch(self) -> None:
        """Write what ends the program in the launch of a sweep."""
        self.write("    return")

    def constant_in(self, values: Sequence[Expression]) -> list[Expression]:
        """Return the named values that a sweep for ``values`` uses and that its columns do not
        change."""
        return [
            found
            for found in walk(values)
            if not self.plan.axes_of(found) & self.column_axes
            and isinstance(found, (Apply, Load))
            and found in self.plan.value_names
        ]

    def scan(self, one: Scanned) -> None:
        """Write what a running reduction is at the columns of a block, from what it was before."""
        name, step = self.plan.value_names[one], TRITON_REDUCTIONS[one.function]
        self.write(f"{name}_terms = {self.term(one)}")
        own = TRITON_SCANS[one.function].format(f"{name}_terms")
        self.write(f"{name} = {step[0].format(f'{name}_so_far', own)}")
        whole = f"of_rows({step[1].format(f'{name}_terms')})"
        self.write(f"{name}_so_far = {step[0].format(f'{name}_so_far', whole)}")
        self.known[one] = name

    def open_sweep(self, values: Sequence[Expression]) -> None:
        """Open the loop over the columns in which ``values`` are computed."""
        for one in walk(values, self.known):
            if isinstance(one, Scanned):
                name = self.plan.value_names[one]
                self.write(
                    f"{name}_so_far = tl.full((BLOCK_ROWS, 1), {self.neutral_of(one)}, "
                    f"{self.dtype_of(one)})"
                )
        unrolled = ", loop_unroll_factor=UNROLL" if self.has_windows else ""
        kind = "tl.range" if unrolled else "range"
        self.write(f"for block in {kind}(first, end{unrolled}):")
        self.indent += 1
        self.open_block("block")

    def open_block(self, block: str) -> None:
        """Write where the columns of a block lie."""
        self.write(
            "column, is_column = block_of_columns("
            f"{block}, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE)"
        )
        self.write("exists = is_row & is_column")

    def store_all(self, operands: Sequence[Operand]) -> None:
        outer = dict(self.known)
        self.define(self.values_of(operands))
        for one in operands:
            self.store(one)
        self.known = outer
