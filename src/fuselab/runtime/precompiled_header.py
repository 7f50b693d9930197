"""Precompile the headers that most C++ kernels include.

The compiler takes up to a second to parse them, half of the time of a kernel. GCC can keep what it
has parsed in a file, of some 80 MB, which lies in the cache of compiled kernels. A process that
compiles one or two kernels is faster without, and uses the file only if another has written it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from fuselab.errors import BuildError
from fuselab.runtime import cache
from fuselab.runtime.compiler import compiler_version, run_compiler

# They include all others of ours. A package that stands alone carries those that it needs.
_OURS = ("cpu_dropout.h", "cpu_sweep.h")
_INCLUDED = frozenset(
    (
        "cpu_dropout.h",
        "cpu_elements.h",
        "cpu_math.h",
        "cpu_positions.h",
        "cpu_sweep.h",
        "cpu_vectors.h",
    )
)
_STANDARD = ("cstddef", "cstdio", "exception", "type_traits", "utility")
_PAYS_FROM = 3  # so many kernels of one process take longer to parse than the header to compile

_compiled = 0


def options_for(source: str, options: Sequence[str], cpu: str) -> tuple[str, ...]:
    """Return the compiler options that put the precompiled headers before a source.

    There are none for a source that includes none of them, for another compiler than GCC, and for
    the first kernels of a process where no process has compiled the headers yet. ``cpu`` says what
    the options mean on this machine, and is part of the file's key.
    """
    global _compiled
    names = {Path(name).name for name in cache.included(source)}
    if not names & _INCLUDED or not _is_gcc():
        return ()
    ours = [name for name in _OURS if (cache.HEADERS / name).is_file()]
    text = "".join(f"#include <{name}>\n" for name in _STANDARD)
    text += "".join(f'#include "{name}"\n' for name in ours)
    parts = [cache.source_text(cache.HEADERS / name) for name in ours]
    key = cache.key("precompiled", text, *parts, tuple(options), compiler_version(), cpu)
    _compiled += 1
    if _compiled < _PAYS_FROM and not cache.holds(key, ".h.gch"):
        return ()
    try:
        header = cache.fetch(key, ".h", lambda new: _write(new, text))
        cache.fetch(key, ".h.gch", lambda new: _compile(header, new, options))
    except BuildError:
        return ()  # the kernel compiles without it, or says what is wrong
    return ("-include", str(header))


@functools.cache
def _is_gcc() -> bool:
    version = compiler_version()
    return re.search(r"[gc]\+\+|gcc|GCC", version) is not None and "clang" not in version


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _compile(header: Path, new: Path, options: Sequence[str]) -> None:
    run_compiler([*options, "-x", "c++-header", str(header), "-o", str(new)], "the headers")
