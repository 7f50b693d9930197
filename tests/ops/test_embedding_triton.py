"""The Triton kernels of the embeddings on the CPU, under Triton's interpreter in a child process.

bfloat16 is left to the GPU: the interpreter's stores truncate.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from embedding_cases import assert_near, exact_adagrad, exact_gradients, exact_look_up, made

from fuselab.ops.embedding_lookup import triton_launch
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.runtime import interpreter

forward = partial(interpreter.run, "fuselab.ops.embedding_lookup.triton_launch:forward")
backward = partial(interpreter.run, "fuselab.ops.embedding_lookup.triton_launch:backward")
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)
RULES = {"error": 0, "clamp": 3, "ignore": 3, "modulus": 200}
rules = pytest.mark.parametrize("rule", RULES)
SIZES = (3, 1, 105)


def named(rule):
    return ("error", rule) if rule == "modulus" else (rule, None)


def changed(how, tables, states, ids, grad):
    """The child's side of an update: a child's changes to its arguments stay there."""
    rows = [len(table) for table in tables]
    triton_launch.change(how, tables, rows, states, ids, grad)
    return tables, states


@dtypes
@rules
def test_look_up(dtype, rule):
    for batch, width in ((9, 3), (130, 16), (3, 129)):
        tables, ids, _ = made(batch, width, dtype, SIZES, RULES[rule])
        assert torch.equal(
            forward(tables, ids, *named(rule), None), exact_look_up(tables, ids, rule)
        )


@pytest.mark.parametrize(
    "dtype, other",
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float16),
    ],
)
def test_another_dtype(dtype, other):
    """Of the result, and of the gradient that comes back."""
    tables, ids, grad = made(35, 17, dtype, SIZES)
    output = forward(tables, ids, "error", None, other)
    assert output.dtype == other and torch.equal(output, exact_look_up(tables, ids).to(other))
    rows, grad = [len(table) for table in tables], grad.to(other)
    grads = backward([True] * 3 + [False], grad, ids, rows, "error", None, dtype)
    assert [one.dtype for one in grads[:3]] == [dtype] * 3
    assert_near(list(grads[:3]), exact_gradients(tables, ids, grad), 35**0.5)


def test_look_up_of_layouts():
    flat = torch.randn(40, 6)
    tables = [flat[:10], flat[10:11], flat[11:40:2]]
    _, ids, _ = made(20, 6, sizes=tuple(map(len, tables)))
    for laid_out in (ids.int(), ids.t().contiguous().t(), ids[::3], ids[:1].expand(7, -1)):
        output = forward(tables, laid_out, "error", None, None)
        assert torch.equal(output, exact_look_up(tables, laid_out))


@pytest.mark.parametrize(
    "dtype, rule",
    [(torch.float32, rule) for rule in RULES]
    + [(torch.float16, "error"), (torch.float64, "error")],
)
def test_gradients(dtype, rule):
    """Runs of one row go through 2 pieces and, in wide rows, 5, of which 4 are added at a time."""
    for batch, width in ((35, 17), (33, 129) if dtype == torch.float16 else (1, 1)):
        tables, ids, grad = made(batch, width, dtype, SIZES, RULES[rule])
        rows = [len(table) for table in tables]
        grads = backward([True] * 3 + [False], grad, ids, rows, *named(rule), dtype)
        exact = exact_gradients(tables, ids, grad, rule)
        for ours, right in zip(grads[:3], exact, strict=True):
            assert ours.dtype == dtype
            limit = 4 * torch.finfo(dtype).eps * batch**0.5 * float(right.abs().max())
            assert float((ours.double() - right).abs().max()) <= limit


@dtypes
@pytest.mark.parametrize("update", ["sgd", "rowwise_adagrad"])
def test_updates(dtype, update):
    for rule, batch, width in (("ignore", 35, 17), ("modulus", 20, 3)):
        tables, ids, grad = made(batch, width, dtype, SIZES, RULES[rule])
        states = [torch.rand(size, dtype=torch.float64) for size in SIZES]
        states = states if dtype == torch.float64 else [state.float() for state in states]
        grads = exact_gradients(tables, ids, grad, rule)
        expected = [table.double() - 0.1 * one for table, one in zip(tables, grads, strict=True)]
        if update != "sgd":
            expected, totals = exact_adagrad(tables, states, grads, 0.1, 1e-8)
        how = RowUpdate(update, dtype, *named(rule), 0.1, 1e-8)
        tables, states = interpreter.run(f"{__file__}:changed", how, tables, states, ids, grad)
        assert_near(tables, expected, 0.1 * batch**0.5)
        if update != "sgd":
            for ours, right in zip(states, totals, strict=True):
                torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=1e-6)
