"""Compilation of CUDA C++ kernels of a ``.cu`` file for an architecture that is not there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fuselab.errors import ArgumentError, TargetError, UnsupportedError
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.assembly.kernel import Argument, Kernel
from fuselab.packaging import cuda_block, cuda_text
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.parameters import Scalar

DEFAULT_THREADS = 256
MOST_THREADS = 1024
# A __global__ function: what stands before it back to the last ; or }, and its head up to its body.
_GLOBAL = re.compile(r"(?P<before>[^;{}]*)__global__(?P<head>[^{;]*)[{;]")
_ATTRIBUTE = re.compile(
    r"__(?:launch_bounds|cluster_dims|block_size|maxnreg)__\s*\((?:[^()]|\([^()]*\))*\)"
)


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
    that is no template.
    """

    name: str
    instance: str | None


def declared(text: str) -> list[Declared]:
    """Return the ``__global__`` functions of a CUDA source, in order."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    found: dict[str, Declared] = {}
    for match in _GLOBAL.finditer(text):
        name = re.search(r"(\w+)\s*\(", _ATTRIBUTE.sub(" ", match["head"]))
        if name is None:
            continue
        template = re.search(r"\btemplate\s*<(.*)>", match["before"], re.DOTALL)
        instance = _instance(template[1]) if template else None
        one = Declared(name[1], instance)
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
    path: Path,
    architecture: Architecture,
    expression: str | None,
    threads: tuple[int, ...] | None,
) -> list[Kernel]:
    """Return the kernels of a ``.cu`` file: ``expression`` alone (``"forward<float, 4>"``), or
    every one that is no template.

    ``threads`` are those of a block, per axis. Without them a block has what the kernel's text
    says, else what its ``__launch_bounds__`` say, else 256. Raises TargetError, BuildError.
    """
    source = CudaSource(path)
    text = text_of(path)
    found = {one.name: one for one in declared(text)}
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
    made = []
    for each, one in chosen.items():
        block = _padded(threads or (one.instance is None and _said_block(path, text, one)) or ())
        _refuse_block(block)
        kernel = compiled(source, each, architecture, block=block)
        if block is not None and math.prod(block) > (_bound(kernel) or MOST_THREADS):
            raise ArgumentError(
                f"--threads {','.join(map(str, threads or ()))}: {each} is bound to "
                f"{_bound(kernel)} threads per block by its __launch_bounds__."
            )
        made.append(kernel)
    return made


def _padded(threads: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return the threads of a block along all three axes; None if they are not known."""
    if not threads:
        return None
    x, y, z = (*threads, 1, 1)[:3]
    return x, y, z


def _said_block(path: Path, text: str, one: Declared) -> tuple[int, ...]:
    """Return the block that a kernel's text says, as ``fuselab new`` reads it; none if it says
    none."""
    kernel = next((each for each in cuda_text.kernels_in(text) if each.name == one.name), None)
    if kernel is None:
        return ()
    try:
        host = cuda_text.host_launch(text, kernel)
        found = cuda_block.block_of(path, text, kernel, host, cuda_block.Asked()).threads
        return tuple(map(int, found))
    except (ArgumentError, ValueError):  # expressions of the host's tensors among them
        return ()


def _bound(kernel: Kernel) -> int | None:
    """Return the threads that the kernel's ``__launch_bounds__`` allow; None if it has none."""
    head = kernel.texts["ptx"].partition(f".entry {kernel.function}(")[2].partition("{")[0]
    found = re.search(r"\.maxntid\s+([\d, ]+)", head)
    return math.prod(map(int, found[1].split(","))) if found else None


def templates_of(path: Path) -> list[Declared]:
    """Return a file's kernels that are templates."""
    return [one for one in declared(text_of(path)) if one.instance is not None]


def template_text(path: Path, template: Declared) -> str:
    """Return the clause that says how a template is named."""
    return (
        f"{template.name} in {path} is a template; name an instantiation, for example "
        f"--kernel '{template.name}<{template.instance}>'"
    )


def _refuse_block(block: tuple[int, int, int] | None) -> None:
    if block is not None and not 1 <= math.prod(block) <= MOST_THREADS:
        raise ArgumentError(f"a block has 1 to {MOST_THREADS} threads, not {math.prod(block)}.")


def compiled(
    source: CudaSource,
    expression: str,
    architecture: Architecture,
    grid: tuple[int, int, int] | None = None,
    block: tuple[int, int, int] | None = None,
    args: Sequence[Any] = (),
    shared_bytes: int = 0,
) -> Kernel:
    """Return one instantiation, compiled. Raises BuildError with the compiler's message.

    Without a ``block`` it has the threads of the kernel's ``__launch_bounds__``, else 256.
    """
    if architecture.vendor != "nvidia":
        raise UnsupportedError(
            f"{source.path.name} is CUDA C++, which does not compile for {architecture.name}; "
            "Triton kernels do."
        )
    arch = source.arch_for(architecture.name)
    if source.architectures and arch == architecture.name and arch not in source.architectures:
        raise UnsupportedError(
            f"{source.path.name} is for {', '.join(source.architectures)} only, not for "
            f"{architecture.name}."
        )
    function, binary = source.named_image(expression, arch)
    _, ptx = source.named_image(expression, arch.replace("sm_", "compute_"))
    kernel = Kernel(
        name=expression,
        function=function,
        language="cuda",
        architecture=architecture,
        texts={"ptx": ptx.rstrip(b"\0").decode()},
        binary=binary,
        block=block or (DEFAULT_THREADS, 1, 1),
        grid=grid,
        shared_bytes=shared_bytes,
        arguments=tuple(map(_argument, args)),
        file=str(source.path),
    )
    return kernel if block else replace(kernel, block=(_bound(kernel) or DEFAULT_THREADS, 1, 1))


def _argument(value: Any) -> Argument:
    if isinstance(value, Tensor) or value is None:
        return Argument("", "pointer", 0 if value is None else None)
    if isinstance(value, Scalar) and isinstance(value.value, int):
        return Argument("", value.code, value.value)
    return Argument("", getattr(value, "code", "value"))
