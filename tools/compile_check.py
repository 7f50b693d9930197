"""Compile every CUDA source of every kernel package, without a GPU and without a CUDA toolkit.

A package's ``CUDA_EXPRESSIONS`` names its instantiations, beside the ``CudaSource`` they belong to.
All of one source are compiled in one NVRTC program per architecture (of ``ARCHITECTURES``, or only
those that the source is for). For sm_90, where the kernels are measured, it is compiled as it runs;
for the others with few optimisations, which is quicker and still takes every instantiation through
NVRTC's front end and its assembler. ``fuselab check OPERATOR`` without a GPU compiles for all of
them as they run. Any system CUDA is hidden: NVRTC and every header must come from pip packages, as
on a bare machine. The exit status is 1 if a source does not compile, or if no expression
instantiates a ``.cu`` file.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuselab.runtime.cuda_source import CudaSource

CLONE = Path(__file__).resolve().parent.parent
SOURCE = CLONE / "src"
# Sources in a folder of examples/ have their own build.
SOURCES = (*(SOURCE / "fuselab").rglob("*.cu"), *(CLONE / "examples").glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
AS_IT_RUNS = ("sm_90", "sm_90a")
QUICKLY = "--Ofast-compile=mid"


def main() -> int:
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as cache:
        # Set before fuselab is imported. The cache is new, so that everything is compiled.
        os.environ.update(CUDA_HOME=empty, CUDA_PATH=empty, FUSELAB_CACHE=cache)
        return check()


def check() -> int:
    from fuselab.errors import BuildError

    started = time.perf_counter()
    failures, jobs, compiled = foreign_toolchain(), [], 0
    files = sorted(SOURCES)
    if not files:
        failures.append("found no CUDA source at all.")
    for file in files:
        found = dict(sources_of(file))  # a source that two modules of a package name comes once
        if not found:
            failures.append(f"{file.relative_to(CLONE)}: no CudaSource with CUDA_EXPRESSIONS.")
        for source, expressions in found.items():
            if source.architectures:
                only = ", ".join(source.architectures)
                print(f"compile-check: {file.name} is for {only} only")
            jobs += [(source, expressions, arch) for arch in source.architectures or ARCHITECTURES]
    # NVRTC compiles without the GIL, one program per thread; the long ones first.
    jobs.sort(key=lambda job: (job[2] not in AS_IT_RUNS, -len(job[1])))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        running = [(threads.submit(compile_for, *job), len(job[1])) for job in jobs]
    for future, count in running:
        try:
            future.result()
            compiled += count
        except BuildError as error:
            failures.append(f"{error}\n{error.log}")
    for failure in failures:
        print(f"compile-check: {failure}", file=sys.stderr)
    print(
        f"compile-check: {compiled} kernels of {len(files)} CUDA sources for "
        f"{', '.join(ARCHITECTURES)} in {time.perf_counter() - started:.0f} s; "
        f"{len(failures)} failed"
    )
    return 1 if failures else 0


def compile_for(source: CudaSource, expressions: tuple[str, ...], arch: str) -> None:
    if arch not in AS_IT_RUNS:
        source = copy.copy(source)
        source.options += (QUICKLY,)
    source.compile_many(expressions, arch)


def sources_of(file: Path) -> Iterator[tuple[CudaSource, tuple[str, ...]]]:
    """Yield every ``CudaSource`` of this ``.cu`` file with the ``CUDA_EXPRESSIONS`` beside it."""
    from fuselab.runtime.cuda_source import CudaSource

    for python_file in sorted(file.parent.glob("*.py")):
        text = python_file.read_text()
        if file.name not in text or "CUDA_EXPRESSIONS" not in text:
            continue
        module = import_file(python_file)
        expressions = tuple(getattr(module, "CUDA_EXPRESSIONS", ()))
        for value in vars(module).values():
            if isinstance(value, CudaSource) and value.path.resolve() == file and expressions:
                yield value, expressions


def import_file(file: Path) -> ModuleType:
    """Import a file of fuselab, or of an example, as the verbs load it."""
    if file.is_relative_to(SOURCE):
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        return importlib.import_module(name)
    from fuselab.prove.load import load_op

    load_op(str(file.parent if (file.parent / "op.py").is_file() else file))
    return next(
        module
        for module in list(sys.modules.values())
        if getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == file
    )


def foreign_toolchain() -> list[str]:
    """Return the NVRTC libraries and header folders in use that are not from a pip package."""
    from fuselab.runtime import cuda_source

    cuda_source._nvrtc()
    loaded = {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libnvrtc" in line
    }
    used = {Path(name) for name in loaded} | set(cuda_source.header_folders())
    return [
        f"{path} is not of this environment; NVRTC and headers must come from pip packages."
        for path in sorted(used)
        if not path.resolve().is_relative_to(Path(sys.prefix).resolve())
    ]


if __name__ == "__main__":
    sys.exit(main())
