"""embedding_lookup: values, gradients, rules for stray ids, refusals, on the CPU."""

from __future__ import annotations

import pytest
import torch
from embedding_cases import WIDTHS, assert_near, exact_gradients, exact_look_up, made

from fuselab.errors import (
    ArgumentError,
    DtypeError,
    IndexRangeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.ops import embedding_lookup
from fuselab.ops.embedding_lookup.cases import CASES
from fuselab.ops.embedding_lookup.op import OP
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import alignment
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])
RULES = {"error": 0, "clamp": 3, "ignore": 3, "modulus": 200}
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def arguments(rule):
    return {"hash": rule} if rule == "modulus" else {"out_of_range": rule}


@implementations
@dtypes
def test_values_are_copied_exactly(implementation, dtype):
    for width in WIDTHS:
        tables, ids, _ = made(9, width, dtype)
        tables[0][0, 0] = float("nan")
        tables[2][:, -1] = -0.0
        output = embedding_lookup(tables, ids, implementation=implementation)
        assert output.is_contiguous() and output.dtype == dtype
        expected = exact_look_up(tables, ids)
        assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))


@implementations
@pytest.mark.parametrize("place, other", [(0, 1), (0, 2), (2, 0), (3, 2)])
def test_another_dtype(implementation, place, other):
    """The result rounded once, NaN and zeros of ignored ids included; gradients in the tables'."""
    dtype, other = DTYPES[place], DTYPES[other]
    tables, ids, grad = made(40, 5, dtype, stray=3)
    tables[0][0, 0] = float("nan")
    options = {"dtype": other, "out_of_range": "ignore", "implementation": implementation}
    leaves = [table.requires_grad_() for table in tables]
    output = embedding_lookup(leaves, ids, **options)
    expected = exact_look_up([table.detach() for table in tables], ids, "ignore").to(other)
    assert output.dtype == other and output.is_contiguous() and output.isnan().any()
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())
    grad = grad.to(other)
    grads = torch.autograd.grad(output, leaves, grad)
    assert [one.dtype for one in grads] == [dtype] * 5
    if implementation == "cpp" or dtype in (torch.float32, torch.float64):
        assert_near(list(grads), exact_gradients(tables, ids, grad, "ignore"), 10.0)


def test_no_gradient_of_an_empty_table_is_left_to_pytorch():
    """``aten::embedding_dense_backward`` of width 0 is an illegal memory access on a GPU."""
    for rows, width in ((3, 0), (0, 4), (0, 0)):
        tables = [torch.randn(rows, width, requires_grad=True) for _ in range(2)]
        ids = torch.zeros(5, 2, dtype=torch.int64)
        output = OP.reference(tables, ids, "error" if rows else "ignore")
        assert output.shape == (5, 2, width)
        nodes, names = [output.grad_fn], []
        while nodes:
            node = nodes.pop()
            names.append(node.name())
            nodes += [following for following, _ in node.next_functions if following is not None]
        assert "SumBackward0" in names
        assert not any("Embedding" in name for name in names)
        grads = torch.autograd.grad(output, tables, torch.ones_like(output))
        assert [grad.shape for grad in grads] == [(rows, width)] * 2


def test_the_reference_has_a_second_derivative_without_ids():
    """``F.embedding``'s raises: it reshapes no elements to ``(0, -1)``."""
    table = torch.randn(3, 2, requires_grad=True)
    output = OP.reference([table], torch.zeros(0, 1, dtype=torch.int64))
    assert output.shape == (0, 1, 2)
    upstream = torch.zeros(0, 1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(output, table, upstream, create_graph=True)
    assert torch.equal(grad, torch.zeros(3, 2))
    (second,) = torch.autograd.grad(grad.sum(), upstream)
    assert second.shape == upstream.shape


@implementations
@rules
def test_stray_ids(implementation, rule):
    tables, ids, _ = made(300, 5, stray=RULES[rule])
    for given in (ids, ids.int()):
        output = embedding_lookup(tables, given, implementation=implementation, **arguments(rule))
        assert torch.equal(output, exact_look_up(tables, ids, rule))


# The reference's 16-bit gradients are eager's, which adds in 16 bits.
@pytest.mark.parametrize(
    "implementation, dtype",
    [*(("cpp", dtype) for dtype in DTYPES), *(("reference", dtype) for dtype in DTYPES[::3])],
)
@rules
def test_gradients(implementation, dtype, rule):
    for batch, width in ((600, 3), (40, 16)):
        tables, ids, grad = made(batch, width, dtype, stray=RULES[rule])
        leaves = [table.requires_grad_() for table in tables]
        output = embedding_lookup(leaves, ids, implementation=implementation, **arguments(rule))
        grads = torch.autograd.grad(output, leaves, grad)
        exact = exact_gradients(tables, ids, grad, rule)
        for ours, right in zip(grads, exact, strict=True):
            assert ours.dtype == dtype and ours.shape == right.shape
            accumulation = (
                batch * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
            )
            limit = (torch.finfo(dtype).eps + accumulation) * float(right.abs().max())
            assert float((ours.double() - right).abs().max()) <= limit
        assert float(exact[0].abs().max()) > 1


def test_long_sums_are_not_one_chain_of_floats():
    """2048 gradients of 1.1 for one row: added one by one in float32 they end 57 ulp off."""
    table, ids = torch.zeros(2, 3, requires_grad=True), torch.ones(2048, 1, dtype=torch.int64)
    embedding_lookup([table], ids, implementation="cpp").backward(torch.full((2048, 1, 3), 1.1))
    exact = 2048 * torch.full((3,), 1.1).double()
    assert torch.equal(table.grad[1], exact.float())


@implementations
def test_upstream_gradients_of_any_stride(implementation):
    tables, ids, _ = made(6, 4)
    leaves = [table.requires_grad_() for table in tables]
    output = embedding_lookup(leaves, ids, implementation=implementation)
    for grad in (
        torch.ones(()).expand(6, 5, 4),
        torch.randn(4, 5, 6).permute(2, 1, 0),
        torch.randn(6, 1, 4).expand(6, 5, 4),
        torch.randn(6, 5, 9)[..., 1:5],
        torch.randn(6, 10, 4)[:, ::2],
    ):
        grads = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        assert_near(list(grads), exact_gradients(tables, ids, grad), 1.0)


@implementations
def test_layouts_of_tables_and_ids(implementation):
    flat = torch.randn(40, 6)
    tables = [flat[:10], flat[10:11], flat[11:40:2], flat[::4, 1:4].repeat(1, 2), flat.t()[:, :6]]
    tables += [flat[0].expand(9, 6)]
    _, ids, _ = made(20, 6, sizes=tuple(map(len, tables)))
    for laid_out in (ids, ids.t().contiguous().t(), ids[::3], ids[:1].expand(7, -1)):
        output = embedding_lookup(tables, laid_out, implementation="reference")
        assert torch.equal(output, exact_look_up(tables, laid_out))
        taken = tables if implementation == "reference" else [*tables[:4], tables[0], tables[5]]
        output = embedding_lookup(taken, laid_out.clamp(max=5), implementation=implementation)
        expected = torch.stack(
            [table[laid_out[:, c].clamp(max=5)] for c, table in enumerate(taken)], 1
        )
        assert torch.equal(output, expected)


@implementations
def test_edges_of_the_table_count(implementation):
    for count in (1, 32, 33, 256, 257):
        tables, ids, grad = made(3, 2, sizes=(4,) * count)
        leaves = [table.requires_grad_() for table in tables]
        output = embedding_lookup(leaves, ids, implementation=implementation)
        assert torch.equal(output, exact_look_up(tables, ids))
        grads = torch.autograd.grad(output, leaves, grad)
        for ours, right in zip(grads, exact_gradients(tables, ids, grad), strict=True):
            torch.testing.assert_close(ours, right.float())


@implementations
def test_empty_batches_and_tables(implementation):
    tables, ids, _ = made(0, 4)
    leaves = [table.requires_grad_() for table in tables]
    output = embedding_lookup(leaves, ids, implementation=implementation)
    assert output.shape == (0, 5, 4)
    grads = torch.autograd.grad(output, leaves, output)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    empty = torch.empty(0, 4)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    ignored = embedding_lookup([empty], ids, "ignore", implementation=implementation)
    assert torch.equal(ignored, torch.zeros(3, 1, 4))
    with pytest.raises(IndexRangeError, match="which has 0 rows"):
        embedding_lookup([empty], ids, implementation=implementation)
    with pytest.raises(IndexRangeError, match="which has 2 rows"):
        embedding_lookup([torch.empty(2, 0)], ids + 2, implementation=implementation)
    for rule in ("clamp", "modulus"):
        with pytest.raises(ArgumentError, match=r"'tables\[0\]' has no rows"):
            embedding_lookup([empty], ids, implementation=implementation, **arguments(rule))


@implementations
@pytest.mark.parametrize("stray", [105, -1, 2**40])
def test_an_id_out_of_range_is_an_index_error_that_names_it(implementation, stray):
    tables, ids, _ = made(9, 4)
    ids[5, 2] = stray
    message = f"'ids' has {stray} in sample 5 for table 2, which has 105 rows"
    with pytest.raises(IndexRangeError, match=message):
        embedding_lookup(tables, ids, implementation=implementation)
    with pytest.raises(IndexError):
        embedding_lookup(tables, ids, implementation=implementation)


def test_only_some_tables_need_a_gradient():
    tables, ids, grad = made(30, 4)
    tables[3].requires_grad_()
    embedding_lookup(tables, ids).backward(grad)
    assert [table.grad is None for table in tables] == [True, True, True, False, True]
    assert_near([tables[3].grad], exact_gradients(tables, ids, grad)[3:4], 1.0)


@implementations
def test_second_derivatives(implementation):
    tables, ids, _ = made(4, 3, torch.float64, sizes=(3, 2))
    leaves = [table.requires_grad_() for table in tables]

    def function(*given):
        return embedding_lookup(given, ids, implementation=implementation).sin()

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_batched_upstream_gradients_are_refused_but_under_vmap():
    tables, ids, _ = made(6, 4, sizes=(3, 5))
    upstream = torch.randn(7, 6, 2, 4)
    leaves = [table.clone().requires_grad_() for table in tables]
    output = embedding_lookup(leaves, ids, implementation="cpp")
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*torch\.func\.vmap"):
        torch.autograd.grad(output, leaves, upstream, is_grads_batched=True)
    _, pull = torch.func.vjp(lambda *given: embedding_lookup(given, ids), *tables)
    for ours, table in zip(torch.func.vmap(pull)(upstream), (0, 1), strict=True):
        for one, grad in zip(ours, upstream, strict=True):
            torch.testing.assert_close(
                one.double(), exact_gradients(tables, ids, grad)[table], rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_gradients(dynamic):
    compiled = torch.compile(
        lambda tables, ids: embedding_lookup(tables, ids, hash="modulus") * 2,
        backend="aot_eager",
        fullgraph=True,
        dynamic=dynamic,
    )
    for batch in (5, 9):
        tables, ids, grad = made(batch, 4, sizes=(5, 7), stray=30)
        leaves = [table.requires_grad_() for table in tables]
        output = compiled(leaves, ids)
        assert torch.equal(output, 2 * exact_look_up(tables, ids, "modulus"))
        grads = torch.autograd.grad(output, leaves, grad)
        assert_near(list(grads), exact_gradients(tables, ids, 2 * grad, "modulus"), 1.0)


def test_refusals():
    tables, ids, _ = made(2, 4)
    with pytest.raises(ArgumentError, match="'tables' is empty"):
        embedding_lookup([], ids[:, :0])
    with pytest.raises(ShapeError, match=r"'tables\[1\]' has shape \(4,\)"):
        embedding_lookup([tables[0], tables[1][0]], ids[:, :2])
    with pytest.raises(ShapeError, match=r"'tables\[1\]' is 3 wide and 'tables\[0\]' 4"):
        embedding_lookup([tables[0], tables[1][:, :3]], ids[:, :2])
    with pytest.raises(DtypeError, match=r"'tables\[1\]' is torch\.float64 and 'tables\[0\]'"):
        embedding_lookup([tables[0], tables[1].double()], ids[:, :2])
    with pytest.raises(DtypeError, match=r"'tables\[0\]' is torch\.int64"):
        embedding_lookup([tables[0].long()], ids[:, :1])
    with pytest.raises(DtypeError, match=r"'dtype' is torch\.int64"):
        embedding_lookup(tables, ids, dtype=torch.int64)
    with pytest.raises(DtypeError, match=r"'ids' is torch\.float32"):
        embedding_lookup(tables, ids.float())
    with pytest.raises(ShapeError, match="'ids' has shape"):
        embedding_lookup(tables, ids[:, :4])
    with pytest.raises(UnknownNameError) as refused:
        embedding_lookup(tables, ids, "wrap")
    assert (refused.value.kind, refused.value.name) == ("out_of_range", "wrap")
    with pytest.raises(UnknownNameError) as refused:
        embedding_lookup(tables, ids, hash="md5")
    assert (refused.value.kind, refused.value.name) == ("hash", "md5")


def test_cases():
    for case in CASES:
        if "bench" not in case.tags:
            inputs = case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(2))
            reference = embedding_lookup(*inputs.args, **inputs.kwargs, implementation="reference")
            assert torch.equal(embedding_lookup(*inputs.args, **inputs.kwargs), reference)


def test_cost_counts_rows_once():
    tables, ids, _ = made(10, 4, sizes=(3, 100))
    cost = OP.cost(tables, ids, "error", None, None)
    assert cost.bytes_read == 10 * 2 * 8 + (3 + 10) * 16 and cost.bytes_written == 10 * 2 * 16


@pytest.mark.parametrize(
    "width, itemsize, alignment, spread",
    [
        (16, 4, 16, (4, 4, 1)),
        (16, 2, 16, (8, 2, 1)),
        (16, 8, 16, (2, 8, 1)),
        (1, 4, 4, (1, 1, 1)),
        (7, 4, 4, (1, 8, 1)),
        (128, 4, 16, (4, 32, 1)),
        (129, 4, 4, (1, 32, 8)),
        (1024, 8, 16, (2, 32, 16)),
    ],
)
def test_spread_of_a_row(width, itemsize, alignment, spread):
    chosen = Spread.of(width, itemsize, alignment)
    assert (chosen.vector, chosen.lanes, chosen.tiles) == spread
    assert chosen.vector * chosen.lanes * chosen.tiles >= width


@pytest.mark.parametrize(
    "width, dtype, grad_dtype, spread",
    [
        (16, torch.float32, torch.bfloat16, (4, 4, 1)),
        (16, torch.bfloat16, torch.float32, (4, 4, 1)),
        (16, torch.float64, torch.float16, (2, 8, 1)),
        (6, torch.float32, torch.bfloat16, (2, 4, 1)),
        (7, torch.float32, torch.bfloat16, (1, 8, 1)),
    ],
)
def test_spread_of_a_row_and_a_gradient_of_another_dtype(width, dtype, grad_dtype, spread):
    """Rows of 16-bit gradients beside float32 rows lie half as far apart."""
    tables, _, grad = made(4, width, dtype)
    how = RowUpdate("gradient", dtype, "error", None)
    chosen = Spread.of_change(how, tables, grad.to(grad_dtype))
    assert (chosen.vector, chosen.lanes, chosen.tiles) == spread


def test_alignment_of_addresses_and_distances():
    assert alignment(512, 64) == 16
    assert alignment(512, 68) == 4
    assert alignment(520, 0) == 8
