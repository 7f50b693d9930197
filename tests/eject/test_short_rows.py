"""C++ kernels whose rows, or innermost loops, are shorter than a vector; and repeated elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, imported
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.runtime.cpp_sweep import _runs_are_short
from fuselab.runtime.sweep import Sweep


def centred(x):
    return (x - x.mean(-1, keepdim=True)).exp()


def doubled(x):
    return F.relu(F.interpolate(x, scale_factor=2.0, mode="nearest")) * 2


def tripled(x):
    return F.interpolate(x * 2, scale_factor=(3, 1), mode="nearest-exact")


def stretched(x, y):
    return y + F.interpolate(x, size=y.shape[2:])


def apart(x):
    return F.pixel_unshuffle(F.relu(x), 2)


EXAMPLES = {
    centred: (torch.zeros(5, 9),),
    doubled: (torch.zeros(2, 3, 4, 5),),
    tripled: (torch.zeros(2, 3, 4, 5),),
    stretched: (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 8, 10)),
    apart: (torch.zeros(2, 3, 4, 6),),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the C++ kernels of one of the functions above, and the text of its launchers."""
    made = {}
    folder = tmp_path_factory.mktemp("packages")

    def kernels_of(function):
        if function not in made:
            path = eject(function, *EXAMPLES[function], out=folder / function.__name__)
            public = getattr(imported(path), function.__name__)
            made[function] = (
                lambda *args: public(*args, implementation="cpp"),
                (path / "op.py").read_text(),
            )
        return made[function]

    return kernels_of


def compare(call, function, *inputs):
    """Compare outputs and gradients with those of eager PyTorch in float64. The gradient of ``exp``
    reads its result, which has 8 bits in bfloat16, and the sum of a row cancels it."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    output, expected = call(*leaves), function(*wide)
    torch.testing.assert_close(output, expected.to(output.dtype))
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    upstream = upstream.to(output.dtype)
    actual = torch.autograd.grad(output, leaves, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    near = {"rtol": 0.02, "atol": 0.05} if output.dtype == torch.bfloat16 else {}
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 10, 15, 16, 17])
def test_rows_shorter_than_a_vector(run, columns, dtype):
    """Rows lie one after the other, or apart; the last vector of rows is not full."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(107, columns, generator=generator).to(dtype)
    gaps = torch.randn(107, columns + 3, generator=generator).to(dtype)[:, :columns]
    for one in (x, gaps):
        compare(run(centred)[0], centred, one)


def test_rows_touch_nothing_behind_them(run):
    """The results of short rows end where their tensor does: the forward writes to memory of its
    own, so that a neighbour's element that is overwritten shows in the next row."""
    x = torch.arange(64 * 3, dtype=torch.float32).view(64, 3) / 100
    for rows in (15, 16, 17, 31, 33, 64):
        torch.testing.assert_close(run(centred)[0](x[:rows]), centred(x[:rows]))


# No empty batch: PyTorch's own shape function of upsample_nearest2d raises a TypeError for one.
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (1, 2, 33, 40), (3, 1, 1, 1)])
@pytest.mark.parametrize("function", [doubled, tripled], ids=lambda one: one.__name__)
def test_repeated_elements(run, function, shape):
    """An element that is repeated a whole number of times is a view, and its gradient a sum."""
    call, launchers = run(function)
    assert "scatter" not in launchers and "?" not in launchers
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    compare(call, function, x)
    compare(call, function, x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("sizes", [((4, 5), (8, 10)), ((3, 5), (7, 9)), ((6, 2), (6, 5))])
def test_elements_repeated_to_any_size(run, sizes):
    """A size that another tensor gives is no whole multiple for all sizes."""
    small, large = (torch.randn(2, 3, *size) for size in sizes)
    compare(run(stretched)[0], stretched, small, large)


@pytest.mark.parametrize("width", [2, 6, 34, 70])
def test_every_second_element(run, width):
    x = torch.randn(2, 3, 8, width, generator=torch.Generator().manual_seed(0))
    compare(run(apart)[0], apart, x)


def rotated(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices * vectors[:, None]).sum(-1)


def test_lanes_are_many_small_matrices(tmp_path: Path) -> None:
    """Neither the rows nor the columns of a matrix of 3 x 3 fill a vector; the matrices do."""
    folder = eject(rotated, torch.ones(4, 3, 3), torch.ones(4, 3), out=tmp_path / "rotated")
    generator = torch.Generator().manual_seed(0)
    for shape in ((1000, 3, 3), (33, 2, 5), (31, 3, 3), (40, 7, 1), (1, 3, 3)):
        matrices = torch.randn(shape, generator=generator)
        vectors = torch.randn(shape[0], shape[2], generator=generator)
        compare_cpp(folder, (matrices, vectors))
        compare_cpp(folder, (matrices.transpose(0, 2).contiguous().transpose(0, 2), vectors))
    output = torch.empty(1000, 3)
    swept = Sweep(
        rows={"length": 1000, "height": 3},
        columns={"width": 3},
        read=[(torch.ones(1000, 3, 3), "length height width"), (output, "length width")],
        written=[(output, "length height")],
    )
    assert _runs_are_short(swept)
    swept.put_longest_rows_innermost()
    assert swept.rows.sizes == (3, 1000) and not _runs_are_short(swept)
    assert swept.rows.strides == ((3, 9), (0, 3), (1, 3))
