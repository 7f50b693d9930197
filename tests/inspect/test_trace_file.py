"""A trace made elsewhere gives the tables that a recording of our own gives."""

import gzip
import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from fuselab.cli.main import run
from fuselab.errors import ArgumentError, MissingTargetError, TargetError
from fuselab.inspect.trace_file import _is_users, profile_trace


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.first(x))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two steps of forward and backward with shapes, stacks and memory, compressed."""
    path = tmp_path_factory.mktemp("trace") / "elsewhere.json.gz"
    block, x = Block(), torch.randn(256, 64)
    block(x).sum().backward()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        with_stack=True,
        profile_memory=True,
        with_modules=True,
    ) as p:
        for number in range(2):
            with record_function(f"ProfilerStep#{number}"):
                with record_function("mine"):
                    loss = block(x).sum()
                loss.backward()
    p.export_chrome_trace(str(path))
    return str(path)


def row(rows, name):
    return next(row for row in rows if row.name == name)


def test_operators_shapes_modules_lines_and_memory(file):
    found = profile_trace(file)
    assert (found.name, found.device, found.steps) == ("elsewhere.json.gz", "cpu", 2)
    assert row(found.tables.operators, "aten::addmm").calls == 1
    assert row(found.tables.operators, "aten::addmm").shapes == ["64 256x64 64x64"]
    assert row(found.tables.modules, "Block_0.Linear_0").share > 0
    lines = {line.name.partition(":")[0] for line in found.tables.lines}
    assert lines == {"test_trace_file.py"}
    backward = max(found.tables.lines, key=lambda line: line.backward_us)
    assert backward.text == "def forward(self, x):" and backward.total_us > backward.backward_us
    assert found.tables.memory.allocated_bytes >= 2 * 256 * 64 * 4
    split = found.split
    assert split.compute_us + split.memory_us + split.overhead_us + split.data_us == (
        pytest.approx(found.step_us)
    )


def test_one_range_only(file):
    inside = profile_trace(file, within="mine")
    whole = profile_trace(file)
    assert {r.name for r in inside.tables.ranges} == {"mine"}
    assert row(whole.tables.operators, "aten::mm").calls >= 1
    assert all(r.name != "aten::mm" for r in inside.tables.operators)
    assert inside.step_us == pytest.approx(whole.step_us)
    with pytest.raises(ArgumentError, match="no range is called 'his'; the step has: mine"):
        profile_trace(file, within="his")


def test_a_trace_of_a_gpu_without_steps_is_one_step(tmp_path):
    def event(cat, name, ts, dur, **arguments):
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "tid": 1,
            "ts": ts,
            "dur": dur,
            "args": arguments,
        }

    launch = event("cuda_runtime", "cudaLaunchKernel", 12, 3, correlation=7)
    kernel = event("kernel", "gemm", 30, 40, correlation=7, grid=[4, 1, 1], block=[128, 1, 1])
    path = tmp_path / "t.json"
    path.write_text(json.dumps([event("cpu_op", "aten::mm", 10, 10), launch, kernel]))
    found = profile_trace(str(path))
    assert (found.device, found.steps) == ("cuda", 1)
    assert found.step_us == 60  # from the operator's start to the kernel's end
    assert found.split.compute_us == 40
    assert found.tables.kernels[0].grid == (4, 1, 1)
    assert row(found.tables.operators, "aten::mm").device_us == 40


def test_without_shapes_the_time_of_an_operator_is_traffic_not_overhead(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "tid": 1, "ts": 0, "dur": 90}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event]}))
    split = profile_trace(str(tmp_path / "t.json")).split
    assert split.memory_us == pytest.approx(90, abs=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "as JSON"),
        ("{}", "no list 'traceEvents'"),
        ('{"traceEvents": []}', "no operators or named ranges"),
        ('{"verb": "bench", "schema": 1}', "is a result of 'fuselab bench --json'"),
        ('[{"ph": "X", "cat": "cpu_op", "name": "a", "tid": 1}]', "without times"),
        ('[{"ph":"X","cat":"cpu_op","name":"a","tid":"x","ts":0,"dur":1}]', "no trace"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path, text, words, capsys):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TargetError, match=words):
        profile_trace(str(path))
    assert run(["profile", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fuselab: ") and error.count("\n") == 1


def test_a_missing_or_truncated_file(tmp_path):
    with pytest.raises(MissingTargetError, match="check the path"):
        profile_trace(str(tmp_path / "gone.json"))
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"[]" * 999)[:30])
    with pytest.raises(TargetError, match="as JSON"):
        profile_trace(str(tmp_path / "cut.json.gz"))


def test_the_files_of_torch_and_python_are_not_the_users():
    foreign = ["torch/nn/modules/conv.py", "threading.py", "/x/site-packages/a/b.py", "json/a.py"]
    assert not any(map(_is_users, foreign))
    assert _is_users("train.py") and _is_users("/home/me/model.py") and _is_users("mine/torch.py")
