"""The embedding operators on a GPU: both implementations and orders of addition, large offsets."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import pytest
import torch
from embedding_cases import SIZES, WIDTHS, assert_near, exact_adagrad, exact_look_up, made

from fuselab.ops import embedding_adagrad_, embedding_lookup, embedding_sgd_
from fuselab.ops.embedding_lookup import updating_embedding_lookup
from fuselab.ops.embedding_lookup.cases import CASES
from fuselab.ops.embedding_lookup.op import OP as LOOK_UP
from fuselab.ops.embedding_update.op import ADAGRAD, SGD
from fuselab.runtime import tuning
from fuselab.runtime.fallback import strict
from fuselab.runtime.gpu_limits import multiprocessors

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cuda", "triton"])
RULES = {"error": 0, "clamp": 3, "ignore": 3, "modulus": 200}
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


@pytest.fixture(params=[False, True], ids=["any order", "fixed order"])
def fixed_order(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def arguments(rule):
    return {"hash": rule} if rule == "modulus" else {"out_of_range": rule}


def rule_and_hash(rule):
    return ("error", rule) if rule == "modulus" else (rule, None)


def rows_of(table, ids, rule):
    """The rows of one table, zeros for none, by indexing."""
    if rule == "modulus":
        return table[ids % len(table)]
    inside = (ids >= 0) & (ids < len(table))
    rows = table[ids.clamp(0, len(table) - 1)]
    return rows if rule == "clamp" else torch.where(inside[:, None], rows, 0)


def gradients(tables, ids, grad_output, rule):
    """Each row's summed gradient in float64, and the sum of its magnitudes."""
    found = []
    for place, table in enumerate(tables):
        row, grad = ids[:, place].cpu().long(), grad_output[:, place].cpu().double()
        if rule == "modulus":
            row = row % len(table)
        if rule == "clamp":
            row = row.clamp(0, len(table) - 1)
        inside = (row >= 0) & (row < len(table))
        zeros = torch.zeros(table.shape, dtype=torch.float64)
        sums = zeros.index_add(0, row[inside], grad[inside])
        found.append(
            (sums.to(table.device), zeros.index_add(0, row[inside], grad[inside].abs()).max())
        )
    return found


@implementations
@rules
@dtypes
def test_look_up(implementation, rule, dtype):
    for batch, width in (*((9, width) for width in WIDTHS), (700, 16), (3, 1200)):
        tables, ids, _ = made(batch, width, dtype, stray=RULES[rule], device="cuda")
        for given in (ids, ids.int()):
            output = embedding_lookup(
                tables, given, implementation=implementation, **arguments(rule)
            )
            assert torch.equal(output, exact_look_up(tables, ids, rule))


@implementations
@pytest.mark.parametrize("dtype, other", list(permutations(DTYPES, 2)))
def test_another_dtype(implementation, dtype, other, fixed_order):
    """Of the result and of the gradients that come back, on both sides of a vector's width."""
    for batch, width in ((70, 16), (70, 17), (70, 2), (1025, 6), (5000, 16)):
        tables, ids, grad = made(batch, width, dtype, stray=3, device="cuda")
        options = {"out_of_range": "ignore", "dtype": other, "implementation": implementation}
        leaves = [table.requires_grad_() for table in tables]
        output = embedding_lookup(leaves, ids, **options)
        right = embedding_lookup(tables, ids, "ignore", implementation=implementation).to(other)
        assert output.dtype == other
        if dtype == torch.float64:  # eager rounds it to float32 on its way to 16 bits
            torch.testing.assert_close(output, right)
        else:
            assert torch.equal(output, right)
        grad = grad.to(other)
        grads = torch.autograd.grad(output, leaves, grad)
        exact = [one for one, _ in gradients(tables, ids, grad, "ignore")]
        assert [one.dtype for one in grads] == [dtype] * len(tables)
        assert_near(list(grads), exact, 2 * batch**0.5)


@implementations
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_updates_by_16_bit_gradients(implementation, grad_dtype, fixed_order):
    for batch, width in ((1, 16), (257, 3), (3000, 16), (70, 1024)):
        tables, ids, grad = made(batch, width, device="cuda")
        start, grad = [table.clone() for table in tables], grad.to(grad_dtype)
        exact = [one for one, _ in gradients(tables, ids, grad, "error")]
        embedding_sgd_(tables, ids, grad, 0.1, implementation=implementation)
        expected = [one.double() - 0.1 * other for one, other in zip(start, exact, strict=True)]
        assert_near(tables, expected, batch**0.5)
        states = [torch.rand(size, device="cuda") for size in SIZES]
        expected, _ = exact_adagrad(start, states, exact, 0.1, 1e-8)
        embedding_adagrad_(start, states, ids, grad, 0.1, 1e-8, implementation=implementation)
        assert_near(start, expected, 1.0)


@implementations
def test_look_up_of_layouts(implementation):
    flat = torch.randn(41, 8, device="cuda")
    tables = [flat[:10], flat[10:11], flat[11:40:2], flat.flatten()[1:25].view(3, 8), flat[:1]]
    tables += [flat[0].expand(9, 8), flat.flatten()[2:26].view(3, 8)]
    _, ids, _ = made(20, 8, sizes=tuple(map(len, tables)), device="cuda")
    for laid_out in (ids, ids.t().contiguous().t(), ids[::3], ids[:1].expand(7, -1)):
        output = embedding_lookup(tables, laid_out, implementation=implementation)
        assert torch.equal(output, exact_look_up(tables, laid_out))


@implementations
@rules
@dtypes
def test_gradients(implementation, rule, dtype, fixed_order):
    """Batches on both sides of a block's samples, of a piece of a run and of what is sorted by
    table; rows met 5000 times."""
    shapes = [(batch, 16) for batch in (1, 6, 7, 31, 255, 256, 257, 1023, 1025, 3000, 5000)]
    for batch, width in (*shapes, *((70, width) for width in (*WIDTHS, 1024))):
        tables, ids, grad = made(batch, width, dtype, stray=RULES[rule], device="cuda")
        leaves = [table.requires_grad_() for table in tables]
        output = embedding_lookup(leaves, ids, implementation=implementation, **arguments(rule))
        grads = torch.autograd.grad(output, leaves, grad)
        sums_in = torch.float64 if dtype == torch.float64 else torch.float32
        for ours, (exact, most) in zip(grads, gradients(tables, ids, grad, rule), strict=True):
            largest = float(exact.abs().max())
            limit = torch.finfo(dtype).eps * largest + 8 * torch.finfo(sums_in).eps * float(most)
            assert float((ours.double() - exact).abs().max()) <= limit, (batch, width)


@pytest.mark.parametrize("implementation", ["cuda", "triton", "reference"])
@dtypes
def test_gradients_of_empty_tables(implementation, dtype):
    """Eager's gradient of ``F.embedding`` at width 0 is an illegal access, which shows later."""
    for rows, width in ((3, 0), (0, 4), (0, 0)):
        tables = [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2)]
        leaves = [table.requires_grad_() for table in tables]
        ids = torch.zeros(5, 2, dtype=torch.int64, device="cuda")
        rule = "error" if rows else "ignore"
        output = embedding_lookup(leaves, ids, rule, implementation=implementation)
        assert output.shape == (5, 2, width) and not output.any()
        grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
        torch.cuda.synchronize()
        assert [grad.shape for grad in grads] == [(rows, width)] * 2


@implementations
@rules
@dtypes
def test_updates(implementation, rule, dtype, fixed_order):
    for batch, width in ((1, 16), (33, 16), (257, 3), (3000, 16), (70, 128), (70, 1024)):
        tables, ids, grad = made(batch, width, dtype, stray=RULES[rule], device="cuda")
        grads = [exact for exact, _ in gradients(tables, ids, grad, rule)]
        start = [table.clone() for table in tables]
        options = {"implementation": implementation, **arguments(rule)}
        embedding_sgd_(tables, ids, grad, 0.1, **options)
        expected = [table.double() - 0.1 * one for table, one in zip(start, grads, strict=True)]
        assert_near(tables, expected, batch**0.5)
        tables = [table.clone() for table in start]
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        states = [torch.rand(size, device="cuda", dtype=state_dtype) for size in SIZES]
        expected, totals = exact_adagrad(start, states, grads, 0.1, 1e-8)
        embedding_adagrad_(tables, states, ids, grad, 0.1, 1e-8, **options)
        assert_near(tables, expected, 1.0)
        for ours, right in zip(states, totals, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=1e-6)


@implementations
def test_many_tables(implementation, fixed_order):
    for count in (1, 32, 33, 128, 256, 257):
        if implementation == "triton" and count > 128:
            continue  # refused, see test_refusals
        tables, ids, grad = made(300, 8, sizes=(4,) * count, device="cuda")
        exact = [one for one, _ in gradients(tables, ids, grad, "error")]
        output = embedding_lookup(tables, ids, implementation=implementation)
        assert torch.equal(output, exact_look_up(tables, ids))
        expected = [table.double() - 0.1 * one for table, one in zip(tables, exact, strict=True)]
        embedding_sgd_(tables, ids, grad, 0.1, implementation=implementation)
        assert_near(tables, expected, 100.0)


@implementations
def test_upstream_gradients_of_any_stride(implementation, fixed_order):
    tables, ids, _ = made(40, 8, device="cuda")
    leaves = [table.requires_grad_() for table in tables]
    output = embedding_lookup(leaves, ids, implementation=implementation)
    for grad in (
        torch.ones((), device="cuda").expand(40, 5, 8),
        torch.randn(8, 5, 40, device="cuda").permute(2, 1, 0),
        torch.randn(40, 1, 8, device="cuda").expand(40, 5, 8),
        torch.randn(40, 5, 9, device="cuda")[..., 1:],
        torch.randn(40, 10, 8, device="cuda")[:, ::2],
    ):
        grads = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        exact = [one for one, _ in gradients(tables, ids, grad, "error")]
        assert_near(list(grads), exact, 40.0)


def test_only_some_tables_need_a_gradient(fixed_order):
    tables, ids, grad = made(300, 4, device="cuda")
    tables[3].requires_grad_()
    embedding_lookup(tables, ids, implementation="cuda").backward(grad)
    assert [table.grad is None for table in tables] == [True, True, True, False, True]
    assert_near([tables[3].grad], [gradients(tables, ids, grad, "error")[3][0]], 40.0)


@pytest.mark.parametrize("update", ["sgd", "rowwise_adagrad"])
@implementations
def test_a_fixed_order_gives_the_same_bits(implementation, update):
    torch.use_deterministic_algorithms(True)
    results = []
    for _ in range(3):
        tables, ids, grad = made(5000, 16, sizes=(3, 7, 100_000), device="cuda")
        states = [torch.zeros(len(table), device="cuda") for table in tables]
        if update == "sgd":
            embedding_sgd_(tables, ids, grad, 0.1, implementation=implementation)
        else:
            embedding_adagrad_(tables, states, ids, grad, 0.1, implementation=implementation)
        results.append((*tables, *states))
    torch.use_deterministic_algorithms(False)
    assert all(
        torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True)
    )


@implementations
def test_a_row_has_one_step_size(implementation):
    """Lanes that hold one column each must not round the row's sum of squares each in its way:
    columns 0 and 17 lie in the two halves of a warp, and have the same gradient."""
    draws = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    grad = torch.zeros(512, 1, 19)
    grad[:, 0, [0, 17]] = draws[0, :, None]
    grad[:, 0, 16] = draws[1]
    table, state = torch.zeros(512, 19, device="cuda"), torch.zeros(512, device="cuda")
    ids = torch.arange(512, device="cuda")[:, None]
    embedding_adagrad_([table], [state], ids, grad.cuda(), 0.1, implementation=implementation)
    assert table[:, 0].ne(0).all()
    assert table[:, 0].equal(table[:, 17])


@implementations
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation):
    """Rows past element 2^31, and keys past 2^31 rows, of one table in float16."""
    rows, width = 2**31 + 100, 8
    if torch.cuda.mem_get_info()[0] < 2 * rows * width + 2**30:
        pytest.skip("needs 34 GiB of free GPU memory")
    table = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    ids = torch.tensor([[0], [rows - 1], [2**28], [rows - 1], [2**31]], device="cuda")
    grad = torch.arange(40.0, device="cuda").half().view(5, 1, width)
    embedding_sgd_([table], ids, grad, 0.5, implementation=implementation)
    expected = torch.zeros(5, 1, width, device="cuda")
    for sample, others in enumerate(([0], [1, 3], [2], [1, 3], [4])):
        expected[sample] = -0.5 * grad[others].float().sum(0)
    assert torch.equal(
        embedding_lookup([table], ids, implementation=implementation).float(), expected
    )
    assert int(table.any(1).sum()) == 4


@implementations
def test_in_a_graph_with_a_rate_that_changes(implementation):
    tables, ids, grad = made(300, 16, device="cuda")
    trained = [table.clone().requires_grad_() for table in tables]
    rate = torch.tensor(0.0, device="cuda")
    states = [torch.zeros(len(table), device="cuda") for table in tables]

    def step():
        updating_embedding_lookup(
            trained, ids, "rowwise_adagrad", rate, states, implementation=implementation
        ).backward(grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for table, start, state in zip(trained, tables, states, strict=True):
        table.data.copy_(start)
        state.zero_()
    by_hand = [torch.zeros(len(table), device="cuda") for table in tables]
    for value in (0.5, 0.1):
        rate.fill_(value)
        graph.replay()
        embedding_adagrad_(tables, by_hand, ids, grad, value, implementation="reference")
    for ours, right in zip(trained, tables, strict=True):
        torch.testing.assert_close(ours.detach(), right, rtol=1e-4, atol=1e-5)


@implementations
def test_no_synchronisation(implementation):
    tables, ids, grad = made(300, 16, device="cuda")
    for mode in ("default", "error"):  # the first warms up: loading a kernel synchronises
        torch.cuda.set_sync_debug_mode(mode)
        try:
            embedding_lookup(tables, ids, implementation=implementation)
            embedding_sgd_(tables, ids, grad, 0.1, implementation=implementation)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@implementations
@pytest.mark.parametrize("stray", [5, -1])
def test_an_id_out_of_range_is_a_device_assert(implementation, stray):
    """In a process of its own: an assert ends the CUDA context."""
    script = f"""
import torch
from fuselab.ops import embedding_lookup
table = torch.zeros(5, 4, device="cuda")
ids = torch.tensor([[1], [{stray}]], device="cuda")
embedding_lookup([table], ids, implementation={implementation!r})
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "embedding: an id is out of range" in done.stdout + done.stderr


def test_cases():
    for case in CASES:
        if "bench" not in case.tags:
            inputs = case.make(
                torch.device("cuda"), torch.float32, torch.Generator().manual_seed(2)
            )
            reference = embedding_lookup(*inputs.args, **inputs.kwargs, implementation="reference")
            output = embedding_lookup(*inputs.args, **inputs.kwargs, implementation="cuda")
            assert torch.equal(output, reference)


# On both sides of what scatter sorts and what it adds up in shared memory; tables of one size.
MANY = (3, 1, 255, 256, 64, 65, 5000, 10, 2, 70_000, 15, 24, 3, 105)


@pytest.mark.parametrize(
    "rule, id_dtype", [*((rule, torch.int64) for rule in RULES), ("error", torch.int32)]
)
def test_scatter(rule, id_dtype):
    for batch in (1, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257, 2000):
        tables, ids, grad = made(
            batch, 16, sizes=MANY, stray=RULES[rule], seed=batch, device="cuda"
        )
        exact = gradients(tables, ids, grad, rule)
        candidates = SGD.configs["cuda"](tables, ids, grad, 0.1, "error", None)
        assert {config.kernel for config in candidates} == {"scatter", "samples"}
        for config in candidates:
            changed = [table.clone() for table in tables]
            with tuning.forced(SGD.name, "cuda", config):
                embedding_sgd_(
                    changed, ids.to(id_dtype), grad, 0.1, implementation="cuda", **arguments(rule)
                )
            for before, ours, (sums, most) in zip(tables, changed, exact, strict=True):
                largest = float(before.abs().max()) + float(most)
                limit = 8 * torch.finfo(torch.float32).eps * largest
                error = (ours.double() - (before.double() - 0.1 * sums)).abs().max()
                assert float(error) <= limit, (batch, str(config))


@pytest.mark.parametrize(
    "width, dtype, grad_dtype",
    [
        *((width, torch.float32, torch.float32) for width in (3, 12, 64)),
        (16, torch.float32, torch.bfloat16),
        (32, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_scatter_of_whole_samples(width, dtype, grad_dtype):
    """More samples than are under way, ids and gradients with gaps, and tables that are summed in
    shared memory, that are not, and both."""
    for sizes in ((3, 1, 105, 27, 5000) * 2, (7,) * 8, (2000, 9, 300) * 3):
        tables, ids, grad = made(20_001, width, dtype, sizes=sizes, device="cuda")
        gapped = ids.new_zeros(len(ids), 2 * len(sizes))[:, ::2].copy_(ids)
        grad = grad.to(grad_dtype)
        upstream = grad.new_zeros(*grad.shape[:2], 2 * width)[..., :width].copy_(grad)
        exact = gradients(tables, ids, grad, "error")
        args = (tables, gapped, upstream, 0.1, "error", None)
        for config in SGD.configs["cuda"](*args):
            changed = [table.clone() for table in tables]
            with tuning.forced(SGD.name, "cuda", config):
                SGD.implementations["cuda"].forward(changed, *args[1:])
            for before, ours, (sums, most) in zip(tables, changed, exact, strict=True):
                limit = 64 * torch.finfo(dtype).eps * (float(before.abs().max()) + float(most))
                error = (ours.double() - (before.double() - 0.1 * sums)).abs().max()
                assert float(error) <= limit, (sizes, str(config))


@pytest.mark.parametrize(
    "rule, dtype",
    [*((rule, torch.float32) for rule in RULES), *(("error", dtype) for dtype in DTYPES[1:])],
    ids=str,
)
def test_every_look_up(rule, dtype):
    """Each candidate, on both sides of a block's samples at a time (12 of 20 tables x 16 floats)
    and of what is under way."""
    for batch, width in ((1, 16), (12, 12), (13, 16), (10_000, 16), (20_001, 12), (9000, 64)):
        if width == 64 and (rule, dtype) != ("error", torch.float32):
            continue
        tables, ids, _ = made(
            batch, width, dtype, sizes=SIZES * 4, stray=RULES[rule], device="cuda"
        )
        wide = [table.new_zeros(len(table), 2 * width)[:, :width].copy_(table) for table in tables]
        exact = torch.stack(
            [rows_of(table, column, rule) for table, column in zip(tables, ids.T, strict=True)], 1
        )
        outputs = (None, torch.bfloat16) if rule == "error" else (None,)
        for given in ((wide, ids.T.contiguous().T, *rule_and_hash(rule), out) for out in outputs):
            candidates = LOOK_UP.configs["cuda"](*given)
            assert {config.kernel for config in candidates} == {"positions", "samples"}
            for config in candidates:
                with tuning.forced(LOOK_UP.name, "cuda", config):
                    output = LOOK_UP.implementations["cuda"].forward(*given)
                assert torch.equal(output, exact.to(output.dtype)), (batch, width, str(config))


@pytest.mark.parametrize("batch", [255, 2047, 2048, 4097, 8192, 65536])
def test_sums_of_few_rows_are_not_one_chain_of_floats(batch, fixed_order):
    """The worst that a group's, a warp's, a block's and the blocks' sums add up to: half an ulp
    each. 2048 times 1.1 in one chain end 57 ulp off, 65536 times 6096. Of 26 tables x 16 and 40 x 1
    whole samples are taken: 10 rows in tables of one size are too many for shared memory."""
    one_table = ((1, 1), (2, 1), (3, 1), (3, 16), (3, 6), (700, 1))
    for (rows, width), count in (
        *((shape, 1) for shape in one_table),
        *(((1, 16), 26), ((3, 16), 26), ((10, 16), 26), ((3, 1), 40)),
    ):
        blocks = multiprocessors(torch.device("cuda", 0)) if count > 1 else 0
        for same in (False, True):
            sizes = (rows,) * count
            tables, ids, grad = made(batch, width, sizes=sizes, seed=batch, device="cuda")
            grad = torch.full_like(grad, 1.1) if same else grad
            leaves = [table.requires_grad_() for table in tables]
            embedding_lookup(leaves, ids, implementation="cuda").backward(grad)
            for leaf, (exact, most) in zip(
                leaves, gradients(tables, ids, grad, "error"), strict=True
            ):
                limit = 2**-24 * float(most) * (12 + batch / 256 + blocks)
                assert float((leaf.grad.double() - exact).abs().max()) <= limit, (sizes, width)


def test_every_kernel_leaves_tables_without_need_alone(fixed_order):
    tables, ids, grad = made(300, 16, sizes=MANY, device="cuda")
    needs = [place % 3 == 0 for place in range(len(MANY))]
    args = ([*needs, False], grad, ids, tuple(MANY), "error", None, torch.float32)
    exact = [one for one, _ in gradients(tables, ids, grad, "error")]
    candidates = LOOK_UP.configs["cuda_backward"](*args)
    kernels = {config.kernel for config in candidates}
    assert kernels == ({"table", "sorted"} if fixed_order else {"scatter", "samples"})
    for config in candidates:
        with tuning.forced(LOOK_UP.name, "cuda_backward", config):
            grads = LOOK_UP.implementations["cuda"].backward(*args)
        assert [one is not None for one in grads] == [*needs, False]
        found = [one for one in grads if one is not None]
        assert_near(found, [one for one, need in zip(exact, needs, strict=True) if need], 100.0)


def every_change(args, expected):
    """The tables and states after each candidate of Adagrad's update, by the candidate."""
    candidates = ADAGRAD.configs["cuda"](*args)
    assert {config.kernel for config in candidates} == expected
    for config in candidates:
        given = [
            [tensor.clone() for tensor in arg] if isinstance(arg, list) else arg for arg in args
        ]
        with tuning.forced(ADAGRAD.name, "cuda", config):
            ADAGRAD.implementations["cuda"].forward(*given)
        yield config, given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_length_of_run(dtype):
    """Runs that end at, before and behind a piece's border, and of more pieces than 32 lanes hold;
    the same bits in every repetition."""
    for batch in (1, 7, 8, 9, 16, 17, 31, 32, 33, 257, 2048, 4096, 5000):
        tables, ids, grad = made(batch, 16, dtype, sizes=(1, 2, 9, 40, 3000), device="cuda")
        exact = [one for one, _ in gradients(tables, ids, grad, "error")]
        states = [torch.rand(len(table), device="cuda") for table in tables]
        expected, totals = exact_adagrad(tables, states, exact, 0.1, 1e-8)
        args = (tables, states, ids, grad, 0.1, 1e-8, "error", None)
        kernels = {"sorted", "table"} if batch <= 4096 else {"sorted"}
        for (config, first), (_, again) in zip(
            every_change(args, kernels),
            every_change(args, kernels),
            strict=True,
        ):
            assert_near(first[0], expected, 1.0)
            for ours, right in zip(first[1], totals, strict=True):
                torch.testing.assert_close(
                    ours.double(), right, rtol=2e-5, atol=1e-6, msg=str(config)
                )
            for one, other in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("width", [1, 3, 4, 64])
@implementations
def test_an_element_without_a_gradient_keeps_its_bits(implementation, width):
    """The hardware's addition in float32 takes a subnormal number in memory for 0."""
    table = torch.full((5, width), 2.3e-39, device="cuda")
    table[1] = -0.0
    before = table.clone()
    ids = torch.tensor([[0], [1], [1], [4]], device="cuda")
    grad = torch.zeros(4, 1, width, device="cuda")
    grad[3, 0, ::2] = 1.0  # and in one row every other element has one
    embedding_sgd_([table], ids, grad, 0.5, implementation=implementation)
    before[4, ::2] -= 0.5
    assert torch.equal(table.view(torch.int32), before.view(torch.int32))
