"""Answers of the C++ compiler about its options on this CPU, asked once and kept on disk.

A question starts the compiler, which takes tens of milliseconds. A process whose kernels are all
compiled finds the answers in the cache.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fuselab.runtime import cache
from fuselab.runtime.compiler import build_error, compiler, compiler_version, run_command

_CPU = Path("/proc/cpuinfo")
# The lines that say of which kind a processor is. Others differ from core to core and with time.
_KIND = re.compile(r"(vendor_id|cpu family|model|stepping|flags|CPU \w+|Features|isa|uarch)\s*:")
_REFUSED = 1  # the exit status of a compiler that does not know an option


@functools.cache
def takes(*options: str) -> bool:
    """Return whether the compiler knows these options. Raises BuildError if it does not run."""
    status, _, _ = _answer((*options, "-E", "-x", "c++", os.devnull)).partition("\n")
    return status == "0"


@functools.cache
def macros(*options: str) -> str:
    """Return the definitions of the macros that the compiler knows under these options, which say
    what they mean on this CPU; nothing if it refuses them. Raises BuildError if it does not run."""
    return _answer((*options, "-E", "-dM", "-x", "c++", os.devnull)).partition("\n")[2]


def _answer(arguments: Sequence[str]) -> str:
    """Return the compiler's exit status for these arguments, and after a line feed its output."""
    place = Path(compiler()).resolve()
    state = place.stat()
    asked = ("asked", compiler_version(), place, state.st_size, state.st_mtime_ns, _cpu())
    kept = cache.fetch(
        cache.key(*asked, tuple(arguments)), ".txt", lambda new: _ask(arguments, new)
    )
    return kept.read_text(encoding="utf-8")


def _ask(arguments: Sequence[str], new: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    result = run_command([compiler(), *arguments], **pipes)
    if result.returncode not in (0, _REFUSED):
        raise build_error(f"{compiler()} {' '.join(arguments)} does not end", result.stderr)
    output = "" if result.returncode else result.stdout
    new.write_text(f"{result.returncode}\n{output}", encoding="utf-8")


@functools.cache
def _cpu() -> str:
    """Return what Linux says of the first processor's kind; of another system, its own word."""
    try:
        first = _CPU.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:  # another system, or a container that hides it
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(filter(_KIND.match, first.splitlines()))
