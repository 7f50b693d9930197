"""An ejected function is called as the user's own: by position and by name, with its options."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import fuselab
from fuselab.ejection.eject import default_name, eject, ejected
from fuselab.errors import FuselabError

X = torch.linspace(-2, 2, 24).reshape(3, 8)
WEIGHT = torch.linspace(0.5, 1.5, 8)
ONES = torch.ones(4, 8)


class Kind(enum.Enum):
    TANH = 1
    SIGMOID = 2


def optioned(x: Tensor, weight: Tensor, mode: str = "tanh", *, scale: float = 2.0) -> Tensor:
    y = x.tanh() if mode == "tanh" else x.sigmoid()
    return y * weight * scale + 1


def product(
    x: Tensor, weight: Tensor, mask: Tensor | None = None, mode: str = "tanh", *, scale: float = 2.0
) -> Tensor:
    y = x.tanh() * scale + 1 if mode == "tanh" else x.sigmoid() + 1
    y = y if mask is None else y * mask
    return (y @ weight).relu() * 2 + 1


def several(x: Tensor, *ys: Tensor, power: int = 2, **others: Any) -> Tensor:
    y = x.tanh() * ys[0] + ys[1].sigmoid() ** power
    return y * others["gate"] if others["mode"] == "scaled" else y


def of_dims(x: Tensor, dims: tuple[int, ...], kind: Kind, /, *more: int, eps: Tensor) -> Tensor:
    y = x.tanh() if kind is Kind.TANH else x.sigmoid()
    return y.sum(dims, keepdim=True) * y + eps + sum(more)


def behind_an_option(x: Tensor, mode: str = "tanh", bias: Tensor | None = None) -> Tensor:
    y = x.tanh() if mode == "tanh" else x.sigmoid()
    return y * 2 if bias is None else y * 2 + bias


@dataclasses.dataclass(frozen=True)
class Settings:
    gate: Tensor
    bias: Tensor
    mode: str = "tanh"


def with_settings(x: Tensor, settings: Settings) -> Tensor:
    y = x.tanh() if settings.mode == "tanh" else x.sigmoid()
    return y * settings.gate.sigmoid() + settings.bias


@torch.no_grad()
def decorated(x: Tensor, /, *ys: Tensor, weight: Tensor, mode: str = "tanh") -> Tensor:
    y = x.tanh() if mode == "tanh" else x.sigmoid()
    return y * weight + ys[0]


Made = Callable[..., Callable[..., Any]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Eject a function with an example, and return the public function of the package."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(
        function: Callable[..., Any],
        *args: Any,
        name: str,
        keywords: Mapping[str, Any] | None = None,
        standalone: bool = False,
    ) -> Callable[..., Any]:
        out = tmp_path / name
        eject(function, *args, out=out, name=name, keywords=keywords, standalone=standalone)
        found: Callable[..., Any] = getattr(importlib.import_module(name), name)
        return found

    return of


@pytest.mark.parametrize("standalone", [False, True])
def test_options_of_one_operator(made: Made, standalone: bool) -> None:
    name = f"optioned_{standalone}".lower()
    found = made(optioned, ONES, torch.ones(8), name=name, standalone=standalone)
    expected = optioned(X, WEIGHT)
    for result in (
        found(X, WEIGHT),
        found(X, weight=WEIGHT, mode="tanh"),
        found(X, WEIGHT, "tanh", scale=2.0),
        found(weight=WEIGHT, x=X, scale=2),
        found(X, WEIGHT, implementation="reference"),
    ):
        assert_close(result, expected)
    told = f"{name} was ejected with mode = 'tanh', and mode is 'sigmoid' here."
    with pytest.raises(ValueError, match=f"^{told}$"):
        found(X, WEIGHT, "sigmoid")
    with pytest.raises(ValueError, match=r"with scale = 2\.0, and scale is 3\.0 here"):
        found(X, WEIGHT, scale=3.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        found(X, WEIGHT, other=1)
    x, y = (X.clone().requires_grad_() for _ in range(2))
    found(x, WEIGHT, mode="tanh").sum().backward()
    optioned(y, WEIGHT).sum().backward()
    assert_close(x.grad, y.grad)


@pytest.mark.parametrize("standalone", [False, True])
def test_options_of_a_composed_function(made: Made, standalone: bool) -> None:
    name = f"product_{standalone}".lower()
    found = made(product, ONES, torch.ones(8, 8), name=name, standalone=standalone)
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    expected = product(X, weight)
    for result in (
        found(X, weight),
        found(X, weight, None, "tanh"),
        found(X, weight=weight, mask=None, scale=2.0),
    ):
        assert_close(result, expected)
    with pytest.raises(ValueError, match="with mode = 'tanh', and mode is 'sigmoid' here"):
        found(X, weight, mode="sigmoid")
    told = r"with mask = None, and mask is a tensor of shape \(8,\) here"
    with pytest.raises(ValueError, match=told):
        found(X, weight, torch.ones(8))


def test_an_option_that_was_given_is_the_default(made: Made) -> None:
    found = made(optioned, ONES, torch.ones(8), name="given", keywords={"mode": "sigmoid"})
    for result in (found(X, WEIGHT), found(X, WEIGHT, "sigmoid")):
        assert_close(result, optioned(X, WEIGHT, "sigmoid"))
    with pytest.raises(ValueError, match="with mode = 'sigmoid', and mode is 'tanh' here"):
        found(X, WEIGHT, "tanh")


def test_any_number_of_arguments(made: Made) -> None:
    given = {"gate": torch.ones(8), "mode": "scaled"}
    found = made(several, ONES, ONES, ONES, name="any_number", keywords=given)
    expected = several(X, X.cos(), X.sin(), gate=WEIGHT, mode="scaled")
    assert_close(found(X, X.cos(), X.sin(), gate=WEIGHT, mode="scaled"), expected)
    assert_close(found(X, X.cos(), X.sin(), power=2, gate=WEIGHT), expected)
    with pytest.raises(ValueError, match="ys must hold 2 tensors"):
        found(X, X.cos(), gate=WEIGHT)
    with pytest.raises(ValueError, match="with mode = 'scaled', and mode is 'plain' here"):
        found(X, X, X, gate=WEIGHT, mode="plain")


def test_the_reference_gives_any_number_of_arguments() -> None:
    """It once gave the tuple of them as one argument, and the second tensor twice if the example
    had one tensor in both places."""
    given = {"gate": torch.ones(8), "mode": "scaled"}
    files = ejected(several, (ONES, ONES, ONES), given, "any_reference").files
    assert '(x, *(ys_0, ys_1), **{"gate": others_gate, "mode": "scaled"})' in files["reference.py"]
    defined: dict[str, Any] = {}
    exec(compile(files["reference.py"], "reference.py", "exec", dont_inherit=True), defined)
    expected = several(X, X.cos(), X.sin(), gate=WEIGHT, mode="scaled")
    assert_close(defined["reference"](X, X.cos(), X.sin(), WEIGHT), expected)


@pytest.mark.parametrize("is_one", [False, True])
def test_examples_that_share_memory(made: Made, is_one: bool) -> None:
    """Parts of one tensor, or one tensor given twice, are arguments as any others."""

    def add_mul(x: Tensor, y: Tensor) -> Tensor:
        return x + y * 2

    both = torch.randn(2, 3, 5)
    name = f"add_mul_{is_one}".lower()
    ours = made(add_mul, both[0], both[0] if is_one else both[1], name=name)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    assert_close(ours(x, y), x + y * 2)


def test_tuples_and_objects(made: Made) -> None:
    given = {"eps": torch.ones(8)}
    found = made(of_dims, ONES, (1,), Kind.TANH, 3, 4, name="of_these", keywords=given)
    expected = of_dims(X, (1,), Kind.TANH, 3, 4, eps=WEIGHT)
    assert_close(found(X, (1,), Kind.TANH, 3, 4, eps=WEIGHT), expected)
    assert_close(found(X, eps=WEIGHT), expected)
    with pytest.raises(ValueError, match=r"with dims = \(1,\), and dims is \(0,\) here"):
        found(X, (0,), eps=WEIGHT)
    with pytest.raises(ValueError, match=r"kind is <Kind\.SIGMOID: 2> here"):
        found(X, (1,), Kind.SIGMOID, eps=WEIGHT)
    with pytest.raises(ValueError, match=r"with more = \(3, 4\), and more is \(3,\) here"):
        found(X, (1,), Kind.TANH, 3, eps=WEIGHT)


def test_a_tensor_behind_an_option(made: Made) -> None:
    found = made(behind_an_option, ONES, name="behind", keywords={"bias": torch.ones(8)})
    expected = behind_an_option(X, bias=WEIGHT)
    assert_close(found(X, bias=WEIGHT), expected)
    assert_close(found(X, "tanh", WEIGHT), expected)
    with pytest.raises(ValueError, match="with bias = a tensor, and bias is None here"):
        found(X)


def test_an_object_of_a_dataclass(made: Made) -> None:
    example = Settings(torch.ones(8), torch.ones(8))
    found = made(with_settings, ONES, example, name="with_data")
    settings = Settings(WEIGHT.clone().requires_grad_(), WEIGHT.cos())
    result = found(X, settings)
    assert_close(result, with_settings(X, settings))
    (gradient,) = torch.autograd.grad(result.sum(), settings.gate)
    (wanted,) = torch.autograd.grad(with_settings(X, settings).sum(), settings.gate)
    assert_close(gradient, wanted)
    with pytest.raises(ValueError, match=r"mode = 'tanh', and settings\.mode is 'sigmoid' here"):
        found(X, settings=dataclasses.replace(settings, mode="sigmoid"))


def test_a_decorated_function(made: Made) -> None:
    """Its arguments were once args_0 and kwargs_weight."""
    given = {"weight": torch.ones(8)}
    found = made(decorated, ONES, torch.ones(4, 8), name="decorated_one", keywords=given)
    names = [*inspect.signature(found).parameters]
    assert names == ["x", "ys", "weight", "mode", "implementation"]
    assert_close(found(X, X.cos(), weight=WEIGHT), decorated(X, X.cos(), weight=WEIGHT))


def test_a_partial_is_named_as_its_function(made: Made) -> None:
    bound = functools.partial(functools.partial(optioned, mode="sigmoid"), scale=3.0)
    assert default_name(bound) == "optioned"
    found = made(bound, ONES, name="partly", keywords={"weight": torch.ones(8)})
    assert list(inspect.signature(found).parameters)[:2] == ["x", "weight"]
    expected = bound(X, WEIGHT)
    assert_close(found(X, WEIGHT), expected)
    assert_close(found(X, weight=WEIGHT, mode="sigmoid"), expected)
    with pytest.raises(ValueError, match="with mode = 'sigmoid', and mode is 'tanh' here"):
        found(X, WEIGHT, mode="tanh")


def test_packages_with_options_are_checked(made: Made, tmp_path: Path) -> None:
    made(optioned, ONES, torch.ones(8), name="checked_one")
    made(product, ONES, torch.ones(8, 8), name="checked_product")
    for name in ("checked_one", "checked_product"):
        report = fuselab.check(str(tmp_path / name), dtype=torch.float32, quick=True, seed=0)
        assert report.passed, str(report)


class Gate(NamedTuple):
    gate: Tensor
    scale: float = 1.0


def with_options_inside(x: Tensor, options: dict[str, Any], pair: list[Any], gate: Gate) -> Tensor:
    y = x * options["weight"] * options["scale"] + pair[0] * pair[1]
    return (y * gate.gate.sigmoid()).tanh() * gate.scale


@pytest.mark.parametrize("standalone", [False, True])
def test_options_beside_tensors_in_lists_and_dicts(made: Made, standalone: bool) -> None:
    name = f"options_inside_{standalone}".lower()
    args = {"weight": ONES, "scale": 2.0}, [ONES, 3], Gate(ONES)
    found = made(with_options_inside, ONES, *args, name=name, standalone=standalone)
    options, pair, gate = {"scale": 2.0, "weight": X}, [X, 3], Gate(X)
    assert_close(found(X, options, pair, gate), with_options_inside(X, options, pair, gate))
    for other, told in (
        ((options | {"scale": 4.0}, pair, gate), r"options\['scale'\] = 2.0, and .* is 4.0 here"),
        (
            (options | {"more": X}, pair, gate),
            "options = a dict of 'weight', 'scale', .*'more'",
        ),
        ((None, pair, gate), "options = a dict of 'weight', 'scale', and options is None here"),
        ((options, [X, 4], gate), r"pair\[1\] = 3, and .* is 4 here"),
        ((options, [X, 3, X], gate), "pair = a sequence of 2, and pair is a sequence of 3 here"),
        ((options, pair, Gate(X, 2.0)), "gate.scale = 1.0, and gate.scale is 2.0 here"),
    ):
        with pytest.raises(ValueError, match=f"^{name} was ejected with {told}"):
            found(X, *other)


def wrong_inside(x: Tensor, weight: Tensor) -> Tensor:
    return x.tanh() * weight + {"a": x}["b"]


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        (optioned, (X,), r"the example does not fit optioned\(.*'weight'"),
        (optioned, (X, WEIGHT, "tanh", 2.0, 3), "the example does not fit.*too many positional"),
        (optioned, ("x", WEIGHT), r"optioned raised on the example: \w+: .*\(test_function_arg"),
        (
            optioned,
            (X, torch.ones(3)),
            r"on the example: RuntimeError: The size of tensor a",
        ),
        (
            wrong_inside,
            (X, WEIGHT),
            r"the example: KeyError: 'b' \(test_function_argum\S+:\d+\)",
        ),
        (torch.add, (X, X), "add has no signature in Python; write a function that calls it"),
        (torch.nn.GELU, (X,), "GELU is a class; give a function"),
        (3, (X,), "3 is no function; give a function"),
    ],
)
def test_calls_that_are_wrong(
    function: Any, args: tuple[Any, ...], told: str, tmp_path: Path, capfd: Any
) -> None:
    with pytest.raises(FuselabError, match=told):
        eject(function, *args, out=tmp_path / "wrong", name="wrong" if function == 3 else None)
    assert not (tmp_path / "wrong").exists()
    assert capfd.readouterr().err == ""


def mask(x: Tensor, mask: Tensor) -> Tensor:
    return (x * 2).tanh() * mask


def test_an_argument_may_have_the_functions_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    args = torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([[1.0], [0.0], [2.0]])
    fuselab.eject(mask, *args, out=tmp_path / "masked", name="masked")
    package = importlib.import_module("masked").masked
    torch.testing.assert_close(package(*args), mask(*args))
