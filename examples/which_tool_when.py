"""Which tool when: torch.compile, Triton, CUDA, C++, with their costs.

The cost of each before its first result, in every call, and in lines of code to own; and a list to
decide by.

    python examples/which_tool_when.py
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fuselab
from fuselab.runtime.cuda_source import CudaSource

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.3  # per timing
HERE = Path(__file__).resolve().parent


def relu_of_sum(input: Tensor, update: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(input + 0.5 * update + bias)


@triton.jit
def relu_of_sum_kernel(input, update, bias, output, numel, columns, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < numel
    total = tl.load(input + offset, mask) + 0.5 * tl.load(update + offset, mask)
    total += tl.load(bias + offset % columns, mask)
    tl.store(output + offset, tl.where(total < 0, 0.0, total), mask)


# ## Before the first result
#
# Every tool compiles, and keeps the result on disk. The first figure is with empty caches, as on a
# new machine or after an update; the second is the time of the third process. None of these needs a
# GPU: Triton and NVRTC compile for an H200 here.


def compile_with_inductor() -> None:
    torch.compile(relu_of_sum)(*(torch.randn(64, 64) for _ in range(3)))


def compile_with_triton() -> None:
    pointers = dict.fromkeys(("input", "update", "bias", "output"), "*fp32")
    signature = {**pointers, "numel": "i32", "columns": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=relu_of_sum_kernel, signature=signature, constexprs={"BLOCK": 1024})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def compile_with_nvrtc() -> None:
    CudaSource(HERE / "softmax_four_ways.cu").compile("rows<float>", "sm_90")


def compile_with_the_cpp_compiler() -> None:
    fuselab.ops.softmax(torch.randn(64, 64), implementation="cpp")


COMPILERS: dict[str, Callable[[], None]] = {
    "torch.compile, for a CPU": compile_with_inductor,
    "Triton, for sm_90": compile_with_triton,
    "CUDA C++ by NVRTC, for sm_90": compile_with_nvrtc,
    "C++ by g++, and its launcher": compile_with_the_cpp_compiler,
}


def seconds(tool: str, caches: str) -> float:
    """Return the seconds of a compilation in a separate process, without imports."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSELAB_CACHE")
    environment = {**os.environ, **{name: f"{caches}/{name}" for name in names}}
    words = (sys.executable, __file__, tool)
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def time_first_results() -> None:
    print(f"{'seconds':30} new machine  later process")
    for tool in COMPILERS:
        with tempfile.TemporaryDirectory() as caches:
            first, _, later = (seconds(tool, caches) for _ in range(3))
        print(f"{tool:30} {first:11.2f} {later:12.2f}")


# ## In every call
#
# Small tensors cost only host time. This is a 4 x 4 on the machine that printed this page:


def time_small_calls() -> None:
    input, update = torch.randn(2, 4, 4, device=DEVICE)
    bias = torch.randn(4, device=DEVICE)
    ways: dict[str, Callable[[], Tensor]] = {
        "eager, 4 operations": lambda: relu_of_sum(input, update, bias),
        "torch.compile": compiled_for(input, update, bias),
        "fuselab": lambda: fuselab.ops.add_mul_activation(input, update, bias, 0.5, "relu"),
    }
    with torch.no_grad():
        for name, call in ways.items():
            timing = fuselab.time(call, device=DEVICE, mode="host", budget_s=BUDGET_S)
            print(f"{name:20} {timing.median_us:7.2f} us of host time")


def compiled_for(*args: Tensor) -> Callable[[], Tensor]:
    compiled = torch.compile(relu_of_sum, dynamic=False)
    return lambda: compiled(*args)


# The same function on an H200's host. `triton` and `cuda` use fuselab's C++ launcher; Triton's own
# launch from Python is not among them.
#
# [host: add_mul_activation forward float32]
#
# ## To own
#
# Lines of code without blanks and comments, counted in this folder. Gradients, strides, 64-bit
# offsets and tests are not counted; `fuselab check` finds out whether they are missing.


def lines_to_own() -> None:
    here, softmax = Path(__file__).resolve(), HERE / "softmax_four_ways.py"
    parts = {
        "three operations, eager or compiled": lines_of(here, "relu_of_sum"),
        "the same, a Triton kernel": lines_of(here, "relu_of_sum_kernel"),
        "softmax, naive": lines_of(softmax, "naive"),
        "softmax, a Triton kernel and its launcher": lines_of(softmax, "row_kernel")
        + lines_of(softmax, "triton_forward"),
        "softmax, a CUDA kernel and its launcher": code_lines(softmax.with_suffix(".cu"), "//")
        + lines_of(softmax, "cuda_forward"),
    }
    for what, lines in parts.items():
        print(f"{what:42} {lines:3} lines")


def lines_of(path: Path, name: str) -> int:
    """Count the lines of a function at the top level of a file, without its comments."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return len(ast.unparse(node).splitlines())
    raise ValueError(name)


def code_lines(path: Path, comment: str) -> int:
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith(comment) for line in lines)


# ## When
#
# - **A chain of pointwise operations, perhaps with a reduction: `torch.compile`.** It finds the
#   kernel that you would write, and finds it again when the model changes.
# - **Graph breaks, ever new shapes, a start that must be quick: eager**, or an operator of
#   `fuselab.ops`. A compilation per shape costs seconds.
# - **A fusion that the compiler does not find: Triton.** A row kept on chip, padding left out, a
#   product that is never written to memory, your own epilogue: you write tiles and masks, its
#   compiler does the rest, for several GPUs from one source.
# - **A row over several blocks, warps with different work, instructions that Triton does not offer
#   (clusters, TMA, wgmma by hand): CUDA.** It gives you the whole machine and its pitfalls.
# - **Calls of a few microseconds: a CUDA graph** around the code that you have. No kernel is faster
#   than its launch.
# - **A CPU: an operator of `fuselab.ops`** where there is one: `auto` takes its C++ where that
#   measured faster than PyTorch. Else `torch.compile`; ATen's own loops are hard to beat.
# - **One operation that a library has: the library.** It reads and writes the same bytes.
#
# Work in this order: `fuselab profile` shows whether there is anything to gain, `fuselab explain`
# what the compiler already does, `fuselab.fuse` in Python and `fuselab bench` what is faster,
# `fuselab check` what is right.
# Each was worth it somewhere on an H200:
#
# [figures: add_mul_activation forward float32]
#
# [figures: softmax forward float32]
#
# [figures: dot_interaction forward+backward float32]

STEPS = (time_first_results, time_small_calls, lines_to_own)


def main() -> None:
    if len(sys.argv) > 1:  # a child of `seconds`
        begin = perf_counter()
        COMPILERS[sys.argv[1]]()
        print(perf_counter() - begin)
        return
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
