"""What compute-sanitizer names that is none: why `sanitize.txt` is read with an exception.

Each pattern stands beside one that differs in nothing else and is judged rightly.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH"
    ),
]

_ONE_WORD = """
import torch
from fuselab.runtime.cuda_source import CudaSource, i32

output = torch.zeros(64, device="cuda")
CudaSource("{source}").launch("one_word", (1, 1, 1), (64, 1, 1), (output, i32({together})))
assert output.cpu().eq(1).all()
"""

_SOURCE = """
__global__ void one_word(float* output, int together) {
  __shared__ float word;
  if (together || threadIdx.x == 0) word = 1.0f;  // two warps, the same value
  __syncthreads();
  output[threadIdx.x] = word;
}
"""


def _named(tool: str, script: str) -> bool:
    """Whether the tool names an error of the script, which must end well by itself."""
    alone = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", sys.executable]
    watched = subprocess.run([*words, "-c", script], capture_output=True, text=True)
    assert watched.returncode in (0, 3), watched.stdout + watched.stderr
    return watched.returncode == 3


@pytest.mark.parametrize("together", [False, True])
def test_racecheck_names_two_warps_that_store_the_same_value(
    tmp_path: Path, together: bool
) -> None:
    source = tmp_path / "one_word.cu"
    source.write_text(_SOURCE)
    assert _named("racecheck", _ONE_WORD.format(source=source, together=int(together))) is together
