"""The interpreter's scans and reductions by slices give what it gives element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuselab.runtime import interpreter

KERNELS = Path(__file__).with_name("scanning_triton_kernels.py")


def both(name: str, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a kernel gives by slices and element by element."""
    found = interpreter.run(f"{KERNELS}:run_both", name, *args)
    return found[0], found[1]


@pytest.mark.parametrize("shape", [(8, 16), (1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kernel", ["runs", "backward_runs", "largest", "largest_kept", "decided"])
def test_slices_give_what_elements_give(kernel: str, shape: tuple[int, int], axis: int) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    values = torch.randint(-50, 50, shape, generator=generator).float()
    begins = torch.randint(0, 2, shape, generator=generator, dtype=torch.int32)
    by_slices, by_element = both(kernel, values, begins, axis)
    assert torch.equal(by_slices, by_element) and by_slices.abs().sum() > 0


def test_all_axes_are_reduced_at_once() -> None:
    values = torch.randperm(64).float().view(4, 16) - 40
    by_slices, by_element = both("largest_of_all", values, values.int(), 0)
    assert torch.equal(by_slices, by_element) and by_slices[0, 0] == -40


def test_a_long_scan_takes_few_calls() -> None:
    """Element by element it takes 1,023 calls of the kernel's function for each of 8 columns."""
    assert interpreter.run(f"{KERNELS}:calls_of_a_scan", torch.ones(1024, 8)) == 10
