"""Run the operators', stories' and training tests as CPUs with fewer instructions would run them.

python tools/test_capabilities.py [--below NAME] [pytest's arguments]

PyTorch picks its CPU kernels by the machine's instruction set, and so do the C++ kernels here; both
take a lower one from the environment. Each set below the machine's own (which ``make test`` runs)
gets one run and one summary line; if a test fails, the run's whole output comes before it. Compiled
kernels are shared between the runs. Triton's tests are left to ``make test``, because its
interpreter computes in numpy and takes half of the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
CAPABILITIES = ("default", "avx2", "avx512")  # as PyTorch names them, each with those before it
FOLDERS = ("tests/ops", "tests/nn", "tests/models", "tests/examples", "tests/train")


def below(own: str) -> tuple[str, ...]:
    """Return the other instruction sets that a CPU of ``own`` can run; none if it is unknown."""
    return CAPABILITIES[: CAPABILITIES.index(own)] if own in CAPABILITIES else ()


def run(capability: str, arguments: Sequence[str]) -> bool:
    """Run the tests under ``capability``, print their summary line, and return whether they
    passed."""
    # The first is PyTorch's, the second is that of the C++ kernels.
    asked = {"ATEN_CPU_CAPABILITY": capability, "FUSELAB_CPU_CAPABILITY": capability}
    command = [sys.executable, "-m", "pytest", "-q", "-r", "fE", "-n", "2"]
    command += ["--ignore-glob=*_triton.py", *FOLDERS, *arguments]
    ended = subprocess.run(
        command, cwd=CLONE, env=os.environ | asked, capture_output=True, text=True
    )
    passed = ended.returncode == 0
    if not passed:
        print(ended.stdout, ended.stderr, sep="\n")
    lines = ended.stdout.strip().splitlines()
    print(f"{capability}: {lines[-1] if lines else 'nothing was run'}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--below", metavar="NAME", help="instead of this machine's own")
    options, arguments = parser.parse_known_args()
    own = options.below
    if own is None:
        import torch

        own = torch.backends.cpu.get_cpu_capability().lower()
    results = [run(capability, arguments) for capability in below(own)]
    print(f"{own}: this machine's own, which make test runs")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
