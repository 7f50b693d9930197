"""A package's operators as C++: a CMake project, or an extension that ``load_inline`` compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuselab.errors import UnsupportedError
from fuselab.op import FusedOp
from fuselab.packaging.native_operator import NativeOperator, native_operator
from fuselab.runtime import cache, instruction_set
from fuselab.runtime.cpp_library import OPTIONS

PROJECT = "CMakeLists.txt"
SIGNATURE = "written by `fuselab build`"
_FILES = Path(__file__).with_name("native_files")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Project:
    """Files by name, notes for the author, and what a program uses of them."""

    files: Mapping[str, bytes]
    notes: Sequence[str]
    offered: str


def cmake_project(name: str, operators: Sequence[FusedOp]) -> Project:
    """Return the CMake project of a package: a library that registers its operators with PyTorch's
    dispatcher, and a program that runs an AOTInductor artifact with it.

    Raises UnsupportedError.
    """
    native = _native(operators)
    files = _sources(native)
    files["run_artifact.cpp"] = (_FILES / "run_artifact.cpp").read_bytes()
    template = (_FILES / "CMakeLists.txt.in").read_text("utf-8")
    written = template.replace("@NAME@", name).replace("@SIGNATURE@", SIGNATURE)
    kernels = [f"{one.name.partition('::')[2]}_launches.cpp" for one in native if one.launches]
    written = written.replace("@OPERATORS@", " ".join(_operator_files(native)))
    written = written.replace("@KERNELS@", " ".join(kernels))
    files[PROJECT] = written.encode()
    return Project(files, _notes(native), name)


def inline_package(name: str, operators: Sequence[FusedOp]) -> Project:
    """Return a Python package that compiles a package's operators by ``load_inline`` on import.

    They are ``torch.ops.NAME_native.OPERATOR``, so that the package itself may be imported beside
    them. Raises UnsupportedError.
    """
    native = _native(operators)
    files = _sources(native)
    included = [*_operator_files(native), *(f for f in files if f.endswith("_launches.cpp"))]
    flags = [*OPTIONS, *instruction_set.compiler_options(), f"-DFUSELAB_NAMESPACE={name}_native"]
    functions = "\n\n\n".join(_function(f"{name}_native", op) for op in operators)
    offered = [op.short_name for op in operators]
    files["__init__.py"] = f'''\
"""{", ".join(offered)} as a C++ extension, {SIGNATURE}.

``load_inline`` compiles the sources beside this file when it is first imported, and finds the
library again afterwards. ``FUSELAB_BUILD_DIRECTORY`` says where it is kept.
"""

import os
from pathlib import Path

import torch
from torch.utils.cpp_extension import load_inline

_HERE = Path(__file__).resolve().parent
_SOURCES = {included!r}

load_inline(
    name="{name}_native",
    cpp_sources=[f'#include "{{source}}"' for source in _SOURCES],
    extra_include_paths=[str(_HERE)],
    extra_cflags={flags!r},
    build_directory=os.environ.get("FUSELAB_BUILD_DIRECTORY"),
    is_python_module=False,
    no_implicit_headers=True,
)


{functions}


__all__ = {offered!r}
'''.encode()
    return Project(files, _notes(native), ", ".join(offered))


def _native(operators: Sequence[FusedOp]) -> list[NativeOperator]:
    if not operators:
        raise UnsupportedError("the package has no operator of its own.")
    return [
        native_operator(op, [dtype for dtype in _DTYPES if dtype in op.dtypes]) for op in operators
    ]


def _notes(native: Sequence[NativeOperator]) -> list[str]:
    notes = [note for one in native for note in one.notes]
    notes += [f"{one.name} has no gradient in C++" for one in native if not one.has_gradient]
    return list(dict.fromkeys(notes))


def _operator_files(native: Sequence[NativeOperator]) -> list[str]:
    return [f"{one.name.partition('::')[2]}.cpp" for one in native]


def _sources(native: Sequence[NativeOperator]) -> dict[str, bytes]:
    """Return the C++ files, all in one folder: operators, kernels and headers."""
    files = {
        header.name: header.read_bytes()
        for folder in (_FILES, cache.HEADERS)
        for header in sorted(folder.glob("*.h"))
        if not header.name.startswith("cuda_")
    }
    for one in native:
        short = one.name.partition("::")[2]
        files[f"{short}.cpp"] = one.operator.encode()
        if one.launches is not None and one.kernels is not None:
            files[f"{short}_launches.cpp"] = one.launches.encode()
            files[f"{short}_kernels.h"] = one.kernels.read_bytes()
    return files


def _function(namespace: str, op: FusedOp) -> str:
    """Return the text of the public function of an operator."""
    listed = ", ".join(op.signature.parameters)
    returned = {1: "returned" if op.residual_count == 0 else "returned[0]"}.get(
        op.output_count, f"returned[:{op.output_count}]"
    )
    return f'''\
def {op.short_name}({listed}, *, implementation="auto"):
    """Compute {op.name} by its C++ kernels, or as "reference" by its definition."""
    returned = torch.ops.{namespace}.{op.short_name}({listed}, implementation)
    return {returned}'''
