"""Build the operator as a PyTorch C++ extension while the program runs, and use it.

    python examples/extension/load_inline.py [--build-directory D] [--cflags "-O3 ..."] [--cuda]

``torch.utils.cpp_extension.load_inline`` compiles fuselab's own kernels, from a main.cpp and a
cuda.cu that it writes, with the given flags and into the given folder (by default torch's); a
second run finds the library there.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import torch
from torch.utils.cpp_extension import load_inline

import fuselab

HERE = Path(__file__).resolve().parent
ACTIVATIONS = ("identity", "relu", "leaky_relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
CFLAGS = "-O3 -march=native -fopenmp -fno-math-errno"


def build(build_directory: str | None, cflags: str, cuda: bool) -> None:
    """Compile and load the operator ``torch.ops.fuselab_extension.add_mul_activation``."""
    if build_directory is not None:
        Path(build_directory).mkdir(parents=True, exist_ok=True)
    load_inline(
        name="fuselab_extension",
        cpp_sources=['#include "cpu_launches.cpp"\n#include "extension.cpp"'],
        cuda_sources=['#include "cuda_launches.cu"'] if cuda else [],
        extra_include_paths=[str(HERE), *map(str, fuselab.ops.__path__)],
        extra_cflags=[*shlex.split(cflags), *(["-DFUSELAB_WITH_CUDA"] if cuda else [])],
        extra_ldflags=["-fopenmp"],
        build_directory=build_directory,
        with_cuda=cuda,
        is_python_module=False,
        no_implicit_headers=True,
    )


def main() -> None:
    """Compare every activation and dtype, with and without a bias, with the library's operator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-directory", help="where the library is built and found again")
    parser.add_argument("--cflags", default=CFLAGS, help=f"for the C++ compiler; {CFLAGS!r}")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels too (needs nvcc)")
    options = parser.parse_args()
    build(options.build_directory, options.cflags, options.cuda)

    extension = torch.ops.fuselab_extension.add_mul_activation
    device = "cuda" if options.cuda else "cpu"
    implementation = "cuda" if options.cuda else "cpp"
    trials = [(torch.float32, name, True) for name in ACTIVATIONS]
    trials += [(dtype, "relu", True) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    trials += [(torch.float32, "relu", False)]
    for dtype, name, has_bias in trials:
        bias = torch.randn(10, device=device).to(dtype) if has_bias else None
        leaves = [torch.randn(8, 10, device=device).to(dtype).requires_grad_() for _ in range(2)]
        arguments = (*leaves, bias, 0.5, name)
        ours = fuselab.ops.add_mul_activation(*arguments, implementation=implementation)
        theirs = extension(*arguments)
        assert torch.equal(ours, theirs), (dtype, name)
        upstream = torch.randn(8, 10, device=device).to(dtype)
        for one, other in zip(
            torch.autograd.grad(ours, leaves, upstream),
            torch.autograd.grad(theirs, leaves, upstream),
            strict=True,
        ):
            assert torch.equal(one, other), (dtype, name)
    print(f"the extension gives the library's bits in {len(trials)} calls, forward and backward")


if __name__ == "__main__":
    main()
