"""Assembly without a GPU: occupancy, SASS, source lines, live registers and coalescing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from triton.runtime.jit import JITFunction

from fuselab import errors
from fuselab.inspect.assembly import (
    architectures,
    describe,
    instruction_kinds,
    liveness,
    ptx_addresses,
    ptx_lines,
    sass,
    summary,
    tools,
)
from fuselab.inspect.assembly.advice import advice
from fuselab.inspect.assembly.architectures import ARCHITECTURES, NVIDIA, architecture
from fuselab.inspect.assembly.instruction_kinds import Access
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.occupancy import occupancy, registers_for
from fuselab.inspect.assembly.subjects import Compiled, Request, compiled
from fuselab.runtime.cuda_source import CudaSource, header_folders

TARGETS = Path(__file__).parent / "targets"
VECTOR_ADD, KERNELS_CU = str(TARGETS / "vector_add.py"), str(TARGETS / "kernels.cu")
MATMUL = "*fp16, *fp16, *fp16, i32:16, i32:16, i32:16, 64, 32"
SOFTMAX = "*fp32, *fp32, i32:16, 1024"

_OCCUPANCY = r"""
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int major, minor, warps, shared, optin, threads, registers, bytes;
  while (scanf("%d%d%d%d%d%d%d%d", &major, &minor, &warps, &shared, &optin, &threads, &registers,
               &bytes) == 8) {
    cudaOccDeviceProp device{};
    device.computeMajor = major; device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = warps * 32;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536; device.warpSize = 32;
    device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = shared;
    device.sharedMemPerBlockOptin = optin; device.numSms = 1;
    device.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
    cudaOccFuncAttributes kernel{};
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers; kernel.sharedSizeBytes = 0;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; kernel.maxDynamicSharedSizeBytes = optin;
    cudaOccDeviceState state{};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result{};
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, bytes))
      puts("-1");
    else
      printf("%d\n", result.activeBlocksPerMultiprocessor);
  }
}
"""


def one(found: Compiled, name: str = "") -> Kernel:
    kernels = [kernel for kernel in found.kernels if not name or kernel.name == name]
    assert len(kernels) == 1, [kernel.name for kernel in found.kernels]
    return kernels[0]


def asked(spec: str, arch: str = "sm_90", **options: object) -> Compiled:
    return compiled(Request(spec, architecture(arch), **options))


@pytest.fixture(scope="module")
def add() -> Kernel:
    return one(asked(VECTOR_ADD, kernel="add_kernel"))


@pytest.fixture(scope="module")
def softmax() -> Kernel:
    return one(asked(f"{VECTOR_ADD}:softmax_kernel", signature=SOFTMAX))


@pytest.fixture(scope="module")
def cuda() -> Compiled:
    return asked(KERNELS_CU)


@pytest.fixture(scope="module")
def spilling() -> Kernel:
    return one(asked(KERNELS_CU, "sm_80", kernel="spilling<float>", threads=(1024,)))


# --- occupancy -----------------------------------------------------------------------------------


def test_occupancy_is_that_of_nvidias_own_header(tmp_path: Path) -> None:
    """``cuda_occupancy.h`` computes it too, for every architecture of the table."""
    headers = [folder for folder in header_folders() if (folder / "cuda_occupancy.h").is_file()]
    if not headers:
        pytest.skip("cuda_occupancy.h is not among the installed headers")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    (tmp_path / "oracle.cpp").write_text(_OCCUPANCY)
    program = tmp_path / "oracle"
    build = [compiler, "-w", f"-I{headers[0]}", str(tmp_path / "oracle.cpp"), "-o", str(program)]
    subprocess.run(build, check=True)
    rows = [
        (device, threads, registers, shared)
        for device in NVIDIA.values()
        for threads in (32, 64, 96, 128, 256, 512, 768, 1024)
        for registers in (16, 32, 40, 63, 64, 72, 80, 96, 128, 168, 200, 255)
        for shared in (0, 1, 4096, 16384, 49152, 60000, device.block_shared_bytes)
    ]
    lines = [
        f"{device.number // 10} {device.number % 10} {device.warps} {device.shared_bytes} "
        f"{device.block_shared_bytes} {threads} {registers} {shared}"
        for device, threads, registers, shared in rows
    ]
    said = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    expected = [int(line) for line in said.stdout.split()]
    ours = [occupancy(*row).blocks for row in rows]
    wrong = [row for row, a, b in zip(rows, ours, expected, strict=True) if a != b]
    assert len(expected) == len(rows) and not wrong, wrong[:5]


def test_the_limit_is_named_and_the_next_step_found() -> None:
    device = architecture("sm_90")
    held = occupancy(device, 256, 72, 0)
    assert (held.blocks, held.warps, held.limited_by) == (3, 24, ("registers",))
    assert registers_for(device, 256, 4) == 64
    held = occupancy(device, 128, 16, 100 << 10)
    assert (held.blocks, held.limited_by) == (2, ("shared memory",))
    assert occupancy(architecture("sm_75"), 128, 16, 100 << 10).blocks == 0


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_bare_kernel_compiles_for_every_architecture(arch: str) -> None:
    kernel = one(asked(VECTOR_ADD, arch))
    assert kernel.launched_by == "add" and kernel.grid == (98, 1, 1)
    assert kernel.settings["BLOCK"] == 1024
    assert [argument.value for argument in kernel.arguments] == [None, None, None, 100_000]
    facts = summary.summarised(kernel)
    if arch == "gfx942":
        assert kernel.stages == ("ttir", "ttgir", "llir", "amdgcn") and kernel.threads == 256
        assert "gfx942" in kernel.texts["amdgcn"] and facts.other["vgprs"] == facts.registers > 0
        assert facts.accesses[Access("global", "store", 128)] == 1
        return
    assert facts.accesses == {
        Access("global", "load", 128): 4,
        Access("global", "store", 128): 2,
    }
    # A thread adds eight of the 1024 elements.
    adds = sum(one.base == "FADD" for one in summary.code_of(kernel))
    assert (adds, facts.mix["float32"], facts.stack_bytes) == (8, 8, 0)
    assert 8 <= facts.registers <= 40 and f".target {arch}" in kernel.texts["ptx"]


def test_the_machine_is_as_before_behind_a_pretended_gpu(add: Kernel) -> None:
    assert add.texts and "pretended" not in getattr(JITFunction.run, "__qualname__", "")
    assert CudaSource.launch.__qualname__ == "CudaSource.launch"
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_operators_of_the_library_are_recorded_forward_and_backward() -> None:
    found = asked("square", case="16384x256")
    launched = {kernel.launched_by: kernel for kernel in found.kernels}
    assert list(launched) == ["triton forward", "triton backward", "cuda forward", "cuda backward"]
    # 16384 * 256 elements: 4 KB of output per Triton program, 256 packs of 4 per CUDA block.
    assert launched["triton forward"].grid == (4096, 1, 1)
    assert launched["cuda forward"].grid == (4096, 1, 1)
    assert launched["cuda forward"].name == "square<float, int32_t, 1, 4, true>"
    only = asked("square", "sm_80", implementation="triton", dtype=torch.bfloat16)
    assert [kernel.launched_by for kernel in only.kernels] == ["triton forward", "triton backward"]
    assert "bf16" in only.kernels[0].texts["ttir"]


def test_settings_take_the_place_of_the_launchs_own() -> None:
    wide = one(asked(VECTOR_ADD, settings={"BLOCK": 256, "num_warps": 8}))
    assert wide.settings["BLOCK"] == 256 and wide.threads == 256 and wide.grid is None


# --- SASS and its source lines -------------------------------------------------------------------


def test_every_instruction_of_the_binary_is_parsed(cuda: Compiled) -> None:
    for kernel in cuda.kernels:
        code = summary.code_of(kernel)
        addresses = [one.address for one in code]
        assert addresses == list(range(0, 16 * len(code), 16))  # an instruction has 16 bytes
        section = tools.sections(kernel.binary)[f".text.{kernel.function}"]
        # What is left is a branch to itself and NOPs that fill the last 128 bytes.
        assert 0 < len(section) - 16 * len(code) <= 16 * 17
        assert code[-1].base in ("EXIT", "RET", "BRA")


def test_a_copy_of_a_file_has_lines_of_its_own(tmp_path: Path) -> None:
    """Triton's cache goes by the text, and keeps the name of the file that had it first."""
    for folder in ("first", "second"):
        copy = tmp_path / folder / "vector_add.py"
        copy.parent.mkdir()
        copy.write_text(Path(VECTOR_ADD).read_text())
        kernel = one(asked(f"{copy}:softmax_kernel", signature=SOFTMAX))
        assert {one.place.file for one in summary.code_of(kernel) if one.place} == {str(copy)}


def test_functions_of_triton_belong_to_the_line_that_calls_them(softmax: Kernel) -> None:
    source = Path(VECTOR_ADD).read_text().splitlines()
    code = summary.code_of(softmax)
    assert {one.place.file for one in code if one.place} == {VECTOR_ADD}

    def line_of(one: sass.Instruction) -> str:
        assert one.place is not None
        return source[one.place.line - 1]

    shuffles = [line_of(one) for one in code if one.base == "SHFL"]
    assert len(shuffles) == 14  # 5 in a warp and 2 across 4 warps, for each of two reductions
    assert sum("tl.max" in line for line in shuffles) == 7
    assert sum("tl.sum" in line for line in shuffles) == 7
    assert all("tl.load" in line_of(one) for one in code if one.base == "LDG")


HALF = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(const __half2* x, __half2* y) {
  y[threadIdx.x] = __hadd2(x[threadIdx.x], x[threadIdx.x]);
}
"""


def test_functions_of_cuda_belong_to_the_line_that_calls_them_and_the_users_to_their_own(
    cuda: Compiled, tmp_path: Path
) -> None:
    multiply = next(one for one in summary.code_of(one(cuda, "halve")) if one.base == "FMUL")
    assert multiply.place is not None
    text = Path(KERNELS_CU).read_text().splitlines()[multiply.place.line - 1]
    assert text.strip() == "return x * 0.5f;"
    (tmp_path / "half.cu").write_text(HALF)
    add = next(
        each
        for each in summary.code_of(one(asked(str(tmp_path / "half.cu"))))
        if each.base in ("HADD2", "HFMA2")
    )
    assert add.place == ptx_lines.Place(str(tmp_path / "half.cu"), 4)


ACTIVATIONS = """
import triton
import triton.language as tl

@triton.jit
def sharp(x):
    return tl.exp(x * x)
"""
ACTIVATED = """
import triton
import triton.language as tl
from own_activations import sharp

@triton.jit
def loaded(x, offsets, BLOCK: tl.constexpr):
    return tl.load(x + offsets)

@triton.jit
def activated_kernel(x, out, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, sharp(loaded(x, offsets, BLOCK)))
"""


def test_functions_of_the_user_are_shown_at_their_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_activations.py").write_text(ACTIVATIONS)
    file = tmp_path / "activated.py"
    file.write_text(ACTIVATED)
    kernel = one(asked(f"{file}:activated_kernel", signature="*fp32, *fp32, 1024"))
    code = summary.code_of(kernel)
    loads = {each.place for each in code if each.base == "LDG"}
    assert loads == {ptx_lines.Place(str(file), 8)}
    powers = {each.place for each in code if each.base == "MUFU"}
    assert powers == {ptx_lines.Place(str(tmp_path / "own_activations.py"), 7)}
    places = [row["place"] for row in describe.kernel_facts(kernel)["coalescing"]]
    assert places == ["line 8", "line 13"]
    _, lines = describe.annotated(kernel)
    assert lines[-1]["place"] == "own_activations.py:7"  # other files follow the kernel's own
    assert lines[-1]["source"].strip() == "return tl.exp(x * x)"


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_live_registers_are_those_that_nvdisasm_counts(arch: str) -> None:
    kernels = list(asked(KERNELS_CU, arch).kernels)
    if arch == "sm_120":  # Triton assembles for it with a ptxas whose code nvdisasm can follow
        kernels += [
            one(asked(f"{VECTOR_ADD}:softmax_kernel", arch, signature=SOFTMAX)),
            one(asked(f"{VECTOR_ADD}:matmul_kernel", arch, signature=MATMUL)),
        ]
    for kernel in kernels:
        expected = tools.live_counts(kernel.binary, kernel.function)
        code = summary.code_of(kernel)
        assert expected is not None
        assert liveness.live_counts(code) == [expected[one.address] for one in code]


def test_live_registers_never_exceed_those_that_the_kernel_has(softmax: Kernel) -> None:
    found = summary.summarised(softmax)
    assert found.most_live is not None and 8 < found.most_live <= found.registers


def test_kinds_widths_and_matrix_instructions() -> None:
    kernel = one(asked(f"{VECTOR_ADD}:matmul_kernel", "sm_80", signature=MATMUL))
    found = summary.summarised(kernel)
    # 64 x 64 x 32 by 4 warps: 16 products of 16 x 8 x 16 in each warp.
    assert found.matrix == {"HMMA.16816.F32": 16}
    assert found.accesses[Access("global to shared", "copy", 128)] > 0
    assert found.accesses[Access("shared", "load", 128)] > 0  # LDSM.16.M88.4
    assert found.barriers["BAR"] > 0 and found.dynamic_shared_bytes == 16384
    hopper = summary.summarised(one(asked(f"{VECTOR_ADD}:matmul_kernel", signature=MATMUL)))
    assert set(hopper.matrix) == {"HGMMA.64x64x16.F32"}
    blackwell = asked(f"{VECTOR_ADD}:matmul_kernel", "sm_100", signature=MATMUL)
    assert "UTCHMMA" in summary.summarised(one(blackwell)).matrix


@pytest.mark.parametrize(
    ("text", "bits", "kind"),
    [
        ("LDG.E.U8 R4, desc[UR4][R2.64]", 8, "memory"),
        ("LDG.E.U16.CONSTANT R4, [R2.64]", 16, "memory"),
        ("STG.E.64 desc[UR4][R2.64], R4", 64, "memory"),
        ("LDSM.16.MT88.4 R28, [R28+0x2000]", 128, "memory"),
        ("UTMALDG.2D [UR8], [UR4]", None, "memory"),
        ("DFMA R2, R4, R6, R2", None, "float64"),
        ("HFMA2.MMA R23, -RZ, RZ, 0, 2.38e-07", None, "integer"),
        ("HADD2.F32 R9, -RZ, R4.H0_H0", None, "conversion"),
        ("MUFU.EX2 R6, R7", None, "special"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", None, "barrier"),
    ],
)
def test_one_instruction(text: str, bits: int | None, kind: str) -> None:
    opcode, _, operands = text.partition(" ")
    instruction = sass.Instruction(0, opcode, operands)
    assert instruction_kinds.kind(instruction) == kind
    found = instruction_kinds.access(instruction)
    assert (found.bits if found else None) == bits


def test_spills_and_static_shared_memory(spilling: Kernel, cuda: Compiled) -> None:
    found = summary.summarised(spilling)
    # 64 values and 32 registers, the most that two blocks of 1024 threads leave to each.
    assert found.registers == 32 and found.stack_bytes >= 64
    stored, loaded = (
        sum(
            count * access.bits // 8
            for access, count in found.accesses.items()
            if (access.space, access.direction) == ("local", way) and access.bits
        )
        for way in ("store", "load")
    )
    assert found.spills == (stored, loaded) and min(stored, loaded) > 0
    assert any("bytes are spilled" in sentence for sentence in advice(spilling, found))
    column = summary.summarised(one(cuda, "column"))
    assert column.static_shared_bytes == 32 * 33 * 4  # and not the 1 KB that sm_90 reserves


# --- coalescing ----------------------------------------------------------------------------------


def test_sectors_of_dense_and_scattered_accesses(add: Kernel, cuda: Compiled) -> None:
    found = ptx_addresses.requests(add)
    assert (len(found.requests), found.unknown) == (6, 0)
    assert {(each.sectors, each.least) for each in found.requests} == {(16, 16)}
    scattered = ptx_addresses.requests(one(cuda, "column"))
    load, store = scattered.requests
    assert (load.direction, load.sectors, load.least) == ("load", 32, 4)
    assert (store.direction, store.sectors, store.least) == ("store", 4, 4)
    assert load.place == ptx_lines.Place(KERNELS_CU, 16)
    said = advice(one(cuda, "column"), summary.summarised(one(cuda, "column")))
    assert any("loads 32 sectors per request where 4" in sentence for sentence in said)


def test_a_masked_tail_is_counted_for_the_lanes_inside(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text(
        Path(VECTOR_ADD).read_text().replace("torch.arange(100_000.0)", "torch.arange(20.0)")
    )
    found = ptx_addresses.requests(one(asked(str(file))))
    # 20 of 32 lanes, 4 elements each in 16 bytes: 5 lanes are inside, 80 bytes, 3 sectors.
    assert {(each.lanes, each.sectors) for each in found.requests} <= {(5, 3), (20, 3)}
    assert found.requests and len(found.unreached) + len(found.requests) >= 6


def test_unaligned_rows_touch_one_sector_more() -> None:
    kernel = one(asked(f"{VECTOR_ADD}:softmax_kernel", signature="*fp32, *fp32, i32, 1024"))
    found = ptx_addresses.requests(kernel)
    assert {each.bytes_per_lane for each in found.requests} == {4}
    narrow = advice(kernel, summary.summarised(kernel))
    assert any("32 bits per thread in 8 instructions; 2 of 128" in each for each in narrow)


ROWS = """
import torch
import triton
import triton.language as tl

@triton.jit
def rows_kernel(x_ptr, out_ptr, n_cols, stride, scale, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + tl.program_id(0) * stride + cols, mask=mask)
    tl.store(out_ptr + tl.program_id(0) * stride + cols, x * scale, mask=mask)

def scaled(x):
    out = torch.empty_like(x)
    rows_kernel[(len(x),)](x, out, x.shape[1], x.stride(0), 2.0, BLOCK=512)
    return out

def get_inputs():
    return [torch.randn(37, 300)]
"""


def test_narrow_accesses_are_counted_beyond_those_of_the_first_warp(tmp_path) -> None:
    """The first of 4 warps has columns 0..31, 128.., 256.. and 384..; the last are masked."""
    (tmp_path / "rows.py").write_text(ROWS)
    kernel = one(asked(str(tmp_path / "rows.py")))
    found = ptx_addresses.requests(kernel)
    assert [direction for _, direction in found.unreached] == ["load", "store"]
    said = advice(kernel, summary.summarised(kernel))
    assert sum("32 bits per thread in 4 instructions; 1 of 128" in one for one in said) == 2


WEIGHTED = ROWS.replace("x * scale, mask", "x * tl.load(x_ptr + cols, mask=mask), mask")


def test_elements_of_a_thread_that_are_read_one_by_one_are_narrow_and_not_scattered(
    tmp_path: Path,
) -> None:
    """The aligned load gives each thread 4 neighbours, and rows of 300 are not aligned."""
    (tmp_path / "rows.py").write_text(WEIGHTED)
    kernel = one(asked(str(tmp_path / "rows.py")))
    found = summary.summarised(kernel)
    load = found.coalescing[0]
    assert (load.instructions, load.sectors, load.least) == (4, 16, 4)
    said = advice(kernel, found)
    assert not any("sectors per request" in each for each in said)
    assert any("loads 32 bits per thread in 4 instructions; 1 of 128" in each for each in said)


INDEXED = """
template <int THREADS>
__global__ void __launch_bounds__(THREADS) indexed(const float* x, float* y, int k) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i * THREADS + threadIdx.x];
  for (int i = 0; i < 64; ++i) held[(i * k) % 64] += held[63 - i];
  y[threadIdx.x] = held[k % 64];
}
__global__ void square(const float* x, float* y) {
  __shared__ float tile[8][32];
  tile[threadIdx.y][threadIdx.x] = x[blockIdx.x * 256 + threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[blockIdx.x * 256 + threadIdx.y * 32 + threadIdx.x] = tile[7 - threadIdx.y][threadIdx.x];
}
"""


def test_an_array_that_a_variable_indexes_is_told_from_spills(tmp_path: Path) -> None:
    (tmp_path / "indexed.cu").write_text(INDEXED)
    kernel = one(asked(str(tmp_path / "indexed.cu"), kernel="indexed<64>"))
    found = summary.summarised(kernel)
    assert found.spills == (0, 0) and found.stack_bytes == 64 * 4
    (said,) = [each for each in advice(kernel, found) if "local memory" in each]
    assert said.startswith("a thread keeps 256 bytes in local memory")
    assert "an array is indexed by a variable" in said


def test_a_cuda_block_is_that_of_the_launch_bounds_or_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "indexed.cu"
    file.write_text(INDEXED)
    assert one(asked(str(file), kernel="indexed<64>")).block == (64, 1, 1)
    assert one(asked(str(file), kernel="indexed<64>", threads=(32,))).block == (32, 1, 1)
    with pytest.raises(errors.ArgumentError, match="bound to 64 threads per block"):
        asked(str(file), kernel="indexed<64>", threads=(16, 8))
    assert one(asked(str(file))).block == (32, 8, 1)  # by its shared memory
    assert one(asked(str(file), threads=(16, 16))).block == (16, 16, 1)


TILES = """
import triton
import triton.language as tl

@triton.jit
def tile_kernel(out, TILE: tl.constexpr, VALUE: tl.constexpr):
    rows, columns = tl.arange(0, TILE[0]), tl.arange(0, TILE[1])
    tl.store(out + rows[:, None] * TILE[1] + columns[None, :], VALUE)
"""


def test_a_signature_has_tuples_for_constexprs(tmp_path: Path) -> None:
    (tmp_path / "tiles.py").write_text(TILES)
    kernel = one(asked(str(tmp_path / "tiles.py"), signature="*fp32, (4, 8), 1.5"))
    assert kernel.settings["TILE"] == (4, 8) and kernel.settings["VALUE"] == 1.5


def test_the_suggested_signature_tells_pointers_from_numbers(tmp_path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    with pytest.raises(errors.ArgumentError, match="has 1 entry and rows_kernel takes 6") as error:
        asked(str(tmp_path / "rows.py"), signature="*fp32")
    assert "--signature '*fp32, *fp32, i32:16, i32:16, fp32, 1024'" in str(error.value)


def test_a_kernel_takes_what_the_function_that_launches_it_gives() -> None:
    """``get_inputs()`` has the two tensors of ``add``, and ``add_kernel`` takes five arguments."""
    kernel = one(asked(f"{VECTOR_ADD}:add_kernel"))
    assert ".entry add_kernel(" in kernel.texts["ptx"]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "error", "words"),
    [
        ("nope", {}, errors.UnknownNameError, "unknown operator 'nope'"),
        ("nope.py", {}, errors.MissingTargetError, "nope.py: no such file"),
        ("nope.cu", {}, errors.MissingTargetError, "nope.cu: no such file"),
        (KERNELS_CU, {"kernel": "spilling"}, errors.TargetError, "--kernel 'spilling<float>'"),
        (KERNELS_CU, {"kernel": "halved"}, errors.TargetError, "it has halve, column, spilling"),
        (KERNELS_CU, {"case": "4x4"}, errors.ArgumentError, "--case says nothing of a .cu"),
        (KERNELS_CU, {"threads": (2000,)}, errors.ArgumentError, "1 to 1024 threads"),
        (VECTOR_ADD, {"case": "4x4"}, errors.ArgumentError, "--case is for an operator"),
        (VECTOR_ADD, {"kernel": "gone"}, errors.TargetError, "no kernel called 'gone'"),
        (VECTOR_ADD, {"signature": SOFTMAX}, errors.TargetError, "several kernels"),
        (f"{VECTOR_ADD}:gone", {}, errors.TargetError, "has no 'gone'"),
        (f"{VECTOR_ADD}:softmax_kernel", {}, errors.TargetError, "lacks width, BLOCK"),
        (
            f"{VECTOR_ADD}:add_kernel",
            {"signature": "*fp32"},
            errors.ArgumentError,
            "has 1 entry and add_kernel takes 5",
        ),
        (
            f"{VECTOR_ADD}:add_kernel",
            {"signature": "*fp32, *fp32, *fp32, whole, 64"},
            errors.ArgumentError,
            "'whole' for numel",
        ),
        (
            f"{VECTOR_ADD}:add_kernel",
            {"signature": "*fp32, *fp32, *fp32, i32, 100"},
            errors.BuildError,
            "line 11: arange's range must be a power of 2",
        ),
        (str(TARGETS / "linear_relu.py"), {}, errors.TargetError, "no @triton.jit kernel"),
        ("square", {"implementation": "cpp"}, errors.UnknownNameError, "known: cuda, triton"),
        ("softmax", {"implementation": "cpp"}, errors.UnsupportedError, "runs on the CPU"),
        ("square", {"case": "17"}, errors.UnknownNameError, "unknown case '17'"),
        ("square", {"kernel": "cube"}, errors.TargetError, "no kernel called 'cube'"),
        ("square", {"dtype": torch.int32}, errors.UnknownNameError, "dtype of fuselab::square"),
        (VECTOR_ADD, {"settings": {"BLOK": 8}}, errors.UnknownNameError, "Did you mean 'BLOCK'"),
        ("square", {"signature": SOFTMAX}, errors.ArgumentError, "--signature is for a bare"),
    ],
)
def test_refusals_say_what_to_do(
    spec: str, options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        asked(spec, **options)
    assert words in str(raised.value)


def test_a_gpu_that_is_unknown() -> None:
    with pytest.raises(errors.UnknownNameError) as raised:
        architectures.architecture("sm_60")
    assert raised.value.name == "sm_60" and "sm_90" in raised.value.known
    assert architecture("sm_90a") is architecture("sm_90")


def test_cuda_does_not_compile_for_amd() -> None:
    with pytest.raises(errors.UnsupportedError, match="does not compile for gfx942"):
        asked(KERNELS_CU, "gfx942")
    found = asked("square", "gfx942", case="16384x256")
    assert [kernel.launched_by for kernel in found.kernels] == ["triton forward", "triton backward"]
    assert found.notes[0] == "cuda forward is CUDA C++, which does not compile for gfx942"
