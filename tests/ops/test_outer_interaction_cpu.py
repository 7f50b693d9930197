"""The C++ kernels of outer_interaction_linear: tiles and edges, strides, workspace, the choice."""

from __future__ import annotations

import math

import pytest
import torch
from interaction_cases import layer, normal

from fuselab.errors import UnsupportedError
from fuselab.ops import outer_interaction_linear
from fuselab.ops.outer_interaction_linear import cpu_launch
from fuselab.ops.outer_interaction_linear.op import OP, regime


def gradients(function, inputs, upstream):
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(function(*leaves), leaves, upstream)


# The forward without and with the weights of a pair's two places added; z of 1 to 140 elements:
# within a square, exactly a square, within a tile, across tiles; and more outputs than are folded
# at a time.
@pytest.mark.parametrize(
    ("batch", "tables", "width", "columns"),
    [(3, 0, 1, 2), (2, 0, 16, 5), (5, 2, 11, 3), (4, 3, 16, 7), (3, 4, 13, 4), (2, 6, 20, 300)],
)
@pytest.mark.parametrize("threshold", [0, 1000])
def test_values_and_gradients_in_float64(batch, tables, width, columns, threshold, monkeypatch):
    monkeypatch.setattr(cpu_launch, "FOLDED_FROM", threshold)
    monkeypatch.setattr(cpu_launch, "SUMMED_FROM", threshold)
    monkeypatch.setattr(cpu_launch, "_SHARE", 3 * (tables + 1) * width * batch)
    inputs = layer(batch, tables, width, columns, torch.float64)
    upstream = normal(batch, columns, dtype=torch.float64, seed=9)

    def ours(*tensors):
        return outer_interaction_linear(*tensors, "tanh", implementation="cpp")

    def reference(*tensors):
        return OP.reference(*tensors, "tanh")

    torch.testing.assert_close(ours(*inputs), reference(*inputs), rtol=1e-12, atol=1e-12)
    for mine, true in zip(
        gradients(ours, inputs, upstream), gradients(reference, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_pairs_are_weighed_by_both_of_their_places():
    """z = [2, 3]: 4 w00 + 6 (w01 + w10) + 9 w11."""
    dense, embeddings = torch.tensor([[2.0]]), torch.tensor([[[3.0]]])
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]], requires_grad=True)
    output = outer_interaction_linear(dense, embeddings, weight, implementation="cpp")
    assert output.tolist() == [[9664.0]]
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0, 6.0, 6.0, 9.0]]


@pytest.mark.parametrize("folded_from", [0, 1000])
def test_rows_of_the_weight_that_are_apart(folded_from, monkeypatch):
    monkeypatch.setattr(cpu_launch, "FOLDED_FROM", folded_from)
    dense, embeddings, weight, bias = layer(3, 1, 9, 4, torch.float64)
    wide = torch.full((4, weight.shape[1] + 5), float("nan"), dtype=torch.float64)
    wide[:, 2:-3] = weight
    apart = wide[:, 2:-3]
    assert not apart.is_contiguous()
    torch.testing.assert_close(
        outer_interaction_linear(dense, embeddings, apart, bias, implementation="cpp"),
        OP.reference(dense, embeddings, weight, bias),
    )


def test_sixteen_bits_are_refused_by_name():
    inputs = layer(2, 1, 2, 2, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="float32 or float64"):
        outer_interaction_linear(*inputs, implementation="cpp")


def test_what_is_not_asked_for_is_not_computed():
    inputs = layer(2, 1, 3, 2, torch.float64)
    upstream = normal(2, 2, dtype=torch.float64, seed=4)
    found = cpu_launch.backward((False, False, True, False), upstream, None, *inputs, "identity")
    assert [tensor is None for tensor in found] == [True, True, False, True]
    expected = gradients(OP.reference, inputs, upstream)
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.parametrize("folded_from", [0, 1000])
def test_the_outer_product_is_never_in_memory(folded_from, monkeypatch):
    """The largest allocation of a call is a tile's or a share's, here at most 1.5 MB for the outer
    product's 38 MB."""
    monkeypatch.setattr(cpu_launch, "FOLDED_FROM", folded_from)
    inputs = layer(96, 15, 20, 8, torch.float32)
    outer_bytes = 96 * (16 * 20) ** 2 * 4
    with torch.profiler.profile(profile_memory=True) as profiled:
        outer_interaction_linear(*inputs, implementation="cpp")
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert 0 < largest <= outer_bytes / 20


def test_regimes_are_classes_of_batches():
    assert [regime(torch.empty(rows, 1)) for rows in (0, 24, 25, 160, 161)] == [
        "to 24 samples",
        "to 24 samples",
        "to 160",
        "to 160",
        "more",
    ]


# A product of two factors of a term overflows, and the term does not: z W_n with z's other element
# 0, g z with a small weight, (g z) z, and W_n + W_nᵀ.
@pytest.mark.parametrize("folded_from", [0, 1000])
@pytest.mark.parametrize(
    ("elements", "weight", "upstream"),
    [
        ([0.0, 3e38], [[1.0, 2.0, 3.0, 0.0]], 1.0),
        ([2e38, 0.5], [[1e-9, 0.0, 0.0, 1e-9]], 100.0),
        ([1e18, 1e-15], [[1e-20, 1e-20, 1e-20, 1.0]], 1e21),
        ([1e-4, 2.0], [[0.0, 3e38, 3e38, 0.0]], 1e-3),
        ([math.inf, 1.0], [[1.0, 2.0, -3.0, 1.0]], 1.0),
        ([math.nan, 1.0], [[1.0, 2.0, -3.0, 1.0]], 1.0),
    ],
)
def test_what_overflows_in_no_order_but_ours(elements, weight, upstream, folded_from, monkeypatch):
    monkeypatch.setattr(cpu_launch, "FOLDED_FROM", folded_from)
    monkeypatch.setattr(cpu_launch, "SUMMED_FROM", folded_from)
    monkeypatch.setattr(cpu_launch, "_PIECE", 8)  # two samples
    samples = torch.tensor([elements, [1.0, 2.0], [0.25, -1.0]])
    inputs = [samples[:, :1], samples[:, 1:, None], torch.tensor(weight), torch.ones(1)]
    gradient = torch.full((3, 1), upstream)

    def ours(*tensors):
        return outer_interaction_linear(*tensors, implementation="cpp")

    torch.testing.assert_close(ours(*inputs), OP.reference(*inputs), equal_nan=True)
    found = gradients(ours, inputs, gradient)
    expected = OP.gradient.reference((True,) * 4, gradient, None, *inputs, "identity")
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, equal_nan=True)
