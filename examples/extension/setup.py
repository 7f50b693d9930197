"""A wheel of the operator as a PyTorch C++ extension.

    pip wheel --no-build-isolation --no-deps -w dist examples/extension

``FUSELAB_CUDA=1`` adds the CUDA kernels (needs nvcc and a CUDA build of torch). After installation,
``import fuselab_extension`` registers ``torch.ops.fuselab_extension.add_mul_activation``. The CPU
kernels are built for any x86-64 or Arm machine; ``CFLAGS=-march=native`` builds them for this one.
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

HERE = Path(__file__).resolve().parent
KERNELS = Path(os.environ.get("FUSELAB_OPS", HERE.parents[1] / "src" / "fuselab" / "ops"))
WITH_CUDA = os.environ.get("FUSELAB_CUDA", "0") == "1"

extension = (CUDAExtension if WITH_CUDA else CppExtension)(
    name="fuselab_extension._library",
    sources=["extension.cpp", "cpu_launches.cpp", *(["cuda_launches.cu"] if WITH_CUDA else [])],
    include_dirs=[str(HERE), str(KERNELS)],
    define_macros=[("FUSELAB_WITH_CUDA", None)] if WITH_CUDA else [],
    extra_compile_args={
        # Python's own flags ask for debug information, which doubles the compile time and adds 3
        # MB.
        "cxx": ["-std=c++20", "-O3", "-g0", "-fopenmp", "-fno-math-errno"],
        "nvcc": ["-std=c++20", "-O3"],
    },
    extra_link_args=["-fopenmp"],
    py_limited_api=False,
)

setup(
    name="fuselab-extension",
    version="0.1.0",
    description="fuselab's add_mul_activation as a PyTorch C++ extension",
    packages=["fuselab_extension"],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
)
