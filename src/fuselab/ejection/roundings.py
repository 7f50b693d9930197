"""Find where a function computes in a dtype of its own, whatever the dtype of its arguments.

Kernels compute in float32, or in float64, from their loads to their stores. Where the code names a
dtype between two steps, as ``x.float()`` does, they do not repeat the rounding, so they are right
only for tensors that are no more precise than this dtype. ``rms_norm`` without ``eps`` is the same
case: its ``eps`` is float32's for all dtypes but float64.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, fx

from fuselab.ejection.calls import source_line

_NAMED = {
    torch.float32: re.compile(r"\.float\(\)|torch\.float\b|\bfloat32\b"),
    torch.float16: re.compile(r"\.half\(\)|torch\.half\b|\bfloat16\b"),
    torch.bfloat16: re.compile(r"\.bfloat16\(\)|\bbfloat16\b"),
}


def coarsest_rounding(traced: fx.GraphModule) -> tuple[torch.dtype, str] | None:
    """Return the least precise dtype that a function computes in of its own accord, with the line;
    None if there is none.

    A dtype that the line takes from another tensor (``.to(x.dtype)``) is that of the argument,
    whatever it is, and a cast of what is returned is done by the kernel's store.
    """
    nodes = [node for node in traced.graph.nodes if node.op in ("call_method", "call_function")]
    found = [
        (dtype, source_line(node))
        for node in nodes
        for dtype in (_named_dtype(node), _dtype_of_eps(node))
        if dtype is not None
    ]
    return max(found, key=lambda one: torch.finfo(one[0]).eps, default=None)


def _named_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that a call's line names for floating values that another call reads."""
    values = [node, *node.all_input_nodes[:1]]
    examples = [one.meta.get("example_value") for one in values]
    is_read = any(user.op != "output" for user in node.users)
    if not is_read or not all(
        isinstance(one, Tensor) and one.is_floating_point() for one in examples
    ):
        return None
    is_cast = node.target in ("float", "half", "bfloat16") or any(
        isinstance(one, torch.dtype) for one in (*node.args, *node.kwargs.values())
    )
    dtype: torch.dtype = examples[0].dtype  # type: ignore[union-attr]
    line = source_line(node).partition(": ")[2]
    return dtype if is_cast and dtype in _NAMED and _NAMED[dtype].search(line) else None


def _dtype_of_eps(node: fx.Node) -> torch.dtype | None:
    """Return float32 for an RMS norm without ``eps``."""
    if getattr(node.target, "__name__", "") != "rms_norm":
        return None
    eps = node.kwargs.get("eps", node.args[3] if len(node.args) > 3 else None)
    return torch.float32 if eps is None else None
