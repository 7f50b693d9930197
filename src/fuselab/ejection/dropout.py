"""Give the dropouts of a captured function their masks from a seed, which becomes an argument.

While a graph of PyTorch functions is differentiated, each of its dropouts computes with a mask that
is one operator of the graph, ``ejection::kept``: of the seed, the number of the dropout, the shape
and the probability (``runtime/dropout.py``). The backward reads the same mask, which its kernels
compute again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource

from fuselab.ejection.carriers import Carrier, add_carriers
from fuselab.runtime.dropout import drop, dropout_call, dropout_mask

SEED = "seed"  # the name of the argument, if the function has none of that name
SEEDS = (0, 2**63 - 2)  # the least and the largest seed that is drawn
RUNTIME = "fuselab.runtime.dropout"  # what packages import


@torch.library.custom_op("ejection::kept", mutates_args=())
def _kept(seed: Tensor, number: int, shape: Sequence[int], p: float) -> Tensor:
    return dropout_mask(seed, number, shape, p)


@_kept.register_fake
def _(seed: Tensor, number: int, shape: Sequence[int], p: float) -> Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


KEPT = torch.ops.ejection.kept.default


def dropouts_in(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of a graph that drop elements, in their order."""
    return [node for node in graph.nodes if drops(node)]


def drops(node: fx.Node) -> bool:
    """Return whether a call drops elements: a dropout in training, with a probability above 0."""
    is_call = node.op == "call_function"
    return is_call and dropout_call(node.target, node.args, dict(node.kwargs)) is not None


class _Replayed:
    """A dropout of a graph whose mask is an operator: called as PyTorch's function, and with the
    seed before the other arguments."""

    def __init__(self, target: Any, number: int) -> None:
        self.target = target
        self.number = number
        self.__name__ = target.__name__

    def __call__(self, seed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dropout_call(self.target, args, kwargs)
        assert given is not None
        return drop(self.__name__, given, lambda shape, p: KEPT(seed, self.number, list(shape), p))


def seeded(
    module: fx.GraphModule,
    inputs: list[Any],
    numbers: Sequence[int],
    carriers: Sequence[Carrier],
    declared: Sequence[str] = (),
) -> tuple[fx.GraphModule, list[Any]]:
    """Return a traced graph whose dropouts, which have ``numbers``, take their masks from a seed,
    its last placeholder, behind those of ``carriers``, and the inputs with these; the same where
    nothing is dropped and there are none. The seed has none of the names ``declared``."""
    if not carriers and not dropouts_in(module.graph):
        return module, inputs
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    for node, copy in copies.items():
        if node.op == "placeholder":
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    add_carriers(graph, carriers)
    given = [*inputs, *(one.example for one in carriers)]
    dropouts = dropouts_in(graph)
    if dropouts:
        seed = _with_seed(graph, declared)
        given.append(seed.meta["example_value"])
        for number, node in zip(numbers, dropouts, strict=True):
            node.target, node.args = _Replayed(node.target, number), (seed, *node.args)
    return fx.GraphModule(module, graph), given


def is_seed(node: fx.Node) -> bool:
    """Return whether a node is the placeholder that ``seeded`` has made."""
    return bool(node.meta.get("is_seed"))


def seed_beside(graph: fx.Graph, declared: Sequence[str]) -> fx.Node:
    """Return a node for the seed of a traced graph that stays without it, whose name is none of
    those ``declared``."""
    other = fx.Graph()
    for node in graph.find_nodes(op="placeholder"):
        other.node_copy(node)
    seed = _with_seed(other, declared)
    seed.meta["val"] = seed.meta["example_value"]
    return seed


def _with_seed(graph: fx.Graph, declared: Sequence[str]) -> fx.Node:
    """Return a new placeholder, behind the others of a traced graph, with a name of its own."""
    placeholders = graph.find_nodes(op="placeholder")
    example = next(one for one in _values(placeholders) if isinstance(one, Tensor))
    # Also of a parameter the name must be another one.
    taken = {str(node.target).strip("_").rpartition("_")[2] for node in placeholders}
    taken.update(declared)
    name = next(one for one in _names() if one not in taken)
    with graph.inserting_after(placeholders[-1]):
        node: Any = graph.placeholder(f"L_{name}_")
    node._dynamo_source = LocalSource(name)  # by which AOTAutograd tells inputs apart
    node.meta["is_seed"] = True
    with example.fake_mode:  # type: ignore[attr-defined]
        node.meta["example_value"] = torch.zeros((), dtype=torch.int64, device=example.device)
    return node  # type: ignore[no-any-return]


def _names() -> Iterator[str]:
    yield SEED
    yield from (f"{SEED}_{number}" for number in itertools.count(2))


def _values(nodes: Sequence[fx.Node]) -> list[Any]:
    return [node.meta.get("example_value") for node in nodes]
