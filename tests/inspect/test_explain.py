"""Explain: what the compiler made, from one real run on the CPU and from wrapper text."""

import json
import re
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fuselab.device.ceiling import Ceilings
from fuselab.errors import ArgumentError, TargetError
from fuselab.inspect import explain_runner, inductor_capture, targets
from fuselab.inspect.explain import SHAPES, explain_target
from fuselab.inspect.explain_sizes import called_with_sizes, sizes_to_try
from fuselab.inspect.inductor_capture import Launch, Node, launches
from fuselab.inspect.kernel_times import _match
from fuselab.inspect.user_code import SourceLine
from fuselab.report.explain_text import explain_text
from fuselab.report.numbers import rate, ratio

SINS = Path(__file__).parent / "targets" / "sins.py"
SOURCE = SINS.read_text().splitlines()


@pytest.fixture(scope="module")
def broken():
    """A module with a graph break, forward and backward."""
    return explain_target(targets.load(f"{SINS}:Breaks"), backward=True)


def test_the_graph_break_has_its_line_and_reason(broken):
    facts = broken.facts
    assert facts["graphs"] == 2
    (found,) = facts["breaks"]
    assert SOURCE[found["line_number"] - 1].strip() == 'print(end="")' == found["source"]
    assert "print" in found["reason"]
    assert facts["guards"] > 0 and facts["failures"] == []


def test_every_kernel_has_its_operators_lines_bytes_and_time(broken):
    kernels = broken.facts["kernels"]
    forward = [k for k in kernels if k["phase"] == "forward"]
    assert [k["kind"] for k in forward] == ["extern", "fused", "fused"]
    product, first, second = forward
    assert "aten.addmm" in product["operators"]
    assert {"aten.add", "aten.relu"} <= set(first["operators"])
    assert set(second["operators"]) == {"aten.mul", "aten.sigmoid"}
    assert [SOURCE[line["line_number"] - 1].strip() for line in second["lines"]] == [
        "return torch.sigmoid(hidden * 2.0)"
    ]
    assert second["bytes"] == 2 * 256 * 32 * 4
    assert any(
        k["phase"] == "backward" and "aten.sigmoid_backward" in k["operators"] for k in kernels
    )
    assert all(k["us"] > 0 for k in kernels)
    for kernel in kernels:
        if kernel["gbps"] is not None:
            assert kernel["gbps"] == pytest.approx(kernel["bytes"] / kernel["us"] / 1e3, rel=2e-3)


def test_compile_times_speed_and_memory(broken):
    facts = broken.facts
    assert facts["compile"]["cold_s"] > facts["compile"]["warm_s"] > 0
    assert facts["speedup"] > 0 and facts["verdict"] in ("FASTER", "SLOWER", "SAME", "UNCLEAR")
    assert facts["eager"]["low_us"] <= facts["eager"]["us"] <= facts["eager"]["high_us"]
    assert facts["eager"]["peak_bytes"] > 256 * 32 * 4


def test_another_batch_recompiles_and_says_why_and_which_line(broken, monkeypatch, tmp_path):
    # What Dynamo makes of sizes does not depend on the backend; this one compiles nothing.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    path = tmp_path / "branches.py"
    path.write_text(
        "import torch\n\n\ndef branches(x):\n    if x.shape[0] == 8:\n        return x + 1\n"
        "    return x * 2\n\n\ndef get_inputs():\n    return [torch.ones(8, 4)]\n"
    )
    target = targets.load(str(path))
    tried = sizes_to_try(target, (16, 24))
    assert tried == [8, 16, 24]
    found = {
        shapes: called_with_sizes(target, shapes, None, False, tried, lambda words: None)
        for shapes in SHAPES
    }
    compiled = {name: [row["compiled"] for row in way["rows"]] for name, way in found.items()}
    assert compiled == {"static": [1, 1, 1], "automatic": [1, 1, 0], "dynamic": [1, 1, 0]}
    assert "expected 8, actual 16" in found["automatic"]["rows"][1]["reasons"][0]
    assert found["static"]["constant"] == []  # it was never a symbol
    (constant,) = found["dynamic"]["constant"]
    assert (constant["size"], constant["value"]) == ("x.shape[0]", 8)
    assert (
        constant["line"].endswith("branches.py:5") and constant["source"] == "if x.shape[0] == 8:"
    )
    text = explain_text(
        {**broken.facts, "dynamic": True, "batches": found, "modes": [MODE, {**MODE, "mode": "b"}]}
    )
    assert "automatic: 2 compiled in" in text and "x.shape[0] is fixed to 8 by" in text
    assert max(map(len, text.splitlines())) <= 80


MODE = {
    "mode": "max-autotune-no-cudagraphs",
    "cold_s": 13.2,
    "us": 271.0,
    "speedup": 0.9,
    "peak_bytes": 32900,
    "fused": 3,
    "library_calls": 2,
}


def test_the_sources_can_be_saved(broken, tmp_path):
    paths = broken.save(tmp_path / "code")
    assert {"graph_0_forward.py", "graph_0_backward.py", "dynamo_graph_1.py"} <= {
        p.name for p in paths
    }
    code = tmp_path / "code"
    assert "cpp_fused" in (code / "graph_0_forward.py").read_text()
    # What Inductor fuses into one node is two nodes before.
    before = (code / "graph_1_forward.before_fusion.txt").read_text()
    assert "SchedulerNode" in before and "sigmoid" in before
    graph = runpy.run_path(str(code / "graph_1_forward.fx.py"))
    (hidden,) = graph["get_inputs"]()
    result = graph["graph"](hidden)[0]
    assert torch.equal(result, torch.sigmoid(hidden * 2.0))


def test_a_kernels_file_runs_alone_and_finds_a_wrong_kernel(broken, tmp_path):
    paths = broken.save(tmp_path / "code")
    (path,) = [one for one in paths if one.name.startswith("kernel_03")]
    text = path.read_text()
    assert "It computes mul, sigmoid." in text
    assert "return torch.sigmoid(hidden * 2.0)" in text  # the user's line, on top
    program = runpy.run_path(str(path))
    inputs = program["get_inputs"]()
    before = [tensor.clone() for tensor in inputs]
    program["launch"](*inputs)
    names = re.search(r"def launch\((.*)\)", text)[1].split(", ")
    expected = program["eager"](**dict(zip(names, before, strict=True)))
    (name,) = program["WRITTEN"]
    written = inputs[names.index(name)]
    torch.testing.assert_close(written, expected[name])
    program["main"].__globals__["launch"] = lambda *tensors: None
    assert program["main"]() == 1  # nothing was computed


def test_the_screen_fits_and_shows_the_jsons_numbers(broken):
    facts = json.loads(json.dumps(broken.facts))
    text = explain_text(facts)
    assert max(map(len, text.splitlines())) <= 80
    assert "2 graphs, 1 graph break," in text
    assert f"round by round, compiled is {ratio(facts['speedup'])} as fast" in text
    one = [{**kernel, "kind": "fused"} for kernel in facts["kernels"]]
    one[0]["kind"] = "library"
    assert "fused, 1 library call\n" in explain_text({**facts, "kernels": one})
    for kernel in facts["kernels"]:
        assert kernel["name"][:20] in text


def test_the_screen_says_that_other_work_slows_the_step_down(broken):
    facts = broken.facts
    assert 0 <= facts["waited_share"] < 1
    assert "the machine is busy" not in explain_text({**facts, "waited_share": 0.1})
    busy = explain_text({**facts, "waited_share": 0.437})
    assert "the machine is busy: for 43.7 % of the time" in busy
    assert max(map(len, busy.splitlines())) <= 80


@pytest.mark.parametrize(("step_us", "steps"), [(3.0, 50), (10_000, 20), (1_000_000, 5)])
def test_kernels_of_short_steps_are_timed_more_often(step_us, steps):
    assert explain_runner._steps_to_profile(step_us) == steps


def test_the_reasons_of_breaks_are_in_plain_words():
    def reason(function):
        target = targets.load(f"{SINS}:{function}")
        _, breaks, _ = inductor_capture.graph_breaks(target.callable, *target.args)
        (found,) = breaks
        return SOURCE[found.line.line - 1].strip(), found.reason

    line, words = reason("chooses_a_branch")
    assert line == "if hidden.sum() > 0:"
    assert words.startswith("Python chooses a branch (if, while, and, or) by a tensor's value")
    line, words = reason("reads_back")
    assert line == "if total.item() > 0:"
    assert words.startswith("the host reads a number out of a tensor")


def test_a_break_in_a_loop_leaves_the_function_out_and_says_so_with_its_line():
    inductor_capture.forget_compilations()
    target = targets.load(f"{SINS}:picks_in_a_loop")
    torch.compile(target.callable, backend="eager")(*target.args)
    (said,) = [one.failure for one in inductor_capture.compilations() if one.failure]
    line = 1 + next(i for i, text in enumerate(SOURCE) if ".nonzero()" in text)
    assert said.startswith(
        f"sins.py:{line}: Dynamic shape operator: Operator `aten.nonzero.default`"
    )
    assert said.endswith("the whole function 'picks_in_a_loop' runs without torch.compile.")
    assert "Hint" not in said and "…" not in said


def test_a_rate_of_few_bytes_is_no_row_of_zeros():
    assert rate(4e-7) == "<0.001 GB/s"
    assert rate(0.0712) == "0.0712 GB/s" and rate(None) == "–"


def test_mistakes():
    with pytest.raises(ArgumentError, match="mode 'fast' is unknown"):
        explain_target(targets.load(f"{SINS}:clean"), mode="default,fast")
    with pytest.raises(TargetError, match=r"ValueError: \[bold\]no such thing \(sins.py:\d+\)"):
        explain_target(targets.load(f"{SINS}:raises"))


def test_a_ceiling_that_a_kernel_beats_is_measured_again(monkeypatch):
    asked = []

    def measured_again(known, device, figure, key):
        asked.append((figure, key))
        return replace(known, copy_gbps={**known.copy_gbps, key: 12.0})

    monkeypatch.setattr(explain_runner, "measured_again", measured_again)
    kept = Ceilings("d", "t", "n", "now", {"1000": 0.4, "64000": 10.0}, {}, 1.0)
    cpu = torch.device("cpu")
    assert explain_runner._ceiling_gbps(kept, cpu, 499, 5.0) is None  # costs its launch
    assert explain_runner._ceiling_gbps(kept, cpu, 500, None) == 0.4
    assert explain_runner._ceiling_gbps(kept, cpu, 9000, 9.0) == 10.0  # nearest by ratio
    assert asked == []
    assert explain_runner._ceiling_gbps(kept, cpu, 7000, 9.0) == 12.0
    assert asked == [("copy_gbps", "1000")]


LINE = SourceLine("/home/me/model.py", 3)
WRAPPER = """
extern_kernels.mm(not_a_launch)
async_compile.wait(globals())

def partition_0(args):
        extern_kernels.bmm(primals_9, primals_8, out=buf7)

def call(args):
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
        extern_kernels.addmm(primals_2, primals_3, reinterpret_tensor(primals_1), out=buf0)
        buf1 = buf0; del buf0  # reuse
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(buf1, 32, stream=stream0)
        buf2 = torch.ops.aten.topk.default(buf1, 2)
        cpp_fused_add_mul_1(buf1, buf3, buf4)
        return (buf4, )

def get_args():
    buf9 = extern_kernels.mm(1)
"""


def node(buffer, *operators, size=4):
    return Node((buffer,), operators, (LINE,), size, size)


def test_launches_are_read_from_a_wrapper_in_order():
    found = launches(
        WRAPPER,
        [
            node("buf0", "aten.addmm"),
            node("buf1", "aten.relu"),
            node("buf2", "aten.topk", size=None),
            node("buf3", "aten.add"),
            node("buf4", "aten.mul", "aten.add"),
        ],
    )
    assert found == [
        Launch("bmm", "extern", (), (), None, None),
        Launch("addmm", "extern", ("aten.addmm",), (LINE,), 4, 4),
        Launch("triton_poi_fused_relu_0", "fused", ("aten.relu",), (LINE,), 4, 4),
        Launch("aten.topk.default", "extern", ("aten.topk",), (LINE,), None, None),
        Launch("cpp_fused_add_mul_1", "fused", ("aten.add", "aten.mul"), (LINE,), 8, 8),
    ]


def test_a_kernel_that_only_changes_a_buffer_in_place_has_its_operator():
    """A scatter adds to the zeros that the kernel before it wrote, and is given no other buffer."""
    given = ("buf4, 2000", "primals_1, buf4, 10000", "buf4, buf6, 8")
    wrapper = "async_compile.wait(globals())\n" + "".join(
        f"    triton_poi_fused_{number}.run({arguments}, stream=stream0)\n"
        for number, arguments in enumerate(given)
    )
    zeros, cosine = node("buf4", "aten.zeros"), node("buf6", "aten.cos")
    scatter = replace(node("buf5", "aten.scatter_add"), changes=("buf4",))
    found = launches(wrapper, [zeros, scatter, cosine])
    assert [launch.operators for launch in found] == [
        ("aten.zeros",),
        ("aten.scatter_add",),
        ("aten.cos",),
    ]


def test_a_kernel_has_the_lines_of_a_buffer_whose_memory_its_result_takes_over():
    code = """
async_compile.wait(globals())
def call(args):
        buf9 = buf3; del buf3  # reuse
        buf10 = reinterpret_tensor(buf9, (4, 2), (2, 1), 0); del buf9  # reuse
        cpp_fused_native_group_norm_sigmoid_0(buf10, buf2, buf4)
"""
    first = Node(("buf3",), ("aten.sigmoid",), (SourceLine("/home/me/model.py", 2),), 4, 4)
    nodes = [first, node("buf4", "aten.native_group_norm"), node("buf9"), node("buf10")]
    (found,) = launches(code, nodes)
    assert found.operators == ("aten.sigmoid", "aten.native_group_norm")
    assert [line.line for line in found.lines] == [2, 3]


def test_times_are_matched_in_order_by_name():
    found = launches(WRAPPER, [])
    runs = [
        ("aten::empty_strided", 9.0),
        ("aten::addmm", 1.0),
        ("triton_poi_fused_relu_0", 2.0),
        ("aten::topk", 3.0),
        ("graph_0_cpp_fused_add_mul_1", 4.0),
    ]
    assert _match(runs, found) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert _match(runs[2:], found) == {2: 2.0, 3: 3.0, 4: 4.0}
