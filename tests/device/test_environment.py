"""The environment in every JSON result: true facts, plain values."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import fuselab
from fuselab.device import environment


def test_facts_of_a_cpu_run() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    facts = environment.describe(torch.device("cpu"))
    after = datetime.now(UTC)
    assert facts["device"] == "cpu"
    assert facts["device_name"] == facts["cpu"] == environment.cpu_model()
    assert facts["cuda_capability"] is facts["driver"] is facts["device_memory_bytes"] is None
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["fuselab"] == fuselab.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert before <= datetime.fromisoformat(facts["date"]) <= after
    assert json.loads(json.dumps(facts)) == facts


def test_an_absent_package_has_no_version() -> None:
    assert environment.version("no-such-package-at-all") is None
    assert environment.version("torch") is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 2024\n"
            "GCC version:  gcc version 12.2.0\n",
            "470.256.02",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n",
            "580.82.07",
        ),
    ],
)
def test_driver_version_is_read_from_both_kinds_of_module(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, encoding=None: text)
    assert environment.driver_version() == expected


@pytest.mark.gpu
def test_facts_of_a_gpu_run() -> None:
    facts = environment.describe(torch.device("cuda:0"))
    major, minor = torch.cuda.get_device_capability(0)
    assert facts["device"] == "cuda:0"
    assert facts["device_name"] == torch.cuda.get_device_name(0)
    assert facts["cuda_capability"] == f"{major}.{minor}"
    assert facts["driver"].split(".")[0].isdigit()
