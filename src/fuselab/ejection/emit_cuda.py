"""CUDA C++ source of the kernels of a package, on the tiles of ``runtime/include/cuda_sweep.h``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from fuselab.ejection.cpp_text import word_texts
from fuselab.ejection.functions import CUDA, CUDA_POWERS, CUDA_REDUCTIONS
from fuselab.ejection.loops import (
    Apply,
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
from fuselab.ejection.plan import KernelPlan, Operand, with_code

_TYPES: dict[Kind, str] = {"float": "Real", "int": "int64_t", "bool": "bool"}
_INSIDE = re.compile(r"(?<=[(,]) ?\{(\d)\}(?=[,)])")
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"}
_OPERATORS = {"add", "sub", "mul", "div", "neg"}
_BITWISE = {"and", "or", "xor"}

# Names with a meaning in C++ or in the kernels, which no value may have. A value must not have the
# name of a function either, because its own definition may call it.
_RESERVED = """
alignas alignof and asm auto bool break case catch char class const constexpr continue decltype
default delete do double else enum explicit export extern false float for friend goto if inline int
long mutable namespace new not operator or private protected public register return short signed
sizeof static struct switch template this throw true try typedef typename union unsigned using
virtual void volatile while xor int64_t

i k r pack tile loops partials parts columns Real Tile
reduce reduce_parts widened assign load store load_at store_at positions_at
Pack Packed Strided Same Loaded Kept Reduction Running Loops LoopSizes Access Counters PackAt Share
ElementTile TransposedTile RowTile ColumnTile
y0 y1 yn j0 j1 jn gamma
"""
_TAKEN = {
    *_RESERVED.split(),
    *re.findall(r"[A-Za-z_]\w*", " ".join([*CUDA.values(), *CUDA_POWERS.values()])),
    *CUDA_REDUCTIONS.values(),
}

_TILING = """\
// Real is the type of the arithmetic. Tile says how threads share out rows and columns: the
// launcher chooses it for each call, and cuda_sweep.h describes the choices. A row that fits is
// kept in registers, so that each element is read once. The class of an operand is the type of its
// elements and how a thread reads a pack of them: Packed<float>, Strided<float> or Same<float>.
"""


def source(title: str, plans: Sequence[KernelPlan]) -> str:
    """Return the text of ``cuda_kernels.cu``."""
    kernels = "\n".join(_Kernel(plan).text() for plan in with_code(plans))
    headers = [*(["cuda_dropout.h"] if "philox::kept(" in kernels else []), "cuda_sweep.h"]
    included = "\n".join(f'#include "{name}"' for name in reversed(headers))
    return f"// {title}\n//\n{_TILING}\n{included}\n\n{kernels}"


def can_split(plan: KernelPlan) -> bool:
    """Return whether parts of a row can be reduced apart: one sweep reduces, and all results belong
    to rows."""
    columns = frozenset(plan.kernel.column_axes)
    return (
        bool(plan.reductions)
        and not plan.scans
        and all(plan.depth(one) == 1 for one in plan.reductions)
        and not any(_has(operand, columns) for operand in plan.stored)
    )


def element_kinds(plan: KernelPlan) -> str:
    """Return the kind of the elements of each tensor of a kernel, for ``CudaSweeps.examples``."""
    return " ".join(operand.node.kind for operand in plan.operands if operand.node is not None)


def _has(operand: Operand, axes: frozenset[object]) -> bool:
    return any(axis in axes for entry in operand.index for axis in entry)


class _Kernel:
    """One kernel template."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.lines: list[str] = []
        self.indent = 1
        self.known: dict[Expression, str] = {}  # values that have a name in the present scope
        self.columns = frozenset(plan.kernel.column_axes)
        self.is_split = can_split(plan)
        self.running: dict[Expression, str] = {}  # the running reductions of a sweep
        self.taken = set(_TAKEN)
        self.names: dict[str, str] = {}
        for wanted in dict.fromkeys(_wanted(plan)):
            name = self.names[wanted] = self.unique(wanted)
            self.taken |= {f"{name}_pointer", f"{name}_tile", f"{name}_pack"}
        self.types = {
            one.name: self.unique(_class_name(one.name))
            for one in plan.operands
            if one.node is not None
        }

    def unique(self, wanted: str) -> str:
        """Return a name that nothing else in the kernel has."""
        wanted = f"{wanted}_value" if wanted in _TAKEN else wanted
        name, count = wanted, 1
        while name in self.taken:
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        return name

    # --- the frame

    def text(self) -> str:
        if self.plan.has_columns:
            self.reducing()
        else:
            self.store_elements(list(self.plan.stored))
        types = ", ".join(
            ["class Tile", "class Real", *(f"class {t}" for t in self.types.values())]
        )
        *parameters, last = self.parameters()
        head = [
            textwrap.fill(self.summary(), 100, initial_indent="// ", subsequent_indent="// "),
            *_wrapped(f"template <{types}>", 10),
            f"__global__ void __launch_bounds__(Tile::threads) {self.plan.name}_kernel(",
            *(f"    {parameter}," for parameter in parameters),
            f"    {last}) {{",
            "  const Tile tile(loops.sizes);",
        ]
        body = [line for text in self.lines for line in _wrapped(text, 4)]
        if any(re.search(r"\bcolumns\b", line) for line in body):
            head.append("  const int64_t columns = loops.sizes.columns;")
        return "\n".join([*head, *self.operands(), *body, "}", ""])

    def summary(self) -> str:
        plan = self.plan
        names = ", ".join(self.names[one.name] for one in plan.stored)
        if not plan.has_columns:
            return f"Computes {names}. Every element is read once and written once."
        rows, columns = (
            ", ".join(plan.axis_names[axis] for axis in axes) or "one element"
            for axes in (plan.kernel.row_axes, plan.kernel.column_axes)
        )
        depth = max(map(plan.depth, plan.reductions), default=0)
        sweeps = depth + any(_has(one, self.columns) for one in plan.stored)
        read = "Every element is read once."
        if sweeps > 1:
            times = "twice" if sweeps == 2 else f"{sweeps} times"
            read = f"Rows that do not fit in registers are read {times}."
        split = " Few rows are split over several blocks." if self.is_split else ""
        return f"Computes {names}. Rows: {rows}; columns: {columns}. {read}{split}"

    def parameters(self) -> Iterator[str]:
        for one in self.plan.operands:
            if one.node is not None:
                const = "" if one.is_stored else "const "
                name = self.names[one.name]
                yield f"{const}typename {self.types[one.name]}::type* __restrict__ {name}_pointer"
        if self.is_split:
            yield "int64_t* partials"
            yield "int parts"
        for number in (*self.plan.numbers.values(), *self.plan.steps):
            yield f"int64_t {self.names[number]}"
        yield f"const __grid_constant__ Loops<{len(self.plan.operands)}> loops"

    def operands(self) -> Iterator[str]:
        """Yield the definitions of the operands that are read along columns."""
        for one in self.plan.loads:
            if one.node is not None and self.is_element(one) and not one.chosen:
                rows = any(axis not in self.columns for entry in one.index for axis in entry)
                held = "Kept" if rows and self.plan.has_columns else "Loaded"
                name = self.names[one.name]
                yield (
                    f"  const {held}<{self.types[one.name]}, Tile> "
                    f"{name}_tile(tile, {name}_pointer, {self.strides(one)});"
                )

    def is_element(self, operand: Operand) -> bool:
        """Return whether an operand has an element for each column, not only for each row."""
        return not self.plan.has_columns or _has(operand, self.columns)

    def strides(self, operand: Operand) -> str:
        return f"loops.strides[{self.plan.operands.index(operand)}]"

    def write(self, line: str) -> None:
        self.lines.append("  " * self.indent + line)

    def open(self, line: str, unrolled: str = "") -> None:
        self.lines.append(f"#pragma unroll {unrolled}".rstrip())
        self.write(line)
        self.indent += 1

    def close(self) -> None:
        self.indent -= 1
        self.write("}")

    # --- the phases

    def reducing(self) -> None:
        """Write a sweep for each depth of reductions, then the results."""
        by_depth: dict[int, list[Reduced]] = {}
        for one in self.plan.reductions:
            by_depth.setdefault(self.plan.depth(one), []).append(one)
        for depth in sorted(by_depth):
            self.sweep(by_depth[depth])
        on_columns = [one for one in self.plan.stored if self.is_element(one)]
        on_rows = [one for one in self.plan.stored if not self.is_element(one)]
        self.define_rows([self.plan.stores[one.node] for one in on_columns if one.node], on_rows)
        if on_columns:
            self.store_elements(on_columns)

    def sweep(self, reduced: Sequence[Reduced]) -> None:
        """Write one sweep over the columns with all reductions of one depth."""
        self.define_rows([one.operand for one in reduced])
        names = [self.names[self.plan.value_names[one]] for one in reduced]
        for name, one in zip(names, reduced, strict=True):
            slot = self.plan.reductions.index(one)
            kind = f"{slot}, {CUDA_REDUCTIONS[one.function]}, {_TYPES[one.kind]}, Tile"
            self.write(f"Reduction<{kind}> {name};")
        outer = dict(self.known)
        self.open_packs([one.operand for one in reduced])
        self.define([one.operand for one in reduced])
        adds = [
            f"{name}.add(i, {self.converted(one.operand, one.kind)});"
            for name, one in zip(names, reduced, strict=True)
        ]
        if len(adds) == 1:
            self.write(f"if (pack.has(i)) {adds[0]}")
        else:
            self.write("if (pack.has(i)) {")
            self.indent += 1
            for add in adds:
                self.write(add)
            self.close()
        self.known = outer
        self.close()
        self.close()
        listed = ", ".join(names)
        if self.is_split:
            self.write(f"if (!reduce_parts(tile, partials, parts, {listed})) return;")
        else:
            self.write(f"reduce(tile, {listed});")
        self.known |= {one: f"{name}[r]" for one, name in zip(reduced, names, strict=True)}

    def open_packs(self, values: Sequence[Expression], results: Sequence[str] = ()) -> None:
        """Open the loops over packs and over a pack's elements: load what ``values`` need, and
        declare ``results``."""
        running = [one for one in walk(values, self.known) if isinstance(one, Scanned)]
        for one in running:
            name = self.running[one] = self.unique(f"{self.names[self.plan.value_names[one]]}_run")
            kind = f"{CUDA_REDUCTIONS[one.function]}, {_TYPES[one.kind]}, Tile"
            self.write(f"Running<{kind}> {name};")
        # With a running reduction, the lanes of a row go from pack to pack together.
        turns = "tile.turns()" if self.plan.scans else "tile.packs()"
        self.open(f"for (int k = 0; k < {turns}; ++k) {{", "Tile::unrolled")
        self.write("const auto pack = tile.pack(k);")
        for read in walk(values, self.known):
            if isinstance(read, (Load, Position)) and not children(read):
                name = self.names[self.plan.value_names[read]]
                given = f"{name}_tile.at(pack)"
                if isinstance(read, Position):
                    given = f"positions_at({self.strides(self.operand(read))}, pack)"
                self.write(f"const auto {name}_pack = {given};")
        for one in running:
            self.scan(one)
        for result in results:
            self.write(result)
        self.open("for (int i = 0; i < Tile::width; ++i) {")
        if any(text.endswith("[r]") for text in self.texts_in(values)):
            self.write("const int r = Tile::row_of(i);")

    def scan(self, one: Scanned) -> None:
        """Write the loop that hands the terms of a pack to a running reduction, which then has its
        value at each element."""
        name = self.running[one]
        self.open("for (int i = 0; i < Tile::width; ++i) {")
        if any(text.endswith("[r]") for text in self.texts_in([one.operand])):
            self.write("const int r = Tile::row_of(i);")
        outer = dict(self.known)
        self.define([one.operand])
        self.write(f"if (pack.has(i)) {name}.set(i, {self.converted(one.operand, one.kind)});")
        self.known = {**outer, one: f"{name}[i]"}
        self.close()
        self.write(f"{name}.advance();")

    def texts_in(self, values: Sequence[Expression]) -> Iterator[str]:
        """Yield the texts of the known values that ``values`` are computed from."""
        stack, seen = list(values), set()
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self.known:
                yield self.known[one]
            else:
                stack += children(one)

    def store_elements(self, stored: Sequence[Operand]) -> None:
        """Write the loop over packs that stores the results of elements."""
        values = [(one, self.plan.stores[one.node]) for one in stored if one.node is not None]
        outer = dict(self.known)
        packs = [
            f"Pack<typename {self.types[one.name]}::type, Tile::width> {self.names[one.name]}_pack;"
            for one in stored
        ]
        self.open_packs([value for _, value in values], packs)
        self.define([value for _, value in values])
        for one, value in values:
            assert one.node is not None
            name, text = self.names[one.name], self.converted(value, one.node.kind)
            if not _is_atom(text):
                self.write(f"const {_TYPES[one.node.kind]} {name} = {text};")
                text = name
            self.write(f"assign({name}_pack.element[i], {text});")
        self.close()
        for one in stored:
            name, operand = self.names[one.name], self.types[one.name]
            place = f"{name}_pointer, {self.strides(one)}"
            self.write(f"store_at<{operand}>({place}, pack, {name}_pack);")
        self.close()
        self.known = outer

    def define_rows(self, values: Sequence[Expression], stored: Sequence[Operand] = ()) -> None:
        """Write the loop over a thread's rows that computes what ``values`` need of their row, and
        stores the results of rows."""
        wanted = self.of_row(values)
        kept: dict[Expression, None] = {}
        lines, self.lines = self.lines, []
        self.indent += 1
        roots = [*wanted, *(self.plan.stores[one.node] for one in stored if one.node is not None)]
        for one in walk(roots, self.known):
            if isinstance(one, (Load, Position)) or (
                isinstance(one, Apply) and (one in self.plan.value_names or one in wanted)
            ):
                text = self.row_text(one)
                self.known[one] = f"{self.row_name(one)}[r]"
                kept[one] = None
                self.write(f"{self.known[one]} = {text};")
        for operand in stored:
            self.store_row(operand)
        self.indent -= 1
        body, self.lines = self.lines, lines
        if not body:
            return
        for one in kept:
            self.write(f"{_TYPES[element_kind(one)]} {self.known[one][:-3]}[Tile::rows];")
        self.open("for (int r = 0; r < Tile::rows; ++r) {")
        self.lines += body
        self.close()

    def of_row(self, values: Sequence[Expression]) -> dict[Expression, None]:
        """Return the largest parts of ``values`` that are the same for all columns of a row."""
        found: dict[Expression, None] = {}
        seen: set[Expression] = set()

        def visit(one: Expression) -> None:
            if one in self.known or one in seen or isinstance(one, (Constant, Size)):
                return
            seen.add(one)
            if self.plan.axes_of(one) & self.columns:
                for child in children(one):
                    visit(child)
            else:
                found[one] = None

        for one in values:
            visit(one)
        return found

    def row_text(self, one: Load | Position | Apply) -> str:
        if isinstance(one, Apply):
            return self.formula(one)
        operand = self.operand(one)
        offset = f"tile.row_offset({self.strides(operand)}, r)"
        if isinstance(one, Position):
            return offset
        offset = self.chosen_offset(operand, offset)
        return _read(one, f"{self.names[operand.name]}_pointer[{offset}]")

    def row_name(self, one: Load | Position | Apply) -> str:
        if one in self.plan.value_names:
            return self.names[self.plan.value_names[one]]
        assert isinstance(one, Apply)
        return self.unique(f"{one.function}_of_row")

    def store_row(self, operand: Operand) -> None:
        assert operand.node is not None
        name, kind = self.names[operand.name], operand.node.kind
        value = self.converted(self.plan.stores[operand.node], kind)
        if not _is_atom(value):
            self.write(f"const {_TYPES[kind]} {name} = {value};")
            value = name
        place = f"{name}_pointer[tile.row_offset({self.strides(operand)}, r)]"
        self.write(f"if (tile.owns_row(r)) assign({place}, {value});")

    # --- values

    def operand(self, one: Load | Position) -> Operand:
        name = self.plan.value_names[one]
        return next(operand for operand in self.plan.loads if operand.name == name)

    def define(self, values: Sequence[Expression]) -> None:
        """Write the statements after which each of ``values`` has a text."""
        for one in walk(values, self.known):
            if isinstance(one, (Load, Position)):
                name = self.names[self.plan.value_names[one]]
                text = f"{name}_pack.element[i]"
                if isinstance(one, Load):
                    text = self.chosen_element(one) if children(one) else _read(one, text)
            elif isinstance(one, Apply) and one in self.plan.value_names:
                name, text = self.names[self.plan.value_names[one]], self.formula(one)
            else:
                continue
            self.write(f"const {_TYPES[element_kind(one)]} {name} = {text};")
            self.known[one] = name

    def chosen_element(self, one: Load) -> str:
        """Return the text of an element of a pack at a position that the kernel computes, or of
        any element for one that does not exist."""
        operand = self.operand(one)
        offset = f"pack.element_offset({self.strides(operand)}, i)"
        element = f"{self.names[operand.name]}_pointer[{self.chosen_offset(operand, offset)}]"
        zero = f"{_TYPES[one.tensor.kind]}(0)"
        return f"pack.has(i) ? {_read(one, element)} : {zero}"

    def chosen_offset(self, operand: Operand, offset: str) -> str:
        """Return the text of an operand's offset with the positions that the kernel computes."""
        terms = []
        for value, step in operand.chosen:
            text = self.converted(value, "int")
            text = text if _is_atom(text) else f"({text})"
            terms.append(f"{text} * {self.names[step]}")
        return " + ".join((offset, *terms))

    def value(self, one: Expression) -> str:
        """Return the text of a value; ``define`` has written what it needs."""
        if one in self.known:
            return self.known[one]
        if isinstance(one, Constant):
            return _constant(one.value)
        if isinstance(one, Size):
            named = self.plan.numbers.get(one) or self.plan.value_names.get(one)
            if named is None:
                return str(one.size)
            return self.names.get(named, named)
        assert isinstance(one, Apply), one
        return self.formula(one)

    def converted(self, one: Expression, kind: Kind) -> str:
        """Return the text of a value as one of ``kind``."""
        return _converted(self.value(one), element_kind(one), kind)

    def formula(self, one: Apply) -> str:
        template = CUDA[one.function]
        operands = one.operands
        exponent = operands[1] if one.function == "pow" else None
        if isinstance(exponent, Constant) and one.kind == "float" and exponent.value in CUDA_POWERS:
            template, operands = CUDA_POWERS[exponent.value], operands[:1]
        if one.function == "abs" and one.kind == "int":
            template = "llabs({0})"
        texts = self.operand_texts(one, operands)
        inside = {int(found[1]) for found in _INSIDE.finditer(template)}
        return template.format(
            *(
                text if place in inside or _is_atom(text) or template == "{0}" else f"({text})"
                for place, text in enumerate(texts)
            )
        )

    def operand_texts(self, one: Apply, operands: Sequence[Expression]) -> list[str]:
        """Return the texts of operands, converted where C++ would compute in another type."""
        kinds = [element_kind(operand) for operand in operands]
        plain = [self.value(operand) for operand in operands]

        def converted(kind: Kind) -> list[str]:  # of the texts above: each is written once
            pairs = zip(plain, kinds, strict=True)
            return [_converted(text, own, kind) for text, own in pairs]

        if one.function == "kept":
            return [*plain[:2], *word_texts(operands[2:])]
        if one.function.startswith("to_") or one.function == "not":
            return plain
        if one.function == "where":
            return [plain[0], *converted(one.kind)[1:]]
        if one.function in _COMPARISONS:
            if all(isinstance(operand, (Constant, Size)) for operand in operands):
                return converted("float")
            return plain
        if one.function in _BITWISE or one.kind == "bool":
            return converted(one.kind)
        if one.function in _OPERATORS and one.kind in kinds:
            return plain  # C++ converts the other operand
        texts = converted(one.kind)
        if one.kind == "int":  # a template takes operands of one type
            return [
                f"int64_t({text})" if isinstance(operand, Constant) else text
                for operand, text in zip(operands, texts, strict=True)
            ]
        return texts


def _converted(text: str, own: Kind, kind: Kind) -> str:
    """Return the text of a value of the kind ``own`` as one of ``kind``."""
    if own == kind:
        return text
    if kind == "bool":
        return f"{text if _is_atom(text) else f'({text})'} != 0"
    return f"{_TYPES[kind]}({text})"


def _wanted(plan: KernelPlan) -> Iterator[str]:
    """Yield the names of the operands, numbers and values of a kernel."""
    for operand in plan.operands:
        yield operand.name
    yield from plan.numbers.values()
    yield from plan.steps
    for name in plan.value_names.values():
        if name != "columns":
            yield name


def _class_name(name: str) -> str:
    """Return ``grad_output`` as ``GradOutput``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) or "Operand"


def _read(one: Load, element: str) -> str:
    """Return the text of a loaded element in the type of the arithmetic."""
    if one.tensor.kind == "float":
        return f"widened<Real>({element})"
    return f"{element} != 0" if one.tensor.kind == "bool" else f"int64_t({element})"


def _constant(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}ll" if abs(value) >= 2**31 else str(value)
    if value != value:
        return "not_a_number<Real>()"
    if value in (float("inf"), float("-inf")):
        return f"{'-' * (value < 0)}infinity<Real>()"
    return f"Real({value!r})"


def _is_atom(text: str) -> bool:
    """Return whether a text is a name, a number, a call or an element of an array."""
    if not re.match(r"[\w.]", text):
        return False
    depth = 0
    for place, letter in enumerate(text):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
            if depth == 0 and place + 1 < len(text):
                return False
        elif depth == 0 and not re.match(r"[\w.<>:]", letter):
            return False
    return True


def _wrapped(line: str, more: int) -> list[str]:
    """Return a line of C++, broken at spaces where it is longer than 100 columns."""
    if len(line) <= 100 or line.startswith("#"):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.strip(),
        100,
        initial_indent=indent,
        subsequent_indent=indent + " " * more,
        break_long_words=False,
        break_on_hyphens=False,
    )
