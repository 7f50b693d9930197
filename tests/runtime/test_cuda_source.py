"""CUDA sources: NVRTC for every architecture without a GPU, headers, cache; launches on a GPU."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from fuselab.errors import BuildError, DeviceError, LaunchError
from fuselab.runtime import cache, cuda_driver, cuda_source
from fuselab.runtime.cuda_source import CudaSource, f32, i32, i64

HERE = Path(__file__).parent
SOURCE = CudaSource(HERE / "kernels.cu")
TYPES = ("float", "__half", "__nv_bfloat16", "double")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_compiles_to_a_cubin_for_every_architecture(arch: str) -> None:
    image = SOURCE.compile_many([f"scaled_relu<{name}>" for name in TYPES], arch)
    assert image[:4] == b"\x7fELF"
    assert image.count(b".text._Z11scaled_reluI") >= len(TYPES)
    names, image = SOURCE._image(("scaled_relu<float>",), arch)
    assert names["scaled_relu<float>"].encode() in image


def test_a_newer_architecture_than_nvrtc_knows_gets_ptx() -> None:
    image = SOURCE.compile("scaled_relu<float>", "sm_999")
    newest = max(cuda_source._nvrtc().nvrtcGetSupportedArchs()[1])
    assert f".target sm_{newest}".encode() in image


@pytest.mark.parametrize("arch", ["90", "gfx942", "sm_"])
def test_a_wrong_architecture_is_refused(arch: str) -> None:
    with pytest.raises(BuildError, match="write it as sm_90"):
        SOURCE.compile("scaled_relu<float>", arch)


def test_an_architecture_too_old_is_refused() -> None:
    with pytest.raises(BuildError, match="does not know sm_35"):
        SOURCE.compile("scaled_relu<float>", "sm_35")


def test_an_error_names_file_expression_and_line() -> None:
    with pytest.raises(BuildError, match=r"kernels\.cu: scaled_relu<Missing> .* sm_90") as caught:
        SOURCE.compile("scaled_relu<Missing>", "sm_90")
    assert 'identifier "Missing" is undefined' in caught.value.log


def test_the_cubin_comes_from_disk_and_follows_source_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))  # others compile meanwhile
    source = tmp_path / "k.cu"
    source.write_text(
        f'#include "k.h"  // {uuid4()}\n__global__ void k(float* p) {{ *p = VALUE; }}'
    )
    (tmp_path / "k.h").write_text("#define VALUE 1.0f")
    first = CudaSource(source).compile("k", "sm_90")
    entries = set(cache.folder().rglob("*.cubin"))
    assert CudaSource(source).compile("k", "sm_90") == first
    assert set(cache.folder().rglob("*.cubin")) == entries
    (tmp_path / "k.h").write_text("#define VALUE 2.0f")
    assert CudaSource(source).compile("k", "sm_90") != first
    CudaSource(source, options=("--use_fast_math",)).compile("k", "sm_90")
    assert len(set(cache.folder().rglob("*.cubin")) - entries) == 2


def test_a_cubin_follows_what_stands_in_for_cstdint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "k.cu").write_text("#include <cstdint>\n__global__ void k(int32_t* p) { *p = 1; }")
    CudaSource(tmp_path / "k.cu").compile("k", "sm_90")
    monkeypatch.setattr(cuda_source, "_CSTDINT", cuda_source._CSTDINT + b"#error stale\n")
    with pytest.raises(BuildError, match="stale"):
        CudaSource(tmp_path / "k.cu").compile("k", "sm_90")


def test_headers_come_from_packages_without_any_cuda_toolkit() -> None:
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    if not {"nvidia-cuda-runtime", "nvidia-cuda-cccl"} <= installed:
        pytest.skip("the packages with CUDA's headers are not installed here")
    folders = [str(folder) for folder in cuda_source.header_folders()]
    assert folders
    assert all("site-packages" in folder for folder in folders)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), (32, 1, 1)),
        ((2**31, 1, 1), (32, 1, 1)),
        ((1, 65536, 1), (32, 1, 1)),
        ((1, 1, 65536), (32, 1, 1)),
    ],
)
def test_a_grid_that_cannot_launch_is_refused(grid: tuple, block: tuple) -> None:
    with pytest.raises(LaunchError, match="grid"):
        cuda_source._check_shape("k", grid, block)


def test_blocks_of_1024_threads_and_grids_at_the_limit_are_accepted() -> None:
    cuda_source._check_shape("k", (2**31 - 1, 65535, 65535), (32, 4, 8))
    with pytest.raises(LaunchError, match="1025 threads"):
        cuda_source._check_shape("k", (1, 1, 1), (1025, 1, 1))


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(DeviceError, match="they are cpu"):
        SOURCE.launch("k", (1, 1, 1), (1, 1, 1), (torch.zeros(1),))


# The driver's side, against a stand-in for libcuda.so.1 that notes its calls: what a launch packs
# is checked here without a GPU, in a process of its own.
_SCRIPT = r"""
import sys, torch
torch._C._cuda_getCurrentRawStream = lambda index: 40 + index
from fuselab.errors import LaunchError
from fuselab.runtime import cuda_driver, kernel_launch, launch_plans, launch_recording
from fuselab.runtime.parameters import encode, f32, f64, i32, i64
assert launch_plans.start()
if sys.argv[1] == "ctypes":
    launch_plans.native = None
tensor = torch.empty(4)
print(f"{tensor.data_ptr():#x}")
packed = encode((tensor, i64(2**40 + 1), f32(0.5), i32(-3), f64(0.1), None))
function = cuda_driver.load_function(b"\x7fELF", "kernel", 1)
cuda_driver.allow_shared_bytes(function, 100_000, 1)
try:
    cuda_driver.allow_shared_bytes(function, 300_000, 1)
except LaunchError as error:
    print(error)
kernel_launch.launch_cuda(function, 1, (5, 6, 7), (32, 2, 1), 100_000, *packed)
try:
    kernel_launch.launch_cuda(function, 1, (5, 6, 7), (999, 1, 1), 0, *packed)
except LaunchError as error:
    print(error)
if launch_plans.native is not None:
    op = launch_plans.register("test::plan")
    for threads in (64, 999):
        launch = (True, function, 1, (2, 1, 1), (threads, 1, 1), 128)
        parameters = [("t", 1, 0, -1, 0), ("l", 0, 0, -1, -7), ("f", 1, 1, -1, 0)]
        parameters += [("i", 0, 0, -1, 2**31 - 1)]
        parameters += [("d", 1, 1, -1, 0), ("t", 2, 0, -1, 0)]
        second = [("t", 2, 1, -1, 8), *parameters[1:5], ("t", 2, 0, -1, 4)]
        wider = (True, function, 1, (3, 1, 1), *launch[4:])
        steps = [1, (launch, parameters, 0), (wider, second, 0)]
        memory = [tensor, torch.empty(6)]
        args = (tensor, 0.5, threads)
        launch_plans.native.keep(op, "cuda", args, steps, memory, 1, True, False)
    (output,) = launch_plans.lookup(op, "cuda", (tensor, 0.1, 64))
    print(f"output {output.data_ptr():#x}")
    try:
        launch_plans.lookup(op, "cuda", (tensor, 0.1, 999))
    except LaunchError as error:
        print("plan:", error)
"""


# A launch of maps and a struct, and a plan of it: of arguments, and of the second half of an
# output.
_MAPS_SCRIPT = r"""
import sys, torch
torch._C._cuda_getCurrentRawStream = lambda index: 40 + index
from fuselab.errors import LaunchError
from fuselab.runtime import kernel_launch, launch_plans, launch_recording
from fuselab.runtime.parameters import Struct, encode
from fuselab.runtime.tensor_map import tensor_map
assert launch_plans.start()
if sys.argv[1] == "ctypes":
    launch_plans.native = None
matrix, output = torch.zeros(2, 100, 72).bfloat16()[0, :, :60], torch.zeros(8, 64).half()
described = 9, 1, (5, 1, 1), (384, 1, 1), 1024
bias = torch.ones(3)
def parameters(matrix, bias, output):
    maps = tensor_map(matrix, 128, 64), tensor_map(output[4:], 64, 32)
    return encode([*maps, Struct.of_arrays(2, [[bias, output[4:]], [-7]])])
def say(matrix, bias, output):
    print(f"{matrix.data_ptr():#x} {bias.data_ptr():#x} {output[4:].data_ptr():#x}")
say(matrix, bias, output)
kernel_launch.launch_cuda(*described, *parameters(matrix, bias, output))
try:
    kernel_launch.launch_cuda(*described, *encode([tensor_map(matrix[1:], 64, 64)]))
except LaunchError as error:
    print(error)
if launch_plans.native is not None:
    op = launch_plans.register("test::maps")
    def kept(input, biases):
        with launch_recording.record(op, "cuda", (input, biases)) as recording:
            recording._device_index, recording._stream = 1, 41
            output = torch.empty(8, 64, dtype=torch.float16)
            kernel_launch.launch_cuda(*described, *parameters(input, biases[1], output))
            print(recording.why_not())
            recording.finish(output)
    kept(matrix, [torch.ones(2), bias])
    moved, biases = torch.zeros(3, 100, 72).bfloat16()[1, :, :60], [torch.ones(2), torch.ones(3)]
    say(moved, biases[1], launch_plans.lookup(op, "cuda", (moved, biases)))
    beside = torch.zeros(100 * 72 + 1).bfloat16()[1:].view(100, 72)[:, :60]
    print(launch_plans.lookup(op, "cuda", (beside, biases)))
"""


def _run_with_stand_in(folder: Path, script: str, way: str) -> list[str]:
    """What a script prints in a process whose driver is the stand-in."""
    if torch.cuda.is_available():
        pytest.skip("a real libcuda.so.1 is loaded here")
    library = folder / "libcuda.so.1"
    stand_in = str(HERE / "stand_in_driver.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", stand_in, "-o", str(library)], check=True)
    result = subprocess.run(
        [sys.executable, "-c", script, way],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("way", ["launcher", "ctypes"])
def test_maps_and_structs_are_made_for_the_present_addresses(tmp_path: Path, way: str) -> None:
    lines = _run_with_stand_in(tmp_path, _MAPS_SCRIPT, way)
    addresses = [line.split() for line in lines if line.startswith("0x")]
    made = [line for line in lines if line.startswith("map")]
    assert made[:2] == ["map 9 2 0330 11", "map 6 2 0330 11"]
    launches = [line for line in lines if line.startswith("launch")]

    def expected(matrix: str, bias: str, output: str) -> list[str]:
        return [
            f"launch with {matrix} 60 100 144 64 128, 77 at 0",
            f"launch with {output} 64 4 128 32 64, 77 at 0",
            f"launch with {bias} {output} -7 0",
        ]

    assert launches[:3] == expected(*addresses[0])
    assert any(
        "shape (99, 60) whose rows are 144 bytes apart (CUDA_ERROR" in line for line in lines
    )
    if way == "launcher":
        assert "None" in lines  # nothing speaks against a plan
        assert launches[6:] == expected(*addresses[1])  # that of a plan
        assert not {*addresses[1]} & {*addresses[0]}
        assert lines[-1] == "None"  # another alignment has none


@pytest.mark.parametrize("way", ["launcher", "ctypes"])
def test_a_launch_reaches_the_driver_as_packed(tmp_path: Path, way: str) -> None:
    lines = _run_with_stand_in(tmp_path, _SCRIPT, way)
    pointer = lines[0] if lines[0].startswith("0x") else lines[-1]
    said = [line for line in lines if not line.startswith(("push", "pop", "0x"))]
    assert "function kernel" in said
    assert "attribute 8 100000" in said
    assert any("asks for 300000 bytes of shared memory" in line for line in said)
    launches = [line for line in said if line.startswith("launch")]
    arguments = f"on 41: {pointer} 1099511627777 0.5 -3 0.1 (nil)"
    assert launches[0] == f"launch 9 (5 6 7) (32 2 1) 100000 {arguments}"
    assert launches[1] == f"launch 9 (5 6 7) (999 1 1) 0 {arguments}"
    refused = "CUDA_ERROR_STAND_IN: said no); grid (5, 6, 7), block (999, 1, 1)"
    assert any(refused in line for line in said)
    if way == "launcher":
        output = next(line.split()[1] for line in lines if line.startswith("output"))
        arguments = f"on 41: {pointer} -7 0.1 2147483647 0.1 {output}"
        assert launches[2] == f"launch 9 (2 1 1) (64 1 1) 128 {arguments}"
        # The workspace is filled with zeros first, on the same stream; the second launch gets 8
        # bytes into it, and 4 into the output.
        workspace, *filled = next(line for line in said if line.startswith("set")).split()[1:]
        assert filled == ["0", "24", "on", "41"]
        assert lines.index(f"set {workspace} 0 24 on 41") < lines.index(launches[2])
        shifted = f"on 41: {int(workspace, 16) + 8:#x} -7 0.1 2147483647 0.1"
        shifted += f" {int(output, 16) + 4:#x}"
        assert launches[3] == f"launch 9 (3 1 1) (64 1 1) 128 {shifted}"
        assert len(launches) == 5  # a launch that fails is the last of its plan
        assert any(line.startswith("plan: a kernel did not launch") for line in lines)
    pushes = [line for line in lines if line.startswith("push")]
    assert pushes
    assert set(pushes) == {"push 101"}
    assert len(pushes) == lines.count("pop")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 255, 257, 100_000])
def test_runs_on_a_gpu(dtype: torch.dtype, numel: int) -> None:
    names = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
    value = torch.randn(numel, device="cuda", dtype=dtype)
    output = torch.full_like(value, float("nan"))
    grid = (-(-numel // 256), 1, 1)
    args = (value, output, i64(numel), f32(0.5))
    SOURCE.launch(f"scaled_relu<{names[dtype]}>", grid, (256, 1, 1), args)
    assert torch.equal(output, torch.relu(value.float() * 0.5).to(dtype))


@pytest.mark.gpu
def test_more_than_48_kb_of_shared_memory_is_asked_for() -> None:
    value = torch.arange(1024.0, device="cuda")
    output = torch.empty_like(value)
    words = 20_000  # 80 KB before the slice
    args = (value, output, i32(words))
    SOURCE.launch("reverse", (4, 1, 1), (256, 1, 1), args, shared_bytes=4 * (words + 256))
    assert torch.equal(output, value.view(4, 256).flip(1).view(-1))
    with pytest.raises(LaunchError, match="more than CUDA device"):
        SOURCE.launch("reverse", (4, 1, 1), (256, 1, 1), args, shared_bytes=1 << 20)


@pytest.mark.gpu
def test_launches_on_the_current_stream() -> None:
    value, output = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    args = (value, output, i64(1 << 20), f32(1.0))
    SOURCE.launch("scaled_relu<float>", (4096, 1, 1), (256, 1, 1), args)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        value.fill_(3.0)
        SOURCE.launch("scaled_relu<float>", (4096, 1, 1), (256, 1, 1), args)
    assert not stream.query()  # the launch did not wait for the stream
    stream.synchronize()
    assert bool((output == 3.0).all())


@pytest.mark.gpu
def test_a_thread_without_a_context_can_launch() -> None:
    value, output = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    args = (value, output, i64(8), f32(2.0))
    thread = threading.Thread(
        target=SOURCE.launch, args=("scaled_relu<float>", (1, 1, 1), (32, 1, 1), args)
    )
    thread.start()
    thread.join()
    assert output.tolist() == [2.0] * 8


@pytest.mark.gpu
def test_a_stale_context_is_not_left_current() -> None:
    cuda_driver.primary_context(0)
    before, after = ctypes.c_void_p(), ctypes.c_void_p()
    driver = cuda_driver.library()
    driver.cuCtxGetCurrent(ctypes.byref(before))
    with cuda_driver.on_device(0):
        pass
    driver.cuCtxGetCurrent(ctypes.byref(after))
    assert before.value == after.value
