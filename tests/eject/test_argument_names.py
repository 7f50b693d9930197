"""Arguments have any names: those that a package uses for itself, and those of a module's own
parameters."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.ejection.eject import eject
from fuselab.ejection.taken import argument_of
from fuselab.prove.load import load_op
from fuselab.runtime import process_choice


def loss_of_output(output, target):
    return ((output - target) ** 2).tanh().mean()


def names_of_launchers(needs, sweeps, compute, grad_output, grad_needs):
    return (needs * sweeps).tanh() * compute, grad_output + grad_needs


def names_with_underscores(x, x_, _x, torch_, max, implementation):
    return (x * x_).tanh() * _x + torch_ * max - implementation


def product_named_output(x, y):
    output = x @ y
    return output.tanh() * 2


@pytest.mark.parametrize(
    "function",
    [loss_of_output, names_of_launchers, names_with_underscores, product_named_output],
    ids=lambda function: function.__name__,
)
def test_a_package_takes_any_names(
    function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process_choice, "_value", lambda: "reference")
    generator = torch.Generator().manual_seed(0)
    parameters = list(inspect.signature(function).parameters)
    args = [torch.randn(3, 3, generator=generator, requires_grad=True) for _ in parameters]
    eject(function, *args, out=tmp_path / function.__name__)
    public = getattr(importlib.import_module(function.__name__), function.__name__)
    assert list(inspect.signature(public).parameters)[: len(args)] == parameters
    given = dict(zip(parameters, args, strict=True))
    found, wanted = public(**given), function(*args)
    torch.testing.assert_close(found, wanted)
    sums = [
        sum(map(torch.sum, one)) if isinstance(one, tuple) else one.sum() for one in (found, wanted)
    ]
    torch.testing.assert_close(
        torch.autograd.grad(sums[0], args), torch.autograd.grad(sums[1], args)
    )


def reference(x, epsilon: float = 0.5):
    """A function with the name of a package's reference, which calls another such function."""
    return drawing(x, scale=2.0) / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def drawing(x, scale):
    é = x * scale  # a column counts bytes, and this letter has two
    return é.tanh()


def calls_the_reference(x):
    é = 1.0; return é * reference(x, 2.0) + drawing(x, 3.0)  # fmt: skip  # noqa: E702


def takes_a_drawing(drawing):
    return reference(drawing) * drawing


@pytest.mark.parametrize("function", [reference, calls_the_reference, takes_a_drawing])
def test_functions_have_the_names_that_a_package_uses_for_its_own(function, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    name = f"package_of_{function.__name__}"
    op = load_op(str(eject(function, x, out=tmp_path / name, name=name)))
    torch.testing.assert_close(op.reference(x), function(x))
    cpp = op.implementations["cpp"]
    torch.testing.assert_close(op.without_residuals(cpp.forward(x)), function(x))
    assert op.reference(2 * x).shape == (3, 4)


def test_kernels_take_an_argument_named_output(tmp_path: Path) -> None:
    args = torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4)
    op = load_op(str(eject(loss_of_output, *args, out=tmp_path / "loss")))
    cpp = op.implementations["cpp"]
    torch.testing.assert_close(op.without_residuals(cpp.forward(*args)), loss_of_output(*args))
    saved = op.gradient.save(cpp.forward(*args), *args)
    leaves = [one.clone().requires_grad_() for one in args]
    wanted = torch.autograd.grad(loss_of_output(*leaves), leaves)
    torch.testing.assert_close(tuple(cpp.backward([True, True], torch.ones(()), *saved)), wanted)


def test_names_of_arguments_differ() -> None:
    places = ["x", "x_", "_x", "params[0]", "0_weight", "output", "grad_x", "settings['a'].b"]
    assert list(map(argument_of, places)) == [
        *("x", "x_argument", "argument_x", "params_0", "layer_0_weight", "output_argument"),
        *("grad_x_argument", "settings_a_b"),
    ]


def dropped_by_a_seed(x, seed=3):
    return F.dropout(x * seed, 0.5) + x


def test_an_option_named_seed_is_not_that_of_dropouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.ones(4, 8)
    eject(dropped_by_a_seed, x, out=tmp_path / "dropped_by_a_seed")
    public = importlib.import_module("dropped_by_a_seed").dropped_by_a_seed
    assert list(inspect.signature(public).parameters)[:3] == ["x", "seed", "seed_2"]
    with pytest.raises(ValueError, match="was ejected with seed = 3, and seed is 4 here"):
        public(x, seed=4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, scale: Tensor, norm_weight: Tensor) -> Tensor:
        return F.gelu(self.norm(x) * self.scale + scale) * norm_weight


@pytest.mark.parametrize(
    ("name", "module", "parameters"),
    [
        ("scaled", Scaled(), "x scale norm_weight own_scale own_norm_weight norm_bias"),
        (
            "layers",
            nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)),
            "input layer_0_weight layer_0_bias layer_2_weight layer_2_bias",
        ),
        ("layer_norm", nn.LayerNorm(6), "input weight bias"),
    ],
    ids=["scaled", "layers", "layer_norm"],
)
def test_parameters_of_modules_have_names_of_their_own(
    name: str,
    module: nn.Module,
    parameters: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process_choice, "_value", lambda: "reference")
    count = len(inspect.signature(module.forward).parameters)
    args = torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(0)).unbind()
    eject(module, *args, out=tmp_path / name, name=name)
    public = getattr(importlib.import_module(name), name)
    taken = [one for one in inspect.signature(public).parameters if one != "implementation"]
    assert sorted(taken) == sorted(parameters.split())
    own = getattr(importlib.import_module(f"{name}.module"), type(module).__name__)(module)
    torch.testing.assert_close(own(*args), module(*args))
