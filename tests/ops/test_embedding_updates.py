"""embedding_sgd_ and embedding_adagrad_, and the look-up whose backward takes their step."""

from __future__ import annotations

import pytest
import torch
from embedding_cases import assert_near, exact_adagrad, exact_gradients, made

from fuselab.errors import (
    ArgumentError,
    DtypeError,
    IndexRangeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.ops import embedding_adagrad_, embedding_lookup, embedding_sgd_
from fuselab.ops.embedding_lookup import configs, updating_embedding_lookup
from fuselab.ops.embedding_lookup.op import OP as LOOK_UP
from fuselab.ops.embedding_update.op import ADAGRAD, SGD
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
each_dtype = pytest.mark.parametrize(
    "implementation, dtype", [*(("cpp", dtype) for dtype in DTYPES), ("reference", DTYPES[0])]
)
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])
RULES = {"error": 0, "clamp": 3, "ignore": 3, "modulus": 200}
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def arguments(rule):
    return {"hash": rule} if rule == "modulus" else {"out_of_range": rule}


def fresh_states(tables):
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    return [torch.rand(len(table)).to(table.device, dtype) for table in tables]


@each_dtype
@rules
def test_sgd(implementation, rule, dtype):
    for batch, width in ((300, 3), (40, 16), (1, 1)):
        tables, ids, grad = made(batch, width, dtype, stray=RULES[rule])
        grads = exact_gradients(tables, ids, grad, rule)
        expected = [table.double() - 0.1 * one for table, one in zip(tables, grads, strict=True)]
        returned = embedding_sgd_(
            tables, ids, grad, 0.1, implementation=implementation, **arguments(rule)
        )
        assert returned[0] is tables[0]
        magnitude = 0.1 * float(grad.abs().max()) * batch**0.5
        assert_near(tables, expected, magnitude)


@each_dtype
@rules
def test_adagrad(implementation, rule, dtype):
    for batch, width in ((300, 3), (40, 16), (1, 1)):
        tables, ids, grad = made(batch, width, dtype, stray=RULES[rule])
        states = fresh_states(tables)
        grads = exact_gradients(tables, ids, grad, rule)
        expected, totals = exact_adagrad(tables, states, grads, 0.1, 1e-8)
        embedding_adagrad_(
            tables, states, ids, grad, 0.1, 1e-8, implementation=implementation, **arguments(rule)
        )
        assert_near(tables, expected, 1.0)
        for ours, right in zip(states, totals, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=1e-6)


@implementations
def test_a_gradient_of_bfloat16(implementation):
    """Both updates of float32 rows, exact within float32's roundings."""
    tables, ids, grad = made(300, 5)
    grad = grad.bfloat16()
    grads = exact_gradients(tables, ids, grad)
    stepped = [table.clone() for table in tables]
    embedding_sgd_(stepped, ids, grad, 0.1, implementation=implementation)
    expected = [table - 0.1 * one for table, one in zip(tables, grads, strict=True)]
    assert_near(stepped, expected, 3.0)
    states = fresh_states(tables)
    expected, _ = exact_adagrad(tables, states, grads, 0.1, 1e-8)
    embedding_adagrad_(tables, states, ids, grad, 0.1, 1e-8, implementation=implementation)
    assert_near(tables, expected, 1.0)


def test_the_updating_look_up_in_bfloat16():
    """Its result and the gradient that comes back are bfloat16, its tables float32."""
    tables, ids, grad = made(50, 4)
    trained, grad = leaves_of(tables), grad.bfloat16()
    output = updating_embedding_lookup(trained, ids, "sgd", 0.1, dtype=torch.bfloat16)
    assert torch.equal(output, embedding_lookup(tables, ids, dtype=torch.bfloat16))
    output.backward(grad)
    embedding_sgd_(tables, ids, grad, 0.1)
    assert all(torch.equal(*pair) for pair in zip(trained, tables, strict=True))


@implementations
def test_rows_that_no_id_points_to_keep_their_bits(implementation):
    table = torch.randn(50, 4)
    table[7] = float("nan")
    table[9] = -0.0
    before, state = table.clone(), torch.zeros(50)
    ids = torch.tensor([[3], [11], [3]])
    grad = torch.randn(3, 1, 4)
    embedding_adagrad_([table], [state], ids, grad, 0.5, implementation=implementation)
    embedding_sgd_([table], ids, grad, 0.5, implementation=implementation)
    changed = (table.view(torch.int32) != before.view(torch.int32)).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 11]
    assert state.nonzero().flatten().tolist() == [3, 11]


def test_equal_ids_are_added_up_before_adagrad():
    """One row, gradients 3 and 4: mean(g^2) is 49, not 9 + 16."""
    table, state = torch.zeros(2, 1), torch.zeros(2)
    grad = torch.tensor([[[3.0]], [[4.0]]])
    embedding_adagrad_([table], [state], torch.tensor([[1], [1]]), grad, 0.5)
    assert state.tolist() == [0, 49]
    torch.testing.assert_close(table, torch.tensor([[0.0], [-0.5]]))


def test_results_do_not_depend_on_threads():
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        tables, ids, grad = made(3000, 16)
        embedding_sgd_(tables, ids, grad, 0.1)
        results.append(tables)
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@implementations
def test_nothing_changes_when_an_id_is_out_of_range(implementation):
    tables, ids, grad = made(9, 4)
    ids[8, 4] = 5000
    before = [table.clone() for table in tables]
    with pytest.raises(IndexRangeError, match="'ids' has 5000 in sample 8 for table 4"):
        embedding_sgd_(tables, ids, grad, 0.1, implementation=implementation)
    assert all(map(torch.equal, tables, before))


@implementations
def test_nothing_changes_when_the_id_is_for_a_later_group_of_tables(implementation):
    tables, states = [torch.zeros(3, 2) for _ in range(300)], [torch.zeros(3) for _ in range(300)]
    ids, grad = torch.ones(2, 300, dtype=torch.int32), torch.ones(2, 300, 2)
    ids[1, 290] = 9
    chosen = {"implementation": implementation}
    with pytest.raises(IndexRangeError, match="in sample 1 for table 290, which has 3 rows"):
        embedding_sgd_(tables, ids, grad, 0.1, **chosen)
    with pytest.raises(IndexRangeError, match="in sample 1 for table 290"):
        embedding_adagrad_(tables, states, ids, grad, 0.1, **chosen)
    with pytest.raises(IndexRangeError, match="in sample 1 for table 290"):
        embedding_lookup(tables, ids, **chosen)
    assert not any(map(torch.any, (*tables, *states)))


def test_version_counters_rise_and_autograd_notices():
    tables, ids, grad = made(9, 4)
    versions = [table._version for table in tables]
    embedding_sgd_(tables, ids, grad, 0.1)
    assert all(table._version > old for table, old in zip(tables, versions, strict=True))


def ways(op, *args):
    return [str(config) for config in op.configs["cuda"](*args, "error", None)]


def test_few_samples_of_narrow_rows_go_by_table_and_short_runs_before_long():
    """The CPU counts as one multiprocessor: runs of 32 make two blocks of 820 samples x 5, of 4
    lanes each, and not of 819."""
    short, table = ["kernel=sorted run=8", "kernel=sorted run=32"], "kernel=table"
    for batch, width, expected in (
        *((1, 16, [table, *short]), (819, 16, [table, *short]), (820, 16, [table, *short[::-1]])),
        *((4096, 16, [table, *short[::-1]]), (4097, 16, short[::-1])),
        *((8, 32, [table, *short]), (8, 33, short), (8, 64, short)),
    ):
        tables, ids, grad = made(batch, width)
        states = fresh_states(tables)
        assert ways(ADAGRAD, tables, states, ids, grad, 0.1, 1e-8) == expected
        torch.use_deterministic_algorithms(True)
        assert ways(SGD, tables, ids, grad, 0.1) == expected
        torch.use_deterministic_algorithms(False)


def test_samples_are_looked_up_whole_from_one_for_every_place_on():
    """Of 1024 threads: 9 places for 26 tables x 16 floats, 51 for 5, which are too many."""
    samples, positions = "kernel=samples", "kernel=positions"
    for batch, tables, width, expected in (
        *((8, 26, 16, [positions, samples]), (9, 26, 16, [samples, positions])),
        *((3, 256, 4, [positions, samples]), (4, 256, 4, [samples, positions])),
        *((900, 5, 16, [positions]), (9, 26, 132, [positions]), (9, 257, 4, [positions])),
    ):
        held, ids, _ = made(batch, width, sizes=(3,) * tables)
        found = LOOK_UP.configs["cuda"](held, ids, "error", None, None)
        assert [str(config) for config in found] == expected


def test_many_samples_change_tables_whole_where_all_small_ones_fit_in_shared_memory(monkeypatch):
    """An H200's: 229 rows with 9 places of 26 tables x 16 floats, so 8 rows of each, not 9; what
    ``scatter`` does not sum either, 256 rows on, need not fit."""
    monkeypatch.setattr(configs, "shared_bytes", lambda device: 232448)
    samples, scatter = "kernel=samples", "kernel=scatter"
    for batch, sizes, expected in (
        *((8191, (8,) * 26, [scatter, samples]), (8192, (8,) * 26, [samples, scatter])),
        *((8192, (9,) * 26, [scatter, samples]), (8192, (256,) * 26, [samples, scatter])),
        *((8192, (8,) * 25 + (255,), [scatter, samples]), (8192, (8,) * 5, [scatter])),
    ):
        tables, ids, grad = made(batch, 16, sizes=sizes)
        assert ways(SGD, tables, ids, grad, 0.1) == expected
        needs = [True] * len(sizes)
        gradient = (needs, grad, ids, sizes, "error", None, torch.float32)
        found = LOOK_UP.configs["cuda_backward"](*gradient)
        assert [str(config) for config in found] == expected


def test_refusals():
    tables, ids, grad = made(9, 4)
    states = fresh_states(tables)
    with pytest.raises(ShapeError, match="'grad_output' has shape"):
        embedding_sgd_(tables, ids, grad[:, :, :3], 0.1)
    with pytest.raises(DtypeError, match=r"'grad_output' is torch\.int64"):
        embedding_sgd_(tables, ids, grad.long(), 0.1)
    with pytest.raises(ArgumentError, match="elements share memory"):
        embedding_sgd_([torch.zeros(1, 4).expand(3, 4)], ids[:, :1], grad[:, :1], 0.1)
    with pytest.raises(ArgumentError, match="'states' has 4 tensors for 5 tables"):
        embedding_adagrad_(tables, states[:4], ids, grad, 0.1)
    with pytest.raises(ShapeError, match=r"'states\[1\]' has shape \(3,\)"):
        embedding_adagrad_(tables, [states[0], states[0].clone(), *states[2:]], ids, grad, 0.1)
    with pytest.raises(DtypeError, match=r"'states\[0\]' is torch\.float16"):
        embedding_adagrad_(tables, [states[0].half(), *states[1:]], ids, grad, 0.1)
    with pytest.raises(ArgumentError, match=r"'eps' is 0\.0"):
        embedding_adagrad_(tables, states, ids, grad, 0.1, 0.0)


# The look-up that updates


def leaves_of(tables):
    return [table.clone().requires_grad_() for table in tables]


@implementations
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_the_backward_is_the_step(implementation, optimizer):
    tables, ids, grad = made(50, 4, stray=20)
    trained, states = leaves_of(tables), [torch.zeros(len(table)) for table in tables]
    output = updating_embedding_lookup(
        trained, ids, optimizer, 0.1, states, hash="modulus", implementation=implementation
    )
    assert torch.equal(output, embedding_lookup(tables, ids, hash="modulus"))
    output.backward(grad)
    if optimizer == "sgd":
        embedding_sgd_(tables, ids, grad, 0.1, hash="modulus")
    else:
        by_hand = [torch.zeros(len(table)) for table in tables]
        embedding_adagrad_(tables, by_hand, ids, grad, 0.1, hash="modulus")
        for ours, right in zip(states, by_hand, strict=True):
            torch.testing.assert_close(ours, right)
    for ours, right in zip(trained, tables, strict=True):
        torch.testing.assert_close(ours.detach(), right)
        assert ours.grad is None and ours.requires_grad


def test_frozen_tables_and_no_grad_change_nothing():
    tables, ids, grad = made(5, 4)
    before = [table.clone() for table in tables]
    assert not updating_embedding_lookup(tables, ids, "sgd", 0.1).requires_grad
    with torch.no_grad():
        updating_embedding_lookup(leaves_of(tables), ids, "sgd", 0.1)
    other = torch.ones((), requires_grad=True)
    (updating_embedding_lookup(tables, ids, "sgd", 0.1) * other).backward(grad)
    assert all(map(torch.equal, tables, before))


def test_two_look_ups_of_one_table_step_in_turn():
    table = torch.randn(5, 2)
    trained = table.clone().requires_grad_()
    first, second = torch.tensor([[1], [2]]), torch.tensor([[2], [4]])
    total = sum(
        updating_embedding_lookup([trained], ids, "sgd", 0.1).sum() for ids in (first, second)
    )
    total.backward()
    expected = table - 0.1 * torch.tensor([0.0, 1, 2, 0, 1])[:, None]
    torch.testing.assert_close(trained.detach(), expected)


def test_a_second_derivative_raises():
    tables, ids, _ = made(5, 4)
    output = updating_embedding_lookup(leaves_of(tables), ids, "sgd", 0.1)
    factor = torch.ones_like(output, requires_grad=True)
    weight = torch.ones((), requires_grad=True)
    first = torch.autograd.grad(
        (output * factor * weight).square().sum(), weight, create_graph=True
    )[0]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(
            torch.autograd.grad(output.square().sum(), [output], create_graph=True)[0].sum(),
            leaves_of(tables),
        )
    assert first.requires_grad


def test_several_upstream_gradients_at_once_are_refused():
    tables, ids, grad = made(8, 4)
    leaves = leaves_of(tables)
    output = updating_embedding_lookup(leaves, ids, "sgd", 0.1)
    with pytest.raises(UnsupportedError, match="leave is_grads_batched=True out"):
        torch.autograd.grad(output, leaves, grad[None], is_grads_batched=True, allow_unused=True)
    assert all(torch.equal(*pair) for pair in zip(leaves, tables, strict=True))


def test_a_rate_on_the_device_may_change():
    table = torch.zeros(3, 1, requires_grad=True)
    rate = torch.tensor(0.5)
    for value in (0.5, 2.0):
        rate.fill_(value)
        updating_embedding_lookup([table], torch.tensor([[1]]), "sgd", rate).sum().backward()
    assert table.detach().flatten().tolist() == [0, -2.5, 0]


def test_refusals_of_the_updating_look_up():
    tables, ids, _ = made(5, 4)
    with pytest.raises(UnknownNameError) as refused:
        updating_embedding_lookup(tables, ids, "adam", 0.1)
    assert (refused.value.kind, refused.value.name) == ("optimizer", "adam")
    with pytest.raises(ArgumentError, match="'states' has 0 tensors for 5 tables"):
        updating_embedding_lookup(tables, ids, "rowwise_adagrad", 0.1)
    with pytest.raises(ArgumentError, match="a tensor is in 'tables' twice"):
        updating_embedding_lookup([tables[0]] * 5, ids, "sgd", 0.1)
    tables[0].requires_grad_()
    with pytest.raises(ArgumentError, match="some of 'tables' require a gradient"):
        updating_embedding_lookup(tables, ids, "sgd", 0.1)


def test_trajectory_of_50_steps_of_sgd_is_pytorchs():
    torch.manual_seed(0)
    sizes = (3, 40, 7)
    modules = [torch.nn.Embedding(size, 4, sparse=True) for size in sizes]
    tables = [module.weight.detach().clone().requires_grad_() for module in modules]
    optimizer = torch.optim.SGD([module.weight for module in modules], lr=0.3)
    for step in range(50):
        _, ids, target = made(16, 4, sizes=sizes, seed=step)
        optimizer.zero_grad()
        vectors = torch.stack([module(ids[:, c]) for c, module in enumerate(modules)], 1)
        ((vectors - target) ** 2).mean().backward()
        optimizer.step()
        ours = updating_embedding_lookup(tables, ids, "sgd", 0.3)
        ((ours - target) ** 2).mean().backward()
    for table, module in zip(tables, modules, strict=True):
        torch.testing.assert_close(table.detach(), module.weight.detach())
        assert float(module.weight.detach().abs().max()) > 0


def test_trajectory_of_50_steps_of_rowwise_adagrad():
    """Against the formula written plainly over dense gradients, in float64."""
    torch.manual_seed(0)
    sizes = (3, 40, 7)
    start = [torch.randn(size, 4) for size in sizes]
    tables = leaves_of(start)
    states = [torch.zeros(size) for size in sizes]
    plain = [table.double().requires_grad_() for table in start]
    sums = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for step in range(50):
        _, ids, target = made(16, 4, sizes=sizes, seed=step)
        vectors = torch.stack([table[ids[:, c]] for c, table in enumerate(plain)], 1)
        grads = torch.autograd.grad(((vectors - target.double()) ** 2).mean(), plain)
        for table, total, grad in zip(plain, sums, grads, strict=True):
            total += grad.square().mean(1)
            table.data -= 0.1 * grad / (total.sqrt() + 1e-10)[:, None]
        ours = updating_embedding_lookup(tables, ids, "rowwise_adagrad", 0.1, states)
        ((ours - target) ** 2).mean().backward()
    for table, right in zip(tables, plain, strict=True):
        torch.testing.assert_close(table.detach().double(), right.detach(), rtol=1e-4, atol=1e-5)


@implementations
def test_the_state_of_a_row_that_no_id_points_to_is_not_looked_at(implementation):
    """The root of a negative state is NaN, and stays out of a row that is not met."""
    table, state = torch.ones(3, 2), torch.full((3,), -1.0)
    ids, grad = torch.tensor([[1]]), torch.full((1, 1, 2), 2.0)
    embedding_adagrad_([table], [state], ids, grad, 0.1, implementation=implementation)
    assert state.tolist() == [-1, 3, -1]
    assert table[[0, 2]].tolist() == [[1, 1], [1, 1]] and bool((table[1] < 1).all())
