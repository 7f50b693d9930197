"""Build fuselab's add_mul_activation as a C++ extension in three ways, and try each.

    python examples/extension/build.py [-o build/extension] [--cuda]

It is built by ``load_inline`` in the running program, as a wheel from ``setup.py`` (installed into
a folder and imported from there), and with CMake and Ninja against libtorch, where a native test
runs it at 8 x 10 and at large sizes. This needs a C++ compiler, CMake and Ninja; ``--cuda`` needs
nvcc and a GPU. Each build takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import fuselab

HERE = Path(__file__).resolve().parent
KERNELS = Path(fuselab.ops.__path__[0])
TRY_THE_WHEEL = """
import torch, fuselab_extension
x = torch.tensor([[-3.0, 1.0]])
print(torch.ops.fuselab_extension.add_mul_activation(x, x, None, 0.5, "relu").tolist())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("build/extension"))
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels too")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    by_load_inline(output / "load_inline", options.cuda)
    by_setup(output / "wheel", options.cuda)
    by_cmake(output / "cmake", options.cuda)


def by_load_inline(folder: Path, cuda: bool) -> None:
    print("== load_inline", flush=True)
    flags = ["--cuda"] if cuda else []
    run(sys.executable, HERE / "load_inline.py", "--build-directory", folder, *flags)


def by_setup(folder: Path, cuda: bool) -> None:
    print("== setup.py", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    # a copy, because setuptools builds beside its sources
    shutil.copytree(HERE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    environment = {"FUSELAB_OPS": str(KERNELS), "FUSELAB_CUDA": str(int(cuda))}
    build = ("wheel", "-q", "--no-build-isolation", *offline)
    run(*pip, *build, "-w", folder, folder / "source", **environment)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "-q", *offline, "--target", folder / "site", wheel)
    run(sys.executable, "-c", TRY_THE_WHEEL, PYTHONPATH=str(folder / "site"))


def by_cmake(folder: Path, cuda: bool) -> None:
    print("== CMake and Ninja", flush=True)
    scripts = sysconfig.get_path("scripts")  # pip puts cmake and ninja there
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    definitions = {
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "FUSELAB_OPS": KERNELS,
        "FUSELAB_CUDA": "ON" if cuda else "OFF",
    }
    if cuda:
        major, minor = torch.cuda.get_device_capability()
        definitions["CMAKE_CUDA_ARCHITECTURES"] = f"{major}{minor}"
        definitions["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    listed = [f"-D{name}={value}" for name, value in definitions.items()]
    cmake = shutil.which("cmake", path=path) or "cmake"
    run(cmake, "-G", "Ninja", "-S", HERE, "-B", folder, "--log-level=WARNING", *listed, PATH=path)
    run(cmake, "--build", folder, PATH=path)
    run(folder / "native_test")


def run(*command: str | Path, **environment: str) -> None:
    """Run a command with its output on the screen; exit if it fails."""
    try:
        subprocess.run([*map(str, command)], check=True, env={**os.environ, **environment})
    except FileNotFoundError:
        sys.exit(f"{command[0]} was not found; install it (pip install cmake ninja) and try again.")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode or 1)


if __name__ == "__main__":
    main()
