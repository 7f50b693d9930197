"""lora_linear's forward on Hopper's matrix unit: what it takes, and on a GPU its values."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lora_cases import operands
from pointwise_cases import assert_within_bar

from fuselab.ops import lora_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.linear_activation import wgmma_launch as linear
from fuselab.ops.lora_linear import triton_launch, wgmma_launch
from fuselab.ops.lora_linear.operands import Layer
from fuselab.ops.lora_linear.reference import reference
from fuselab.runtime.fallback import strict

on_gpu = partial(operands, device="cuda", dtype=torch.bfloat16)


def takes(x, *arguments):
    return wgmma_launch.takes(x, Layer(*arguments))


def test_what_it_takes(monkeypatch):
    monkeypatch.setattr(linear, "is_hopper", lambda device: True)
    half = partial(operands, dtype=torch.bfloat16)
    fits = half(130, 64, 520, 16)
    assert takes(*fits) and takes(*half(1, 8, 8, 8))
    for args in (
        operands(8, 8, 8, 8, dtype=torch.float16),
        half(8, 8, 8, 12),
        half(0, 8, 8, 8),
        half(8, 12, 8, 8),
        (*fits[:4], fits[4].t().contiguous().t(), *fits[5:]),
    ):
        assert not takes(*args)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is for compute capability 9.0")
    with strict():
        yield


def check(args):
    """Against float64 in eager's measure."""
    assert takes(*args)
    exact = reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))
    assert_within_bar(wgmma_launch.forward(*args), reference(*args), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
def test_the_update_alone(hopper, rank):
    """Without a weight the output is S Bᵀ: the one step behind the others, and nothing past it."""
    args = on_gpu(300, 136, 264, rank, "identity", has_bias=False)
    args[1].zero_()
    check(args)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [(1, 8, 8), (63, 64, 72), (128, 64, 256), (129, 72, 264), (300, 1000, 1000), (20001, 200, 328)],
    ids=str,
)
def test_sizes(hopper, sizes):
    for rank in (8, 16):
        check(on_gpu(*sizes, rank))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_scales(hopper, activation):
    for has_bias, scale in ((True, 0.7), (False, -1.7), (True, 0.0)):
        varied = {"has_bias": has_bias, "scale": scale}
        check(on_gpu(1031, 272, 520, 16, activation, **varied))


@pytest.mark.gpu
def test_a_scale_behind_a_pointer_views_and_leading_dimensions(hopper):
    args = on_gpu(300, 144, 136, 16)
    expected = wgmma_launch.forward(*args)
    pointed = (*args[:5], torch.full((), 0.5, device="cuda"), args[6])
    assert torch.equal(wgmma_launch.forward(*pointed), expected)
    cube = (args[0].view(3, 100, 144), *args[1:])
    assert torch.equal(lora_linear(*cube, implementation="cuda"), expected.view(3, 100, 136))
    x, weight, bias, a, b, *rest = args
    check((x[3::2, 16:88], weight[:, 8:80], bias, a[:8, :72], b[:, 8:], *rest))


@pytest.mark.gpu
def test_triton_takes_the_others(hopper):
    for args in (on_gpu(257, 64, 72, 12), on_gpu(257, 64, 72, 8, dtype=torch.float16)):
        assert torch.equal(wgmma_launch.forward(*args), triton_launch.forward(*args))


@pytest.mark.gpu
def test_results_repeat_to_the_bit(hopper):
    args = on_gpu(128 * 200 + 5, 520, 520, 16)
    first = wgmma_launch.forward(*args)
    for _ in range(20):
        assert torch.equal(wgmma_launch.forward(*args), first)
