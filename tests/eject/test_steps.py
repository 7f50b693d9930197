"""Steps of optimizers: functions that write over tensors and return nothing, also over lists."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.ejection.package import planned_package
from fuselab.errors import EjectError, OverlapError
from fuselab.runtime import interpreter, process_choice


def momentum_step(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], lr: Tensor
) -> None:
    for param, grad, buffer in zip(params, grads, buffers, strict=True):
        buffer.mul_(0.9).add_(grad)
        param.sub_(lr * buffer)


def adamw_step(
    param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, lr: Tensor
) -> None:
    step += 1
    param.mul_(1 - lr * 0.01)
    mean.lerp_(grad, 0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    corrected = square.sqrt() / (1 - 0.999**step).sqrt()
    param.addcdiv_(mean * (-lr / (1 - 0.9**step)), corrected.add_(1e-8))


def row_wise_adagrad_step(table: Tensor, grad: Tensor, sums: Tensor) -> None:
    sums.add_(grad.pow(2).mean(dim=1))
    table.addcmul_(grad, 1 / (sums.sqrt() + 1e-8)[:, None], value=-0.1)


def amsgrad_step(
    params: list[Tensor], grads: list[Tensor], squares: list[Tensor], most: list[Tensor]
) -> None:
    """PyTorch refuses ``out`` where a gradient is wanted."""
    torch._foreach_mul_(squares, 0.99)
    torch._foreach_addcmul_(squares, grads, grads, 0.01)
    for square, largest in zip(squares, most, strict=True):
        torch.maximum(largest, square, out=largest)
    torch._foreach_addcdiv_(params, grads, torch._foreach_sqrt(most), [-0.1, -0.2, -0.3])
    torch._foreach_zero_(grads)


def row_wise_adagrad_of_tables(
    tables: list[Tensor], grads: list[Tensor], sums: list[Tensor]
) -> None:
    for table, grad, total in zip(tables, grads, sums, strict=True):
        row_wise_adagrad_step(table, grad, total)


def lamb_step(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor]
) -> None:
    for param, grad, mean, square in zip(params, grads, means, squares, strict=True):
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = mean / (square.sqrt() + 1e-6) + 0.01 * param
        param.sub_(0.1 * param.norm() / (update.norm() + 1e-6) * update)


def largest_step(params: list[Tensor], most: list[Tensor]) -> None:
    for param, largest in zip(params, most, strict=True):
        largest.copy_(torch.maximum(largest * 0.9, param.abs().amax()))
        param.div_(largest)


def clipped_step(params: list[Tensor], grads: list[Tensor], limit: Tensor) -> None:
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1)
    for param, grad in zip(params, grads, strict=True):
        param.sub_(grad * scale * 0.1)


@torch.no_grad()
def clip(grads: Sequence[Tensor], limit: Tensor) -> Tensor:
    norms = torch.stack([grad.square().sum() for grad in grads])
    norm = norms.sum().sqrt()
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1))
    return norm


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


SAME = [[drawn(4, 5), drawn(7), drawn(2, 3, 4)] for _ in range(3)]
TABLES = [drawn(4, 5), drawn(7, 16), drawn(3, 17_000)]
LONG = [drawn(4, 5), drawn(7), drawn(2, 3, 4), drawn(3, 6_000)]  # of the last, programs share a row
STEPS: dict[Callable[..., Any], tuple[list[Any], tuple[str, ...]]] = {
    momentum_step: ([*SAME, torch.tensor(0.1)], ("params", "grads", "buffers", "lr")),
    adamw_step: (
        [
            drawn(4, 5),
            drawn(4, 5) + 1,
            drawn(4, 5),
            drawn(4, 5).square(),
            *map(torch.tensor, (3.0, 0.1)),
        ],
        ("param", "grad", "mean", "square", "step", "lr"),
    ),
    row_wise_adagrad_step: (
        [drawn(4, 5), drawn(4, 5) + 1, drawn(4).abs()],
        ("table", "grad", "sums"),
    ),
    amsgrad_step: (
        [*SAME[:2], *([one.square() + 1 for one in SAME[place]] for place in (1, 2))],
        ("params", "grads", "squares", "most"),
    ),
    clip: ([SAME[0], torch.tensor(0.5)], ("grads", "limit")),
    row_wise_adagrad_of_tables: (
        [TABLES, [one + 1 for one in TABLES], [drawn(one.shape[0]).abs() for one in TABLES]],
        ("tables", "grads", "sums"),
    ),
    lamb_step: (
        [LONG, *([one + more for one in LONG] for more in (1, 2)), [one**2 for one in LONG]],
        ("params", "grads", "means", "squares"),
    ),
    largest_step: ([LONG, [drawn(1).abs() for _ in LONG]], ("params", "most")),
    clipped_step: (
        [LONG, [one + 1 for one in LONG], torch.tensor(0.5)],
        ("params", "grads", "limit"),
    ),
}
SHARED = (row_wise_adagrad_of_tables, lamb_step, largest_step, clipped_step)


INTERPRETED = """
from .op import OP, forward_triton

def results(*args):
    returned = forward_triton(*args)
    return OP.mutated(args) if OP.mutates else returned
"""


@pytest.mark.parametrize("step", STEPS)
def test_steps_write_over_their_arguments(
    step: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public function takes the lists of the user's; the Triton kernels run interpreted."""
    args, parameters = STEPS[step]
    name = f"ejected_{step.__name__}"
    fuselab.eject(step, *copy.deepcopy(args), out=tmp_path / name, name=name)
    monkeypatch.syspath_prepend(str(tmp_path))
    ejected = getattr(importlib.import_module(name), name)
    assert tuple(ejected.__annotations__)[: len(parameters)] == parameters
    wanted = copy.deepcopy(args)
    expected = step(*wanted)
    op = importlib.import_module(f"{name}.op").OP
    flat = args if op.mutates else torch.utils._pytree.tree_leaves(args)
    (tmp_path / name / "interpreted.py").write_text(INTERPRETED)
    by_kernels = interpreter.run(f"{tmp_path / name}/interpreted.py:results", *flat)
    by_definition = op.reference(*flat)
    torch.testing.assert_close(by_kernels, by_definition, rtol=1e-6, atol=1e-6)
    given = copy.deepcopy(args)
    has_lists = step in (momentum_step, amsgrad_step, *SHARED)
    implementation = "auto" if has_lists else "reference"
    found = ejected(*given, implementation=implementation)
    torch.testing.assert_close((found, given), (expected, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("step", [momentum_step, adamw_step, amsgrad_step, *SHARED])
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_steps_on_a_gpu(
    step: Callable[..., Any], implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, because the second call has a launch plan; the second tensor of each list has
    gaps."""
    args, _ = STEPS[step]
    name = f"{step.__name__}_by_{implementation}"
    fuselab.eject(step, *copy.deepcopy(args), out=tmp_path / name, name=name)
    monkeypatch.syspath_prepend(str(tmp_path))
    ejected = getattr(importlib.import_module(name), name)
    wanted = torch.utils._pytree.tree_map(lambda one: one.cuda(), args)
    given = torch.utils._pytree.tree_map(
        lambda one: one.repeat_interleave(2, -1)[..., ::2] if one.dim() == 1 else one.clone(),
        wanted,
    )
    addresses = [one.data_ptr() for one in torch.utils._pytree.tree_leaves(given)]
    for _ in range(2):
        step(*wanted)
        ejected(*given, implementation=implementation)
    # PyTorch computes with the count of steps, a number of 32 bits, in 32 bits.
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    assert [one.data_ptr() for one in torch.utils._pytree.tree_leaves(given)] == addresses


def transposed_step(param: Tensor, grad: Tensor) -> None:
    param.sub_(grad * param.t())


def normed_step(param: Tensor, total: Tensor) -> None:
    """The sum of all elements is that of the old ones."""
    total.add_(param.sum())
    param.mul_(2)


def crossed_step(first: Tensor, second: Tensor) -> None:
    """The second kernel reads what the first has written over."""
    old = first.clone()
    first.add_(1)
    second.copy_(old[:1] * 3)


def negating_step(first: Tensor, second: Tensor) -> None:
    first.neg_()
    second.neg_()


WRITTEN_IN_PLACE: list[tuple[Callable[..., Any], list[Any], bool]] = [
    *((step, STEPS[step][0], True) for step in (momentum_step, adamw_step, amsgrad_step)),
    *((step, STEPS[step][0], True) for step in (row_wise_adagrad_step, *SHARED)),
    (clip, STEPS[clip][0], False),
    (transposed_step, [drawn(4, 4), drawn(4, 4)], False),
    (normed_step, [drawn(4, 5), drawn(1)], False),
    (crossed_step, [drawn(4), drawn(1)], False),
    (negating_step, [drawn(4, 5), drawn(3)], True),
]


@pytest.mark.parametrize(("step", "args", "in_place"), WRITTEN_IN_PLACE)
def test_kernels_write_in_place_where_nothing_reads_the_old_value_later(
    step: Callable[..., Any], args: list[Any], in_place: bool
) -> None:
    package = planned_package(step, copy.deepcopy(args), {}, "step")
    assert package.in_place is in_place
    assert package.operator_name == ("ejected::step_" if in_place else "ejected::step")


@pytest.mark.parametrize("step", [transposed_step, normed_step, crossed_step])
def test_old_values_that_are_read_later_are_kept(
    step: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = next(held for one, held, _ in WRITTEN_IN_PLACE if one is step)
    name = f"kept_{step.__name__}"
    fuselab.eject(step, *copy.deepcopy(args), out=tmp_path / name, name=name)
    monkeypatch.syspath_prepend(str(tmp_path))
    given, wanted = copy.deepcopy(args), copy.deepcopy(args)
    getattr(importlib.import_module(name), name)(*given)
    step(*wanted)
    torch.testing.assert_close(given, wanted)


def test_tensors_of_lists_share_a_kernel_named_after_the_lists(tmp_path: Path) -> None:
    fuselab.eject(
        momentum_step, *copy.deepcopy(STEPS[momentum_step][0]), out=tmp_path / "step", name="step"
    )
    kernels = (tmp_path / "step" / "triton_kernels.py").read_text()
    assert kernels.count("@triton.jit") == 1
    assert "new_params = params - lr * add" in kernels
    for name, mark in (("cuda_kernels.cu", "__global__"), ("cpu_kernels.cpp", "void ")):
        assert (tmp_path / "step" / name).read_text().count(mark) == 1
    assert (tmp_path / "step" / "op.py").read_text().count("sweeps.run") == 1
    assert "is launched 3 times" in (tmp_path / "step" / "page.md").read_text()


@pytest.mark.parametrize("step", SHARED[:3])
def test_kernels_with_reductions_share_a_launch(step: Callable[..., Any], tmp_path: Path) -> None:
    fuselab.eject(step, *copy.deepcopy(STEPS[step][0]), out=tmp_path / "step", name="step")
    kernels = (tmp_path / "step" / "triton_kernels.py").read_text()
    assert kernels.count("@triton.jit") == 1
    assert "rows_of_lists(" in kernels
    for name, mark in (("cuda_kernels.cu", "__global__"), ("cpu_kernels.cpp", "void ")):
        assert (tmp_path / "step" / name).read_text().count(mark) == 1
    assert (tmp_path / "step" / "op.py").read_text().count("sweeps.run") == 1


def test_old_values_of_rows_are_read_before_new_ones_are_written(tmp_path: Path) -> None:
    """A kernel that reads a row's old value for each of its columns writes the new one apart."""
    apart = {}
    for step in (row_wise_adagrad_of_tables, lamb_step):
        fuselab.eject(step, *copy.deepcopy(STEPS[step][0]), out=tmp_path / step.__name__)
        apart[step] = (tmp_path / step.__name__ / "op.py").read_text().count("apart=True")
    assert apart == {row_wise_adagrad_of_tables: len(TABLES), lamb_step: 0}


def test_kernels_of_other_numbers_share_nothing() -> None:
    package = planned_package(amsgrad_step, copy.deepcopy(STEPS[amsgrad_step][0]), {}, "step")
    assert [plan.code for plan in package.forward] == [None] * 3


def test_a_tensor_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager PyTorch would step twice."""
    args = copy.deepcopy(STEPS[momentum_step][0])
    fuselab.eject(momentum_step, *copy.deepcopy(args), out=tmp_path / "twice", name="twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    args[0][1] = args[2][1]
    with pytest.raises(OverlapError, match="cannot write over memory that another"):
        importlib.import_module("twice").twice(*args)


def centred_step(
    x: Tensor, params: list[Tensor], grads: list[Tensor], averages: list[Tensor]
) -> None:
    torch._foreach_lerp_(averages, grads, 0.25)
    torch._foreach_mul_(averages, 2.0)
    products = x @ averages[0]
    params[0].sub_(products.sigmoid().mul(0.5).add(1))
    params[1].sub_(averages[1])


def test_lists_are_written_over_where_a_step_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that updates a list was taken for one that returns new tensors."""
    tensors = [drawn(8, 8).float() + place for place in range(3)]
    args = [tensors[0], *([one.clone(), drawn(5).float()] for one in tensors)]
    fuselab.eject(centred_step, *copy.deepcopy(args), out=tmp_path / "centred_step")
    assert (tmp_path / "centred_step" / "composed.py").exists()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(process_choice, "_value", lambda: "reference")
    wanted = copy.deepcopy(args)
    centred_step(*wanted)
    importlib.import_module("centred_step").centred_step(*args)
    torch.testing.assert_close(args, wanted)


def test_a_list_of_another_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuselab.eject(clip, [torch.ones(3), torch.ones(4)], torch.ones(()), out=tmp_path / "clipping")
    monkeypatch.syspath_prepend(str(tmp_path))
    clipping = importlib.import_module("clipping").clip
    with pytest.raises(
        ValueError, match="grads must hold 2 tensors, as in the example; it holds 3"
    ):
        clipping([torch.ones(3)] * 3, torch.ones(()))


def selected(tensors: dict[str, Any], unread: Tensor, scale: float = 2.0) -> Tensor:
    one, (other, _) = tensors["one"], tensors["others"]
    return torch.exp(one * other) * scale


def test_dicts_and_tensors_that_nothing_reads() -> None:
    held = {"one": torch.ones(3, 4), "others": (torch.ones(4), torch.ones(2))}
    package = planned_package(selected, (held, torch.ones(5)), {}, "selected")
    assert package.parameters == ("tensors_one", "tensors_others_0")
    assert package.captured.public == {"tensors": "Any", "unread": "Tensor"}


def masked_products(tensors: list[Tensor], unread: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    mask &= tensors[1] > 0
    product = (tensors[0] * mask) @ weight
    return torch.tanh(product) * 2


def test_lists_and_operators_in_place_between_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [[drawn(3, 4), drawn(4)], drawn(2), torch.ones(4, dtype=torch.bool), drawn(4, 5)]
    name = "masked_products"
    fuselab.eject(masked_products, *copy.deepcopy(args), out=tmp_path / name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FUSELAB_IMPLEMENTATION", "reference")
    given, wanted = copy.deepcopy(args), copy.deepcopy(args)
    found = importlib.import_module(name).masked_products(*given)
    torch.testing.assert_close((found, given), (masked_products(*wanted), wanted))
    assert not torch.equal(given[2], args[2])


def test_a_gradient_through_what_is_written_over_is_refused() -> None:
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        total = x.sum()
        x.mul_(scale)
        return total * scale.sum()

    with pytest.raises(EjectError, match=r"or run under torch.no_grad\(\)"):
        planned_package(scaled, (torch.ones(3, 4), torch.ones(4)), {}, "scaled")


def chained_step(params: list[Tensor], grads: list[Tensor]) -> None:
    """Each tensor takes the new value of the one before it."""
    for place in range(1, len(params)):
        params[place].mul_(grads[place]).add_(params[place - 1])


def shifted_step(params: list[Tensor], grads: list[Tensor]) -> None:
    """Each tensor takes the old value of the one behind it."""
    for place in range(len(params) - 1):
        params[place].mul_(grads[place]).add_(params[place + 1])


@pytest.mark.parametrize("step", [chained_step, shifted_step])
def test_tensors_of_one_list_that_need_each_other(
    step: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator takes lists apart of which some tensors are not written over."""
    args = [[drawn(40, place) for place in (1, 1, 1)], [drawn(40, 1) for _ in range(3)]]
    name = f"need_{step.__name__}"
    fuselab.eject(step, *copy.deepcopy(args), out=tmp_path / name, name=name)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = copy.deepcopy(args)
    getattr(importlib.import_module(name), name)(*given)
    step(*args)
    torch.testing.assert_close(given, args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_launch_for_tensors_of_many_sizes_and_layouts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sizes around a program's block, gaps, and transposed and expanded gradients, more than one
    launch has room for; the operator has more than 64 tensors."""
    shapes = [
        (3,),
        (2, 3),
        (4, 1030),
        (2048,),
        (2049,),
        (5, 4),
        *[(1 + n % 7,) for n in range(18)],
    ]
    params, grads, buffers = ([drawn(*shape).to(dtype) for shape in shapes] for _ in range(3))
    params[1] = drawn(3, 2).to(dtype).t()
    buffers[3] = drawn(4096).to(dtype)[::2]
    grads[5] = drawn(5, 1).to(dtype).expand(5, 4)
    grads[2] = drawn(1030, 4).to(dtype).t()
    args = [params, grads, buffers, torch.tensor(0.1)]
    fuselab.eject(momentum_step, *copy.deepcopy(args), out=tmp_path / "step", name="step")
    few = "from fuselab.runtime import triton_sweep\ntriton_sweep.MOST_MEMBERS = 10\n"
    (tmp_path / "step" / "interpreted.py").write_text(few + INTERPRETED)
    given = copy.deepcopy(args)
    found = interpreter.run(f"{tmp_path / 'step'}/interpreted.py:results", *given)
    momentum_step(*args)
    tolerance = 1e-6 if dtype is not torch.bfloat16 else 2**-6
    torch.testing.assert_close(found, (*params, *buffers), rtol=tolerance, atol=tolerance)


def undecided(x: Tensor, is_wanted: bool) -> Tensor | None:
    """One return of its code gives a value or None."""
    return x.tanh() if is_wanted else None


def test_a_step_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    own = torch.compile

    def counted(*args: Any, **keywords: Any) -> Any:
        compiled.append(args[0])
        return own(*args, **keywords)

    monkeypatch.setattr(torch, "compile", counted)
    planned_package(momentum_step, [[drawn(2, 3)], [drawn(2, 3)], [drawn(2, 3)], drawn()], {}, "s")
    assert compiled == [momentum_step]
    package = planned_package(undecided, (drawn(2, 3), True), {}, "undecided")
    assert len(package.captured.gradients) == 1
