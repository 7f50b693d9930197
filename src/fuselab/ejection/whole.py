"""Plan a function with small matrix products as one kernel, whose programs own rows.

Every product is one of rows with a weight. A tensor of rows lives in the registers of the program
that owns them, as a *tile*: all rows of the program, and all columns. Tiles are what the kernels of
``kernels.py`` would store for a product, or return; between two products stands one such kernel,
whose loads of tiles are no loads at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fuselab.ejection.calls import at_line
from fuselab.ejection.capture import user_name
from fuselab.ejection.graph_nodes import FxNode
from fuselab.ejection.kernels import Binding, Evaluation, equal, product
from fuselab.ejection.loops import (
    Axis,
    Call,
    Expression,
    Index,
    Input,
    Load,
    Node,
    Pointwise,
    Position,
    Reduced,
    Scanned,
    Size,
    Window,
    chosen_in,
    walk,
)
from fuselab.ejection.lower import Lowering, lower
from fuselab.ejection.package import (
    Package,
    captured_both_ways,
    each_of_its_own,
    in_running_order,
    names_between,
)
from fuselab.ejection.plan import KernelPlan, Sizes, planned
from fuselab.ejection.row_functions import scheduled
from fuselab.ejection.stored import memory_of
from fuselab.errors import EjectError
from fuselab.runtime.chain import MOST_COLUMNS

# Names that the kernel has beside those of ``plan.py``, some for each number of columns.
_RESERVED = ("is_part", "load_weight", "multiply")
_OF_COLUMNS = ("in_", "is_", "part_of_")
_VIEWS = frozenset(("alias", "detach", "expand", "permute", "select", "slice", "squeeze"))
_VIEWS |= {"t", "transpose", "unsqueeze", "view", "_unsafe_view", "clone", "contiguous"}


@dataclass(frozen=True, eq=False)
class Product(Call):
    """A matrix product of rows, ``operands``, with ``weight``, an argument or a view of one."""

    weight: Node = None  # type: ignore[assignment]

    @property
    def factor(self) -> Node:
        """The tensor of rows."""
        return self.operands[0]  # type: ignore[return-value]

    @property
    def depth(self) -> sympy.Expr:
        """The number of elements that each result is a sum of."""
        return self.weight.sizes[-2]


@dataclass(frozen=True)
class Tile:
    """A tensor of rows that a program computes: the plan of the kernel that would store it, and the
    axes of this kernel that are rows and columns. ``is_of_columns`` says whether the tensor has an
    element for each column, or one for a row."""

    node: Node
    plan: KernelPlan
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    is_of_columns: bool = True

    @property
    def name(self) -> str:
        """The tensor's name in the kernel."""
        return next(one.name for one in self.plan.stored if one.node is self.node)

    @property
    def value(self) -> Expression:
        return self.plan.stores[self.node]

    @property
    def loads(self) -> list[Load]:
        return [one for one in walk([self.value]) if isinstance(one, Load)]

    @property
    def reduces(self) -> bool:
        """Whether the value needs a reduction over the columns."""
        return any(isinstance(one, Reduced) for one in walk([self.value]))


@dataclass(frozen=True)
class Whole:
    """A function as one kernel: the package with its reference, and the tiles by their nodes.

    ``rows`` are the sizes of the loops over rows by name, outermost first, and ``row_names`` has
    the names of the loops that each row axis of a tile is. ``columns`` has the name of each number
    of columns, and of other sizes that the kernel computes with, by its text. ``float32_of`` has
    for each kind of device the dtypes of arguments from which ``torch.autocast`` makes a float32
    result.
    """

    package: Package
    tiles: Mapping[Node, Tile]
    rows: Mapping[str, str]
    row_names: Mapping[Axis, str]
    columns: Mapping[str, str]
    float32_of: Mapping[str, Sequence[torch.dtype]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.package.name

    def describe(self) -> dict[str, Any]:
        """Return the facts for JSON: the kernel's rows, what it reads and writes, its products."""
        return {
            "name": self.name,
            "rows": list(self.rows),
            "reads": list(self.package.parameters),
            "writes": list(self.package.output_names),
            "products": [one.name for one in self.products],
        }

    def column_of(self, size: sympy.Expr) -> str:
        """Return the name of a number of columns."""
        return self.columns[self.package.sizes.text(size)]

    @property
    def products(self) -> list[Product]:
        """The products that tiles are computed from."""
        found = (memory_of(load.tensor) for tile in self.tiles.values() for load in tile.loads)
        return list(dict.fromkeys(one for one in found if isinstance(one, Product)))

    def consumers(self, node: Node) -> set[Node]:
        """Return the tiles and products that are computed from a tile or a product, and the node
        itself if the function returns it."""
        found: set[Node] = {
            tile.node
            for tile in self.tiles.values()
            if any(memory_of(load.tensor) is node for load in tile.loads)
        }
        found |= {one for one in self.products if one.factor is node}
        return found | ({node} & set(self.package.program.outputs))

    def streams(self, tile: Tile) -> bool:
        """Return whether a tile can be computed some columns at a time, each part for the one
        product that reads it."""
        held = [memory_of(load.tensor) for load in tile.loads]
        others = [self.tiles[one] for one in held if one in self.tiles]
        return (
            not tile.reduces
            and len(self.consumers(tile.node)) == 1
            and tile.node not in self.package.program.outputs
            and all(len(self.consumers(one)) == 1 for one in held if isinstance(one, Product))
            and tile.is_of_columns
            and not any(one.is_of_columns for one in others)
        )


class _WithProducts(Lowering):
    """Lower products of rows with a weight as well."""

    def op_mm(self, node: FxNode) -> Node:
        rows, weight = self.known[node.args[0]], self.known[node.args[1]]
        if _argument_behind(node.args[1]) is None:
            self.refuse_product(node, "the weight of a product is computed")
        if isinstance(memory_of(rows), (Input, Call)):
            rows = Pointwise(rows.name, rows.sizes, rows.kind, "", False, "same", (rows,))
        common = {**self.common(node), "name": user_name(node)}
        return Product(**common, operator="{0} @ weight", operands=(rows,), weight=weight)

    # As matmul computes tensors of three and more dimensions whose rows are no single loop: with a
    # weight that is repeated for each batch.
    op_bmm = op_mm

    def refuse(self, node: FxNode) -> Any:
        self.refuse_product(node, f"{node.target} is none of its operations")

    def refuse_product(self, node: FxNode, why: str) -> Any:
        raise _refused(f"{why}{at_line(node)}")


def _argument_behind(node: fx.Node) -> fx.Node | None:
    """Return the argument that a node is a view of, in the same dtype, or None."""
    while node.op == "call_function":
        name = str(getattr(node.target, "__name__", "")).partition(".")[0]
        if name not in _VIEWS or not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node if isinstance(node.meta.get("val"), Tensor) else None


def _refused(why: str) -> EjectError:
    return EjectError(
        f"one kernel of the whole needs all values to belong to a row, and {why}; without --whole "
        "the function is cut into several."
    )


def planned_whole(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
) -> Whole:
    """Capture ``function`` with example arguments and plan it as one kernel, without a gradient.

    Raises EjectError where something in it does not belong to a row.
    """
    captured, formulas = captured_both_ways(
        function, args, keywords, name, inference=True, products=True
    )
    if captured.written or captured.seed is not None:
        what = "drops elements by a seed" if captured.seed else "writes over an argument"
        raise _refused(f"{name} {what}")
    sizes = Sizes(captured)
    taken = {"compute", "name", "torch", "Tensor", name, *_RESERVED}
    taken |= {f"{prefix}{size}" for prefix in _OF_COLUMNS for size in sizes.names.values()}
    taken |= {argument.name for argument in captured.arguments} | set(sizes.names.values())
    outputs = formulas.returned.names(taken)
    program = each_of_its_own(lower(captured, (), _WithProducts), outputs, captured)
    names: dict[Node, str] = dict(zip(program.outputs, outputs, strict=True))
    kernels = in_running_order(scheduled(program.outputs, captured.hints))
    found = [memory_of(load.tensor) for kernel in kernels for load in kernel.loads()]
    products = list(dict.fromkeys(one for one in found if isinstance(one, Product)))
    if not products:
        raise _refused(f"{name} has no product of rows with a weight")
    needed: list[Node] = [*program.outputs, *(one.factor for one in products)]
    needed += [one for one in found if not isinstance(one, (Input, Product))]
    needed = list(dict.fromkeys(needed))
    nodes: list[Node] = [*needed, *products]
    names |= names_between({*nodes}, nodes, names, captured, sizes)
    plans: list[KernelPlan] = []
    free = {names[one] for one in nodes}  # each is given to what it stands for
    used = [one for one in (*names.values(), *sizes.names.values(), *taken) if one not in free]
    for kernel in kernels:
        stores = [one.node for one in kernel.members if one.node in needed]
        own = {names[one] for one in stores}
        others = {names[one] for one in needed} - own
        plan = planned(name, kernel, stores, sizes, names, taken=[*used, *others])
        plans.append(plan)
        used += [*plan.value_names.values(), *(one.name for one in plan.operands)]
    package = Package(
        captured,
        formulas,
        program,
        sizes,
        tuple(plans),
        (),
        (),
        (),
        names,
        outputs,
        frozenset(),
        (),
    )
    float32_of = {
        kind: [
            dtype
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            if _widens_in_autocast(function, args, keywords, kind, dtype)
        ]
        for kind in ("cpu", "cuda")
    }
    return replace(_laid_out(package, products), float32_of=float32_of)


def _widens_in_autocast(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    kind: str,
    dtype: torch.dtype,
) -> bool:
    """Return whether a result is float32 within ``torch.autocast`` on a kind of device, which need
    not be there, for arguments of a dtype; False where PyTorch cannot tell without the device."""
    low = torch.bfloat16 if dtype == torch.float32 else dtype

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=own, device=kind)

    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with FakeTensorMode(), torch.no_grad():
        given, named = pytree.tree_map(fake, (tuple(args), dict(keywords)))
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, low)
        torch.autocast_increment_nesting()
        try:
            if isinstance(function, nn.Module):
                held = {**dict(function.named_parameters()), **dict(function.named_buffers())}
                made = pytree.tree_map(fake, held)
                found = torch.func.functional_call(function, made, given, named)
            else:
                found = function(*given, **named)
        except RuntimeError:  # as matmul of a slice, which asks the driver
            return False
        finally:
            torch.autocast_decrement_nesting()
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])
    return any(
        isinstance(one, Tensor) and one.dtype == torch.float32 for one in pytree.tree_leaves(found)
    )


def _laid_out(package: Package, products: Sequence[Product]) -> Whole:
    """Return the whole with the rows and the columns of its tiles. Raises EjectError."""
    binding = Binding(package.captured.hints, {})
    count = sympy.prod(products[0].sizes[:-1])
    for one in products:
        if not equal(sympy.prod(one.sizes[:-1]), count, binding):
            raise _refused(f"{one.name} has other rows than {products[0].name}{_at(one)}")
    tiles: dict[Node, Tile] = {}
    for plan in package.forward:
        for node in plan.stores:
            tiles[node] = _tile(node, plan, count, binding)
    finest = max(tiles.values(), key=lambda tile: len(tile.rows))
    loops = {axis: finest.plan.axis_names[axis] for axis in finest.rows}
    row_names = _row_names(list(tiles.values()), loops, binding)
    rows = {name: package.sizes.text(axis.size) for axis, name in loops.items()}
    sizes = [product(tile.columns) for tile in tiles.values() if tile.columns]
    sizes += [size for one in products for size in one.weight.sizes[-2:]]
    values = walk([tile.value for tile in tiles.values()])
    sizes += [one.size for one in values if isinstance(one, Size)]
    columns: dict[str, str] = {}
    for text in dict.fromkeys(map(package.sizes.text, sizes)):
        columns[text] = _free(text, [*columns.values(), *rows, *package.parameters])
    for one in products:  # a product has made two sizes equal
        summed = package.sizes.text(product(tiles[one.factor].columns))
        known = columns[package.sizes.text(one.depth)]
        columns = {
            text: known if name == columns[summed] else name for text, name in columns.items()
        }
    whole = Whole(package, tiles, rows, row_names, columns)
    for tile in tiles.values():
        _check(whole, tile)
    for one in products:
        weight_load(whole, one)
    _check_sizes(whole, binding)
    return whole


def _free(text: str, taken: Sequence[str]) -> str:
    """Return a name for a number of columns that no other has."""
    words = re.findall(r"[a-z_]\w*", text)
    wanted = text if text.isidentifier() else f"{words[0]}_part" if words else f"columns_{text}"
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _at(node: Node) -> str:
    return f" ({node.line})" if node.line else ""


def _tile(node: Node, plan: KernelPlan, count: sympy.Expr, binding: Binding) -> Tile:
    index = next(one.index for one in plan.kernel.members if one.node is node)
    index = index[: len(node.sizes)]
    whole, outer = _flat(index), _flat(index[:-1])
    kernel = plan.kernel
    if equal(product(outer), count, binding) and (not kernel.column_axes or index[-1]):
        rows, columns = outer, index[-1]
    elif equal(product(whole), count, binding):
        return Tile(node, plan, whole, kernel.column_axes, False)
    else:
        raise _refused(f"{node.name} has other rows than the products{_at(node)}")
    if kernel.column_axes and set(kernel.column_axes) != set(columns):
        raise _refused(f"{node.name} needs a reduction over a part of a row{_at(node)}")
    return Tile(node, plan, rows, columns, bool(columns))


def _flat(index: Index) -> tuple[Axis, ...]:
    return tuple(axis for axes in index for axis in axes)


def _row_names(
    tiles: Sequence[Tile], loops: Mapping[Axis, str], binding: Binding
) -> dict[Axis, str]:
    """Return the loops that each row axis of a tile is, as words. Raises EjectError."""
    names: dict[Axis, str] = {}
    for tile in tiles:
        remaining = list(loops)
        for axis in tile.rows:
            group: list[Axis] = []
            while remaining and not equal(product(group), axis.size, binding):
                group.append(remaining.pop(0))
            if not equal(product(group), axis.size, binding):
                raise _refused(f"the rows of {tile.node.name} are split in another way")
            names[axis] = " ".join(loops[one] for one in group)
    return names


def place_of(whole: Whole, tile: Tile, one: Load) -> tuple[str, ...]:
    """Return each dimension of a loaded argument: names of loops over rows, the number of columns
    behind a ``?``, or ``1``. Raises EjectError where the kernel would compute a position."""
    found: list[str] = []
    for entry in one.index:
        if not entry:
            found.append("1")
        elif entry == tile.columns:
            found.append(f"?{whole.column_of(product(entry))}")
        elif set(entry) <= set(tile.rows):
            words = " ".join(whole.row_names[axis] for axis in entry)
            found.append(f"({words})" if " " in words else words)
        else:
            what = "a computed position" if chosen_in((entry,)) else "a part of a row"
            raise _refused(f"{one.tensor.name} is read at {what}{_at(tile.node)}")
    return tuple(found)


def weight_load(whole: Whole, one: Product) -> tuple[Load, tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the load of a weight's element, the axes of its rows and those of its columns."""
    binding = Binding(whole.package.captured.hints, {})
    index = tuple(binding.fresh(size) for size in one.weight.sizes)
    evaluation = Evaluation(binding, (), frozenset())
    load = evaluation.at(one.weight, index)
    depth, across = map(binding.resolve, index[-2:])
    is_matrix = (
        isinstance(load, Load)
        and all(entry in ((), depth, across) for entry in load.index)
        and isinstance(memory_of(load.tensor), Input)
    )
    if not is_matrix:
        raise _refused(f"the weight of {one.name} is no matrix for all rows{_at(one)}")
    assert isinstance(load, Load)
    return load, depth, across


def start_of(window: Node) -> sympy.Expr:
    """Return at which column of a product a window of it begins."""
    start = sympy.S.Zero
    while isinstance(window, Window):
        start += window.start
        window = window.source
    return start


def _check(whole: Whole, tile: Tile) -> None:
    """Raise EjectError where a tile is computed from what is not in its rows."""
    for one in walk([tile.value]):
        if isinstance(one, Scanned):
            raise _refused(f"a running {one.function} is computed{_at(tile.node)}")
        if isinstance(one, Position) and tuple(one.axes) != tile.columns:
            raise _refused(f"the position of a row is computed with{_at(tile.node)}")
        if not isinstance(one, Load):
            continue
        memory = memory_of(one.tensor)
        if isinstance(memory, Input):
            place_of(whole, tile, one)
            continue
        rows, columns = _flat(one.index[:-1]), one.index[-1] if one.index else ()
        held = whole.tiles.get(memory)
        if held is not None and not held.is_of_columns:
            rows, columns = _flat(one.index), tile.columns
        window = one.tensor
        while isinstance(window, Window):
            if window.dim != len(window.sizes) - 1 or window.step != 1 or held is not None:
                raise _refused(f"rows or every second column of {memory.name} are taken")
            window = window.source
        if window is not memory or rows != tile.rows or columns != tile.columns:
            raise _refused(f"{memory.name} is read across rows{_at(tile.node)}")


def _check_sizes(whole: Whole, binding: Binding) -> None:
    """Raise EjectError where a tile of the example is too wide."""
    for tile in whole.tiles.values():
        width = binding.hint(product(tile.columns))
        if width > MOST_COLUMNS and not whole.streams(tile):
            raise _refused(
                f"{tile.node.name} has {width:,} columns, more than the {MOST_COLUMNS:,} that a "
                f"program holds{_at(tile.node)}"
            )
