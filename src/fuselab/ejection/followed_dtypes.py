"""Find what a traced function takes from the dtype of its arguments.

Dynamo writes the example's dtype where the code has ``y.to(x.dtype)``, as it does for a dtype that
the code names (``y.to(torch.float32)``). The function is traced once more, with arguments of
another dtype: what is another dtype then is the arguments'. Likewise it writes the number that
``torch.finfo(x.dtype).min`` is in the example. Kernels have such numbers, and the way of an
``if x.dtype == torch.float16:``, as in the example, so they run in those dtypes alone in which the
function makes the same calls with the same numbers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuselab.ejection.blocks import take_blocks
from fuselab.ejection.capture import Captured, graph_of
from fuselab.ejection.from_text import is_of_text
from fuselab.ejection.taken import mapped
from fuselab.errors import EjectError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LIMITS = ("min", "max", "eps", "tiny")
_UNTRACEABLE = (EjectError, RuntimeError, TypeError, ValueError)


def follow_dtypes(captured: Captured, inference: bool) -> None:
    """Note in each call of the traced graph which of its dtypes is the arguments' own
    (``meta["follows"]``), and which of its numbers are limits of that dtype (``meta["limits"]``:
    each with its text, ``{}`` for the dtype); and in each tensor whether it has their dtype
    (``meta["has_followed"]``)."""
    graph = captured.traced.graph
    named = {dtype for node in graph.nodes for dtype in _dtypes_in(node)}
    for dtype in sorted(_floating(captured), key=str):
        if dtype in named or captured.reads_dtypes:
            other = torch.float32 if dtype == torch.float64 else torch.float64
            with contextlib.suppress(*_UNTRACEABLE):
                _note(graph, _with_dtype(captured, dtype, other, inference), dtype, other)


def dtypes_of_kernels(captured: Captured) -> Mapping[tuple[str, ...], tuple[torch.dtype, ...]]:
    """Return arguments with which the function computes something else in some dtypes, and the
    dtypes in which it computes what it does in the example: other limits of a dtype are something
    else."""
    return _kept(captured, "dtypes_of_kernels", follows_limits=False)


def dtypes_of_calls(captured: Captured) -> Mapping[tuple[str, ...], tuple[torch.dtype, ...]]:
    """Return the same of the calls as text, in which limits of a dtype are followed."""
    return _kept(captured, "dtypes_of_calls", follows_limits=True)


def dtype_texts(found: Mapping[tuple[str, ...], tuple[torch.dtype, ...]]) -> list[str]:
    """Return what ``dtypes_of_kernels`` gives as conditions in Python."""
    return [
        f"{{{', '.join(f'{name}.dtype' for name in names)}}} <= {{{', '.join(map(str, dtypes))}}}"
        for names, dtypes in found.items()
    ]


def _kept(
    captured: Captured, label: str, follows_limits: bool
) -> Mapping[tuple[str, ...], tuple[torch.dtype, ...]]:
    """Return what ``_unlike`` finds, which is kept with the traced graph."""
    found: Mapping[tuple[str, ...], tuple[torch.dtype, ...]]
    if label not in captured.traced.meta:
        captured.traced.meta[label] = _unlike(captured, follows_limits)
    found = captured.traced.meta[label]
    return found


def _unlike(
    captured: Captured, follows_limits: bool
) -> Mapping[tuple[str, ...], tuple[torch.dtype, ...]]:
    if not captured.reads_dtypes or not _may_decide(captured.function):
        return {}
    found = {}
    inference = not any(captured.needs_gradient)
    for dtype in sorted(_floating(captured), key=str):
        own = _with_dtype(captured, dtype, dtype, inference)
        same = [dtype]
        for other in _DTYPES:
            with contextlib.suppress(*_UNTRACEABLE):
                if other != dtype and _is_like(
                    own,
                    _with_dtype(captured, dtype, other, inference),
                    dtype,
                    other,
                    follows_limits,
                ):
                    same.append(other)
        if not set(_DTYPES) <= set(same):
            names = tuple(one.name for one in captured.arguments if one.tensor.dtype == dtype)
            found[names] = tuple(sorted(same, key=str))
    return found


def _may_decide(function: Callable[..., Any]) -> bool:
    """Return whether a function that reads dtypes may depend on them in its calls or its numbers.
    The text of a part of a function depends on them by limits alone."""
    return not is_of_text(function) or "torch.finfo" in inspect.getsource(function)


def _floating(captured: Captured) -> set[torch.dtype]:
    return {one.tensor.dtype for one in captured.arguments if one.tensor.is_floating_point()}


def _with_dtype(
    captured: Captured, dtype: torch.dtype, other: torch.dtype, inference: bool
) -> fx.Graph:
    """Return the graph that Dynamo makes of the function with tensors of another dtype, which is
    kept with the traced graph: kernels, calls and their dtypes all compare with it."""
    kept: dict[Any, fx.Graph] = captured.traced.meta.setdefault("with_dtypes", {})
    key = dtype, other, inference
    if key not in kept:
        kept[key] = _traced_with_dtype(captured, dtype, other, inference)
    return kept[key]


def _traced_with_dtype(
    captured: Captured, dtype: torch.dtype, other: torch.dtype, inference: bool
) -> fx.Graph:
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
        limits = {
            one: text
            for one, two in zip(_numbers_in(node), _numbers_in(twin), strict=False)
            if one != two and (text := _limit(one, two, dtype, other))
        }
        if limits:
            node.meta["follows"], node.meta["limits"] = dtype, limits


def _is_like(
    graph: fx.Graph, again: fx.Graph, dtype: torch.dtype, other: torch.dtype, follows_limits: bool
) -> bool:
    """Return whether two graphs make the same calls with the same numbers, but for those that
    follow from the dtype."""
    nodes, twins = list(graph.nodes), list(again.nodes)
    if [(one.op, one.target) for one in nodes] != [(one.op, one.target) for one in twins]:
        return False
    places = {node: place for one in (nodes, twins) for place, node in enumerate(one)}

    def is_same(one: Any, two: Any) -> bool:
        if isinstance(one, fx.Node) and isinstance(two, fx.Node):
            return places[one] == places[two]
        if isinstance(one, torch.dtype):
            return one == two or (one == dtype and two == other)
        if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
            return len(one) == len(two) and all(map(is_same, one, two))
        if isinstance(one, dict) and isinstance(two, dict):
            return list(one) == list(two) and all(map(is_same, one.values(), two.values()))
        if isinstance(one, slice) and isinstance(two, slice):
            return is_same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
        if follows_limits and isinstance(one, float) and isinstance(two, float):
            return repr(one) == repr(two) or _limit(one, two, dtype, other) is not None
        return repr(one) == repr(two)

    return all(
        is_same((node.args, node.kwargs), (twin.args, twin.kwargs))
        for node, twin in zip(nodes, twins, strict=True)
    )


def _limit(one: float, two: float, dtype: torch.dtype, other: torch.dtype) -> str | None:
    """Return the text of a number that is ``one`` in ``dtype`` and ``two`` in ``other``, with
    ``{}`` for the dtype, if it is a limit of that, or its negative."""
    mine, theirs = torch.finfo(dtype), torch.finfo(other)
    for sign, prefix in ((1, ""), (-1, "-")):
        for name in _LIMITS:
            if (one, two) == (sign * getattr(mine, name), sign * getattr(theirs, name)):
                return f"{prefix}torch.finfo({{}}).{name}"
    return None


def _numbers_in(node: fx.Node) -> list[float]:
    """Return the fractional numbers among the arguments of a call."""
    found: list[float] = []
    fx.node.map_aggregate(
        (node.args, node.kwargs),
        lambda one: found.append(one) if isinstance(one, float) else None,
    )
    return found


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
