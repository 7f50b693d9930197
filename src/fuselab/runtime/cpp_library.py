"""Compile the kernels of a framework-free ``.cpp`` file by g++ on demand, and keep them on disk.

Threads come from ONE OpenMP runtime, torch's: objects are compiled with ``-fopenmp`` but linked
without it, so that their ``GOMP_*`` symbols bind to the runtime that ``import torch`` has already
put into the process (its own libgomp, or libiomp, which has the same symbols). A second libgomp
would have its own thread pool, spin against torch's, and ignore ``torch.set_num_threads``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuselab.errors import BuildError, IndexRangeError, LaunchError, OperandError
from fuselab.runtime import cache, precompiled_header
from fuselab.runtime.compiler import compiler_version, run_compiler
from fuselab.runtime.compiler_answers import macros, takes
from fuselab.runtime.instruction_set import compiler_options, instruction_set

OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-fvisibility=hidden",
)

# Unpacks untyped arguments by the kernel's own parameter types. An exception of the kernel is
# returned as its text, because it must not cross the C boundary. The texts of std::out_of_range and
# std::invalid_argument, in kernels that can throw them, reach the user as IndexRangeError and
# OperandError.
_ENTRY = """
#include <cstddef>
#include <cstdio>
#include <exception>
#include <type_traits>
#include <utility>

namespace fuselab_entry {
template <typename... Parameters, std::size_t... index>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<index...>) {
  kernel(*static_cast<Parameters*>(arguments[index])...);
}

template <typename... Parameters>
const char* guarded(void (*kernel)(Parameters...), void** arguments) noexcept {
  static thread_local char message[4096];
  const auto say = [](const char* kind, const char* what) {
    std::snprintf(message, sizeof message, "%s%s", kind, what);
  };
  try {
    call(kernel, arguments, std::index_sequence_for<Parameters...>{});
    return nullptr;
#ifdef FUSELAB_STANDARD_ERRORS
  } catch (const std::out_of_range& error) {
    say("out of range: ", error.what());
  } catch (const std::invalid_argument& error) {
    say("invalid argument: ", error.what());
#endif
  } catch (const std::exception& error) {
    say("", error.what());
  } catch (...) {
    say("", "unknown exception");
  }
  return message;
}

// One letter per parameter, as the launch encodes them: a mismatch is found before the call.
template <typename Parameter>
constexpr char code() {
  if constexpr (std::is_pointer_v<Parameter>) return 't';
  else if constexpr (std::is_same_v<Parameter, float>) return 'f';
  else if constexpr (std::is_same_v<Parameter, double>) return 'd';
  else if constexpr (std::is_integral_v<Parameter> && sizeof(Parameter) == 4) return 'i';
  else if constexpr (std::is_integral_v<Parameter> && sizeof(Parameter) == 8) return 'l';
  else if constexpr (std::is_class_v<Parameter>) return 's';
  else return '?';
}

template <typename... Parameters>
const char* codes(void (*)(Parameters...)) {
  static const char text[] = {code<Parameters>()..., '\\0'};
  return text;
}
}  // namespace fuselab_entry
"""

# Parsing <stdexcept> takes longer than anything else here. A kernel whose source includes no other
# standard headers than these cannot throw its errors.
_THROWING = "#include <stdexcept>\n#define FUSELAB_STANDARD_ERRORS\n"
_WITHOUT_ERRORS = frozenset(
    [
        "avx2intrin.h",
        "avxintrin.h",
        "cmath",
        "cstddef",
        "cstdint",
        "cstdlib",
        "cstring",
        "emmintrin.h",
        "f16cintrin.h",
        "immintrin.h",
        "limits",
        "new",
        "omp.h",
        "smmintrin.h",
        "tuple",
        "type_traits",
        "utility",
    ]
)

_EXPORT = """
extern "C" __attribute__((visibility("default")))
const char* fuselab_entry_{index}(void** arguments) noexcept {{
  return fuselab_entry::guarded(&{expression}, arguments);
}}
extern "C" __attribute__((visibility("default"))) const char* fuselab_codes_{index}() {{
  return fuselab_entry::codes(&{expression});
}}
"""


def options() -> tuple[str, ...]:
    """Return the compiler options of every kernel, for this process's instruction set."""
    return (*OPTIONS, *compiler_options(), *_copying())


def _copying() -> tuple[str, ...]:
    """Return the options by which GCC copies values by whole registers, as it computes with them.

    It copies 16 bytes at a time otherwise, and a load of what two stores wrote waits for both.
    """
    bits = {"avx2": 256, "avx512": 512}.get(instruction_set())
    options = (f"-mmove-max={bits}", f"-mstore-max={bits}")
    return options if bits and takes(*options) else ()


def _cpu() -> str:
    """Return what the options mean on this CPU, so that a library built for another is not used."""
    return macros(*compiler_options())


def compile_library(source: str, library: Path, options: Sequence[str], what: str) -> None:
    """Compile C++ text to a shared library. Raises BuildError with the compiler's log."""
    with tempfile.TemporaryDirectory(prefix="fuselab-") as folder:
        unit, built = Path(folder) / "source.cpp", Path(folder) / "source.o"
        unit.write_text(source)
        run_compiler([*options, "-c", str(unit), "-o", str(built)], what)
        run_compiler(["-shared", str(built), "-o", str(library), *_openmp()], what)


@functools.cache
def _openmp() -> tuple[str, ...]:
    """Return the link options: none if torch's OpenMP runtime exports the symbols to the whole
    process. clang uses other symbols, which only its own runtime has."""
    shared = hasattr(ctypes.CDLL(None), "GOMP_parallel") and "clang" not in compiler_version()
    return () if shared else ("-fopenmp",)


class CppLibrary:
    """The compiled instantiations of a ``.cpp`` file of ordinary function templates with typed
    parameters, returning void.

    An ``expression`` names one instantiation as C++ spells it, for example
    ``"forward<float, Relu>"``. Compiled as C++20 with ``-O3 -fopenmp`` for
    ``fuselab.runtime.instruction_set``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._entries: dict[str, tuple[int, str]] = {}
        self._libraries: list[ctypes.CDLL] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path.name})"

    def is_built(self, expression: str) -> bool:
        """Return whether ``load`` would find the instantiation compiled. Raises BuildError if there
        is no compiler."""
        return expression in self._entries or cache.holds(self._key((expression,)), ".so")

    def load(self, expression: str) -> None:
        """Load the instantiation, after compiling it if needed. Raises BuildError."""
        self.prebuild((expression,))

    def prebuild(self, expressions: Sequence[str]) -> Path:
        """Compile these instantiations into one library (cached on disk) and load it."""
        expressions = tuple(expressions)
        key = self._key(expressions)
        library = cache.fetch(key, ".so", lambda new: self._build(expressions, new))
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(
                f"{self.path.name} was compiled and does not load: {error}."
            ) from error
        self._libraries.append(loaded)
        for index, expression in enumerate(expressions):
            entry = ctypes.cast(getattr(loaded, f"fuselab_entry_{index}"), ctypes.c_void_p).value
            described = getattr(loaded, f"fuselab_codes_{index}")
            described.restype = ctypes.c_char_p
            assert entry is not None
            self._entries[expression] = entry, described().decode()
        return library

    def _key(self, expressions: tuple[str, ...]) -> str:
        text = cache.source_text(self.path, cache.HEADERS)
        entry = (_THROWING, _ENTRY, _EXPORT)
        return cache.key("cpp", text, *entry, expressions, options(), compiler_version(), _cpu())

    def _build(self, expressions: tuple[str, ...], library: Path) -> None:
        exports = (
            _EXPORT.format(index=index, expression=expression)
            for index, expression in enumerate(expressions)
        )
        text = cache.source_text(self.path, cache.HEADERS)
        throwing = "" if cache.standard_headers(text) <= _WITHOUT_ERRORS else _THROWING
        source = f'#include "{self.path.resolve()}"\n{throwing}{_ENTRY}{"".join(exports)}'
        general = (*options(), f"-I{cache.HEADERS}")
        before = precompiled_header.options_for(text, general, _cpu())
        what = f"{self.path.name}: {', '.join(expressions)}"
        try:
            compile_library(source, library, (*general, *before), what)
        except BuildError:
            if not before:
                raise
            # Names of the user's own may be those of a header that the source does not include.
            compile_library(source, library, general, what)


def raise_kernel_error(message: str) -> None:
    """Raise the error of a kernel's message, which begins with "out of range" or "invalid argument"
    for an exception that the user can cause."""
    kind, _, text = message.partition(": ")
    if kind == "out of range":
        raise IndexRangeError(text)
    if kind == "invalid argument":
        raise OperandError(text)
    raise LaunchError(f"a CPU kernel failed: {message}.")
