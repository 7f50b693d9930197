"""Findings: each sin is found at its line, and a clean function has none."""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fuselab.ejection.covered import is_covered
from fuselab.inspect import targets
from fuselab.inspect.chains import find_chains, primitive_calls
from fuselab.inspect.findings.memory import advice_on_a_chain
from fuselab.inspect.profile import profile, profile_target

SINS = Path(__file__).parent / "targets" / "sins.py"
SOURCE = SINS.read_text().splitlines()


def findings(function, kind):
    found = profile_target(targets.load(f"{SINS}:{function}"), schedule=(1, 1, 5, 1)).findings
    assert [f.saved_us for f in found] == sorted((f.saved_us for f in found), reverse=True)
    return [f for f in found if f.kind == kind]


def at(finding):
    return SOURCE[finding.line_number - 1].strip()


@pytest.mark.parametrize(
    ("function", "kind", "line", "calls"),
    [
        ("reads_back", "host sync", "if total.item() > 0:", 1),
        ("masks", "host sync", "return x[x > 0]", 1),
        (
            "builds_a_tensor",
            "tensor built in forward",
            "weights = torch.tensor([float(i) for i in range(512)])",
            1,
        ),
        ("looks_up", "quadratic look-up", None, 1),
        ("many_small", "repeated small operator", None, 64),
        ("outer_product", "blown-up operand", None, 1),
    ],
)
def test_each_sin_is_found_at_its_line(function, kind, line, calls):
    (found,) = findings(function, kind)
    assert found.calls == calls
    assert 0 < found.share <= 1
    assert found.source == at(found)
    if line:
        assert at(found) == line
    assert found.title and found.advice


def test_small_operators_that_depend_on_each_other_cannot_become_one():
    assert findings("many_small_in_a_row", "repeated small operator") == []
    (found,) = findings("four_rows_of_small", "repeated small operator")
    assert found.calls == 64 and at(found) == "rows = [row.cos() for row in rows]"


def test_a_dense_gradient_of_a_table_is_found_at_the_forwards_line():
    target = targets.load(f"{SINS}:Table")
    found = profile_target(target, backward=True, schedule=(1, 1, 5, 1)).findings
    (dense,) = [f for f in found if f.kind == "dense embedding gradient"]
    assert at(dense) == "return self.table(x[:, 0].long() % 20_000)"
    assert "1.28 MB of gradient" in dense.title  # 20,000 x 16 x 4 bytes


def backward_findings(module, kind):
    target = targets.load(f"{SINS}:{module}")
    found = profile_target(target, backward=True, schedule=(1, 1, 5, 1)).findings
    return [f for f in found if f.kind == kind]


@pytest.mark.parametrize(
    ("module", "line", "touched", "advice"),
    [
        # rows of 16 float32, 4 for each of 256 bags, or 256
        ("Bag", "return self.table(x[:, :4].long() % 20_000)", "65.5 kB", "nn.EmbeddingBag(sparse"),
        ("Rows", "return self.table[x[:, 0].long() % 20_000]", "16.4 kB", "F.embedding("),
        (
            "Selected",
            "return self.table.index_select(0, x[:, 0].long() % 20_000)",
            "16.4 kB",
            "F.embedding(",
        ),
    ],
)
def test_the_dense_gradient_of_every_way_to_look_rows_up_is_found(module, line, touched, advice):
    (dense,) = backward_findings(module, "dense embedding gradient")
    assert at(dense) == line
    assert dense.title.startswith("1.28 MB of gradient") and dense.title.endswith(touched)
    assert advice in dense.advice


def test_a_number_picked_from_each_row_has_no_tables_gradient():
    assert backward_findings("Picked", "dense embedding gradient") == []


def test_slices_taken_in_a_loop_are_found_and_those_taken_at_once_are_not():
    (found,) = backward_findings("SlicedInALoop", "gradients of slices")
    assert at(found) == "total = total + y[:, i]" and found.calls == 32
    # 32 gradients of 256 x 1024 float32, for 32 columns
    assert found.title.endswith("33.6 MB are filled and added up for 32.8 kB")
    assert backward_findings("SlicedAtOnce", "gradients of slices") == []


@pytest.mark.parametrize("function", ["attends_causally", "marks"])
def test_what_an_operator_builds_for_itself_is_nothing_to_mend(function):
    assert findings(function, "tensor built in forward") == []


def test_what_a_function_builds_is_passed_and_what_a_module_builds_is_a_buffer():
    (found,) = findings("builds_a_tensor", "tensor built in forward")
    assert found.advice == "build it once, outside of the function, and pass it."
    (found,) = findings("Built", "tensor built in forward")
    assert "register_buffer" in found.advice


def test_a_tensor_that_is_written_into_is_no_constant():
    assert findings("counts_rows", "tensor built in forward") == []


def test_a_constant_of_the_batchs_size_is_advised_to_be_sliced():
    (found,) = findings("state_of_a_batch", "tensor built in forward")
    assert found.advice.startswith("build it once of the largest size, and take a slice, outside")


def test_a_dropout_of_evaluation_does_nothing_and_one_of_training_is_in_the_chain():
    (chain,) = findings("drops_nothing", "chain")
    assert chain.operators == ("aten::cos", "aten::sin")
    assert chain.bytes_saved == 2 * 32 * 1024 * 4
    assert findings("drops_nothing", "repeated small operator") == []
    (chain,) = findings("drops", "chain")
    assert chain.operators[0] == "aten::cos" and chain.operators[-1] == "aten::sin"
    assert len(chain.operators) > 2


@pytest.mark.timing
def test_a_list_turned_into_a_tensor_costs_more_than_its_operator():
    (found,) = findings("builds_a_tensor", "tensor built in forward")
    seen = []
    for _ in range(3):  # the shortest of some: a neighbour can only make a call longer
        profiled = profile_target(targets.load(f"{SINS}:builds_a_tensor"), schedule=(1, 1, 5, 1))
        seen += [r.cpu_us for r in profiled.tables.operators if r.name == "aten::lift_fresh"]
    assert len(seen) == 3 and found.saved_us > 5 * min(seen)


def test_a_quadratic_lookup_claims_what_reads_its_result():
    (found,) = findings("looks_up", "quadratic look-up")
    assert "aten::eq" in found.operators
    assert "1,048,576 comparisons" in found.title


def test_naive_softmax_is_one_chain():
    (found,) = findings("naive_softmax", "chain")
    names = [name.removeprefix("aten::") for name in found.operators]
    assert names == ["amax", "sub", "exp", "sum", "div"]
    rows, matrix = 256 * 4, 256 * 1024 * 4
    separate = (matrix + rows) + (2 * matrix + rows) + 2 * matrix + (matrix + rows)
    separate += 2 * matrix + rows
    assert found.bytes_saved == separate - 2 * matrix
    assert found.title.endswith("; 6.30 MB less to move")
    assert "puts one kernel in its place" in found.advice


def test_theadvice_on_a_chain_names_what_eject_writes_no_kernel_for():
    covered = ["mul", "add_", "silu", "native_group_norm", "_softmax", "relu6", "mean", "copy_"]
    covered += [
        "native_dropout",
        "native_layer_norm_backward",
        "threshold_backward",
        "native_batch_norm",
    ]
    assert [name for name in covered if not is_covered(f"aten::{name}")] == []
    assert not is_covered("aten::bernoulli_") and not is_covered("aten::special_erfcx")
    assert "parts beside bernoulli_." in advice_on_a_chain(["aten::mul", "aten::bernoulli_"], False)


def test_a_matrix_product_is_nothing_to_find():
    found = profile_target(targets.load(f"{SINS}:clean"), schedule=(1, 1, 5, 1)).findings
    assert {f.kind for f in found} <= {"launch-bound"}


def test_a_chain_ends_where_another_operator_stands_between():
    def step(x):
        first = x + 1
        product = first @ first
        return product * first  # needs the product, which needs the first: not one kernel

    x = torch.ones(64, 64)
    with profile(schedule=(0, 1, 1, 1)) as p:
        for _ in range(2):
            step(x)
            p.step()
    assert find_chains(p._details.ops) == []


def test_primitive_calls_carry_the_users_word_and_count_expanded_inputs_once():
    x = torch.ones(4).expand(8, 4)
    with profile(schedule=(0, 1, 1, 1)) as p:
        for _ in range(2):
            torch.relu(x)
            p.step()
    (call,) = [c for c in primitive_calls(p._details.ops) if c.op.name == "aten::relu"]
    assert sum(call.reads.values()) == 16
    assert sum(call.writes.values()) == 128


class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.05)  # far longer than the rest of a step, also where the cores are busy
        return torch.rand(2000).sort().values


@pytest.mark.parametrize(("workers", "advice"), [(0, "workers"), (1, "more workers")])
def test_a_slow_loader_starves_the_model(workers, advice):
    with profile(schedule=(1, 1, 3, 1)) as p:
        for batch in DataLoader(Slow(), batch_size=1, num_workers=workers):
            batch * 2
            p.step()
    (found,) = [f for f in p.result.findings if f.kind == "loader starves the model"]
    assert found.share > 0.5
    assert p.result.split.data_us == pytest.approx(found.saved_us, rel=0.05)
    assert f"give the DataLoader {advice} (num_workers" in found.advice


def watched_chains(function, *args):
    """Return the chains of one step of ``function``, each as the names of its operators."""
    with profile(schedule=(0, 1, 1, 1)) as p:
        for _ in range(2):
            function(*args)
            p.step()
    chains = find_chains(p._details.ops)
    return [tuple(name.removeprefix("aten::") for name in chain.names) for chain in chains]


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.GroupNorm(4, 32), "native_group_norm"),
        (nn.BatchNorm1d(32), "native_batch_norm"),
        (nn.BatchNorm1d(32).eval(), "native_batch_norm"),
    ],
)
def test_a_normalisation_joins_the_chain_around_it(layer, name):
    def step(x):
        return torch.tanh(layer(x * 2))

    with torch.no_grad():
        assert watched_chains(step, torch.ones(64, 32, 16)) == [("mul", name, "tanh")]


def test_an_activation_that_calls_another_is_inside_the_chain_and_at_its_end():
    # relu6 allocates its result and passes it on to clamp, which was taken for a read.
    x = torch.ones(64, 64)
    assert watched_chains(lambda x: F.relu6(x * 2), x) == [("mul", "relu6")]
    assert watched_chains(lambda x: F.relu6(x * 2).mean(1), x) == [("mul", "relu6", "mean")]


def test_branches_that_meet_are_one_chain_unless_another_operator_stands_between():
    x = torch.ones(64, 64)
    assert watched_chains(lambda x: x.exp() * x.cos(), x) == [("exp", "cos", "mul")]

    def through_a_product(x):
        left = x.exp()
        right = (left @ left).cos()  # the right branch needs the left one, through the product
        return left * right

    assert watched_chains(through_a_product, x) == [("cos", "mul")]


def test_a_chain_ends_where_the_host_reads_a_value_of_it():
    # What runs afterwards may follow from the value; another tensor's value ends nothing.
    def decides(x, other):
        y = (x * 2).exp()
        return y.cos().sin() if bool(y.sum() > 0) else y

    def reads_another(x, other):
        y = (x * 2).exp()
        return y.cos() * float(other)

    x, other = torch.ones(64, 64), torch.ones(())
    assert watched_chains(decides, x, other) == [("mul", "exp", "sum", "gt"), ("cos", "sin")]
    assert watched_chains(reads_another, x, other) == [("mul", "exp", "cos", "mul")]


def test_a_product_stands_between_though_its_result_is_changed_in_place():
    def step(x, weight):
        hidden = x.exp()
        gate = (hidden @ weight).sigmoid_()
        return hidden * gate

    x = torch.ones(64, 64)
    assert watched_chains(step, x, x) == [("sigmoid_", "mul")]


def test_what_attention_does_inside_is_one_operator():
    x = torch.ones(8, 64, 64)
    with torch.no_grad():  # without a dimension of heads PyTorch computes it by parts
        attention = watched_chains(
            lambda x: F.scaled_dot_product_attention(x * 2, x, x, is_causal=True), x
        )
    assert attention == []


def test_the_zeros_inside_a_convolutions_backward_begin_no_chain():
    # The convolution writes over them, so no kernel can hold them and the activation's gradient.
    layer = nn.Conv2d(8, 4, 3, padding=1).double()  # oneDNN has no convolutions in float64
    x = torch.ones(2, 8, 16, 16, dtype=torch.float64, requires_grad=True)
    chains = watched_chains(lambda x: layer(torch.tanh(x * 2)).sum().backward(), x)
    assert ("tanh_backward", "mul") in [chain[:2] for chain in chains]
    assert not any("zero_" in chain for chain in chains)


def test_what_a_recurrent_layer_does_inside_is_nothing_to_mend():
    layer = nn.GRU(16, 32)
    x = torch.ones(5, 8, 16)
    with torch.no_grad():
        assert watched_chains(lambda x: layer(x)[0], x) == []
        with profile(schedule=(0, 1, 1, 1)) as p:
            for _ in range(2):
                layer(x)
                p.step()
    assert [f.kind for f in p.result.findings if f.kind == "tensor built in forward"] == []
