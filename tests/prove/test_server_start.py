"""Workers are forked from a process that has not asked the CUDA driver for anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fuselab.cli.main import run
from fuselab.prove import server_start

# A build of torch that knows CUDA, whose driver may not be asked.
IMPORTS = """
import torch
from fuselab.prove.server_start import driver_not_asked

def driver():
    raise AssertionError("the driver was asked for its GPUs")

torch._C._cuda_getDeviceCount = driver
with driver_not_asked(3):
    assert torch._C._cuda_getDeviceCount() == 3
    import fuselab.prove.worker_server
assert torch._C._cuda_getDeviceCount is driver
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="only a CUDA build of torch has a driver")
def test_its_imports_do_not_ask_the_driver() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_build_without_cuda_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getDeviceCount", raising=False)
    with server_start.driver_not_asked(2):
        assert not hasattr(torch._C, "_cuda_getDeviceCount")


@pytest.mark.gpu
def test_a_worker_uses_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "square", "--quick", "--implementation", "triton", "--dtype", "float32"]
    status = run([*words, "--device", "cuda", "--seed", "7703", "--budget", "20"])
    printed = capsys.readouterr()
    assert status == 0, printed
