"""Launch plans: which calls take one, which floats share one, and the state outside of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_operator import Planned
from small_cpp_kernels import SOURCE, add, scaled_relu
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab.errors import LaunchError
from fuselab.runtime import launch_plans, launch_recording
from fuselab.runtime.cpp_source import f64, i32, i64

pytestmark = pytest.mark.usefixtures("launcher")


@pytest.fixture
def op() -> Planned:
    return Planned(scaled_relu)


def test_the_second_call_takes_the_plan_and_computes_the_same(op: Planned) -> None:
    for seed in range(3):
        value = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        output = op(value, 2.0)
        assert torch.equal(output, torch.relu(value * 2.0))
        assert output.data_ptr() != value.data_ptr()
    assert op.runs == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.ones(4, 4, dtype=torch.float64), 2.0),
        lambda: (torch.ones(4, 5), 2.0),
        lambda: (torch.ones(16), 2.0),
        lambda: (torch.ones(4, 4).t(), 2.0),
        lambda: (torch.ones(8, 4)[::2], 2.0),
        lambda: (torch.ones(4, 1).expand(4, 4), 2.0),
        lambda: (torch.ones(17)[1:].view(4, 4), 2.0),
        lambda: (torch.ones(4, 4), 2.0, "gelu"),
        lambda: (torch.ones(4, 4), 2.0, "relu "),
        lambda: (torch.ones(4, 4), 2.0, None),
        lambda: (torch.ones(4, 4), 2.0, torch.float32),
        lambda: (torch.ones(4, 4), 2.0, (1, 2)),
        lambda: (torch.ones(4, 4), 2.0, True),
        lambda: (torch.ones(4, 4), 2.0, 1),
        lambda: (torch.ones(4, 4), None),
        lambda: (torch.ones(4, 4), 2.0, "relu", 1),
        lambda: (torch.ones(4, 4),),
        lambda: (2.0, torch.ones(4, 4)),
    ],
)
def test_whatever_differs_but_a_float_has_no_plan(op: Planned, other: Any) -> None:
    op(torch.ones(4, 4), 2.0)
    op(torch.ones(4, 4), 2.0, "relu")
    assert op.hits(torch.ones(4, 4), 2.0)
    assert op.hits(torch.ones(4, 4), 2.0, "relu")
    assert not op.hits(*other())


def test_every_alignment_up_to_16_bytes_is_another_key(op: Planned) -> None:
    """An implementation may choose 8 bytes at a time by what it finds."""
    memory = torch.ones(16)
    for runs, first in enumerate((0, 1, 2), 1):  # at 16, 4 and 8 bytes
        for begin in (first, first + 4):
            assert op(memory[begin : begin + 3], 2.0).tolist() == [2.0] * 3
            assert op.runs == runs


@pytest.mark.parametrize(
    ("kept", "asked"),
    [((1, 2), (1, 3)), ((1, 2), (1, 2, 3)), ((True,), (1,)), ((None, 1), (1, None)), (0, False)],
)
def test_plain_values_are_compared_by_type_and_value(kept: Any, asked: Any) -> None:
    op = Planned(lambda value, plain: scaled_relu(value, 1.0))
    op(torch.ones(3), kept)
    assert op.hits(torch.ones(3), kept)
    assert not op.hits(torch.ones(3), asked)


def test_implementations_have_plans_of_their_own(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    assert launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 1.0)) is not None
    assert launch_plans.lookup(op.op_id, "auto", (torch.ones(3), 1.0)) is None


@pytest.mark.parametrize(
    "value",
    [object(), 1 + 2j, 2**80, {"a": 1}, (1.5,), ("a",), ((1,),), torch.Size([2, 3])],
)
def test_values_of_other_types_have_no_plan(value: Any) -> None:
    op = Planned(lambda tensor, plain: scaled_relu(tensor, 1.0))
    for _ in range(2):
        assert torch.equal(op(torch.ones(3), value), torch.ones(3))
    assert op.runs == 2


# Floats.


def test_one_plan_for_all_values_of_a_float_handed_straight_on(op: Planned) -> None:
    value = torch.tensor([1.0, -1.0, 3.0])
    for scale in (1.0, 0.1, -2.0, 1e-40, 0.0, math.inf):
        assert torch.equal(op(value, scale).nan_to_num(7), torch.relu(value * scale).nan_to_num(7))
    assert bool(op(value, math.nan)[0] == 0) == bool(scaled_relu(value, math.nan)[0] == 0)
    assert op.runs == 1
    assert launch_plans.count_plans(op.op_id) == 1


def test_an_int_for_a_float_argument_takes_the_same_plan(op: Planned) -> None:
    op(torch.ones(3), 1.5)
    assert launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 2)).tolist() == [2.0] * 3
    assert not op.hits(torch.ones(3), True)


def test_64_bit_floats_keep_their_bits() -> None:
    def scaled(value: Tensor, scale: float) -> Tensor:
        output = torch.empty_like(value)
        args = (value, output, i64(value.numel()), f64(scale))
        SOURCE.launch("scaled_relu<double, double>", args)
        return output

    op, value = Planned(scaled), torch.ones(2, dtype=torch.float64)
    op(value, 1.0)
    assert op(value, 0.1).tolist() == [0.1, 0.1]
    assert op.runs == 1


@pytest.mark.parametrize(
    "scaled",
    [
        lambda value, scale: scaled_relu(value, scale * 1.0),
        lambda value, scale: scaled_relu(value, float(scale)),
        lambda value, scale: scaled_relu(value, math.sqrt(scale) ** 2),
        lambda value, scale: scaled_relu(value, scale) if scale > 0 else value * scale,
        lambda value, scale: add(value, value) if scale == 2.0 else scaled_relu(value, scale),
    ],
)
def test_a_float_that_is_looked_at_gives_one_plan_per_value(scaled: Any) -> None:
    op, value = Planned(scaled), torch.ones(3)
    for scale in (1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0):
        assert op(value, scale).tolist() == pytest.approx([scale] * 3)
    assert op.runs == 4
    assert not op.hits(value, 5.0)


def test_plus_and_minus_zero_are_different_values() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, math.copysign(1.0, scale)))
    assert op(torch.ones(2), 0.0).tolist() == [1.0, 1.0]
    assert op(torch.ones(2), -0.0).tolist() == [0.0, 0.0]
    assert op(torch.ones(2), 0.0).tolist() == [1.0, 1.0]


def test_a_float_that_is_ignored_gives_one_plan_per_value() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, 1.0))
    op(torch.ones(2), 1.0)
    assert op.hits(torch.ones(2), 1.0)
    assert not op.hits(torch.ones(2), 2.0)


def test_ever_new_values_stop_being_recorded() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, scale * 1.0))
    for step in range(80):
        assert op(torch.ones(1), float(step)).item() == step
    assert isinstance(
        launch_recording.record(op.op_id, "cpp", (torch.ones(1), 99.0)), launch_recording.Unrecorded
    )


def test_empty_tensors_have_no_plan(op: Planned) -> None:
    for _ in range(2):
        assert op(torch.empty(0, 3), 1.0).shape == (0, 3)
    assert op.runs == 2


def test_two_devices_have_no_plan() -> None:
    op = Planned(add)
    op(torch.ones(3), torch.ones(3))
    assert not op.hits(torch.ones(3), torch.ones(3, device="meta"))


# State that the plan does not hold.


def test_deterministic_algorithms_are_another_key(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert not op.hits(torch.ones(3), 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert op.hits(torch.ones(3), 1.0)


def test_the_number_of_threads_is_another_key(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not op.hits(torch.ones(3), 1.0)
    finally:
        torch.set_num_threads(before)
    assert op.hits(torch.ones(3), 1.0)


def test_the_profiler_sees_the_operator_and_its_shapes(op: Planned) -> None:
    value = torch.ones(3, 5)
    op(value, 1.0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        op(value, 2.0)
    events = [event for event in seen.events() if event.name == "test::scaled_relu"]
    assert [event.input_shapes[0] for event in events] == [[3, 5]]
    assert op.runs == 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        launch_plans.lookup(op.op_id, "cpp", (value, 2.0), False)
    assert "test::scaled_relu" not in [event.name for event in seen.events()]


def test_forget_drops_the_plans(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    launch_plans.forget(op.op_id)
    assert not op.hits(torch.ones(3), 1.0)
    assert launch_plans.count_plans(op.op_id) == 0


def test_plans_are_bounded() -> None:
    op = Planned(lambda value, plain: scaled_relu(value, 1.0))
    value = torch.ones(1)
    launch_recording.record(op.op_id, "cpp", (value, 0))
    for number in range(4100):
        launch_plans.native.reject(op.op_id, "cpp", (value, number))  # type: ignore[union-attr]
        assert launch_plans.count_plans(op.op_id) <= 4096
    assert launch_plans.count_plans(op.op_id) == 4


def test_threads_share_plans_and_record_apart(op: Planned) -> None:
    errors = []

    def work(width: int) -> None:
        value = torch.full((width, 300_000), float(width))  # over 1 MiB: without the GIL
        for step in range(1, 6):
            result = op(value, float(step))
            if not bool((result == width * step).all()):
                errors.append((width, step))

    threads = [threading.Thread(target=work, args=(width,)) for width in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert launch_plans.count_plans(op.op_id) >= 2


@pytest.mark.parametrize("args", [(10**6, "cpp", ()), ("x", "cpp", ()), (0, "cpp", [])])
def test_a_wrong_call_is_a_type_error(args: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        launch_plans.lookup(*args)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch_plans, "native", None)
    yield


def test_without_the_extension_launches_go_through_ctypes(without_native: None) -> None:
    value = torch.tensor([-1.0, 2.0])
    assert scaled_relu(value, 0.5).tolist() == [0.0, 1.0]
    with pytest.raises(LaunchError, match="own words"):
        SOURCE.launch("throws", (value, i32(0)))
    with launch_recording.record(0, "cpp", (value,)) as recording:
        recording.finish(value)
        assert recording.args == (value,)


def test_without_a_compiler_one_warning_and_no_plans(tmp_path: Path) -> None:
    script = (
        "import torch, warnings\n"
        "from fuselab.runtime import launch_plans, launch_recording\n"
        "op = launch_plans.register('a::b')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        args = (torch.ones(2),)\n"
        "        assert launch_plans.lookup(op, 'cpp', args) is None\n"
        "        with launch_recording.record(op, 'cpp', args) as recording:\n"
        "            recording.finish(args[0])\n"
        "print([str(warning.message) for warning in caught])\n"
    )
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CXX": "",
        "FUSELAB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert result.stdout.count("the C++ launcher cannot be used") == 1, result.stderr
    assert "install g++" in result.stdout
