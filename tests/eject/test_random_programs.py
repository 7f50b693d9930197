"""A few drawn programs, ejected and judged; `random_programs.py` as a script takes many."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest
import torch
from random_programs import RandomProgram, judged

from fuselab.ejection.eject import eject
from fuselab.prove.draw import RecordedDraw
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_drawn_program_is_right(seed: int, tmp_path: Path) -> None:
    assert judged(seed, "triton", tmp_path / "drawn").startswith("ok")


def test_equal_seeds_draw_equal_programs() -> None:
    assert RandomProgram(5).text == RandomProgram(5).text != RandomProgram(6).text


def mean_of_joined(x):
    joined = torch.cat((x, x * 2), dim=-1)
    return joined - joined.mean(-2, keepdim=True)


def test_a_mean_of_joined_tensors_is_divided(tmp_path: Path) -> None:
    x = torch.arange(20.0).reshape(4, 5)
    eject(mean_of_joined, x, out=tmp_path / "joined")
    found = interpreter.run(f"{tmp_path / 'joined'}/op.py:forward_triton", x)
    assert torch.equal(found, mean_of_joined(x))


def gated_flat(x):
    value, gate = x.chunk(2, dim=-1)
    gated = (value * gate.relu()).flatten(0, 1)
    return gated - gated.mean(0, keepdim=True)


def every_other_twice(x):
    some = x[::2]
    joined = torch.cat((some, some * 2))
    return joined - joined.mean(0, keepdim=True)


def test_a_division_that_is_exact_in_the_example_alone(tmp_path: Path) -> None:
    """Halves of a dimension are one size in a kernel, so that their product is not a half of
    another; (n + 1) // 2 is right for every n."""
    eject(gated_flat, torch.ones(3, 4), out=tmp_path / "halves")
    halves = load_op(str(tmp_path / "halves")).implementations["cpp"]
    assert halves.supports(torch.ones(4, 3)) == "width is 3, which is no multiple of 2"
    for shape in ((3, 4), (1, 2), (0, 2)):
        x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        assert torch.equal(halves.forward(x), gated_flat(x)), shape
    eject(every_other_twice, torch.ones(17), out=tmp_path / "every_other")
    every_other = load_op(str(tmp_path / "every_other")).implementations["cpp"]
    for length in (2, 3, 16, 17):
        x = torch.arange(float(length))
        assert every_other.supports(x) is None
        assert torch.equal(every_other.forward(x), every_other_twice(x)), length


def every_other_of_all(x):
    return torch.sin(x.flatten()[::2])


def test_a_product_of_sizes_that_has_to_be_even(tmp_path: Path) -> None:
    eject(every_other_of_all, torch.ones(6, 12), out=tmp_path / "flat")
    op = load_op(str(tmp_path / "flat"))
    supports = op.implementations["cpp"].supports
    assert supports(torch.ones(3, 4)) is None
    assert supports(torch.ones(3, 5)) == "length * width is 15, which is no multiple of 2"
    for seed in range(8):
        drawn = op.draw(RecordedDraw(CPU, torch.float32, source=random.Random(seed)))
        assert supports(*drawn.args) is None


def rounded_to_float(x, weight):
    return (x.float() * 3).to(x.dtype) * weight


def rounded_to_half(x, weight):
    return (x * 3).half() * weight


def half_returned(x, weight):
    return (x * weight).half()


def test_kernels_leave_a_rounding_between_steps_to_the_reference(tmp_path: Path) -> None:
    args = (torch.ones(4, 5), torch.ones(5))
    eject(rounded_to_float, *args, out=tmp_path / "rounded")
    supports = load_op(str(tmp_path / "rounded")).implementations["triton"].supports
    assert supports(*args) is None
    assert supports(*(one.half() for one in args)) is None
    assert supports(*(one.double() for one in args)) == (
        "argument 1 is float64, and the function computes in float32 between its steps"
    )


def test_a_rounding_that_kernels_would_lose_ends_their_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (torch.ones(4, 5), torch.ones(5))
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(rounded_to_half, *args, out=tmp_path / "rounded_in_between", name="rounded_in_between")
    ejected = importlib.import_module("rounded_in_between").rounded_in_between
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=generator) for shape in ((33, 7), (7,))]
    assert torch.equal(ejected(*drawn), rounded_to_half(*drawn))
    assert not torch.equal(ejected(*drawn), drawn[0] * 3 * drawn[1])
    eject(half_returned, *args, out=tmp_path / "returned")
    found = interpreter.run(f"{tmp_path / 'returned'}/op.py:forward_triton", *args)
    assert found.dtype == torch.float16


def rms_norms(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5) * 0.1


def default_rms_norm(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)


def test_the_eps_of_an_rms_norm_is_the_one_that_was_written(tmp_path: Path) -> None:
    """PyTorch rounds it to float32 where it traces the function in float32."""
    args = (torch.ones(4, 5), torch.ones(5))
    eject(rms_norms, *args, out=tmp_path / "rms")
    for name in ("triton_kernels.py", "cpu_kernels.cpp", "cuda_kernels.cu", "gradient.py"):
        text = (tmp_path / "rms" / name).read_text("utf-8")
        assert "1e-05" in text and "e-06" not in text, name
    eject(default_rms_norm, *args, out=tmp_path / "default")
    supports = load_op(str(tmp_path / "default")).implementations["triton"].supports
    assert supports(*args) is None
    assert supports(*(one.double() for one in args)).startswith("argument 1 is float64")


def standardised(x):
    return (x - x.mean(-2, keepdim=True)) / (x.std(-2, keepdim=True, correction=0) + 0.1)


def test_a_number_divided_by_a_count_is_in_the_dtype_of_the_arithmetic(tmp_path: Path) -> None:
    """Triton computes 2 / 129 in float32 where neither is a tensor of float64."""
    eject(standardised, torch.ones(3, 4), out=tmp_path / "standardised")
    x = torch.linspace(-1, 2, 129, dtype=torch.float64).reshape(129, 1).requires_grad_()
    upstream = torch.linspace(0, 1, 129, dtype=torch.float64).reshape(129, 1).sin()
    op = load_op(str(tmp_path / "standardised"))
    with torch.no_grad():
        saved = op.gradient.save(standardised(x), x)
    found = interpreter.run(
        f"{tmp_path / 'standardised'}/op.py:backward_triton", [True], upstream, *saved
    )
    (expected,) = torch.autograd.grad(standardised(x), x, upstream)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-14)


def away_from_the_largest(x, y):
    return torch.hypot(x.amax(), y)


def test_the_interpreter_computes_a_function_of_a_scalar_and_a_block(tmp_path: Path) -> None:
    x, y = torch.tensor([3.0, -9.0]), torch.tensor([[4.0, 0.0, -4.0]])
    eject(away_from_the_largest, x, y, out=tmp_path / "away")
    found = interpreter.run(f"{tmp_path / 'away'}/op.py:forward_triton", x, y)
    assert found.tolist() == [[5.0, 3.0, 5.0]]


def normalised_alone(x, other):
    whole = x.amax((0, 1), keepdim=True)
    return torch.nn.functional.layer_norm(whole + other, (1,), eps=0.5)


def test_a_kernel_without_columns_divides_by_a_count_of_one(tmp_path: Path) -> None:
    """The mean is over a dimension of size 1, and the kernel of the gradient has no columns."""
    args = (torch.arange(6.0).reshape(2, 3), torch.ones(1))
    eject(normalised_alone, *args, out=tmp_path / "alone")
    op = f"{tmp_path / 'alone'}/op.py"
    assert interpreter.run(f"{op}:forward_triton", *args).tolist() == [[0.0]]
    gradients = interpreter.run(f"{op}:backward_triton", [True, True], torch.ones(1, 1), *args)
    assert [one.abs().max().item() for one in gradients] == [0.0, 0.0]
