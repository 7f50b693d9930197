"""Files as users have them, from which packages are made."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = {
    "rows.py": '''
import torch
import triton
import triton.language as tl


@triton.jit
def squared(x):
    return x * x


# A program owns one row.
@triton.jit
def rms_kernel(x_ptr, w_ptr, out_ptr, rstd_ptr, stride_x, stride_out, n_cols, eps,
               BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squared(x), 0) / n_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(out_ptr + row * stride_out + cols, x * rstd * w, mask=mask)


def rms(x, w, eps=1e-6):
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x.float() * rstd[:, None] * w.float()).to(x.dtype), rstd
''',
    "reference.py": '''
import torch

from rows import rms


def get_inputs():
    return [torch.randn(5, 33), torch.randn(33)]
''',
    "scaled.py": '''
import torch
import triton
import triton.language as tl
from shared import FACTOR

UNUSED = open("/nowhere") if False else None


@triton.jit
def scale_kernel(x, out, numel, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, offsets < numel) * factor, offsets < numel)


def scaled(x, block=64):
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), FACTOR, BLOCK=block)
    return out


def plain(x):
    return x * FACTOR


def get_inputs():
    return [torch.arange(100.0)]


if __name__ == "__main__":
    raise SystemExit(scaled(*get_inputs()))
''',
    "shared.py": "FACTOR = 3.0\nOTHER = 4.0\n",
    "saxpy.cu": '''
#include <torch/extension.h>
#include <cuda_runtime.h>

#define THREADS 128

template <typename scalar_t>
__device__ __forceinline__ scalar_t twice(scalar_t x) { return x + x; }

template <typename scalar_t>
__global__ void __launch_bounds__(THREADS) saxpy_kernel(
    const scalar_t* __restrict__ x, const scalar_t* __restrict__ y, scalar_t* __restrict__ out,
    float a, int n) {
  // One thread per element; <<<this>>> is no launch.
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * (float)x[i] + (float)twice(y[i]);
}

__global__ void saxpy_backward(const float* grad, float* grad_x, float a, int n) {}

torch::Tensor saxpy(torch::Tensor x, torch::Tensor y, double a) {
  auto out = torch::empty_like(x);
  const int n = x.numel();
  const int blocks = (n + THREADS - 1) / THREADS;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "saxpy", ([&] {
    saxpy_kernel<scalar_t><<<blocks, THREADS>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(),
                                                out.data_ptr<scalar_t>(), (float)a, n);
  }));
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("saxpy", &saxpy); }
''',
    "saxpy.py": '''
import torch


def saxpy(x, y, *, a=2.0):
    return a * x + 2 * y


def get_inputs():
    return [torch.randn(100), torch.randn(100)]
''',
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the users' files, which is the working one."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.lstrip())
    monkeypatch.chdir(tmp_path)
    return tmp_path
