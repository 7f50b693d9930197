"""Write a captured function as a kernel package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fuselab
from fuselab.ejection import emit_cpp, emit_cuda, emit_triton
from fuselab.ejection.fold import fold
from fuselab.ejection.folder import check_folder, write_folder
from fuselab.ejection.loops import Node
from fuselab.ejection.lower import expression_of
from fuselab.ejection.package import Package, planned_package
from fuselab.ejection.plan import KernelPlan
from fuselab.ejection.write_gradient import gradient_text
from fuselab.ejection.write_page import page_text
from fuselab.ejection.write_reference import reference_text


def eject(
    function: Callable[..., Any],
    *example_inputs: Any,
    out: str | Path,
    name: str | None = None,
    inference: bool = False,
    force: bool = False,
    keywords: Mapping[str, Any] | None = None,
) -> Path:
    """Write the kernel package of ``function`` to the folder ``out`` and return its path.

    Args:
        function: plain PyTorch or an ``nn.Module``, without control flow that depends on values of
            tensors; a module's parameters and buffers become arguments of the operator.
        example_inputs: its arguments. The kernels hold for other sizes of the same number of
            dimensions; values that are no tensors are fixed.
        out: a folder that does not exist.
        name: the operator's name; the function's by default.
        inference: True writes no backward.
        force: True replaces an earlier package in ``out``, but for files edited by hand.
        keywords: arguments of the call that are given by name.

    Raises:
        EjectError: the function cannot become kernels, or the folder exists.
        OutputError: the folder cannot be written.
    """
    folder = Path(out)
    check_folder(folder, force)
    name = name or default_name(function)
    package = planned_package(function, example_inputs, keywords or {}, name, inference)
    write_folder(folder, package_files(package), about(package), force)
    return folder


def about(package: Package) -> dict[str, Any]:
    """Return the facts of a package for its manifest."""
    return {
        "operator": f"ejected::{package.name}",
        "fuselab": fuselab.__version__,
        "torch": torch.__version__.partition("+")[0],
    }


def default_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of a module's class, as an operator's name."""
    name = getattr(function, "__name__", type(function).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def package_files(package: Package) -> dict[str, str]:
    """Return the text of every file by its name."""
    plans = [*package.forward, *package.backward]
    origin = "ejected from the PyTorch code in reference.py."
    files = {
        "__init__.py": _init(package),
        "reference.py": _formatted(reference_text(package)),
        "op.py": _formatted(_op(package)),
        "triton_kernels.py": emit_triton.source(f"{package.name} in Triton, {origin}", plans),
        "cuda_kernels.cu": emit_cuda.source(f"{package.name} in CUDA C++, {origin}", plans),
        "cpu_kernels.cpp": emit_cpp.source(
            f"{package.name} in C++ for CPUs, {origin}", [*package.forward, *package.cpp_backward]
        ),
    }
    if package.backward:
        files["gradient.py"] = _formatted(gradient_text(package))
    files[f"test_{package.name}.py"] = _test(package)
    files["page.md"] = page_text(package)
    return files


def _test(package: Package) -> str:
    return f'''\
"""Check {package.name} against its reference; on a CPU the Triton kernels run interpreted."""

from pathlib import Path

import fuselab


def test_{package.name}() -> None:
    report = fuselab.check(str(Path(__file__).parent), quick=True)
    assert report.passed, str(report)
'''


def _init(package: Package) -> str:
    return f'''\
"""{package.name}, ejected from plain PyTorch by fuselab."""

import fuselab

from .op import OP

{package.name} = fuselab.operator(OP)

__all__ = ["OP", "{package.name}"]
'''


def _annotated(names: Sequence[str]) -> str:
    return ", ".join(f"{name}: Tensor" for name in names)


def _formatted(text: str) -> str:
    """Return Python text with its long lines folded."""
    return "\n".join(folded for line in text.split("\n") for folded in fold(line))


# --- the declaration and the launchers ------------------------------------------------------------


def _op(package: Package) -> str:
    saved = ", ".join(package.saved)
    has_gradient = bool(package.backward)
    parts = [
        _imports(package, has_gradient),
        _forward(package),
        *([_backward(package, "_backward", package.backward)] if has_gradient else []),
        *([_backward(package, "_backward_cpp", package.cpp_backward)] if _sums(package) else []),
        _launchers(package, has_gradient),
    ]
    if has_gradient:
        parts.append(
            f"def save(output: Tensor, {_annotated(package.parameters)}) -> tuple[Tensor, ...]:\n"
            f"    return ({saved}{',' if len(package.saved) == 1 else ''})\n"
        )
        parts.append(_fake_gradient(package))
    parts.append(_supports(package))
    drawn = _draw(package)
    parts += [drawn] if drawn else []
    widened = _autocast(package)
    parts += [widened] if widened else []
    parts.append(_example_case(package))
    parts.append(_declaration(package, has_gradient, bool(drawn), bool(widened)))
    head = f'"""The contract of ``ejected::{package.name}``, and its launchers."""\n\n'
    return head + "\n\n".join(parts)


def _imports(package: Package, has_gradient: bool) -> str:
    has_draw, has_autocast = bool(_draw(package)), bool(_autocast(package))
    contract = [
        "Case",
        *(["Draw"] if has_draw else []),
        "FusedOp",
        *(["Gradient"] if has_gradient else []),
        "Implementation",
        "Inputs",
    ]
    signature = [
        *(["accepted"] if has_draw else []),
        *(["float32_on_gpu"] if has_autocast else []),
        "mismatch",
        "output_like",
    ]
    lines = [
        "from __future__ import annotations",
        "",
        *(["from collections.abc import Sequence"] if has_gradient else []),
        "from functools import partial",
        "from pathlib import Path",
        *(["from typing import Any"] if has_autocast else []),
        "",
        "import torch",
        "from torch import Tensor",
        "",
        f"from fuselab.op import {', '.join(contract)}",
        "from fuselab.runtime.cpp_sweep import CppSweeps",
        "from fuselab.runtime.cuda_sweep import CudaSweeps",
        f"from fuselab.runtime.signature import {', '.join(signature)}",
        "from fuselab.runtime.sweep import Sweep, Sweeps, arithmetic_dtype",
        "from fuselab.runtime.triton_sweep import TritonSweeps",
        "",
        "from . import triton_kernels",
        *(["from .gradient import gradient"] if has_gradient else []),
        "from .reference import reference",
        "",
    ]
    return "\n".join(lines)


def _forward(package: Package) -> str:
    lines = package.sizes.statements(package.parameters)
    lines.append(f"compute = arithmetic_dtype({', '.join(package.parameters)})")
    lines += _launches(package, package.forward, package.parameters)
    lines.append(f"return {package.result_name(package.program.outputs[0], package.forward)}")
    return (
        f"def _forward(sweeps: Sweeps, {_annotated(package.parameters)}) -> Tensor:\n"
        + textwrap.indent("\n".join(lines), "    ")
        + "\n"
    )


def _sums(package: Package) -> bool:
    """Return whether C++ has a backward of its own: one that sums over rows beside other values."""
    return any(plan.sums for plan in package.cpp_backward)


def _backward(package: Package, name: str, plans: Sequence[KernelPlan]) -> str:
    lines = package.sizes.statements(package.saved)
    lines.append("compute = arithmetic_dtype(grad_output)")
    lines += _launches(package, plans, ["grad_output", *package.saved])
    results: list[str] = []
    for place, node in enumerate(package.program.gradients):
        result = "None" if node is None else package.result_name(node, plans)
        if any(text.startswith(f"{result} ") for text in results):
            result += ".clone()"  # a raw operator returns every gradient in memory of its own
        results.append("None" if node is None else f"{result} if needs[{place}] else None")
    lines += ["return (", *(f"    {text}," for text in results), ")"]
    return (
        f"def {name}(sweeps: Sweeps, needs: Sequence[bool], grad_output: Tensor, "
        f"{_annotated(package.saved)}) -> tuple[Tensor | None, ...]:\n"
        + textwrap.indent("\n".join(lines), "    ")
        + "\n"
    )


def _launches(package: Package, plans: Sequence[KernelPlan], given: Sequence[str]) -> list[str]:
    """Return the statements that allocate the kernels' results and launch them."""
    lines: list[str] = []
    inputs = (*package.program.inputs, *package.program.upstream)
    held: dict[Node | None, str] = {one: one.name for one in inputs}
    held[None] = "None"
    pairs = zip(package.program.gradients, package.parameters, strict=True)
    gradients = {node: name for node, name in reversed(list(pairs)) if name in given}
    for plan in plans:
        for operand in plan.stored:
            node = operand.node
            assert node is not None
            held[node] = operand.name
            if node in package.program.outputs:
                called = ", ".join(package.parameters)
                lines.append(f"{operand.name} = output_like(reference, {called})")
                continue
            like = gradients.get(node)
            if like is not None:
                lines.append(f"{operand.name} = torch.empty_like({like})")
                continue
            sizes = ", ".join(map(package.sizes.text, node.sizes))
            dtype = {"bool": "torch.bool", "int": "torch.int64"}.get(node.kind, "compute")
            sizes += "," if len(node.sizes) == 1 else ""
            made = f"torch.empty(({sizes}), dtype={dtype}, device={given[0]}.device)"
            lines.append(f"{operand.name} = {made}")
        read = [f'    ({held[one.node]}, "{one.pattern}"),' for one in plan.loads]
        written = [f'    ({held[one.node]}, "{one.pattern}"),' for one in plan.stored]
        lines += [
            "swept = Sweep(",
            f"    rows={_axes(package, plan, plan.kernel.row_axes)},",
            f"    columns={_columns(package, plan)},",
            "    read=[",
            *(f"    {text}" for text in read),
            "    ],",
            "    written=[",
            *(f"    {text}" for text in written),
            "    ],",
            ")",
        ]
        numbers = "".join(f"{package.sizes.text(size.size)}, " for size in plan.numbers)
        behind = f", ({numbers.rstrip()})" if numbers else ""
        lines.append(f'sweeps.run("{plan.name}", swept, compute{behind})')
    return lines


def _columns(package: Package, plan: KernelPlan) -> str:
    """Return the columns; one of its own where a kernel reduces only dimensions of size 1, because
    a sweep without columns takes a loop of the rows for them."""
    if plan.reductions and not plan.kernel.column_axes:
        return '{"single": 1}'
    return _axes(package, plan, plan.kernel.column_axes)


def _axes(package: Package, plan: KernelPlan, axes: Sequence[Any]) -> str:
    entries = [f'"{plan.axis_names[axis]}": {package.sizes.text(axis.size)}' for axis in axes]
    return "{" + ", ".join(entries) + "}"


def _patterns(package: Package) -> list[tuple[str, list[str]]]:
    """Return each argument with its dimensions: a size's name, a number, or text of a size."""
    return [
        (argument.name, [package.sizes.text(expression_of(size)) for size in argument.tensor.shape])
        for argument in package.captured.arguments
    ]


def _supports(package: Package) -> str:
    lines = []
    for name, dims in _patterns(package):
        words = [dim if dim.isidentifier() or dim.isdigit() else "_" for dim in dims]
        lines.append(f'        ({name}, "{" ".join(words)}"),')
    if package.multiples:
        lines.append(f"        multiples={package.multiples!r},".replace("'", '"'))
    body = "\n".join(["    return mismatch(", *lines, "    )"])
    return (
        f"def supports({_annotated(package.parameters)}) -> str | None:\n"
        '    """Return None if the kernels take these shapes, else the reason."""\n' + body + "\n"
    )


def _fake_gradient(package: Package) -> str:
    saved = _annotated(package.saved)
    results = []
    for place, (node, name) in enumerate(
        zip(package.program.gradients, package.parameters, strict=True)
    ):
        text = "None" if node is None else f"torch.empty_like({name}) if needs[{place}] else None"
        results.append(f"        {text},")
    body = "\n".join(["    return (", *results, "    )"])
    return (
        "def fake_gradient(needs: Sequence[bool], grad_output: Tensor, "
        f"{saved}) -> tuple[Tensor | None, ...]:\n{body}\n"
    )


def _draw(package: Package) -> str:
    """Return the text of ``draw``; empty where valid values cannot be known (integers)."""
    if any(not one.tensor.is_floating_point() for one in package.captured.arguments):
        return ""
    multiples = {name: f"{count} * " for name, count in package.multiples.items()}
    lines = [
        f"    {name} = {multiples.get(name, '')}source.size()"
        for name in package.sizes.names.values()
    ]
    tensors = [f"        source.tensor({', '.join(dims)})," for _, dims in _patterns(package)]
    body = [
        "def _drawn(source: Draw) -> tuple[Tensor, ...]:",
        *lines,
        "    return (",
        *tensors,
        "    )",
    ]
    return (
        "\n".join(body) + "\n\n\ndef draw(source: Draw) -> Inputs:\n"
        '    """Draw tensors of any sizes and layouts that the reference accepts."""\n'
        "    return Inputs(accepted(reference, lambda: _drawn(source)))\n"
    )


def _autocast(package: Package) -> str:
    called = {_function_name(node.target) for node in package.captured.traced.graph.nodes}
    found = sorted(called & AUTOCAST_TO_FLOAT32)
    if not found:
        return ""
    return (
        "def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:\n"
        f'    """Cast as torch.autocast does for {", ".join(found)} on a GPU."""\n'
        "    return float32_on_gpu(args)\n"
    )


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


# The functions that torch.autocast runs in float32 on a GPU (PyTorch's documentation of amp).
AUTOCAST_TO_FLOAT32 = frozenset(
    (
        "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_similarity",
        "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm",
        "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
        "mse_loss", "nll_loss", "norm", "normalize", "pow", "prod", "reciprocal", "rsqrt",
        "sinh", "smooth_l1_loss", "softmax", "softmin", "softplus", "sum", "tan",
    )
)  # fmt: skip


def _cuda(plans: Sequence[KernelPlan]) -> list[str]:
    """Return the statements that name the CUDA kernels and those that a compile check takes."""
    reductions = {plan.name: len(plan.reductions) for plan in plans if plan.reductions}
    splitting = [plan.name for plan in plans if emit_cuda.can_split(plan)]
    lines = ["_CUDA = CudaSweeps(", '    Path(__file__).with_name("cuda_kernels.cu"),']
    if reductions:
        lines += ["    reductions={"]
        lines += [f'        "{name}": {count},' for name, count in reductions.items()]
        lines += ["    },"]
    if splitting:
        lines += ["    splitting=(", *(f'        "{name}",' for name in splitting), "    ),"]
    lines += [")", "CUDA_EXPRESSIONS = _CUDA.examples(", "    {"]
    lines += [f'        "{plan.name}": "{emit_cuda.element_kinds(plan)}",' for plan in plans]
    return [*lines, "    }", ")"]


# The implementations of a package: the device of each, and its kernels.
_IMPLEMENTATIONS = {
    "triton": ("cuda", "TritonSweeps(triton_kernels)"),
    "cuda": ("cuda", ""),
    "cpp": ("cpu", 'CppSweeps(Path(__file__).with_name("cpu_kernels.cpp"))'),
}


def _launchers(package: Package, has_gradient: bool) -> str:
    lines: list[str] = []
    for name, (_, kernels) in _IMPLEMENTATIONS.items():
        if name == "cuda":
            lines += _cuda([*package.forward, *package.backward])
        else:
            lines.append(f"_{name.upper()} = {kernels}")
        lines.append(f"forward_{name} = partial(_forward, _{name.upper()})")
        if has_gradient:
            own = "_backward_cpp" if name == "cpp" and _sums(package) else "_backward"
            lines.append(f"backward_{name} = partial({own}, _{name.upper()})")
    return "\n".join(lines) + "\n"


def _example_case(package: Package) -> str:
    """Return the text of the case with the sizes of the example."""
    arguments = [
        (
            argument,
            tuple(one if isinstance(one, int) else one.node.hint for one in argument.tensor.shape),
        )
        for argument in package.captured.arguments
    ]
    if all(argument.tensor.is_floating_point() for argument, _ in arguments):
        return f'_EXAMPLE = Case.normal({[shape for _, shape in arguments]!r}, "bench")\n'
    values = []
    for argument, shape in arguments:
        if argument.tensor.is_floating_point():
            text = f"torch.randn({shape}, generator=generator).to(device, dtype)"
        else:
            low, high = package.captured.ranges.get(argument.name, (0, 1))
            drawn = f"torch.randint({low}, {high + 1}, {shape}, generator=generator)"
            text = f"{drawn}.to(device, {argument.tensor.dtype})"
        values.append(f"            {text},")
    return "\n".join(
        [
            "def _example(",
            "    device: torch.device, dtype: torch.dtype, generator: torch.Generator",
            ") -> Inputs:",
            "    return Inputs(",
            "        (",
            *values,
            "        )",
            "    )",
            "",
            "",
            '_EXAMPLE = Case("example", _example, frozenset({"bench"}))',
            "",
        ]
    )


def _declaration(package: Package, has_gradient: bool, has_draw: bool, has_autocast: bool) -> str:
    implementations = ""
    for name, (device, _) in _IMPLEMENTATIONS.items():
        backward = f"backward_{name}, " if has_gradient else ""
        implementations += (
            f'        "{name}": Implementation(\n'
            f'            "{device}", forward_{name}, {backward}supports=supports\n'
            "        ),\n"
        )
    gradient = "    gradient=Gradient(save, gradient, fake_gradient),\n" if has_gradient else ""
    last = "    draw=draw,\n" if has_draw else ""
    last += "    autocast=autocast,\n" if has_autocast else ""
    return f"""\
OP = FusedOp(
    name="ejected::{package.name}",
    reference=reference,
    implementations={{
{implementations}    }},
{gradient}    cases=(_EXAMPLE,),
{last})
"""
