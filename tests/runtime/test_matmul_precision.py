"""allows_tf32 follows every way of setting it, and keeps its callers from launch plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fuselab.runtime.launcher import Recording, start
from fuselab.runtime.matmul_precision import allows_tf32


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


def test_whoever_asks_leaves_no_launch_plan() -> None:
    start()
    with Recording(0, "cpp", (torch.ones(3),)) as recording:
        assert recording.why_not() == "no launches"
        allows_tf32()
    assert recording.why_not() == "a kernel chosen by the precision of float32 products"
