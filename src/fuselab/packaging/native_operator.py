"""An operator as C++: its schema, its kernels' launches, its definition and its gradient.

The functions of an operator are traced for each dtype (``native_trace.py``) and written as C++
(``native_text.py``). The forward and the backward each have kernels for the CPU where the operator
has them, and the definition in PyTorch's operators, which computes everything else.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import FuselabError, UnsupportedError
from fuselab.op import FusedOp, Inputs, dtype_name, tensors_in
from fuselab.packaging.native_text import Unit, scalar_type
from fuselab.packaging.native_trace import trace
from fuselab.runtime.dispatch.autocast import without_autocast
from fuselab.runtime.dispatch.register import registration_of
from fuselab.runtime.dispatch.schema import upstream_parameters

_SEED = 0
_DRAWS = 6
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)


class _DistinctSizes:
    """A ``Draw`` in which no two sizes are equal, so that each size becomes a symbol of its own."""

    def __init__(self, dtype: torch.dtype, first: int) -> None:
        self.device, self.dtype = torch.device("cpu"), dtype
        self._sizes: Iterator[int] = iter(_PRIMES[first:])

    def size(self, *interesting: int) -> int:
        return next(self._sizes)

    def shape(self, *interesting: int) -> tuple[int, ...]:
        return self.size(), self.size()

    def choice(self, options: Sequence[Any]) -> Any:
        return options[0]

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones(shape, dtype=dtype or self.dtype)

    def integers(
        self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        return torch.full(shape, low, dtype=dtype)


@dataclass(frozen=True)
class NativeOperator:
    """The C++ text of an operator.

    ``operator`` is the text of the file that knows PyTorch, ``launches`` that of the file that
    instantiates the kernels of ``kernels``, or None where the definition computes everything.
    ``notes`` are sentences for the author of the package.
    """

    name: str
    schema: str
    operator: str
    launches: str | None
    kernels: Path | None
    has_gradient: bool
    notes: tuple[str, ...]


def native_operator(op: FusedOp, dtypes: Sequence[torch.dtype]) -> NativeOperator:
    """Return the C++ text of an operator for floating tensors of ``dtypes``.

    Raises UnsupportedError for an operator that has no form in C++: one that writes over its
    arguments, takes lists of tensors, or calls something other than PyTorch's operators.
    """
    registration = registration_of(op)
    schema = str(registration.raw_forward.overloads[0]._schema)
    kinds = [kind for _, kind in registration.schema[0]]
    if op.mutates:
        raise UnsupportedError(f"{op.name} writes over its arguments, which build does not write.")
    if "Tensor[]" in kinds:
        raise UnsupportedError(f"{op.name} takes a list of tensors, which build does not write.")
    unit, notes = Unit(), []
    tables: dict[str, list[tuple[list[torch.dtype], str]]] = {
        part: []
        for part in ("kernels", "definition", "backward_kernels", "backward_definition", "save")
    }
    constants: list[Any] = []
    for dtype in dtypes:
        args = _example(op, dtype)
        constants = [None if isinstance(arg, Tensor) else (arg,) for arg in args]
        for part, function, tensors, names in _functions(op, args):
            try:
                graph = trace(function, tensors, names)
            except _OtherDtypeError:
                continue
            except FuselabError as error:
                if part in ("kernels", "backward_kernels"):
                    notes.append(f"{part.replace('_', ' ')} for {dtype_name(dtype)}: {error}")
                    continue
                raise
            name = f"{part}_{dtype_name(dtype)}"
            unit.add(name, graph)
            tables[part].append(([one.dtype for one in graph.inputs], name))
    if not tables["definition"]:
        raise UnsupportedError(f"{op.name} takes none of these dtypes in C++.")
    kernels = _kernels(op) if unit.launches else None
    if kernels is None:
        notes.append(
            f"{op.short_name} has no C++ kernels whose launches can be written: the library "
            "computes its definition by PyTorch's own operators, on a GPU too"
        )
    else:
        notes.append(
            f"on a CPU {op.short_name} runs its kernels; on a GPU it computes its definition by "
            "PyTorch's own operators"
        )
    return NativeOperator(
        op.name,
        schema,
        _operator_text(op, schema, unit, tables, constants),
        _launches_text(op.short_name, unit, kernels) if kernels else None,
        kernels,
        bool(tables["backward_definition"]),
        tuple(dict.fromkeys(notes)),
    )


def _example(op: FusedOp, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return example arguments with as many different sizes as are known, in what the operator
    returns too: an output as long as an unrelated argument would be taken for equally long."""
    counts: list[int] = []
    examples: list[tuple[Any, ...]] = []

    def add(args: tuple[Any, ...]) -> None:
        with torch.no_grad():
            results = op.returned_by_forward(op.with_residuals(op.reference(*args), args))
        sizes = {size for one in (*tensors_in(args), *results) for size in one.shape}
        counts.append(len(sizes - {0, 1}))
        examples.append(args)

    generator = torch.Generator().manual_seed(_SEED)
    for case in (*op.cases, *op.cpu_cases):
        if "huge" not in case.tags:
            inputs: Inputs = case.make(torch.device("cpu"), dtype, generator)
            add(op.bind(inputs))
    for first in range(_DRAWS if op.draw is not None else 0):
        with contextlib.suppress(Exception):  # it needs other sizes than these
            assert op.draw is not None
            add(op.bind(op.draw(_DistinctSizes(dtype, first))))
    if not examples:
        raise UnsupportedError(f"{op.name} declares no cases, from which the sizes are known.")

    def constant(args: tuple[Any, ...]) -> list[Any]:
        return [arg for arg in args if not isinstance(arg, Tensor)]

    # Values that are not tensors are those of the first case, which the author wrote down.
    written = constant(examples[0])
    alike = [place for place, args in enumerate(examples) if constant(args) == written]
    best = examples[max(alike, key=counts.__getitem__)]
    return tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in best)


class _OtherDtypeError(Exception):
    """The kernels do not take tensors of this dtype."""


def _functions(
    op: FusedOp, args: tuple[Any, ...]
) -> Iterator[tuple[str, Callable[..., Any], list[Tensor], list[str]]]:
    """Yield the parts of an operator as functions of tensors, with example tensors and names."""
    places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    tensors = [args[place] for place in places]
    names = [list(op.signature.parameters)[place] for place in places]

    def filled(given: Sequence[Tensor]) -> tuple[Any, ...]:
        whole = list(args)
        for place, tensor in zip(places, given, strict=True):
            whole[place] = tensor
        return tuple(whole)

    def definition(*given: Tensor) -> list[Tensor]:
        whole = filled(given)
        returned = op.with_residuals(without_autocast(op.reference, whole), whole)
        results = op.arranged(op.returned_by_forward(returned))
        same = {id(one) for one in given}
        return [one.clone() if id(one) in same else one for one in results]

    on_cpu = [name for name, each in op.implementations.items() if each.device == "cpu"]
    declared = op.implementations[on_cpu[0]] if on_cpu else None

    def kernels(*given: Tensor) -> list[Tensor]:
        assert declared is not None
        whole = filled(given)
        if declared.supports(*whole) is not None:
            raise _OtherDtypeError
        return list(op.returned_by_forward(declared.forward(*whole)))

    yield "definition", definition, tensors, names
    if declared is not None:
        yield "kernels", kernels, tensors, names
    if op.gradient is None:
        return
    gradient = op.gradient
    with torch.no_grad():
        outputs = op.returned_by_forward(op.with_residuals(op.reference(*args), args))
    single = len(outputs) == 1

    def save(*given: Tensor) -> list[Any]:
        held, whole = given[: len(outputs)], filled(given[len(outputs) :])
        return list(gradient.save(held[0] if single else tuple(held), *whole))

    saved = save(*outputs, *tensors)
    if not all(isinstance(one, Tensor) for one in saved):
        return  # its backward reads plain values: the gradient stays Python's
    upstream = [torch.ones_like(one) for one in outputs[: op.output_count]]
    needs = tuple(isinstance(arg, Tensor) and arg.is_floating_point() for arg in tensors)

    def backward(compute: Callable[..., Any]) -> Callable[..., list[Any]]:
        def called(*given: Tensor) -> list[Any]:
            above = given[: len(upstream)]
            grad = above[0] if len(above) == 1 else tuple(above)
            return list(compute(needs, grad, *given[len(upstream) :]))

        return called

    above = [name for name, _ in upstream_parameters(op)]
    read = [*above, *list(inspect.signature(gradient.reference).parameters)[2:]]
    given = [f"result_{place}" for place in range(len(outputs))]
    yield "save", save, [*outputs, *tensors], [*given, *names]
    yield "backward_definition", backward(gradient.reference), [*upstream, *saved], read
    if declared is not None and declared.backward is not None:
        yield "backward_kernels", backward(declared.backward), [*upstream, *saved], read


def _kernels(op: FusedOp) -> Path | None:
    """Return the file of an operator's C++ kernels."""
    for declared in op.implementations.values():
        sweeps = getattr(declared.forward, "args", ())
        for one in sweeps:
            path = getattr(one, "path", None)
            if declared.device == "cpu" and isinstance(path, Path):
                return path
    return None


def _operator_text(
    op: FusedOp,
    schema: str,
    unit: Unit,
    tables: dict[str, list[tuple[list[torch.dtype], str]]],
    constants: Sequence[Any],
) -> str:
    """Return the file that registers the operator with PyTorch."""
    name = op.short_name
    headers = "\n".join(f"#include <ATen/ops/{one}_ops.h>" for one in sorted(unit.headers))
    declared = "\n".join(
        f"void {one}(bool by_rows, void* const* data, const int64_t* numbers, "
        "const int64_t* steps,\n    const int64_t* loops);"
        for one in unit.launches
    )
    functions = "\n\n".join(unit.functions)
    short = schema.removeprefix(f"{op.namespace}::")
    values = ", ".join(
        "std::nullopt" if one is None else f"c10::IValue({_constant(one[0])})" for one in constants
    )
    return f"""\
// {op.name} as an operator of PyTorch's dispatcher, written by `fuselab build`.
//
// The namespace is the package's own. Define FUSELAB_NAMESPACE to register it under another one,
// as a process must that also imports the Python package.
#include <array>
#include <cstdint>
#include <limits>
#include <optional>

#include "native_operator.h"
#include "native_sweep.h"

#include <c10/util/generic_math.h>
{headers}

#ifndef FUSELAB_NAMESPACE
#define FUSELAB_NAMESPACE {op.namespace}
#endif

namespace fuselab::native::{name} {{

{declared}

namespace {{

{functions}

const Operator& description() {{
  static const Operator op{{
      {{"{op.name}", {_table(tables["kernels"])}, {_table(tables["definition"])}}},
      {{{values}}},
      {op.output_count},
      {str(op.contiguous).lower()},
      {{"{op.name}_backward", {_table(tables["backward_kernels"])},
       {_table(tables["backward_definition"])}}},
      {_table(tables["save"])}}};
  return op;
}}

TORCH_LIBRARY_FRAGMENT(FUSELAB_NAMESPACE, library) {{
  library.def("{short}");
  for (const auto key : {{c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                         c10::DispatchKey::Meta}}) {{
    library.impl("{name}", key, torch::CppFunction::makeFromBoxedFunction<&call<description>>());
  }}
  library.impl("{name}", c10::DispatchKey::Autograd,
               torch::CppFunction::makeFromBoxedFunction<&call_with_gradient<description>>());
}}

}}  // namespace
}}  // namespace fuselab::native::{name}
"""


def _constant(value: Any) -> str:
    """Return an argument that is no tensor, as C++."""
    if value is None:
        return ""
    if isinstance(value, torch.dtype):
        return f"static_cast<int64_t>({scalar_type(value)})"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"int64_t({value})"
    if isinstance(value, float):
        return f"double({value!r})"
    if isinstance(value, str):
        return f'std::string("{value}")'
    kinds = "bool" if all(isinstance(one, bool) for one in value) else "int64_t"
    items = ", ".join(str(one).lower() for one in value)
    return f"c10::List<{kinds}>({{{items}}})"


def _table(rows: Sequence[tuple[list[torch.dtype], str]]) -> str:
    entries = ", ".join(
        f"{{{{{', '.join(map(scalar_type, dtypes))}}}, &{name}}}" for dtypes, name in rows
    )
    return f"std::vector<Variant>{{{entries}}}"


def _launches_text(name: str, unit: Unit, kernels: Path) -> str:
    """Return the file that instantiates the kernels, which includes nothing of PyTorch's."""
    functions = "\n".join(
        f"void {launch}(bool by_rows, void* const* data, const int64_t* numbers,\n"
        f"    const int64_t* steps, const int64_t* loops) {{\n{text.partition(chr(10))[2]}\n}}\n"
        for launch, text in unit.launches.items()
    )
    return f"""\
// Launches of the kernels of {kernels.name}, for the file that knows PyTorch; this one does not.
#include <cstdint>
#include <cstring>

#include "{name}_kernels.h"

namespace fuselab::native::{name} {{

{functions}
}}  // namespace fuselab::native::{name}
"""
