"""Write the ``with`` blocks of a traced function: ``torch.no_grad()``, ``torch.autocast(...)``.

Dynamo's graph has calls where such a block begins and ends. They hold for every call between them
in the order of the user's code, which the steps of a cut function do not keep. So they are removed,
and each call keeps the blocks that it stands in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby

import torch
from torch import fx
from torch.amp import autocast_mode
from torch.autograd import grad_mode

from fuselab.ejection.returned import constant_text

Blocks = tuple[str, ...]  # the contexts that a call stands in, as Python text, outermost first
_NAMES = ("dtype", "enabled", "cache_enabled")  # of autocast's arguments behind the device type
_NO_GRADIENTS = "torch.no_grad()"


def take_blocks(graph: fx.Graph, has_gradients: bool) -> None:
    """Remove the calls that begin and end blocks, and note in each node which blocks it stands in.

    ``has_gradients`` says whether gradients were recorded when the function was called; if they
    were not, whether a part records them changes nothing.
    """
    records, entered = has_gradients, dict[fx.Node, str]()
    ended: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            records = bool(node.args[0])
            ended.append(node)
        elif node.target is autocast_mode._enter_autocast:
            entered[node] = _autocast(node)
            ended.append(node)
        elif node.target is grad_mode._enter_inference_mode:
            entered[node] = _NO_GRADIENTS
            ended.append(node)
        elif node.target in (autocast_mode._exit_autocast, grad_mode._exit_inference_mode):
            entered.pop(node.args[0], None)
            ended.append(node)
        elif entered or records is not has_gradients:
            blocks = [_NO_GRADIENTS] if has_gradients and not records else []
            node.meta["blocks"] = tuple(dict.fromkeys([*entered.values(), *blocks]))
    for node in reversed(ended):
        graph.erase_node(node)


def _autocast(node: fx.Node) -> str:
    device, *rest = node.args
    named = [
        f"{name}={constant_text(value)}"
        for name, value in zip(_NAMES, rest, strict=False)
        if value is not None and (name, value) != ("enabled", True)
    ]
    return f"torch.autocast({', '.join([constant_text(device), *named])})"


def blocks_of(node: fx.Node) -> Blocks:
    """Return the blocks that a call stands in."""
    found: Blocks = node.meta.get("blocks", ())
    return found


def in_blocks(lines: Iterable[tuple[Blocks, str]]) -> list[str]:
    """Return lines of code, neighbours of the same blocks under one ``with``."""
    found: list[str] = []
    for blocks, several in groupby(lines, key=lambda one: one[0]):
        text = "\n".join(line for _, line in several)
        if blocks:
            text = f"with {', '.join(blocks)}:\n{textwrap.indent(text, '    ')}"
        found += text.split("\n")
    return found
