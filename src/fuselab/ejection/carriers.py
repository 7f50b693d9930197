"""Tensors of which a function reads sizes alone, as arguments of its traced graph.

Dynamo gives a graph the size that is read (``x * other.shape[-1]``), and not the tensor. A kernel
package takes tensors, and finds sizes in their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Carrier:
    """A tensor, by PyTorch's description of where it comes from, and its stand-in in a graph."""

    source: Any
    example: Tensor

    @property
    def target(self) -> str:
        """The name of its placeholder, as Dynamo would call it."""
        name = self.source.name
        return re.sub(r"\W+", "_", name() if callable(name) else name)  # a method in some versions


def carriers_of(graph: fx.Graph, conditions: Iterable[sympy.Basic]) -> list[Carrier]:
    """Return the tensors that have sizes which the graph being compiled, or one of ``conditions``,
    reads, and none of the tensors among its placeholders has."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if mode is None or mode.shape_env is None:
        return []
    examples = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    sizes = [one.node.expr for one in examples if isinstance(one, torch.SymInt)]
    read = {symbol for one in (*sizes, *conditions) for symbol in one.free_symbols}
    for one in examples:
        read -= _sizes_of(one)
    found = []
    for tracked in mode.shape_env.tracked_fakes or ():
        like: Any = tracked.fake  # of another mode
        if read.intersection(_sizes_of(like)):
            read -= _sizes_of(like)
            kind = {"dtype": like.dtype, "device": like.device}
            with mode:
                example = torch.empty_strided(like.shape, like.stride(), **kind)
            found.append(Carrier(tracked.source, example))
    return found


def add_carriers(graph: fx.Graph, carriers: Iterable[Carrier]) -> None:
    """Add a placeholder for each tensor behind those of the graph."""
    for one in carriers:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            node: Any = graph.placeholder(one.target)
        node._dynamo_source = one.source  # by which AOTAutograd tells inputs apart
        node.meta["example_value"] = one.example


def _sizes_of(value: Any) -> set[sympy.Basic]:
    """Return the symbols that are sizes of a tensor by themselves."""
    shape: Any = value.shape if isinstance(value, Tensor) else ()
    held = [one.node.expr for one in shape if isinstance(one, torch.SymInt)]
    return {one for one in held if isinstance(one, sympy.Symbol)}
