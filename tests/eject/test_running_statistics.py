"""Functions that write over arguments: normalisations in training, with running statistics."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselab
from fuselab.ejection.eject import ejected
from fuselab.ejection.fold import fold
from fuselab.ejection.generated import planned
from fuselab.errors import DifferentiationError, EjectError
from fuselab.prove.check_composition import whole_results
from fuselab.prove.load import load_op


def norm_relu(x, residual, running_mean, running_var, weight, bias):
    normed = F.batch_norm(x, running_mean, running_var, weight, bias, True, 0.1)
    return F.relu(normed + residual) * 2


def instance_norm_silu(x, running_mean, running_var):
    return F.silu(F.instance_norm(x, running_mean, running_var, momentum=0.3))


def moving_average(x, average):
    average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x.square() - average


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


CHANNELS = (torch.zeros(3), torch.ones(3))
ARGUMENTS: dict[Callable[..., Any], tuple[tuple[Tensor, ...], tuple[int, ...]]] = {
    norm_relu: ((drawn(4, 3, 5, 6), drawn(4, 3, 5, 6), *CHANNELS, drawn(3), drawn(3)), (2, 3)),
    instance_norm_silu: ((drawn(4, 3, 7), *CHANNELS), (1, 2)),
    moving_average: ((drawn(7, 5), torch.zeros(5)), (1,)),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any]], Any]:
    root = tmp_path_factory.mktemp("statistics")
    sys.path.insert(0, str(root))

    def module(function: Callable[..., Any]) -> Any:
        name = f"with_{function.__name__}"
        if not (root / name).exists():
            args, _ = ARGUMENTS[function]
            fuselab.eject(function, *args, out=root / name, name=function.__name__)
            importlib.invalidate_caches()
        return importlib.import_module(name)

    return module


def results(
    function: Callable[..., Any], args: tuple[Tensor, ...], state: tuple[int, ...]
) -> list[Tensor]:
    """Return the outputs of two calls, the gradients of both, and the state after them."""
    given = [arg.detach().clone(memory_format=torch.preserve_format).double() for arg in args]
    wanted = [one.requires_grad_() for place, one in enumerate(given) if place not in state]
    outputs = [function(*given), function(*given)]
    total = sum((number + 1) * one.square().sum() for number, one in enumerate(outputs))
    gradients = torch.autograd.grad(total, wanted)
    assert not any(given[place].requires_grad for place in state)
    return [*outputs, *gradients, *(given[place] for place in state)]


@pytest.mark.parametrize("function", ARGUMENTS)
def test_values_gradients_and_state(function: Callable[..., Any], packages: Any) -> None:
    args, state = ARGUMENTS[function]
    fused = getattr(packages(function), function.__name__)
    torch.testing.assert_close(results(fused, args, state), results(function, args, state))


def test_layouts_and_sizes(packages: Any) -> None:
    fused = packages(norm_relu).norm_relu
    args, state = ARGUMENTS[norm_relu]
    last = [one.to(memory_format=torch.channels_last) for one in args[:2]]
    for x, residual in (last, (drawn(1, 3, 2, 1), drawn(1, 3, 2, 1)), (drawn(9, 3, 1, 1),) * 2):
        given = (x, residual, *args[2:])
        torch.testing.assert_close(results(fused, given, state), results(norm_relu, given, state))
    single = (drawn(1, 3, 1, 1), drawn(1, 3, 1, 1), *(one.double() for one in args[2:]))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(*single)


def test_the_reference_writes_over_nothing(packages: Any) -> None:
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    _, new_mean, _ = packages(norm_relu).OP.reference(*args)
    assert torch.equal(args[2], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(new_mean, args[0].mean((0, 2, 3)) * 0.1)


def test_autograd_notices_that_the_state_has_changed(packages: Any) -> None:
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    factor = torch.ones(3, dtype=torch.float64, requires_grad=True)
    product = factor * args[2]
    packages(norm_relu).norm_relu(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_variance_is_unbiased(packages: Any) -> None:
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    packages(norm_relu).norm_relu(*args)
    expected = 0.9 + 0.1 * args[0].var((0, 2, 3), unbiased=True)
    torch.testing.assert_close(args[3], expected)


def test_mixed_dtypes(packages: Any) -> None:
    args = [arg.float().clone() for arg in ARGUMENTS[norm_relu][0]]
    args[:2] = [arg.bfloat16() for arg in args[:2]]
    given, other = [[arg.clone() for arg in args] for _ in range(2)]
    output = packages(norm_relu).norm_relu(*given)
    assert output.dtype == torch.bfloat16
    # Eager rounds between its steps, the kernel once.
    expected = norm_relu(*(arg.float() for arg in other))
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    exact = [arg.float().clone() for arg in ARGUMENTS[norm_relu][0]]
    exact[0] = exact[0].bfloat16().float()
    norm_relu(*exact)
    torch.testing.assert_close(given[2:4], exact[2:4])


def test_a_gradient_of_the_state_is_refused(packages: Any) -> None:
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    args[2].requires_grad_()
    with pytest.raises(DifferentiationError, match="'running_mean' has no gradient; it is written"):
        packages(norm_relu).norm_relu(*args)


def test_second_derivatives(packages: Any) -> None:
    args = [drawn(2, 3, 2, 1), drawn(2, 3, 2, 1) + 3, drawn(3), drawn(3)]
    inputs = [one.requires_grad_() for one in args]

    def function(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        state = [one.double() for one in CHANNELS]
        output: Tensor = packages(norm_relu).norm_relu(x, residual, *state, weight, bias)
        return output

    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, atol=1e-4)


def test_the_state_is_updated_inside_torch_compile(packages: Any) -> None:
    args, state = ARGUMENTS[norm_relu]
    fused = packages(norm_relu).norm_relu
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, args, state), results(norm_relu, args, state))


def test_the_new_state_is_an_output_that_check_judges(packages: Any) -> None:
    op = load_op(str(Path(packages(norm_relu).__file__).parent))
    assert op.output_count == 3
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    found = op.without_residuals(op.implementations["cpp"].forward(*args))
    torch.testing.assert_close(found, op.reference(*args))
    assert torch.equal(args[3], torch.ones(3, dtype=torch.float64))


def test_without_elements_the_state_stays(packages: Any) -> None:
    args = [arg.double() for arg in ARGUMENTS[norm_relu][0]]
    args[:2] = [drawn(0, 3, 2, 2), drawn(0, 3, 2, 2)]
    assert "below 1" in packages(norm_relu).OP.implementations["cpp"].supports(*args)
    assert packages(norm_relu).norm_relu(*args).shape == (0, 3, 2, 2)
    assert torch.equal(args[2], torch.zeros(3, dtype=torch.float64))


def test_what_the_backward_reads_must_not_be_written_over() -> None:
    def squashed(x, average):
        average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x - average)

    with pytest.raises(EjectError, match="backward of squashed reads average, which the forward"):
        ejected(squashed, (drawn(7, 5), drawn(5)), {}, "squashed")


def test_a_chain_for_fuse_must_write_over_nothing() -> None:
    text = (
        "def {name}(x, mean, var):\n"
        "    return torch.nn.functional.batch_norm(x, mean, var, None, None, True).relu()\n"
    )
    with pytest.raises(EjectError, match="writes over an argument"):
        planned(text, [torch.ones(2, 3), *CHANNELS], "chain", ("mean", "var"))


# --- modules --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x) * 2)


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x) * 2)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.down = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.up(x)))
        return torch.sigmoid(self.norm(self.down(hidden)))  # the same statistics once more


def trained(module: nn.Module, inputs: list[Tensor]) -> list[Any]:
    outputs = [module(one) for one in inputs]
    sum(output.square().sum() for output in outputs).backward()
    return [*outputs, dict(module.state_dict()), [one.grad for one in module.parameters()]]


@pytest.mark.parametrize(("kind", "width"), [(Block, 3), (Network, 4)])
def test_a_module_keeps_its_state_dict(
    kind: type[nn.Module], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    original = kind().double()
    name = kind.__name__.lower()
    folder = tmp_path / f"trained_{name}"
    fuselab.eject(copy.deepcopy(original), drawn(5, width), out=folder, name=name)
    monkeypatch.syspath_prepend(str(tmp_path))
    fused = importlib.import_module(f"{folder.name}.module")
    fused = getattr(fused, kind.__name__)(copy.deepcopy(original))
    inputs = [drawn(5, width), drawn(8, width)]
    expected = trained(original, inputs)
    found = trained(fused, inputs)
    torch.testing.assert_close(found, expected)
    assert list(fused.state_dict()) == list(original.state_dict())
    assert int(fused.norm.num_batches_tracked) == (2 if kind is Block else 4)
    with pytest.raises(RuntimeError, match=r"ejected in \.train\(\) mode"):
        fused.eval()(inputs[0])


def fused_like(
    original: nn.Module, folder: Path, x: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> nn.Module:
    """Return ``module.py``'s module of a package in ``folder``, with the original's state."""
    fuselab.eject(copy.deepcopy(original), x, out=folder, name=folder.name, **options)
    monkeypatch.syspath_prepend(str(folder.parent))
    made = importlib.import_module(f"{folder.name}.module")
    fused: nn.Module = getattr(made, type(original).__name__)(copy.deepcopy(original))
    return fused


@pytest.mark.parametrize(
    ("kind", "momentum", "shape", "is_standalone"),
    [
        (nn.BatchNorm3d, None, (2, 3, 2, 1, 4), False),
        (nn.BatchNorm1d, 0.1, (5, 3, 2), True),
    ],
)
def test_batch_norms_of_every_rank_keep_their_averages(
    kind: Callable[..., nn.Module],
    momentum: float | None,
    shape: tuple[int, ...],
    is_standalone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Normalised(kind(3, momentum=momentum)).double()
    folder = tmp_path / f"rank_{len(shape)}_{is_standalone}".lower()
    x = drawn(*shape)
    fused = fused_like(original, folder, x, monkeypatch, standalone=is_standalone)
    inputs = [x, drawn(shape[0] + 1, *shape[1:]), x * 3]
    torch.testing.assert_close(trained(fused, inputs), trained(original, inputs))
    assert original.norm.momentum == momentum and "forward" not in vars(original.norm)


def test_statistics_in_eval_mode_are_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Normalised(nn.BatchNorm1d(3)).eval().requires_grad_(requires_grad=False)
    original.norm.weight.requires_grad_()
    x = torch.ones(5, 3)
    fused_like(original, tmp_path / "frozen_norm", x, monkeypatch)
    package = importlib.import_module("frozen_norm")
    wants_none = {"norm_bias", "norm_running_mean", "norm_running_var"}
    assert set(package.OP.gradient.frozen) == wants_none
    mean = torch.zeros(3, requires_grad=True)
    with pytest.raises(DifferentiationError, match="eject it with this argument requiring one"):
        package.frozen_norm(
            x,
            norm_weight=torch.ones(3),
            norm_bias=torch.zeros(3),
            norm_running_mean=mean,
            norm_running_var=torch.ones(3),
        )


def test_check_judges_what_a_composition_writes() -> None:
    x, average = drawn(7, 5).requires_grad_(), drawn(5)
    *_, state = whole_results(moving_average, [x, average])
    torch.testing.assert_close(state, 0.9 * average + 0.1 * x.detach().mean(0))


def test_a_long_return_is_folded_into_python() -> None:
    line = f"    return {'first' * 9} + {'second' * 9}"
    assert fold(line) == [
        "    return (",
        f"        {'first' * 9}",
        f"        + {'second' * 9}",
        "    )",
    ]
