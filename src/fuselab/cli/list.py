"""``fuselab list``: operators, which implementation runs here, and the built-in models."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from fuselab.cli.options import Device, Json
from fuselab.report.screen import print_folded

if TYPE_CHECKING:
    import torch

    from fuselab.op import Case, FusedOp


@dataclass(frozen=True)
class ImplementationRow:
    """One implementation; ``why_not`` is None if it runs the benchmark cases on this device."""

    name: str
    device: str
    backward: bool
    why_not: str | None


@dataclass(frozen=True)
class Choice:
    """The implementation that ``auto`` takes for a case that moves ``bytes_moved`` bytes."""

    case: str
    bytes_moved: int
    implementation: str


@dataclass(frozen=True)
class OperatorRow:
    """One operator of the library."""

    name: str
    call: str
    formula: str
    dtypes: tuple[str, ...]
    implementations: tuple[ImplementationRow, ...]
    auto: tuple[Choice, ...]


@dataclass(frozen=True)
class ModelRow:
    """One built-in model, which every verb accepts as a TARGET."""

    name: str
    target: str
    about: str


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("list")(list_library)


def list_library(device: Device = "auto", json: Json = None) -> None:
    """List operators, implementations, what runs here, built-in models."""
    from fuselab import ops
    from fuselab.device.select import select
    from fuselab.report.result import write_result

    chosen = select(device)
    operators = [operator_row(ops.contract(name), chosen) for name in ops.operators()]
    models = list(model_rows())
    for row in operators:
        show_operator(row, chosen)
    print("built-in models, for TARGET")
    for model in models:
        print_folded(f"  {model.name:12}", model.about)
    facts = {
        "operators": [asdict(row) for row in operators],
        "models": [asdict(model) for model in models],
    }
    write_result(json, "list", facts, chosen)


def operator_row(op: FusedOp, device: torch.device) -> OperatorRow:
    """Describe ``op`` and say which implementations run on ``device``, without allocating memory
    for the cases where possible."""
    from fuselab.runtime import dispatch

    extremes = smallest_and_largest(op, device)
    implementations = []
    for name, implementation in op.implementations.items():
        if implementation.device != device.type:
            why_not: str | None = f"needs --device {implementation.device}"
        else:
            reasons = [dispatch.why_not(op, name, args) for _, _, args in extremes]
            why_not = next((reason for reason in reasons if reason), None)
        backward = implementation.backward is not None
        implementations.append(ImplementationRow(name, implementation.device, backward, why_not))
    return OperatorRow(
        op.name,
        call_of(op),
        first_line(op.reference.__doc__ or op.short_name),
        tuple(str(dtype).removeprefix("torch.") for dtype in op.dtypes),
        tuple(implementations),
        tuple(
            Choice(case.name, bytes_moved, dispatch.choose(op, args))
            for case, bytes_moved, args in extremes
        ),
    )


def smallest_and_largest(
    op: FusedOp, device: torch.device
) -> list[tuple[Case, int, tuple[Any, ...]]]:
    """Return the benchmark cases that move the fewest and the most bytes, in the first dtype.

    Each comes with its bytes and its arguments. The arguments are fake tensors without memory,
    because the largest case may not fit here. If making a case depends on tensor values, only the
    first case is made, with real tensors, and returned twice.
    """
    import torch
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

    def of(case: Case) -> tuple[Case, int, tuple[Any, ...]]:
        args = op.bind(case.make(device, op.dtypes[0], torch.Generator()))
        return case, op.cost(*args).bytes_moved, args

    cases = [case for case in op.cases if case.tags & {"bench", "sweep"}] or list(op.cases)
    try:
        with FakeTensorMode():
            made = sorted(map(of, cases), key=lambda entry: entry[1])
    except DynamicOutputShapeException:
        made = [of(cases[0])]
    return [made[0], made[-1]]


def call_of(op: FusedOp) -> str:
    """Return the public function's call as the user writes it, without annotations."""
    parameters = (
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in op.signature.parameters.values()
    )
    return f"{op.short_name}{inspect.Signature(list(parameters))}"


def model_rows() -> Iterator[ModelRow]:
    """Yield the built-in models, with the first line of each one's docstring."""
    from fuselab.models import BUILT_IN

    for name, target in BUILT_IN.items():
        module, _, attribute = target.partition(":")
        model = getattr(importlib.import_module(module), attribute)
        yield ModelRow(name, target, first_line(model.__doc__ or name))


def first_line(docstring: str) -> str:
    """Return the docstring's first line, without the marks around code."""
    return inspect.cleandoc(docstring).splitlines()[0].replace("``", "")


def show_operator(row: OperatorRow, device: torch.device) -> None:
    print_folded("", row.call, indent=4)
    print_folded("  ", row.formula)
    width = max(12, *(len(implementation.name) + 2 for implementation in row.implementations))
    for implementation in row.implementations:
        state = "runs here" if implementation.why_not is None else implementation.why_not
        gradient = "forward, backward" if implementation.backward else "forward"
        print_folded(f"  {implementation.name:{width}}", f"{gradient}; {state}")
    taken = ", ".join(
        f"{choice.implementation} for {choice.case} ({_bytes(choice.bytes_moved)})"
        for choice in row.auto
    )
    print_folded(f"  {'auto':{width}}", f"on {device} takes {taken}")
    print_folded(f"  {'dtypes':{width}}", ", ".join(row.dtypes))
    print()


def _bytes(count: int) -> str:
    """Format ``count`` in the largest binary unit in which it is at least 1."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
