"""Hold what a captured function returns: tensors that kernels compute, and the structure of them.

Dynamo flattens what a function returns into the tensors of a graph. Each group of these that share
memory has one tensor that kernels compute; the public function makes the others from it, as views.
A view of an argument, or an argument itself, needs no kernel at all. To learn the structure, the
compiled function is given tensors that stand in for the graph's, and the user's own code, or what
Dynamo made of it, puts them in place.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import keyword
import math
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fuselab.ejection.calls import source_line
from fuselab.errors import EjectError

CONSTANTS = (int, float, str, bool, type(None), torch.dtype)
_FIRST_NUMBER = 10**15  # stands in for a size; no tensor has a dimension as large


@dataclass(frozen=True, eq=False)
class Made:
    """An object of a dataclass in a structure, by the fields that make it."""

    kind: type
    fields: Mapping[str, Any]


class Sizes(tuple[Any, ...]):
    """A ``torch.Size`` in a structure, with nodes in place of sizes."""


@dataclass(frozen=True)
class SizesOf:
    """The ``torch.Size`` of an argument in a structure."""

    argument: fx.Node


@dataclass(frozen=True)
class Returned:
    """``results`` are the nodes of the traced graph that kernels compute, and ``structure`` is what
    the function returns, with nodes in place of tensors and of sizes."""

    results: tuple[fx.Node, ...]
    structure: Any

    @property
    def is_plain(self) -> bool:
        """Whether the function returns the results themselves: one tensor, or a flat tuple."""
        if len(self.results) == 1:
            return self.structure is self.results[0]
        return type(self.structure) is tuple and self.structure == self.results

    @property
    def needs_gradient(self) -> tuple[bool, ...]:
        """Return for each result whether a gradient flows through it."""
        return tuple(bool(_example(node).requires_grad) for node in self.results)

    @property
    def differentiable_sources(self) -> tuple[tuple[fx.Node, ...], ...] | None:
        """Return for each result the inputs from which a gradient flows through it; None where the
        function writes in place, so that a value is more than what its operands say."""
        if any(map(_is_written, self.results[0].graph.nodes if self.results else ())):
            return None
        return tuple(map(_sources, self.results))

    def names(self, taken: Collection[str]) -> tuple[str, ...]:
        """Return names of the results that are not ``taken``: a variable of the user's code, a key
        of the structure, or a number."""
        if len(self.results) == 1:
            return ("output",)
        keys = {node: key for node, key in _keys(self.structure) if is_name(key)}
        found: list[str] = []
        for place, node in enumerate(self.results):
            wanted = node.name if _is_assigned(node) else keys.get(node, "")
            is_free = wanted and wanted not in found and wanted not in taken
            found.append(wanted if is_free else f"output_{place}")
        return tuple(found)

    def path(self, node: fx.Node) -> str | None:
        """Return the subscripts that lead to a result in the structure, or None."""
        return next((path for found, path in _paths(self.structure) if found is node), None)


class StandIns:
    """The call of a compiled function that computes nothing: it returns a stand-in for each tensor
    and each size that the graph returns, and keeps the inputs that it gets."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.nodes: list[fx.Node] = list(output_node(module.graph).args[0])  # type: ignore[arg-type]
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.made = [self._made(place, node) for place, node in enumerate(self.nodes)]
        self.inputs: tuple[Any, ...] = ()

    def _made(self, place: int, node: fx.Node) -> Any:
        if isinstance(_example(node), Tensor):
            return torch.full((), float(_FIRST_NUMBER + place), dtype=torch.float64)
        return _FIRST_NUMBER + place

    def __call__(self, *inputs: Any) -> list[Any]:
        self.inputs = inputs
        return self.made

    def structure(self, name: str, returned: Any) -> Any:
        """Return what the compiled call returned, with nodes in place of stand-ins. Raises
        EjectError."""
        nodes = {id(value): node for value, node in zip(self.made, self.nodes, strict=True)}
        nodes |= {
            id(value): node
            for value, node in zip(self.inputs, self.placeholders, strict=True)
            if isinstance(value, Tensor)
        }
        used: set[fx.Node] = set()

        def of(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in nodes:
                    raise EjectError(
                        f"{name} returns a tensor that it computes nothing with; return only what "
                        "is computed."
                    )
                used.add(nodes[id(value)])
                return nodes[id(value)]
            if type(value) is int and value >= _FIRST_NUMBER:
                used.add(self.nodes[value - _FIRST_NUMBER])
                return self.nodes[value - _FIRST_NUMBER]
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                _check_class(name, type(value))
                fields = (one.name for one in dataclasses.fields(value) if one.init)
                return Made(type(value), {one: of(getattr(value, one)) for one in fields})
            if type(value) in (dict, OrderedDict):
                if not all(isinstance(key, CONSTANTS) for key in value):
                    raise EjectError(f"{name} returns a dict whose keys are no numbers or strings.")
                return type(value)((key, of(item)) for key, item in value.items())
            if isinstance(value, torch.Size):
                sizes = Sizes(map(of, value))
                is_known = not sizes or any(isinstance(size, fx.Node) for size in sizes)
                return sizes if is_known else self._argument_of(name, value)
            if type(value) in (tuple, list):
                items = list(map(of, value))
                return items if isinstance(value, list) else tuple(items)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(of, value))
            if is_return_type(value):
                return type(value)(map(of, value))
            if isinstance(value, CONSTANTS):
                return value
            raise EjectError(
                f"{name} returns an object of {type(value).__name__}; return tensors, numbers, "
                "strings and None, in tuples, named tuples, dataclasses, lists and dicts."
            )

        structure = of(returned)
        for node in self.nodes:
            if node in used or _is_argument(node):
                continue
            # PyTorch's tracer hands a computed number on in a tensor that it makes of it.
            is_number = node.target is torch.scalar_tensor
            if isinstance(_example(node), Tensor) and not is_number:
                raise EjectError(
                    f"{name} assigns a tensor to an attribute, or changes another object outside"
                    f"{_place(node)}; write over a buffer (self.mean.copy_(new)), or return the "
                    "tensor."
                )
            raise EjectError(
                f"{name} changes an object outside, or returns a number that is computed from "
                f"sizes by a division{_place(node)}; return only tensors and sizes."
            )
        return structure

    def _argument_of(self, name: str, sizes: torch.Size) -> SizesOf:
        """Return the argument whose sizes these are: Dynamo reads them from the tensor itself.
        Raises EjectError."""
        alike: dict[tuple[str, ...], fx.Node] = {}
        for value, node in zip(self.inputs, self.placeholders, strict=True):
            if isinstance(value, Tensor) and value.shape == sizes:
                alike.setdefault(tuple(map(str, _example(node).shape)), node)
        if len(alike) != 1:
            raise EjectError(
                f"{name} returns the sizes {tuple(sizes)}, and it is not known of which tensor; "
                "return each as a number (tuple(x.shape))."
            )
        return SizesOf(*alike.values())


def _sources(result: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs from which a gradient flows through a result."""
    seen: dict[fx.Node, None] = {}
    stack = [result]
    while stack:
        node = stack.pop()
        value = _example(node)
        values = value if isinstance(value, (tuple, list)) else [value]
        if node not in seen and any(getattr(one, "requires_grad", False) for one in values):
            seen[node] = None
            stack += node.all_input_nodes
    return tuple(node for node in seen if node.op == "placeholder")


def _is_written(node: fx.Node) -> bool:
    """Return whether a node writes over a tensor, or its tensor is written over later."""
    value = _example(node)
    if isinstance(value, Tensor) and node.op != "placeholder" and value._version > 0:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") and node.op.startswith("call")
    return is_in_place or name == "setitem" or bool(node.kwargs.get("inplace"))


def _place(node: fx.Node) -> str:
    """Return the line of the user's code behind a node in brackets, if it is known."""
    return f" ({line})" if (line := source_line(node)) else ""


def _is_argument(node: fx.Node) -> bool:
    """Return whether a node is an argument that was written over: ``self.count += 1`` also assigns
    it to the attribute that holds it."""
    root = root_of(node)
    return root.op == "placeholder" and is_same_view(node, root)


def results_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that kernels compute so that the graph's outputs are these or views of
    them."""
    outputs = [
        node for node in _flat(output_node(graph).args[0]) if isinstance(_example(node), Tensor)
    ]
    roots = {node: root_of(node) for node in dict.fromkeys(outputs)}
    shared = {root for root in roots.values() if list(roots.values()).count(root) > 1}
    results = (
        root if root in shared else node for node, root in roots.items() if root.op != "placeholder"
    )
    return tuple(dict.fromkeys(results))


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the node of a graph that returns its results."""
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def root_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's tensor lies in: itself, unless it is a view or was
    written in place."""
    source = source_of(node)
    root = node if source is None else root_of(source)
    # A call with several results, such as torch.sort, makes a tuple; each result is its own.
    return root if isinstance(_example(root), Tensor) else node


def source_of(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory a node's tensor lies in, or None."""
    own = _storages(node)
    return next((one for one in node.all_input_nodes if own & _storages(one)), None)


def is_same_view(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node returns its source as it is, as operations in place do."""
    one, other = _example(node), _example(source)
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.requires_grad == other.requires_grad
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def nodes_in(structure: Any) -> Iterator[fx.Node]:
    """Yield the nodes of a structure."""
    for node, _ in _paths(structure):
        yield node


def _storages(node: fx.Node) -> set[int]:
    value = _example(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return {one.untyped_storage()._cdata for one in values if isinstance(one, Tensor)}


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _flat(results: Any) -> list[fx.Node]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _items(structure: Any) -> list[tuple[str, str, Any]]:
    """Return the parts of a tuple, list or dict, each with its name and its subscript."""
    if isinstance(structure, dict):
        return [(str(key), f"[{constant_text(key)}]", item) for key, item in structure.items()]
    if isinstance(structure, Made):
        return [(name, f".{name}", item) for name, item in structure.fields.items()]
    if isinstance(structure, (tuple, list)):
        named = "__match_args__" if is_return_type(structure) else "_fields"
        fields = getattr(structure, named, [""] * len(structure))
        items = enumerate(structure)
        return [(fields[place], f"[{place}]", item) for place, item in items]
    return []


def _paths(structure: Any) -> Iterator[tuple[fx.Node, str]]:
    if isinstance(structure, fx.Node):
        yield structure, ""
    for _, subscript, item in _items(structure):
        yield from ((node, f"{subscript}{path}") for node, path in _paths(item))


def _keys(structure: Any) -> Iterator[tuple[fx.Node, str]]:
    for key, _, item in _items(structure):
        if isinstance(item, fx.Node):
            yield item, key
        else:
            yield from _keys(item)


def _is_assigned(node: fx.Node) -> bool:
    """Return whether Dynamo named a node after a variable of the user's code."""
    trace = node.meta.get("stack_trace") or ""
    return re.search(rf"^\s*{re.escape(node.name)}\s*[-+*/|&]?=[^=]", trace, re.M) is not None


def classes_in(structure: Any) -> dict[str, type]:
    """Return the classes of named tuples and dataclasses in a structure, and of dicts that are
    none of Python's own, by name."""
    found: dict[str, type] = {}
    if isinstance(structure, Made):
        found[structure.kind.__name__] = structure.kind
    elif type(structure) is OrderedDict or (
        isinstance(structure, tuple) and hasattr(structure, "_fields")
    ):
        found[type(structure).__name__] = type(structure)
    for _, _, item in _items(structure):
        found |= classes_in(item)
    return found


def class_texts(kinds: Mapping[str, type]) -> tuple[list[str], list[str]]:
    """Return the lines that import classes, and those that define the ones which are in no
    installed package: named tuples and dataclasses of the same fields."""
    imports: set[str] = set()
    lines: list[str] = []
    for name, kind in kinds.items():
        if _can_be_imported(kind):
            imports.add(f"from {kind.__module__} import {name}")
        elif issubclass(kind, tuple):
            imports.add("from collections import namedtuple")
            lines.append(f'{name} = namedtuple("{name}", {json.dumps(kind._fields)})')  # type: ignore[attr-defined]
        else:
            imports |= {"from dataclasses import make_dataclass", "from typing import Any"}
            bases = [one for one in kind.__bases__ if one is not object]
            imports |= {f"from {one.__module__} import {one.__name__}" for one in bases}
            texts = [_field_text(one) for one in dataclasses.fields(kind) if one.init]  # type: ignore[arg-type]
            behind = f", bases=({comma([one.__name__ for one in bases])})" if bases else ""
            lines.append(f'{name} = make_dataclass("{name}", [{", ".join(texts)}]{behind})')
    return sorted(imports), lines


def _field_text(field: Any) -> str:
    missing = dataclasses.MISSING
    is_wanted = field.default is missing and field.default_factory is missing
    return f'"{field.name}"' if is_wanted else f'("{field.name}", Any, None)'


def _check_class(name: str, kind: type) -> None:
    """Raise EjectError for a dataclass that a package can neither import nor define."""
    for base in () if _can_be_imported(kind) else kind.__bases__:
        if base is not object and not _can_be_imported(base):
            raise EjectError(
                f"{name} returns an object of {kind.__name__}, whose base {base.__name__} no "
                "installed package defines; return a dataclass without that base."
            )


def _can_be_imported(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_installed(kind.__module__) and getattr(module, kind.__name__, None) is kind


def is_installed(module: str) -> bool:
    """Return whether every program of this Python can import a module: one of the standard library
    or of an installed package, not a file of the user's."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return root != "__main__"
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a module without a specification, such as one of a test
        return False
    found = (
        None
        if spec is None
        else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    )
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return found is not None and any(Path(found).is_relative_to(folder) for folder in folders)


def structure_text(structure: Any, leaf: Callable[[fx.Node], str]) -> str:
    """Return Python text that makes the structure of its leaves."""
    if isinstance(structure, fx.Node):
        return leaf(structure)
    texts = [structure_text(item, leaf) for _, _, item in _items(structure)]
    if isinstance(structure, dict):
        pairs = zip(structure, texts, strict=True)
        whole = "{" + ", ".join(f"{constant_text(key)}: {text}" for key, text in pairs) + "}"
        return f"OrderedDict({whole})" if type(structure) is OrderedDict else whole
    if isinstance(structure, Made):
        pairs = zip(structure.fields, texts, strict=True)
        return f"{structure.kind.__name__}({', '.join(f'{key}={text}' for key, text in pairs)})"
    if isinstance(structure, list):
        return f"[{', '.join(texts)}]"
    if isinstance(structure, SizesOf):
        return f"{leaf(structure.argument)}.shape"
    if isinstance(structure, Sizes):
        return f"torch.Size(({comma(texts)}))"
    if isinstance(structure, tuple):
        if hasattr(structure, "_fields"):
            return f"{type(structure).__name__}({', '.join(texts)})"
        if is_return_type(structure):
            return f"torch.return_types.{type(structure).__name__}(({comma(texts)}))"
        return f"({comma(texts)})"
    return constant_text(structure)


def is_return_type(value: Any) -> bool:
    """Return whether a value is one of PyTorch's own named tuples, such as torch.sort returns."""
    return isinstance(value, tuple) and type(value).__module__ == "torch.return_types"


def constant_text(value: Any) -> str:
    """Return Python text of a constant."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return json.dumps(value) if isinstance(value, str) else repr(value)


def is_name(text: str) -> bool:
    """Return whether a text can be a variable of Python."""
    return text.isidentifier() and not keyword.iskeyword(text)


def comma(texts: Sequence[str]) -> str:
    """Return the inside of a tuple's text."""
    return ", ".join(texts) + ("," if len(texts) == 1 else "")
