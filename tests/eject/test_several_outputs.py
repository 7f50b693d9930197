"""Packages of functions that return more than one tensor: the public function returns what the
function returns, with the same gradients."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ejected_functions import STRUCTURES
from torch import Tensor

import fuselab
from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.runtime import interpreter


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """Return the package of one of the functions, which is written once."""
    root = tmp_path_factory.mktemp("several")

    def package(name: str) -> ModuleType:
        label = f"several_{name}"
        if not (root / label).exists():
            function, args, keywords = STRUCTURES[name]
            eject(function, *args, out=root / label, name=label, keywords=keywords)
            sys.path.insert(0, str(root))
            importlib.invalidate_caches()
        return importlib.import_module(label)

    return package


def _public(module: ModuleType) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module, module.__name__)
    return function


def drawn(name: str) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Return the arguments of a call of other sizes than the example's, those by keyword, and all
    tensors among them."""
    generator = torch.Generator().manual_seed(5)

    def normal(like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape = [5, 7, 10][3 - like.dim() :]
        return torch.randn(shape, generator=generator).requires_grad_()

    _, args, keywords = STRUCTURES[name]
    positional = [normal(arg) for arg in args]
    named = {key: normal(value) for key, value in keywords.items()}
    return positional, named, [*positional, *(v for v in named.values() if isinstance(v, Tensor))]


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [leaf for item in items for leaf in leaves(item)]
        if isinstance(value, (dict, list, tuple))
        else []
    )


def described(value: Any) -> Any:
    """Return a structure with what matters of each tensor in its place."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.requires_grad
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(item) for item in value]
    return value


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_public_function_returns_what_the_function_does(
    name: str, implementation: str, packages: Callable[[str], ModuleType]
) -> None:
    public = _public(packages(name))
    args, keywords, _ = drawn(name)
    expected = STRUCTURES[name][0](*args, **keywords)
    for _ in range(2):  # the second call may run a plan
        found = public(*args, **keywords, implementation=implementation)
        assert described(found) == described(expected)
        torch.testing.assert_close(leaves(found), leaves(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - {"comparisons"}))
def test_a_backward_through_each_output_and_through_all(
    name: str, packages: Callable[[str], ModuleType]
) -> None:
    args, keywords, tensors = drawn(name)
    pairs = [
        (one, other)
        for one, other in zip(
            leaves(_public(packages(name))(*args, **keywords, implementation="cpp")),
            leaves(STRUCTURES[name][0](*args, **keywords)),
            strict=True,
        )
        if other.requires_grad
    ]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one, _ in pairs]
    chosen = [[place] for place in range(len(pairs))] + [list(range(len(pairs)))]
    for places in chosen:
        grads = [
            torch.autograd.grad(
                [pairs[place][side] for place in places],
                tensors,
                [upstream[place] for place in places],
                retain_graph=True,
                materialize_grads=True,
            )
            for side in range(2)
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(STRUCTURES.keys() - {"add_rms_norm", "two_losses"}))
def test_the_triton_kernels(name: str, packages: Callable[[str], ModuleType]) -> None:
    module = packages(name)
    _, _, tensors = drawn(name)
    args = [tensor.detach() for tensor in tensors]
    path = f"{Path(str(module.__file__)).parent}/op.py"
    found = interpreter.run(f"{path}:forward_triton", *args)
    torch.testing.assert_close(found, module.OP.reference(*args), rtol=2e-5, atol=2e-5)


def test_an_output_that_is_an_argument_is_that_tensor(
    packages: Callable[[str], ModuleType],
) -> None:
    args, _, _ = drawn("nested")
    found = _public(packages("nested"))(*args)
    assert found[1][1] is args[0]
    assert found[0] is found[3]
    assert found[1][2]._base is not None
    assert found[1][2].data_ptr() == found[0].data_ptr()
    assert found[5].data_ptr() == args[1].data_ptr()


def test_the_copied_named_tuple_is_the_packages_own(
    packages: Callable[[str], ModuleType],
) -> None:
    args, _, _ = drawn("named_pair")
    pair = _public(packages("named_pair"))(*args)
    assert pair._fields == ("hidden", "activated")
    torch.testing.assert_close(pair.activated, torch.tanh(args[0] + args[1]))


def test_a_residual_and_its_norm_are_one_kernel() -> None:
    function, args, _ = STRUCTURES["add_rms_norm"]
    package = planned_package(function, args, {}, "add_rms_norm")
    (forward,) = package.forward
    assert [one.name for one in forward.loads] == ["x", "residual", "weight"]
    assert [one.name for one in forward.stored] == ["hidden", "normed"]
    assert package.upstream_names == ("grad_hidden", "grad_normed")


@pytest.mark.parametrize("name", ["add_rms_norm", "row_statistics"])
def test_second_derivatives(name: str, packages: Callable[[str], ModuleType]) -> None:
    public = _public(packages(name))
    inputs = [tensor.detach().double()[..., :3].requires_grad_() for tensor in drawn(name)[2]]

    def differentiable(*args: Tensor) -> tuple[Tensor, ...]:
        found = leaves(public(*args, implementation="cpp"))
        return tuple(one for one in found if one.requires_grad)

    assert torch.autograd.gradcheck(differentiable, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(differentiable, inputs, fast_mode=True)


def test_compiled_it_is_one_graph(packages: Callable[[str], ModuleType]) -> None:
    public = _public(packages("row_statistics"))
    _, _, tensors = drawn("row_statistics")
    compiled = torch.compile(
        lambda *args: public(*args, implementation="cpp"), backend="aot_eager", fullgraph=True
    )
    found, expected = compiled(*tensors), STRUCTURES["row_statistics"][0](*tensors)
    assert described(found) == described(expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(0, 10), (5, 0)])
def test_empty_tensors(shape: tuple[int, int], packages: Callable[[str], ModuleType]) -> None:
    public = _public(packages("row_statistics"))
    x, weight = torch.ones(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
    found, expected = (
        public(x, weight, implementation="cpp"),
        STRUCTURES["row_statistics"][0](x, weight),
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    grads = torch.autograd.grad(found["centred"].sum(), (x, weight))
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]


def test_check_passes(packages: Callable[[str], ModuleType]) -> None:
    folder = Path(str(packages("row_statistics").__file__)).parent
    report = fuselab.check(
        str(folder), implementation="cpp", seed=0, dtype=torch.float32, quick=True, device="cpu"
    )
    assert report.passed, str(report)


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_a_gradient_that_is_the_upstream_gradient(tmp_path: Path) -> None:
    """Both gradients are the upstream one; each is memory of its own, and has its own dtype."""
    op = fuselab.prove.load.load_op(
        str(eject(added, torch.ones(3), torch.ones(3), out=tmp_path / "added"))
    )
    x, y = torch.randn(5, requires_grad=True), torch.randn(5).half().requires_grad_()
    upstream = torch.randn(5)
    output = fuselab.operator(op)(x, y, implementation="cpp")
    grads = torch.autograd.grad(output, (x, y), upstream)
    torch.testing.assert_close(grads, (upstream, upstream.half()))
    raw = op.implementations["cpp"].backward((True, True), upstream, x.detach(), y.detach())
    assert raw[0].data_ptr() != raw[1].data_ptr() != upstream.data_ptr()
    fakes = op.gradient.fake((True, True), upstream, x, y)
    assert [fake.dtype for fake in fakes] == [torch.float32, torch.float16]


def two_sided(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.exp() * 2, y.sin() + 1, (x + y).tanh() * 2, (x > 0) * y.detach()


@pytest.mark.parametrize("needs", [(False, True), (True, False), (True, True), (False, False)])
def test_an_output_needs_a_gradient_where_its_own_arguments_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: tuple[bool, bool]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "sides_" + "_".join(map(str, needs)).lower()
    eject(two_sided, torch.ones(3, 4), torch.ones(3, 4), out=tmp_path / name, name=name)
    package = getattr(importlib.import_module(name), name)
    x, y = (torch.linspace(-1, 1, 10).reshape(2, 5).requires_grad_(need) for need in needs)
    found, wanted = package(x, y), two_sided(x, y)
    assert [one.requires_grad for one in found] == [one.requires_grad for one in wanted]
    inputs = [one for one in (x, y) if one.requires_grad]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        if other.requires_grad:
            given, right = (
                torch.autograd.grad(each.sum(), inputs, retain_graph=True, allow_unused=True)
                for each in (one, other)
            )
            for gradient, exact in zip(given, right, strict=True):
                exact = torch.zeros(2, 5) if exact is None else exact
                torch.testing.assert_close(
                    torch.zeros(2, 5) if gradient is None else gradient, exact
                )
