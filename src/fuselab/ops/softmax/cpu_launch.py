"""Launchers of the C++ kernels."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops.softmax.layout import FORMS, Form, Rows, rows_in_place_or_copied
from fuselab.ops.softmax.operands import Launcher
from fuselab.runtime.cpp_source import CppSource, i64

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))


def _rows(tensor: Tensor, dim: int) -> tuple[Tensor, Rows]:
    """Return rows that are read in place if their elements are contiguous, else a copy's."""
    tensor, rows = rows_in_place_or_copied(tensor, dim)
    if rows.columns or rows.dim_stride != 1:
        return rows_in_place_or_copied(tensor.contiguous(), dim)
    return tensor, rows


def _launch(step: str, form: Form, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
    name = f"{FORMS[form]}, {CPP_NAMES[tensors[0].dtype]}"
    if rows.columns:
        sizes = (i64(rows.outer_count), i64(rows.width), i64(rows.inner_count))
        CPP.launch(f"{step}_columns<{name}>", (*tensors, *sizes))
        return
    places = (i64(rows.inner_count), i64(rows.outer_stride), i64(rows.inner_stride))
    CPP.launch(f"{step}_rows<{name}>", (*tensors, i64(rows.rows), i64(rows.width), *places))


_LAUNCHER = Launcher(_launch, _rows, casts=False)
forward, forward_in_place = _LAUNCHER.forward, _LAUNCHER.forward_in_place
backward = _LAUNCHER.backward
