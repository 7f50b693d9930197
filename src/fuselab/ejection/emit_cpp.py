"""C++ source of the kernels of a package, for CPUs.

What a kernel computes at one place is written out; the walk over all places, the vectors, the
threads and the strides are those of ``fuselab/runtime/include/cpu_sweep.h``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Sequence

from fuselab.ejection.cpp_text import (
    FRAME,
    KEYWORDS,
    TYPES,
    applied,
    camel,
    constant_text,
    filled,
    filled_list,
    word_texts,
)
from fuselab.ejection.cpp_values import (
    changes_with_position,
    compares_integers,
    is_power_of_two,
    is_scalar,
    only_compared,
    takes_long,
)
from fuselab.ejection.functions import (
    CPP,
    CPP_CASTS,
    CPP_INTEGER_COMPARISONS,
    CPP_INTEGERS,
    CPP_REDUCTIONS,
)
from fuselab.ejection.guards import guarded_children, guards_of, unguarded
from fuselab.ejection.loops import (
    Apply,
    Axis,
    Constant,
    Expression,
    Kind,
    Load,
    Position,
    Reduced,
    Scanned,
    Size,
    children,
    element_kind,
    walk,
)
from fuselab.ejection.picks import Pick, is_number, pick_of
from fuselab.ejection.plan import KernelPlan, Namer, Operand, with_code
from fuselab.ejection.walked_windows import launched_operands, walks_windows
from fuselab.errors import EjectError

MOST_PHASES = 8  # in which rows are taken where their positions are divided
SWEEP = "sweep<Real, lane>(loops"  # the beginning of the call that sweeps
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "not"})
# What positions take without becoming vectors (cpu_positions.h).
_OF_POSITIONS = frozenset({"add", "sub", "mul", "neg", "intdiv", *CPP_INTEGERS})
_OF_MASKS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}


def source(title: str, plans: Sequence[KernelPlan]) -> str:
    """Return the text of ``cpu_kernels.cpp``. Raises EjectError for a name that C++ does not
    allow."""
    kernels = "\n\n".join(_Kernel(plan).text() for plan in with_code(plans))
    headers = ["cpu_sweep.h", *(["cpu_dropout.h"] if "math::kept<" in kernels else [])]
    included = "\n".join(f'#include "{name}"' for name in sorted(headers))
    return f"// {title}\n\n{included}\n\nnamespace kernels {{\n\n{kernels}\n\n}}\n"


class _Kernel:
    """One function: a template over the operands' element types.

    Values that do not depend on a column are computed once per row, between the sweeps over the
    columns; in a sweep they are read as ``at(name)``.
    """

    def __init__(self, plan: KernelPlan) -> None:
        if plan.name in KEYWORDS:
            raise EjectError(f"'{plan.name}' is a word of C++; give the operator another name.")
        self.plan = plan
        self.lines: list[str] = []
        self.indent = 1
        self.known: dict[Expression, str] = {}  # the texts of values in the present scope
        self.reduced = frozenset(plan.reductions)
        self.so_far: dict[Expression, str] = {}  # the states of the running reductions of a sweep
        self.kept: dict[Expression, str] = {}  # the values that a sweep keeps for later ones
        found = {
            one: pick_of(one, plan.kernel.column_axes, plan.axes_of) for one in plan.reductions
        }
        self.picks = {one: pick for one, pick in found.items() if pick is not None}
        self.sums: dict[Operand, str] = {}  # the results that are sums over the rows
        self.reciprocals: dict[Expression, str] = {}  # of divisors that do not depend on a column
        self.is_kept: set[Expression] = set()  # those of them that an earlier sweep has computed
        self.column_axes = frozenset(plan.kernel.column_axes)
        self.loop_names: dict[Axis, str] = {}  # of the loops over a window
        self.walks_windows = walks_windows(plan)
        self.has_columns = (plan.has_columns or bool(plan.sums)) and not self.walks_windows
        self.operands = launched_operands(plan)
        self.guards = self.guards_along_rows()
        self.namer = Namer(sorted(KEYWORDS | FRAME | TYPES))
        self.names: dict[Expression, str] = {
            one: "columns" if name == "columns" else self.namer.name(name)
            for one, name in plan.value_names.items()
            if not (self.walks_windows and name == "columns")
        }
        self.numbers = {size: self.namer.name(name) for size, name in plan.numbers.items()}
        self.steps = {name: self.namer.name(name) for name in plan.steps}
        self.arrays = {one: self.namer.name(f"{one.name}_array") for one in self.operands}
        self.pointers = {one: self.namer.name(f"{one.name}_data") for one in plan.operands}
        # Products that the compiler could fuse with an addition, unlike PyTorch.
        self.fusible = {
            factor
            for one in walk(list(plan.stores.values()))
            if isinstance(one, Apply) and one.function in ("add", "sub", "neg")
            for factor in one.operands
            if isinstance(factor, Apply) and factor.function == "mul" and factor.kind == "float"
        }
        self.types = {one: self.namer.name(camel(one.name)) for one in plan.operands}
        self.only_compared = only_compared(list(plan.stores.values()))

    # --- the frame

    def text(self) -> str:
        plan = self.plan
        tensors = [one for one in plan.operands if one.node is not None]
        types = ["Lane lane", "class Real", *(f"class {self.types[one]}" for one in tensors)]
        parameters = [
            f"{'' if one.is_stored else 'const '}{self.types[one]}* {self.pointers[one]}"
            for one in tensors
        ]
        parameters += [f"int64_t {name}" for name in self.numbers.values()]
        parameters += [f"int64_t {name}" for name in self.steps.values()]
        parameters.append(f"Loops<{len(self.operands)}> loops")
        self.body()
        return "\n".join(
            [
                *filled(self.comment(), "// ", "// "),
                *filled_list("template <", types, ">"),
                *filled_list(f"void {plan.name}(", parameters, ") {"),
                *self.lines,
                "}",
            ]
        )

    def comment(self) -> str:
        names = ", ".join(one.name for one in self.plan.stored)
        text = f"Computes {names}."
        if self.plan.sums:
            sums = [one.name for one in self.plan.stored if one.node in self.plan.sums]
            text += f" Sums {', '.join(sums)} over the rows."
        rows = self.axes(self.plan.kernel.row_axes)
        if self.walks_windows:
            window = self.axes(self.plan.kernel.column_axes)
            return f"{text} A thread owns elements ({rows}) and walks over each one's ({window})."
        if not self.has_columns:
            return f"{text} A thread owns elements ({rows}), each read and written once."
        sweeps = len(list(filter(None, self.swept()))) + bool(self.stored(True))
        times = {1: "once", 2: "twice"}.get(sweeps, f"{sweeps} times")
        columns = self.axes(self.plan.kernel.column_axes)
        return (
            f"{text} A thread owns rows ({rows}) and sweeps {times} over their columns ({columns})."
        )

    def axes(self, axes: Iterable[Axis]) -> str:
        return ", ".join(self.plan.axis_names[axis] for axis in axes) or "a single one"

    def depth(self) -> int:
        return max(map(self.plan.depth, self.plan.reductions), default=0)

    def write(self, line: str) -> None:
        margin = "  " * self.indent
        self.lines += filled(line, margin, margin + "    ")

    def body(self) -> None:
        arrays = [self.arrays[one] for one in self.operands]
        data = ["position" if one.node is None else self.pointers[one] for one in self.operands]
        place = len(self.lines)
        short = f"  const auto [{', '.join(arrays)}] = arrays({', '.join(data)});"
        if len(short) <= 100:
            self.lines.append(short)
        else:
            self.lines += filled_list("  const auto [", arrays, "] =")
            self.lines += filled_list("      arrays(", data, ");")
        if self.has_columns:
            self.open_sweep()
            self.choose_kept()
            for sweep, picked in zip(self.swept(), self.picked(), strict=True):
                if sweep:
                    self.reduce(sweep)
                for one in picked:
                    self.pick(one, self.picks[one])
            self.store(self.stored(False), "rows.once(")
            self.store(self.stored(True), "rows.each(")
            self.indent -= 1
            self.write("});")
        elif self.walks_windows:
            self.store_of_windows()
        elif same := self.same_along_rows():
            read = ", ".join(self.read_by(same))
            self.open(f"for_each_with_rows<Real, lane>(loops, std::tuple{{{read}}},")
            self.write("[&](const auto& rows, const auto& row_value, const auto& row_integer) {")
            for value in same:
                is_integer = element_kind(value) == "int"
                self.hoist_formula(value, "row_integer(" if is_integer else "row_value(")
                self.known[value] = f"at({self.names[value]})"
            self.store(self.stored(True), "rows.each(")
            self.indent -= 1
            self.write("});")
        elif same := self.same_across_rows():
            self.open_with_columns(same)
            self.store(self.stored(True), "rows.each(")
            self.indent -= 1
            self.write("});")
        else:
            self.store(self.stored(True), "for_each<Real, lane>(loops, ")
        written = "\n".join(self.lines)
        if re.search(r"\bV\b", written):
            self.lines.insert(place, "  using V = Vector<Real>;")
        if re.search(r"\bcolumns\b", written):
            self.lines.insert(place, "  const int64_t columns = loops.columns;")

    def guards_along_rows(self) -> dict[Expression, Expression]:
        """Return the guards of loads if one of them changes along a row. If none does, a safe place
        is computed once for a row."""
        inner = self.column_axes
        if not self.has_columns:
            inner |= {*self.plan.kernel.row_axes[-1:]}
        found = guards_of(list(self.plan.stores.values()))
        return found if any(self.plan.axes_of(one) & inner for one in found.values()) else {}

    def largest(self, is_wanted: Callable[[Apply], bool]) -> list[Apply]:
        """Return the largest values of the kernel that are wanted, each once."""
        found: dict[Apply, None] = {}
        seen: set[Expression] = set()
        stack = list(self.plan.stores.values())[::-1]
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if isinstance(one, Apply) and is_wanted(one):
                found[one] = None
            else:
                stack += reversed(children(one))
        return list(found)

    def same_along_rows(self) -> list[Apply]:
        """Return the largest values of a kernel without reductions that take long and do not depend
        on the innermost dimension: a layout of memory in which it is innermost, too, computes them
        once for each run of it."""
        innermost = frozenset(self.plan.kernel.row_axes[-1:])

        def is_wanted(one: Apply) -> bool:
            if self.plan.axes_of(one) & innermost:
                return False
            parts = walk([one])
            is_slow = any(takes_long(part) or compares_integers(part) for part in parts)
            return is_slow and not is_number(one)

        return self.largest(is_wanted) if innermost else []

    def same_across_rows(self) -> list[Apply]:
        """Return the values of a kernel without reductions that take long and depend on the
        innermost dimension, but not on all: a layout of memory in which it is innermost, too,
        computes them once for each column."""
        axes = frozenset(self.plan.kernel.row_axes)
        innermost = frozenset(self.plan.kernel.row_axes[-1:])

        def is_wanted(one: Apply) -> bool:
            own = self.plan.axes_of(one)
            is_of_columns = own != axes and bool(own & innermost)
            return is_of_columns and takes_long(one) and one.kind == "float"

        return self.largest(is_wanted)

    def of_columns(self) -> list[Apply]:
        """Return the values of a kernel with reductions that take long and are the same in all of
        its rows."""
        columns = frozenset(self.plan.kernel.column_axes)

        def is_wanted(one: Apply) -> bool:
            own = self.plan.axes_of(one)
            is_of_columns = bool(own) and own <= columns and takes_long(one)
            if not is_of_columns or one.kind != "float":
                return False
            return not any(isinstance(part, Reduced) for part in walk([one]))

        return self.largest(is_wanted)

    def open_with_columns(self, values: Sequence[Apply]) -> None:
        """Write the head of a loop in which values are computed once for each column."""
        read = ", ".join(self.read_by(values))
        self.open(f"sweep_with_columns<Real, lane>(loops, std::tuple{{{read}}},")
        self.write("[&](const auto& rows, const auto& column_value) {")
        for value in values:
            self.hoist_formula(value, "column_value(")
            self.known[value] = f"at({self.names[value]})"

    def read_by(self, values: Sequence[Expression]) -> list[str]:
        """Return the arrays that the values are computed from."""
        loaded = [part for part in walk(values) if isinstance(part, (Load, Position))]
        return list(dict.fromkeys(map(self.array, loaded)))

    def open_sweep(self) -> None:
        """Write the head of the sweep, with the sums over the rows if there are any."""
        arrays = [self.arrays[one] for one in self.plan.stored if one.node in self.plan.sums]
        if not arrays:
            walk = "sweep_in_order<Real, lane>(loops" if self.plan.scans else self.in_phases()
            if walk == SWEEP and (values := self.of_columns()):
                self.open_with_columns(values)
                return
            self.open(f"{walk}, [&](const auto& rows) {{")
            return
        parameters = ["const auto& rows"]
        for one in self.plan.stored:
            if one.node in self.plan.sums:
                name = self.sums[one] = self.namer.name(f"{one.name}_sum")
                parameters.append(f"auto {name}")
        results = f"std::tuple{{{', '.join(arrays)}}}"
        self.write(f"sweep_and_sum<Real, lane>(loops, {results},")
        self.lines += filled_list(" " * 28 + "[&](", parameters, ") {")
        self.indent += 1

    def in_phases(self) -> str:
        """Return the beginning of the call that sweeps, in the form that is faster where elements
        are loaded at positions of the innermost rows divided by a small number, as those of the
        windows around an element are."""
        loads = [one for one in walk(list(self.plan.stores.values())) if isinstance(one, Load)]
        places = walk([child for one in loads for child in children(one)])
        innermost = self.plan.kernel.row_axes[-1:]
        for position in places:
            if not (isinstance(position, Position) and position.axes == innermost):
                continue
            divisors = {
                int(one.operands[1].value)
                for one in places
                if isinstance(one, Apply)
                and (one.function, one.kind) == ("intdiv", "int")
                and isinstance(one.operands[1], Constant)
                and position in walk([one.operands[0]])
            }
            divisor = math.lcm(*divisors)
            if 1 < divisor <= MOST_PHASES:
                types = f"{divisor}, Real, lane"
                return f"sweep_in_phases<{types}>(loops, {self.array(position)}"
        return SWEEP

    def swept(self) -> list[list[Reduced]]:
        """Return the reductions of each sweep over the columns, in the order of the sweeps."""
        return self.by_depth([one for one in self.plan.reductions if one not in self.picks])

    def picked(self) -> list[list[Reduced]]:
        """Return what is computed at a single column after each of these sweeps."""
        return self.by_depth(list(self.picks))

    def by_depth(self, found: Sequence[Reduced]) -> list[list[Reduced]]:
        depths = range(1, self.depth() + 1)
        return [[one for one in found if self.plan.depth(one) == depth] for depth in depths]

    def choose_kept(self) -> None:
        """Choose the values that a sweep keeps for later ones, and write the room for them.

        A value is kept if several sweeps need it and it takes long to compute, unless all of them
        need it as a part of one value, which is then kept.
        """
        stored = [self.plan.stores[one.node] for one in self.stored(True) if one.node is not None]
        sweeps = [[one.operand for one in sweep] for sweep in self.swept()] + [stored]
        computed: set[Expression] = set()  # by the sweeps so far
        chosen: dict[Apply, None] = {}
        seen: set[Expression] = set()  # in this sweep

        def visit(one: Expression) -> None:
            if one in seen or one in self.known:
                return
            seen.add(one)
            if isinstance(one, Apply) and one in computed and self.is_slow(one, chosen):
                chosen[one] = None
            elif not isinstance(one, Reduced) and one not in chosen:
                for child in children(one):
                    visit(child)

        for values in sweeps:
            seen.clear()
            for one in values:
                visit(one)
            computed.update(walk(values, self.reduced))
        for one in list(chosen):
            del chosen[one]
            if self.is_slow(one, chosen):  # and not only because of another one that is kept
                chosen[one] = None
        for one in chosen:
            name = self.names.get(one) or self.namer.name(self.wanted_name(one))
            self.names[one] = name
            self.kept[one] = kept = self.namer.name(f"{name}_kept")
            if self.walks_windows:
                self.write(f"V {kept}[{self.count_of_columns()}];")
            else:
                self.write(f"const auto {kept} = rows.room();")

    def is_slow(self, one: Expression, loaded: Container[Expression]) -> bool:
        """Return whether a value takes longer to compute for an element than to load, where the
        values of ``loaded`` are loaded."""
        known = {part for part in walk([one]) if part in self.reduced or part in loaded}
        return element_kind(one) == "float" and any(
            takes_long(part) and self.plan.axes_of(part) & self.column_axes
            for part in walk([one], known)
        )

    def wanted_name(self, one: Apply) -> str:
        return self.plan.kernel.names.get(one, one.function)

    def reduce(self, reduced: Sequence[Reduced]) -> None:
        """Write the sweep that computes the reductions."""
        self.hoist([one.operand for one in reduced])
        self.begin_scans([one.operand for one in reduced])
        names = ", ".join(self.names[one] for one in reduced)
        names = names if len(reduced) == 1 else f"[{names}]"
        terms = [one.operand for one in reduced]
        self.open(f"const auto {names} = {self.by_stretch('rows.reduce(', terms)}[=](auto at) {{")
        outer = dict(self.known)
        self.define(terms)
        texts = list(map(self.term, reduced))
        listed = ", ".join(texts)
        self.write(f"return {listed if len(texts) == 1 else f'std::tuple{{{listed}}}'};")
        self.close(outer)
        for one in reduced:
            self.known[one] = f"at({self.names[one]})"

    def term(self, one: Reduced) -> str:
        """Return the text of a reduction's term; a sum of integers that are 0 or 1 counts."""
        operand, kind = one.operand, element_kind(one)
        if getattr(operand, "function", "") == "to_int" and operand not in self.names:
            (operand,) = children(operand)
        if (one.function, kind, element_kind(operand)) == ("sum", "int", "bool"):
            return f"Count{{math::mask<V>({self.vector(operand, 'bool')})}}"
        return f"{CPP_REDUCTIONS[one.function]}{{{self.vector(one.operand, kind)}}}"

    def store_of_windows(self) -> None:
        """Write the loop over the elements, in which each walks over its window."""
        stored = self.plan.stored
        values = [self.plan.stores[one.node] for one in stored if one.node is not None]
        terms = [one.operand for one in self.plan.reductions]
        walk = self.by_stretch("for_each<Real, lane>(loops, ", [*terms, *values])
        self.open(f"{walk}[=](auto at) {{")
        outer = dict(self.known)
        self.choose_kept()
        for reduced in self.swept():
            self.reduce_window(reduced)
        self.define(values)
        self.store_values(stored, values)
        self.close(outer)

    def reduce_window(self, reduced: Sequence[Reduced]) -> None:
        """Write the loops over the columns that compute the reductions of one element."""
        terms = [one.operand for one in reduced]
        self.define(self.on_rows(terms))
        combine: dict[Reduced, str] = {}
        for one in reduced:
            vector = "V" if element_kind(one) == "float" else "LongIntegers<V>"
            combine[one] = f"{CPP_REDUCTIONS[one.function]}<{vector}>"
            neutral = f"math::splat<{vector}>({combine[one]}::neutral())"
            self.write(f"auto {self.names[one]} = {neutral};")
        outer = dict(self.known)
        for axis in self.plan.kernel.column_axes:
            name = self.known[Position((axis,))] = self.loop_name(axis)
            self.write(f"for (int64_t {name} = 0; {name} < {axis.size}; ++{name}) {{")
            self.indent += 1
        self.define(terms)
        for one, term in zip(reduced, terms, strict=True):
            name, text = self.names[one], self.vector(term, element_kind(one))
            self.write(f"{name} = {combine[one]}::combine({name}, {text});")
        for _ in self.plan.kernel.column_axes:
            self.indent -= 1
            self.write("}")
        self.known = outer | {one: self.names[one] for one in reduced}

    def loop_name(self, axis: Axis) -> str:
        """Return the name of the loop over an axis of a window."""
        if axis not in self.loop_names:
            self.loop_names[axis] = self.namer.name(self.plan.axis_names[axis])
        return self.loop_names[axis]

    def count_of_columns(self) -> int:
        return math.prod(int(axis.size) for axis in self.plan.kernel.column_axes)

    def kept_text(self, one: Expression) -> str:
        """Return the text of a value that an earlier sweep has kept, or where this one keeps it."""
        kept = self.kept[one]
        if not self.walks_windows:
            return f"at({kept})"
        first, *others = self.plan.kernel.column_axes
        place = self.loop_name(first)
        for count, axis in enumerate(others):
            place = f"({place})" if count else place
            place = f"{place} * {axis.size} + {self.loop_name(axis)}"
        return f"{kept}[{place}]"

    def pick(self, one: Reduced, picked: Pick) -> None:
        """Write the computation of a value at a single column, which no sweep can keep."""
        if picked.index not in self.known:
            self.hoist([picked.index])
        self.hoist([picked.value])
        known_index = self.known[picked.index].removeprefix("at(").removesuffix(")")
        self.open(f"const auto {self.names[one]} = rows.pick({known_index}, [=](auto at) {{")
        outer, kept, is_kept = dict(self.known), self.kept, self.is_kept
        self.kept, self.is_kept = {}, set()
        self.define([picked.value])
        self.write(f"return {self.vector(picked.value, 'float')};")
        self.kept, self.is_kept = kept, is_kept
        self.close(outer)
        self.known[one] = f"at({self.names[one]})"

    def begin_scans(self, values: Sequence[Expression]) -> None:
        """Write the states of the running reductions that a sweep for ``values`` computes."""
        for one in self.needed(values):
            if isinstance(one, Scanned):
                name = self.so_far[one] = self.namer.name(f"{self.names[one]}_so_far")
                vector = "V" if one.kind == "float" else "LongIntegers<V>"
                term = f"{CPP_REDUCTIONS[one.function]}<{vector}>"
                self.write(f"const auto {name} = rows.template running<{term}>();")

    def store(self, operands: Sequence[Operand], walk: str) -> None:
        """Write the loop that stores ``operands``."""
        if not operands:
            return
        values = [self.plan.stores[one.node] for one in operands if one.node is not None]
        if walk == "rows.each(":
            self.hoist(values)
            self.begin_scans(values)
        self.open(f"{self.by_stretch(walk, values)}[=](auto at) {{")
        outer = dict(self.known)
        self.define(values)
        self.store_values(operands, values)
        self.close(outer)

    def store_values(self, operands: Sequence[Operand], values: Sequence[Expression]) -> None:
        for operand, value in zip(operands, values, strict=True):
            assert operand.node is not None
            text = self.vector(value, operand.node.kind)
            if operand in self.sums:
                self.write(f"at.add({self.sums[operand]}, {text});")
            else:
                self.write(f"at.store({self.arrays[operand]}, {text});")

    def open(self, line: str) -> None:
        self.write(line)
        self.indent += 1

    def close(self, outer: dict[Expression, str]) -> None:
        self.known = outer
        self.indent -= 1
        self.write("});")

    def by_stretch(self, walk: str, values: Sequence[Expression]) -> str:
        """Return the beginning of a loop that computes ``values``, in the form that is faster where
        they compare positions."""
        if not any(map(changes_with_position, self.needed(values))):
            return walk
        return re.sub("(each|once|reduce)", r"\1_by_stretch", walk, count=1)

    def stored(self, on_columns: bool) -> list[Operand]:
        """Return the results with an element for each column, or those for each row only."""
        if not self.has_columns:
            return list(self.plan.stored) if on_columns else []

        def has_columns(one: Operand) -> bool:
            return any(axis in self.column_axes for entry in one.index for axis in entry)

        return [one for one in self.plan.stored if has_columns(one) == on_columns]

    # --- values

    def hoist(self, expressions: Sequence[Expression]) -> None:
        """Compute the parts of ``expressions`` that do not depend on a column once per row."""
        for one in self.on_rows(expressions):
            if isinstance(one, (Load, Position)) and not children(one):
                self.write(f"const auto {self.names[one]} = rows.load({self.array(one)});")
            else:
                is_int = element_kind(one) == "int"
                self.hoist_formula(one, "rows.integer(" if is_int else "rows.value(")
            self.known[one] = f"at({self.names[one]})"
        self.hoist_reciprocals(expressions)

    def hoist_reciprocals(self, expressions: Sequence[Expression]) -> None:
        """Compute the reciprocals of what ``expressions`` divide by once per row."""
        for one in self.needed(expressions) if self.plan.reductions else ():
            if not (isinstance(one, Apply) and one.function == "div" and one.kind == "float"):
                continue
            divisor = one.operands[1]
            text = self.known.get(divisor, "")
            is_row = text.startswith("at(") and element_kind(divisor) == "float"
            if divisor in self.reciprocals or not is_row:
                continue
            name = self.namer.name(f"{self.names[divisor]}_reciprocal")
            self.reciprocals[divisor] = f"at({name})"
            line = f"const auto {name} = rows.value([=](auto at) {{"
            short = f"{line} return math::reciprocal({text}); }});"
            if len(short) + 2 * self.indent <= 100:
                self.write(short)
                continue
            self.open(line)
            self.write(f"return math::reciprocal({text});")
            self.close(self.known)

    def on_rows(self, expressions: Sequence[Expression]) -> list[Apply | Load | Position]:
        """Return the largest parts that do not depend on a column and are not known yet."""
        found: dict[Apply | Load | Position, None] = {}
        seen: set[Expression] = set()

        def visit(one: Expression) -> None:
            if one in seen or one in self.known or one in self.is_kept or is_number(one):
                return
            seen.add(one)
            if isinstance(one, Reduced) or self.plan.axes_of(one) & self.column_axes:
                for child in self.children(one):
                    visit(child)
            elif isinstance(one, (Apply, Load, Position)):
                found[one] = None

        if self.has_columns or self.walks_windows:
            for one in expressions:
                visit(one)
        return list(found)

    def hoist_formula(self, one: Apply | Load | Position, head: str) -> None:
        name = self.names.get(one)
        if name is None:
            assert isinstance(one, Apply)
            name = self.names[one] = self.namer.name(self.wanted_name(one))
        outer, before = dict(self.known), len(self.lines)
        self.open(f"const auto {name} = {head}[=](auto at) {{")
        start = len(self.lines)
        self.define(self.children(one))
        text = self.formula(one) if isinstance(one, Apply) else self.loaded(one)
        short = f"const auto {name} = {head}[=](auto at) {{ return {text}; }});"
        fits = len(self.lines) == start and len(short) + 2 * (self.indent - 1) <= 100
        if not fits:
            self.write(f"return {text};")
            self.close(outer)
            return
        del self.lines[before:]
        self.indent -= 1
        self.known = outer
        self.write(short)

    def operand(self, one: Load | Position) -> Operand:
        name = self.plan.value_names[one]
        return next(each for each in self.plan.loads if each.name == name)

    def array(self, one: Load | Position) -> str:
        return self.arrays[self.operand(one)]

    def loaded(self, one: Load | Position) -> str:
        """Return the text of a vector of elements, or of positions."""
        chosen = self.operand(one).chosen
        if not chosen:
            return f"at({self.array(one)})"
        guard = self.guards.get(one)
        places = [
            applied("{0} * {1}", [self.place(value, guard is not None), self.steps[step]])
            for value, step in chosen
        ]
        if guard is None:
            load = "chosen_to_compare" if one in self.only_compared else "chosen"
            return f"at.{load}({self.array(one)}, {' + '.join(places)})"
        condition = self.vector(guard, "bool")
        return f"at.chosen_where({self.array(one)}, {condition}, {' + '.join(places)})"

    def place(self, value: Expression, is_guarded: bool) -> str:
        """Return the text of a computed position; that of a guarded one holds where its condition
        does."""
        if is_guarded:
            value = unguarded(value)
        return self.vector(value, "int") if is_scalar(value) else self.value(value, "int")

    def children(self, one: Expression) -> tuple[Expression, ...]:
        """Return what the text of an expression is made of."""
        return guarded_children(one, self.guards)

    def define(self, expressions: Sequence[Expression]) -> None:
        """Write the statements after which each of ``expressions`` has a text."""
        for one in self.needed(expressions):
            if one in self.is_kept:
                self.write(f"const auto {self.names[one]} = {self.kept_text(one)};")
                self.known[one] = self.names[one]
            elif isinstance(one, (Load, Position)):
                self.write(f"const auto {self.names[one]} = {self.loaded(one)};")
                self.known[one] = self.names[one]
            elif isinstance(one, Scanned):
                term = f"{CPP_REDUCTIONS[one.function]}{{{self.vector(one.operand, one.kind)}}}"
                scanned = f"at.scan({self.so_far[one]}, {term})"
                self.write(f"const auto {self.names[one]} = {scanned};")
                self.known[one] = self.names[one]
            elif isinstance(one, Apply) and one in self.names and not is_number(one):
                text = self.formula(one)
                if one in self.kept:
                    kept = f"{self.kept_text(one)} = {text}"
                    text = kept if self.walks_windows else f"at.keep({self.kept[one]}, {text})"
                    self.is_kept.add(one)
                self.write(f"const auto {self.names[one]} = {text};")
                self.known[one] = self.names[one]

    def needed(self, expressions: Sequence[Expression]) -> list[Expression]:
        """Return what has to be computed or loaded for ``expressions``, in this order."""
        return walk(expressions, self.known, self.is_kept, self.children)

    def formula(self, one: Apply) -> str:
        """Return the text of a function of operands, converted to the kind that it computes in."""
        kinds = [element_kind(operand) for operand in one.operands]
        if one.function.startswith("to_"):
            return self.cast(one.operands[0], one.kind)
        if one.function == "where":
            texts = [self.vector(one.operands[0], "bool")]
            if one.kind == "int":
                texts += [self.value(operand, "int") for operand in one.operands[1:]]
                return applied(CPP_INTEGERS["where"], texts)
            texts += [self.vector(operand, one.kind) for operand in one.operands[1:]]
            return applied(CPP["where"], texts)
        kind = one.kind
        if one.function == "kept":
            seed, position = (self.value(operand, "int") for operand in one.operands[:2])
            return applied(CPP["kept"], [seed, position, *word_texts(one.operands[2:])])
        if one.function in _COMPARISONS:
            kind = next(kind for kind in ("float", "int", "bool") if kind in kinds)
        function = _OF_MASKS.get(one.function, one.function) if kind == "bool" else one.function
        operands = one.operands
        if function == "div" and is_power_of_two(operands[1]):
            function, operands = "mul", (operands[0], Constant(1 / operands[1].value))
        template = CPP_INTEGERS.get(function, CPP[function]) if kind == "int" else CPP[function]
        if one.kind == "bool" and kind == "int" and function in CPP_INTEGER_COMPARISONS:
            texts = [self.value(operand, kind) for operand in operands]
            return applied(CPP_INTEGER_COMPARISONS[function], texts)
        has_reciprocal = function == "div" and operands[1] in self.reciprocals
        if has_reciprocal and self.plan.axes_of(one) & self.column_axes:
            texts = [self.vector(operand, kind) for operand in operands]
            return f"math::quotient({', '.join([*texts, self.reciprocals[operands[1]]])})"
        is_vector = function not in _OF_POSITIONS if kind == "int" else "math::" in template
        texts = [
            self.vector(operand, kind) if is_vector else self.value(operand, kind)
            for operand in operands
        ]
        text = applied(template, texts)
        if one in self.fusible and not is_scalar(one):
            return f"math::rounded({text})"
        return f"math::mask<V>({text})" if one.kind == "bool" and kind == "int" else text

    def cast(self, one: Expression, kind: Kind) -> str:
        own = element_kind(one)
        if isinstance(one, Apply) and is_scalar(one):
            text = self.formula(one)
            return text if own == kind else f"Real({text})"
        text = self.plain(one)
        return text if own == kind else applied(CPP_CASTS[own, kind], [text])

    def value(self, one: Expression, kind: Kind) -> str:
        """Return the text of a value in the given kind; ``define`` has written what it needs. A
        number is a scalar."""
        if isinstance(one, Constant):
            return constant_text(one.value, kind)
        if isinstance(one, Size):
            named = self.numbers.get(one) or self.names.get(one) or str(one.size)
            return f"Real({named})" if kind == "float" else named
        return self.cast(one, kind)

    def vector(self, one: Expression, kind: Kind) -> str:
        """Return the text of a value as a vector."""
        text = self.value(one, kind)
        if not is_scalar(one):
            return f"math::integers<V>({text})" if kind == "int" and self.may_step(one) else text
        if kind == "bool":
            return f"math::mask<V>({text})"
        return f"math::splat<{'V' if kind == 'float' else 'LongIntegers<V>'}>({text})"

    def may_step(self, one: Expression) -> bool:
        """Return whether the text of an integer can be a Stepped number or a Line of
        cpu_positions.h."""
        if isinstance(one, Position) or (one in self.known and self.known[one].startswith("at(")):
            return True
        steps = isinstance(one, Apply) and one.function in _OF_POSITIONS
        return steps and element_kind(one) == "int" and any(map(self.may_step, children(one)))

    def plain(self, one: Expression) -> str:
        if one in self.known:
            return self.known[one]
        if isinstance(one, (Constant, Size)):
            return self.vector(one, element_kind(one))
        assert isinstance(one, Apply)
        return self.formula(one)
