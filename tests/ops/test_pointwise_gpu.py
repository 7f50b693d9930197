"""The Triton and CUDA kernels of the pointwise operators on a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from pointwise_cases import (
    DENSE_IN_MEMORY,
    EXACT,
    LAYOUTS,
    assert_float64,
    assert_within_bar,
    check,
    normal,
    writable,
)

from fuselab.ops import (
    add_mul_activation,
    add_mul_activation_,
    bias_activation,
    bias_activation_,
)
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops.add_mul_activation import configs, cuda_launch, layout, triton_launch
from fuselab.ops.add_mul_activation.op import CUDA
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu

KERNELS = {
    "triton": (triton_launch.forward, triton_launch.backward),
    "cuda": (partial(cuda_launch.forward, CUDA), partial(cuda_launch.backward, CUDA)),
}
implementations = pytest.mark.parametrize("implementation", KERNELS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
on_gpu = partial(normal, device="cuda")


@implementations
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes(implementation, activation, dtype):
    input, update = (on_gpu(1031, 136, dtype=dtype, seed=seed) for seed in (0, 1))
    check(*KERNELS[implementation], input, update, on_gpu(136, dtype=dtype, seed=2), activation)


@implementations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_16_bit_input(implementation, activation, dtype):
    """The arithmetic of 16-bit results is approximate, which must not show in any of them: at most
    0.6 ulp, and at a zero of the derivative 1e-6, as for float32's own."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    input = bits[bits.isfinite()].cuda().unsqueeze(0)
    exact_input = input.double().requires_grad_()
    function = EXACT_IN_TAILS.get(activation) or activation_named(activation).function
    exact = function(exact_input)
    (exact_grad,) = torch.autograd.grad(exact.sum(), exact_input)
    ours_input = input.clone().requires_grad_()
    bias = torch.zeros(input.shape[-1], dtype=dtype, device="cuda")
    ours = bias_activation(ours_input, bias, activation, implementation=implementation)
    (ours_grad,) = torch.autograd.grad(ours.sum(), ours_input)
    saved = ours.detach().double()  # of an activation whose derivative is one of its output
    if activation == "sigmoid":
        exact_grad = saved * (1 - saved)
    elif activation == "tanh":
        exact_grad = 1 - saved * saved
    # At huge inputs eager's gradient is NaN too: 0 times an infinite slope of gelu_tanh's argument.
    eager_input = input.clone().requires_grad_()
    eager = activation_named(activation).function(eager_input)
    (eager_grad,) = torch.autograd.grad(eager.sum(), eager_input)
    assert torch.equal(ours_grad.isnan(), eager_grad.isnan())
    ours_grad, exact_grad = ours_grad[~eager_grad.isnan()], exact_grad[~eager_grad.isnan()]
    assert_nearest(ours.detach(), exact.detach(), 1e-38)
    assert_nearest(ours_grad, exact_grad, 1e-6)


# PyTorch's own subtract from 1, also in float64, so that nothing is left of a small result.
EXACT_IN_TAILS = {
    "gelu": lambda x: x * torch.special.log_ndtr(x).exp(),
    "gelu_tanh": lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
}


def assert_nearest(found, exact, absolute):
    """``found`` is within 0.6 ulp of ``exact``, or ``absolute``."""
    limits = torch.finfo(found.dtype)
    finite = exact.abs() <= limits.max
    exact, found = exact[finite], found[finite].double()
    exponent = exact.abs().clamp(limits.smallest_normal).log2().floor()
    ulp = torch.exp2(exponent) * limits.eps
    excess = ((found - exact).abs() - absolute) / ulp
    assert excess.max() <= 0.6, (excess.max(), exact[excess.argmax()], found[excess.argmax()])


@implementations
@pytest.mark.parametrize("activation", EXACT)
def test_float64_against_sixty_digits(implementation, activation):
    assert_float64(*KERNELS[implementation], activation, "cuda")


@implementations
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1), (1, 3), (100_003, 1), (70_001, 3), (1, 100_003), (3, 1025), (5001, 513)),
        *((9, 4, 64), (2, 70_000), (5, 40_001), (31, 4096)),
    ],
    ids=str,
)
def test_shapes(implementation, shape):
    for dtype in (torch.float32, torch.bfloat16):
        input, update = (on_gpu(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
        check(*KERNELS[implementation], input, update, on_gpu(shape[-1], dtype=dtype, seed=2))
        check(*KERNELS[implementation], input, update, None)


@implementations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(implementation, layout):
    input = on_gpu(257, 130, dtype=torch.float32)
    update = LAYOUTS[layout](on_gpu(257, 130, dtype=torch.float32, seed=1))
    upstream = LAYOUTS[layout](on_gpu(257, 130, dtype=torch.float32, seed=2))
    bias = on_gpu(260, dtype=torch.float32, seed=3)[::2]
    check(*KERNELS[implementation], input, update, bias, "gelu", upstreams=(upstream,))
    check(*KERNELS[implementation], update, input, None, "relu", upstreams=(upstream,))


@implementations
def test_unaligned_and_mixed(implementation):
    input = on_gpu(1 + 64 * 40, dtype=torch.float16)[1:].view(64, 40)
    update = on_gpu(64, 40, dtype=torch.float32, seed=1)
    bias = on_gpu(41, dtype=torch.bfloat16, seed=2)[1:]
    check(*KERNELS[implementation], input, update, bias, "silu")


@implementations
def test_loops_that_do_not_collapse(implementation):
    input = on_gpu(2, 3, 4, 5, dtype=torch.float32).movedim(1, -1).contiguous().movedim(-1, 1)
    update = on_gpu(2, 3, 4, 5, dtype=torch.float32, seed=1)
    check(*KERNELS[implementation], input, update, on_gpu(5, dtype=torch.float32, seed=2))


@implementations
def test_scale_through_a_pointer(implementation):
    forward, _ = KERNELS[implementation]
    input, update = (on_gpu(33, 40, dtype=torch.float32, seed=seed) for seed in (0, 1))
    scale = torch.full((), 0.3, device="cuda")
    ours = forward(input, update, None, scale, "relu")
    assert torch.equal(ours, forward(input, update, None, 0.3, "relu"))


@implementations
def test_sums_repeat_to_the_bit(implementation):
    _, backward = KERNELS[implementation]
    upstream = on_gpu(30_001, 129, dtype=torch.float32)
    saved = layout.Saved(None, None, None, None, 1.0, "identity", *[torch.float32] * 3)
    first, second = (backward((False, False, True), upstream, saved)[2] for _ in range(2))
    assert torch.equal(first, second)
    assert_within_bar(first, upstream.sum(0), upstream.double().sum(0))


@implementations
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("layout", DENSE_IN_MEMORY)
def test_in_place_forms_write_what_the_others_return(implementation, layout, dtype):
    input, update = (on_gpu(1031, 136, dtype=dtype, seed=seed) for seed in (0, 1))
    bias = on_gpu(136, dtype=dtype, seed=2)
    for function, in_place, others in (
        (add_mul_activation, add_mul_activation_, (update, bias, 0.5, "gelu")),
        (add_mul_activation, add_mul_activation_, (update.t().contiguous().t(), None, 2.0, "relu")),
        (bias_activation, bias_activation_, (bias, "tanh")),
    ):
        for _ in range(3):  # the second call runs a held plan
            target, around = writable(layout, input)
            before, version = around.clone(), target._version
            with strict():
                expected = function(target, *others, implementation=implementation)
                assert in_place(target, *others, implementation=implementation) is target
            assert target._version == version + 1
            assert torch.equal(target, expected)
            target.copy_(input)
            assert torch.equal(around, before)


@pytest.mark.parametrize("config", configs.CUDA, ids=str)
@pytest.mark.parametrize("shape", [(5001, 512), (4099, 37), (3, 9)], ids=str)
def test_every_candidate_of_tuning_is_right(config, shape):
    for dtype in (torch.float32, torch.bfloat16):
        input, update = (on_gpu(*shape, dtype=dtype, seed=seed) for seed in (0, 1))
        bias = on_gpu(shape[-1], dtype=dtype, seed=2)
        forward, backward = KERNELS["cuda"]
        check(forward, partial(backward, config=config), input, update, bias)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1024, 1025])
@pytest.mark.parametrize("columns", [1, 3, 32, 33, 256])
def test_short_matrices(rows, columns):
    for dtype in (torch.float32, torch.bfloat16):
        input, update = (on_gpu(rows, columns, dtype=dtype, seed=seed) for seed in (0, 1))
        check(*KERNELS["cuda"], input, update, on_gpu(columns, dtype=dtype, seed=2), "gelu")


@implementations
@pytest.mark.parametrize("columns", [1024, 1023])
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation, columns):
    rows = 2**31 // columns + 3
    input = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    update = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(rows, columns)
    bias = torch.arange(columns, device="cuda").to(torch.bfloat16).requires_grad_()
    input[-1] = 5
    with strict():
        output = add_mul_activation(input, update, bias, 0.5, implementation=implementation)
        assert torch.equal(output[-1], (5.5 + bias.detach().float()).bfloat16())
        assert torch.equal(output[rows // 2], (0.5 + bias.detach().float()).bfloat16())
        (grad,) = torch.autograd.grad(output, bias, torch.ones_like(output))
    assert torch.equal(grad, torch.full_like(grad, rows))
    del output, grad
    dense = add_mul_activation(input, input, bias.detach(), 1.0, implementation=implementation)
    assert torch.equal(dense[-1], (10 + bias.detach().float()).bfloat16())
