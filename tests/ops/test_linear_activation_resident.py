"""linear_activation by wgmma with its weight in shared memory, the input shared by clusters."""

from __future__ import annotations

import pytest
import torch
from linear_cases import operands
from pointwise_cases import assert_within_bar

from fuselab.errors import UnsupportedError
from fuselab.ops import linear_activation
from fuselab.ops.linear_activation import resident_launch
from fuselab.ops.linear_activation.reference import reference

configs = pytest.mark.parametrize("config", resident_launch._CONFIGS, ids=str)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is for compute capability 9.0")


def assert_forward(input, weight, bias, activation="relu", config=None, what=""):
    """The kernel's output against float64, in eager's measure."""
    ours = resident_launch.forward(input, weight, bias, activation, config)
    assert ours.dtype == input.dtype and ours.is_contiguous()
    exact = (None if value is None else value.double() for value in (input, weight, bias))
    eager = reference(input, weight, bias, activation)
    assert_within_bar(ours, eager, reference(*exact, activation), what or str(config))


def fits(depth, config):
    return depth <= resident_launch._weight_steps(config.columns) * 64


# Without a GPU.


def test_every_candidate_fits_a_block_of_hopper():
    for config in resident_launch._CONFIGS:
        assert resident_launch.shared_bytes(config) <= 227 * 1024, config
        assert 128 // config.cluster % 8 == 0  # parts begin at a swizzle's 8 rows


@pytest.mark.parametrize(
    ("columns", "depth", "expected"),
    [
        *((256, 512, (128, 2)), (256, 513, (64, 4)), (256, 1024, (64, 4)), (256, 1025, None)),
        *((64, 256, (64, 1)), (128, 64, (128, 1)), (129, 64, (128, 2)), (1, 1, (64, 1))),
    ],
)
def test_the_default_reads_the_input_least_often(columns, depth, expected):
    found = resident_launch.candidates(columns, depth)
    assert len(set(found)) == len(found)
    first = (found[0].columns, found[0].cluster) if found else None
    assert first == expected


# On a GPU, what is simplest first: a fault there is the reason of all that follow.


@pytest.mark.gpu
@configs
def test_one_tile(hopper, config):
    """One step in depth, one tile: the operands' places and the accumulators' fragments."""
    device = torch.device("cuda")
    eye = torch.eye(64, device=device, dtype=torch.bfloat16)
    numbered = torch.arange(128 * 64, device=device).view(128, 64).remainder(251).bfloat16()
    ours = resident_launch.forward(numbered, eye, None, "identity", config)
    torch.testing.assert_close(ours, numbered, rtol=0, atol=0)
    ours = resident_launch.forward(eye, numbered, None, "identity", config)
    torch.testing.assert_close(ours, numbered.t().contiguous(), rtol=0, atol=0)


@pytest.mark.gpu
@configs
def test_rings_and_tiles(hopper, config):
    """More steps than slots, more tiles than blocks, one group of warps without any, every edge."""
    for rows, depth, columns in (
        (128, 64 * 8, 256),
        (256, 64 * 7, 256),
        (128 * 3, 64 * 6, 64),
        (128 * 150, 64, 256),
        (128 * 301, 64 * 3, 512),
        (128 * 133, 64 * 8, 128),
        (128 * 20, 64 * 16, 264),
        (1, 8, 8),
        (65, 72, 136),
        (129, 512, 264),
        (300, 24, 1000),
        (20_000, 200, 328),
    ):
        if fits(depth, config):
            what = f"{config} {rows}x{depth}->{columns}"
            args = operands(rows, depth, columns, torch.bfloat16, "cuda")
            assert_forward(*args, config=config, what=what)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("depth", [8, 24, 64, 72, 512])
def test_shapes(hopper, dtype, depth):
    sizes = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    for rows in sizes:
        for columns in (*sizes, 8, 72):
            args = operands(rows, depth, columns, dtype, "cuda", bias=rows % 2 == 1)
            assert_forward(*args, what=f"{rows}x{depth}->{columns}")


@pytest.mark.gpu
@configs
def test_repeats_to_the_bit(hopper, config):
    """A race of loads, multiplications or stores would show in one of many launches."""
    args = (*operands(128 * 600 + 5, 512, 256, torch.bfloat16, "cuda"), "relu", config)
    first = resident_launch.forward(*args)
    for _ in range(100):
        assert torch.equal(resident_launch.forward(*args), first)


@pytest.mark.gpu
def test_a_weight_too_deep_is_refused(hopper):
    args = operands(64, 1032, 64, torch.bfloat16, "cuda")
    with pytest.raises(UnsupportedError, match="depth K is 1032"):
        linear_activation(*args, implementation="resident")
