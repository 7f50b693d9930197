"""mlp on the CPU: the contract, gradients, what autograd keeps, launch configurations, errors."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.nn.functional as F
from mlp_cases import DLRM, SHAPES, check, operands

from fuselab.errors import (
    ArgumentError,
    DtypeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.ops import mlp
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.mlp import cuda_launch, layers_launch
from fuselab.ops.mlp.op import MOST_ROWS, OP, prefer
from fuselab.ops.mlp.reference import reference
from fuselab.runtime.tuning import Config


def by_hand(input, weights, biases, last=torch.sigmoid):
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        input = torch.relu(F.linear(input, weight, bias))
    return last(F.linear(input, weights[-1], biases[-1]))


@pytest.mark.parametrize("rows, widths", SHAPES, ids=str)
def test_shapes(rows, widths):
    input, weights, biases = operands(rows, widths)
    output = mlp(input, weights, biases, "relu", "sigmoid")
    assert torch.equal(output, by_hand(input, weights, biases))
    assert output.stride() == OP.fake(input, weights, biases, "relu", "sigmoid", None).stride()
    check(layers_launch.forward, input, weights, biases)


def test_leading_dimensions_empty_and_without_biases():
    _, weights, _ = operands(1, (6, 5, 4))
    for shape in ((6,), (2, 3, 6), (0, 6), (2, 0, 6)):
        input = torch.randn(shape)
        output = mlp(input, weights, activation="tanh", output_activation="gelu")
        assert output.shape == (*shape[:-1], 4)
        by_layers = F.gelu(F.linear(torch.tanh(F.linear(input, weights[0])), weights[1]))
        torch.testing.assert_close(output, by_layers)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_float32_in_and_out_of_16_bits(half):
    input, weights, biases = operands(9, (13, 8, 1), half)
    wide = input.float() * 1.001  # no longer numbers of 16 bits
    rounded = mlp(wide.to(half), weights, biases, "relu", "identity")
    assert torch.equal(mlp(wide, weights, biases), rounded)
    output = mlp(wide, weights, biases, "relu", "sigmoid", dtype=torch.float32)
    assert output.dtype == torch.float32
    assert torch.equal(output, rounded.float().sigmoid())
    through = layers_launch.forward(wide, weights, biases, "relu", "sigmoid", torch.float32)
    torch.testing.assert_close(through, output)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("implementation", ["auto", "raw"])
def test_first_and_second_derivatives(activation, implementation):
    input, weights, biases = operands(3, (5, 4, 3, 2), torch.float64)
    leaves = [value.requires_grad_() for value in (input, *weights, *biases)]

    def fused(input, *rest):
        call = mlp if implementation == "auto" else torch.ops.fuselab.mlp
        more = () if implementation == "auto" else (None, "auto")
        return call(input, rest[:3], rest[3:], activation, activation, *more)

    assert torch.autograd.gradcheck(fused, leaves)
    assert torch.autograd.gradgradcheck(fused, leaves)


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradients_formulas(bias):
    """In bfloat16 from float32 to float32, each alone as all together."""
    input, weights, biases = operands(20, (13, 8, 4), torch.bfloat16, bias=bias)
    input = input.float()
    leaves = [value.requires_grad_() for value in (input, *weights, *biases)]
    args = (input, weights, biases, "gelu", "sigmoid", torch.float32)
    upstream = torch.randn(20, 4)
    theirs = torch.autograd.grad(reference(*args), leaves, upstream)
    ours = OP.gradient.reference((True,) * len(leaves), upstream, *args)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        assert one.dtype == leaf.dtype and one.shape == leaf.shape
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    for place in range(len(leaves)):
        needs = tuple(index == place for index in range(len(leaves)))
        alone = OP.gradient.reference(needs, upstream, *args)
        assert [grad is not None for grad in alone] == list(needs)
        assert torch.equal(alone[place], ours[place])


def test_where_a_gradient_is_needed_hidden_activations_are_kept():
    """The chain multiplies once per layer forward; the operator's own gradient twice."""
    input, weights, biases = operands(4, (5, 4, 3))
    for tensor in weights:
        tensor.requires_grad_()
    output = mlp(input, weights, biases)
    seen, nodes = [], [output.grad_fn]
    while nodes:
        node = nodes.pop()
        seen.append(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert not any("mlp" in name for name in seen)
    with torch.no_grad():
        assert mlp(input, weights, biases).grad_fn is None
    theirs = torch.autograd.grad(by_hand(input, weights, biases, lambda x: x).sum(), weights)
    for one, other in zip(torch.autograd.grad(output.sum(), weights), theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_compile_vmap_and_func():
    input, weights, biases = operands(4, (5, 4, 1))

    def call(input):
        return mlp(input, weights, biases, "relu", "sigmoid")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), call(input))
    leaf = input.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(by_hand(leaf, weights, biases).sum(), leaf)
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf).sum(), leaf)[0], theirs)
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(input), theirs)
    torch.testing.assert_close(torch.func.vmap(call)(input), call(input))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(input), theirs
    )


def test_autocast_mixes_dtypes_where_a_gradient_is_needed_too():
    input, weights, biases = operands(4, (8, 6, 3))
    for tensor in (*weights, *biases):
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = by_hand(input, weights, biases)
        ours = mlp(input.bfloat16(), weights, biases, "relu", "sigmoid")
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)
    (grad,) = torch.autograd.grad(ours.sum(), weights[:1])
    assert grad.dtype == torch.float32


def test_autocast_is_that_of_linear_layers():
    input, weights, biases = operands(4, (8, 6, 3))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = by_hand(input, weights, biases)
        assert torch.equal(mlp(input, weights, biases, "relu", "sigmoid"), theirs)
        assert mlp(input.bfloat16(), weights, biases).dtype == torch.bfloat16
        wide = mlp(input, weights, biases, "relu", "sigmoid", dtype=torch.float32)
        weights[0].requires_grad_()
        kept = mlp(input, weights, biases, "relu", "sigmoid", dtype=torch.float32)
    assert theirs.dtype == torch.bfloat16 and wide.dtype == kept.dtype == torch.float32
    torch.testing.assert_close(kept, wide)


def test_cost_counts_weights_once_and_no_hidden_activation():
    args = (*operands(8, (16, 4, 2), torch.bfloat16), "relu", "identity", torch.float32)
    cost, backward = OP.cost(*args), OP.cost_backward(*args)
    elements = 16 * 4 + 4 * 2
    assert cost.bytes_read == 2 * (8 * 16 + elements + 4 + 2)
    assert (cost.bytes_written, cost.unit) == (4 * 8 * 2, "bf16")
    assert cost.flops == 8 * (2 * elements + 4 * 2 + 2)
    assert backward.bytes_written == cost.bytes_read
    assert backward.flops == 3 * cost.flops


def test_few_rows_are_one_launch_on_a_gpu():
    meta = torch.empty(4096, 13, device="meta")
    assert prefer(meta, []) == ("reference",)

    class OnGpu:
        is_cuda = True

        def __init__(self, rows):
            self.shape = torch.Size((rows, 13))

    assert prefer(OnGpu(MOST_ROWS), []) == ("cuda", "layers")
    assert prefer(OnGpu(MOST_ROWS + 1), []) == ("layers",)
    large = [torch.empty(2048, 2048, device="meta")] * 3
    assert prefer(OnGpu(64), large) == ("cuda", "layers")
    assert prefer(OnGpu(128), large) == ("layers",)


@pytest.mark.parametrize("widths", DLRM, ids=str)
def test_the_tile_fills_the_gpu(widths):
    """Around the measured sizes; without clusters and where shared memory holds one block."""

    def first(rows, has_clusters=True, widths=widths):
        found = cuda_launch.candidates(rows, widths, 132, 232448, has_clusters)
        assert len(found) == len(set(found))
        return (found[0].rows, found[0].cluster) if found else None

    picks = {1: 8, 128: 8, 256: 8, 257: 4, 512: 4, 528: 4, 529: 2, 1024: 2, 2048: 2, 2112: 2}
    for rows, cluster in {**picks, 2113: 1, 4096: 1, 4224: 1}.items():
        assert first(rows) == (16, cluster), rows
    assert first(4225) == first(8192) == first(16384) == (64, 1)
    assert first(2048, False) == first(128, False) == (16, 1)
    assert first(8192, False) == (64, 1)
    assert first(1056, widths=(4096, 1)) == (16, 2)
    assert first(1057, widths=(4096, 1)) == (16, 1)
    assert first(65536, widths=(4096, 1)) == (16, 1)
    assert first(1, widths=(8192, 1)) is None


def test_rows_of_the_buffers_keep_banks_apart():
    """LDS.128 reads 64 bytes of each of two rows at a time: on different halves of 128 bytes."""
    for depths in ((1,), (13, 512, 256, 64), (368, 512, 256), (65, 64)):
        for stride, own in zip(
            cuda_launch.row_strides(depths), (depths[::2], depths[1::2]), strict=True
        ):
            assert stride % 64 == 32
            assert all(stride >= -(-depth // 32) * 32 for depth in own)


def test_the_networks_layout():
    """As cuda_kernels.cu declares Layer and Network: 16 x 32 bytes and three ints."""
    _, weights, biases = operands(1, (13, 8, 4), torch.bfloat16)
    content, tensors = cuda_launch._network(weights, biases).value
    assert len(content) == 16 * 32 + 16
    assert struct.unpack_from("QQqii", content, 32) == (0, 0, 8, 8, 4)
    assert content[64:512] == bytes(448)
    assert struct.unpack_from("3i", content, 512) == (2, 96, 96)
    assert {at: tensor.data_ptr() for at, tensor in tensors} == {
        32 * place + 8 * of: tensor.data_ptr()
        for of, each in enumerate((weights, biases))
        for place, tensor in enumerate(each)
    }
    assert [at for at, _ in cuda_launch._network(weights, []).value[1]] == [0, 32]


def test_the_launch(monkeypatch):
    """Its kernel, grid and parameters: off a GPU there are no clusters, and one multiprocessor."""
    made = []
    monkeypatch.setattr(cuda_launch.CUDA, "launch", lambda *args: made.append(args))
    input, weights, biases = operands(50, (13, 40, 16), torch.bfloat16)
    args = (weights, biases, "gelu", "sigmoid", torch.float32)
    output = cuda_launch.forward(input.float().view(2, 25, 13), *args)
    assert (output.shape, output.dtype) == ((2, 25, 16), torch.float32)
    (expression, grid, block, (x, written, rows, *strides, network), shared), *_ = made
    types = "Gelu, Sigmoid, __nv_bfloat16, float, float"
    assert expression == f"forward<{types}, 4, 2, 1>"
    assert (grid, block, shared) == ((1, 1, 1), (256, 1, 1), 64 * 2 * (96 + 96))
    assert x.shape == (50, 13) and x.dtype == torch.float32
    assert written is output and rows.value == 50
    assert [stride.value for stride in strides] == [13, 1] and len(network.value[0]) == 528
    small = Config(rows=16, cluster=8, columns=8)
    cuda_launch.forward(input, *args[:4], None, small)
    own = "__nv_bfloat16"
    assert made[1][0] == f"forward<Gelu, Sigmoid, {own}, {own}, {own}, 1, 1, 8>"
    assert made[1][1] == (4 * 8, 1, 1)
    assert cuda_launch.forward(input[:0], *args).shape == (0, 16) and len(made) == 2


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda w, b: ([weight.float() for weight in w], b), "16 bits"),
        (lambda w, b: (w[:1] * 17, b), "16 layers"),
        (lambda w, b: ([w[0][:, :0], *w[1:]], b), "no weights"),
        (lambda w, b: ([w[0].t().contiguous().t(), w[1]], b), "row of a weight"),
        (lambda w, b: (w, [b[0].repeat_interleave(2)[::2], b[1]]), "bias is not"),
        (lambda w, b: (w, b), None),
        (lambda w, b: (w, []), None),
        (lambda w, b: ([w[0], w[1][:1, :]], b), None),
    ],
)
def test_what_one_launch_supports(change, reason):
    input, weights, biases = operands(4, (8, 6, 3), torch.bfloat16)
    said = cuda_launch.supports(input, *change(weights, biases))
    assert said is None if reason is None else reason in said


def test_errors_name_the_argument():
    input, weights, biases = operands(4, (5, 4, 3))
    with pytest.raises(ArgumentError, match="'weights' is empty"):
        mlp(input, [])
    with pytest.raises(ArgumentError, match=r"'biases' has 1 tensors"):
        mlp(input, weights, biases[:1])
    with pytest.raises(ShapeError, match=r"'weights\[1\]'.*\(3, 4\).*\(N, 9\)"):
        mlp(input, [torch.randn(9, 5), weights[1]])
    with pytest.raises(ShapeError, match=r"'weights\[0\]'.*\(4, 5\).*\(N, 4\)"):
        mlp(input[:, :4], weights)
    with pytest.raises(ShapeError, match=r"'biases\[1\]'.*\(4,\).*\(3,\)"):
        mlp(input, weights, [biases[0], biases[0]])
    with pytest.raises(ShapeError, match="'input' has no dimension"):
        mlp(torch.tensor(1.0), weights)
    with pytest.raises(DtypeError, match=r"'weights\[1\]' is torch.float64"):
        mlp(input, [weights[0], weights[1].double()])
    with pytest.raises(DtypeError, match=r"'biases\[0\]' is torch.float16"):
        mlp(input, weights, [biases[0].half(), biases[1]])
    with pytest.raises(DtypeError, match=r"'input' is torch.float16 and 'weights\[0\]'"):
        mlp(input.half(), weights)
    with pytest.raises(DtypeError, match=r"'dtype'.*torch.float16.*None, torch.float32"):
        mlp(input, weights, dtype=torch.float16)
    with pytest.raises(UnknownNameError) as refused:
        mlp(input, weights, biases, "rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")
    assert "relu" in refused.value.known
    with pytest.raises(UnknownNameError) as refused:
        mlp(input, weights, biases, "relu", "none")
    assert (refused.value.kind, refused.value.name) == ("activation", "none")
    with pytest.raises(UnsupportedError, match="it runs on cuda"):
        mlp(input, weights, implementation="cuda")
    with pytest.raises(UnknownNameError) as refused:
        mlp(input, weights, implementation="cudnn")
    assert (refused.value.kind, refused.value.name) == ("implementation", "cudnn")
    weights[0].requires_grad_()
    with pytest.raises(ArgumentError, match="'weights' must be a list of Tensors, got Tensor"):
        mlp(input, weights[0])
    with pytest.raises(ArgumentError, match="'biases' has 1 tensors"):
        mlp(input, weights, biases[:1])
    with pytest.raises(ShapeError, match=r"'weights\[0\]' has shape"):
        mlp(input[:, :4], weights)
    for wrong in (input.double(), input.long()):
        with pytest.raises(DtypeError, match=rf"'input' is {wrong.dtype} and 'weights\[0\]'"):
            mlp(wrong, weights, biases)
    with pytest.raises(DtypeError, match=r"'dtype' is torch\.float16"):
        mlp(input, weights, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="unexpected argument 'act'"):
        mlp(input, weights, biases, act="relu")
    with pytest.raises(ArgumentError, match="takes 6 arguments, got 7"):
        mlp(input, weights, biases, "relu", "relu", None, 1)
    with pytest.raises(ArgumentError, match="the argument 'input' is missing"):
        mlp(weights=weights)
