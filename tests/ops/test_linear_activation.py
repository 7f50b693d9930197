"""linear_activation on the CPU: the contract, gradients, fusion, errors."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from linear_cases import LAYOUTS, SHAPES, check, operands
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.errors import ArgumentError, DtypeError, ShapeError, UnknownNameError
from fuselab.fusion.expression import Expression
from fuselab.fusion.match import Pattern, find
from fuselab.fusion.trace import Call, trace_forward
from fuselab.ops import linear_activation
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.linear_activation.op import OP, addmm_activation, prefer
from fuselab.ops.linear_activation.reference import gradient, reference


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradients_formulas(activation):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check(reference, gradient, *operands(37, 13, 20, dtype), activation)
        check(reference, gradient, *operands(5, 40, 3, dtype, bias=False), activation)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(reference, gradient, *operands(*shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    input, weight, bias = operands(12, 12, 12)
    upstream = LAYOUTS[layout](operands(12, 12, 12)[1])
    args = LAYOUTS[layout](input), LAYOUTS[layout](weight), bias
    check(reference, gradient, *args, "gelu", upstreams=(upstream,))
    assert linear_activation(*args).stride() == OP.fake(*args, "relu").stride()


def test_leading_dimensions_and_empty():
    _, weight, bias = operands(1, 6, 4)
    for shape in ((6,), (2, 3, 6), (0, 6), (2, 0, 6)):
        input = torch.randn(shape, requires_grad=True)
        output = linear_activation(input, weight, bias, "tanh")
        assert output.shape == (*shape[:-1], 4)
        torch.testing.assert_close(output, torch.tanh(F.linear(input, weight, bias)))
        assert torch.autograd.grad(output.sum(), input)[0].shape == shape
    nothing = linear_activation(torch.empty(3, 0), torch.empty(2, 0), torch.tensor([-1.0, 2.0]))
    assert torch.equal(nothing, torch.tensor([[0.0, 2.0]]).expand(3, 2))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_raw_backward_of_nothing_gives_zeros(activation):
    input, weight, bias = operands(0, 3, 4)
    saved = OP.gradient.save(
        reference(input, weight, bias, activation), input, weight, bias, activation
    )
    grads = gradient((True, True, True), torch.empty(0, 4), *saved)
    assert [tuple(grad.shape) for grad in grads] == [(0, 3), (4, 3), (4,)]
    assert not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_and_second_derivatives(activation):
    leaves = [value.requires_grad_() for value in operands(3, 5, 4, torch.float64)]

    def fused(input, weight, bias):
        return linear_activation(input, weight, bias, activation)

    assert torch.autograd.gradcheck(fused, leaves)
    assert torch.autograd.gradgradcheck(fused, leaves)


def test_autocast_is_that_of_a_linear_layer():
    input, weight, bias = operands(4, 8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_activation(input, weight, bias)
        theirs = torch.relu(F.linear(input, weight, bias))
        assert linear_activation(input.bfloat16(), weight, bias).dtype == torch.bfloat16
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_rewrites_compute_what_the_reference_does():
    input, weight, bias = operands(4, 5, 3, torch.float64)
    values, seen = {"input": input, "weight": weight, "bias": bias}, set()
    for rewrite in OP.rewrites:
        args = [values[name] for name in inspect.signature(rewrite.pattern).parameters]
        call = OP.bind(rewrite.call(*args))
        torch.testing.assert_close(rewrite.pattern(*args), OP.reference(*call))
        seen.add(call[-1])
    assert seen == set(ACTIVATIONS) - {"identity"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "name, layer",
    [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("gelu_tanh", nn.GELU("tanh")), ("silu", nn.SiLU())],
    ids=lambda value: str(value),
)
def test_fuse_finds_a_linear_layer_with_its_activation(bias, name, layer):
    module = nn.Sequential(nn.Linear(5, 3, bias=bias), layer)
    input = torch.randn(4, 5)
    traced = trace_forward("", module, Call((input,), {}))
    patterns = [Pattern(OP, rewrite) for rewrite in OP.rewrites]
    (match, *_) = find(Expression(traced.graph, traced.module), patterns)
    call = OP.bind(match.rewrite.call(**match.bindings))
    assert call[-1] == name and (call[2] is not None) == bias
    assert len(match.origins) == 2


def test_fuse_computes_the_product_once():
    """A Linear that is replaced whole is not called for the dtype of its bias."""
    from fuselab.fusion.emit import MatchRegion

    module = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    input = torch.randn(4, 5)
    traced = trace_forward("", module, Call((input,), {}))
    patterns = [Pattern(OP, rewrite) for rewrite in OP.rewrites]
    region = MatchRegion(traced, find(Expression(traced.graph, traced.module), patterns)[0])
    called = [node.name for node in region.after.graph.nodes if node.op == "call_function"]
    assert called == ["linear_activation"]
    torch.testing.assert_close(region.after(input), module(input))


def test_cost_is_that_of_the_product():
    args = (*operands(8, 16, 4, torch.bfloat16), "relu")
    cost, backward = OP.cost(*args), OP.cost_backward(*args)
    assert (cost.bytes_read, cost.bytes_written) == (2 * (8 * 16 + 4 * 16 + 4), 2 * 8 * 4)
    assert (cost.flops, cost.unit) == (2 * 8 * 16 * 4, "bf16")
    assert backward.bytes_read == 2 * (2 * 8 * 4 + 8 * 16 + 4 * 16)
    assert backward.bytes_written == 2 * (8 * 16 + 4 * 16 + 4)
    assert backward.flops == 2 * cost.flops
    assert OP.cost(*operands(8, 16, 4), "relu").unit == "fp32"


def test_the_library_peer():
    args = operands(6, 5, 4)
    for activation in ("relu",):
        torch.testing.assert_close(
            addmm_activation(*args, activation), reference(*args, activation)
        )
    with pytest.raises(ArgumentError, match="needs a bias"):
        addmm_activation(args[0], args[1])


def test_errors_name_the_argument():
    input, weight, bias = operands(4, 5, 3)
    with pytest.raises(UnknownNameError) as refused:
        linear_activation(input, weight, bias, "rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")
    assert "relu" in refused.value.known
    with pytest.raises(ShapeError, match=r"'weight'.*\(5, 3\).*\(N, 5\)"):
        linear_activation(input, weight.t())
    with pytest.raises(ShapeError, match=r"'bias'.*\(5,\).*\(3,\)"):
        linear_activation(input, weight, torch.zeros(5))
    with pytest.raises(ShapeError, match="'input' has no dimension"):
        linear_activation(torch.zeros(()), weight)
    with pytest.raises(DtypeError, match=r"'weight' is torch.float16 and 'input' torch.float32"):
        linear_activation(input, weight.half())
    with pytest.raises(DtypeError, match=r"'input' is torch.int64"):
        linear_activation(input.long(), weight)


def test_candidates_of_tuning_begin_with_the_default_and_fit_the_output():
    for rows, depth, columns in ((4096, 512, 4096), (3, 64, 20), (70, 13, 40), (9, 33, 5)):
        args = (*operands(rows, depth, columns), "relu")
        tiles = OP.configs["triton"](*args)
        assert len(set(tiles)) == len(tiles)
        assert all(tile.columns < max(2 * columns, 32) for tile in tiles)
        if depth <= 32:
            output = reference(*args)
            saved = OP.gradient.save(output, *args)
            assert OP.configs["triton_backward"]((True, True, True), output, *saved)
            assert OP.configs["cuda"](*args)[0].blocks == (4 if depth <= 16 else 2)  # float32
            halves = operands(rows, depth, columns, torch.bfloat16)
            assert [one.blocks for one in OP.configs["cuda"](*halves, "relu")] == [1, 2]
    half = operands(4096, 512, 4096, torch.bfloat16)
    first = OP.configs["triton"](*half, "relu")[0]
    assert (first.rows, first.columns, first.depth, first.warps) == (128, 256, 64, 8)
    unaligned = operands(4096, 513, 4096, torch.bfloat16)
    first = OP.configs["triton"](*unaligned, "relu")[0]
    assert (first.rows, first.columns, first.warps) == (64, 128, 8)  # larger ones spill


def test_the_measured_order_on_a_gpu():
    def order(
        depth, activation="relu", bias=True, grad=False, dtype=torch.float32, rows=4096, columns=64
    ):
        with FakeTensorMode():
            input = torch.empty(rows, depth, device="cuda", dtype=dtype, requires_grad=grad)
            weight = torch.empty(columns, depth, device="cuda", dtype=dtype)
            of_bias = torch.empty(columns, device="cuda", dtype=dtype) if bias else None
            return prefer(input, weight, of_bias, activation)[0]

    assert order(13) == order(32, "gelu", grad=True) == "triton"
    assert order(13, dtype=torch.bfloat16) == order(31, dtype=torch.float16) == "cuda"
    assert order(32, dtype=torch.float16) == "triton"
    assert order(33, dtype=torch.bfloat16) == "wgmma"
    assert order(33) == order(512) == order(2047) == "wgmma"
    assert (
        order(2048) == order(4096, "identity", bias=False) == order(2048, "gelu_tanh") == "cublaslt"
    )
    # cuBLASLt's epilogue has no gelu, and without a bias no relu.
    assert order(4096, "gelu") == order(4096, bias=False) == "wgmma"
    assert order(2048, "gelu", rows=128) == order(2048, bias=False, rows=1) == "cublaslt"
    assert order(2048, "gelu", rows=129) == order(2047, "gelu", rows=1) == "wgmma"
    assert order(16, dtype=torch.float16, columns=32) == "triton"
    assert order(16, dtype=torch.float16, columns=33) == "cuda"
    # Their backward forms the product again.
    assert order(4096, "gelu", grad=True) == order(512, "silu", grad=True) == "reference"
    assert order(256, "gelu", grad=True) == order(512, "tanh", grad=True) == "wgmma"
