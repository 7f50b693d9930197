"""outer_interaction_linear on the CPU: values by hand, derivatives, the contract, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interaction_cases import layer, normal

from fuselab.errors import DtypeError, ShapeError, UnknownNameError
from fuselab.models.dlrm import SMALL, Dlrm
from fuselab.ops import outer_interaction_linear
from fuselab.ops.outer_interaction_linear import folding, triton_launch
from fuselab.ops.outer_interaction_linear import products as layer_launch
from fuselab.ops.outer_interaction_linear.op import OP, plain


def test_by_hand():
    dense, embeddings = torch.tensor([[2.0]]), torch.tensor([[[3.0]]])
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0], [0.0, 1.0, -1.0, 0.0]])
    output = outer_interaction_linear(dense, embeddings, weight, torch.tensor([0.5, -1.0]), "relu")
    # 4 + 6 * 10 + 6 * 100 + 9 * 1000 + 0.5
    assert output.tolist() == [[9664.5, 0.0]]


def test_the_models_own_layer():
    """fuselab.models.dlrm: the outer interaction and the prediction layer behind it."""
    torch.manual_seed(0)
    model = Dlrm(SMALL)
    dense, embeddings = normal(2, 16), normal(2, 26, 16, seed=1)
    linear = model.prediction_mlp[0]
    expected = torch.relu(linear(model.interact([dense, *embeddings.unbind(1)])))
    ours = outer_interaction_linear(dense, embeddings, linear.weight, linear.bias, "relu")
    torch.testing.assert_close(ours, expected)


def test_only_the_symmetric_part_of_the_weight_counts():
    """What the fused kernels rest on."""
    dense, embeddings, weight, bias = layer(4, 2, 3, 5, torch.float64)
    square = weight.view(5, 9, 9)
    symmetric = ((square + square.transpose(1, 2)) / 2).flatten(1)
    torch.testing.assert_close(
        outer_interaction_linear(dense, embeddings, weight, bias),
        outer_interaction_linear(dense, embeddings, symmetric, bias),
    )


@pytest.mark.parametrize("activation", ["identity", "tanh", "gelu"])
def test_first_and_second_derivatives(activation):
    inputs = tuple(tensor.requires_grad_() for tensor in layer(2, 1, 2, 2, torch.float64))

    def function(*tensors):
        return outer_interaction_linear(*tensors, activation)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "sigmoid", "silu", "gelu_tanh"])
def test_gradients_are_autograds_of_the_reference(activation):
    inputs = tuple(tensor.requires_grad_() for tensor in layer(5, 2, 3, 4, torch.float64))
    upstream = normal(5, 4, dtype=torch.float64, seed=8)
    ours = torch.autograd.grad(outer_interaction_linear(*inputs, activation), inputs, upstream)
    expected = torch.autograd.grad(OP.reference(*inputs, activation), inputs, upstream)
    for mine, true in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, true)


def test_other_spellings_agree():
    args = layer(3, 2, 3, 4, torch.float64)
    torch.testing.assert_close(plain(*args, "silu"), OP.reference(*args, "silu"))
    outer = torch.einsum("bi,bj->bij", *2 * (torch.cat([args[0], args[1].flatten(1)], 1),))
    torch.testing.assert_close(OP.reference(*args), F.linear(outer.flatten(1), *args[2:]))


def test_empty():
    for shape in ((0, 2, 3, 4), (3, 2, 0, 4), (3, 2, 3, 0)):
        inputs = tuple(tensor.requires_grad_() for tensor in layer_or_empty(*shape))
        output = outer_interaction_linear(*inputs)
        assert output.shape == (shape[0], shape[3])
        output.sum().backward()
        assert all(tensor.grad is not None for tensor in inputs)


def layer_or_empty(batch: int, tables: int, width: int, columns: int) -> tuple[torch.Tensor, ...]:
    if width and columns:
        return layer(batch, tables, width, columns)
    weight = torch.zeros(columns, ((tables + 1) * width) ** 2)
    return normal(batch, width), normal(batch, tables, width), weight, torch.zeros(columns)


def test_under_autocast_the_layer_is_in_its_dtype():
    dense, embeddings, weight, bias = layer(3, 2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outer_interaction_linear(dense.bfloat16(), embeddings, weight, bias)
    assert ours.dtype == torch.bfloat16
    expected = OP.reference(dense, embeddings, weight, bias)
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.05)


def test_compiles_without_a_break():
    args = layer(3, 2, 3, 4)
    compiled = torch.compile(outer_interaction_linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*args), OP.reference(*args))


def test_refusals_name_the_argument():
    dense, embeddings, weight, bias = layer(3, 2, 4, 5)
    with pytest.raises(ShapeError, match=r"'dense' has shape \(4,\)"):
        outer_interaction_linear(dense[0], embeddings, weight, bias)
    with pytest.raises(ShapeError, match=r"'embeddings' has shape .* expected \(3, tables, 4\)"):
        outer_interaction_linear(dense, embeddings[:2], weight, bias)
    with pytest.raises(
        ShapeError, match=r"'weight' has shape \(5, 143\); expected \(outputs, 144\)"
    ):
        outer_interaction_linear(dense, embeddings, weight[:, 1:], bias)
    with pytest.raises(ShapeError, match=r"'bias'.*\(4,\).*\(5,\)"):
        outer_interaction_linear(dense, embeddings, weight, bias[1:])
    with pytest.raises(DtypeError, match=r"'weight' is torch.float16 and 'dense' torch.float32"):
        outer_interaction_linear(dense, embeddings, weight.half(), bias)
    with pytest.raises(UnknownNameError) as refused:
        outer_interaction_linear(dense, embeddings, weight, bias, "rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")


def test_the_floor_counts_a_pair_once():
    args = tuple(torch.empty(shape, device="meta") for shape in ((2, 16), (2, 26, 16)))
    weight, bias = torch.empty(512, 432**2, device="meta"), torch.empty(512, device="meta")
    cost = OP.cost(*args, weight, bias, "identity")
    assert cost.flops == 2 * 512 * 432 * 433
    assert cost.bytes_read == 4 * (2 * 432 + 512 * 432**2 + 512)
    assert OP.cost_backward is not None
    assert OP.cost_backward(*args, weight, bias, "identity").flops == 2 * cost.flops


def test_workspace_of_the_gpu_kernels():
    """Half the weight, and 3.5 % of zeros; no more shares than steps."""
    assert folding.pair_count(432) == 96768
    assert folding.pair_count(1) == folding.pair_count(16) == 256
    for tiles, steps in ((1, 1), (1, 4), (3, 1512), (64, 378)):
        assert 1 <= layer_launch.shares(tiles, steps, 8, torch.device("cpu")) <= max(1, steps // 8)
    for tile in triton_launch._FORWARD.values():
        assert folding.BLOCK % tile.pairs_i == 0


def test_pieces_are_all_of_the_folded_weight_once():
    for width in (1, 16, 17, 64, 65, 432, 1000):
        for columns, size in ((1, 4), (512, 2), (4096, 4)):
            pieces = folding.pieces(width, columns, size)
            square = tile = 0
            for piece in pieces:
                assert (piece.first, piece.first_tile) == (square, tile)
                square, tile = square + piece.squares, tile + piece.tiles
            assert square * folding.BLOCK**2 == folding.pair_count(width)
            assert tile == folding.triangle(-(-width // folding.FOLD_TILE))
    published = [piece.pairs * 512 * 2 for piece in folding.pieces(432, 512, 2)]
    assert len(published) == 4
    assert max(published) <= folding.PIECE_BYTES
