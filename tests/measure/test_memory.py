"""Peak memory, poison, energy and fresh processes."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

from fuselab.measure.energy import joules_per_call
from fuselab.measure.fresh import PINNED_ALLOCATION, allocation_is_pinned, run_pinned
from fuselab.measure.memory import peak_bytes, poison

CPU = torch.device("cpu")
MIB = 1 << 20


def test_peak_counts_what_is_held_at_once_above_the_inputs() -> None:
    values = torch.ones(256, 1024)
    assert peak_bytes(lambda: torch.relu(values), CPU) == MIB
    assert peak_bytes(lambda: torch.relu(torch.relu(values)), CPU) == 2 * MIB
    # The first intermediate is gone before the third result is made.
    assert peak_bytes(lambda: torch.relu(torch.relu(torch.relu(values))), CPU) == 2 * MIB
    assert peak_bytes(lambda: values.view(-1), CPU) == 0


def test_peak_leaves_stderr_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    peak_bytes(lambda: torch.ones(1), CPU)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_poison_takes_any_dtype_and_changes_no_tensor(dtype: torch.dtype) -> None:
    output = torch.ones(4, 4, dtype=dtype)
    poison([output])
    assert bool((output == 1).all())


def test_energy_is_not_counted_on_the_cpu() -> None:
    assert joules_per_call(lambda: None, CPU) is None


def test_a_fresh_process_has_its_allocation_pinned_and_returns_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in PINNED_ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    assert not allocation_is_pinned()
    check = "import os; from fuselab.measure import fresh; assert fresh.allocation_is_pinned()"
    assert run_pinned("timeit", ["-n1", "-r1", "-s", check, "pass"]) == 0
    assert run_pinned("json.tool", ["no such file"]) == 2


@pytest.mark.gpu
def test_peak_on_cuda_is_the_allocators() -> None:
    device = torch.device("cuda")
    values = torch.ones(1024, 1024, device=device)
    assert peak_bytes(lambda: torch.relu(values), device) == 4 * MIB
    assert peak_bytes(lambda: torch.relu(torch.relu(values)), device) == 8 * MIB


@pytest.mark.gpu
@pytest.mark.timing
def test_energy_of_a_matrix_product_is_plausible() -> None:
    pynvml = pytest.importorskip("pynvml")
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    calls = 0

    def product() -> None:
        nonlocal calls
        calls += 1
        left @ left

    begin = perf_counter()
    joules = joules_per_call(product, torch.device("cuda"))
    elapsed_s = perf_counter() - begin
    if joules is None:
        pytest.skip("this GPU has no energy counter")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    watts = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    pynvml.nvmlShutdown()
    # 137 GFLOP at 0.1 pJ each, or more. Whoever else runs on the GPU, it takes no more than its
    # limit for as long as this took.
    assert 0.0137 < joules < 1.1 * watts * elapsed_s / calls
