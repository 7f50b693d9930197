"""The Triton and CUDA kernels of linear_sigmoid and linear_binary_cross_entropy on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from logit_cases import LAYOUTS, SHAPES, assert_each_loss, assert_infinite_targets, check, operands

from fuselab.ops import linear_binary_cross_entropy, linear_sigmoid
from fuselab.ops.linear_sigmoid import cuda_launch, triton_launch
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu

KERNELS = {
    "triton": (triton_launch.forward, triton_launch.backward),
    "cuda": (cuda_launch.forward, cuda_launch.backward),
}
implementations = pytest.mark.parametrize("implementation", KERNELS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
REDUCTIONS = (None, "none", "mean", "sum")


@implementations
@dtypes
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shapes(implementation, dtype, reduction):
    for rows, depth in (*SHAPES, (70_001, 256), (30_000, 1000), (100_003, 13)):
        if implementation == "cuda" and depth > 1024:
            continue  # the CUDA kernels end there
        # Three depths, one of them read twice, show what every kernel is compiled for: float16, but
        # for its conversions bfloat16, and which gradients are wanted, in any dtype.
        few = depth in (31, 256, 2100)
        if dtype == torch.float16 and not few:
            continue
        args = operands(rows, depth, dtype, "cuda")
        alone = few and dtype == torch.float32
        check(*KERNELS[implementation], *args, reduction, alone=alone)
    args = operands(2000, 40, dtype, "cuda", bias=False)
    check(*KERNELS[implementation], *args, reduction)


@implementations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(implementation, layout):
    for dtype in (torch.float32, torch.bfloat16):
        input, weight, bias, target = operands(96, 96, dtype, "cuda")
        upstream = LAYOUTS[layout](input)[:, :1]
        weight = LAYOUTS[layout](weight.expand(2, 96))[:1]
        target = target.expand(96, 3).clone()[:, 1:2]
        kernels, input = KERNELS[implementation], LAYOUTS[layout](input)
        check(*kernels, input, weight, bias, upstreams=(upstream,))
        check(*kernels, input, weight, bias, target, "none", upstreams=(upstream,))


@implementations
def test_unaligned_rows_and_other_targets(implementation):
    input, weight, bias, target = operands(300, 64, torch.bfloat16, "cuda")
    shifted = F.pad(input.flatten(), (1, 0))[1:].view(input.shape)
    check(*KERNELS[implementation], shifted, weight, bias, target.float(), "mean")
    check(*KERNELS[implementation], input, weight, bias, target.half(), "none")


@implementations
def test_losses_where_a_probability_would_round(implementation):
    assert_each_loss(KERNELS[implementation][0], "cuda")


@implementations
def test_infinite_targets(implementation):
    assert_infinite_targets(KERNELS[implementation][1], "cuda")


@implementations
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sums_repeat_to_the_bit(implementation, reduction):
    forward, backward = KERNELS[implementation]
    input, weight, bias, target = operands(50_001, 257, torch.float32, "cuda")
    rest = () if reduction is None else (target, reduction)
    more = () if reduction is None else (bias, reduction)

    def run():
        output = forward(input, weight, bias, *rest)
        saved = output if reduction is None else target
        grads = backward((True, True, True), output, saved, input, weight, *more)
        return (output, *grads)

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


@implementations
def test_runs_on_the_callers_stream_and_in_a_graph(implementation):
    *operands_, target = operands(640, 256, torch.bfloat16, "cuda")
    leaves = [value.requires_grad_() for value in operands_]

    def step():
        loss = linear_binary_cross_entropy(*leaves, target, implementation=implementation)
        output = linear_sigmoid(*leaves, implementation=implementation)
        return loss, *torch.autograd.grad(loss + output.float().sum(), leaves)

    with strict():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
    with torch.no_grad():
        leaves[0].mul_(-0.5)
    graph.replay()
    for ours, theirs in zip(results, step(), strict=True):
        torch.testing.assert_close(ours, theirs)


@implementations
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation):
    depth = 256
    rows = 2**31 // depth + 67
    if torch.cuda.mem_get_info()[0] < 3 * 2 * rows * depth:
        pytest.skip(f"needs {6 * rows * depth / 2**30:.0f} GiB of free GPU memory")
    _, weight, bias, _ = operands(1, depth, torch.bfloat16, "cuda")
    input = torch.zeros(rows, depth, device="cuda", dtype=torch.bfloat16)
    input[-70:] = 0.1
    forward, backward = KERNELS[implementation]
    output = forward(input, weight, bias)
    expected = torch.sigmoid(F.linear(input[-70:].float(), weight.float(), bias.float()))
    torch.testing.assert_close(output[-70:].float(), expected, rtol=1e-2, atol=0)
    upstream = torch.zeros_like(output)
    upstream[-70:] = 1
    grads = backward((True, True, True), upstream, output, input, weight)
    of_logit = (expected * (1 - expected)).sum()
    torch.testing.assert_close(grads[2].float(), of_logit.reshape(1), rtol=2e-2, atol=0)
    torch.testing.assert_close(
        grads[1].float(), (0.1 * of_logit).expand(1, depth), rtol=2e-2, atol=0
    )
    assert grads[0][-1].any() and not grads[0][0].any()
