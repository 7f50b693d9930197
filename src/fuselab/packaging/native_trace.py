"""A package's launchers and formulas as graphs of PyTorch calls and sweeps, with symbolic sizes.

``build`` writes these graphs as C++. A launcher of ``runtime/sweep.py`` is called with tensors
whose sizes are symbols. PyTorch's own calls are recorded by ``make_fx``, and each kernel that would
be launched becomes a call of ``fuselab_native::sweep`` in the same graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuselab.runtime.cpp_sweep import CppSweeps
from fuselab.runtime.sweep import Sweep, axes_of_dims

# Names that mean something else in the C++ text.
_TAKEN = frozenset(
    (
        *("auto", "bool", "by_rows", "case", "char", "class", "const", "data", "default", "delete"),
        *("device", "do", "double", "else", "explicit", "export", "float", "for", "given", "if"),
        *("int", "long", "loops", "namespace", "new", "numbers", "operator", "private", "public"),
        *("return", "short", "signed", "sizeof", "static", "steps", "struct", "switch", "template"),
        *("this", "throw", "try", "typename", "union", "unsigned", "using", "virtual", "void"),
    )
)

_library = torch.library.Library("fuselab_native", "DEF")
_library.define("sweep(str kernel, Tensor(a!)[] tensors, SymInt[] sizes, SymInt[] numbers) -> ()")
_library.impl("sweep", lambda *args: None, "CompositeExplicitAutograd")
_library.impl("sweep", lambda *args: None, "Meta")


@dataclass(frozen=True)
class Launch:
    """A launch of a sweeping C++ kernel, without its tensors and sizes, which the graph has.

    ``axes`` are the names of the axes, those of the ``rows`` first. ``patterns`` give the
    dimensions of each operand in these names; an operand that is a position has no tensor. The
    first ``read`` operands are read.
    """

    source: Path
    kernel: str
    compute: torch.dtype
    axes: tuple[str, ...]
    rows: int
    read: int
    in_order: bool
    patterns: tuple[str, ...]
    is_tensor: tuple[bool, ...]
    numbers: int


@dataclass(frozen=True)
class Graph:
    """A traced function: a graph of operators of PyTorch, and the launches that it refers to.

    ``conditions`` are expressions in the symbols of the sizes that held while it was traced.
    """

    graph: fx.Graph
    launches: dict[str, Launch]
    conditions: tuple[Any, ...]

    @property
    def inputs(self) -> list[Tensor]:
        """The fake tensors that stand for the arguments."""
        return [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def symbols(self) -> int:
        """The number of sizes that are free."""
        return len({str(size) for one in self.inputs for size in one.shape if not _is_fixed(size)})


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int)


def trace(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor],
    names: Sequence[str],
) -> Graph:
    """Return the graph of ``function(*tensors)``, for all sizes for which it is the same; ``names``
    are those of the tensors."""
    launches: dict[str, Launch] = {}
    with _recording(launches), torch.no_grad():
        module = make_fx(function, tracing_mode="symbolic")(*tensors)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, name in zip(inputs, names, strict=True):
        node._rename(f"{name}_" if name in _TAKEN or name.startswith("_") else name)
    environment = inputs[0].meta["val"].fake_mode.shape_env
    conditions = tuple(guard.expr for guard in environment.guards)
    return Graph(module.graph, launches, conditions)


@contextlib.contextmanager
def _recording(launches: dict[str, Launch]) -> Iterator[None]:
    """Record launches of C++ sweeps instead of making them."""

    def keep(self: Sweep, rows: Any, columns: Any, operands: Any) -> None:
        self.__dict__["declared"] = rows, columns, operands

    def run(
        self: CppSweeps,
        name: str,
        swept: Sweep,
        compute: torch.dtype,
        numbers: Sequence[int] = (),
    ) -> None:
        rows, columns, operands = swept.__dict__["declared"]
        places = len(operands)
        if name in self.windows:
            operands = [
                (tensor, pattern)
                for tensor, pattern in operands
                if not any(axis in columns for axes in axes_of_dims(pattern) for axis in axes)
            ]
            columns = {}
        tensors = [tensor for tensor, _ in operands if tensor is not None]
        key = f"{name} {len(launches)}"
        launches[key] = Launch(
            self.path,
            name,
            compute,
            (*rows, *columns),
            len(rows),
            swept.read - (places - len(operands)),
            swept.in_order,
            tuple(pattern for _, pattern in operands),
            tuple(tensor is not None for tensor, _ in operands),
            len(numbers),
        )
        sizes = [*rows.values(), *columns.values()]
        torch.ops.fuselab_native.sweep(key, tensors, sizes, list(numbers))

    with (
        mock.patch.object(Sweep, "_lay_out", keep),
        mock.patch.object(Sweep, "_is_too_deep", lambda self: False),
        mock.patch.object(CppSweeps, "run", run),
    ):
        yield
