"""The larger levers: each is found in one example, and not in its twin; and they can be tried."""

from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.inspect import findings, targets, trials
from fuselab.inspect.findings import find
from fuselab.inspect.kineto import Detail, Details, Kernel, Span, TensorUse, Window
from fuselab.inspect.profile import profile_target
from fuselab.inspect.step_split import Split
from fuselab.inspect.user_code import SourceLine
from fuselab.measure.interleave import Samples

LEVERS = str(Path(__file__).parent / "targets" / "levers.py")
SOURCE = Path(LEVERS).read_text().splitlines()


@pytest.fixture(autouse=True)
def no_thresholds(monkeypatch):
    """Report whatever is found, so that a busy machine hides nothing; twins are clean as such."""
    monkeypatch.setattr(findings, "SMALLEST_SHARE", 0.0)
    monkeypatch.setattr(findings.layout, "STRIDED_SHARE", 0.0)
    monkeypatch.setattr(findings.memory, "COMPILED_SHARE", 0.0)
    monkeypatch.setattr(findings.optimizer, "SMALLEST_SHARE", float("-inf"))


def kinds(function, backward=False):
    target = targets.load(f"{LEVERS}:{function}")
    found = profile_target(target, backward=backward, schedule=(1, 1, 2, 1)).findings
    return {finding.kind: finding for finding in found}


@pytest.mark.parametrize(
    ("function", "twins", "kind", "line"),
    [
        (
            "attends",
            ("attends_in_one", "classifies"),
            "attention spelt out",
            "weights = torch.softmax(scores.masked_fill(scores > 9.0, -9.0), dim=-1)",
        ),
        (
            "reorders",
            ("keeps_order",),
            "strided copy",
            "return x.t().contiguous() * 2.0",
        ),
        (
            "casts",
            ("casts_once",),
            "cast there and back",
            "return x.double().float() + 1.0",
        ),
        ("many_chains", ("keeps_order", "classifies"), "torch.compile", None),
    ],
)
def test_a_lever_is_found_and_its_twin_is_clean(function, twins, kind, line):
    found = kinds(function)[kind]
    assert 0 < found.share <= 1 and found.title and found.advice
    assert line is None or SOURCE[found.line_number - 1].strip() == line
    for twin in twins:
        assert kind not in kinds(twin), twin


def test_layers_that_share_a_line_are_one_finding():
    target = targets.load(f"{LEVERS}:attends_twice")
    found = profile_target(target, schedule=(1, 1, 2, 1)).findings
    (attention,) = [one for one in found if one.kind == "attention spelt out"]
    assert attention.title.endswith("read them back, 2 times")
    assert attention.calls == 2


def test_an_optimizer_of_many_kernels_is_found_and_a_fused_one_is_not():
    found = kinds("Trained", backward=True)["many small optimizer kernels"]
    assert found.title.startswith("Adam runs ") and found.calls >= 8
    assert "Adam(..., fused=True)" in found.advice
    twin = kinds("TrainedFused", backward=True)
    assert "many small optimizer kernels" not in twin
    # the optimizer reads its own step counter on the host: not the user's, and no wait
    assert "host sync" not in kinds("Trained", backward=True)


# --- on a GPU, from calls written by hand --------------------------------------------------------

LINE = SourceLine("/home/me/model.py", 7)
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_tn_align1>(Params)"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16"
HALF = "nvjet_hsh_128x128_64x6_1x2_h_bz_TNT"


def call(name, kernels, *shapes, dtype=torch.float32, at=0.0):
    """An operator of 10 us that launches kernels of (name, microseconds, blocks)."""
    uses = tuple(
        TensorUse((place, 0), shape, (shape[-1], 1), dtype) for place, shape in enumerate(shapes)
    )
    detail = Detail(name, LINE, "Model", ("forward",), False, 1, -1, uses, [], None)
    span = Span(name, "op", 1, at, 10.0, detail=detail)
    for number, (kernel, us, blocks) in enumerate(kernels):
        launched = Kernel(kernel, "kernel", at + 20 + number, us, (blocks, 1, 1), (128, 1, 1), None)
        launched.span = span
        span.kernels.append(launched)
    return span


def found_on_gpu(*spans, step_us=1000.0, overhead_us=0.0):
    kernels = sorted((k for span in spans for k in span.kernels), key=lambda k: k.start_us)
    window = Window(0.0, step_us, 1, 1, list(spans), kernels)
    details = Details([span.detail for span in spans], [])
    split = Split(step_us - overhead_us, 0.0, overhead_us, 0.0)
    return {finding.kind: finding for finding in find([window], details, split, on_gpu=True)}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Say that no GPU is here, so that the device's own figures do not enter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_float32_products_are_found_where_they_dominate():
    product = call("aten::mm", [(SIMT, 800.0, 512)], (4096, 4096), (4096, 4096))
    found = found_on_gpu(product)["float32 products"]
    assert found.saved_us == 600.0  # a quarter of the time as TF32
    assert "0.8 ms of the step, at 172 TFLOP/s" in found.title and "about 0.2 ms" in found.title
    for twin in (
        call("aten::mm", [(TF32, 800.0, 512)], (4096, 4096), (4096, 4096)),
        call("aten::mm", [(HALF, 800.0, 512)], (4096, 4096), (4096, 4096), dtype=torch.bfloat16),
        call("aten::mm", [(SIMT, 100.0, 512)], (4096, 4096), (4096, 4096)),
    ):
        assert "float32 products" not in found_on_gpu(twin)


def test_unaligned_products_are_found_on_tensor_cores():
    shapes = (4096, 1000), (1000, 4097)
    found = found_on_gpu(call("aten::mm", [(HALF, 300.0, 512)], *shapes, dtype=torch.float16))
    assert found["unaligned product"].saved_us == 150.0
    assert "K or N is no multiple of 8" in found["unaligned product"].title
    found = found_on_gpu(call("aten::mm", [(TF32, 300.0, 512)], *shapes))
    assert "no multiple of 4" in found["unaligned product"].title
    aligned = (4096, 1000), (1000, 4096)
    for twin in (
        call("aten::mm", [(HALF, 300.0, 512)], *aligned, dtype=torch.float16),
        call("aten::mm", [(SIMT, 300.0, 512)], *shapes),
    ):
        assert "unaligned product" not in found_on_gpu(twin)


def test_layout_kernels_around_convolutions_are_found():
    kernel = "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float>(...)"
    span = call("aten::cudnn_convolution", [(kernel, 40.0, 512), (HALF, 300.0, 512)], (8, 8))
    found = found_on_gpu(span)["convolutions not in channels-last"]
    assert found.saved_us == 40.0 and found.line == "model.py:7"
    twin = call("aten::cudnn_convolution", [(HALF, 300.0, 512)], (8, 8))
    assert "convolutions not in channels-last" not in found_on_gpu(twin)


def test_kernels_of_few_blocks_ask_for_a_larger_batch():
    found = found_on_gpu(call("aten::add", [("pointwise", 800.0, 27)], (8, 8)))["batch too small"]
    assert found.saved_us == pytest.approx(800.0 * (1 - 27 / 108))
    assert "batch too small" not in found_on_gpu(call("aten::add", [("p", 800.0, 108)], (8, 8)))


def test_a_launch_bound_step_is_one_for_a_graph_unless_the_host_waits_in_it():
    adds = [call("aten::add", [("p", 5.0, 512)], (8, 8), at=50.0 * n) for n in range(16)]
    found = found_on_gpu(*adds, overhead_us=900.0)["launch-bound"]
    assert "a CUDA graph can carry all of it" in found.advice
    assert found.title.startswith(
        "the device waits for the host for 90 % of the step: 16 operators"
    )
    assert found.title.endswith(" of 62.5 µs each on average")
    item = call("aten::_local_scalar_dense", [], (1, 1), at=820.0)
    item.children.append(Span("cudaStreamSynchronize", "runtime", 1, 821.0, 5.0, parent=item))
    found = found_on_gpu(*adds, item, overhead_us=900.0)
    assert "mend the host sync on model.py:7 first" in found["launch-bound"].advice


def test_a_sync_costs_the_idle_time_after_it_and_not_the_wait():
    first = call("aten::mm", [(TF32, 500.0, 512)], (64, 64), (64, 64))  # runs from 20 to 520
    item = call("aten::_local_scalar_dense", [], (1, 1), at=30.0)
    item.duration_us = 495.0  # until 525
    item.children.append(Span("cudaStreamSynchronize", "runtime", 1, 31.0, 490.0, parent=item))
    after = call("aten::mm", [(TF32, 100.0, 512)], (64, 64), (64, 64), at=580.0)  # from 600
    found = found_on_gpu(first, item, after)["host sync"]
    assert found.saved_us == 80.0  # from 520 to 600
    assert "waits for aten::mm (model.py:7)" in found.title
    item.children.clear()  # a tensor on the host: nothing to wait for
    assert "host sync" not in found_on_gpu(first, item, after)


# --- tried ---------------------------------------------------------------------------------------


@pytest.fixture
def quick_rounds(monkeypatch):
    """Run every step once, and give it twelve rounds of 100 us: the machine's load is no matter."""

    def time_steps(steps, device, budget_s):
        for step in steps.values():
            step()
        return {name: Samples([100.0] * 12) for name in steps}

    monkeypatch.setattr(trials, "time_steps", time_steps)
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: function)


def test_levers_are_timed_in_turn_and_compared_with_the_step_as_it_is(quick_rounds):
    target = targets.load(f"{LEVERS}:Trained")
    rows = {row.name: row for row in trials.try_levers(target, backward=True, budget_s=0.1)}
    assert next(iter(rows)) == "as it is" and rows["as it is"].outcome is None
    assert set(rows) == {
        "as it is",
        "bfloat16 autocast",
        "fused optimizer",
        "twice the batch",
        "torch.compile",
    }
    assert 1e-4 < rows["bfloat16 autocast"].difference < 0.1
    assert rows["fused optimizer"].difference == rows["torch.compile"].difference == 0.0
    assert rows["twice the batch"].difference is None
    times = {name: (row.us, row.outcome) for name, row in rows.items() if name != "as it is"}
    assert times.pop("twice the batch") == (50.0, "FASTER")  # 100 us for two batches
    assert set(times.values()) == {(100.0, "SAME")}


def test_a_lever_that_does_not_run_is_a_row_with_its_reason(monkeypatch, quick_rounds):
    def refuse(function, mode=None):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    target = targets.load(f"{LEVERS}:keeps_order")
    rows = {row.name: row for row in trials.try_levers(target, budget_s=0.05)}
    assert rows["torch.compile"].us is None
    assert rows["torch.compile"].reason == "RuntimeError: no compiler"


def test_images_are_tried_in_channels_last(tmp_path, quick_rounds):
    file = tmp_path / "images.py"
    file.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Conv2d(3, 4, 3)\n"
        "    def forward(self, x):\n"
        "        self.order = x.stride()\n"
        "        return self.layer(x)\n"
        "def get_inputs():\n"
        "    return [torch.randn(2, 3, 8, 8)]\n"
    )
    rows = {row.name: row for row in trials.try_levers(targets.load(str(file)), budget_s=0.05)}
    assert rows["channels-last"].difference < 1e-5
    changed = trials._channels_last(targets.load(str(file)))
    assert changed.args[0].stride() == (192, 1, 24, 3)
    assert changed.callable.layer.weight.stride() == (27, 1, 9, 3)


def test_a_script_or_a_trace_has_nothing_to_try(capsys):
    assert run(["profile", "gone.json", "--try"]) == 2
    assert "--try runs a TARGET again" in capsys.readouterr().err
