"""The contracts of ``fuselab::embedding_sgd_`` and ``fuselab::embedding_adagrad_``.

Both run the update kernels of ``embedding_lookup``, whose backward runs them on gradients instead
of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from fuselab.errors import ArgumentError, DtypeError, OperandError, ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Implementation, Inputs
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.embedding_lookup import configs, cpu_launch, cuda_launch, triton_launch
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import scattered, tables_too_wide
from fuselab.ops.embedding_lookup.validation import (
    check_gradient,
    check_ids,
    check_tables,
    compute_dtype,
)
from fuselab.ops.embedding_update import cases, reference
from fuselab.runtime.tuning import Config


class Step(NamedTuple):
    """The arguments of a launcher's ``change``. ``states`` are row-wise Adagrad's, else empty."""

    how: RowUpdate
    tables: Sequence[Tensor]
    rows: Sequence[int]
    states: Sequence[Tensor]
    ids: Tensor
    grad_output: Tensor


def _sgd(tables: Sequence[Tensor], ids: Tensor, grad_output: Tensor, *rest: Any) -> Step:
    learning_rate, out_of_range, hash = rest
    how = RowUpdate("sgd", tables[0].dtype, out_of_range, hash, learning_rate)
    return Step(how, tables, [table.shape[0] for table in tables], (), ids, grad_output)


def _adagrad(
    tables: Sequence[Tensor], states: Sequence[Tensor], ids: Tensor, grad_output: Tensor, *rest: Any
) -> Step:
    learning_rate, eps, out_of_range, hash = rest
    how = RowUpdate("rowwise_adagrad", tables[0].dtype, out_of_range, hash, learning_rate, eps)
    return Step(how, tables, [table.shape[0] for table in tables], states, ids, grad_output)


def _check_operands(
    name: str, tables: Sequence[Tensor], ids: Tensor, grad_output: Tensor, *rules: Any
) -> None:
    check_tables(name, tables)
    check_ids(name, tables, ids, *rules)
    check_gradient(name, tables, ids, grad_output)


def validate_sgd(
    tables: Sequence[Tensor], ids: Tensor, grad_output: Tensor, learning_rate: float, *rules: Any
) -> None:
    """Raise ArgumentError, ShapeError, DtypeError, UnknownNameError as the docstring says."""
    _check_operands("embedding_sgd_", tables, ids, grad_output, *rules)


def validate_adagrad(
    tables: Sequence[Tensor], states: Sequence[Tensor], ids: Tensor, grad_output: Tensor, *rest: Any
) -> None:
    """Raise ArgumentError, ShapeError, DtypeError, UnknownNameError as the docstring says."""
    name, (_, eps, *rules) = "embedding_adagrad_", rest
    _check_operands(name, tables, ids, grad_output, *rules)
    if len(states) != len(tables):
        raise OperandError(
            f"{name}: 'states' has {len(states)} tensors for {len(tables)} tables; expected one "
            "per table."
        )
    dtype = compute_dtype(tables[0].dtype)
    for place, (table, state) in enumerate(zip(tables, states, strict=True)):
        if state.dim() != 1 or state.shape[0] != table.shape[0]:
            raise ShapeError(
                f"{name}: 'states[{place}]' has shape {tuple(state.shape)}; expected "
                f"({table.shape[0]},), a number per row."
            )
        if state.dtype != dtype:
            raise DtypeError(f"{name}: 'states[{place}]' is {state.dtype}; expected {dtype}.")
    if isinstance(eps, float) and not eps > 0:
        raise ArgumentError(f"{name}: 'eps' is {eps}; expected a number above 0.")


def prefer_sgd(*args: Any) -> Sequence[str]:
    """Return CUDA first: look-up and update of 2048 samples of Kaggle's 26 tables x 16 float32 take
    it 15.8 us and Triton 77.2 (H200)."""
    return ("cuda", "triton")


def prefer_adagrad(*args: Any) -> Sequence[str]:
    """Return CUDA first: look-up and update of 2048 samples of Kaggle's 26 tables x 16 float32 take
    it 48.8 us and Triton 78.6 (H200)."""
    return ("cuda", "triton")


def _cost(step: Step) -> Cost:
    """Return the least traffic: every id and gradient read once; every selected row (as if no id
    came twice, but at most all rows) and its state read and written once. The arithmetic is one
    addition per gradient element and, per row element, two operations of SGD or four of Adagrad."""
    ids, grad_output, width = step.ids, step.grad_output, step.tables[0].shape[1]
    rows = sum(min(ids.shape[0], table.shape[0]) for table in step.tables)
    row_bytes = width * step.tables[0].element_size()
    changed = rows * (row_bytes + (step.states[0].element_size() if step.states else 0))
    read = ids.numel() * (ids.element_size() + width * grad_output.element_size()) + changed
    per_element = 4 if step.states else 2
    return Cost(read, changed, (ids.numel() + per_element * rows) * width)


def _refusal(
    launcher: ModuleType, tables: Sequence[Tensor], states: Sequence[Tensor]
) -> str | None:
    """Return the reason why the kernels of ``launcher`` cannot change these tables, or None. It may
    be asked before the tables are validated."""
    if not all(state.is_contiguous() for state in states):
        return "a state is not contiguous"
    if launcher is triton_launch:
        return triton_launch.supports_update(tables)
    wide = tables_too_wide(tables) if launcher is cuda_launch else None
    return scattered(tables) or wide


def _declared(
    name: str,
    step_of: Callable[..., Step],
    cases_of: tuple[Sequence[Case], Sequence[Case], Callable[[Draw], Inputs]],
    **particular: Any,
) -> FusedOp:
    """Return the contract of one optimizer's step from the parts that differ."""
    keeps_states = particular["mutates"] == ("tables", "states")

    def launched_by(launcher: ModuleType) -> Mapping[str, Callable[..., Any]]:
        def forward(*args: Any) -> None:
            launcher.change(*step_of(*args))

        def supports(tables: Sequence[Tensor], *args: Any) -> str | None:
            return _refusal(launcher, tables, args[0] if keeps_states else ())

        return {"forward": forward, "supports": supports}

    def cost(*args: Any) -> Cost:
        return _cost(step_of(*args))

    def configs_cuda(*args: Any) -> Sequence[Config]:
        how, tables, rows, _, ids, grad_output = step_of(*args)
        spread = Spread.of_change(how, tables, grad_output)
        return configs.change(how, spread, ids, grad_output, rows)

    cost.__doc__ = _cost.__doc__
    to_try, on_a_cpu, draw = cases_of
    return FusedOp(
        name=f"fuselab::{name}",
        implementations={
            "cuda": Implementation("cuda", **launched_by(cuda_launch)),
            "triton": Implementation("cuda", **launched_by(triton_launch)),
            "cpp": Implementation("cpu", **launched_by(cpu_launch)),
        },
        cost=cost,
        cases=to_try,
        draw=draw,
        cpu_cases=on_a_cpu,
        dtypes=FLOATING,
        configs={"cuda": configs_cuda},
        **particular,
    )


SGD = _declared(
    "embedding_sgd_",
    _sgd,
    (cases.CASES_SGD, cases.CPU_CASES_SGD, cases.draw_sgd),
    space=cases.space_sgd,
    reference=reference.embedding_sgd_,
    validate=validate_sgd,
    prefer=prefer_sgd,
    nondeterministic="the CUDA kernels add gradients of equal ids by atomics (float32, float64)",
    mutates=("tables",),
)
ADAGRAD = _declared(
    "embedding_adagrad_",
    _adagrad,
    (cases.CASES_ADAGRAD, cases.CPU_CASES_ADAGRAD, cases.draw_adagrad),
    space=cases.space_adagrad,
    reference=reference.embedding_adagrad_,
    validate=validate_adagrad,
    prefer=prefer_adagrad,
    mutates=("tables", "states"),
)
