"""One kernel or many: a block of an MLP as PyTorch calls, as fused operators, and as one kernel.

The same function in three forms, all from `fuselab eject --whole`: what each launches and moves,
what its kernels look like when they are compiled for an H100, how long compiling takes, and what of
each can be used again.

    python examples/one_kernel_or_many.py
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import fuselab
from fuselab.inspect.assembly import launches
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.summary import summarised
from fuselab.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 8192
WIDTH, HIDDEN = 128, 512
BUDGET_S = 0.5  # per timing

# ## The block
#
# A layer that widens, an activation, a layer that narrows, a scaled residual and a normalisation:
# half of a transformer's layer. Every value belongs to one row of `x`; only the weights are shared.


def block(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, scale: Tensor
) -> Tensor:
    hidden = F.gelu(x @ up + up_bias)
    hidden = x + scale * (hidden @ down + down_bias)
    return F.layer_norm(hidden, hidden.shape[-1:])


def arguments(rows: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, WIDTH), (WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,), (WIDTH,)]
    return [torch.randn(one, generator=generator).to(device, dtype) for one in shapes]


def get_inputs() -> list[Tensor]:
    return arguments(ROWS)


# ## Launches and bytes
#
# `eject` writes the package of each operator, `composed.py` with the function over them, and
# `block_whole` with the one kernel, whose page counts.

FOLDER = Path(tempfile.mkdtemp()) / "block"
EJECT = ("eject", f"{__file__}:block", "-o", str(FOLDER), "--whole")


def module(name: str) -> ModuleType:
    """Return a module of the ejected package, which is written on first use."""
    if not FOLDER.exists():
        subprocess.run([sys.executable, "-m", "fuselab", *EJECT], check=True, capture_output=True)
        sys.path.insert(0, str(FOLDER.parent))
    return importlib.import_module(f"block.{name}")


def what_is_launched_and_moved() -> None:
    module("composed")
    page = (FOLDER / "block_whole" / "page.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (\w[^|]*) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE):
        print(f"{row[0]:48} {row[1]:>2} launches {row[2]:>12} bytes")


# The operators take away what stands between the products. What remains is the hidden layer, four
# times as large as `x`: a product writes it, an operator reads and writes it, a product reads it.
# In the one kernel a program keeps its rows in registers, and the hidden layer exists only some
# columns at a time.


def the_loop_over_the_hidden_layer() -> None:
    module("composed")
    text = (FOLDER / "block_whole" / "triton_kernels.py").read_text(encoding="utf-8")
    found = re.search(r"^    for first in .*?(?=^    \w)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    print(found[0].rstrip())


# ## It computes the same
#
# The kernel runs in Triton's interpreter where there is no GPU.


def all_are_right() -> None:
    args = arguments(40)
    exact = block(*(one.double() for one in args))
    forms = {
        "PyTorch calls": block(*args),
        "fused operators": module("composed").block_of_operators(*args),
        "one kernel": interpreter.run(f"{FOLDER}/block_whole/op.py:forward_triton", *args),
    }
    for name, found in forms.items():
        error = float((found - exact).abs().max() / exact.abs().max())
        assert error < 1e-6
        print(f"{name:16} right")


# ## What the compiler makes of it
#
# Compiled for an H100 in bfloat16, which needs no GPU, in an empty cache.


def measure_kernels() -> None:
    operators = module("composed").COMPOSITION.operators
    with empty_cache():
        for op in operators:
            start = time.perf_counter()
            recorded, _ = launches.of_operator(
                op, architecture("sm_90"), implementation="triton", dtype=torch.bfloat16
            )
            seconds = time.perf_counter() - start
            kernels = [one for one in recorded.kernels if one.launched_by == "triton forward"]
            for kernel in kernels:
                found = summarised(kernel)
                assert found.occupancy is not None
                print(
                    f"{kernel.name:19}{found.registers:4} registers {found.shared_bytes:6} B shared"
                    f"{found.occupancy.warps:4} warps {sum(found.matrix.values()):4} matrix"
                    f" instructions {seconds:4.1f} s"
                )


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


# The seconds of an operator are those of its forward and its backward. Of 64 warps a multiprocessor
# holds those for which registers and shared memory are enough. The one kernel multiplies on the
# tensor cores, and its tiles take so many registers that few warps remain: nothing hides the time
# that it waits for memory, but it waits little. The operators' kernels do nothing but wait for
# memory, and have more warps to hide that.

# ## Speed
#
# On a GPU, where no gradient is wanted, the first call of `block` times the one kernel and the
# operators, and takes the faster from then on. On a CPU both are the operators: there a library's
# product keeps all cores busy, and one kernel has nothing to gain.


def time_forms() -> None:
    args = arguments(ROWS, DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    composed = module("composed")
    forms = {
        "PyTorch calls": block,
        "torch.compile": torch.compile(block),
        "fused operators": composed.block_of_operators,
        "block": composed.block,
    }
    with torch.no_grad():
        for name, function in forms.items():
            print(f"{name:16} {fuselab.time(function, *args, budget_s=BUDGET_S).median_us:9.1f} us")


# ## What stays reusable
#
# | | PyTorch calls | fused operators | one kernel |
# |---|---|---|---|
# | used by another model | all | every chain that is the same there | nothing |
# | another activation | one line | one operator is ejected again | the kernel is |
# | a gradient | yes | yes | no: it never stores what a backward reads |
# | wider than 1024 columns | yes | yes | no: a program has to hold them |
# | products | a library's, tuned for the device | the same | Triton's, in the kernel |
#
# One kernel pays where the products are small, so that a library's kernel spends its time on
# launches and on memory: narrow layers, small batches, inference. Where a product is large it is
# bound by arithmetic, the library's is the faster one, and what lies between two products is a
# small part of the time. Then the operators are the better form, and they are the only one that
# trains. On an H200 (`benchmarks/whole_forms.py`) a head of 128 columns takes 45 us in one kernel
# and 97 as operators, and a SwiGLU of 256 to 1024 columns 233 us and 154.

STEPS = (
    what_is_launched_and_moved,
    the_loop_over_the_hidden_layer,
    all_are_right,
    measure_kernels,
    time_forms,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
