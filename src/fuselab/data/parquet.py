"""Read parquet with ``labels``, ``DENSE_0`` to ``DENSE_12`` and ``SPARSE_0`` to ``SPARSE_25``.

Dense columns may be of any number type (null or NaN is missing), sparse ones of any integer type
(null or -1 is missing). Further columns are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from fuselab.data.layout import (
    DENSE_COLUMNS,
    FOR_PREDICT,
    MISSING_ID,
    MISSING_LABEL,
    SPARSE_COLUMNS,
    Rows,
    is_missing,
)
from fuselab.data.rejects import Rejects
from fuselab.errors import DataError, MissingDataError, MissingDependencyError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise MissingDependencyError.of_extra("parquet files need", "pyarrow", "data") from error

LABEL = "labels"
DENSE = tuple(f"DENSE_{column}" for column in range(DENSE_COLUMNS))
SPARSE = tuple(f"SPARSE_{column}" for column in range(SPARSE_COLUMNS))
SCHEMA = pyarrow.schema(
    [
        (LABEL, pyarrow.uint8()),
        *((name, pyarrow.float32()) for name in DENSE),
        *((name, pyarrow.int64()) for name in SPARSE),
    ]
)
_BATCH_ROWS = 16_384


def has_labels(path: Path) -> bool:
    return LABEL in _opened(path, labelled=False).schema_arrow.names


def parts(path: Path, part_bytes: int, labelled: bool) -> list[tuple[int, int]]:
    """Return ranges of whole row groups, each of about ``part_bytes``."""
    with _opened(path, labelled) as file:
        sizes = [
            file.metadata.row_group(group).total_byte_size
            for group in range(file.metadata.num_row_groups)
        ]
    cuts, size = [0], 0
    for group, more in enumerate(sizes):
        if size and size + more > part_bytes:
            cuts.append(group)
            size = 0
        size += more
    return list(pairwise([*cuts, len(sizes)]))


def count_rows(path: Path, rejects: Rejects, labelled: bool) -> int:
    with _opened(path, labelled) as file:
        return int(file.metadata.num_rows)


def read_part(
    path: Path, start: int, stop: int, rejects: Rejects, labelled: bool
) -> Iterator[Rows]:
    """Yield the rows of the row groups from ``start`` to ``stop``."""
    with _opened(path, labelled) as file:
        groups = [file.metadata.row_group(group).num_rows for group in range(stop)]
        row = sum(groups[:start])
        try:
            for batch in file.iter_batches(
                _BATCH_ROWS, range(start, stop), _names(labelled), use_threads=False
            ):
                yield _rows(path, batch, row, rejects)
                row += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error


def write(path: Path, groups: Iterable[Rows]) -> None:
    """Write one row group for each of ``groups``. Raises OSError where it cannot be written."""
    with pyarrow.parquet.ParquetWriter(path, SCHEMA) as writer:
        for rows in groups:
            writer.write_table(_table(rows))


def _table(rows: Rows) -> pyarrow.Table:
    """Return the rows in SCHEMA; as everywhere in this layout a missing count becomes 0."""
    counts = numpy.where(is_missing(rows.counts), 0, rows.counts).astype(numpy.float32)
    dense = [
        pyarrow.array(numpy.ascontiguousarray(counts[:, column])) for column in range(DENSE_COLUMNS)
    ]
    sparse = [
        pyarrow.array(numpy.ascontiguousarray(rows.ids[:, column]))
        for column in range(SPARSE_COLUMNS)
    ]
    return pyarrow.table([pyarrow.array(rows.labels), *dense, *sparse], schema=SCHEMA)


def _names(labelled: bool) -> list[str]:
    return [*([LABEL] if labelled else []), *DENSE, *SPARSE]


def _opened(path: Path, labelled: bool) -> pyarrow.parquet.ParquetFile:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise MissingDataError(f"no file '{path}'; give the path of a Criteo file.") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    found = {field.name: field.type for field in file.schema_arrow}
    for name in _names(labelled):
        if name not in found:
            raise DataError(
                f"{path} has no column '{name}'; expected {LABEL}, {DENSE[0]} to {DENSE[-1]} and "
                f"{SPARSE[0]} to {SPARSE[-1]}." + (f" {FOR_PREDICT}" if name == LABEL else "")
            )
        kind = found[name]
        integral = pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)
        floating = pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)
        if not (integral or (floating and name not in SPARSE)):
            expected = "integers" if name in SPARSE else "numbers"
            raise DataError(f"{path}, column '{name}': found {kind}; expected {expected}.")
    if not file.metadata.num_rows:
        raise DataError(f"{path} holds no row.")
    return file


def _rows(path: Path, batch: pyarrow.RecordBatch, first: int, rejects: Rejects) -> Rows:
    labelled = LABEL in batch.schema.names
    labels = (
        _column(batch, LABEL, numpy.float64, numpy.nan)
        if labelled
        else numpy.full(len(batch), MISSING_LABEL)
    )
    counts = numpy.empty((len(batch), DENSE_COLUMNS), dtype=numpy.float32)
    ids = numpy.empty((len(batch), SPARSE_COLUMNS), dtype=numpy.int64)
    for column, name in enumerate(DENSE):
        counts[:, column] = _column(batch, name, numpy.float32, numpy.nan)
    for column, name in enumerate(SPARSE):
        ids[:, column] = _column(batch, name, numpy.int64, MISSING_ID)
    good = (labels == 0) | (labels == 1) if labelled else numpy.full(len(batch), True)
    for row in numpy.flatnonzero(~good).tolist():
        where = f"{path}, row {first + row + 1}, column '{LABEL}'"
        found = "nothing" if numpy.isnan(labels[row]) else f"{labels[row]:g}"
        rejects.malformed(f"{where}: found {found}; expected 0 or 1.")
    infinite = numpy.isinf(counts) & good[:, None]
    for row, column in numpy.argwhere(infinite).tolist():
        if good[row]:
            where = f"{path}, row {first + row + 1}, column '{DENSE[column]}'"
            rejects.malformed(f"{where}: found {counts[row, column]}; expected a finite number.")
            good[row] = False
    return Rows(labels[good].astype(numpy.uint8), counts[good], ids[good])


def _column(
    batch: pyarrow.RecordBatch, name: str, dtype: type, missing: float
) -> numpy.typing.NDArray[numpy.generic]:
    column = batch.column(name).cast(pyarrow.from_numpy_dtype(dtype), safe=False)
    values: numpy.typing.NDArray[Any] = column.fill_null(missing).to_numpy(zero_copy_only=False)
    return values


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return DataError(f"{path} is not a whole parquet file ({reason}); fetch it again.")
