"""Find the dtypes in a traced function that are those of its arguments (``y.to(x.dtype)``).

Dynamo writes the example's dtype in their place, as it does for a dtype that the code names
(``y.to(torch.float32)``). The function is traced once more, with arguments of another dtype: what
is another dtype then is the arguments'.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuselab.ejection.blocks import take_blocks
from fuselab.ejection.capture import Captured, graph_of
from fuselab.ejection.taken import mapped
from fuselab.errors import EjectError


def follow_dtypes(captured: Captured, inference: bool) -> None:
    """Note in each call of the traced graph which of its dtypes is the arguments' own
    (``meta["follows"]``), and in each tensor whether it has theirs (``meta["has_followed"]``)."""
    graph = captured.traced.graph
    taken = {one.tensor.dtype for one in captured.arguments if one.tensor.is_floating_point()}
    named = {dtype for node in graph.nodes for dtype in _dtypes_in(node)}
    for dtype in sorted(taken & named, key=str):
        other = torch.float32 if dtype == torch.float64 else torch.float64
        with contextlib.suppress(EjectError, RuntimeError, TypeError, ValueError):
            _note(graph, _with_dtype(captured, dtype, other, inference), dtype, other)


def _with_dtype(
    captured: Captured, dtype: torch.dtype, other: torch.dtype, inference: bool
) -> fx.Graph:
    """Return the graph that Dynamo makes of the function with tensors of another dtype."""

    def converted(tensor: Tensor, *_: Any) -> Tensor:
        return tensor.to(other) if tensor.dtype == dtype else tensor

    function: Callable[..., Any] = captured.function
    called = function
    if isinstance(function, nn.Module):
        called = copy.deepcopy(function)._apply(converted)
        function = function.forward
    bound = inspect.BoundArguments(
        inspect.signature(function),
        {name: mapped(value, converted, name) for name, value in captured.given.items()},
    )
    graph = graph_of(called, bound.args, bound.kwargs, captured.name, inference)
    take_blocks(graph, not inference)
    return graph


def _note(graph: fx.Graph, again: fx.Graph, dtype: torch.dtype, other: torch.dtype) -> None:
    """Compare two graphs of a function, of arguments in ``dtype`` and in ``other``; note nothing if
    the function makes other calls."""
    calls, others = _calls(graph), _calls(again)
    if [(one.op, one.target) for one in calls] != [(one.op, one.target) for one in others]:
        return
    inputs = {node.target: node for node in again.find_nodes(op="placeholder")}
    given = [
        (node, inputs[node.target])
        for node in graph.find_nodes(op="placeholder")
        if node.target in inputs
    ]
    for node, twin in [*given, *zip(calls, others, strict=True)]:
        mine, theirs = (one.meta.get("example_value") for one in (node, twin))
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            node.meta["has_followed"] = mine.dtype == dtype and theirs.dtype == other
        if dtype in _dtypes_in(node) and other in _dtypes_in(twin):
            node.meta["follows"] = dtype


def _calls(graph: fx.Graph) -> Sequence[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _dtypes_in(node: fx.Node) -> Iterator[torch.dtype]:
    """Yield the dtypes among the arguments of a call."""
    found: list[torch.dtype] = []
    fx.node.map_aggregate(
        (node.args, node.kwargs),
        lambda one: found.append(one) if isinstance(one, torch.dtype) else None,
    )
    return iter(found)


def followed(nodes: Sequence[fx.Node], names: Any) -> dict[Any, str]:
    """Return the entry of ``names`` for the dtype of the arguments: that of the first of these
    tensors which has it."""
    first = next((one for one in nodes if one.meta.get("has_followed")), None)
    return {} if first is None else {torch.dtype: f"{names[first]}.dtype"}
