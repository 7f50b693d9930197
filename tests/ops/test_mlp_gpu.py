"""The CUDA kernel of mlp, and what stands beside it, on a GPU."""

from __future__ import annotations

import pytest
import torch
from mlp_cases import DLRM, SHAPES, check, operands

from fuselab.nn import MLP
from fuselab.ops import mlp
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.mlp import cuda_launch, layers_launch
from fuselab.ops.mlp.op import MOST_ROWS, OP
from fuselab.ops.mlp.reference import reference
from fuselab.runtime.dispatch import choose
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)


@dtypes
@pytest.mark.parametrize("rows, widths", SHAPES, ids=str)
def test_shapes(dtype, rows, widths):
    for bias in (True, False):
        args = operands(rows, widths, dtype, "cuda", bias)
        check(cuda_launch.forward, *args, what=f"{rows} {widths}")


@pytest.mark.parametrize("rows, widths", [(70, (40, 264, 72, 3)), *((2100, w) for w in DLRM)])
def test_every_candidate_of_tuning_is_right(rows, widths):
    args = (*operands(rows, widths, torch.bfloat16, "cuda"), "relu", "sigmoid", torch.float32)
    found = cuda_launch.configs(*args)
    assert len(found) >= 3
    for config in found:
        check(lambda *given, config=config: cuda_launch.forward(*given, config), *args, str(config))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@dtypes
def test_activations(activation, dtype):
    args = operands(100, (24, 40, 64, 24), dtype, "cuda")
    check(cuda_launch.forward, *args, activation, activation)


@dtypes
@pytest.mark.parametrize("widths", [(13, 40, 16), (24, 40, 16), (368, 512, 1)], ids=str)
def test_float32_in_and_out(dtype, widths):
    input, weights, biases = operands(33, widths, dtype, "cuda")
    wide = input.float() * 1.001
    rounded = cuda_launch.forward(wide.to(dtype), weights, biases, "relu", "identity", None)
    ours = cuda_launch.forward(wide, weights, biases, "relu", "identity", None)
    assert torch.equal(ours, rounded)
    out = cuda_launch.forward(wide, weights, biases, "relu", "identity", torch.float32)
    assert out.dtype == torch.float32 and torch.equal(out.to(dtype), rounded)
    check(cuda_launch.forward, wide, weights, biases, "relu", "sigmoid", torch.float32)


def test_layouts_and_unaligned_operands():
    def shifted(tensor):
        return torch.nn.functional.pad(tensor.flatten(), (1, 0))[1:].view(tensor.shape)

    def padded(tensor):
        return torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2]

    input, weights, biases = operands(50, (24, 64, 16), torch.bfloat16, "cuda")
    check(cuda_launch.forward, shifted(input), [*map(shifted, weights)], [*map(shifted, biases)])
    check(cuda_launch.forward, padded(input), [*map(padded, weights)], biases)
    check(cuda_launch.forward, input.t().contiguous().t(), weights, biases)
    check(cuda_launch.forward, input[:1].expand(50, -1), weights, biases)
    check(cuda_launch.forward, input[:, :1].expand(-1, 24), weights, biases)
    whole = cuda_launch.forward(input, weights, biases, "relu", "identity", None)
    split = cuda_launch.forward(input.view(2, 5, 5, 24), weights, biases, "relu", "identity", None)
    assert torch.equal(split.view(50, 16), whole)
    vector = cuda_launch.forward(input[7], weights, biases, "relu", "identity", None)
    assert vector.shape == (16,)
    torch.testing.assert_close(vector, whole[7])
    assert mlp(input[:0], weights, biases).shape == (0, 16)


def test_nan_and_infinity_go_where_eagers_go():
    """Those of a row stay in it; columns past a width of 33 or 1 make none."""
    input, weights, biases = operands(20, (33, 33, 1), torch.bfloat16, "cuda")
    input[3, 5], input[4, 32], input[5, 0] = float("nan"), float("inf"), -float("inf")
    weights[0].abs_()
    args = (input, weights, biases, "relu", "identity", None)
    ours, theirs = cuda_launch.forward(*args), reference(*args)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert int(ours.isnan().sum()) == 2 and bool(ours[6:].isfinite().all())


@pytest.mark.parametrize("rows", [1, 128, 2048, 10_001])
@pytest.mark.parametrize("widths", DLRM, ids=["bottom", "top"])
def test_dlrms_layers(rows, widths):
    input, weights, biases = operands(rows, widths, torch.bfloat16, "cuda")
    for implementation in ("auto", "cuda", "layers", "triton"):

        def call(*args, implementation=implementation):
            with strict(), torch.no_grad():
                return mlp(*args, implementation=implementation)

        check(call, input.float(), weights, biases, "relu", "sigmoid", torch.float32)
        check(call, input, weights, biases, "relu", "relu")


def test_the_choice():
    half = operands(128, (13, 64, 16), torch.bfloat16, "cuda")
    many = operands(MOST_ROWS + 1, (13, 64, 16), torch.bfloat16, "cuda")
    rest = ("relu", "identity", None)
    assert choose(OP, (*half, *rest)) == "cuda"
    assert choose(OP, (*many, *rest)) == "layers"
    assert choose(OP, (*operands(128, (13, 64, 16), torch.float32, "cuda"), *rest)) == "layers"
    wide = operands(8, (20_000, 8), torch.bfloat16, "cuda")
    assert "shared memory" in cuda_launch.supports(*wide)
    assert choose(OP, (*wide, *rest)) == "layers"
    for args in (half, many, wide):
        check(mlp, *args)


def test_gradients_of_the_chain_and_of_the_kernel_by_name():
    input, weights, biases = operands(70, (24, 40, 16), torch.bfloat16, "cuda")
    leaves = [value.requires_grad_() for value in (input, *weights, *biases)]
    upstream = torch.randn(70, 16, device="cuda").bfloat16()
    theirs = torch.autograd.grad(reference(input, weights, biases), leaves, upstream)
    for implementation in ("auto", "cuda", "layers", "triton"):
        output = mlp(input, weights, biases, implementation=implementation)
        ours = torch.autograd.grad(output, leaves, upstream)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            error = (one.float() - other.float()).abs().max()
            assert error <= 0.02 * other.float().abs().max(), implementation


def test_a_cuda_graph_and_compile_take_it():
    input, weights, biases = operands(128, (13, 512, 256, 16), torch.bfloat16, "cuda")

    def call(input):
        return mlp(input, weights, biases, "relu", "sigmoid", torch.float32)

    with torch.no_grad():
        eager = call(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(input)
        captured.fill_(7.0)
        graph.replay()
        assert torch.equal(captured, eager)
        compiled = torch.compile(call, fullgraph=True)
        assert torch.equal(compiled(input), eager)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            beside = call(input)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(beside, eager)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        cast = mlp(input.float(), [weight.float() for weight in weights], biases, "relu", "sigmoid")
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), eager, rtol=1e-2, atol=1e-2)


def test_it_repeats_itself_bit_for_bit():
    args = operands(2048, DLRM[1], torch.bfloat16, "cuda")
    first = mlp(*args, "relu", "sigmoid")
    for _ in range(20):
        assert torch.equal(mlp(*args, "relu", "sigmoid"), first)


def test_the_module_takes_it_in_inference():
    module = MLP((13, 64, 32, 1), last_activation="sigmoid", device="cuda", dtype=torch.bfloat16)
    input = torch.randn(40, 13, device="cuda").bfloat16()
    with torch.no_grad():
        args = (input, [*module.parameters()][::2], [*module.parameters()][1::2])
        one_launch = cuda_launch.forward(*args, "relu", "sigmoid", None)
        assert torch.equal(module(input), one_launch)
        assert torch.equal(torch.compile(module, fullgraph=True)(input), one_launch)
        chain = layers_launch.forward(*args, "relu", "sigmoid", None)
    torch.testing.assert_close(one_launch, chain, rtol=2e-2, atol=1e-2)
    assert module(input).requires_grad
