"""Each operator that was tried in the target, checked and timed alone at the sizes found there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuselab.fusion.result import Decision, Replacement
from fuselab.inspect.user_code import plain
from fuselab.measure.statistics import significant
from fuselab.op import Case, FusedOp, Inputs
from fuselab.prove import bench as benchmark
from fuselab.prove import bench_result
from fuselab.prove.check import check
from fuselab.prove.result import Group
from fuselab.study.facts import Bench, Check, Record


@dataclass(frozen=True)
class Found:
    """An operator with the sizes of the target as its only cases."""

    op: FusedOp
    implementations: tuple[str, ...]
    dtype: torch.dtype


def found_in(replacements: Sequence[Replacement], most: int) -> list[Found]:
    """Return the operators that were measured in the target, each with its cases.

    There are at most ``most`` different sizes in all; those of kept replacements come first, then
    the costliest.
    """
    measured = [row for row in replacements if row.before_us is not None]
    measured.sort(key=lambda row: (row.decision is not Decision.KEPT, -(row.before_us or 0.0)))
    cases: dict[tuple[str, torch.dtype], dict[str, Case]] = {}
    ops: dict[str, FusedOp] = {}
    used: dict[str, set[str]] = {}
    for row in measured:
        dtype = _dtype(row.inputs)
        case = _case(row)
        known = cases.setdefault((row.op.name, dtype), {})
        if sum(map(len, cases.values())) < most:
            known.setdefault(case.name, case)
        ops[row.op.name] = row.op
        used.setdefault(row.op.name, set()).add(row.implementation or "")
    return [
        Found(replace(ops[name], cases=tuple(known.values())), tuple(sorted(used[name])), dtype)
        for (name, dtype), known in cases.items()
        if known
    ]


def _case(row: Replacement) -> Case:
    leaves = pytree.tree_leaves((row.inputs.args, dict(row.inputs.kwargs)))
    name = " ".join(_word(leaf) for leaf in leaves if leaf is not None)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        """Draw new values in the shapes and strides found."""

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return _drawn_like(value, device, dtype, generator)

        arguments = (tuple(row.inputs.args), dict(row.inputs.kwargs))
        args, kwargs = pytree.tree_map(fresh, arguments)
        return Inputs(args, kwargs)

    return Case(name, make, frozenset({"bench", "boundary"}))


def _word(leaf: Any) -> str:
    return "x".join(map(str, leaf.shape)) or "()" if isinstance(leaf, Tensor) else str(leaf)


def _drawn_like(
    value: Tensor, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Draw a tensor of the same shape and strides: floating values are standard normal in
    ``dtype``, others are copied."""
    # An expanded dimension is drawn once, since memory shared by many elements cannot be written.
    once = [
        1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)
    ]
    if value.is_floating_point():
        drawn = torch.randn(once, generator=generator).to(device, dtype)
    else:
        drawn = value[tuple(slice(size) for size in once)].to(device)
    made = torch.empty_strided(once, value.stride(), dtype=drawn.dtype, device=device)
    made.copy_(drawn)
    return made.expand(value.shape).requires_grad_(value.requires_grad)


def _dtype(inputs: Inputs) -> torch.dtype:
    leaves = pytree.tree_leaves((inputs.args, dict(inputs.kwargs)))
    return next(v.dtype for v in leaves if isinstance(v, Tensor) and v.is_floating_point())


def check_found(
    found: Sequence[Found], device: torch.device, progress: Callable[[str], None]
) -> tuple[Check, ...]:
    """Check quickly every implementation that the target would use, in the dtype found there."""
    rows: list[Check] = []
    for each in found:
        for name in each.implementations:
            report = check(each.op, name, each.dtype, quick=True, device=device, progress=progress)
            rows += (_check_row(each.op, group) for group in report.groups)
    return tuple(rows)


def _check_row(op: FusedOp, group: Group) -> Check:
    failed = group.failures
    reason = f"{failed[0].check}: {failed[0].reason}" if failed else group.reason
    return Check(
        operator=op.short_name,
        implementation=group.implementation,
        dtype=group.dtype,
        where=group.where,
        verdict=str(group.verdict),
        trials=group.trials,
        ours_ulp=significant(group.ours_ulp),
        eager_ulp=significant(group.eager_ulp),
        reason=None if reason is None else plain(reason),
    )


def bench_found(
    found: Sequence[Found],
    device: torch.device,
    *,
    backward: bool,
    budget_s: float,
    progress: Callable[[str], None],
) -> tuple[Bench, ...]:
    """Time every provider at every size, ``budget_s`` seconds each."""
    rows: list[Bench] = []
    for each in found:
        result = benchmark.bench(
            each.op,
            dtypes=[each.dtype],
            backward=backward and each.op.gradient is not None,
            device=device,
            budget_s=budget_s,
            progress=progress,
        )
        rows += (_bench_row(each.op, group) for group in result.groups)
    return tuple(rows)


def _bench_row(op: FusedOp, group: bench_result.Group) -> Bench:
    return Bench(
        operator=op.short_name,
        case=group.case,
        phase=group.phase,
        dtype=group.dtype,
        bytes=group.bytes_moved,
        flops=group.flops,
        ceiling_us=group.ceiling.median_us if group.ceiling is not None else None,
        records=tuple(_records(group)),
    )


def _records(group: bench_result.Group) -> Iterator[Record]:
    for record in group.records:
        against = record.vs_eager
        yield Record(
            provider=record.provider,
            ours=record.is_ours,
            us=record.median_us,
            gbps=record.gbps,
            limit_share=record.ceiling_share,
            speedup=against.speedup if against is not None else None,
            outcome=str(against.outcome) if against is not None else None,
            reason=record.reason if record.status != "ok" else record.note,
        )
