"""Write a package that runs on torch and Triton alone: beside its kernels it has the parts of
fuselab's runtime that it uses.

``launchers.py`` declares the operator. ``op.py`` declares the same launchers to ``fuselab check``
and ``fuselab bench``; it is the only file that imports fuselab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

import fuselab
from fuselab.ejection.copied import (
    FOLDER,
    RUNTIME,
    STANDALONE,
    copied,
    headers,
    needs,
    with_relative_imports,
)
from fuselab.ejection.fold import formatted
from fuselab.ejection.package import Package
from fuselab.ejection.write import (
    allocation,
    autocast_helper,
    autocast_text,
    call_imports,
    cases_text,
    declaration_text,
    draw_text,
    example_values,
    gradient_import,
    kernel_files,
    reference_import,
)
from fuselab.ejection.write_init import public_text, seed_import
from fuselab.ejection.write_launchers import DEVICES, launcher_parts, sweep_names, triton_names
from fuselab.ejection.write_module import module_text
from fuselab.ejection.write_page import page_text

LANGUAGES = ("triton", "cpp")  # CUDA C++ is compiled and launched by fuselab's runtime
CONTRACT = "op.py"
# What contracts import of the package's own runtime: bench tries other configurations by it.
_TUNING = {f"{RUNTIME}.triton_sweep": "configs", f"{STANDALONE}.tuning": "choose_by"}


def standalone_files(package: Package) -> dict[str, str]:
    """Return the text of every file of a standalone package of one operator by its name."""
    return with_runtime(operator_files(package, f".{FOLDER}"))


def operator_files(package: Package, runtime: str) -> dict[str, str]:
    """Return the files of one operator, which import fuselab's runtime; the contract imports the
    package's own, by the relative name ``runtime``. Its operators write new tensors only, which
    the public function copies into arguments."""
    package = replace(package, in_place=False)
    files = {
        "__init__.py": formatted(_init(package)),
        "launchers.py": formatted(_launchers(package)),
        CONTRACT: formatted(_op(package, runtime)),
        **kernel_files(package, LANGUAGES),
        f"test_{package.name}.py": formatted(_test(package)),
        "page.md": page_text(package) + page_section(),
    }
    if isinstance(package.captured.function, nn.Module):
        files["module.py"] = module_text(package.formulas)
    return files


def with_runtime(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a package with the parts of fuselab's runtime that they use. Imports of
    these become relative; only contracts import fuselab. A name may be that of a folder's file."""
    own = {name: text for name, text in files.items() if name.endswith(".py")}
    contracts = {name for name in own if name.rpartition("/")[2] in (CONTRACT, "composed.py")}
    needed = [*_TUNING.items()]
    needed += [one for name in own if name not in contracts for one in needs(own[name])]
    found = dict(files)
    for name in own.keys() - contracts:
        package = "." * (1 + name.count("/")) + FOLDER
        found[name] = with_relative_imports(own[name], package)
    for name, text in copied(needed).items():
        found[f"{FOLDER}/{name}"] = text
    found[f"{FOLDER}/__init__.py"] = (
        f'"""Parts of the runtime of fuselab {fuselab.__version__} (Apache License 2.0)."""\n'
    )
    sources = "\n".join(text for name, text in files.items() if name.endswith(".cpp"))
    for name, text in headers(sources).items():
        found[f"{FOLDER}/include/{name}"] = text
    return found


def page_section() -> str:
    """Return the section of ``page.md`` that says what a standalone package needs and leaves
    out."""
    return """
## Standalone

This package runs on torch and Triton alone; `runtime/` has the parts of fuselab's runtime that it
uses. On a GPU it takes the Triton kernels, on a CPU the C++ ones, which the machine's C++ compiler
builds on first use. Where neither can run, PyTorch computes `reference.py`. It has no CUDA C++
kernels, because those need fuselab's own runtime. Only `op.py` imports fuselab, for `fuselab check`
and `fuselab bench`.
"""


def _init(package: Package) -> str:
    imports = ["from .launchers import operator as _operator", *seed_import(package)]
    return public_text(package, imports, "")


def _launchers(package: Package) -> str:
    has_gradient, widened = package.has_gradient, autocast_text(package)
    signature = [*([autocast_helper(package)] if widened else []), "mismatch", allocation(package)]
    signature += ["without_elements"] if has_gradient and package.unread else []
    declared = [*(["Differentiation"] if has_gradient else []), "Kernels", "Operator"]
    launchers = launcher_parts(package, LANGUAGES)
    imports = [
        "from __future__ import annotations",
        "",
        *(["from collections.abc import Sequence"] if has_gradient else []),
        "from functools import partial",
        "from pathlib import Path",
        *(["from typing import Any"] if widened else []),
        "",
        "import torch",
        "from torch import Tensor",
        "",
        "from . import triton_kernels",
        *gradient_import(package),
        "from .reference import reference",
        "from fuselab.runtime.cpp_sweep import CppSweeps",
        *call_imports(package),
        f"from fuselab.runtime.signature import {', '.join(signature)}",
        f"from fuselab.runtime.standalone.operator import {', '.join(declared)}, public_function",
        f"from fuselab.runtime.sweep import {', '.join(sweep_names(launchers))}",
        f"from fuselab.runtime.triton_sweep import {', '.join(triton_names(package))}",
        "",
    ]
    parts = ["\n".join(imports), *launchers]
    parts += [widened] if widened else []
    parts.append(_operator(package))
    head = f'"""The launchers of {package.name}, and the operator that PyTorch sees."""\n\n'
    return head + "\n\n".join(parts)


def _operator(package: Package) -> str:
    """Return the statement that declares the operator."""
    has_gradient = package.has_gradient
    kernels = ""
    for name in LANGUAGES:
        backward = f", backward_{name}" if has_gradient else ""
        kernels += f'            "{name}": Kernels("{DEVICES[name]}", forward_{name}{backward}),\n'
    gradient = ""
    if has_gradient:
        advice = "eject it with this argument requiring one"
        frozen = {
            place: advice for place, name in enumerate(package.parameters) if name in package.frozen
        }
        more = f", frozen={frozen!r}".replace("'", '"') if frozen else ""
        constant = [package.parameters.index(name) for name in package.non_differentiable]
        more += f", non_differentiable={constant!r}" if constant else ""
        given = f"save, gradient, fake_gradient, saved={len(package.given_back)}{more}"
        gradient = f"        gradient=Differentiation({given}),\n"
    widened = "        autocast=autocast,\n" if autocast_text(package) else ""
    if package.kept:
        widened += f"        residuals=residuals,\n        kept={len(package.kept)},\n"
    return f"""\
operator = public_function(
    Operator(
        name="{package.name}",
        module=__name__,
        reference=reference,
        parameters={len(package.parameters)},
        outputs={len(package.output_names)},
        kernels={{
{kernels}        }},
        supports=supports,
{gradient}{widened}    )
)
"""


def _op(package: Package, runtime: str) -> str:
    """Return the text of the contract for fuselab."""
    has_gradient, drawn = package.has_gradient, draw_text(package)
    case = cases_text(package)
    contract = [
        "Case",
        *(["Draw"] if drawn else []),
        "FusedOp",
        *(["Gradient"] if has_gradient else []),
        "Implementation",
        *(["Inputs"] if drawn or "Inputs" in case else []),
    ]
    directions = ["forward", *(["backward"] if has_gradient else [])]
    launchers = [
        *(["autocast"] if autocast_text(package) else []),
        *(f"{direction}_{name}" for direction in directions for name in LANGUAGES),
        *(["fake_gradient", "save"] if has_gradient else []),
        "supports",
    ]
    lines = [
        f'"""The contract of ``ejected::{package.name}``, by which fuselab checks and times it."""',
        "",
        "from __future__ import annotations",
        "",
        *(["import torch"] if "torch." in case else []),
        *(["from torch import Tensor", ""] if drawn else []),
        f"from fuselab.op import {', '.join(contract)}",
        "from fuselab.runtime.launch_recording import unplanned",
        *(["from fuselab.runtime.signature import accepted"] if drawn else []),
        "from fuselab.runtime.tuning import chosen",
        "",
        *gradient_import(package),
        f"from .launchers import {', '.join(sorted(launchers))}",
        reference_import(package),
        f"from {runtime}.triton_sweep import configs",
        f"from {runtime}.tuning import choose_by",
        "",
        "choose_by(chosen)",
        "",
        *([drawn, ""] if drawn else [""]),
        case,
        declaration_text(package, LANGUAGES, "unplanned"),
    ]
    return "\n".join(lines)


def _test(package: Package) -> str:
    """Return the text of a test that compares the kernels with the reference in float64."""
    name = package.name
    values = "".join(f"            {text},\n" for text in example_values(package).values())
    compared = "assert_close(operator(*args), reference(*args))"
    if package.has_gradient:
        compared = "assert_close(_with_gradients(operator, args), _with_gradients(reference, args))"
    frozen = [place for place, one in enumerate(package.parameters) if one in package.frozen]
    is_wanted = f"place not in {frozen} and arg" if frozen else "arg"
    inputs = "for place, arg in enumerate(args)" if frozen else "for arg in args"
    gradients = f'''

def _with_gradients(function, args):
    """Return the outputs, and the gradients of the sum of their squares."""
    inputs = [arg.clone().requires_grad_({is_wanted}.is_floating_point()) {inputs}]
    returned = function(*inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(output.square().sum() for output in outputs if output.requires_grad).backward()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
    return [*outputs, *gradients]
'''
    return f'''\
"""Compare {name} with its reference in float64; it needs no fuselab."""

import torch
from torch.testing import assert_close

from .launchers import operator
from .reference import reference


def test_{name}() -> None:
    dtype, generator = torch.float64, torch.Generator().manual_seed(0)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        args = (
{values}        )
        {compared}
{gradients if package.has_gradient else ""}'''
