"""The arithmetic of launch grids, and the limits of a GPU that they are sized by."""

from __future__ import annotations

import pytest
import torch

from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two


def test_ceil_div_rounds_up():
    assert [ceil_div(a, 4) for a in (0, 1, 3, 4, 5, 2**53 + 1)] == [0, 1, 1, 1, 2, 2**51 + 1]


def test_power_of_two_is_the_least_that_is_enough():
    numbers = (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)
    assert [power_of_two(number) for number in numbers] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    assert [power_of_two(number, 16, 64) for number in (0, 16, 17, 64, 65)] == [16, 16, 32, 64, 64]


def test_programs_under_the_interpreter_run_in_turn_and_have_no_limit():
    assert multiprocessors(torch.device("cpu")) == 1
    assert shared_bytes(torch.device("cpu")) == 2**30


@pytest.mark.gpu
def test_limits_are_the_devices():
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    assert multiprocessors(device) == properties.multi_processor_count
    assert 48 * 1024 <= shared_bytes(device) < 2**20
