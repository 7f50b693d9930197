"""A user's Triton kernels as an implementation: their file, and the launcher in ``op.py``."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import FuselabError, TargetError
from fuselab.inspect.assembly import subjects, triton_compile, triton_roles
from fuselab.inspect.assembly.kernel_decorators import taken_apart
from fuselab.packaging import arguments
from fuselab.packaging.arguments import KernelParameter, Launch
from fuselab.packaging.definition import MISSING, Definition, Parameter, literal, parameters_of
from fuselab.packaging.python_source import sliced
from fuselab.runtime import interpreter


@dataclass(frozen=True)
class Source:
    """A file with Triton kernels, and what of it becomes the operator: a function that launches
    them, or one kernel alone. ``args`` and ``kwargs`` are those of ``get_inputs()``, if the file
    has one."""

    path: Path
    kernels: Mapping[str, Any]
    name: str
    chosen: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_inputs: bool = False

    @property
    def is_launcher(self) -> bool:
        return not triton_compile.is_kernel(self.chosen)


@dataclass(frozen=True)
class Written:
    """An implementation's part of a package: its files, and the text of its launcher.

    ``imports`` are those that the launcher needs, ``head`` the statements before it. ``wrapped``
    says that the user's own function launches. ``blanks`` and ``guesses`` are sentences for the
    user. ``configs`` is the statement with the configurations to tune, ``dtypes`` the name of the
    dtypes that the kernel takes, if it does not take all, in its tensors ``typed``.
    """

    files: Mapping[str, str]
    launcher: str
    imports: Sequence[str]
    head: str = ""
    wrapped: bool = False
    blanks: Sequence[str] = ()
    guesses: Sequence[str] = ()
    configs: str | None = None
    dtypes: str | None = None
    typed: Sequence[str] = ()


def found_in(path: Path, module: ModuleType, name: str) -> Source | None:
    """Return the kernels of a file; None if it has none. Raises TargetError where the name is not
    there, or there are several to choose from."""
    kernels = subjects.kernels_in(module)
    if not kernels:
        return None
    functions = subjects.launchers_in(module, kernels)
    if name:
        chosen = getattr(module, name, None)
        if chosen is None:
            raise TargetError(
                f"{path} has no '{name}'; it has {', '.join((*functions, *kernels))}."
            )
        if isinstance(chosen, type) and issubclass(chosen, torch.autograd.Function):
            names = ", ".join((*functions, *subjects.entries(kernels)))
            raise TargetError(
                f"{path}: {name} is a torch.autograd.Function; name what it launches ({names}), "
                "and let --backward write the gradient."
            )
        if isinstance(chosen, type) and subjects.launches_one(
            getattr(chosen, "forward", None), kernels
        ):
            raise TargetError(
                f"{path}: {name} is a class that launches; name a function that launches, or the "
                f"kernel: {', '.join((*functions, *subjects.entries(kernels)))}."
            )
        if not triton_compile.is_kernel(chosen) and name not in functions:
            return None
    else:
        choice = functions or subjects.entries(kernels)
        if len(choice) != 1:
            raise TargetError(
                f"{path} has {', '.join(choice)}; name one: {path}:{next(iter(choice))}."
            )
        name, chosen = next(iter(choice.items()))
    offer = getattr(module, "get_inputs", None)
    args, kwargs = subjects.inputs_of(offer, path) if offer is not None else ((), {})
    return Source(path, kernels, name, chosen, args, kwargs, offer is not None)


def _definitions(kernels: Mapping[str, Any]) -> dict[str, ast.FunctionDef]:
    return {
        name: triton_roles.definition_of(triton_compile.python_function(one))
        for name, one in kernels.items()
    }


# --- a function that launches ---------------------------------------------------------------------


def launcher_parameters(source: Source) -> list[Parameter]:
    """Return the operator's parameters as a launching function has them: without those that set a
    kernel's constants."""
    found = parameters_of(source.chosen, source.args, source.kwargs, source.name)
    constants = {
        name.lower()
        for one in source.kernels.values()
        for name, parameter in _parameters(one).items()
        if parameter.is_constexpr
    }
    settings = {"num_warps", "num_stages", *constants}
    return [one for one in found if not (one.default and one.name.lower() in settings)]


def returned_by(source: Source) -> int | None:
    """Return how many tensors a launching function returns, 0 if it returns nothing; None if it
    does not run in Triton's interpreter with the file's inputs. Raises TargetError where it returns
    something else."""
    if not source.has_inputs:
        return None
    spec = f"{source.path.resolve()}:{source.name}"
    try:
        returned = interpreter.run(spec, *source.args, **source.kwargs)
    except FuselabError:
        return None
    if returned is None:
        return 0
    if isinstance(returned, Tensor):
        return 1
    if isinstance(returned, tuple) and returned and all(isinstance(x, Tensor) for x in returned):
        return len(returned)
    raise TargetError(
        f"{source.name} in {source.path} returns {type(returned).__name__}; an operator returns "
        "one tensor, or a flat tuple of several."
    )


def _parameters(kernel: Any) -> dict[str, Any]:
    function = triton_compile.jit_function(kernel)
    return {one.name: one for one in function.params}


def with_launcher(source: Source, definition: Definition) -> Written:
    """Return the package's part for a file whose function launches its kernels."""
    returned = returned_by(source)
    if returned not in (None, 0, definition.outputs):
        raise TargetError(
            f"{source.name} returns {returned} tensors, and the reference {definition.outputs}."
        )
    kernels = sliced(source.path, list(source.kernels))
    beside = dict.fromkeys(kernels.defined, "triton_kernels")
    launch = sliced(source.path, [source.name], beside)
    given: list[str] = []
    blanks: list[str] = []
    lines: list[str] = []
    guesses: list[str] = []
    names = {one.lower(): one for one in definition.names}
    names |= {one.lower(): literal(value) for one, value in definition.fixed.items()}
    parameters = inspect.signature(source.chosen).parameters
    required = [one for one in parameters.values() if one.default is MISSING]
    extra = [one.name for one in required if one.name.lower() not in names]
    tensors = [name for name in definition.names if name.lower() not in map(str.lower, parameters)]
    renamed = dict(zip(extra, tensors, strict=False)) if len(extra) == len(tensors) else {}
    allocated = [] if renamed else extra
    if allocated and len(allocated) == definition.outputs:
        like = "output_like" if len(allocated) == 1 else "outputs_like"
        lines.append(f"{', '.join(allocated)} = {like}(reference, {', '.join(definition.names)})")
    elif allocated:
        for name in allocated:
            blanks.append(f"{name}, which {source.name} takes and the reference does not")
            lines += [f"# FILL IN: {blanks[-1]}", f"{name} = None"]
    floats = {one.name for one in definition.parameters if one.annotation == "float"}
    for name, one in parameters.items():
        value = renamed.get(name, names.get(name.lower(), name if name in allocated else None))
        if value is None:
            continue
        value = f"float({value})" if value in floats else value
        by_name = one.kind is one.KEYWORD_ONLY or any("=" in text for text in given)
        skipped = any(
            other not in names and other not in renamed and other not in allocated
            for other in list(parameters)[: list(parameters).index(name)]
        )
        given.append(f"{name}={value}" if by_name or skipped else value)
    called = f"launch.{source.name}({', '.join(given)})"
    if allocated:
        lines += [called, f"return {', '.join(allocated)}"]
    else:
        lines.append(f"return {called}")
    if source.has_inputs and returned is None:
        guesses.append(f"{source.name} does not run in Triton's interpreter, so it was not tried")
    guesses += [
        f"{one} of {source.name} is {other}, by its place" for one, other in renamed.items()
    ]
    imports = ["from . import launch"]
    if any("like(reference" in line for line in lines):
        like = "output_like" if len(allocated) == 1 else "outputs_like"
        imports.append(f"from fuselab.runtime.signature import {like}")
    return Written(
        files={
            "triton_kernels.py": f'"""The Triton kernels."""\n\n{kernels.text}',
            "launch.py": f'"""The function that launches them."""\n\n{launch.text}',
            **kernels.files,
            **launch.files,
        },
        launcher="\n".join(f"    {line}" for line in lines),
        imports=imports,
        wrapped=True,
        blanks=blanks,
        guesses=guesses,
    )


# --- a kernel alone -------------------------------------------------------------------------------


def roles_of(source: Source) -> triton_roles.Roles:
    """Return what a bare kernel's text says of its parameters and programs."""
    definitions = _definitions(source.kernels)
    return triton_roles.roles_of(definitions[source.name], definitions)


def kernel_parameters(source: Source) -> list[KernelParameter]:
    """Return what a bare kernel does with its parameters; their values are the example's."""
    roles = roles_of(source)
    given = dict(zip(roles.accesses, source.args, strict=False)) | dict(source.kwargs)
    found = []
    for name, parameter in _parameters(source.chosen).items():
        accesses = roles.accesses.get(name, set())
        value = given.get(name, parameter.default)
        if parameter.is_constexpr:
            kind = arguments.CONSTANT
        elif not accesses and not isinstance(value, Tensor):
            kind = arguments.NUMBER
        elif triton_roles.ADDS in accesses:
            kind = arguments.ADDED
        elif triton_roles.STORES in accesses:
            kind = arguments.UPDATED if triton_roles.LOADS in accesses else arguments.OUTPUT
        else:
            kind = arguments.INPUT
        found.append(KernelParameter(name, kind, "", value, _size(name, roles)))
    return found


def _size(name: str, roles: triton_roles.Roles) -> str:
    """Return the size that a kernel's text shows a number to be; empty if it shows none."""
    if name in roles.sizes:
        pointer, kind, axis = roles.sizes[name]
        plain = arguments.plain_name(pointer)
        return f"{plain}.shape[{axis}]" if kind == "shape" else f"{plain}.stride({axis})"
    is_width = name in roles.widths.values() and name not in roles.limits.values()
    return "width" if is_width else ""


def with_kernel(
    source: Source, kernel: Sequence[KernelParameter], definition: Definition
) -> Written:
    """Return the package's part for a bare kernel: its launcher is written."""
    cut = sliced(source.path, [source.name])
    roles = roles_of(source)
    launch = arguments.arranged(kernel, definition)
    tuned = taken_apart(source.chosen).chosen
    block = None if tuned else _block(kernel, roles)
    left = [one for one in kernel if one.name not in tuned]
    constants = _constants(left, roles, launch, block)
    constants |= {name: f'meta["{name}"]' for name in tuned}
    grid = _grid(source.name, roles, launch, constants)
    positional = [launch.given[one.name] for one in kernel if one.kind != arguments.CONSTANT]
    keywords = [f"{name}={text}" for name, text in constants.items() if name not in tuned]
    if "meta[" in grid:
        grid = f"lambda meta: {grid}"
    if any(one.kind == arguments.CONSTANT for one in kernel[: len(positional)]):
        others = [one for one in kernel if one.kind != arguments.CONSTANT]
        keywords = [f"{one.name}={launch.given[one.name]}" for one in others] + keywords
        positional = []
    lines = [*launch.allocations]
    for name, told in launch.blanks:
        lines += [f"# FILL IN: {told}", f"{name} = None"]
    if block is not None:
        like = definition.tensors[0] if definition.tensors else launch.outputs[0]
        lines.append(f'config = chosen(NAME, "triton", ({like}.dtype,), CONFIGS)')
        keywords.append("**config")
    called = f"launch({', '.join([source.name, grid, *positional, *keywords])})"
    imports = [f"from .triton_kernels import {source.name}"]
    if tuned:  # Triton's own tuning launches, with the settings that it chooses
        called = f"{source.name}[{grid}]({', '.join([*positional, *keywords])})"
    else:
        imports.append("from fuselab.runtime.triton_launch import launch")
    lines += [called, f"return {', '.join(launch.outputs)}"]
    text = "\n".join(lines)
    imports += [
        f"from fuselab.runtime.signature import {like}"
        for like in ("output_like", "outputs_like")
        if f"{like}(" in text
    ]
    if "triton." in text:
        imports.append("import triton")
    configs = None
    if block is not None:
        imports.append("from fuselab.runtime.tuning import Config, chosen")
        configs = _configs(block, kernel)
    return Written(
        files={"triton_kernels.py": f'"""The Triton kernels."""\n\n{cut.text}', **cut.files},
        launcher="\n".join(f"    {line}" for line in lines),
        imports=imports,
        wrapped=bool(tuned),
        blanks=[told for _, told in launch.blanks],
        guesses=launch.guesses,
        configs=configs,
    )


def _block(kernel: Sequence[KernelParameter], roles: triton_roles.Roles) -> str | None:
    """Return the constant that tuning may choose: the block of a grid of one dimension."""
    if roles.programs != {0} or 0 not in roles.blocks or roles.limits.get(0) is None:
        return None
    name = roles.blocks[0]
    return (
        name if any(one.name == name and one.kind == arguments.CONSTANT for one in kernel) else None
    )


def _configs(block: str, kernel: Sequence[KernelParameter]) -> str:
    """Return the configurations to tune; the first is the example's, or a usual one."""
    own = next(one.default for one in kernel if one.name == block)
    first = own if isinstance(own, int) else 1024
    sizes = list(dict.fromkeys([first, 1024, 512, 2048, 4096]))
    entries = ", ".join(
        f"Config({block}={size}, num_warps={max(1, min(size // 256, 16))})" for size in sizes
    )
    return f"CONFIGS = [{entries}]"


def _constants(
    kernel: Sequence[KernelParameter], roles: triton_roles.Roles, launch: Launch, block: str | None
) -> dict[str, str]:
    """Return the text of each constant of the launch, but for the tuned one."""
    found = {}
    for one in kernel:
        if one.kind != arguments.CONSTANT or one.name == block:
            continue
        width = roles.widths.get(one.name)
        if one.name in launch.given:
            found[one.name] = launch.given[one.name]
        elif width in launch.given and one.name not in roles.blocks.values():
            found[one.name] = f"triton.next_power_of_2({launch.given[width]})"
        elif one.name.lower() in ("num_stages", "num_warps") and one.default is MISSING:
            found[one.name] = "2" if one.name.lower() == "num_stages" else "4"
            launch.guesses.append(f"{one.name} is {found[one.name]}, a usual value")
        elif one.default is not MISSING:
            found[one.name] = literal(one.default)
            launch.guesses.append(f"{one.name} is {found[one.name]}, as the file has it")
        elif re.fullmatch(r"(?i)block\w*|\w*_block|b[mnk]", one.name):
            found[one.name] = "64" if len(roles.programs) > 1 else "1024"
            launch.guesses.append(f"{one.name} is {found[one.name]}, a usual size")
        else:
            told = f"the kernel's constant {one.name}"
            found[one.name] = launch.blank(one.name, told)
    return found


def _grid(
    name: str, roles: triton_roles.Roles, launch: Launch, constants: Mapping[str, str]
) -> str:
    """Return the text of the grid: programs for the blocks of each axis, or for its rows."""
    axes = []
    for axis in range(max(roles.programs, default=0) + 1):
        block, limit = roles.blocks.get(axis), roles.limits.get(axis)
        if axis not in roles.programs:
            axes.append("1")
        elif limit is not None and limit in launch.given and block is not None:
            size = constants.get(block, f"config.{block}")
            axes.append(f"triton.cdiv({launch.given[limit]}, {size})")
        elif limit is not None and limit in launch.given:
            axes.append(launch.given[limit])
        elif len(roles.programs) == 1 and roles.widths and launch.outputs:
            width = launch.given[next(iter(roles.widths.values()))]
            tensor = width.partition(".")[0]
            axes.append(f"{tensor}.numel() // max({width}, 1)")
            launch.guesses.append(f"{name} runs one program per row of {tensor}")
        else:
            launch.blank("grid", f"how many programs of {name} run: a tuple, one number per axis")
            return "grid"
    return f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
