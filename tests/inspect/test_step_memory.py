"""Memory of a step: who holds it over time and at the peak, from changes written by hand."""

import matplotlib
import pytest
import torch

from fuselab.inspect.kineto import Allocation, Detail, Details, RangeUse
from fuselab.inspect.profile import profile
from fuselab.inspect.step_memory import NO_LINE, memory_of
from fuselab.inspect.user_code import SourceLine, short_names
from fuselab.report.profile_plot import profile_plot

FIRST, SECOND = SourceLine("/home/me/model.py", 3), SourceLine("/home/me/layers/model.py", 3)


def op(line, module, *, backward=False):
    return Detail("aten::x", line, module, (), backward, 1, -1, (), [], None)


def changes(*sizes_storages_ops):
    return [
        Allocation(100.0 + at, size, (storage, 0), "cpu", 0, op)
        for at, (size, storage, op) in enumerate(sizes_storages_ops)
    ]


@pytest.fixture
def memory():
    one, two = op(FIRST, "M.a"), op(SECOND, "M.b", backward=True)
    made = changes((400, 1, one), (300, 2, two), (-400, 1, two), (200, 3, one), (50, 4, None))
    ranges = [RangeUse("forward", 99.0, 102.0), RangeUse("backward", 102.0, 120.0)]
    return memory_of(Details([], made, ranges), "cpu")


def test_the_peak_belongs_to_those_who_hold_it_then(memory):
    assert memory.peak_bytes == 700 and memory.allocated_bytes == 950
    rows = {row.name: row for row in memory.lines}
    assert set(rows) == {"me/model.py:3", "layers/model.py:3 backward", NO_LINE}
    first = rows["me/model.py:3"]
    assert (first.calls, first.allocated_bytes, first.at_peak_bytes) == (2, 600, 400)
    assert rows["layers/model.py:3 backward"].at_peak_bytes == 300
    assert {row.name: row.at_peak_bytes for row in memory.modules} == {
        "M.a": 400,
        "M.b": 300,
        "no module": 0,
    }


def test_the_layers_add_up_to_the_timeline(memory):
    assert [size for _, size in memory.timeline] == [0, 400, 700, 300, 500, 550, 550]
    assert memory.layers[0].name == "me/model.py:3"
    assert memory.layers[0].held_bytes == [0, 400, 400, 0, 200, 200, 200]
    for place, (_, size) in enumerate(memory.timeline):
        assert sum(layer.held_bytes[place] for layer in memory.layers) == size
    assert memory.timeline[-1] == (21.0, 550) and memory.timeline[1] == (1.0, 400)
    assert memory.ranges == [("forward", 0.0, 3.0), ("backward", 3.0, 21.0)]


def test_no_memory_on_the_device_is_none():
    assert memory_of(Details([], changes((4, 1, None))), "cuda") is None


def test_lines_of_files_of_one_name_have_different_names():
    assert short_names([FIRST, SECOND]) == {FIRST: "me/model.py:3", SECOND: "layers/model.py:3"}
    assert short_names([FIRST]) == {FIRST: "model.py:3"}


def test_the_picture_names_split_ranges_and_lines(tmp_path):
    with profile(schedule=(0, 1, 1, 1), name="mine") as p:
        for _ in range(2):
            with torch.profiler.record_function("my forward"):
                kept = torch.ones(1000, 1000)
            p.step()
    del kept
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        profile_plot(p.result.describe(), tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for word in ("compute", "overhead", "my forward", "peak 4.00 MB", "test_step_memory.py:"):
        assert word in text
