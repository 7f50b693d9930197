"""The instruction set that C++ kernels are built for: one of three classes, as PyTorch has them.

PyTorch chooses its own CPU kernels by class when it starts: ``default``, ``avx2`` or ``avx512``
(``ATEN_CPU_CAPABILITY`` lowers it). Ours follow PyTorch's choice, so that both run at the same
width; ``FUSELAB_CPU_CAPABILITY`` chooses another class, or ``native``, the machine's best. The
measured times of ``fuselab.runtime.cpu_choice`` are kept per class, too.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

from fuselab.errors import UnknownNameError, UnsupportedError

VARIABLE = "FUSELAB_CPU_CAPABILITY"
# The features that a CPU needs for a class of x86-64, as Linux names them, lowest class first.
_NEEDED = {
    "default": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}
# Options after -march=native that restrict a better machine to the class.
_LOWERED = {"default": ("-mno-avx",), "avx2": ("-mno-avx512f",), "avx512": ()}


@functools.cache
def instruction_set() -> str:
    """Return the class that C++ kernels are built for in this process.

    It is ``default``, ``avx2`` or ``avx512`` on x86-64. Other machines have a single class, their
    architecture's name (``aarch64``).

    Raises:
        UnknownNameError: the environment variable names no class.
        UnsupportedError: it names one that this machine does not have.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    runs = available()
    wanted = os.environ.get(VARIABLE, "").lower()
    if not wanted:
        theirs = torch.backends.cpu.get_cpu_capability().lower()
        return theirs if theirs in runs else runs[-1]
    if wanted == "native":
        return runs[-1]
    if wanted not in _NEEDED:
        raise UnknownNameError(f"instruction set in {VARIABLE}", wanted, (*_NEEDED, "native"))
    if wanted not in runs:
        raise UnsupportedError(
            f"{VARIABLE} is {wanted}, which this machine does not have; it has {', '.join(runs)}."
        )
    return wanted


@functools.cache
def available() -> list[str]:
    """Return the classes that this machine can run, lowest first."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return [name for name, needed in _NEEDED.items() if needed <= flags]


def compiler_options() -> tuple[str, ...]:
    """Return the compiler options that build for ``instruction_set()`` on this machine.

    ``default`` keeps the machine's features below AVX, so it stands for a CPU without AVX2.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    return ("-march=native", *_LOWERED[instruction_set()])
