"""Take the cells of recurrent networks apart, as calls of a traced graph.

PyTorch calls ``torch.lstm_cell`` and its relatives as one function. Two linear layers and pointwise
operations compute the same, and of the latter kernels can be made, together with what stands before
and after. A whole recurrence, such as ``torch.lstm``, stays one call of a library.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx

from fuselab.ejection.calls import call_name

# Loops over all steps of a sequence, which a tracer would unroll.
RECURRENCES = frozenset(("gru", "lstm", "rnn_relu", "rnn_tanh"))


def _gru_cell(x: Any, hidden: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None) -> Any:
    of_x, of_h = F.linear(x, w_x, b_x).chunk(3, 1), F.linear(hidden, w_h, b_h).chunk(3, 1)
    reset = (of_x[0] + of_h[0]).sigmoid()
    update = (of_x[1] + of_h[1]).sigmoid()
    new = (of_x[2] + reset * of_h[2]).tanh()
    return new + update * (hidden - new)


def _lstm_cell(x: Any, state: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None) -> Any:
    hidden, cell = state
    gates = (F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)).chunk(4, 1)
    cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
    return gates[3].sigmoid() * cell.tanh(), cell


def _rnn_relu_cell(
    x: Any, hidden: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None
) -> Any:
    return (F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)).relu()


def _rnn_tanh_cell(
    x: Any, hidden: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None
) -> Any:
    return (F.linear(x, w_x, b_x) + F.linear(hidden, w_h, b_h)).tanh()


_CELLS: Mapping[str, Callable[..., Any]] = {
    "gru_cell": _gru_cell,
    "lstm_cell": _lstm_cell,
    "rnn_relu_cell": _rnn_relu_cell,
    "rnn_tanh_cell": _rnn_tanh_cell,
}


def take_cells_apart(module: fx.GraphModule) -> None:
    """Replace each cell in a traced graph by the calls that it consists of."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or call_name(node) not in _CELLS:
            continue
        with graph.inserting_before(node):
            proxy: Any = _Tracer(graph, node).proxy
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxy)
            returned = _CELLS[call_name(node)](*args, **kwargs)
        if isinstance(returned, tuple):
            for item in list(node.users):
                assert item.target is operator.getitem
                item.replace_all_uses_with(returned[item.args[1]].node)
                graph.erase_node(item)
        else:
            node.replace_all_uses_with(returned.node)
        graph.erase_node(node)


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Add calls to a graph in the place of one ``cell``, with the line of its code, and with values
    as PyTorch's tracer gives them."""

    def __init__(self, graph: fx.Graph, cell: fx.Node) -> None:
        super().__init__(graph)
        self.cell = cell

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta |= {
            key: value for key, value in self.cell.meta.items() if key in ("stack_trace", "blocks")
        }
        target: Any = node.target
        given, named = fx.node.map_arg(
            (node.args, node.kwargs), lambda one: one.meta["example_value"]
        )
        if node.op == "call_method":
            node.meta["example_value"] = getattr(given[0], target)(*given[1:], **named)
        else:
            node.meta["example_value"] = target(*given, **named)
        return node
