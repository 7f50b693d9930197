"""Variances whose kernels read a row once: deviations are added up beside the terms themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def spread_of_rows(x: Tensor) -> Tensor:
    return x.std(-1)


def spread_of_columns(x: Tensor) -> Tensor:
    """Neighbouring rows of the kernel are neighbours in memory."""
    return x.std(0)


def scaled_columns(x: Tensor) -> Tensor:
    return (x - x.mean(0)) * torch.rsqrt(x.var(0, correction=0) + 1e-5)


def spread_of_images(x: Tensor) -> Tensor:
    """The columns are two loops, and the blocks of the inner one are not all full."""
    return x.std((0, 2))


FUNCTIONS: dict[Callable[[Tensor], Tensor], tuple[int, ...]] = {
    spread_of_rows: (2, 70_001),
    spread_of_columns: (30_003, 5),
    scaled_columns: (20_001, 3),
    spread_of_images: (7, 2, 5003),
}


def normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(20261128))


def far_from_zero(shape: tuple[int, ...]) -> Tensor:
    return normal(shape) + 3000


def of_another_level_first(shape: tuple[int, ...]) -> Tensor:
    """The first values are no sample of the others: their mean is far from that of all."""
    x = normal(shape)
    x.view(-1)[: x.numel() // 9] -= 1e4
    return x


def of_an_outlier_first(shape: tuple[int, ...]) -> Tensor:
    x = normal(shape)
    x.view(-1)[:8] = 1e5
    return x


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("deviations")

    def folder(function: Callable[[Tensor], Tensor]) -> Path:
        out = root / function.__name__
        if not out.exists():
            example = torch.randn([min(size, 9) for size in FUNCTIONS[function]])
            eject(function, example, out=out, name=f"deviations_{function.__name__}")
        return out

    return folder


@pytest.mark.parametrize(
    "values", [normal, far_from_zero, of_another_level_first, of_an_outlier_first]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_long_rows_are_as_exact_as_eager_pytorchs(
    function: Callable[[Tensor], Tensor],
    values: Callable[[tuple[int, ...]], Tensor],
    package: Callable[..., Path],
) -> None:
    folder = package(function)
    x = values(FUNCTIONS[function])
    found = first(interpreter.run(f"{folder}/op.py:forward_triton", x))
    exact = function(x.double())
    eager = (function(x).double() - exact).abs().max().item()
    # Errors of a few units in the last place of the largest term, beside the deviation.
    unit = 2**-23 * max(1.0, (x.abs().max() / x.std()).item()) * exact.abs().max().item()
    assert (found.double() - exact).abs().max().item() <= 2 * eager + 2 * unit


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_values_deviate_by_nothing_and_nan_spreads(
    function: Callable[[Tensor], Tensor], package: Callable[..., Path]
) -> None:
    run = f"{package(function)}/op.py:forward_triton"
    x = torch.full(FUNCTIONS[function], 0.1)
    found = first(interpreter.run(run, x))
    assert found.isfinite().all()
    assert found.abs().max() <= 1e-5
    x = normal(FUNCTIONS[function])
    x.view(-1)[-1] = float("nan")
    found = first(interpreter.run(run, x))
    torch.testing.assert_close(found.isnan(), function(x).isnan())


@pytest.mark.filterwarnings("ignore:std:UserWarning", "ignore:var:UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_short_and_empty_rows(
    function: Callable[[Tensor], Tensor], package: Callable[..., Path]
) -> None:
    run = f"{package(function)}/op.py:forward_triton"
    sizes = FUNCTIONS[function]
    for first_size in (0, 1, 3):
        x = normal((first_size, *(min(size, 40) for size in sizes[1:])))
        torch.testing.assert_close(first(interpreter.run(run, x)), function(x), equal_nan=True)


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_the_gradient_of_a_single_value_is_eagers(package: Callable[..., Path]) -> None:
    """PyTorch's formula divides by the number of values less one, in C++."""
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    op = load_op(str(package(spread_of_rows)))
    (eager,) = torch.autograd.grad(spread_of_rows(x).sum(), x)
    assert eager.isnan().all()
    upstream = torch.ones(1, dtype=torch.float64, requires_grad=True)
    saved = op.gradient.save(op.with_residuals(op.reference(x), (x,)), x)
    (grad,) = op.gradient.reference((True,), upstream, *saved)
    assert grad is not None and grad.isnan().all()


def test_the_mean_and_the_deviations_take_one_sweep(package: Callable[..., Path]) -> None:
    text = (package(spread_of_rows) / "op.py").read_text("utf-8")
    assert "Reducing(sweeps=1, reductions=3)" in text
    kernels = (package(scaled_columns) / "triton_kernels.py").read_text("utf-8")
    forward = kernels.split("@triton.jit")[1]
    assert forward.count("for block in range(first, end):") == 2  # one of them stores


def normed_columns(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True).relu()


def softened_columns(x: Tensor) -> Tensor:
    """One sweep finds the largest value and the sum of the powers."""
    return torch.softmax(x, 0)


@pytest.mark.parametrize("function", [normed_columns, softened_columns])
def test_joined_shares_give_what_a_whole_row_gives(
    function: Callable[..., Tensor], tmp_path: Path
) -> None:
    args = [(normal((20_011, 3)) + 5).requires_grad_()]
    if function is normed_columns:
        args += [normal((3,)).requires_grad_(), normal((3,)).requires_grad_()]
    eject(function, *args, out=tmp_path / "joined", name=f"joined_{function.__name__}")
    upstream = normal(tuple(args[0].shape))
    output, grads, sweeps = interpreter.run(
        f"{Path(__file__).parent / 'joined_on_cpu.py'}:gradients",
        str(tmp_path / "joined"),
        upstream,
        *(arg.detach() for arg in args),
    )
    assert sweeps == [1, -1, 2, 1, -1, 2]
    # In float64, because eager's own errors are the larger ones.
    exact = [arg.detach().double().requires_grad_() for arg in args]
    expected = function(*exact)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(first(output).double(), expected.detach(), rtol=1e-5, atol=5e-6)
    for found, of_exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found.double(), of_exact, rtol=1e-5, atol=5e-6)


def first(returned: object) -> Tensor:
    """Return a function's output; what its backward reads comes behind it."""
    found = returned[0] if isinstance(returned, tuple) else returned
    assert isinstance(found, Tensor)
    return found
