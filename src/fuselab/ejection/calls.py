"""Write calls of PyTorch functions, as a graph holds them, as the Python text that makes them."""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.matmul: "@",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
}
# Operators in place, each with the method that does the same (`x += 1` is `x.add_(1)`), and the
# operator that returns a new tensor.
IN_PLACE: dict[Any, tuple[str, Any]] = {
    operator.iadd: ("add_", operator.add),
    operator.iand: ("bitwise_and_", operator.and_),
    operator.ifloordiv: ("floor_divide_", operator.floordiv),
    operator.ilshift: ("bitwise_left_shift_", operator.lshift),
    operator.imod: ("remainder_", operator.mod),
    operator.imul: ("mul_", operator.mul),
    operator.ior: ("bitwise_or_", operator.or_),
    operator.ipow: ("pow_", operator.pow),
    operator.irshift: ("bitwise_right_shift_", operator.rshift),
    operator.isub: ("sub_", operator.sub),
    operator.itruediv: ("div_", operator.truediv),
    operator.ixor: ("bitwise_xor_", operator.xor),
}
_DROPOUTS = frozenset(
    (
        "alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
        "feature_dropout",
    )
)  # fmt: skip
_PREFIX = {operator.neg: "-", operator.pos: "+", operator.invert: "~", operator.inv: "~"}


def call_name(node: fx.Node) -> str:
    """Return the plain name of what a node calls: ``relu`` for ``F.relu``, ``.relu`` and more."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def source_line(node: fx.Node) -> str:
    """Return ``file:line: text`` of the user's code behind a node; empty where it is unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{file}:{line}: {linecache.getline(file, int(line)).strip()}"


def at_line(node: fx.Node) -> str:
    """Return the line of the user's code behind a node, in parentheses, for the end of a sentence;
    empty where it is unknown."""
    line = source_line(node)
    return f" ({line})" if line else ""


def is_number(node: fx.Node) -> bool:
    """Return whether a node is a number, such as a size, or the shape of a tensor."""
    value = node.meta.get("example_value")
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.Size, int, float, bool))


def keeps_its_input(node: fx.Node) -> bool:
    """Return whether a call gives back its input: a dropout, whose name says that it draws numbers,
    in evaluation."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in _DROPOUTS:
        return False
    given = {**dict(zip(("input", "p", "training"), node.args, strict=False)), **node.kwargs}
    return given.get("training", given.get("train")) is False


def without_kept_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Remove the calls of a graph that give back their input; return the input of each."""
    found: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if keeps_its_input(node):
            (found[node],) = node.all_input_nodes
            node.replace_all_uses_with(found[node])
            graph.erase_node(node)
    return found


def drop_assertions(graph: fx.Graph) -> None:
    """Remove what Dynamo asserts of sizes that depend on values, and nothing else reads."""
    for node in reversed(graph.nodes):
        held = node.meta.get("example_value")
        is_condition = isinstance(held, (bool, torch.SymBool)) and not node.users
        if node.target is torch.ops.aten._assert_scalar.default or (
            is_condition and node.op == "call_function"
        ):
            graph.erase_node(node)


def call_text(node: fx.Node, names: Mapping[Any, str]) -> str:
    """Return a call as Python text; ``names`` has the texts of its operands, and for
    ``torch.device`` that of the device of all tensors, which is not the example's; likewise for
    ``torch.dtype``, in calls whose dtype, or a number, is that of the arguments
    (``followed_dtypes.py``). Raises KeyError if that is missing."""
    if "follows" in node.meta:
        own = names[torch.dtype]
        limits = {repr(one): text.format(own) for one, text in node.meta.get("limits", {}).items()}
        names = {**names, node.meta["follows"]: own, **limits}
    arguments = [_text(value, names) for value in node.args]
    keywords = [f"{key}={_text(value, names)}" for key, value in node.kwargs.items()]
    target: Any = node.target
    if node.op == "call_method":
        return f"{arguments[0]}.{target}({', '.join([*arguments[1:], *keywords])})"
    if target in INFIX and len(arguments) == 2:
        # A size may be a product, as that of a flattened dimension.
        first, second = (
            f"({text})" if isinstance(value, fx.Node) and " " in text else text
            for value, text in zip(node.args, arguments, strict=True)
        )
        return f"{first} {INFIX[target]} {second}"
    if target in _PREFIX:
        return f"{_PREFIX[target]}{arguments[0]}"
    if target in IN_PLACE:
        return f"{arguments[0]}.{IN_PLACE[target][0]}({arguments[1]})"
    if target is operator.setitem:
        return f"{arguments[0]}[{_subscript(node.args[1], names)}] = {arguments[2]}"
    if target is operator.getitem:
        return f"{arguments[0]}[{_subscript(node.args[1], names)}]"
    if target is getattr:
        return f"{arguments[0]}.{node.args[1]}"
    return f"{_public_name(target)}({', '.join([*arguments, *keywords])})"


def _public_name(target: Any) -> str:
    """Return the name under which PyTorch documents a function."""
    for module, prefix in ((torch, "torch"), (torch.nn.functional, "torch.nn.functional")):
        for name in (getattr(target, "__name__", ""), *dir(module)):
            if name and getattr(module, name, None) is target:
                return f"{prefix}.{name}"
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    return f"{target.__module__}.{target.__name__}"


def _subscript(value: Any, names: Mapping[Any, str]) -> str:
    if isinstance(value, tuple):
        return ", ".join(_subscript(item, names) for item in value)
    if isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
        texts = ["" if part is None else _text(part, names) for part in parts]
        return ":".join(texts if texts[2] else texts[:2])
    return "..." if value is Ellipsis else _text(value, names)


def _text(value: Any, names: Mapping[Any, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = _comma([_text(item, names) for item in value])
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, float):
        return names.get(repr(value), repr(value) if math.isfinite(value) else f'float("{value}")')
    if isinstance(value, torch.dtype):
        return names.get(value, repr(value))
    if isinstance(value, torch.device):
        return names.get(torch.device, f'torch.device("{value}")')
    return repr(value)


def _comma(texts: Sequence[str]) -> str:
    return ", ".join(texts) + ("," if len(texts) == 1 else "")
