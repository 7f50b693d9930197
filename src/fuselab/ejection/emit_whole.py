"""Triton source of a whole function: one kernel, whose programs own rows (``whole.py``)."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, replace

import sympy

from fuselab.ejection.emit_triton import imports
from fuselab.ejection.fold import fold
from fuselab.ejection.functions import TRITON_REDUCTIONS
from fuselab.ejection.held import Held
from fuselab.ejection.kernels import product
from fuselab.ejection.loops import Expression, Input, Load, Node, Position, Reduced, Scanned, Size
from fuselab.ejection.plan import Namer
from fuselab.ejection.stored import memory_of
from fuselab.ejection.triton_functions import BITS_OF_POSITIONS, Function, cast_of
from fuselab.ejection.triton_text import listed
from fuselab.ejection.whole import Product, Tile, Whole, place_of, start_of, weight_load

_FUNCTIONS = ("load_weight", "multiply")
_CHOSEN = ("COMPUTE", "ROUNDED", "PRECISION", "WIDE", "BLOCK_ROWS", "BLOCK")


@dataclass(frozen=True)
class Operand:
    """A tensor that the kernel reads or writes: its name, its text in the launcher, and its
    dimensions as ``whole.place_of`` has them; ``steps`` are the names of the strides of those that
    are columns."""

    name: str
    text: str
    dims: tuple[str, ...]
    steps: tuple[str, ...]

    @property
    def is_on_rows(self) -> bool:
        return any(not one.startswith(("?", "1")) for one in self.dims)

    @property
    def pattern(self) -> str:
        """The dimensions as ``runtime.sweep.Sweep`` takes them."""
        return " ".join("?" if one.startswith("?") else one for one in self.dims)


class WholeKernel:
    """The text of the kernel, and what its launcher has to know."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        package = whole.package
        self.read: list[Operand] = []
        self.written: list[Operand] = []
        self.padded: list[str] = []  # the columns of which a program holds all
        # of each product the name of what it sums over, with whether it does so by parts, and that
        # of its columns, likewise
        self.products: list[tuple[tuple[str, bool], tuple[str, bool]]] = []
        held: dict[Node, str] = {one: one.name for one in package.program.inputs}
        self.held = Held(package.sizes, held)
        taken = [*package.names.values(), *package.sizes.names.values(), *whole.rows]
        taken += package.parameters
        taken += [name for plan in package.forward for name in plan.value_names.values()]
        columns = whole.columns.values()
        # the kernel's own names, which no tensor may have
        self.reserved = {*Namer().taken, *_FUNCTIONS, "is_part", *columns}
        self.reserved |= {place for one in columns for place in (_at(one), _is(one), _part(one))}
        self.namer = Namer([*taken, *self.reserved])
        self.lines: list[str] = []
        self.indent = 1
        self.done: dict[object, str] = {}  # tiles and products in registers, by their names
        self.stages: dict[int, _Stage] = {}
        for node in package.program.outputs:
            self._store(node)

    # --- the frame

    def source(self) -> str:
        """Return the text of ``triton_kernels.py``."""
        body = "\n".join(self.lines)
        text = "\n".join([*self._head(), body])
        own = f"from fuselab.runtime.triton_chain import {', '.join(_FUNCTIONS)}"
        title = f"{self.whole.name} in Triton, ejected from the PyTorch code in reference.py."
        lines = [f'"""{title}"""', "", *imports(text, [own]), "", "", text]
        return "\n".join(lines) + "\n"

    def _head(self) -> list[str]:
        strides = [f"{one.name}_row_strides" for one in self.operands if one.is_on_rows]
        steps = [step for one in self.operands for step in one.steps]
        chosen = [*_CHOSEN, *(_padded(name) for name in self.padded)]
        rows = ", ".join(self.whole.rows)
        results = ", ".join(one.name for one in self.written)
        wide = ", ".join(self.padded) or "none"
        doc = (
            f"Compute {results}. A program owns BLOCK_ROWS rows ({rows}) from the first line to "
            f"the last, and holds all of their columns ({wide}); what a product sums over, and "
            "nothing else reads, it computes BLOCK columns at a time."
        )
        text = textwrap.fill(doc, 96, initial_indent='    """', subsequent_indent="    ")
        return [
            "@triton.jit",
            f"def {self.kernel_name}(",
            "    # read",
            *listed([f"{one.name}_pointer" for one in self.read]),
            "    # written",
            *listed([f"{one.name}_pointer" for one in self.written]),
            "    # the numbers of columns; the sizes of the loops over rows, what divides by them,",
            "    # the strides of each tensor in them, and those of its columns",
            *listed([*self.columns, "row_sizes", "row_divisors", *strides, *steps]),
            "    # chosen by the launcher",
            *listed([f"{name}: tl.constexpr" for name in chosen]),
            "):  # fmt: skip",
            f'{text}"""',
            *(f"    {line}" for line in BITS_OF_POSITIONS if self._uses_positions()),
            "    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, False, WIDE)",
            *(line for name in self.padded for line in _positions(name)),
        ]

    def _uses_positions(self) -> bool:
        return any(re.search(r"\bINDEX\b", line) for line in self.lines)

    @property
    def kernel_name(self) -> str:
        return f"{self.whole.name}_kernel"

    @property
    def columns(self) -> list[str]:
        """The names of the numbers of columns that the kernel takes."""
        text = "\n".join(self.lines)
        names = dict.fromkeys(self.whole.columns.values())
        return [one for one in names if one in self.padded or re.search(rf"\b{one}\b", text)]

    @property
    def operands(self) -> list[Operand]:
        return [*self.read, *self.written]

    def write(self, line: str) -> None:
        self.lines += fold("    " * self.indent + line)

    # --- tensors

    def operand(
        self, text: str, dims: tuple[str, ...], wanted: str, otherwise: str = ""
    ) -> Operand:
        """Return the operand that is a tensor with these dimensions, the same for the same: by the
        name ``wanted``, or ``otherwise`` where that is another's."""
        for one in self.read:
            if one.text == text and one.dims == dims:
                return one
        if any(one.name == wanted for one in self.read):
            wanted = otherwise or self.namer.name(wanted)
        self.read.append(self._named(wanted, text, dims))
        return self.read[-1]

    def _named(self, name: str, text: str, dims: tuple[str, ...]) -> Operand:
        """Return an operand with names of its strides along columns; of the two of a weight, the
        first is that of what a product sums over."""
        count = sum(one.startswith("?") for one in dims)
        wanted = [f"{name}_depth_step", f"{name}_step"][-count:] if count else []
        return Operand(name, text, dims, tuple(map(self.namer.name, wanted)))

    def address(self, operand: Operand, place: str) -> str:
        """Return the text of the addresses of an operand; ``place`` is that of its columns."""
        parts = [f"{operand.name}_pointer"]
        if operand.is_on_rows:
            parts.append(f"offset(row, {operand.name}_row_strides)")
        parts += [f"{place} * {step}" for step in operand.steps]
        return " + ".join(parts)

    # --- tiles

    def _store(self, node: Node) -> None:
        tile = self.whole.tiles[node]
        name = self.full(tile)
        operand = self._named(tile.name, name, self._dims(tile))
        self.written.append(operand)
        column, exists = "", "is_row"
        if tile.is_of_columns:
            own = self.held_columns(product(tile.columns))
            column, exists = _at(own), f"is_row & {_is(own)}"
        value = f"{name}.to({operand.name}_pointer.dtype.element_ty)"
        self.write(f"tl.store({self.address(operand, column)}, {value}, {exists})")

    def _dims(self, tile: Tile) -> tuple[str, ...]:
        index = next(one.index for one in tile.plan.kernel.members if one.node is tile.node)
        load = Load(tile.node, index[: len(tile.node.sizes)])
        return place_of(self.whole, tile, load)

    def held_columns(self, size: sympy.Expr) -> str:
        """Return the name of a number of columns, all of which a program then holds."""
        name = self.whole.column_of(size)
        if name not in self.padded:
            self.padded.append(name)
        return name

    def full(self, tile: Tile) -> str:
        """Write the computation of all columns of a tile, once, and return its name."""
        if tile.node in self.done:
            return self.done[tile.node]
        stage = self.stages.get(id(tile.plan))
        if stage is None:
            column = self.held_columns(product(tile.columns)) if tile.columns else ""
            stage = self.stages[id(tile.plan)] = _Stage(self, tile, column)
        for load in tile.loads:
            self._source(load, stage)
        self.done[tile.node] = stage.named_value(tile.value, tile.name)
        return self.done[tile.node]

    def _source(self, load: Load, stage: _Stage) -> None:
        """Write what a tile is computed from, and make its name known to the stage."""
        memory = memory_of(load.tensor)
        if isinstance(memory, Product):
            stage.known[load] = self.product(memory, load.tensor, stage.plan.value_names[load])
        elif memory in self.whole.tiles:
            stage.known[load] = self.full(self.whole.tiles[memory])

    def product(self, one: Product, window: Node, name: str) -> str:
        """Write a product, or the ``window`` of its columns, as ``name``; return the name that it
        has, which another stage may have given."""
        key = one, start_of(window), window.sizes[-1]
        if key in self.done:
            return self.done[key]
        tile = self.whole.tiles[one.factor]
        column = self.held_columns(window.sizes[-1])
        weight = self.weight(one, window)
        depth = self.whole.column_of(one.depth)
        place = f"{_at(column)}, {_is(column)}"
        if self.whole.streams(tile):
            self._stream(name, tile, weight, depth, column)
        else:
            values = self.full(tile)
            self.products.append(((depth, False), (column, False)))
            loaded = self.weight_text(weight, "0", depth, place, _padded(depth))
            self.write(f"{name} = multiply({values}, is_{depth}, {loaded}, PRECISION)")
        self._of_single_column(name, window)
        self.done[key] = name
        return name

    def _of_single_column(self, name: str, window: Node) -> None:
        """Take the only column of a product that has one; those that pad it are zeros."""
        if window.sizes[-1] == 1:
            self.write(f"{name} = of_rows(tl.sum({name}, 1))")

    def _stream(self, name: str, tile: Tile, weight: Operand, depth: str, column: str) -> None:
        """Write the loop in which a product sums over the columns of a tile, some at a time."""
        for memory in dict.fromkeys(memory_of(load.tensor) for load in tile.loads):
            if isinstance(memory, Product):
                self.full(self.whole.tiles[memory.factor])
            elif memory in self.whole.tiles:
                self.full(self.whole.tiles[memory])
        self.products.append(((depth, True), (column, False)))
        self.write(f"{name} = tl.zeros((BLOCK_ROWS, {_padded(column)}), tl.float32)")
        self.write(f"for first in range(0, {depth}, BLOCK):")
        self.indent += 1
        part = _part(depth)
        self.write(f"{part} = first + tl.arange(0, BLOCK)[None, :]")
        self.write(f"is_part = {part} < {depth}")
        stage = _Stage(self, self._apart(tile), depth, is_part=True)
        for load in tile.loads:
            memory = memory_of(load.tensor)
            if isinstance(memory, Product):
                stage.known[load] = self._part_of(memory, load, stage)
            elif memory in self.whole.tiles:
                stage.known[load] = self.done[memory]
        values = stage.named_value(tile.value, tile.name)
        place = f"{_at(column)}, {_is(column)}"
        loaded = self.weight_text(weight, "first", depth, place, "BLOCK")
        self.write(f"{name} += multiply({values}, is_part, {loaded}, PRECISION)")
        self.indent -= 1

    def _apart(self, tile: Tile) -> Tile:
        """Return a tile of which parts are computed, with names of its own for the values that it
        shares with other tiles of its kernel, which keep theirs across the loop."""
        if len(tile.plan.stores) == 1:
            return tile
        names = {
            one: self.namer.name(f"{name}_part") for one, name in tile.plan.value_names.items()
        }
        return replace(tile, plan=replace(tile.plan, value_names=names))

    def _part_of(self, one: Product, load: Load, stage: _Stage) -> str:
        """Write the part of a product whose columns are summed over, and return its name."""
        name, place = stage.plan.value_names[load], f"{stage.position}, {stage.exists}"
        values = self.done[one.factor]
        weight = self.weight(one, load.tensor)
        depth = self.whole.column_of(one.depth)
        self.products.append(((depth, False), (stage.column, True)))
        loaded = self.weight_text(weight, "0", depth, place, _padded(depth))
        self.write(f"{name} = multiply({values}, is_{depth}, {loaded}, PRECISION)")
        self._of_single_column(name, load.tensor)
        return name

    def weight(self, one: Product, window: Node) -> Operand:
        """Return the operand that is the weight of a product, or the part of it that gives a window
        of the product's columns."""
        load, depth, across = weight_load(self.whole, one)
        names = {
            entry: f"?{self.whole.column_of(size)}"
            for entry, size in ((depth, one.depth), (across, window.sizes[-1]))
        }
        dims = tuple(names[entry] if entry else "1" for entry in load.index)
        # its depth first, as the kernel's function takes the strides
        swapped = depth in load.index and across in load.index
        swapped = swapped and load.index.index(across) < load.index.index(depth)
        text = self.held.text(load.tensor)
        if window is not one:
            place = load.index.index(across)
            ends = map(self.whole.package.sizes.text, (start_of(window), window.sizes[-1]))
            text += f".narrow({place}, {', '.join(ends)})"
        if swapped:
            text, dims = f"{text}.mT", (*dims[:-2], dims[-1], dims[-2])
        return self.operand(text, dims, memory_of(load.tensor).name)

    def weight_text(self, weight: Operand, first: str, depth: str, place: str, block: str) -> str:
        """Return the call that loads a block of a weight, from its row ``first`` on."""
        strides = iter(weight.steps)
        steps = [next(strides) if one.startswith("?") else "0" for one in weight.dims[-2:]]
        steps = ["0"] * (2 - len(steps)) + steps
        given = f"{weight.name}_pointer, {first}, {depth}, {steps[0]}, {place}, {steps[1]}"
        return f"load_weight({given}, {block}, WIDE)"


def _padded(name: str) -> str:
    """Return the name of a number of columns padded to a power of two."""
    return f"PADDED_{name.upper()}"


def _at(name: str) -> str:
    """Return the name of the positions along all columns."""
    return f"in_{name}"


def _is(name: str) -> str:
    """Return the name of which of the padded columns exist."""
    return f"is_{name}"


def _part(name: str) -> str:
    """Return the name of the positions along a part of the columns."""
    return f"part_of_{name}"


def _positions(name: str) -> list[str]:
    return [
        f"    {_at(name)} = tl.arange(0, {_padded(name)})[None, :]",
        f"    {_is(name)} = {_at(name)} < {name}",
    ]


class _Stage(Function):
    """The arithmetic between two products: writes the values of tiles into the kernel's text."""

    constants = ()

    def __init__(self, kernel: WholeKernel, tile: Tile, column: str, is_part: bool = False) -> None:
        super().__init__(tile.plan)
        self.kernel = kernel
        self.tile = tile
        self.column = column
        self.is_part = is_part
        self.namer = kernel.namer

    def write(self, line: str) -> None:
        self.kernel.write(line)

    @property
    def position(self) -> str:
        return _part(self.column) if self.is_part else _at(self.column)

    @property
    def exists(self) -> str:
        return "is_part" if self.is_part else _is(self.column)

    def named_value(self, value: Expression, name: str) -> str:
        """Write a value, and return the name that holds it."""
        self.define([value])
        text = self.value(value)
        if text == name or (text.isidentifier() and text in self.known.values()):
            return text
        self.write(f"{name} = {text}")
        self.known[value] = name
        return name

    def load(self, one: Load | Position) -> None:
        if isinstance(one, Position):
            self.known[one] = self.position
            return
        kernel = self.kernel
        wanted, own = one.tensor.name, self.plan.value_names[one]
        if not isinstance(one.tensor, Input) or wanted in kernel.reserved:
            wanted = own
        dims = place_of(kernel.whole, self.tile, one)
        operand = kernel.operand(kernel.held.text(one.tensor), dims, wanted, own)
        if operand in kernel.done and not self.is_part:
            self.known[one] = kernel.done[operand]
            return
        # a part has a name of its own: all columns, under the operand's, are read behind the loop
        name = own if self.is_part else operand.name
        address = kernel.address(operand, self.position)
        if operand.is_on_rows and not operand.steps:
            text = f"load_rows({address}, is_row)"
        elif operand.is_on_rows or operand.steps:
            text = f"load({address}, is_row, {self.exists})"
        else:
            text = f"tl.load({address})"
        self.write(f"{name} = {text}{cast_of(one)}")
        self.known[one] = name
        if not self.is_part:
            kernel.done[operand] = name

    def reduce(self, one: Reduced) -> None:
        """Write a reduction over the columns of all rows of the program."""
        name = self.plan.value_names[one]
        _, total = TRITON_REDUCTIONS[one.function]
        self.write(f"{name} = of_rows({total.format(self.term(one))})")
        self.known[one] = name

    def scan(self, one: Scanned) -> None:
        raise AssertionError("planned_whole refuses running reductions")

    def value(self, one: Expression) -> str:
        if isinstance(one, Size):
            return self.kernel.whole.column_of(one.size)
        return super().value(one)
