"""Profile and explain on a real GPU: device times, launches, transfers, waits."""

from pathlib import Path

import pytest
import torch

from fuselab import ops
from fuselab.inspect import targets
from fuselab.inspect.assembly import launches
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.explain import explain_target
from fuselab.inspect.profile import profile, profile_target

pytestmark = pytest.mark.gpu

TARGETS = Path(__file__).parent / "targets"


@pytest.fixture(scope="module")
def trained():
    target = targets.load(str(TARGETS / "linear_relu.py"), "cuda")
    return profile_target(target, backward=True, schedule=(2, 1, 5, 1))


def test_split_and_tables_of_a_training_step(trained):
    split = trained.split
    assert trained.device == "cuda"
    assert split.step_us == pytest.approx(
        split.compute_us + split.memory_us + split.overhead_us + split.data_us
    )
    assert split.compute_us > 0 and split.memory_us > 0 and split.data_us > 0
    assert 0 < trained.tables.busy_share < 1
    products = [r for r in trained.tables.operators if r.name in ("aten::addmm", "aten::mm")]
    assert sum(r.calls for r in products) == 5
    assert all(r.self_device_us > 0 for r in products)
    launched = [k for k in trained.tables.kernels if k.kind == "kernel"]
    assert all(k.grid and k.block for k in launched)
    assert trained.matched == 1.0


def test_backward_lines_are_found_on_autograds_thread(trained):
    lines = {row.name: row for row in trained.tables.lines}
    assert lines["linear_relu.py:14"].backward_us > 0
    assert lines["linear_relu.py:15"].backward_us > 0


def test_memory_is_the_devices(trained):
    assert trained.tables.memory.device == "cuda"
    assert trained.tables.memory.peak_bytes > 0
    assert trained.tables.memory.start_bytes > 0


def test_a_sync_is_charged_with_what_it_waited_for():
    weights = torch.randn(4096, 4096, device="cuda")
    with profile(schedule=(2, 1, 3, 1)) as p:
        for _ in range(6):
            product = weights @ weights
            product.sum().item()
            p.step()
    (found,) = [f for f in p.result.findings if f.kind == "host sync"]
    assert "it waits for aten::matmul" in found.title or "it waits for aten::mm" in found.title
    assert 0 < found.share < 0.3  # the device idles after it; the wait itself is the product


def test_a_pageable_copy_is_found():
    batch = torch.randn(1024, 1024)
    with profile(schedule=(2, 1, 3, 1)) as p:
        for _ in range(6):
            batch.to("cuda") + 1
            p.step()
    (found,) = [f for f in p.result.findings if f.kind == "pageable copy"]
    assert "4.19 MB" in found.title
    assert p.result.split.data_us > 0


def test_a_quadratic_look_up_is_found():
    ids, known = torch.arange(4096, device="cuda"), torch.arange(32768, device="cuda")
    with profile(schedule=(2, 1, 3, 1)) as p:
        for _ in range(6):
            equal = ids.unsqueeze(1) == known.unsqueeze(0)
            equal.int().argmax(1)
            p.step()
    (found,) = [f for f in p.result.findings if f.kind == "quadratic look-up"]
    assert "134,217,728 comparisons" in found.title
    assert found.share > 0.1  # a byte written and read and an int written, and argmax reads that


def test_explain_times_every_triton_kernel():
    target = targets.load(f"{TARGETS / 'sins.py'}:Breaks", "cuda")
    facts = explain_target(target, backward=True).facts
    assert facts["graphs"] == 2
    fused = [k for k in facts["kernels"] if k["kind"] == "fused"]
    assert fused and all(k["name"].startswith("triton_") for k in fused)
    assert all(k["us"] and k["bytes"] and k["lines"] for k in fused)
    assert all(k["us"] for k in facts["kernels"])
    assert 0 < facts["compiled"]["busy_share"] <= 1


def test_asm_shows_kernels_for_gpus_that_are_not_there():
    """PyTorch would allocate on the GPU that a fake tensor is said to be on."""
    found, _ = launches.of_operator(
        ops.contract("softmax"), architecture("sm_90"), dtype=torch.bfloat16
    )
    assert {one.launched_by for one in found.kernels} >= {"triton forward", "cuda backward"}
    assert torch.ones(3, device="cuda").sum().item() == 3
