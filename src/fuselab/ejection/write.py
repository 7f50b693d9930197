"""Write a captured function as a kernel package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuselab.ejection import emit_cpp, emit_cuda, emit_triton
from fuselab.ejection.chosen import ADDED, ADDED_AT
from fuselab.ejection.fold import formatted
from fuselab.ejection.kernels import in_order
from fuselab.ejection.loops import Call
from fuselab.ejection.package import UNORDERED, Package
from fuselab.ejection.write_cases import factors, small_shapes, smaller_shapes
from fuselab.ejection.write_gradient import gradient_text
from fuselab.ejection.write_init import init_text
from fuselab.ejection.write_launchers import (
    DEVICES,
    LANGUAGES,
    launcher_parts,
    patterns,
    sweep_names,
    triton_names,
)
from fuselab.ejection.write_module import module_text
from fuselab.ejection.write_page import page_text
from fuselab.ejection.write_reference import reference_text

if TYPE_CHECKING:
    from fuselab.ejection.regions import Cut


def package_files(package: Package) -> dict[str, str]:
    """Return the text of every file by its name."""
    files = {
        "__init__.py": formatted(init_text(package)),
        "op.py": formatted(_op(package)),
        **kernel_files(package, LANGUAGES),
    }
    if isinstance(package.captured.function, nn.Module):
        files["module.py"] = module_text(package.formulas)
    files[f"test_{package.name}.py"] = test_text(package.name)
    files["page.md"] = page_text(package)
    return files


def kernel_files(package: Package, languages: Sequence[str]) -> dict[str, str]:
    """Return the texts of the reference, of the kernels and of the gradient's formulas."""
    plans = [*package.forward, *package.backward]
    name, origin = package.name, "ejected from the PyTorch code in reference.py."
    files = {"reference.py": formatted(_reference(package))}
    if "triton" in languages:
        own = [*package.forward, *package.triton_backward]
        files["triton_kernels.py"] = emit_triton.source(f"{name} in Triton, {origin}", own)
    if "cuda" in languages:
        files["cuda_kernels.cu"] = emit_cuda.source(f"{name} in CUDA C++, {origin}", plans)
    if "cpp" in languages:
        own = [*package.forward, *package.cpp_backward]
        files["cpu_kernels.cpp"] = emit_cpp.source(f"{name} in C++ for CPUs, {origin}", own)
    if package.has_gradient:
        files["gradient.py"] = formatted(gradient_text(package))
    return files


def _reference(package: Package) -> str:
    return reference_text(package.formulas, package.output_names, package.taken)


def test_text(name: str, standalone: bool = False) -> str:
    """Return the text of a package's test; that of a ``standalone`` one is skipped without
    fuselab."""
    importing = "import fuselab\n"
    if standalone:
        importing = 'import pytest\n\nfuselab = pytest.importorskip("fuselab")\n'
    return f'''\
"""Check {name} against its reference; on a CPU the Triton kernels run interpreted."""

from pathlib import Path

{importing}

def test_{name}() -> None:
    report = fuselab.check(str(Path(__file__).parent), quick=True, seed=0)
    assert report.passed, str(report)
'''


def _op(package: Package) -> str:
    launchers = launcher_parts(package, LANGUAGES)
    parts = [_imports(package, package.has_gradient, sweep_names(launchers)), *launchers]
    optional = draw_text(package), autocast_text(package), _prefer_text(package)
    parts += [text for text in optional if text]
    parts += [cases_text(package), declaration_text(package, LANGUAGES)]
    head = f'"""The contract of ``{package.operator_name}``, and its launchers."""\n\n'
    return head + "\n\n".join(parts)


def _imports(package: Package, has_gradient: bool, names: Sequence[str]) -> str:
    """Return the imports of ``op.py``; ``names`` are those of the module of sweeps."""
    has_draw, has_autocast = bool(draw_text(package)), bool(autocast_text(package))
    needs_sequences = has_gradient or package.lists or package.pools_adaptively
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
        *([autocast_helper(package)] if has_autocast else []),
        "mismatch",
        *([allocation(package)] if not package.in_place else []),
        *(["without_elements"] if has_gradient and package.unread else []),
    ]
    lines = [
        "from __future__ import annotations",
        "",
        *(["from collections.abc import Sequence"] if needs_sequences else []),
        "from functools import partial",
        "from pathlib import Path",
        *(["from typing import Any"] if has_autocast or (package.lists and has_draw) else []),
        "",
        "import torch",
        "from torch import Tensor",
        "",
        f"from fuselab.op import {', '.join(contract)}",
        "from fuselab.runtime.cpp_sweep import CppSweeps",
        "from fuselab.runtime.cuda_sweep import CudaSweeps",
        *call_imports(package),
        f"from fuselab.runtime.signature import {', '.join(signature)}",
        f"from fuselab.runtime.sweep import {', '.join(names)}",
        f"from fuselab.runtime.triton_sweep import {', '.join(triton_names(package))}, configs",
        "",
        "from . import triton_kernels",
        *gradient_import(package),
        reference_import(package),
        "",
    ]
    return "\n".join(lines)


def allocation(package: Package) -> str:
    """Return the name of the function of ``signature`` that allocates the outputs."""
    return "output_like" if len(package.output_names) == 1 else "outputs_like"


def call_imports(package: Package) -> list[str]:
    """Return the line that imports what the PyTorch calls of the launchers are made with."""
    calls = [one.operator for one in in_order(package.program.results) if isinstance(one, Call)]
    used = [one for one in (ADDED, ADDED_AT) if any(f"{one}(" in call for call in calls)]
    return [f"from fuselab.runtime.scatter import {', '.join(used)}"] if used else []


def gradient_import(package: Package) -> list[str]:
    """Return the line that imports the formulas of a package with a gradient."""
    names = ["gradient", *(["residuals"] if package.kept else [])]
    return [f"from .gradient import {', '.join(names)}"] if package.has_gradient else []


def reference_import(package: Package | Cut) -> str:
    """Return the line that imports the reference, and what ``bench`` times in its place."""
    names = ["reference"] if package.captured.seed is None else ["drawing", "reference"]
    return f"from .reference import {', '.join(names)}"


def draw_text(package: Package | Cut) -> str:
    """Return the text of ``draw``; empty where valid values cannot be known (integers)."""
    drawn = drawn_text(package)
    if not drawn:
        return ""
    return (
        f"{drawn}\n\ndef draw(source: Draw) -> Inputs:\n"
        '    """Draw tensors of any sizes and layouts that the reference accepts."""\n'
        "    return Inputs(accepted(reference, lambda: _drawn(source)))\n"
    )


def drawn_text(package: Package | Cut) -> str:
    """Return the text of ``_drawn``, which draws the tensors of one call, whether or not the
    reference accepts them together; empty where valid values cannot be known."""
    seed = package.captured.seed
    others = {
        one.name: one.tensor.dtype
        for one in package.captured.arguments
        if not one.tensor.is_floating_point() and one.name != seed
    }
    if any(dtype != torch.bool for dtype in others.values()):
        return ""
    multiples = {name: f"{count} * " for name, count in factors(package.multiples).items()}
    least = {name: f" + {count}" for name, count in package.least.items()}
    lines = []
    for name in package.sizes.names.values():
        size = f"source.size(){least.get(name, '')}"
        is_factor = name in multiples and name in least
        lines.append(f"    {name} = {multiples.get(name, '')}{f'({size})' if is_factor else size}")
    drawn = {
        name: (
            f"source.integers({', '.join([*dims, 'low=0', 'high=2', 'dtype=torch.bool'])})"
            if name in others
            else f"source.tensor({', '.join(dims)})"
        )
        for name, dims in patterns(package)
    }
    if seed is not None:
        drawn[seed] = "source.integers(low=0, high=2**63 - 1)"
    tensors = [f"        {text}," for text in _held(package, drawn)]
    kind = "Any" if isinstance(package, Package) and package.lists else "Tensor"
    body = [
        f"def _drawn(source: Draw) -> tuple[{kind}, ...]:",
        *lines,
        "    return (",
        *tensors,
        "    )",
    ]
    return "\n".join(body) + "\n"


def _held(package: Package | Cut, texts: Mapping[str, str]) -> list[str]:
    """Return the texts of the operator's arguments, of which ``texts`` has the tensors."""
    if not isinstance(package, Package):
        return [*texts.values()]
    return [
        texts[name] if held == (name,) else f"({', '.join(texts[one] for one in held)},)"
        for name, held in package.taken.items()
    ]


def _prefer_text(package: Package) -> str:
    """Return the text of ``prefer``; empty where ``auto`` may take all implementations."""
    if not package.pools_adaptively:
        return ""
    return (
        "def prefer(*args: object) -> Sequence[str]:\n"
        '    """Leave a CPU to the reference: PyTorch\'s adaptive pooling is faster there."""\n'
        '    return ("triton", "cuda")\n'
    )


def autocast_text(package: Package) -> str:
    """Return the text of ``autocast``; empty where torch.autocast widens nothing, and where the
    operator writes over its arguments, which no cast may take the place of."""
    if package.in_place:
        return ""
    called = _called(package)
    everywhere, on_gpu = called & AUTOCAST_TO_FLOAT32, called & AUTOCAST_TO_FLOAT32_ON_GPU
    if not everywhere and not on_gpu:
        return ""
    found = f"{', '.join(sorted(everywhere or on_gpu))}{'' if everywhere else ' on a GPU'}"
    return (
        "def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:\n"
        f'    """Cast as torch.autocast does for {found}."""\n'
        f"    return {autocast_helper(package)}(args)\n"
    )


def autocast_helper(package: Package) -> str:
    """Return the name of the function of ``runtime/signature.py`` that ``autocast`` calls."""
    return "float32_everywhere" if _called(package) & AUTOCAST_TO_FLOAT32 else "float32_on_gpu"


def _called(package: Package) -> set[str]:
    """Return the names of the functions that the user's code calls."""
    return {_function_name(node.target) for node in package.captured.traced.graph.nodes}


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


# The functions that torch.autocast runs in float32 on every device, and those that it does on a GPU
# alone (PyTorch's documentation of amp).
AUTOCAST_TO_FLOAT32 = frozenset(
    (
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
        "cross_entropy", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
        "margin_ranking_loss", "mse_loss", "multi_margin_loss", "nll_loss", "poisson_nll_loss",
        "prod", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
    )
)  # fmt: skip
AUTOCAST_TO_FLOAT32_ON_GPU = frozenset(
    (
        "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp",
        "expm1", "group_norm", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax",
        "norm", "normalize", "pow", "reciprocal", "rsqrt", "sinh", "softmax", "softmin",
        "softplus", "sum", "tan",
    )
)  # fmt: skip


def example_case(package: Package | Cut) -> str:
    """Return the text of the case with the sizes of the example."""
    arguments = package.captured.arguments
    has_lists = isinstance(package, Package) and bool(package.lists)
    if all(argument.tensor.is_floating_point() for argument in arguments) and not has_lists:
        shapes = [_example_shape(argument.tensor) for argument in arguments]
        return f'_EXAMPLE = Case.normal({shapes!r}, "bench", "dtypes")\n'
    made = _made(package, "_example", example_values(package))
    return f'{made}_EXAMPLE = Case("example", _example, frozenset({{"bench", "dtypes"}}))\n'


def cases_text(package: Package) -> str:
    """Return the text of the example's case, and what makes those of smaller calls."""
    return smaller_cases(package)[0] + varied_cases(package)[0] + example_case(package)


def smaller_cases(package: Package) -> tuple[str, list[str]]:
    """Return the text of the functions that make smaller calls than the example, and the texts of
    the cases of such calls; none where an argument is a list."""
    if package.lists:
        return "", []
    several = smaller_shapes(package)
    if all(argument.tensor.is_floating_point() for argument in package.captured.arguments):
        return "", [f'Case.normal({shapes!r}, "dtypes")' for shapes in several]
    return _cases_of(package, ("smaller", "smallest"), several, '"dtypes"')


def varied_cases(package: Package) -> tuple[str, list[str]]:
    """Return the text of the functions that make small calls, and the texts of their cases, which
    ``check`` varies where it cannot draw sizes."""
    if package.lists or drawn_text(package):
        return "", []
    return _cases_of(package, ("small", "tiny"), small_shapes(package), '"boundary", "dtypes"')


def _cases_of(
    package: Package, names: Sequence[str], several: Sequence[list[tuple[int, ...]]], tags: str
) -> tuple[str, list[str]]:
    """Return the text of functions that make arguments of these shapes, and their cases' texts."""
    functions, cases = "", []
    for name, shapes in zip(names, several, strict=False):
        functions += _made(package, f"_{name}", example_values(package, shapes))
        cases.append(f'Case("{name}", _{name}, frozenset({{{tags}}}))')
    return functions, cases


def _made(package: Package | Cut, name: str, values: Mapping[str, str]) -> str:
    """Return the text of a function that makes arguments, and two empty lines."""
    return "\n".join(
        [
            f"def {name}(",
            "    device: torch.device, dtype: torch.dtype, generator: torch.Generator",
            ") -> Inputs:",
            "    return Inputs(",
            "        (",
            *(f"            {text}," for text in _held(package, values)),
            "        )",
            "    )",
            "",
            "",
            "",
        ]
    )


def example_values(
    package: Package | Cut, shapes: Sequence[tuple[int, ...]] | None = None
) -> dict[str, str]:
    """Return the texts of random tensors like those of the example by their names, or of others of
    these ``shapes``, made with ``generator``, in ``dtype`` on ``device``."""
    values = {}
    arguments = package.captured.arguments
    shapes = shapes or [_example_shape(argument.tensor) for argument in arguments]
    for argument, shape in zip(arguments, shapes, strict=True):
        if argument.tensor.is_floating_point():
            values[argument.name] = f"torch.randn({shape}, generator=generator).to(device, dtype)"
        else:
            low, high = package.captured.ranges.get(argument.name, (0, 1))
            end = "2**63 - 1" if argument.name == package.captured.seed else high + 1
            drawn = f"torch.randint({low}, {end}, {shape}, generator=generator)"
            values[argument.name] = f"{drawn}.to(device, {argument.tensor.dtype})"
    return values


def _example_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(one if isinstance(one, int) else one.node.hint for one in tensor.shape)


def declaration_text(package: Package, languages: Sequence[str], around: str = "") -> str:
    """Return the text of the ``FusedOp``; ``around`` is a function that each launcher is given
    to."""
    has_gradient = package.has_gradient
    implementations = ""
    for name in languages:
        launchers = [f"forward_{name}", *([f"backward_{name}"] if has_gradient else [])]
        given = ", ".join(f"{around}({one})" if around else one for one in launchers)
        implementations += (
            f'        "{name}": Implementation(\n'
            f'            "{DEVICES[name]}", {given}, supports=supports\n'
            "        ),\n"
        )
    options = ""
    frozen = [
        f'            "{name}": "{package.advice(name)}",\n'
        for name in package.parameters
        if name in package.frozen
    ]
    if frozen:
        options += f"        frozen={{\n{''.join(frozen)}        }},\n"
    if package.non_differentiable:
        names = "".join(f'"{name}", ' for name in package.non_differentiable).rstrip()
        options += f"        non_differentiable=({names}),\n"
    prefers = package.pools_adaptively and not around  # a standalone package has its own choice
    if prefers:
        options += "        prefer=prefer,\n"
    if package.passed:
        options += f"        passed={package.passed},\n"
    if package.equal:
        options += f"        equal={package.equal},\n"
    gradient = "    gradient=Gradient(save, gradient, fake_gradient),\n"
    if options:
        gradient = (
            "    gradient=Gradient(\n        save,\n        gradient,\n        fake_gradient,\n"
            f"{options}    ),\n"
        )
    gradient = gradient if has_gradient else ""
    kept = "    residuals=residuals,\n" if package.kept else ""
    if package.in_place:
        over = {*package.captured.written}
        names = "".join(
            f'"{name}", ' for name, held in package.taken.items() if over.issuperset(held)
        ).rstrip()
        kept = f"    mutates=({names}),\n"
    smaller = "".join(f"        {case},\n" for case in smaller_cases(package)[1])
    varied = "".join(f"        {case},\n" for case in varied_cases(package)[1])
    cases = f"(\n        _EXAMPLE,\n{varied}    )" if varied else "(_EXAMPLE,)"
    tuned = '"triton": configs' + (', "triton_backward": configs' if has_gradient else "")
    last = "    draw=draw,\n" if draw_text(package) else ""
    last += "    autocast=autocast,\n" if autocast_text(package) else ""
    last += "    drawing=drawing,\n" if package.captured.seed is not None else ""
    last += f'    nondeterministic="{UNORDERED}",\n' if package.is_unordered else ""
    last += "    prefer=prefer,\n" if prefers else ""
    return f"""\
OP = FusedOp(
    name="{package.operator_name}",
    reference=reference,
    implementations={{
{implementations}    }},
{gradient}{kept}    cases={cases},
    cpu_cases=(
        _EXAMPLE,
{smaller}    ),
    configs={{{tuned}}},
    supports=supports,
{last})
"""
