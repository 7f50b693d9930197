"""The subjects of ``fuselab asm``: an operator, a package, a file with kernels, a ``.cu`` file.

A file with a ``FusedOp`` is an operator. In another Python file the subject is a function that
launches kernels, or a ``@triton.jit`` kernel itself; its arguments are those that ``get_inputs()``
of the file returns, or a written signature stands for them.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from fuselab import ops
from fuselab.composition import Composition
from fuselab.errors import ArgumentError, MissingTargetError, TargetError, UnknownNameError
from fuselab.inspect.assembly import cuda_compile, launches, triton_compile
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.kernel_decorators import taken_apart
from fuselab.inspect.assembly.pretended_gpu import pretended_gpu
from fuselab.op import FusedOp
from fuselab.prove import load as loading


@dataclass(frozen=True)
class Request:
    """The subject to compile, and the options of the command line that say how."""

    spec: str
    architecture: Architecture
    kernel: str | None = None
    dtype: torch.dtype | None = None
    case: str | None = None
    implementation: str | None = None
    signature: str | None = None
    threads: tuple[int, ...] | None = None  # of a block, per axis
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """The kernels of a subject, for one architecture; ``case`` says for which inputs."""

    spec: str
    architecture: Architecture
    kernels: tuple[Kernel, ...]
    case: str = ""
    notes: tuple[str, ...] = ()


def compiled(request: Request) -> Compiled:
    """Compile every kernel of the subject. Raises a FuselabError that says what is missing."""
    place, _, name = (
        request.spec.partition(":") if "::" not in request.spec else (request.spec, "", "")
    )
    path = Path(place).expanduser()
    if path.suffix == ".cu":
        return _of_cuda_file(request, path, name)
    if request.threads is not None:
        raise ArgumentError("--threads is for a .cu file; other launches have their own blocks.")
    if ops.has(request.spec.removeprefix("fuselab::")):
        return _of_operators(request, [loading.load_op(request.spec)])
    if path.suffix == ".py":
        module = module_of(path)
        if holds_operator(module, name):
            return _of_operators(request, [loading.load_op(request.spec)])
        return _of_file(request, module, path, name)
    if path.is_dir():
        found = loading.load(request.spec)
        operators = list(found.operators) if isinstance(found, Composition) else [found]
        return _of_operators(request, operators)
    if path.is_file():
        raise TargetError(f"{path} is neither a .py nor a .cu file; asm reads no other.")
    if "/" in place or path.suffix:
        raise MissingTargetError(
            f"{path}: no such file; give FILE.py, FILE.cu, a folder or an operator's name."
        )
    raise UnknownNameError("operator", request.spec, ops.operators())


def module_of(path: Path) -> ModuleType:
    """Return a Python file as a module. Raises TargetError if it is missing or raises."""
    if not path.is_file():
        raise MissingTargetError(
            f"{path}: no such file; give FILE.py, a folder or an operator's name."
        )
    return loading.import_file(path)


def holds_operator(module: ModuleType, name: str) -> bool:
    if name:
        return isinstance(getattr(module, name, None), FusedOp)
    return any(
        isinstance(value, FusedOp)
        and (value.namespace != "fuselab" or module.__name__.startswith("fuselab.ops."))
        for value in vars(module).values()
    )


def _of_operators(request: Request, operators: list[FusedOp]) -> Compiled:
    if request.signature is not None:
        raise ArgumentError("--signature is for a bare kernel; an operator has cases: --case.")
    kernels: list[Kernel] = []
    notes: list[str] = []
    case = ""
    for op in operators:
        found, case = launches.of_operator(
            op,
            request.architecture,
            implementation=request.implementation,
            case=request.case,
            dtype=request.dtype,
            kernel=request.kernel,
            settings=request.settings,
        )
        kernels += found.kernels
        notes += [*found.skipped, *_library_calls(found.calls)]
    if not kernels:
        raise _nothing(request, notes)
    launches.check_settings(kernels, request.settings)
    return Compiled(request.spec, request.architecture, tuple(kernels), case, tuple(notes))


def _library_calls(calls: list[str]) -> list[str]:
    return [f"PyTorch's own kernels are called too: {', '.join(calls)}"] if calls else []


def _nothing(request: Request, notes: list[str]) -> Exception:
    if request.kernel is not None:
        return TargetError(
            f"{request.spec} launches no kernel called '{request.kernel}' for these inputs; "
            "without --kernel all are shown."
        )
    said = f" ({'; '.join(notes)})" if notes else ""
    return TargetError(f"{request.spec} launches no Triton or CUDA kernel of its own{said}.")


def _of_cuda_file(request: Request, path: Path, name: str) -> Compiled:
    if not path.is_file():
        raise MissingTargetError(
            f"{path}: no such file; give FILE.py, FILE.cu, a folder or an operator's name."
        )
    for option, value in (
        ("--case", request.case),
        ("--dtype", request.dtype),
        ("--signature", request.signature),
        ("--implementation", request.implementation),
        ("--set", request.settings or None),
    ):
        if value is not None:
            raise ArgumentError(
                f"{option} says nothing of a .cu file; name an instantiation: "
                "--kernel 'NAME<float>'."
            )
    chosen = request.kernel or name or None
    kernels = cuda_compile.of_file(path, request.architecture, chosen, request.threads)
    left_out = () if chosen else cuda_compile.templates_of(path)
    notes = [f"left out: {cuda_compile.template_text(path, one)}" for one in left_out]
    return Compiled(request.spec, request.architecture, tuple(kernels), notes=tuple(notes))


def _of_file(request: Request, module: ModuleType, path: Path, name: str) -> Compiled:
    for option, value in (
        ("--case", request.case),
        ("--implementation", request.implementation),
        ("--dtype", request.dtype),
    ):
        if value is not None:
            raise ArgumentError(
                f"{option} is for an operator, and {path} declares none; "
                "its kernels are compiled for get_inputs() or --signature."
            )
    kernels = kernels_in(module)
    offer = getattr(module, "get_inputs", None)
    found = getattr(module, name, None) if name else None
    if name and found is None:
        known = f"; its kernels are {_listed(kernels)}" if kernels else " and no @triton.jit kernel"
        raise TargetError(f"{path} has no '{name}'{known}.")
    if request.signature is None and offer is not None:
        launcher = found if name and not triton_compile.is_kernel(found) else None
        if not name:
            launcher = only_launcher(module, kernels, path)
        if launcher is not None:
            return _of_launcher(request, launcher, offer, path, kernels)
    chosen = found if triton_compile.is_kernel(found) else _one_kernel(request, kernels, path)
    if request.signature is not None:
        made = triton_compile.compiled_signature(
            chosen, request.architecture, request.signature, request.settings
        )
        launches.check_settings([made], request.settings)
        return Compiled(request.spec, request.architecture, (made,), request.signature)
    if offer is None:
        function = triton_compile.jit_function(chosen)
        raise TargetError(
            f"{path} does not say what {function.__name__} is called with: give "
            f"--signature '{triton_compile.suggested_signature(function)}' (that is a guess), or "
            "write get_inputs() in the file, which returns the kernel's arguments."
        )
    args, kwargs = inputs_of(offer, path)
    launcher = launcher_for(module, chosen, args, kwargs, path)
    if launcher is not None:
        request = replace(request, kernel=triton_compile.jit_function(chosen).__name__)
        return _of_launcher(request, launcher, offer, path, kernels)
    return _of_kernel(request, chosen, args, kwargs)


def missing_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a kernel that neither a call nor its decorators give."""
    decorated = taken_apart(kernel)
    given = {*decorated.function.arg_names[: len(args)], *kwargs, *decorated.chosen}
    return [
        one.name
        for one in decorated.function.params
        if one.name not in given and one.default is inspect.Parameter.empty
    ]


def launcher_for(
    module: ModuleType, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], path: Path
) -> Any | None:
    """Return the function of a file that launches ``kernel`` and takes these arguments; None where
    they are the kernel's own, or no function launches it. Raises TargetError for several."""
    function = triton_compile.jit_function(kernel)
    names = function.arg_names
    is_known = {*kwargs} <= {*names, *triton_compile.OPTIONS}
    if is_known and len(args) <= len(names) and not missing_of(kernel, args, kwargs):
        return None
    own = [name for name, one in kernels_in(module).items() if one is kernel]
    name = next(iter(own), function.__name__)
    functions = {
        one: function
        for one, function in launchers_in(module, {name: kernel}).items()
        if _takes(function, args, kwargs)
    }
    if len(functions) > 1:
        raise TargetError(
            f"{path} has several functions that launch {name} ({_listed(functions)}); name one: "
            f"{path}:{next(iter(functions))}."
        )
    return next(iter(functions.values()), None)


def _takes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _of_launcher(
    request: Request, launcher: Any, offer: Any, path: Path, kernels: Mapping[str, Any]
) -> Compiled:
    if not callable(launcher):
        raise TargetError(
            f"{path}: {request.spec.rpartition(':')[2]} is no kernel and no function."
        )
    args, kwargs = inputs_of(offer, path)
    found = launches.of_function(
        launcher, args, kwargs, request.architecture, request.kernel, request.settings
    )
    notes = [*_library_calls(found.calls), *_tuned(kernels, found.kernels)]
    if not found.kernels:
        raise _nothing(request, notes)
    launches.check_settings(found.kernels, request.settings)
    case = described(args, kwargs)
    return Compiled(request.spec, request.architecture, tuple(found.kernels), case, tuple(notes))


def _tuned(kernels: Mapping[str, Any], launched: Sequence[Kernel]) -> list[str]:
    """Return a note for each launched kernel that is tuned automatically."""
    counts = {
        triton_compile.jit_function(one).__name__: len(getattr(one, "configs", ()))
        for one in kernels.values()
    }
    return [
        f"triton.autotune chooses among {counts[name]} configurations of {name} on a GPU; this is "
        "the first"
        for name in dict.fromkeys(one.name for one in launched)
        if counts.get(name, 0) > 1
    ]


def _of_kernel(
    request: Request, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Compiled:
    """Compile a bare kernel for the arguments that its file offers."""
    decorated = taken_apart(kernel)
    function = decorated.function
    first = decorated.configurations[0].setting if decorated.configurations else {}
    given = dict(zip(function.arg_names, args, strict=False)) | dict(kwargs)
    missing = missing_of(kernel, (), {**given, **request.settings})
    if missing or len(args) > len(function.arg_names):
        raise TargetError(
            f"get_inputs() must return the arguments of {function.__name__}"
            f" ({', '.join(function.arg_names)}); it has {len(args) + len(kwargs)}"
            + (f" and lacks {', '.join(missing)}." if missing else ".")
        )
    with pretended_gpu(request.architecture, _unexpected, _unexpected) as gpu:
        moved = gpu.moved({**first, **given, **dict(request.settings)})
        with gpu.fake:
            moved = decorated.completed(moved, request.settings)
            made = triton_compile.compiled_launch(
                kernel, request.architecture, (), moved, run=gpu.run_triton
            )
    launches.check_settings([made], request.settings)
    notes = tuple(_tuned({function.__name__: kernel}, [made]))
    case = described(args, kwargs)
    return Compiled(request.spec, request.architecture, (made,), case, notes)


def _unexpected(*args: Any) -> None:
    raise AssertionError("a bare kernel launches nothing")


def kernels_in(module: ModuleType) -> dict[str, Any]:
    """Return the ``@triton.jit`` kernels that a file defines, by name; those that other kernels of
    the file call come too."""
    return {
        name: value
        for name, value in vars(module).items()
        if triton_compile.is_kernel(value)
        and triton_compile.python_function(value).__module__ == module.__name__
    }


def functions_in(module: ModuleType) -> dict[str, Any]:
    """Return the public plain functions that a file defines, without those that offer inputs."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and name not in ("main", "reference")
        and not name.startswith("get_")  # get_inputs, get_loss and the others that offer something
    }


def launchers_in(module: ModuleType, kernels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public functions of a file that launch one of its ``kernels``, by name."""
    functions = functions_in(module)
    return {name: one for name, one in functions.items() if launches_one(one, kernels)}


def only_launcher(module: ModuleType, kernels: Mapping[str, Any], path: Path) -> Any | None:
    """Return the function of a file that launches its kernels; None if there is none.

    A file without kernels of its own has a launcher if it has one function. Raises TargetError
    where several functions launch.
    """
    functions = launchers_in(module, kernels) if kernels else functions_in(module)
    if len(functions) > 1 and kernels:
        raise TargetError(
            f"{path} has several functions that launch kernels ({_listed(functions)}); name one: "
            f"{path}:{next(iter(functions))}."
        )
    return next(iter(functions.values())) if len(functions) == 1 else None


def launches_one(function: Any, kernels: Mapping[str, Any]) -> bool:
    """Return whether a function names a kernel, itself or in the functions of its file."""
    seen: set[str] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if not inspect.isfunction(one):
            continue
        names = _globals_of(one.__code__)
        if names & kernels.keys():
            return True
        for name in names - seen:
            value = one.__globals__.get(name)
            if inspect.isfunction(value) and value.__module__ == one.__module__:
                waiting.append(value)
        seen |= names
    return False


def _globals_of(code: CodeType) -> set[str]:
    """Return the names of the file that a function uses, those of its inner functions too."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _globals_of(constant)
    return found


def entries(kernels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernels that no other kernel of the file calls; those that are called are
    functions, and no entry points."""
    called = {
        name
        for name in kernels
        for other, one in kernels.items()
        if other != name and name in _globals_of(triton_compile.python_function(one).__code__)
    }
    return {name: one for name, one in kernels.items() if name not in called} or dict(kernels)


def _one_kernel(request: Request, kernels: Mapping[str, Any], path: Path) -> Any:
    if not kernels:
        raise TargetError(f"{path} has no @triton.jit kernel and no FusedOp.")
    if request.kernel is not None:
        if request.kernel not in kernels:
            raise UnknownNameError("kernel", request.kernel, kernels)
        return kernels[request.kernel]
    own = entries(kernels)
    if len(own) > 1:
        raise TargetError(
            f"{path} has several kernels ({_listed(own)}); name one: --kernel {next(iter(own))}."
        )
    return next(iter(own.values()))


def _listed(kernels: Mapping[str, Any]) -> str:
    return ", ".join(kernels) or "none"


def inputs_of(offer: Any, path: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a file's ``get_inputs()`` gives. Raises TargetError."""
    try:
        given = offer()
    except Exception as error:
        raise TargetError(
            f"get_inputs() in {path} raised {type(error).__name__}: {error}."
        ) from error
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, list | tuple):
        return tuple(given), {}
    raise TargetError(
        f"get_inputs() in {path} returned {type(given).__name__}; it must return the "
        "list of arguments, or a dict of them by name."
    )


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return arguments in a few words: ``float32[4, 8], 32, BLOCK=1024``."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return str(value)

    return ", ".join([*map(one, args), *(f"{name}={one(value)}" for name, value in kwargs.items())])
