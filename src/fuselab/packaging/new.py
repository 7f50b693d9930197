"""``fuselab new``: make a kernel package of a user's own kernel, or of a plain function."""

from __future__ import annotations

import inspect
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

import fuselab
from fuselab.ejection.eject import ejected
from fuselab.errors import ArgumentError, MissingTargetError, TargetError
from fuselab.inspect import targets
from fuselab.inspect.assembly import subjects
from fuselab.inspect.user_code import raising_target_error
from fuselab.packaging import arguments, cuda_package, triton_package
from fuselab.packaging.arguments import KernelParameter, plain_name
from fuselab.packaging.cuda_block import Asked
from fuselab.packaging.definition import Definition, of_callable, parameters_of, undefined
from fuselab.packaging.triton_package import Source
from fuselab.packaging.write_package import New, files_of
from fuselab.prove import load as loading


@dataclass(frozen=True)
class Made:
    """The text of every file of a package by its name, facts for its manifest, and for JSON."""

    files: Mapping[str, str]
    about: Mapping[str, Any]
    facts: Mapping[str, Any]


def new_package(
    name: str,
    source: str,
    reference: str | None = None,
    backward: bool = False,
    asked: Asked | None = None,
) -> Made:
    """Return the files of the package ``name`` made of ``source``.

    Args:
        name: the operator's name, a Python identifier in lower case.
        source: ``FILE.cu`` or ``FILE.py`` with kernels, with ``:KERNEL`` or ``:FUNCTION`` behind it
            where there are several; or a plain PyTorch function or module as a TARGET.
        reference: the function that defines what the kernel computes, as a TARGET.
        backward: True ejects the gradient from ``reference``.
        asked: what a ``.cu`` file does not say of its kernel.

    Raises:
        ArgumentError, TargetError: the call, a file or what it defines does not fit.
        EjectError: no kernels, or no gradient, can be ejected.
        BuildError: the kernels of a ``.cu`` file do not compile.
    """
    check_name(name)
    if backward and reference is None:
        raise ArgumentError(
            "--backward ejects the gradient of a reference; give --reference FILE.py:FUNCTION."
        )
    place, _, chosen = source.partition(":")
    path = Path(place).expanduser()
    if path.suffix in (".cu", ".cuh"):
        return _of_cuda(name, source, path, chosen, reference, backward, asked or Asked())
    if asked is not None:
        raise ArgumentError(f"--block and --set are for a .cu kernel, and {source} is none.")
    if path.suffix == ".py":
        module = subjects.module_of(path)
        if subjects.holds_operator(module, chosen):
            raise TargetError(
                f"{path} declares an operator already, which every verb takes as it is: "
                f"fuselab check {source}."
            )
        found = triton_package.found_in(path, module, chosen)
        if found is not None:
            return _of_triton(name, source, found, module, reference, backward)
    elif path.suffix or "/" in place:
        raise ArgumentError(
            f"--from {source}: give FILE.py, FILE.py:NAME, FILE.cu or package.module:function."
        )
    return _of_plain_function(name, source, reference)


def check_name(name: str) -> None:
    """Raise ArgumentError if ``name`` cannot name an operator and the package that holds it."""
    fits = re.fullmatch(r"[a-z][a-z0-9_]*", name) and not name.endswith("_")
    if not fits or keyword.iskeyword(name):
        raise ArgumentError(
            f"'{name}' cannot name an operator, whose name is a Python identifier in lower case "
            "that does not end in '_'; for example fused_norm."
        )
    if name in sys.stdlib_module_names or name in ("torch", "triton", "numpy", "fuselab"):
        raise ArgumentError(
            f"'{name}' is a Python module that the package would hide; name another."
        )


def _of_plain_function(name: str, source: str, reference: str | None) -> Made:
    if reference is not None:
        raise ArgumentError(
            f"{source} launches no kernel, so it is the reference itself; leave --reference out."
        )
    target = targets.load(source, "cpu")
    made = ejected(target.callable, target.args, target.kwargs, name)
    facts = {**made.facts, "language": "ejected", "blanks": [], "guesses": []}
    return Made(made.files, made.about, facts)


def _of_triton(
    name: str,
    spec: str,
    source: Source,
    module: ModuleType,
    reference: str | None,
    backward: bool,
) -> Made:
    kernel = [] if source.is_launcher else triton_package.kernel_parameters(source)
    if reference is not None:
        offered = _offered(source, kernel)
        function, args, kwargs = _reference(reference, source.path, module, offered)
        definition = of_callable(function, args, kwargs, name, backward)
    elif source.is_launcher:
        parameters = triton_package.launcher_parameters(source)
        outputs = triton_package.returned_by(source)
        definition = undefined(source.name, parameters, outputs or None)
    else:
        parameters = arguments.parameters_for(kernel)
        written = [one for one in kernel if one.kind in arguments.WRITTEN]
        definition = undefined(source.name, parameters, len(written))
    if source.is_launcher:
        part = triton_package.with_launcher(source, definition)
    else:
        part = triton_package.with_kernel(source, kernel, definition)
    return _made(New(name, "triton", spec, definition, part, backward))


def _of_cuda(
    name: str,
    spec: str,
    path: Path,
    chosen: str,
    reference: str | None,
    backward: bool,
    asked: Asked,
) -> Made:
    source = cuda_package.read(path, chosen, asked)
    definition: Definition
    if reference is not None:
        function, args, kwargs = _reference(reference, path, None, None)
        definition = of_callable(function, args, kwargs, name, backward)
    else:
        parameters = arguments.parameters_for(source.parameters)
        written = [one for one in source.parameters if one.kind in arguments.WRITTEN]
        definition = undefined(source.name, parameters, len(written))
    return _made(
        New(name, "cuda", spec, definition, cuda_package.written(source, definition), backward)
    )


def _made(new: New) -> Made:
    files = files_of(new)
    for file, text in files.items():
        if file.endswith(".py"):
            compile(text, file, "exec")  # what is written is Python, whatever it was made of
    facts = {
        "operator": f"mine::{new.name}",
        "language": new.language,
        "files": sorted(files),
        "parameters": [one.text for one in new.definition.parameters],
        "outputs": new.definition.outputs,
        "blanks": new.blanks,
        "guesses": [*new.written.guesses, *new.definition.notes],
        "backward": new.backward,
    }
    about = {"operator": f"mine::{new.name}", "fuselab": fuselab.__version__}
    return Made(files, about, facts)


# --- the reference and its example inputs ---------------------------------------------------------


@dataclass(frozen=True)
class _Offered:
    """The example values that the kernel's file offers: by name, and those of tensors in order."""

    named: Mapping[str, Any]
    tensors: Sequence[Any]


def _offered(source: Source, kernel: Sequence[KernelParameter]) -> _Offered | None:
    if not source.has_inputs:
        return None
    if source.is_launcher:
        bound = inspect.signature(source.chosen).bind_partial(*source.args, **source.kwargs)
        named = {key.lower(): one for key, one in bound.arguments.items()}
        return _Offered(named, [one for one in named.values() if isinstance(one, Tensor)])
    loaded = [one for one in kernel if one.kind in (arguments.INPUT, arguments.UPDATED)]
    given = {plain_name(one.name): one.default for one in kernel}
    return _Offered(given, [one.default for one in loaded if isinstance(one.default, Tensor)])


def _reference(
    spec: str, source: Path, module: ModuleType | None, offered: _Offered | None
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return the function of ``--reference`` and its example inputs: those of its own file, or else
    what the kernel's file offers under the same names. Raises TargetError."""
    place, _, name = spec.partition(":")
    path = Path(place).expanduser()
    if path.suffix != ".py":
        target = targets.load(spec, "cpu")
        return target.callable, target.args, target.kwargs
    if not path.is_file():
        raise MissingTargetError(f"--reference {spec}: no such file; give FILE.py:FUNCTION.")
    is_same = module is not None and path.resolve() == source.resolve()
    held = module if is_same and module is not None else loading.import_file(path)
    name = name or ("reference" if hasattr(held, "reference") else "")
    if not is_same and hasattr(held, "get_inputs"):
        named = getattr(held, name, None) if name else None
        if offered is None or not inspect.isfunction(named) or _fit(named, held, path):
            target = targets.load(f"{path}:{name}" if name else str(path), "cpu")
            return target.callable, target.args, target.kwargs
    if not name:
        raise ArgumentError(f"--reference {spec}: name the function, {path}:FUNCTION.")
    function = getattr(held, name, None)
    if function is None:
        raise TargetError(f"--reference {spec}: {path} has no '{name}'.")
    if isinstance(function, type) and issubclass(function, nn.Module):
        given: Sequence[Any] = getattr(held, "get_init_inputs", tuple)()
        with raising_target_error(f"--reference {spec}: {name}({len(given)} arguments) raised:"):
            function = function(*given)
    if not callable(function):
        raise TargetError(f"--reference {spec}: {name} is no function.")
    if offered is None:
        raise TargetError(
            f"{path} has no get_inputs(); write one that returns example arguments of {name}, from "
            "which shapes and dtypes are taken."
        )
    return function, _matched(function, name, offered), {}


def _fit(function: Callable[..., Any], held: ModuleType, path: Path) -> bool:
    """Return whether the inputs that a file offers are arguments of one of its functions; it has
    one ``get_inputs()``, and may have several functions."""
    args, kwargs = subjects.inputs_of(held.get_inputs, path)
    try:
        inspect.signature(function).bind(*args, **kwargs)
        parameters_of(function, args, kwargs, function.__name__)
    except (TypeError, TargetError):
        return False
    return True


def _matched(function: Callable[..., Any], name: str, offered: _Offered) -> list[Any]:
    """Return the example arguments of the reference among those of the kernel: by name, tensors
    also by their place."""
    values: list[Any] = []
    tensors = list(offered.tensors)
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters
    by_name = all(
        one.lower() in offered.named or parameter.default is not parameter.empty
        for one, parameter in parameters.items()
    )
    for one, parameter in parameters.items():
        if by_name and one.lower() in offered.named:
            values.append(offered.named[one.lower()])
        elif parameter.default is not parameter.empty:
            values.append(parameter.default)
        elif tensors and not by_name:
            values.append(tensors.pop(0))
        else:
            raise TargetError(
                f"the example inputs have no value for '{one}' of {name}; write get_inputs() in "
                "the reference's file, which returns the arguments of the reference."
            )
    return values
