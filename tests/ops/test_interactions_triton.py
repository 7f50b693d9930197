"""The interactions' Triton kernels on the CPU, under Triton's interpreter in a child process.

bfloat16 is left to the GPU: the interpreter's stores truncate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from interaction_cases import (
    SHAPES,
    check,
    check_alone,
    check_output,
    layer,
    layouts,
    normal,
    special_vectors,
    vectors,
)

from fuselab.ops.cat_interaction.op import OP as CAT
from fuselab.ops.dot_interaction.op import OP as DOT
from fuselab.ops.outer_interaction_linear import folding
from fuselab.ops.outer_interaction_linear import triton_launch as outer_triton
from fuselab.ops.outer_interaction_linear.op import OP as OUTER
from fuselab.runtime import interpreter

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)
outer_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


def interpreted(op):
    launchers = f"fuselab.ops.{op.short_name}.triton_launch"
    forward, backward = (
        partial(interpreter.run, f"{launchers}:{step}") for step in ("forward", "backward")
    )
    return partial(check, op, forward, backward)


dot, outer = interpreted(DOT), interpreted(OUTER)
cat = partial(
    check_output,
    CAT,
    partial(interpreter.run, "fuselab.ops.cat_interaction.triton_launch:forward"),
)


def test_each_gradient_alone():
    for kernels, args in (
        (dot, vectors(3, 2, 5)),
        (outer, (*layer(3, 1, 3, 4), "relu")),
    ):
        check_alone(*kernels.args, *args)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot_shapes(shape, dtype):
    dot(*vectors(*shape, dtype), shape[0] % 3)


@dtypes
def test_dot_special_values(dtype):
    dot(*special_vectors(dtype))


@pytest.mark.parametrize("layout", layouts(6, 5, 7))
def test_layouts(layout):
    dot(*layouts(6, 5, 7)[layout])
    cat(*layouts(6, 5, 7)[layout])


def test_upstream_gradients_of_any_stride():
    inputs = vectors(4, 3, 5)
    for upstream in (torch.ones(()).expand(4, 11), normal(11, 4).t(), normal(4, 22)[:, 1::2]):
        dot(*inputs, upstream=upstream)


@dtypes
def test_cat(dtype):
    for shape in ((1, 0, 1), (9, 3, 5), (8, 3, 128), (8, 3, 129)):
        cat(*vectors(*shape, dtype))


@outer_dtypes
@pytest.mark.parametrize(
    "shape",
    [(1, 0, 1, 1), (3, 1, 2, 3), (2, 2, 5, 2), (3, 0, 16, 2), (3, 0, 17, 2), (2, 4, 7, 3)],
    ids=str,
)
def test_outer_shapes(shape, dtype):
    """One block of elements, two and three; the last of them whole, and not."""
    outer(*layer(*shape, dtype), "identity")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_outer_activations(activation):
    """One whose gradient takes the output, one whose pre-activation is computed again."""
    dense, embeddings, weight, _ = layer(3, 1, 3, 4)
    outer(dense, embeddings, weight, None, activation)


def test_outer_tiles():
    """More samples and outputs than a tile has: 64 x 64 in float32, pieces of 16 in backward; in
    float16 64 x 128 of the weight's gradient, with squares of 16 of 17 elements."""
    outer(*layer(67, 1, 3, 66), "identity")
    outer(*layer(65, 0, 17, 129, torch.float16), "identity")


@outer_dtypes
@pytest.mark.parametrize("tables", [0, 1, 3])
def test_outer_special_values(dtype, tables):
    """An infinite product meets W[i, j] and W[j, i] of either sign: in a sample of two elements
    their sum is rarely NaN by another pair."""
    dense, embeddings = special_vectors(dtype, max(tables, 2), 2)
    _, _, weight, bias = layer(1, tables, 2, 5, dtype)
    outer(dense, embeddings[:, :tables], weight, bias, "identity")


@outer_dtypes
@pytest.mark.parametrize("tables", [0, 1, 3])
def test_outer_terms_that_overflow(dtype, tables):
    """The largest number in either place, times weights of either sign."""
    dense, embeddings, weight, bias = layer(6, tables, 2, 5, dtype)
    for place in (0, 1):
        dense[place, place] = torch.finfo(dtype).max
    forward = partial(interpreter.run, "fuselab.ops.outer_interaction_linear.triton_launch:forward")
    check_output(OUTER, forward, dense, embeddings, weight * 4, bias, "identity")


def in_tf32(step: str, *args: Any) -> Any:
    """In the interpreter's process, whose products are exact: only operands are rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return getattr(outer_triton, step)(*args)
    finally:
        torch.set_float32_matmul_precision(before)


def test_outer_rounds_its_operands_to_the_nearest_tf32():
    dense, embeddings, weight, _ = layer(5, 1, 3, 4)
    run = partial(interpreter.run, f"{__name__}:in_tf32")
    upstream = normal(5, 4, seed=9)
    inputs = dense, embeddings, weight, None, "identity"
    output = run("forward", *inputs)
    needs = (True, True, True, False)
    *of_row, of_weight, _ = run("backward", needs, upstream, *OUTER.gradient.save(output, *inputs))

    def nearest(value):
        fraction, exponent = value.double().frexp()
        return torch.ldexp((fraction * 2**11).round() / 2**11, exponent)

    z = torch.cat([dense, embeddings.flatten(1)], 1)
    products = nearest(z[:, :, None] * z[:, None, :])
    square = weight.view(4, 6, 6)
    folded = nearest(torch.where(torch.eye(6) > 0, square, square + square.mT)).triu()
    expected = (products.flatten(1) @ folded.flatten(1).t()).float()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    expected = (nearest(upstream).t() @ products.flatten(1)).float()
    torch.testing.assert_close(of_weight, expected, rtol=1e-5, atol=1e-6)
    pulled = torch.einsum("bn,nij->bij", nearest(upstream), folded)
    expected = torch.einsum("bij,bj->bi", pulled + pulled.mT, z.double()).float()
    ours = torch.cat([of_row[0], of_row[1].flatten(1)], 1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for bits, sign in ((0x7FFFFFFF, 1), (0x7F800000, 1), (0x7F800000, -1)):
        dense = torch.full((1, 1), bits, dtype=torch.int32).view(torch.float32)
        ours = run(
            "forward", dense, torch.zeros(1, 0, 1), torch.full((1, 1), 1.0 * sign), *inputs[3:]
        )
        torch.testing.assert_close(ours, dense * sign, equal_nan=True)


def in_small_pieces(step: str, *args: Any) -> Any:
    """In the interpreter's process: the weight folded a row of tiles at a time."""
    before, folding.PIECE_BYTES = folding.PIECE_BYTES, 1
    try:
        return getattr(outer_triton, step)(*args)
    finally:
        folding.PIECE_BYTES = before


def test_outer_in_pieces():
    """Elements past a row of tiles (64): the second piece adds to the first one's shares."""
    steps = (
        partial(interpreter.run, f"{__name__}:in_small_pieces", step)
        for step in ("forward", "backward")
    )
    partial(check, OUTER, *steps)(*layer(5, 4, 13, 6, torch.float16), "identity")


def test_outer_transposed():
    for rows, width in ((1, 1), (9, 65), (70, 64)):
        z = normal(rows, width)
        name = "fuselab.ops.outer_interaction_linear.triton_launch:transposed"
        ours = interpreter.run(name, z)
        assert torch.equal(ours, z.t()) and ours.stride(0) % 8 == 0


def test_outer_layouts():
    _, _, weight, bias = layer(1, 2, 3, 4)
    for dense, embeddings in layouts(4, 2, 3).values():
        outer(dense, embeddings, weight, bias, "identity")
    dense, embeddings = vectors(4, 2, 3)
    padded = normal(4, 90)[:, 2:83]
    outer(dense, embeddings, padded, bias, "identity", upstream=torch.ones(()).expand(4, 4))
    outer(dense, embeddings, normal(81, 4).t(), normal(8)[::2], "identity")
