"""The distribution of a row over neighbouring threads of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import alignment
from fuselab.runtime.grid import ceil_div, power_of_two


@dataclass(frozen=True)
class Spread:
    """A row's threads: ``lanes`` of them have ``tiles`` vectors of ``vector`` elements each."""

    vector: int
    lanes: int
    tiles: int

    @classmethod
    def of(cls, width: int, itemsize: int, alignment: int) -> Spread:
        return cls.by_vector(width, max(alignment // itemsize, 1))

    @classmethod
    def by_vector(cls, width: int, vector: int) -> Spread:
        lanes = min(power_of_two(ceil_div(width, vector)), 32)
        return cls(vector, lanes, power_of_two(ceil_div(width, vector * lanes)))

    @classmethod
    def of_change(
        cls, how: RowUpdate, tables: Sequence[Tensor | None], grad_output: Tensor
    ) -> Spread:
        """Return one spread for the rows of ``tables`` and of their gradient (samples, tables, D),
        by the larger of their elements."""
        grad_itemsize, itemsize = grad_output.element_size(), how.dtype.itemsize
        sample_stride, table_stride, width = *grad_output.stride()[:2], grad_output.shape[2]
        grad_bits = grad_output.data_ptr() | grad_itemsize * (width | sample_stride | table_stride)
        bits = itemsize * width
        for table in tables:  # the host needs 0.3 us per table here, so the loop is plain
            if table is not None:
                bits |= table.data_ptr() | itemsize * table.stride(0)
        vector = min(alignment(bits) // itemsize, alignment(grad_bits) // grad_itemsize)
        return cls.by_vector(width, max(vector, 1))

    def __str__(self) -> str:
        return f"{self.vector}, {self.lanes}, {self.tiles}"
