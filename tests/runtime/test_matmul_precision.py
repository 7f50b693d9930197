"""allows_tf32 follows every way of setting it, and so does the choice of a launch plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planned_operator import Planned
from torch import Tensor

from fuselab.runtime.cpp_source import CppSource, f32, i64
from fuselab.runtime.launch_plans import start
from fuselab.runtime.matmul_precision import allows_tf32

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_every_way_of_setting_it() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True
    assert allows_tf32()
    matmul.allow_tf32 = False
    assert not allows_tf32()
    torch.set_float32_matmul_precision("high")
    assert allows_tf32()
    torch.set_float32_matmul_precision("highest")
    assert not allows_tf32()
    matmul.fp32_precision = "tf32"
    assert allows_tf32()


def test_every_setting_has_launch_plans_of_its_own() -> None:
    def asks(value: Tensor) -> Tensor:
        output = torch.empty_like(value)
        args = (value, output, i64(value.numel()), f32(2.0 if allows_tf32() else 1.0))
        SOURCE.launch("scaled_relu<float, float>", args)
        return output

    assert start()
    op = Planned(asks)
    for runs, precision in ((1, "highest"), (2, "high"), (2, "highest"), (2, "high")):
        torch.set_float32_matmul_precision(precision)
        for _ in range(2):
            assert op(torch.ones(3)).tolist() == [2.0 if precision == "high" else 1.0] * 3
        assert op.runs == runs
