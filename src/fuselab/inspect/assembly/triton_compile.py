"""Compilation of ``@triton.jit`` kernels for an architecture that is not there."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from fuselab.errors import ArgumentError, BuildError
from fuselab.inspect.assembly import triton_roles
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.assembly.kernel import Argument, Kernel
from fuselab.runtime.parameters import plain

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_ALIGNED = [["tt.divisibility", 16]]
_SCALAR = re.compile(r"(\*?(?:[iu](?:1|8|16|32|64)|fp?(?:16|32|64)|bf16|fp8e\w+))(?::(\d+))?")


def is_kernel(value: Any) -> bool:
    """Return whether ``value`` is a ``@triton.jit`` function, tuned or not."""
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        return False
    return isinstance(value, KernelInterface)


def jit_function(kernel: Any) -> Any:
    """Return the ``@triton.jit`` function under decorators (autotune, heuristics)."""
    while not hasattr(kernel, "arg_names") or not hasattr(kernel, "params"):
        kernel = kernel.fn
    return kernel


def python_function(kernel: Any) -> Any:
    """Return the Python function of a kernel, compiled or interpreted."""
    while not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel


def target_of(architecture: Architecture) -> Any:
    """Return Triton's name for an architecture."""
    from triton.backends.compiler import GPUTarget

    if architecture.vendor == "amd":
        return GPUTarget("hip", architecture.name, 64)
    return GPUTarget("cuda", architecture.number, 32)


class _Driver:
    """A driver that claims one architecture, for Triton's own specialisation of arguments."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        return target_of(self._architecture)

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device; no real one has such a name.
        return f"pretended {self._architecture.name}"

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("meta")


@contextlib.contextmanager
def driver_for(architecture: Architecture) -> Iterator[None]:
    """Let Triton specialise arguments for this architecture inside."""
    from triton.runtime import driver

    with mock.patch.object(driver, "_active", _Driver(architecture)):
        yield


def compiled_launch(
    kernel: Any,
    architecture: Architecture,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    grid: Any = None,
    run: Any = None,
) -> Kernel:
    """Return a kernel compiled as a launch with these arguments would compile it.

    ``run`` is Triton's own ``JITFunction.run``, where something else stands in its place. Raises
    BuildError with Triton's message.
    """
    function = jit_function(kernel)
    values = dict(zip(function.arg_names, map(plain, args), strict=False)) | {
        name: plain(value) for name, value in keywords.items() if name in function.arg_names
    }
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    with driver_for(architecture), _failures(function, architecture):
        run = run or type(function).run

        def compile_once() -> Any:
            given = {**options, **_rest(keywords, options)}
            made = run(function, *args, grid=(1,), warmup=True, **given)
            return made.result() if hasattr(made, "result") else made

        compiled = _of_this_file(function, compile_once)
    if callable(grid):
        grid = grid(values)
    return _kernel(function, compiled, architecture, values, grid)


def _of_this_file(function: Any, compile_once: Callable[[], Any]) -> Any:
    """Return the compiled kernel; compile it again if Triton's cache has it as another file with
    the same text was compiled, whose name its lines would have."""
    from triton import knobs

    compiled = compile_once()
    file = inspect.getsourcefile(function.fn)
    if file is None or f'"{file}"' in compiled.asm["ttir"]:
        return compiled
    function.device_caches.clear()
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        return compile_once()


def _rest(keywords: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name not in options}


def compiled_signature(
    kernel: Any, architecture: Architecture, signature: str, settings: Mapping[str, Any]
) -> Kernel:
    """Return a kernel compiled for a written signature.

    ``signature`` lists, in the parameters' order, ``*fp32`` for a pointer, ``i32`` or ``fp32`` for
    a value, and a plain number or a tuple of them for a constexpr, separated by commas. Pointers
    are taken as aligned to 16 bytes, as torch allocates; ``:1`` behind one says that it is not,
    ``i32:16`` that a whole number is divisible by 16. Raises ArgumentError, BuildError.
    """
    from triton import compile as compile_source
    from triton.compiler import ASTSource

    function = jit_function(kernel)
    words = _split(signature)
    names = [name for name in function.arg_names if name not in settings]
    if len(words) != len(names):
        entries = "entry" if len(words) == 1 else "entries"
        raise ArgumentError(
            f"--signature has {len(words)} {entries} and {function.__name__} takes {len(names)} "
            f"({', '.join(names)}); for example --signature '{suggested_signature(function)}'."
        )
    kinds: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    given = dict(zip(names, words, strict=True))
    for place, parameter in enumerate(function.params):
        name = parameter.name
        if name in settings:
            kinds[name], constants[place,] = "constexpr", settings[name]
            continue
        match = _SCALAR.fullmatch(given[name])
        if parameter.is_constexpr or match is None:
            kinds[name], constants[place,] = "constexpr", _constant(given[name], name)
            continue
        kinds[name] = match[1]
        divisor = int(match[2]) if match[2] else 16 if match[1].startswith("*") else 1
        if divisor % 16 == 0:
            attributes[place,] = _ALIGNED
    options = {name: value for name, value in settings.items() if name in OPTIONS}
    with _failures(function, architecture):
        source = ASTSource(function, kinds, constants, attributes)
        target = target_of(architecture)
        compiled = _of_this_file(
            function, lambda: compile_source(source, target=target, options=options)
        )
    values = {name: constants.get((place,)) for place, name in enumerate(function.arg_names)}
    return _kernel(function, compiled, architecture, values, None)


_WHOLE = re.compile(
    r"^[nmk]$|numel|size|stride|rows|cols|columns|n_|num|width|length|len$|dim|count|seed|offset"
)


def suggested_signature(kernel: Any) -> str:
    """Return a signature to begin with: pointers to float32, numbers, constexprs of 1024.

    What the kernel loads from or stores to, or gives to a function of its own, is a pointer. Which
    numbers are whole follows from the sizes that they are compared with, else from their names.
    """
    function = jit_function(kernel)
    tree = triton_roles.definition_of(python_function(kernel))
    roles = triton_roles.roles_of(tree, {})
    given_on = {
        one.id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        for one in call.args
        if isinstance(one, ast.Name)
    }
    sizes = {*roles.limits.values(), *roles.widths.values(), *roles.sizes}
    words = []
    for parameter in function.params:
        name = parameter.name
        if parameter.is_constexpr:
            default = parameter.default
            words.append("1024" if default is inspect.Parameter.empty else str(default))
        elif roles.accesses.get(name):
            words.append("*fp32")
        elif name in sizes or _WHOLE.search(name.lower()):
            words.append("i32:16")
        else:
            words.append("*fp32" if name in given_on else "fp32")
    return ", ".join(words)


def _split(text: str) -> list[str]:
    """Return the entries of a text that commas separate outside of brackets."""
    words = re.findall(r"(?:\([^()]*\)|[^,()])+", text)
    return [word.strip() for word in words if word.strip()]


def _constant(word: str, name: str) -> Any:
    if word.startswith("(") and word.endswith(")"):
        return tuple(_constant(one, name) for one in _split(word[1:-1]))
    plain_words = {"True": True, "False": False, "None": None}
    if word in plain_words:
        return plain_words[word]
    import triton.language as tl

    if word.startswith("tl.") and hasattr(tl, word[3:]):
        return getattr(tl, word[3:])
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", word):
        return word[1:-1]
    raise ArgumentError(
        f"--signature: '{word}' for {name} is neither a type (*fp32, i32, i32:16, fp32) nor a "
        "constant (1024, True, tl.float32)."
    )


@contextlib.contextmanager
def _failures(function: Any, architecture: Architecture) -> Iterator[None]:
    """Turn what Triton raises of a kernel that it cannot compile into BuildError."""
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = re.match(r"at (\d+):\d+:", str(error))
        line = f", line {_first_line(function) + int(where[1]) - 1}" if where else ""
        reason = lines[-1] if lines else type(error).__name__
        raise BuildError(
            f"{function.__name__} does not compile for {architecture.name}{line}: "
            f"{reason.rstrip('.')}.",
            log=str(error),
        ) from error


def _first_line(function: Any) -> int:
    """Return the line of a kernel's ``def``, from which Triton counts."""
    lines, start = inspect.getsourcelines(function.fn)
    above = (place for place, line in enumerate(lines) if line.lstrip().startswith("def "))
    return start + next(above, 0)


def _kernel(
    function: Any,
    compiled: Any,
    architecture: Architecture,
    values: Mapping[str, Any],
    grid: Any,
) -> Kernel:
    metadata = compiled.metadata
    amd = architecture.vendor == "amd"
    binary = compiled.asm["hsaco" if amd else "cubin"]
    settings = {
        name: values.get(name)
        for parameter in function.params
        if (name := parameter.name) in values and parameter.is_constexpr
    }
    settings |= {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
    shape = None
    if grid is not None:
        shape = (*(int(size) for size in grid), 1, 1)[:3]
    return Kernel(
        name=function.__name__,
        function=metadata.name,
        language="triton",
        architecture=architecture,
        texts={
            stage: str(text)
            for stage, text in compiled.asm.items()
            if stage != "sass" and isinstance(text, str)
        },
        binary=binary,
        block=(metadata.num_warps * (64 if amd else 32), 1, 1),
        grid=shape,  # type: ignore[arg-type]
        shared_bytes=metadata.shared,
        arguments=tuple(_arguments(compiled.src.signature, values)),
        settings=settings,
        file=inspect.getsourcefile(function.fn) or "",
    )


def _arguments(signature: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Argument]:
    """Yield the parameters of the binary: the signature's without its constexprs, tuples flat."""

    def flat(name: str, kind: Any, value: Any) -> Iterator[Argument]:
        if isinstance(kind, tuple):
            for place, item in enumerate(kind):
                inner = value[place] if isinstance(value, tuple | list) else None
                yield from flat(f"{name}[{place}]", item, inner)
        elif kind != "constexpr":
            whole = isinstance(value, int) and not isinstance(value, bool | Tensor)
            yield Argument(name, str(kind), int(value) if whole else None)

    for name, kind in signature.items():
        yield from flat(str(name), kind, values.get(str(name)))
