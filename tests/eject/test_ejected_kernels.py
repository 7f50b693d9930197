"""The Triton kernels of ejected packages, interpreted, against autograd on the original."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton_on_cpu
from ejected_functions import EXAMPLES
from torch import Tensor

from fuselab.prove.outputs import as_declared, floating, outputs_in, pulled_back
from fuselab.runtime import interpreter
from fuselab.runtime.triton_launch import parameter_layout

SIZES = (1, 2, 3, 5, 17, 33)


class Sizes:
    """A source for a package's ``draw``: sizes by a seed, normal values."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def size(self, *interesting: int) -> int:
        return self._random.choice([*SIZES, *interesting])

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return laid_out(torch.randn(shape, generator=self._generator), self._random.randrange(4))


def laid_out(tensor: Tensor, layout: int) -> Tensor:
    """Return the tensor contiguous, transposed, with steps and an offset, or expanded."""
    if layout == 0 or tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    if layout == 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2:
        wide = tensor.new_zeros([2 * size for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    return tensor[:1].expand_as(tensor)


def compare(folder: Path, module: ModuleType, name: str, args: Sequence[Tensor]) -> None:
    """Compare forward and backward with the original function's."""
    op: Any = module.OP
    leaves = [arg.detach().requires_grad_() for arg in args]
    expected = outputs_in(op.reference(*leaves))
    assert op.implementations["triton"].supports(*args) is None
    returned = interpreter.run(f"{folder}/op.py:forward_triton", *args)
    found = op.without_residuals(returned)
    near = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
    for one, other in zip(outputs_in(found), expected, strict=True):
        torch.testing.assert_close(one, other.detach(), **near)
        assert one.stride() == other.stride()
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(output.shape, generator=generator) for output in floating(expected)]
    wanted = pulled_back(expected, leaves, drawn)
    upstream = as_declared(op, expected, drawn)
    saved = op.gradient.save(returned, *args)
    needs = (True,) * len(args)
    given = interpreter.run(f"{folder}/op.py:backward_triton", needs, upstream, *saved)
    near = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, **near)
    formula = op.gradient.reference(needs, upstream, *saved)
    for one, other in zip(formula, wanted, strict=True):
        torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize("name", EXAMPLES)
def test_at_the_example(
    name: str, ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(arg.shape, generator=generator) for arg in EXAMPLES[name][1]]
    if name == "gated_norm":
        norm = EXAMPLES[name][0]
        args += [parameter.detach() for parameter in (norm.norm.weight, norm.norm.bias)]
        args += [norm.scale.detach()]
    compare(ejected(name), declared(name), name, args)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", EXAMPLES)
def test_at_drawn_sizes_and_layouts(
    name: str, seed: int, ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    module = declared(name)
    args = module.draw(Sizes(seed)).args
    try:
        module.OP.reference(*args)
    except (RuntimeError, ValueError, IndexError) as error:
        pytest.skip(f"the function itself refuses the drawn shapes: {error}")
    compare(ejected(name), module, name, args)


def test_rows_longer_than_a_block(
    ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, mask = (torch.randn(shape, generator=generator) for shape in ((1, 1, 2, 20001), (2, 1)))
    compare(
        ejected("masked_softmax"),
        declared("masked_softmax"),
        "masked_softmax",
        [scores, mask.expand(2, 20001)],
    )


def test_an_empty_tensor(
    ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    compare(
        ejected("biased_mish"),
        declared("biased_mish"),
        "biased_mish",
        [torch.ones(0, 3, 5), torch.ones(5)],
    )


def test_the_sum_of_nothing(
    ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    compare(
        ejected("sum_of_squares"), declared("sum_of_squares"), "sum_of_squares", [torch.ones(0, 4)]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(
    dtype: torch.dtype, ejected: Callable[[str], Path], declared: Callable[[str], ModuleType]
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 32), (32,))
    args = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    found = interpreter.run(f"{ejected('rms_norm')}/op.py:forward_triton", *args)
    expected = declared("rms_norm").reference(*(arg.double() for arg in args))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-15)


def test_shapes_of_another_kind_take_the_reference(
    declared: Callable[[str], ModuleType],
) -> None:
    supports = declared("group_norm_silu").supports
    x, weight = torch.ones(2, 8, 5, 6), torch.ones(8)
    assert supports(x, weight, weight) is None
    assert supports(x[0], weight, weight) == "argument 1 has 3 dimensions, the kernels take 4"
    assert supports(x, weight[:4], weight) == (
        "argument 2 has a dimension of size 4 where 8 is needed"
    )
    odd = torch.ones(6)
    assert supports(torch.ones(2, 6, 5, 6), odd, odd) == (
        "channels is 6, which is no multiple of 4"
    )


# Tensors that a kernel's loops merge for, and some that need nested ones.
DENSE = {
    "masked_softmax": ((4, 8, 64, 1024), (64, 1024)),
    "rms_norm": ((4, 512, 4096), (4096,)),
    "sum_of_squares": ((4096, 4096),),
}


@pytest.mark.parametrize("name", DENSE)
def test_launches_compile_for_an_h100(
    name: str, monkeypatch: pytest.MonkeyPatch, declared: Callable[[str], ModuleType]
) -> None:
    """The interpreter accepts more than the compiler; a compiler needs no GPU."""
    args = [torch.empty(shape, dtype=torch.bfloat16) for shape in DENSE[name]]
    for backward in (False, True):
        for launch in triton_on_cpu.launches(monkeypatch, declared(name), args, backward):
            compiled = launch.compiled()
            layout = parameter_layout(launch.kernel, compiled, len(launch.args))
            assert layout is not None and len(layout[0]) <= 64  # what a launch plan can hold
            if launch.keywords.get("SWEEP", 0) in (0, 1):
                # 16 bytes at a time, whatever the eviction policy
                assert re.search(r"ld\.global[\w.:]*\.v4", compiled.asm["ptx"])
            if launch.keywords.get("PARTS") == 0:  # a row in registers, read once
                loops = 1 if "sums_pointer" in launch.kernel.arg_names else 0
                assert compiled.asm["ttir"].count("scf.for") == loops


def test_rows_in_one_block_are_read_once(
    monkeypatch: pytest.MonkeyPatch, declared: Callable[[str], ModuleType]
) -> None:
    args = [torch.empty(64, 16, 4096, dtype=torch.bfloat16) for _ in range(2)]
    args += [torch.empty(4096, dtype=torch.bfloat16) for _ in range(2)]
    (launch,) = triton_on_cpu.launches(monkeypatch, declared("residual_norm"), args)
    assert launch.compiled().asm["ttir"].count("tt.load") == 4


@pytest.mark.parametrize("name", ["masked_softmax", "symmetric"])
def test_strided_tensors_compile_for_an_h100(
    name: str, monkeypatch: pytest.MonkeyPatch, declared: Callable[[str], ModuleType]
) -> None:
    """Nested loops over rows and columns, 64-bit offsets and 1000000 columns in a loop."""
    if name == "symmetric":
        args = [torch.empty(1, dtype=torch.bfloat16, device="meta").expand(70000, 70000)]
    else:
        x = torch.empty(3, 5, 7, 2000000, dtype=torch.bfloat16, device="meta")[:, :, :, ::2]
        args = [x.transpose(1, 2), torch.empty(5, 1000000, dtype=torch.bfloat16, device="meta")]
    launches = triton_on_cpu.launches(monkeypatch, declared(name), args, backward=True)
    assert {launch.keywords["WIDE"] for launch in launches} == {name == "symmetric"}
    for launch in launches:
        launch.compiled()


@pytest.mark.parametrize("name", ["group_norm_silu", "smooth_loss", "mean_of_two", "largest"])
def test_rows_that_programs_share(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    ejected: Callable[[str], Path],
    declared: Callable[[str], ModuleType],
) -> None:
    """Few long rows: each sweep is a launch, and the partial results are added in order."""
    shapes = {
        "group_norm_silu": ((1, 8, 96, 96), (8,), (8,)),
        "smooth_loss": ((130, 130), (130, 130)),
        "mean_of_two": ((40, 4, 450),),
        "largest": ((4200, 5),),
    }[name]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, generator=generator) for shape in shapes]
    launches = triton_on_cpu.launches(monkeypatch, declared(name), args)
    monkeypatch.undo()
    assert {launch.keywords["PARTS"] > 1 for launch in launches} == {True}
    compare(ejected(name), declared(name), name, args)


@pytest.mark.parametrize("name", triton_on_cpu.MATH)
@pytest.mark.parametrize("rounded", [False, True])
def test_elementary_functions(name: str, rounded: bool) -> None:
    x = torch.cat([torch.linspace(-30, 30, 3001), torch.logspace(-25, 1.4, 1000)])
    if name in ("log", "rsqrt", "log1p"):
        x = x[x > 0]
    found = interpreter.run("triton_on_cpu:elementary", name, x, rounded)
    expected = triton_on_cpu.MATH[name](x.double())
    # The interpreter computes in NumPy: this is about the polynomials and the cases.
    limit = 1e-5 if rounded else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=1e-38)
