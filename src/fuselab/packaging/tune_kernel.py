"""``fuselab tune``: time a bare Triton kernel with other constants, warps and stages.

The kernel needs no declaration. ``get_inputs()`` of its file returns its arguments, and the setting
among them, or the one of ``--set``, is what the others are compared with.
"""

from __future__ import annotations

import ast
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab import ops
from fuselab.device.select import select
from fuselab.errors import ArgumentError, DeviceError, MissingTargetError, TargetError
from fuselab.inspect.assembly import subjects, triton_compile
from fuselab.inspect.assembly.asked import settings_of
from fuselab.measure.interleave import Candidate, interleave
from fuselab.packaging import arguments, triton_package, triton_roles
from fuselab.packaging.definition import MISSING

MOST_CANDIDATES = 48
_ONE_AXIS = (128, 256, 512, 1024, 2048, 4096, 8192)
_TWO_AXES = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8, 16)
_STAGES = (2, 3, 4)

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A kernel with its arguments on the CPU, and the settings to try; the first is the file's own.

    ``grid`` returns the number of programs per axis for all values by name. ``written`` are the
    arguments that the kernel stores or adds to.
    """

    name: str
    kernel: Any
    values: Mapping[str, Any]
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]]
    settings: Sequence[Setting]
    written: Sequence[str]


def planned(spec: str, lists: Mapping[str, Sequence[Any]], grid: str | None) -> Plan:
    """Return what is tried of the kernel ``FILE.py:NAME``.

    ``lists`` are the values to try by name of a constant, ``num_warps`` or ``num_stages``; without
    them usual ones are tried for the blocks of the grid. ``grid`` is an expression of the kernel's
    arguments, such as ``cdiv(numel, BLOCK)``, where the kernel's text does not tell it. Raises
    TargetError, ArgumentError.
    """
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
    source = triton_package.found_in(path, module, name or _only(kernels, path))
    if source is None or source.is_launcher:
        raise TargetError(
            f"{spec} is no @triton.jit kernel; name one: {path}:{next(iter(kernels), 'KERNEL')}."
        )
    if triton_package.chosen_by_decorators(source.chosen):
        raise TargetError(f"{source.name} tunes itself by triton.autotune; take that off first.")
    if not source.has_inputs:
        raise TargetError(
            f"{path} has no get_inputs(); write one that returns the arguments of {source.name}, "
            "large enough that its time counts."
        )
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
    missing = [one.name for one in parameters if one.name not in {**values, **lists}]
    missing = [one for one in missing if one not in roles.blocks.values()]
    if missing:
        raise TargetError(
            f"get_inputs() of {path} lacks {', '.join(missing)} of {source.name}"
            + "".join(
                f"; it has the arguments of {launcher}, and tune takes those of the kernel itself"
                for launcher in list(subjects.launchers_in(module, kernels))[:1]
            )
            + "."
        )
    own = {name: values[name] for name in constants if name in values}
    blocks = [name for name in dict.fromkeys(roles.blocks.values()) if name in constants]
    tree = triton_roles.definition_of(triton_compile.python_function(source.chosen))
    has_loop = any(isinstance(node, ast.For | ast.While) for node in ast.walk(tree))
    written = [one.name for one in parameters if one.kind in arguments.WRITTEN]
    return Plan(
        source.name,
        source.chosen,
        values,
        _grid(source.name, roles, grid, [*values, *blocks, *lists]),
        settings(own, blocks, lists, has_loop),
        written,
    )


def _only(kernels: Mapping[str, Any], path: Path) -> str:
    """Return the file's only kernel. Raises TargetError."""
    if len(kernels) == 1:
        return next(iter(kernels))
    if not kernels:
        raise TargetError(f"{path} has no @triton.jit kernel.")
    raise TargetError(
        f"{path} has several kernels; name one: {', '.join(f'{path}:{name}' for name in kernels)}."
    )


def settings(
    own: Setting, blocks: Sequence[str], lists: Mapping[str, Sequence[Any]], has_loop: bool
) -> list[Setting]:
    """Return the settings to try, the kernel's own first: every combination of the ``lists``, or
    usual sizes of the ``blocks`` with the warps that give a thread 1 to 64 elements."""
    choices: dict[str, Sequence[Any]] = {}
    for name in blocks:
        choices[name] = lists.get(name, _ONE_AXIS if len(blocks) == 1 else _TWO_AXES)
    choices |= {name: values for name, values in lists.items() if name not in choices}
    choices.setdefault("num_warps", _WARPS)
    if has_loop:
        choices.setdefault("num_stages", _STAGES)
    fixed = {name: value for name, value in own.items() if name not in choices}
    found: list[Setting] = []
    if set(blocks) <= own.keys():
        found.append(dict(own))
    for values in itertools.product(*choices.values()):
        setting = {**fixed, **dict(zip(choices, values, strict=True))}
        sizes = [setting[name] for name in blocks if isinstance(setting[name], int)]
        per_thread = math.prod(sizes) / (32 * setting["num_warps"]) if sizes else 1
        asked = "num_warps" in lists
        if setting not in found and (asked or 1 <= per_thread <= 64):
            found.append(setting)
    if len(found) > MOST_CANDIDATES:  # evenly spread; the first stays
        step = len(found) / MOST_CANDIDATES
        found = [found[int(place * step)] for place in range(MOST_CANDIDATES)]
    return found


def _grid(
    name: str, roles: triton_roles.Roles, text: str | None, known: Sequence[str]
) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
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


def on_gpu(device: str, spec: str) -> torch.device:
    """Return the GPU to time on. Raises DeviceError, which says what works without one."""
    found = select(device)
    if found.type != "cuda":
        raise DeviceError(
            "tune times kernels on a GPU, and there is none here; without one, "
            f"'fuselab asm {spec} --diff num_warps=8' compares what the compiler makes of two "
            "settings, and 'fuselab debug' runs the kernel."
        )
    return found


def tuned(plan: Plan, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Time every setting, interleaved, and return the facts, the fastest first.

    A setting whose results differ from those of the first one is wrong, one that does not compile
    or launch has failed; both are listed without a time.
    """
    held = {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for name, value in plan.values.items()
    }
    before = {name: held[name].clone() for name in plan.written}
    expected: dict[str, Tensor] = {}

    def candidate(setting: Setting) -> Candidate:
        def call() -> None:
            values = {**held, **setting}
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
    timed.sort(key=lambda row: float(row["us"]))
    is_compared = timed and rows[0] in timed
    return {
        "kernel": plan.name,
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
