"""Ejected forwards hand values such as the mean of every row to their backwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare
from torch import Tensor

import fuselab
from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def normed(x, weight, bias):
    return F.relu(F.layer_norm(x, (x.shape[-1],), weight, bias))


def silu_of_groups(x, weight, bias):
    return F.silu(F.group_norm(x, 2, weight, bias))


def weights_of(scores):
    return torch.softmax(scores * 0.5, -1).square()


def distance(student, teacher):
    near, far = F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1)
    return F.kl_div(near, far, reduction="batchmean", log_target=True)


def with_its_scale(x):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * scale, scale


def largest_of_windows(x):
    return F.adaptive_max_pool2d(x.exp(), (2, 3))


SHAPES: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    normed: ((3, 80), (80,), (80,)),
    silu_of_groups: ((2, 4, 6, 7), (4,), (4,)),
    weights_of: ((2, 3, 70),),
    distance: ((3, 90), (3, 90)),
    largest_of_windows: ((2, 3, 9, 14),),
}
COMPILED = (silu_of_groups, distance, largest_of_windows)
KEPT = {
    normed: ("layer_norm_rsqrt", "layer_norm_mean"),
    silu_of_groups: ("group_norm_mean", "group_norm_rstd"),
    weights_of: ("softmax_amax", "softmax_sum"),
    distance: ("far_amax", "far_log", "near_amax", "near_log"),
    # Not what is largest: where it is, which would take two sweeps to find again.
    largest_of_windows: ("adaptive_max_pool2d_place",),
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in SHAPES[function]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("kept")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, *arguments(function), out=path)

    return folder


@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_the_backward_reads_what_the_forward_kept(function: Any, folders: Any) -> None:
    package = planned_package(function, arguments(function), {}, function.__name__)
    assert set(package.kept) == set(KEPT[function])
    stored = {operand.name for plan in package.forward for operand in plan.stored}
    read = {operand.name for plan in package.backward for operand in plan.loads}
    assert set(package.kept) <= stored & read


def largest_of_rows(x):
    return x.max(1)[0]


@pytest.mark.parametrize(
    ("function", "sizes", "is_kept"),
    [
        (largest_of_rows, (2, 600, 3), True),
        (largest_of_rows, (2, 200, 3), False),  # a program has them in registers in any case
        (lambda x: F.adaptive_max_pool2d(x, (2, 3)), (1, 1, 8, 12), False),  # likewise
        (lambda x: F.max_pool2d(x, 4, 1), (1, 1, 9, 9), False),  # windows overlap
        (lambda x: x.amax(1), (2, 600, 3), False),  # how many are largest is no position
    ],
)
def test_which_positions_are_kept(
    function: Callable[..., Any], sizes: tuple[int, ...], is_kept: bool
) -> None:
    package = planned_package(function, [torch.randn(sizes)], {}, "largest")
    assert bool(package.kept) is is_kept


@pytest.mark.parametrize("function", COMPILED, ids=lambda one: one.__name__)
def test_the_formulas_compute_what_the_kernels_keep(function: Any, folders: Any) -> None:
    op, args = load_op(str(folders(function))), arguments(function)
    _, *kept = op.implementations["cpp"].forward(*args)
    for one, other in zip(kept, op.residuals(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_interpreted_triton(function: Any, folders: Any) -> None:
    folder = folders(function)
    compare(
        load_op(str(folder)),
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        arguments(function),
    )


@pytest.mark.parametrize("function", COMPILED, ids=lambda one: one.__name__)
def test_cpp(function: Any, folders: Any) -> None:
    op = load_op(str(folders(function)))
    cpp = op.implementations["cpp"]
    compare(op, cpp.forward, cpp.backward, arguments(function))


def test_users_get_the_outputs_alone_and_every_derivative(folders: Any) -> None:
    by_kernels = fuselab.operator(load_op(str(folders(silu_of_groups))))
    output = by_kernels(*arguments(silu_of_groups), implementation="cpp")
    torch.testing.assert_close(
        output, silu_of_groups(*arguments(silu_of_groups)), rtol=1e-5, atol=1e-5
    )
    x, weight, bias = arguments(silu_of_groups)
    args = [one.double().requires_grad_() for one in (x[:1, :, :1, :3], weight, bias)]

    def kernels(*args: Tensor) -> Any:
        return by_kernels(*args, implementation="cpp")

    assert torch.autograd.gradcheck(kernels, args)
    assert torch.autograd.gradgradcheck(kernels, args)


def test_a_short_row_is_computed_again() -> None:
    args = (torch.ones(3, 8), torch.ones(8), torch.ones(8))
    assert planned_package(normed, args, {}, "normed").kept == ()


def test_an_output_is_not_kept_twice() -> None:
    package = planned_package(with_its_scale, (torch.ones(3, 80),), {}, "with_its_scale")
    stored = [operand.node for plan in package.forward for operand in plan.stored]
    assert len(stored) == len(set(stored))


def test_a_standalone_package_keeps_them_too(tmp_path: Path) -> None:
    folder = eject(normed, *arguments(normed), out=tmp_path / "alone_normed", standalone=True)
    op = load_op(str(folder))
    assert op.residual_count == 2
    args = [one.requires_grad_() for one in arguments(normed)]
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location(
        "alone_normed", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["alone_normed"] = module
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # a kernel that does not build says so with a class of its own
        output = module.normed(*args)
    expected = normed(*args)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(output, args, upstream, create_graph=True)
    wanted = torch.autograd.grad(expected, args, upstream, create_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    second = torch.autograd.grad(sum(one.square().sum() for one in found), args)
    right = torch.autograd.grad(sum(one.square().sum() for one in wanted), args)
    torch.testing.assert_close(second, right, rtol=1e-3, atol=1e-4)
