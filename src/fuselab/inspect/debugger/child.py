"""The child process of ``fuselab debug``: loads the subject, runs it interpreted, says what it saw.

It is started with two paths: the session as JSON, and where to write the result.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab import ops
from fuselab.composition import Composition
from fuselab.errors import ArgumentError, FuselabError, TargetError, UnknownNameError
from fuselab.inspect.assembly import kernel_decorators, subjects, triton_compile
from fuselab.inspect.debugger import compare, stops
from fuselab.inspect.debugger.recorder import Record, recording, wanted_programs
from fuselab.inspect.debugger.session import Session
from fuselab.op import FusedOp
from fuselab.prove import load as loading
from fuselab.runtime import interpreted_libdevice
from fuselab.runtime.interpreter import first_configuration

MOST_ACCESSES = 20_000


@dataclass(frozen=True)
class Run:
    """A call that launches kernels: ``call(*args, **kwargs)``, and the arguments' names."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[str, Any]
    reference: str | None = None

    def again(self) -> Any:
        """Call it on copies of the tensors, since a kernel may overwrite them; return its result
        and the copies by name."""
        copies: dict[int, Any] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in copies:
                    copies[id(value)] = value.clone()
                return copies[id(value)]
            if isinstance(value, tuple | list):
                return type(value)(map(copied, value))
            return value

        args = copied(self.args)
        kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        names = {name: copied(value) for name, value in self.names.items()}
        with torch.no_grad(), first_configuration():
            return self.call(*args, **kwargs), names


def run_of(session: Session) -> Run:
    """Return the call that a session's subject stands for. Raises a FuselabError."""
    place, _, name = session.spec.partition(":")
    path = Path(place).expanduser()
    if "::" in session.spec or ops.has(session.spec) or path.is_dir():
        return _of_operator(session)
    if path.suffix != ".py":
        if path.suffix or "/" in place:
            raise TargetError(f"{path} is no Python file; debug runs Triton kernels.")
        raise UnknownNameError("operator", session.spec, ops.operators())
    module = subjects.module_of(path)
    if subjects.holds_operator(module, name):
        return _of_operator(session)
    if session.case or session.implementation:
        raise ArgumentError(f"--case and --implementation are for an operator; {path} has none.")
    if session.backward:
        raise ArgumentError(f"--backward is for an operator; {path} has none.")
    found = getattr(module, name, None) if name else None
    if name and found is None:
        raise TargetError(f"{path} has no '{name}'.")
    offer = getattr(module, "get_inputs", None)
    kernels = subjects.kernels_in(module)
    if not kernels:
        raise TargetError(f"{path} has no @triton.jit kernel and no FusedOp.")
    if found is None:
        found = subjects.only_launcher(module, kernels, path)
    if found is None:
        entries = subjects.entries(kernels)
        if len(entries) > 1:
            raise TargetError(
                f"{path} has several kernels ({', '.join(entries)}); name one: "
                f"{path}:{next(iter(entries))}."
            )
        found = next(iter(entries.values()))
    if offer is None:
        raise TargetError(
            f"{path} has no get_inputs(); write one that returns the arguments of "
            f"{getattr(found, '__name__', name)}, small ones."
        )
    args, kwargs = subjects.inputs_of(offer, path)
    if triton_compile.is_kernel(found):
        return _of_kernel(session, found, args, kwargs)
    if session.grid is not None:
        raise ArgumentError(
            f"--grid is for a kernel alone, and {found.__name__} launches with a grid of its own."
        )
    try:
        bound = inspect.signature(found).bind(*args, **kwargs)
    except TypeError as error:
        raise TargetError(
            f"get_inputs() of {path} does not fit "
            f"{found.__name__}{inspect.signature(found)}: {error}."
        ) from error
    bound.apply_defaults()
    return Run(found.__name__, found, args, kwargs, dict(bound.arguments))


def _of_kernel(
    session: Session, kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Run:
    function = triton_compile.python_function(kernel)
    names = list(inspect.signature(function).parameters)
    if session.grid is None:
        raise ArgumentError(
            f"{function.__name__} is a kernel: say how many programs run it, --grid 4, or name "
            "the function that launches it."
        )
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    missing = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given.keys() | kernel_decorators.taken_apart(kernel).chosen
        and parameter.default is parameter.empty
    ]
    if missing or len(args) > len(names):
        lacks = f"without {', '.join(missing)}" if missing else f"{len(args)} of them"
        raise TargetError(
            f"get_inputs() does not return the arguments of the kernel "
            f"{function.__name__}({', '.join(names)}): {lacks}. Return those, or name the function "
            "that launches it."
        )
    grid = tuple(session.grid)

    def call(*args: Any, **kwargs: Any) -> None:
        kernel[grid](*args, **kwargs)

    return Run(function.__name__, call, args, kwargs, given)


def _of_operator(session: Session) -> Run:
    found = loading.load(session.spec)
    if isinstance(found, Composition):
        listed = ", ".join(op.short_name for op in found.operators)
        raise TargetError(f"{session.spec} is composed of several operators ({listed}); name one.")
    op: FusedOp = found
    name = session.implementation or "triton"
    if name not in op.implementations:
        raise UnknownNameError("implementation", name, op.implementations)
    args = _arguments(op, session.case)
    on_cpu = replace(op.implementations[name], device="cpu")
    signature = list(op.signature.parameters)
    names = dict(zip(signature, args, strict=True))
    if not session.backward:
        return Run(op.name, on_cpu.forward, op.arranged(args), {}, names, "the reference")
    if on_cpu.backward is None or op.gradient is None:
        raise TargetError(f"{op.name} has no backward in {name}.")
    output = op.reference(*args)
    saved = op.gradient.save(op.with_residuals(output, args), *args)
    upstream = tuple(torch.ones_like(each) for each in op.outputs_of(output))
    grad_output = upstream[0] if len(upstream) == 1 else upstream
    tensors = [value for value in args if isinstance(value, Tensor)]
    needs = tuple(tensor.is_floating_point() for tensor in tensors)
    arranged = op.arranged([grad_output, *saved])
    return Run(op.name, on_cpu.backward, (needs, *arranged), {}, names)


def _arguments(op: FusedOp, name: str | None) -> tuple[Any, ...]:
    """Return the arguments of a case: the named one, else the first small one that is not empty."""
    if name is not None:
        chosen = [case for case in op.cases if case.name == name]
        if not chosen:
            raise UnknownNameError("case", name, [case.name for case in op.cases])
    else:
        chosen = [case for case in op.cases if "boundary" in case.tags] or list(op.cases)
    for case in chosen:
        inputs = case.make(torch.device("cpu"), op.dtypes[0], torch.Generator().manual_seed(0))
        args = op.bind(inputs)
        sizes = [value.numel() for value in args if isinstance(value, Tensor)]
        if name is not None or min(sizes, default=1) > 8:
            return args
    return args


def answered(**fields: Any) -> dict[str, Any]:
    """Run the session of these fields and return what it saw, as plain values. Raises a
    FuselabError."""
    session = Session(**fields)
    run = run_of(session)
    wanted = wanted_programs([list(each) for each in session.programs])
    with recording() as record:
        output, names = _called(run, record)
    if not record.launches:
        raise TargetError(f"{run.name} launches no Triton kernel for these inputs.")
    _check_line(session, record)
    _check_programs(session, record)
    printed = _looked_at(session, run, record, wanted)
    return {
        "target": session.spec,
        "kernels": [
            {
                "name": launch.kernel,
                "file": launch.file,
                "lines": list(launch.lines),
                "grid": list(launch.grid),
                "tensors": {
                    name: {
                        "shape": list(tensor.shape),
                        "dtype": str(tensor.dtype)[6:],
                        "span": _span(tensor),
                    }
                    for name, tensor in launch.tensors.items()
                },
            }
            for launch in record.launches
        ],
        "accesses": [
            asdict(access) for access in record.accesses[:MOST_ACCESSES] if wanted(access.program)
        ],
        "left_out": max(0, len(record.accesses) - MOST_ACCESSES),
        "printed": printed,
        "against": _against(session, run, record, output, names),
    }


def _span(tensor: Tensor) -> int:
    """Return the elements from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _called(run: Run, record: Record) -> tuple[Any, Mapping[str, Any]]:
    try:
        result: tuple[Any, Mapping[str, Any]] = run.again()
        return result
    except FuselabError:
        raise
    except Exception as error:
        raise TargetError(_what_raised(run, record, error)) from error


def _what_raised(run: Run, record: Record, error: BaseException) -> str:
    """Return the sentence for a kernel that raised: the error, its line and its program."""
    cause = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    said = str(cause).strip().splitlines()
    text = f"{type(cause).__name__}: {said[0].rstrip('.') if said else ''}"
    if not record.launches:
        return f"{run.name} raised {text}."
    launch = record.launches[-1]
    line = None
    frame = cause.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == launch.file:
            line = frame.tb_lineno
        frame = frame.tb_next
    place = f" on line {line}" if line is not None else ""
    return f"{launch.kernel} raised {text}{place} of {launch.file}."


def _check_line(session: Session, record: Record) -> None:
    if session.at is None or any(session.at in launch.lines for launch in record.launches):
        return
    kernels = {launch.kernel: launch for launch in record.launches}
    lines = "; ".join(
        f"{name} in {launch.file} runs lines {', '.join(map(str, launch.lines))}"
        for name, launch in kernels.items()
    )
    raise ArgumentError(f"--at {session.at} is no line of a kernel that runs: {lines}.")


def _check_programs(session: Session, record: Record) -> None:
    grids = [launch.grid for launch in record.launches]
    for each in session.programs:
        padded = (*each, 0, 0)[:3]
        if not any(
            all(index < size for index, size in zip(padded, (*grid, 1, 1)[:3], strict=True))
            for grid in grids
        ):
            different = dict.fromkeys(grids)
            sizes = " and that of ".join(" x ".join(map(str, grid)) for grid in different)
            last = " or ".join(",".join(str(size - 1) for size in grid) for grid in different)
            raise ArgumentError(
                f"--program {','.join(map(str, each))} is outside the grid of {sizes}; programs "
                f"count from 0, so that the last is {last}."
            )


def _looked_at(
    session: Session, run: Run, record: Record, wanted: Callable[..., bool]
) -> list[dict[str, Any]]:
    """Run again with stops or prints, if any were asked for."""
    if session.names:
        files = {launch.file for launch in record.launches}
        with stops.printing(files, session.names, session.at, wanted, _say) as printed:
            run.again()
        if not printed:
            raise ArgumentError(
                f"--print {','.join(session.names)}: no such variable in "
                f"{', '.join(dict.fromkeys(launch.kernel for launch in record.launches))}"
                + (f" before line {session.at}." if session.at is not None else ".")
            )
        return printed
    if session.at is not None:
        file = next(launch.file for launch in record.launches if session.at in launch.lines)
        stops.stopping(file, session.at, wanted, run.again)
    return []


def _say(text: str) -> None:
    print(text, flush=True)


def _against(
    session: Session, run: Run, record: Record, output: Any, names: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the comparisons of the result with the expression; none if there is none."""
    if session.against is None:
        return []
    outputs: Sequence[tuple[str, Any]]
    if isinstance(output, Tensor):
        outputs = [("the result", output)]
    elif isinstance(output, tuple | list):
        outputs = [
            (f"result {i}", each) for i, each in enumerate(output) if isinstance(each, Tensor)
        ]
    else:
        stored = dict.fromkeys(one.tensor for one in record.accesses if one.kind != "load")
        outputs = [(name, names[name]) for name in stored if name in names]
    if not outputs:
        raise TargetError(f"{run.name} wrote nothing that --against could be compared with.")
    return compare.compared_all(outputs, session.against, dict(run.names))


def main(asked: str, result: str) -> int:
    """Run the session in the file ``asked`` and write the result as JSON."""
    interpreted_libdevice.install()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    try:
        found = answered(**json.loads(Path(asked).read_text()))
    except FuselabError as error:
        found = {"error": str(error)}
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    Path(result).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
