"""bias_activation and add_mul_activation on the CPU: kernels, gradients, contract, errors."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from pointwise_cases import (
    DENSE_IN_MEMORY,
    EXACT,
    LAYOUTS,
    assert_float64,
    assert_within_bar,
    check,
    normal,
    writable,
)

from fuselab.errors import (
    ArgumentError,
    DifferentiationError,
    DtypeError,
    ShapeError,
    UnknownNameError,
)
from fuselab.op import FusedOp
from fuselab.ops import (
    add_mul_activation,
    add_mul_activation_,
    bias_activation,
    bias_activation_,
)
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.add_mul_activation import configs, cpu_launch, cuda_launch, layout, triton_launch
from fuselab.ops.add_mul_activation.op import CPP
from fuselab.ops.add_mul_activation.op import OP as ADD_MUL
from fuselab.ops.bias_activation.op import OP as BIAS

forward = partial(cpu_launch.forward, CPP)
backward = partial(cpu_launch.backward, CPP)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
operators = pytest.mark.parametrize("op", [ADD_MUL, BIAS], ids=lambda op: op.short_name)


def public(op: FusedOp):
    return add_mul_activation if op is ADD_MUL else bias_activation


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    # 130 rows of 37: no multiple of a vector, of a group of rows or of a tile.
    input, update = (normal(130, 37, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(37, dtype=torch.float32, seed=2), activation)


@pytest.mark.parametrize("activation", EXACT)
def test_float64_against_sixty_digits(activation):
    assert_float64(forward, backward, activation)


@dtypes
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_every_dtype(dtype, activation):
    input, update = (normal(33, 65, dtype=dtype, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(65, dtype=dtype, seed=2), activation)


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 3), (7, 1), (2000, 1), (1, 1023), (3, 1024), (3, 1025), (600, 513), (3, 5, 64)],
    ids=str,
)
def test_shapes(shape):
    input, update = (normal(*shape, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(shape[-1], dtype=torch.float32, seed=2))
    check(forward, backward, input, update, None)


@pytest.mark.parametrize("of_update", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
def test_layouts(of_input, of_update):
    input = LAYOUTS[of_input](normal(40, 30, dtype=torch.float32))
    update = LAYOUTS[of_update](normal(40, 30, dtype=torch.float32, seed=1))
    upstream = LAYOUTS[of_update](normal(40, 30, dtype=torch.float32, seed=2))
    for bias in (normal(60, dtype=torch.float32, seed=3)[::2], None):
        check(forward, backward, input, update, bias, "gelu", upstreams=(upstream,))


def test_rank_six_is_copied_and_right():
    input = normal(2, 3, 2, 3, 2, 5, dtype=torch.float32).transpose(0, 4)
    update = normal(2, 3, 2, 3, 2, 5, dtype=torch.float32, seed=1).permute(3, 1, 2, 0, 4, 5)
    update = update.transpose(0, 3).transpose(0, 4)
    check(forward, backward, input, update, normal(5, dtype=torch.float32, seed=2))


def test_zero_dimensions_and_empty():
    check(forward, backward, *(normal(dtype=torch.float32, seed=seed) for seed in (0, 1)), None)
    for shape in ((0, 8), (3, 0), (0,)):
        empty = torch.empty(shape, requires_grad=True)
        bias = torch.ones(shape[-1], requires_grad=True)
        output = add_mul_activation(empty, empty, bias, 2.0, "tanh")
        assert output.shape == shape
        grads = torch.autograd.grad(output.sum(), (empty, bias))
        assert grads[0].shape == shape and torch.equal(grads[1], torch.zeros(shape[-1]))


def test_mixed_dtypes_promote():
    input = normal(9, 21, dtype=torch.float16)
    update = normal(9, 21, dtype=torch.bfloat16, seed=1)
    bias = normal(21, dtype=torch.float64, seed=2)
    assert forward(input, update, None, 1.0, "relu").dtype == torch.float32
    assert forward(input, update, bias, 1.0, "relu").dtype == torch.float64
    check(forward, backward, input, update, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_and_the_sign_of_zero(activation):
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-40, -1e-40, 100.0, -100.0, 88.8, -9.0])
    input = values.clone().requires_grad_()
    bias = torch.full_like(values, -0.0)
    output = bias_activation(input, bias, activation, implementation="cpp")
    eager = BIAS.reference(input, bias, activation)
    exact = BIAS.reference(values.double(), bias.double(), activation)
    for ours, theirs, truth in zip(output, eager, exact, strict=True):  # each by its own size
        assert_within_bar(ours.detach(), theirs.detach(), truth, f"{activation}({truth})")
    # Each activation that is 0 at 0 keeps the sign. Eager's gelu loses it or not, depending on the
    # instruction set that PyTorch runs, so nothing is compared with eager's.
    zeros = values == 0
    if activation == "sigmoid":
        assert output[zeros].tolist() == [0.5, 0.5]
    else:
        assert output[zeros].tolist() == [0.0, 0.0]
        assert output[zeros].signbit().tolist() == [False, True]
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, inf, inf, -1.0, 1.0, 1.0, 1.0])
    wide = values.double().requires_grad_()
    exact = BIAS.reference(wide, bias.double(), activation)
    (ours,) = torch.autograd.grad(output, input, upstream)
    (truth,) = torch.autograd.grad(exact, wide, upstream.double())
    ordinary = values.isfinite() & upstream.isfinite()
    torch.testing.assert_close(ours[ordinary].double(), truth[ordinary], rtol=1e-5, atol=1e-6)
    # The derivative just beside 0 is above 0, so an infinite gradient stays infinite; but relu's.
    assert ours[5:7].tolist() == [inf, 0.0 if activation == "relu" else inf]
    assert bool(ours[4].isnan()) == (activation not in ("identity", "relu", "leaky_relu"))


def test_the_truth_of_gelu_tanhs_second_derivative_keeps_its_digits():
    """At x = 7 autograd's of a sigmoid, y (1 - y), was off by a third of it."""
    import mpmath  # beside sympy, which PyTorch requires

    mpmath.mp.dps = 60
    slope, cubic = 2 * mpmath.sqrt(2 / mpmath.pi), mpmath.mpf(0.044715)

    def gelu_tanh(x):
        return x / (1 + mpmath.exp(-slope * (x + cubic * x**3)))

    for value in (-6.0, -0.5, 2.0, 5.0, 6.0, 7.0, 8.0, 12.0):
        x = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        output = ACTIVATIONS["gelu_tanh"].function(x)
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        for order, found in enumerate((output, first, second)):
            exact = mpmath.diff(gelu_tanh, mpmath.mpf(value), order)
            assert abs(mpmath.mpf(found.item()) - exact) <= 2e-14 * abs(exact), (value, order)


def test_gelu_keeps_its_digits_in_the_tail():
    """34 ulp were lost where the rounding error of x^2 was folded away; 3.6 are."""
    input = torch.linspace(-12.9, 5, 100_001)
    exact = BIAS.reference(input.double(), torch.zeros(1).double(), "gelu")
    ours = bias_activation(input.view(-1, 1), torch.zeros(1), "gelu", implementation="cpp").view(-1)
    normal_range = exact.abs() > torch.finfo(torch.float32).tiny
    error = ((ours.double() - exact) / exact)[normal_range].abs().max()
    assert error <= 5 * torch.finfo(torch.float32).eps


def test_bias_gradient_does_not_depend_on_threads():
    upstream = normal(5000, 70, dtype=torch.float32, seed=1)
    saved = layout.Saved(None, None, None, None, 1.0, "identity", *[torch.float32] * 3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = backward((True, False, True), upstream, saved)[2]
        torch.set_num_threads(2)
        shared = backward((True, False, True), upstream, saved)[2]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, shared)
    assert_within_bar(alone, upstream.sum(0), upstream.double().sum(0))


def test_bias_gradient_of_many_equal_rows():
    upstream = torch.full((), 0.1).expand(200_000, 3)
    saved = layout.Saved(None, None, None, None, 1.0, "identity", *[torch.float32] * 3)
    total = backward((False, False, True), upstream, saved)[2]
    exact = upstream.double().sum(0)
    assert float((total.double() - exact).abs().max()) <= 2 * float(exact.max()) * 2**-24


def test_saved_tensors_stay_as_they_were():
    input = normal(8, 8, dtype=torch.float32).requires_grad_()
    bias = normal(8, dtype=torch.float32, seed=1).requires_grad_()
    for activation in ACTIVATIONS:
        output = bias_activation(input, bias, activation)
        kept = output.detach().clone()
        first = torch.autograd.grad(output.sum(), (input, bias), retain_graph=True)
        second = torch.autograd.grad(output.sum(), (input, bias))
        assert torch.equal(output, kept)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_and_second_derivatives(activation):
    def leaf(*shape: int, seed: int) -> torch.Tensor:
        return normal(*shape, dtype=torch.float64, seed=seed).requires_grad_()

    inputs = leaf(3, 5, seed=0), leaf(3, 5, seed=1), leaf(5, seed=2)

    def fused(input, update, bias):
        return add_mul_activation(input, update, bias, 0.7, activation)

    assert torch.autograd.gradcheck(fused, inputs)
    assert torch.autograd.gradgradcheck(fused, inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_place_forms_write_what_the_others_return(activation):
    for of_input in DENSE_IN_MEMORY:
        input = normal(40, 30, dtype=torch.float32)
        update = LAYOUTS["every_other"](normal(40, 30, dtype=torch.float32, seed=1))
        bias = normal(30, dtype=torch.float32, seed=2)
        for function, in_place, others in (
            (add_mul_activation, add_mul_activation_, (update, bias, 0.3, activation)),
            (add_mul_activation, add_mul_activation_, (update, None, 2.0, activation)),
            (bias_activation, bias_activation_, (bias, activation)),
        ):
            for _ in range(3):  # the second call runs a held plan
                target, around = writable(of_input, input)
                before = around.clone()
                expected = function(target, *others, implementation="cpp")
                version = target._version
                assert in_place(target, *others, implementation="cpp") is target
                assert target._version == version + 1
                assert torch.equal(target, expected)
                target.copy_(input)
                assert torch.equal(around, before), f"{of_input}: wrote beside the input"


def test_in_place_keeps_the_inputs_dtype():
    input = normal(9, 21, dtype=torch.float16)
    update = normal(9, 21, dtype=torch.float64, seed=1)
    expected = torch.relu(input + 0.5 * update).half()
    assert torch.equal(add_mul_activation_(input, update, None, 0.5), expected)
    empty = torch.empty(0, 8)
    assert bias_activation_(empty, torch.ones(8)) is empty


def test_in_place_refuses_what_it_cannot_do():
    memory = normal(8, 4, dtype=torch.float32)
    for input, update in (
        (memory, memory),
        (memory[1:], memory[:-1]),
        (memory[:, 1:], memory[:, :3]),
    ):
        with pytest.raises(ArgumentError, match="clone"):
            add_mul_activation_(input, update)
    with pytest.raises(ArgumentError, match="clone"):
        bias_activation_(memory, memory[0])
    with pytest.raises(ArgumentError, match="clone"):
        bias_activation_(memory[:1].expand(8, 4), torch.ones(4))
    with pytest.raises(DifferentiationError, match="bias_activation has one"):
        bias_activation_(memory.clone().requires_grad_(), torch.ones(4))
    with pytest.raises(ShapeError, match="add_mul_activation_: 'update'"):
        add_mul_activation_(memory, torch.ones(4))


def test_autograd_sees_that_an_input_was_written_over():
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    product = hidden * hidden
    with torch.no_grad():
        bias_activation_(hidden, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@operators
def test_fakes_agree(op):
    for case in op.cases:
        if "layout" not in case.name:
            continue
        args = op.bind(case.make(torch.device("cpu"), torch.float32, torch.Generator()))
        output = public(op)(*args)
        assert op.fake(*args).stride() == output.stride() == op.reference(*args).stride()
        raw = getattr(torch.ops.fuselab, op.short_name).default
        torch.library.opcheck(raw, (*args, "auto"), test_utils="test_faketensor")
        saved = op.gradient.save(output, *args)
        needs = [
            isinstance(args[op.tensor_parameters.index(name)], torch.Tensor)
            for name in op.tensor_parameters
        ]
        raw = getattr(torch.ops.fuselab, f"{op.short_name}_backward").default
        for upstream in (torch.ones_like(output), torch.ones(()).expand_as(output)):
            sample = (needs, upstream, *saved, "auto")
            torch.library.opcheck(raw, sample, test_utils="test_faketensor")


@operators
def test_rewrites_compute_what_the_reference_does(op):
    values = {
        "input": normal(4, 5, dtype=torch.float64),
        "update": normal(4, 5, dtype=torch.float64, seed=1),
        "bias": normal(5, dtype=torch.float64, seed=2),
        "scale": 0.3,
    }
    seen = set()
    for rewrite in op.rewrites:
        torch.fx.symbolic_trace(rewrite.pattern)
        args = [values[name] for name in inspect.signature(rewrite.pattern).parameters]
        call = op.bind(rewrite.call(*args))
        torch.testing.assert_close(rewrite.pattern(*args), op.reference(*call))
        seen.add(call[-1])
    assert seen >= set(ACTIVATIONS) - {"identity"}


@operators
def test_costs_count_every_byte_once(op):
    rows, columns = 8, 16
    input, bias = torch.zeros(rows, columns), torch.zeros(columns)
    args = (input, input, bias, 1.0, "relu") if op is ADD_MUL else (input, bias, "relu")
    tensors = 2 if op is ADD_MUL else 1
    size = rows * columns * 4
    assert op.cost(*args).bytes_read == tensors * size + columns * 4
    assert op.cost(*args).bytes_written == size
    assert op.cost_backward(*args).bytes_read == 2 * size
    assert op.cost_backward(*args).bytes_written == tensors * size + columns * 4


def test_every_tile_of_rows_has_a_block_and_every_block_a_tile():
    for rows in (1, 7, 8, 9, 63, 64, 65, 1000):
        tiles = -(-rows // 8)
        for most_blocks in (0, 1, 3, 8, 500):
            blocks, tiles_per_block = configs.row_blocks(rows, 8, most_blocks)
            assert 1 <= blocks <= max(1, most_blocks)
            assert (blocks - 1) * tiles_per_block < tiles <= blocks * tiles_per_block


def test_tuning_chooses_where_the_bias_has_a_gradient():
    input, bias = torch.zeros(4, 4), torch.zeros(4)
    saved = ADD_MUL.gradient.save(input, input, input, bias, 1.0, "relu")
    candidates = configs.CUDA
    assert ADD_MUL.configs["cuda_backward"]((True, True, True), input, *saved) == candidates
    assert ADD_MUL.configs["cuda_backward"]((True, True, False), input, *saved) == candidates[:1]
    assert len(set(candidates)) == len(candidates)


@pytest.mark.parametrize(("stride", "is_wide"), [(2**19, False), (2**30, True)])
def test_a_long_stride_of_the_bias_widens_offsets(monkeypatch, stride, is_wide):
    # 3 elements: the last is at 2^31 with a stride of 2^30. Meta tensors: nothing is launched.
    like = torch.empty(5, 3, device="meta")
    bias = torch.empty_strided((3,), (stride,), device="meta")
    saved = layout.Saved(None, like, like, bias, 1.0, "silu", *[torch.float32] * 3)
    launched: list[bool] = []

    class Source:
        def launch(self, expression: str, **_: object) -> None:
            launched.append("int64_t" in expression)

    monkeypatch.setattr(
        triton_launch, "launch", lambda *_, **constants: launched.append(constants["WIDE"])
    )
    cuda_launch.forward(Source(), like, like, bias, 1.0, "silu")
    triton_launch.forward(like, like, bias, 1.0, "silu")
    for needs in ((True, True, False), (True, True, True)):
        cuda_launch.backward(Source(), needs, like, saved)
        triton_launch.backward(needs, like, saved)
    assert launched == [is_wide] * 6


def test_the_published_sweep():
    names = [case.name for case in ADD_MUL.cases if "sweep" in case.tags]
    assert len(names) == 9 and names[0] == "4x4" and names[-1] == "262144x1024"
    assert {"4096x128", "16384x256", "65536x512"} <= set(names)


def test_errors_name_the_argument():
    x, bias = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(UnknownNameError) as refused:
        add_mul_activation(x, x, bias, 1.0, "rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")
    assert "relu" in refused.value.known
    with pytest.raises(ShapeError, match=r"'update' has shape \(4,\) and 'input' \(3, 4\)"):
        add_mul_activation(x, bias, bias)
    with pytest.raises(ShapeError, match=r"'bias'.*\(3,\).*\(4,\)"):
        bias_activation(x, torch.zeros(3))
    with pytest.raises(ShapeError, match="no dimension"):
        bias_activation(torch.zeros(()), torch.zeros(1))
    with pytest.raises(ShapeError, match="expected None"):
        add_mul_activation(torch.zeros(()), torch.zeros(()), torch.zeros(1))
    with pytest.raises(DtypeError, match=r"'update' is torch.int64"):
        add_mul_activation(x, x.long(), bias)


def test_the_derivative_of_gelu_tanhs_gradient_keeps_its_digits_in_both_tails() -> None:
    entry = ACTIVATIONS["gelu_tanh"]
    x = torch.tensor([-7.0, -6.5, -1.0, 1.0, 6.5, 7.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(entry.function(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), x)
    (ours,) = torch.autograd.grad(entry.pullback(torch.ones_like(x), x).sum(), x)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
