"""Find the arguments that a captured function writes over, such as running statistics."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx

# The parameters of the functions that write over running statistics where they train, which no
# version counter tells.
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training")
_PARAMETERS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.batch_norm: tuple(
        inspect.signature(torch.nn.functional.batch_norm).parameters
    ),
    torch.batch_norm: _NATIVE,
    torch.native_batch_norm: _NATIVE,
    torch.nn.functional.instance_norm: tuple(
        inspect.signature(torch.nn.functional.instance_norm).parameters
    ),
}


def written_in(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of tensors that the calls of Dynamo's graph write over, in order.

    Dynamo has run every call on fake tensors, whose version counters tell it. Those of running
    statistics and of lists do not; the calls that update them are looked at.
    """
    statistics = {one for node in graph.nodes for one in updated_statistics(node)}
    statistics |= {one for node in graph.nodes for one in updated_lists(node)}
    return [
        node
        for node in graph.nodes
        if node.op == "placeholder"
        and isinstance(value := node.meta.get("example_value"), Tensor)
        and (value._version > 0 or node in statistics)
    ]


def updated_statistics(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the running statistics that a call updates: those of a normalisation in training."""
    names = _PARAMETERS.get(node.target, ())
    if node.op != "call_function" or not names:
        return ()
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("training", given.get("use_input_stats", True)) is not True:
        return ()
    found = (given.get("running_mean"), given.get("running_var"))
    return tuple(one for one in found if isinstance(one, fx.Node))


def updated_lists(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors of the list that a call such as ``torch._foreach_add_`` updates."""
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or not (name.startswith("_foreach_") and name.endswith("_")):
        return ()
    first = node.args[0] if node.args else node.kwargs.get("self")
    held = first if isinstance(first, (list, tuple)) else ()
    return tuple(one for one in held if isinstance(one, fx.Node))
