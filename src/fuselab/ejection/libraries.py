"""Calls that libraries compute, and that stay PyTorch's: products, convolutions, recurrences."""

from __future__ import annotations

from torch import fx

from fuselab.ejection.calls import at_line, call_name
from fuselab.ejection.recurrent import RECURRENCES
from fuselab.errors import EjectError

# Products of which no generated kernel computes any, whatever their shapes.
PRODUCTS = frozenset(
    (
        "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm",
        "multi_head_attention_forward", "scaled_dot_product_attention",
    )
)  # fmt: skip
# Calls that cost more than the memory that they touch.
HEAVY = frozenset(
    (
        "addmv", "bilinear", "embedding_bag", "mv", "tensordot",
        *PRODUCTS, *RECURRENCES,
    )
)  # fmt: skip


def refuse_calls_of_libraries(graph: fx.Graph, products: bool = False) -> None:
    """Raise EjectError if a call of a traced graph is a recurrence, or a product, unless there are
    kernels of ``products``: before the graph is differentiated, which takes longer."""
    refused = RECURRENCES if products else RECURRENCES | PRODUCTS
    for node in graph.nodes:
        is_call = node.op in ("call_function", "call_method") and node.users
        if is_call and call_name(node) in refused:
            raise EjectError(
                f"{call_name(node)} has no generated kernel{at_line(node)}; eject the parts before "
                "and after it."
            )
