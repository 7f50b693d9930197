"""Compilation of CUDA C++ kernels of a ``.cu`` file for an architecture that is not there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fuselab.errors import ArgumentError, TargetError, UnsupportedError
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.assembly.kernel import Argument, Kernel
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.parameters import Scalar

DEFAULT_THREADS = 256
# A __global__ function: what stands before it back to the last ; or }, and its head up to its body.
_GLOBAL = re.compile(r"(?P<before>[^;{}]*)__global__(?P<head>[^{;]*)[{;]")
_ATTRIBUTE = re.compile(
    r"__(?:launch_bounds|cluster_dims|block_size|maxnreg)__\s*\((?:[^()]|\([^()]*\))*\)"
)
_BOUNDS = re.compile(r"__launch_bounds__\s*\(\s*(\d+)\s*[,)]")


def text_of(path: Path) -> str:
    """Return the text of a ``.cu`` file. Raises TargetError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TargetError(f"{path} is no text in UTF-8; give a file of CUDA C++.") from error
    except OSError as error:
        raise TargetError(f"cannot read {path}: {(error.strerror or '').lower()}.") from error


@dataclass(frozen=True)
class Declared:
    """A ``__global__`` function of a file.

    ``instance`` is an example of a template's arguments, ``float, 256``; it is None for a function
    that is no template. ``threads`` is the launch bound, if that is a number.
    """

    name: str
    instance: str | None
    threads: int | None


def declared(text: str) -> list[Declared]:
    """Return the ``__global__`` functions of a CUDA source, in order."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    found: dict[str, Declared] = {}
    for match in _GLOBAL.finditer(text):
        name = re.search(r"(\w+)\s*\(", _ATTRIBUTE.sub(" ", match["head"]))
        if name is None:
            continue
        bound = _BOUNDS.search(match["before"] + match["head"])
        template = re.search(r"\btemplate\s*<(.*)>", match["before"], re.DOTALL)
        instance = _instance(template[1]) if template else None
        one = Declared(name[1], instance, int(bound[1]) if bound else None)
        found.setdefault(one.name, one)
    return list(found.values())


def _instance(parameters: str) -> str:
    """Return example arguments for a template's parameters, as far as these have no defaults."""
    while "<" in parameters:  # what stands within a parameter separates none
        parameters, before = re.sub(r"<[^<>]*>", "", parameters), parameters
        if parameters == before:
            break
    given = []
    for one in parameters.split(","):
        if "=" in one:
            break
        is_type = re.match(r"\s*(typename|class)\b", one) is not None
        is_flag = re.match(r"\s*bool\b", one) is not None
        given.append("float" if is_type else "true" if is_flag else "256")
    return ", ".join(given)


def of_file(
    path: Path, architecture: Architecture, expression: str | None, threads: int | None
) -> list[Kernel]:
    """Return the kernels of a ``.cu`` file: ``expression`` alone (``"forward<float, 4>"``), or
    every one that is no template. Raises TargetError, BuildError."""
    source = CudaSource(path)
    found = {one.name: one for one in declared(text_of(path))}
    if not found:
        raise TargetError(f"{path} has no __global__ function.")
    if expression is not None:
        name = expression.partition("<")[0].strip()
        if name not in found:
            raise TargetError(f"{path} has no kernel '{name}'; it has {', '.join(found)}.")
        if found[name].instance is not None and "<" not in expression:
            raise TargetError(f"{template_text(path, found[name])}.")
        chosen = {expression: found[name]}
    else:
        chosen = {one.name: one for one in found.values() if one.instance is None}
        if not chosen:
            raise TargetError(f"{template_text(path, next(iter(found.values())))}.")
    _refuse_block(threads)
    for each, one in chosen.items():
        if threads is not None and one.threads is not None and threads > one.threads:
            raise ArgumentError(
                f"--threads {threads}: {each} is bound to {one.threads} threads per block by its "
                "__launch_bounds__."
            )
    return [
        compiled(
            source,
            each,
            architecture,
            threads if threads is not None else one.threads or DEFAULT_THREADS,
        )
        for each, one in chosen.items()
    ]


def templates_of(path: Path) -> list[Declared]:
    """Return a file's kernels that are templates."""
    return [one for one in declared(text_of(path)) if one.instance is not None]


def template_text(path: Path, template: Declared) -> str:
    """Return the clause that says how a template is named."""
    return (
        f"{template.name} in {path} is a template; name an instantiation, for example "
        f"--kernel '{template.name}<{template.instance}>'"
    )


def _refuse_block(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= 1024:
        raise ArgumentError(f"a block has 1 to 1024 threads, not {threads}.")


def compiled(
    source: CudaSource,
    expression: str,
    architecture: Architecture,
    threads: int,
    grid: tuple[int, int, int] | None = None,
    block: tuple[int, int, int] | None = None,
    args: Sequence[Any] = (),
    shared_bytes: int = 0,
) -> Kernel:
    """Return one instantiation, compiled. Raises BuildError with the compiler's message."""
    if architecture.vendor != "nvidia":
        raise UnsupportedError(
            f"{source.path.name} is CUDA C++, which does not compile for {architecture.name}; "
            "Triton kernels do."
        )
    _refuse_block(threads)
    arch = source.arch_for(architecture.name)
    if source.architectures and arch == architecture.name and arch not in source.architectures:
        raise UnsupportedError(
            f"{source.path.name} is for {', '.join(source.architectures)} only, not for "
            f"{architecture.name}."
        )
    function, binary = source.named_image(expression, arch)
    _, ptx = source.named_image(expression, arch.replace("sm_", "compute_"))
    return Kernel(
        name=expression,
        function=function,
        language="cuda",
        architecture=architecture,
        texts={"ptx": ptx.rstrip(b"\0").decode()},
        binary=binary,
        block=block or (threads, 1, 1),
        grid=grid,
        shared_bytes=shared_bytes,
        arguments=tuple(map(_argument, args)),
        file=str(source.path),
    )


def _argument(value: Any) -> Argument:
    if isinstance(value, Tensor) or value is None:
        return Argument("", "pointer", 0 if value is None else None)
    if isinstance(value, Scalar) and isinstance(value.value, int):
        return Argument("", value.code, value.value)
    return Argument("", getattr(value, "code", "value"))
