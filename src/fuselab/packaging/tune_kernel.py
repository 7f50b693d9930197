"""``fuselab tune``: time a bare Triton kernel with other constants, warps and stages.

The kernel needs no declaration. ``get_inputs()`` of its file returns its arguments, or those of a
function that launches it. The setting among them, or the first of the kernel's own configurations,
is what the others are compared with.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab import ops
from fuselab.device.select import select
from fuselab.errors import (
    ArgumentError,
    DeviceError,
    MissingTargetError,
    TargetError,
    UnknownNameError,
)
from fuselab.inspect.assembly import subjects, triton_compile, triton_roles
from fuselab.inspect.assembly.asked import settings_of
from fuselab.inspect.assembly.kernel_decorators import Configuration, taken_apart
from fuselab.measure.interleave import Candidate, interleave
from fuselab.packaging import arguments, triton_package
from fuselab.packaging.definition import MISSING
from fuselab.packaging.recorded_launch import on_device, recorded

MOST_CANDIDATES = 48
_ONE_AXIS = (128, 256, 512, 1024, 2048, 4096, 8192)
_TWO_AXES = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8, 16)
_STAGES = (2, 3, 4)

Setting = Mapping[str, Any]
Grid = Callable[[Mapping[str, Any]], tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """A kernel with its arguments, and the settings to try; the first is the file's own.

    ``grid`` returns the number of programs per axis for all values by name. ``written`` are the
    arguments that the kernel stores or adds to. ``completed`` adds what the kernel's heuristics
    compute from the values. ``hooks`` run before a launch, by the name of its setting. ``notes``
    are sentences for the user.
    """

    name: str
    kernel: Any
    values: Mapping[str, Any]
    grid: Grid
    settings: Sequence[Setting]
    written: Sequence[str]
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    hooks: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Subject:
    """A kernel of a file and its arguments by name, with the options of its launch. ``launcher`` is
    the function that they were taken from, with the grid that it launches."""

    source: triton_package.Source
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    launcher: str | None = None
    grid: Any = None


def planned(
    spec: str,
    lists: Mapping[str, Sequence[Any]],
    grid: str | None,
    kernel: str | None = None,
    device: torch.device | None = None,
) -> Plan:
    """Return what is tried of the kernel ``FILE.py:NAME``, or of the one that the function of that
    name launches; ``kernel`` names it where there are several.

    ``lists`` are the values to try by name of a constant, ``num_warps`` or ``num_stages``; without
    them the configurations of the kernel's ``@triton.autotune`` are tried, or usual ones for the
    blocks of the grid. ``grid`` is an expression of the kernel's arguments, such as ``cdiv(numel,
    BLOCK)``, where neither the kernel's text nor a function tells it. ``device`` is the GPU, if
    there is one. Raises TargetError, ArgumentError.
    """
    subject = _subject(spec, kernel, device)
    source = subject.source
    decorated = taken_apart(source.chosen)
    parameters = triton_package.kernel_parameters(source)
    values = {one.name: one.default for one in parameters if one.default is not MISSING}
    constants = [one.name for one in parameters if one.kind == arguments.CONSTANT]
    for key in lists:
        if key not in (*constants, "num_warps", "num_stages"):
            raise ArgumentError(
                f"--set {key}: {source.name} has the constants {', '.join(constants) or 'none'}, "
                "and num_warps and num_stages."
            )
    roles = triton_package.roles_of(source)
    computed = decorated.heuristics.keys() - lists.keys()
    blocks = [one for one in dict.fromkeys(roles.blocks.values()) if one in constants]
    known = {*values, *lists, *blocks, *decorated.chosen}
    missing = [one.name for one in parameters if one.name not in known]
    if missing:
        raise TargetError(
            f"get_inputs() of {source.path} lacks {', '.join(missing)} of {source.name}."
        )
    completed = functools.partial(decorated.completed, kept=lists)
    own = {name: values[name] for name in constants if name in values} | dict(subject.options)
    notes: list[str] = []
    programs, kept = _programs(subject, roles, grid, [*known], lambda: completed(values))
    configurations = decorated.configurations
    if device is not None:
        configurations = decorated.pruned(values)
    free = [one for one in blocks if one not in computed and (not kept or one in lists)]
    if configurations:
        found, hooks = _of_decorator(own, configurations, lists)
        notes.append(
            f"the {len(configurations)} configurations of its @triton.autotune are tried"
            + (", with the values of --set" if lists else "")
        )
    else:
        tree = triton_roles.definition_of(triton_compile.python_function(source.chosen))
        has_loop = any(isinstance(node, ast.For | ast.While) for node in ast.walk(tree))
        found, hooks = settings(own, free, lists, has_loop, computed), {}
        if kept and free != blocks:
            notes.append(
                f"the {kept} programs that {subject.launcher} launches stay, and so do the blocks; "
                "--grid says how many there are of others"
            )
    if computed:
        notes.append(f"its @triton.heuristics compute {', '.join(sorted(computed))}")
    if len(found) > MOST_CANDIDATES:
        notes.append(f"{MOST_CANDIDATES} of the {len(found)} settings are tried")
    written = [one.name for one in parameters if one.kind in arguments.WRITTEN]
    return Plan(
        source.name,
        decorated.function,
        values,
        programs,
        _spread(found),
        written,
        completed,
        hooks,
        notes,
    )


def _subject(spec: str, kernel: str | None, device: torch.device | None) -> _Subject:
    """Return the kernel that is meant, with the arguments of ``get_inputs()``, or with those that
    the function gives it for which ``get_inputs()`` is meant."""
    place, _, name = spec.partition(":")
    path = Path(place).expanduser()
    if ops.has(spec.removeprefix("fuselab::")) or path.is_dir():
        raise ArgumentError(f"{spec} is an operator: fuselab bench {spec} --tune.")
    if not path.is_file():
        raise MissingTargetError(f"{path}: no such file; give FILE.py:KERNEL.")
    if path.suffix != ".py":
        raise TargetError(f"{path} is no Python file; tune times Triton kernels.")
    module = subjects.module_of(path)
    if subjects.holds_operator(module, name):
        raise ArgumentError(f"{spec} declares an operator: fuselab bench {spec} --tune.")
    kernels = subjects.kernels_in(module)
    if not kernels:
        raise TargetError(f"{path} has no @triton.jit kernel.")
    if kernel is not None and kernel not in kernels:
        raise UnknownNameError("kernel", kernel, kernels)
    named = getattr(module, name, None) if name else None
    if name and not triton_compile.is_kernel(named) and not inspect.isfunction(named):
        functions = subjects.launchers_in(module, kernels)
        says = "has no" if named is None else "has no kernel and no function that launches one,"
        raise TargetError(f"{path} {says} '{name}'; it has {', '.join((*functions, *kernels))}.")
    offer = getattr(module, "get_inputs", None)
    if offer is None:
        raise TargetError(
            f"{path} has no get_inputs(); write one that returns the arguments of "
            f"{name or kernel or next(iter(kernels))}, large enough that its time counts."
        )
    args, kwargs = subjects.inputs_of(offer, path)
    if inspect.isfunction(named):
        wanted = kernel or _only_of(named, kernels, path)
        return _launched(path, kernels, named, args, kwargs, wanted, device)
    wanted = name or kernel or _only(subjects.entries(kernels), path)
    if kernel not in (None, wanted):
        raise ArgumentError(f"--kernel {kernel}: {spec} is another kernel.")
    chosen = kernels.get(wanted, named)
    launcher = subjects.launcher_for(module, chosen, args, kwargs, path)
    if launcher is not None:
        return _launched(path, kernels, launcher, args, kwargs, wanted, device)
    names = triton_compile.jit_function(chosen).arg_names
    if len(args) > len(names):
        raise TargetError(
            f"get_inputs() of {path} returns {len(args)} values, and {wanted} has {len(names)} "
            "arguments."
        )
    given = dict(zip(names, args, strict=False)) | kwargs
    return _with_arguments(path, kernels, wanted, chosen, given)


def _launched(
    path: Path,
    kernels: Mapping[str, Any],
    launcher: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    device: torch.device | None,
) -> _Subject:
    """Return the kernel ``name`` with the arguments that a function launches it with."""
    launch = recorded(launcher, args, kwargs, [kernels[name]], device)
    found = _with_arguments(path, kernels, name, launch.kernel, launch.values)
    return replace(found, launcher=launcher.__name__, grid=launch.grid)


def _with_arguments(
    path: Path, kernels: Mapping[str, Any], name: str, chosen: Any, given: Mapping[str, Any]
) -> _Subject:
    names = triton_compile.jit_function(chosen).arg_names
    options = {one: given[one] for one in triton_compile.OPTIONS if one in given.keys() - {*names}}
    unknown = given.keys() - {*names, *options}
    if unknown:
        raise TargetError(f"{name} of {path} has no argument {', '.join(sorted(unknown))}.")
    values = {one: value for one, value in given.items() if one in names}
    source = triton_package.Source(path, {**kernels, name: chosen}, name, chosen, (), values, True)
    return _Subject(source, values, options)


def _only(kernels: Mapping[str, Any], path: Path) -> str:
    """Return the file's only kernel. Raises TargetError."""
    if len(kernels) == 1:
        return next(iter(kernels))
    raise TargetError(
        f"{path} has several kernels; name one: {', '.join(f'{path}:{name}' for name in kernels)}."
    )


def _only_of(function: Callable[..., Any], kernels: Mapping[str, Any], path: Path) -> str:
    """Return the only kernel that a function names. Raises TargetError."""
    found = [
        name
        for name, one in subjects.entries(kernels).items()
        if subjects.launches_one(function, {name: one})
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise TargetError(
            f"{function.__name__} of {path} launches none of its kernels ({', '.join(kernels)})."
        )
    raise TargetError(
        f"{function.__name__} launches several kernels ({', '.join(found)}); name one: "
        f"--kernel {found[0]}."
    )


def _of_decorator(
    own: Setting, configurations: Sequence[Configuration], lists: Mapping[str, Sequence[Any]]
) -> tuple[list[Setting], dict[str, Callable[[dict[str, Any]], Any]]]:
    """Return autotune's configurations as settings, each with every combination of the lists, and
    their hooks by the setting's name."""
    found: list[Setting] = []
    hooks: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for one in configurations:
        for values in itertools.product(*lists.values()):
            setting = {**own, **one.setting, **dict(zip(lists, values, strict=True))}
            if setting not in found:
                found.append(setting)
                if one.hook is not None:
                    hooks[_named(setting)] = one.hook
    return found, hooks


def _spread(found: Sequence[Setting]) -> Sequence[Setting]:
    """Return at most ``MOST_CANDIDATES`` of the settings, evenly spread; the first stays."""
    step = max(1.0, len(found) / MOST_CANDIDATES)
    return [found[int(place * step)] for place in range(min(len(found), MOST_CANDIDATES))]


def settings(
    own: Setting,
    blocks: Sequence[str],
    lists: Mapping[str, Sequence[Any]],
    has_loop: bool,
    computed: Collection[str] = (),
) -> list[Setting]:
    """Return the settings to try, the kernel's own first: every combination of the ``lists``, or
    usual sizes of the ``blocks`` with the warps that give a thread 1 to 64 elements. Heuristics
    give the names in ``computed``."""
    choices: dict[str, Sequence[Any]] = {}
    for name in blocks:
        choices[name] = lists.get(name, _ONE_AXIS if len(blocks) == 1 else _TWO_AXES)
    choices |= {name: values for name, values in lists.items() if name not in choices}
    if "num_warps" not in computed:
        choices.setdefault("num_warps", _WARPS)
    if has_loop and "num_stages" not in computed:
        choices.setdefault("num_stages", _STAGES)
    fixed = {name: value for name, value in own.items() if name not in choices}
    found: list[Setting] = []
    if set(blocks) <= own.keys():
        found.append(dict(own))
    for values in itertools.product(*choices.values()):
        setting = {**fixed, **dict(zip(choices, values, strict=True))}
        sizes = [setting[name] for name in blocks if isinstance(setting[name], int)]
        asked = "num_warps" in lists or "num_warps" in computed
        per_thread = math.prod(sizes) / (32 * setting["num_warps"]) if sizes and not asked else 1
        if setting not in found and (asked or 1 <= per_thread <= 64):
            found.append(setting)
    return found


def _programs(
    subject: _Subject,
    roles: triton_roles.Roles,
    text: str | None,
    known: Sequence[str],
    values: Callable[[], Mapping[str, Any]],
) -> tuple[Grid, Any]:
    """Return the function that computes the grid, and the grid that has to stay as a function gave
    it, else None. Raises ArgumentError."""
    given, name = subject.grid, subject.source.name
    if text is not None or given is None:
        return _grid(name, roles, text, known), None
    if callable(given):
        return lambda held: tuple(given(dict(held))), None
    given = tuple(map(int, given)) if isinstance(given, tuple | list) else (int(given),)
    try:
        followed = _grid(name, roles, None, known)
        if _padded(followed(values())) == _padded(given):
            return followed, None
    except Exception:  # the text tells nothing, or heuristics need a GPU
        pass
    return lambda held: given, given


def _padded(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, 1, 1)[:3]


def _grid(name: str, roles: triton_roles.Roles, text: str | None, known: Sequence[str]) -> Grid:
    """Return the function that computes the grid. Raises ArgumentError."""
    if text is None:
        axes = range(max(roles.programs, default=0) + 1)
        if any(axis in roles.programs and axis not in roles.limits for axis in axes):
            raise ArgumentError(
                f"the text of {name} does not tell how many programs run; say it by its arguments, "
                f"--grid 'cdiv({next(iter(known), 'n')}, BLOCK)'."
            )
        words = [
            f"cdiv({roles.limits[axis]}, {roles.blocks.get(axis, 1)})"
            if axis in roles.programs
            else "1"
            for axis in axes
        ]
        text = f"({', '.join(words)},)"
    try:
        code = compile(text, "--grid", "eval")
    except SyntaxError as error:
        raise ArgumentError(f"--grid {text}: {error.msg}.") from error
    unknown = set(code.co_names) - {*known, "cdiv"}
    if unknown:
        raise ArgumentError(f"--grid {text}: {name} has no argument {', '.join(sorted(unknown))}.")

    def grid(values: Mapping[str, Any]) -> tuple[int, ...]:
        words = {"__builtins__": {}, "cdiv": lambda one, other: -(-one // other), **values}
        found = eval(code, words)
        return tuple(found) if isinstance(found, tuple) else (found,)

    return grid


def gpu_of(device: str) -> torch.device | None:
    """Return the GPU that ``--device`` means; None without one. Raises DeviceError for a device
    that does not exist."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        return None
    found = select(device)
    return found if found.type == "cuda" else None


def without_gpu(spec: str, plan: Plan) -> DeviceError:
    """Return the error that says what works of a plan without a GPU."""
    return DeviceError(
        f"tune would time {len(plan.settings)} settings of {plan.name} on a GPU, and there is none "
        f"here or --device is cpu; without one, 'fuselab asm {spec} --diff num_warps=8' compares "
        "what the compiler makes of two settings, and 'fuselab debug' runs the kernel."
    )


def tuned(plan: Plan, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Time every setting, interleaved, and return the facts, the fastest first.

    A setting whose results differ from those of the first one is wrong, one that does not compile
    or launch has failed; both are listed without a time. Raises TargetError if none has a time.
    """
    held = on_device(dict(plan.values), device)
    before = {name: held[name].clone() for name in plan.written}
    expected: dict[str, Tensor] = {}

    def candidate(setting: Setting) -> Candidate:
        hook = plan.hooks.get(_named(setting))

        def call() -> None:
            values = dict(plan.completed({**held, **setting}))
            if hook is not None:
                hook(values)
            plan.kernel[plan.grid(values)](**values)

        def verify(after: bool) -> str | None:
            for name, value in before.items():
                held[name].copy_(value)
            call()
            found = {name: held[name].clone() for name in plan.written}
            if not expected:
                expected.update(found)
            for name, value in found.items():
                try:
                    torch.testing.assert_close(value, expected[name], equal_nan=True)
                except AssertionError:
                    return f"{name} differs from that of the first setting"
            return None

        return Candidate(_named(setting), call, verify)

    samples = interleave(
        [candidate(setting) for setting in plan.settings], device, budget_s=budget_s
    )
    timed: list[dict[str, Any]] = []
    untimed: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for setting in plan.settings:
        one = samples[_named(setting)]
        us = statistics.median(one.times_us) if one.times_us else None
        row = {"setting": dict(setting), "us": us, "failed": one.wrong or one.failed}
        rows.append(row)
        (untimed if us is None else timed).append(row)
    if not timed:
        raise TargetError(f"no setting of {plan.name} ran; the first: {rows[0]['failed']}")
    timed.sort(key=lambda row: float(row["us"]))
    is_compared = timed and rows[0] in timed
    return {
        "kernel": plan.name,
        "notes": list(plan.notes),
        "first": rows[0],
        "rows": [*timed, *untimed],
        "speedup": rows[0]["us"] / timed[0]["us"] if is_compared else None,
    }


def _named(setting: Setting) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or "as it is"


def lists_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return ``NAME=1,2,4`` texts as lists of values by name. Raises ArgumentError."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if not name.isidentifier() or not words:
            raise ArgumentError(f"--set {text}: write NAME=1,2,4, for example --set BLOCK=256,512.")
        found[name] = [settings_of([f"{name}={word}"])[name] for word in words]
    for name in ("num_warps", "num_stages"):
        if any(not isinstance(one, int) or one < 1 for one in found.get(name, ())):
            raise ArgumentError(f"--set {name}: whole numbers from 1 on.")
    return found
