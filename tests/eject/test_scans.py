"""Running reductions along a dimension: cumsum, cumprod, cummax, cummin, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare, compare_interpreted
from cuda_on_cpu import Emulator

from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def running_sum(x):
    return torch.cumsum(x * 2, -1).exp()


def of_another_dimension(x):
    return x.sigmoid().cumsum(1) - x


def share_so_far(x):
    total = x.exp().cumsum(-1)
    return total / total.amax(-1, keepdim=True)


def running_product(x):
    return torch.cumprod(x * 2, -1) + 1


def largest_so_far(x):
    value, place = torch.cummax(x * 2, -1)
    return value * 2 + place


def smallest_so_far(x):
    return torch.cummin(x * 2, 0).values + 1


def running_logsumexp(x):
    return torch.logcumsumexp(x * 2, -1) * 3


def product(x):
    return (x * 2).prod(-1) + 1


def from_the_end(x):
    return (x * 2).flip(-1).cumsum(-1).flip(-1).exp()


def top_share(x):
    share = torch.softmax(x, -1)
    return (share * (share.cumsum(-1) < 0.9)).sum(-1)


EXAMPLES: dict[Callable[..., Any], tuple[int, ...]] = {
    running_sum: (4, 7),
    of_another_dimension: (4, 7, 3),
    share_so_far: (4, 7),
    running_product: (4, 7),
    largest_so_far: (4, 7),
    smallest_so_far: (4, 7),
    running_logsumexp: (4, 7),
    product: (4, 7),
    from_the_end: (4, 7),
    top_share: (4, 7),
}


def argument(function: Callable[..., Any], *shape: int) -> torch.Tensor:
    made = torch.randn(shape or EXAMPLES[function], generator=torch.Generator().manual_seed(3))
    return made / 8 if shape and function is running_sum else made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("scans")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, argument(function), out=path)

    return folder


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_interpreted_triton(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    compare_interpreted(folders(function), [argument(function)])


def test_what_is_turned_twice_is_not_turned() -> None:
    """The gradient of a sum from the end is a sum from the start."""
    package = planned_package(from_the_end, (argument(from_the_end),), {}, "from_the_end")
    assert len(package.backward) == 1


def test_blocks_of_a_long_row_follow_each_other(folders: Callable[[Any], Path]) -> None:
    folder = folders(share_so_far)
    compare(
        load_op(str(folder)),
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        [argument(share_so_far, 2, 17_001)],
    )


COMPILED = (running_sum, largest_so_far, share_so_far)


def test_emulated_cuda(
    folders: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA C++ of all functions is compiled for the CPU together, then run."""
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    declared = {function: load_op(str(folders(function))) for function in COMPILED}
    given = {function: argument(function, 5, 300) for function in COMPILED}
    with emulator.collecting():
        for function, op in declared.items():
            cuda, x = op.implementations["cuda"], given[function]
            output = cuda.forward(x)
            if function is not largest_so_far:  # a PyTorch call would take places not computed yet
                cuda.backward([True], torch.ones_like(output), *op.gradient.save(output, x))
    for function, op in declared.items():
        cuda, x = op.implementations["cuda"], given[function]
        torch.testing.assert_close(cuda.forward(x), op.reference(x), rtol=1e-5, atol=1e-4)
        if function is not largest_so_far:
            compare(op, cuda.forward, cuda.backward, [x])


@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
def test_cpp(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    op = load_op(str(folders(function)))
    cpp = op.implementations["cpp"]
    for x in (
        argument(function),
        argument(function, 3, 300)[:, ::2],
        argument(function, 40, 19).t(),
        argument(function, 0, 5),
        argument(function, 1, 1),
    ):
        compare(op, cpp.forward, cpp.backward, [x])


def test_a_long_running_sum_keeps_its_digits(folders: Callable[[Any], Path]) -> None:
    op = load_op(str(folders(of_another_dimension)))
    x = torch.rand(1, 300_000, 1)
    exact = op.reference(x.double())
    error = (op.implementations["cpp"].forward(x).double() - exact).abs().max()
    assert error <= 0.51 * torch.finfo(torch.float32).eps * 2**18


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_gradient_of_a_product_with_zeros(zeros: int, folders: Callable[[Any], Path]) -> None:
    op = load_op(str(folders(product)))
    x = argument(product)
    x[:, 1 : 1 + zeros] = 0
    compare(op, op.implementations["cpp"].forward, op.implementations["cpp"].backward, [x])


def test_positions_of_equal_elements_and_of_nan(folders: Callable[[Any], Path]) -> None:
    forward = load_op(str(folders(largest_so_far))).implementations["cpp"].forward
    x = torch.tensor([[1.0, 1.0, 0.0, 2.0, 2.0, 1.0, 3.0]])
    assert forward(x).sub(4 * torch.cummax(x, -1).values).tolist() == [[0, 1, 1, 3, 4, 4, 6]]
    x[0, 2] = float("nan")
    assert forward(x).isnan().tolist() == [[False, False, True, True, True, True, True]]


def test_the_number_of_kernels() -> None:
    def counted(function: Callable[..., Any]) -> tuple[int, int]:
        package = planned_package(function, (argument(function),), {}, function.__name__)
        return len(package.forward), len(package.backward)

    assert counted(running_sum)[0] == 1
    assert counted(top_share)[0] == 1
    assert counted(share_so_far)[0] == 1
