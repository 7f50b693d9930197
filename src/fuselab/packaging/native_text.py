"""Graphs of PyTorch's operators and of sweeps (``native_trace.py``), written as C++."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._sympy.printers import CppPrinter

from fuselab.errors import UnsupportedError
from fuselab.packaging.native_trace import Graph, Launch
from fuselab.runtime.cpp_sweep import CPP_TYPES
from fuselab.runtime.sweep import CHOSEN, axes_of_dims

_SWEEP = torch.ops.fuselab_native.sweep.default
_GETITEM = operator.getitem
_FORMATS = {
    torch.contiguous_format: "Contiguous",
    torch.preserve_format: "Preserve",
    torch.channels_last: "ChannelsLast",
    torch.channels_last_3d: "ChannelsLast3d",
}


@dataclass
class Unit:
    """The C++ text of an operator: functions of PyTorch's calls, and of kernel launches.

    ``headers`` are those of PyTorch's operators that the functions call. ``launches`` are functions
    without PyTorch's types, by the text that declares them.
    """

    functions: list[str] = field(default_factory=list)
    headers: set[str] = field(default_factory=set)
    launches: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, graph: Graph) -> None:
        """Append ``std::optional<Tensors> name(const Tensors&)``, which computes a graph."""
        writer = _Writer(self, graph)
        self.functions.append(writer.function(name))


def scalar_type(dtype: torch.dtype) -> str:
    """Return a dtype as C++ spells it."""
    names = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"}
    names |= {"int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte"}
    names |= {"bool": "Bool", "complex64": "ComplexFloat", "complex128": "ComplexDouble"}
    name = str(dtype).removeprefix("torch.")
    if name not in names:
        raise UnsupportedError(f"a tensor of {name} has no form in C++ here.")
    return f"at::k{names[name]}"


class _Writer:
    """The text of one function."""

    def __init__(self, unit: Unit, graph: Graph) -> None:
        self.unit, self.graph = unit, graph
        self.symbols: dict[str, str] = {}
        self.lines: list[str] = []
        self.print_size = CppPrinter().doprint
        self.live = _live(list(graph.graph.nodes))

    def function(self, name: str) -> str:
        nodes = list(self.graph.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for place, node in enumerate(inputs):
            self._input(place, node)
        self.lines.append(f"[[maybe_unused]] const at::Device device = {inputs[0].name}.device();")
        for condition in self.graph.conditions:
            self.lines.append(f"if (!({self.print_size(condition)})) return std::nullopt;")
        for node in self.live:
            self._call(node)
        (returned,) = next(node for node in nodes if node.op == "output").args
        results = ", ".join("at::Tensor()" if one is None else one.name for one in returned)
        body = "\n".join(f"  {line}" for line in [*self.lines, f"return Tensors{{{results}}};"])
        return f"std::optional<Tensors> {name}(const Tensors& given) {{\n{body}\n}}"

    def _input(self, place: int, node: fx.Node) -> None:
        """Name an argument and its sizes; return nothing for sizes of another pattern."""
        value: Tensor = node.meta["val"]
        self.lines.append(f"[[maybe_unused]] const at::Tensor& {node.name} = given[{place}];")
        self.lines.append(f"if ({node.name}.dim() != {value.dim()}) return std::nullopt;")
        for dim, size in enumerate(value.shape):
            text = f"{node.name}.size({dim})"
            symbol = None if isinstance(size, int) else str(size)
            if symbol is not None and symbol not in self.symbols:
                self.symbols[symbol] = text
                self.lines.append(f"[[maybe_unused]] const int64_t {symbol} = {text};")
            else:
                self.lines.append(f"if ({text} != {symbol or size}) return std::nullopt;")

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is _GETITEM:
            source, place = node.args
            is_list = isinstance(source.meta["val"], list)  # type: ignore[union-attr]
            taken = f"{source}[{place}]" if is_list else f"std::get<{place}>({source})"
            self.lines.append(f"at::Tensor {node.name} = {taken};")
        elif target is _SWEEP:
            self._sweep(node)
        else:
            self._operator(node, target)

    def _operator(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        """Append a call of one of PyTorch's operators."""
        if target.namespace != "aten":
            raise UnsupportedError(f"{target} is no operator of PyTorch's own, which C++ can call.")
        base = target._schema.name.removeprefix("aten::")
        overload = target._schema.overload_name
        in_place = base.endswith("_") and not base.endswith("__")
        self.unit.headers.add(base.removesuffix("_") if in_place else base)
        arguments = target._schema.arguments
        given: dict[str, Any] = dict(node.kwargs)
        given |= dict(zip((one.name for one in arguments), node.args, strict=False))
        texts = [
            self._argument(one.real_type, given.get(one.name, one.default_value))
            for one in arguments
        ]
        call = f"at::_ops::{base}{f'_{overload}' if overload else ''}::call({', '.join(texts)});"
        is_used = any(user.op == "output" or user in self.live for user in node.users)
        self.lines.append(f"auto {node.name} = {call}" if is_used else call)

    def _argument(self, kind: Any, value: Any) -> str:
        """Return an argument of an operator of PyTorch's, by its type in the schema."""
        name = kind.kind()
        if name == "OptionalType":
            inner = kind.getElementType()
            if value is None:
                return "std::nullopt"
            text = self._argument(inner, value)
            # An optional list is an OptionalArrayRef, which a vector becomes by itself.
            return text if inner.kind() == "ListType" else f"std::make_optional({text})"
        if name == "ListType":
            return self._list(kind.getElementType(), value)
        return self._single(name, value)

    def _single(self, kind: str, value: Any) -> str:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), Tensor):
                return value.name
            value = value.meta["val"]
        if kind == "TensorType":  # a number in the place of a tensor
            return f"at::native::wrapped_scalar_tensor({self._number(value)})"
        if kind == "DeviceObjType":
            return "device"
        if kind == "ScalarTypeType":
            return scalar_type(value)
        if kind == "LayoutType":
            return "at::kStrided"
        if kind == "MemoryFormatType":
            return f"at::MemoryFormat::{_FORMATS[value]}"
        if kind == "StringType":
            return json.dumps(value)
        text = self._number(value)
        wrapped = {"NumberType": f"at::Scalar({text})", "SymIntType": f"c10::SymInt({text})"}
        return wrapped.get(kind, text)

    def _number(self, value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return _float(value)
        if isinstance(value, int):
            return f"int64_t({value})"
        if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
            return str(self.print_size(value.node.expr))
        raise UnsupportedError(f"a call with {value!r} has no form in C++ here.")

    def _list(self, kind: Any, value: Any) -> str:
        if value is None:
            return "{}"
        values = value if isinstance(value, list | tuple) else [value]
        texts = [self._argument(kind, one) for one in values]
        name = kind.kind()
        types = {"IntType": "int64_t", "SymIntType": "c10::SymInt", "TensorType": "at::Tensor"}
        types |= {"FloatType": "double", "NumberType": "at::Scalar"}
        if name == "BoolType":
            return f"std::array<bool, {len(texts)}>{{{', '.join(texts)}}}"
        if name == "OptionalType":
            made = ", ".join(f"std::optional<at::Tensor>({text})" for text in texts)
            return f"c10::List<std::optional<at::Tensor>>({{{made}}})"
        if name not in types:
            raise UnsupportedError(f"a call with a list of {kind} has no form in C++ here.")
        return f"std::vector<{types[name]}>{{{', '.join(texts)}}}"

    def _sweep(self, node: fx.Node) -> None:
        """Append a launch, and the function without PyTorch's types that makes it."""
        key, tensors, sizes, numbers = node.args
        launch = self.graph.launches[str(key)]
        dtypes = [tensor.meta["val"].dtype for tensor in tensors]  # type: ignore[union-attr]
        name = _launch_function(self.unit, launch, dtypes)
        names = [tensor.name for tensor in tensors]  # type: ignore[union-attr]
        places = iter(names)
        operands = ", ".join(
            f"{{{next(places) if is_tensor else 'at::Tensor()'}, {_dims(pattern, launch.axes)}}}"
            for is_tensor, pattern in zip(launch.is_tensor, launch.patterns, strict=True)
        )
        counts = ", ".join(self._single("IntType", number) for number in numbers)  # type: ignore[union-attr]
        extents = ", ".join(self._single("IntType", size) for size in sizes)  # type: ignore[union-attr]
        self.lines += [
            f"// {launch.kernel} over {', '.join(launch.axes)}",
            f"Sweep({{{extents}}}, {launch.rows}, {{{operands}}}, {launch.read}, "
            f"{str(launch.in_order).lower()})",
            "    .run([&](bool by_rows, void* const* data, const int64_t* steps, "
            "const int64_t* loops) {",
            f"      const std::array<int64_t, {launch.numbers}> numbers{{{counts}}};",
            f"      {name}(by_rows, data, numbers.data(), steps, loops);",
            "    });",
        ]


def _live(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the calls on which results depend, without those that compute sizes."""
    needed: set[fx.Node] = set()
    kept: list[fx.Node] = []
    for node in reversed(nodes):
        if node.op == "output":
            results: Any = node.args[0]
            needed |= {one for one in results if one is not None}
        if node.op != "call_function" or _is_size(node):
            continue
        target: Any = node.target
        writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
        value = node.meta.get("val")
        on_meta = isinstance(value, Tensor) and value.is_meta
        if node in needed or (writes and not on_meta):
            kept.append(node)
            needed |= {one for one in node.all_input_nodes if not _is_size(one)}
    return kept[::-1]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt | torch.SymBool | torch.SymFloat)


def _launch_function(unit: Unit, launch: Launch, dtypes: Sequence[torch.dtype]) -> str:
    """Return the name of the function that launches a kernel for tensors of these dtypes."""
    short = "_".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    types = [CPP_TYPES[dtype] for dtype in (launch.compute, *dtypes)]
    steps = sum(pattern.split().count(CHOSEN) for pattern in launch.patterns)
    values = [f"static_cast<{CPP_TYPES[one]}*>(data[{at}])" for at, one in enumerate(dtypes)]
    values += [f"numbers[{at}]" for at in range(launch.numbers)]
    values += [f"steps[{at}]" for at in range(steps)]
    operands = len(launch.patterns)
    call = f"kernels::{launch.kernel}<Lane::{{}}, {', '.join(types)}>({', '.join(values)}, nest)"
    body = f"""\
  ::Loops<{operands}> nest;
  std::memcpy(&nest, loops, sizeof nest);
  if (by_rows) {{
    {call.format("row")};
  }} else {{
    {call.format("column")};
  }}"""
    for name, (held, text) in _launches(unit).items():
        if held == launch.kernel and text == body:
            return name
    taken = sum(held == launch.kernel for held, _ in _launches(unit).values())
    name = f"launch_{launch.kernel}_{short}" + (f"_{taken}" if taken else "")
    unit.launches[name] = f"{launch.kernel}\n{body}"
    return name


def _launches(unit: Unit) -> dict[str, tuple[str, str]]:
    parts = {name: text.partition("\n") for name, text in unit.launches.items()}
    return {name: (kernel, body) for name, (kernel, _, body) in parts.items()}


def _dims(pattern: str, axes: Sequence[str]) -> str:
    """Return an operand's dimensions as C++: the places of their axes."""
    dims = [
        ", ".join("kChosen" if axis == CHOSEN else str(axes.index(axis)) for axis in dim)
        for dim in axes_of_dims(pattern)
    ]
    return f"Axes{{{', '.join(f'{{{dim}}}' for dim in dims)}}}"


def _float(value: float) -> str:
    if value != value:
        return "std::numeric_limits<double>::quiet_NaN()"
    if value in (float("inf"), -float("inf")):
        return f"{'-' if value < 0 else ''}std::numeric_limits<double>::infinity()"
    return repr(value)
