"""Operands that lie interleaved: Triton kernels read and write two neighbours as one integer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter
from fuselab.runtime.sweep import Sweep


def rotated(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def norm_of_pairs(x, cos, sin):
    """Compute a reduction over pairs, whose kernel has rows that all share a table."""
    real, imaginary = x[..., 0::2] * cos, x[..., 1::2] * sin
    return (real * real + imaginary * imaginary).sum(-1).sqrt()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments(dtype: torch.dtype = torch.float32, width: int = 10) -> list[Tensor]:
    return [one.to(dtype) for one in (drawn(3, 5, width), drawn(width // 2), drawn(5, width // 2))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        function: eject(function, *arguments(), out=root / function.__name__)
        for function in (rotated, norm_of_pairs)
    }


LAYOUTS = {
    "contiguous": lambda x: x,
    "one row apart": lambda x: torch.cat([x, x], 1)[:, ::2],
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "at an odd place": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "rows of odd length": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [rotated, norm_of_pairs], ids=lambda one: one.__name__)
def test_interpreted_triton_in_any_layout(
    function: Any, layout: str, folders: dict[Any, Path]
) -> None:
    x, *tables = arguments()
    folder = folders[function]
    compare(
        load_op(str(folder)),
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        [LAYOUTS[layout](x), *tables],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pairs_of_every_width(dtype: torch.dtype, folders: dict[Any, Path]) -> None:
    args = arguments(dtype, width=70)
    found = interpreter.run(f"{folders[rotated]}/op.py:forward_triton", *args)
    exact = rotated(*(one.double() for one in args))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def swept(x: Tensor, second: Tensor | None = None) -> Sweep:
    even, odd = x[..., ::2], x[..., 1::2] if second is None else second
    size = dict(zip(("length", "width"), even.shape, strict=True))
    read = [(even, "length width"), (odd, "length width")]
    return Sweep(rows=size, columns={}, read=read, written=[(torch.empty(even.shape), read[0][1])])


def test_strides_of_pairs_count_pairs() -> None:
    found = swept(torch.zeros(8, 32)[::2]).in_pairs([(0, 1)])
    assert found is not None
    assert found.columns.strides == ((1,), (1,), (1,))
    assert found.rows.strides == ((32,), (32,), (16,))
    whole = swept(torch.zeros(8, 32, dtype=torch.bfloat16)).in_pairs([(0, 1)])
    assert whole is not None and whole.columns.strides == ((1,), (1,), (1,))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: swept(torch.zeros(8, 32)[:, 1:31]), id="at an odd place"),
        pytest.param(lambda: swept(torch.zeros(8, 33)[:, :32]), id="rows of odd length"),
        pytest.param(lambda: swept(torch.zeros(32, 8).t()), id="transposed"),
        pytest.param(lambda: swept(torch.zeros(8, 32).double()), id="no integer of 128 bits"),
        pytest.param(lambda: swept(torch.zeros(8, 32, dtype=torch.uint8)), id="bytes"),
        pytest.param(
            lambda: swept(torch.zeros(8, 32), torch.zeros(8, 32)[:, 1::2]), id="two tensors"
        ),
    ],
)
def test_other_layouts_are_no_pairs(made: Any) -> None:
    assert made().in_pairs([(0, 1)]) is None
