"""The check of a CUDA C++ implementation without a GPU: every declared kernel must compile."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from fuselab.errors import BuildError
from fuselab.op import FusedOp
from fuselab.prove.held import End, Held
from fuselab.prove.result import Group, Result, Verdict
from fuselab.runtime.cuda_source import CudaSource

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Declared:
    """A CUDA source of an operator, and the kernels of it that must compile."""

    source: CudaSource
    expressions: Sequence[str]


def cuda_sources(held: Held) -> list[tuple[str, list[str], list[str], list[str]]]:
    """Return the sources that the held implementation declares, as plain values for
    ``declared_sources``. A procedure (``fuselab.prove.held``)."""
    assert held.implementation is not None
    return [
        (str(source.path), list(source.options), list(source.architectures), list(expressions))
        for source, expressions in _sources(held.op, held.implementation)
    ]


def declared_sources(candidate: End) -> list[Declared]:
    """Ask the candidate for its CUDA sources; they are compiled here, from their files."""
    found = []
    for path, options, architectures, expressions in candidate.ask(cuda_sources):
        source = CudaSource(path, architectures=architectures)
        source.options = tuple(options)
        found.append(Declared(source, expressions))
    return found


def compiled_group(candidate: End, implementation: str, quick: bool, build: bool = True) -> Group:
    """Return the group of an implementation that cannot run here; ``build`` compiles its
    kernels."""
    results = []
    found = declared_sources(candidate) if build else []
    if build and not found:
        results.append(
            Result(
                "build",
                Verdict.NOT_JUDGED,
                "nothing to compile is declared: no CudaSource with CUDA_EXPRESSIONS beside it",
            )
        )
    for one in found:
        architectures = one.source.architectures or (ARCHITECTURES[1:2] if quick else ARCHITECTURES)
        results.append(_build(one.source, one.expressions, architectures))
    results.append(Result("run", Verdict.NOT_JUDGED, "running it needs a GPU; there is none here"))
    return Group(implementation, "all", "compiled", tuple(results))


def compile_ahead(candidate: End, arch: str) -> None:
    """Compile every declared kernel into the disk cache, in one thread per core.

    NVRTC allows compilations in parallel. A kernel that does not compile is reported by the check
    that needs it.
    """

    def build(source: CudaSource, expression: str) -> None:
        with contextlib.suppress(BuildError):
            source.compile(expression, source.arch_for(arch))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for one in declared_sources(candidate):
            for expression in one.expressions:
                pool.submit(build, one.source, expression)


def _build(source: CudaSource, expressions: Sequence[str], architectures: Sequence[str]) -> Result:
    for arch in architectures:
        try:
            source.compile_many(tuple(expressions), arch)
        except BuildError as error:
            log = [line for line in (error.log or str(error)).splitlines() if line.strip()]
            return Result("build", Verdict.FAIL, f"{arch}: {error}", case=tuple(log[:12]))
    told = (
        f"{len(expressions)} kernels of {source.path.name} compile for {', '.join(architectures)}"
    )
    return Result("build", Verdict.PASS, told, len(expressions) * len(architectures))


def _sources(op: FusedOp, implementation: str) -> list[tuple[CudaSource, Sequence[str]]]:
    """Return the CudaSources of the launchers' modules, each with its expressions to instantiate.

    A module declares them in ``CUDA_EXPRESSIONS``: the expressions of its single source, or a
    mapping from each source's file name to its expressions.
    """
    declared = op.implementations[implementation]
    parts = [*_parts(declared.forward), *_parts(declared.backward)]
    functions = [part for part in parts if isinstance(part, FunctionType)]
    own = [names for function in functions for names in _namespaces(function.__globals__, True)]
    # An operator without its own kernels launches another package's (embedding_sgd_).
    others = (names for function in functions for names in _namespaces(function.__globals__, False))
    found = list(_declared(own)) or list(_declared(others))
    # A launcher that several packages share is given the source of one of them.
    given = {id(part) for part in parts if isinstance(part, CudaSource)}
    return [each for each in found if id(each[0]) in given] or found


def _declared(
    namespaces: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[CudaSource, Sequence[str]]]:
    seen: set[int] = set()
    for names in namespaces:
        expressions: Any = names.get("CUDA_EXPRESSIONS")
        for source in [value for value in names.values() if isinstance(value, CudaSource)]:
            if expressions is None or id(source) in seen:
                continue
            seen.add(id(source))
            by_file = isinstance(expressions, Mapping)
            listed = expressions.get(source.path.name, ()) if by_file else expressions
            yield source, tuple(listed)


def _parts(launcher: Any) -> Iterator[Any]:
    """Yield a launcher and all that it is made of: the function that a decorator wraps
    (``functools.wraps``), a partial's function and arguments, a bound method's function and the
    attributes of its object."""
    yield launcher
    inner: tuple[Any, ...] = ()
    if isinstance(launcher, FunctionType):
        inner = (getattr(launcher, "__wrapped__", None),)
    elif isinstance(launcher, MethodType):
        inner = (launcher.__func__, *getattr(launcher.__self__, "__dict__", {}).values())
    elif isinstance(launcher, functools.partial):
        inner = (launcher.func, *launcher.args, *launcher.keywords.values())
    for part in inner:
        yield from _parts(part)


def _namespaces(names: Mapping[str, Any], of_package: bool) -> Iterator[Mapping[str, Any]]:
    """Yield a module's names, then the names of each module that it imported.

    With ``of_package``, only imported modules of its own package count.
    """
    yield names
    package = names.get("__package__")
    for value in list(names.values()):
        if isinstance(value, ModuleType) and (
            not of_package or (package and value.__name__.startswith(f"{package}."))
        ):
            yield vars(value)
