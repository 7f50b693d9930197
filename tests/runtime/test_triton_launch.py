"""Triton launches: the layout of parameters against Triton's own PTX, the held kernel on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fuselab.errors import BuildError, DeviceError
from fuselab.runtime import launch_recording, triton_launch
from fuselab.runtime.triton_launch import launch

HERE = Path(__file__).parent

# A driver that claims an sm_90: Triton compiles for it, no GPU is needed. In a process of its own,
# since Triton keeps its driver for good.
_COMPILE = r"""
import json, re, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Driver())
sys.path.insert(0, sys.argv[1])
import small_triton_kernels as triton_kernels
from fuselab.errors import BuildError
from fuselab.runtime.parameters import TracedFloat
from fuselab.runtime.triton_launch import compile_for, parameter_layout

tensor, bias = torch.empty(64), torch.empty(1)
traced = TracedFloat(2.0, 0, set())
cases = {
    "None and an int of 1 are dropped": (tensor, None, tensor, 64, 1, 2.0, 3.0, 5),
    "all are there": (tensor, bias, tensor, 7, 2, 2.0, 3.0, 0.5),
    "a wide int": (tensor, None, tensor, 2**40, 3, 2.0, 3.0, -(2**40)),
    "a traced float": (tensor, None, tensor, 7, 2, traced, 3.0, 5),
}
result = {}
for name, args in cases.items():
    for keywords in ({"BLOCK": 64}, {"BLOCK": 64, "RELU": True}):
        compiled = compile_for(triton_kernels.combine, args, {**keywords, "num_warps": 4})
        codes, places = parameter_layout(triton_kernels.combine, compiled, len(args))
        head = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
        result[name] = codes, places, re.findall(r"\.param \.(\w+)", head)
by_keyword = {"offset": 5, "wide": 3.0, "scale": 2.0, "BLOCK": 64}
compiled = compile_for(triton_kernels.combine, (tensor, bias, tensor, 7, 2), by_keyword)
result["keywords"] = *parameter_layout(triton_kernels.combine, compiled, 5), None
try:
    compile_for(triton_kernels.scaled, (tensor, tensor, 7, 2.0), {"BLOCK": 63})
except BuildError as error:
    result["error"] = str(error), error.log
result["seen"] = sorted(traced.seen)

# The whole of launch, up to the driver: what a second call hands on, without compiling again.
import contextlib
from fuselab.runtime import kernel_launch, launch_recording, triton_launch

launches, builds = [], []
layout = triton_launch.parameter_layout
torch.cuda.device = lambda device: contextlib.nullcontext()
triton_launch._device = lambda kernel, args: torch.device("cuda", 0)
triton_launch.parameter_layout = lambda *args: builds.append(1) or layout(*args)
triton_launch._built = lambda kernel, step, *args, **keywords: (
    setattr(step.__self__, "function", 9)
    if getattr(step, "__name__", "") == "_init_handles"
    else step(*args, **keywords)
)
kernel_launch.launch_cuda = lambda *args: launches.append(args)
for numel, scale in ((7, 2.0), (9, 3.0), (16, 3.0), (1, 3.0), (7, traced)):
    triton_launch.launch(
        triton_kernels.scaled, (2,), tensor, tensor, numel, scale, BLOCK=64, num_warps=2
    )
triton_launch.launch(triton_kernels.scaled, (0,), tensor, tensor, 7, 2.0, BLOCK=64, num_warps=2)
result["launches"] = [
    (*launch[:6], [value for value in launch[6] if not isinstance(value, torch.Tensor)])
    for launch in launches
]
result["builds"] = len(builds)
result["traced"] = launches[-1][6][3] is traced
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def layouts() -> dict:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(HERE)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "codes", "places"),
    [
        ("None and an int of 1 are dropped", "ttifdi", [0, 2, 3, 5, 6, 7]),
        ("all are there", "tttiifdf", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("a wide int", "ttlifdl", [0, 2, 3, 4, 5, 6, 7]),
        ("a traced float", "ttiifdi", [0, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_layout_is_that_of_the_ptx(
    layouts: dict, case: str, codes: str, places: list[int]
) -> None:
    found_codes, found_places, declared = layouts[case]
    assert (found_codes, found_places) == (codes, places)
    types = {"t": "u64", "i": "u32", "l": "u64", "f": "f32", "d": "f64"}
    scratch = ["u64", "u64"]  # two pointers that Triton adds at the end
    assert declared == [types[code] for code in codes] + scratch


def test_parameters_by_keyword_keep_the_kernels_order(layouts: dict) -> None:
    codes, places, _ = layouts["keywords"]
    assert codes == "tttiifdi"
    assert places == [0, 1, 2, 3, 4, "scale", "wide", "offset"]


def test_a_compile_error_is_a_build_error_with_tritons_words(layouts: dict) -> None:
    sentence, log = layouts["error"]
    assert sentence.startswith("the Triton kernel scaled does not build: ")
    assert "power of 2" in log


def test_compiling_does_not_look_at_a_traced_float(layouts: dict) -> None:
    assert layouts["seen"] == []


def test_a_specialisation_is_compiled_once_and_then_launched(layouts: dict) -> None:
    how = [9, 0, [2, 1, 1], [64, 1, 1], 0]
    assert layouts["launches"] == [
        [*how, "ttifnn", [7, 2.0, None, None]],
        [*how, "ttifnn", [9, 3.0, None, None]],
        [*how, "ttifnn", [16, 3.0, None, None]],
        [*how, "ttfnn", [3.0, None, None]],
        [*how, "ttifnn", [7, 2.0, None, None]],
    ]
    assert layouts["builds"] == 3  # an int that 16 divides and an int of 1 are compiled apart
    assert layouts["traced"]
    assert layouts["seen"] == []


def test_cpu_tensors_are_refused_outside_the_interpreter() -> None:
    from small_triton_kernels import scaled

    with pytest.raises(DeviceError, match=r"scaled needs CUDA tensors.*interpreter"):
        launch(scaled, (1,), torch.ones(3), torch.ones(3), 3, 1.0, BLOCK=64)


def test_tritons_own_launcher_is_built_when_triton_launches() -> None:
    from triton.runtime import driver

    built = []

    class Launcher:
        def __init__(self, source: str, metadata: str) -> None:
            built.append((source, metadata))

        def __call__(self, *args: int, stream: int) -> tuple[int, ...]:
            return (*args, stream)

    active = SimpleNamespace(launcher_cls=Launcher)
    before = driver._active
    try:
        driver.set_active(active)
        with triton_launch._late_launchers():
            late = active.launcher_cls("source", metadata="facts")
    finally:
        driver._active = before
    assert active.launcher_cls is Launcher and built == []
    assert late(1, 2, stream=3) == late(1, 2, stream=3) == (1, 2, 3)
    assert built == [("source", "facts")]


@pytest.mark.gpu
def test_a_kernel_of_ours_builds_no_launcher_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    from small_triton_kernels import scaled
    from triton.runtime import driver

    built = []
    make = driver.active.launcher_cls
    monkeypatch.setattr(
        driver.active, "launcher_cls", lambda *args: built.append(args) or make(*args)
    )
    value, output = torch.randn(96, device="cuda"), torch.zeros(96, device="cuda")
    launch(scaled, (3,), value, output, 96, 2.0, BLOCK=32, num_warps=1)
    assert torch.equal(output, 2 * value) and built == []
    scaled[(3,)](value, output, 96, 3.0, BLOCK=32, num_warps=1)
    assert torch.equal(output, 3 * value) and len(built) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 16, 17, 1000])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_held_kernel_computes_what_tritons_launch_does(numel: int, offset: int) -> None:
    from small_triton_kernels import combine

    value = torch.randn(2 * numel + offset, device="cuda")[offset:]
    bias = torch.randn(1, device="cuda")
    for stride in (1, 2):
        for given in (bias, None):
            for shift in (1, 5, 2**40, 0.5):
                output = torch.full((numel,), float("nan"), device="cuda")
                expected = torch.full_like(output, float("nan"))
                grid = (-(-numel // 64),)
                rest = (numel, stride, 0.3, 0.7, shift)
                launch(combine, grid, value, given, output, *rest, BLOCK=64)
                combine[grid](value, given, expected, *rest, BLOCK=64)
                assert torch.equal(output, expected)


@pytest.mark.gpu
def test_a_held_kernel_becomes_a_plan() -> None:
    from planned_operator import Planned
    from small_triton_kernels import run_scaled

    op = Planned(run_scaled)
    value = torch.randn(1000, device="cuda")
    for scale in (1.0, 0.5, 2.0):
        assert torch.equal(op(value, scale), value * scale)
    assert op.runs == 1
    assert torch.equal(op(value[1:], 3.0), value[1:] * 3.0)  # not aligned: another kernel
    assert op.runs == 2


@pytest.mark.gpu
def test_a_launch_by_triton_itself_keeps_no_plan() -> None:
    from planned_operator import Planned
    from small_triton_kernels import run_scaled, scaled

    def twice(value: torch.Tensor) -> torch.Tensor:
        output = run_scaled(value, 1.0)
        scaled[(1,)](value, output, value.numel(), 2.0, BLOCK=64)
        return output

    op = Planned(twice)
    for _ in range(2):
        assert op(torch.ones(8, device="cuda")).tolist() == [2.0] * 8
    assert op.runs == 2
    assert launch_recording._triton_watchers == 0


@pytest.mark.gpu
def test_a_kernel_too_large_is_a_build_error() -> None:
    from small_triton_kernels import scaled

    value = torch.ones(8, device="cuda")
    with pytest.raises(BuildError):
        launch(scaled, (1,), value, value, 8, 1.0, BLOCK=63)
