"""The meaning of ids out of range, and the checks of the embedding operators' arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.errors import DtypeError, IndexRangeError, OperandError, ShapeError, UnknownNameError
from fuselab.ops._shared.dtypes import check_floating
from fuselab.ops._shared.indices import check_integers, is_readable

OUT_OF_RANGE = ("error", "clamp", "ignore")
HASHES = ("modulus",)


def rule(out_of_range: str, hash: str | None) -> str:
    """Return the kernels' Rule; with a hash no id is out of range."""
    return hash if hash is not None else out_of_range


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and of row-wise Adagrad's state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tables(op: str, tables: Sequence[Tensor]) -> None:
    """Raise OperandError, ShapeError or DtypeError unless all are (rows, D) of one D and dtype."""
    if not tables:
        raise OperandError(f"{op}: 'tables' is empty; give at least one table.")
    for place, table in enumerate(tables):
        if table.dim() != 2:
            raise ShapeError(
                f"{op}: 'tables[{place}]' has shape {tuple(table.shape)}; expected (rows, D)."
            )
        check_floating(op, **{f"tables[{place}]": table})
        if table.dtype != tables[0].dtype:
            raise DtypeError(
                f"{op}: 'tables[{place}]' is {table.dtype} and 'tables[0]' {tables[0].dtype}; "
                "expected one dtype."
            )
        if table.shape[1] != tables[0].shape[1]:
            raise ShapeError(
                f"{op}: 'tables[{place}]' is {table.shape[1]} wide and 'tables[0]' "
                f"{tables[0].shape[1]}; expected one width D."
            )


def check_ids(
    op: str, tables: Sequence[Tensor], ids: Tensor, out_of_range: str, hash: str | None
) -> None:
    """Raise DtypeError, ShapeError or UnknownNameError for bad ids or names, and OperandError for
    a table without rows where the rule must find one."""
    check_integers(op, "ids", ids, 2)
    if ids.shape[1] != len(tables):
        raise ShapeError(
            f"{op}: 'ids' has shape {tuple(ids.shape)} for {len(tables)} tables; expected "
            f"(samples, {len(tables)})."
        )
    if out_of_range not in OUT_OF_RANGE:
        raise UnknownNameError("out_of_range", out_of_range, OUT_OF_RANGE)
    if hash is not None and hash not in HASHES:
        raise UnknownNameError("hash", hash, HASHES)
    if rule(out_of_range, hash) in ("clamp", "modulus"):
        for place, table in enumerate(tables):
            if table.shape[0] == 0 and ids.shape[0] > 0:
                raise OperandError(
                    f"{op}: 'tables[{place}]' has no rows, so no id can be brought into it; give "
                    "it one, or use out_of_range='ignore' without a hash."
                )


def check_gradient(op: str, tables: Sequence[Tensor], ids: Tensor, grad_output: Tensor) -> None:
    """Raise ShapeError or DtypeError unless ``grad_output`` has one floating vector per id."""
    expected = (*ids.shape, tables[0].shape[1])
    if tuple(grad_output.shape) != expected:
        raise ShapeError(
            f"{op}: 'grad_output' has shape {tuple(grad_output.shape)}; expected {expected}."
        )
    check_floating(op, grad_output=grad_output)


def rows_of(
    ids: Tensor, table: int, rows: int, out_of_range: str, hash: str | None
) -> tuple[Tensor, Tensor | None]:
    """Return column ``table`` of the ids as rows, and a mask of the ids that count (None: all).

    It is plain PyTorch. Raises IndexRangeError where ids can be read, as on a CPU, and DtypeError.
    """
    check_integers("embedding", "ids", ids, 2)
    column = ids[:, table].long()
    if hash is not None:
        return torch.remainder(column, rows), None
    if out_of_range == "clamp":
        return column.clamp(0, rows - 1), None
    inside = (column >= 0) & (column < rows)
    if out_of_range == "error":
        if is_readable(ids) and not bool(inside.all()):
            sample = int((~inside).nonzero()[0])
            raise IndexRangeError(
                f"embedding: 'ids' has {int(column[sample])} in sample {sample} for table {table}, "
                f"which has {rows} rows; {ALTERNATIVES}."
            )
        return column, None
    return torch.where(inside, column, 0), inside


ALTERNATIVES = "out_of_range='clamp', 'ignore' and hash='modulus' take such ids"
