"""Compile every CUDA source of every kernel package, without a GPU and without a CUDA toolkit.

A package's ``CUDA_EXPRESSIONS`` names its instantiations, beside the ``CudaSource`` they belong to;
all of one source are compiled in one NVRTC program per architecture. Any system CUDA is hidden:
NVRTC and every header must come from pip packages, as on a bare machine. Exit status 1 when a
source does not compile, or when a ``.cu`` file is reached by no expression.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

CLONE = Path(__file__).resolve().parent.parent
ROOTS = (CLONE / "src" / "fuselab" / "ops", CLONE / "examples")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def main() -> int:
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as cache:
        # Before fuselab is imported. The cache is a fresh one, so that everything is compiled.
        os.environ.update(CUDA_HOME=empty, CUDA_PATH=empty, FUSELAB_CACHE=cache)
        return check()


def check() -> int:
    from fuselab.errors import BuildError

    started = time.perf_counter()
    failures, compiled, reached = foreign_toolchain(), 0, set()
    for source, expressions in sources():
        reached.add(source.path.resolve())
        for arch in ARCHITECTURES:
            try:
                source.compile_many(expressions, arch)
                compiled += len(expressions)
            except BuildError as error:
                failures.append(f"{error}\n{error.log}")
    failures += [
        f"{path.relative_to(CLONE)}: no CUDA_EXPRESSIONS reach it."
        for path in cuda_files()
        if path not in reached
    ]
    if not reached:
        failures.append("found no CUDA source at all.")
    for failure in failures:
        print(f"compile-check: {failure}", file=sys.stderr)
    print(
        f"compile-check: {compiled} kernels of {len(reached)} CUDA sources for "
        f"{', '.join(ARCHITECTURES)} in {time.perf_counter() - started:.0f} s; "
        f"{len(failures)} failed"
    )
    return 1 if failures else 0


def cuda_files() -> list[Path]:
    return sorted(path.resolve() for root in ROOTS for path in root.rglob("*.cu"))


def specs() -> list[str]:
    """What ``load_op`` takes: the library's names, and the example packages and files with CUDA."""
    from fuselab import ops

    found = list(ops.packages())
    for path in cuda_files():
        if path.is_relative_to(ROOTS[0]):
            continue
        if (path.parent / "op.py").is_file():
            found.append(str(path.parent))
        else:
            found += [
                str(file) for file in path.parent.glob("*.py") if path.name in file.read_text()
            ]
    return sorted(set(found))


def sources() -> Iterator[tuple]:
    """Every ``CudaSource`` with its expressions."""
    from fuselab.prove.load import load_op
    from fuselab.runtime.cuda_source import CudaSource

    seen = set()
    for spec in specs():
        op = load_op(spec)
        for implementation in op.implementations.values():
            module = inspect.getmodule(inspect.unwrap(implementation.forward))
            held = [value for value in vars(module).values() if isinstance(value, CudaSource)]
            for source in held:
                if source.path not in seen:
                    seen.add(source.path)
                    yield source, expressions_of(module, op.name)


def expressions_of(module: ModuleType | None, op_name: str) -> tuple[str, ...]:
    expressions = getattr(module, "CUDA_EXPRESSIONS", None)
    if not expressions:
        sys.exit(f"compile-check: {op_name} has a CudaSource but no CUDA_EXPRESSIONS beside it.")
    return tuple(expressions)


def foreign_toolchain() -> list[str]:
    """What did not come from a pip package although any system CUDA is hidden."""
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
