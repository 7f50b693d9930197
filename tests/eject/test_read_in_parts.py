"""Which kernel computes what: rows that are summed and then read in halves, functions of sums that
another kernel reads, values that are needed at several places, and values of whole columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, compare_interpreted
from torch import Tensor

import fuselab
from fuselab.prove.load import load_op


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def normed_and_turned(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turned(F.rms_norm(q, q.shape[-1:], weight).transpose(1, 2), cos, sin)


def normed_by_hand(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    centred = q - q.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return turned(normed.permute(0, 2, 1, 3), cos, sin)


def layer_norm_in_chunks(q: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = F.layer_norm(q, q.shape[-1:], weight).transpose(1, 2).chunk(2, -1)
    cos, sin = cos[:, : first.shape[-1]], sin[:, : first.shape[-1]]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def gated_thirds(x: Tensor, bias: Tensor) -> Tensor:
    a, b, c = (F.layer_norm(x, x.shape[-1:]) + bias).chunk(3, -1)
    return a * torch.sigmoid(b) + c


def of_unequal_parts(x: Tensor, bias: Tensor) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:]) + bias
    return torch.cat((normed[:, :2].exp(), normed[:, 2:]), -1)


def read_whole_too(x: Tensor, bias: Tensor) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:]) + bias
    a, b = normed.chunk(2, -1)
    return normed.tanh().cumsum(-1) * torch.cat((a * b, a + b), -1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


HEADS = [normal(2, 3, 4, 16), normal(16), normal(3, 16), normal(3, 16)]
OTHER_HEADS = [normal(1, 5, 2, 34), normal(34), normal(5, 34), normal(5, 34)]
EXAMPLES: dict[Callable[..., Tensor], list[list[Tensor]]] = {
    normed_and_turned: [HEADS, OTHER_HEADS],
    normed_by_hand: [HEADS, OTHER_HEADS],
    layer_norm_in_chunks: [HEADS, OTHER_HEADS],
    gated_thirds: [[normal(5, 12), normal(12)], [normal(40, 51), normal(51)]],
    of_unequal_parts: [[normal(5, 12), normal(12)], [normal(4, 37), normal(37)]],
    read_whole_too: [[normal(5, 12), normal(12)], [normal(40, 36), normal(36)]],
}
IN_ONE_KERNEL = (normed_and_turned, normed_by_hand, layer_norm_in_chunks, gated_thirds)


def forward_kernels(folder: Path) -> list[str]:
    """Return the text of each C++ kernel of a package's forward."""
    kernels = (folder / "cpu_kernels.cpp").read_text().split("\n// Computes ")[1:]
    return [one for one in kernels if "backward" not in one]


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_sums_of_rows_that_are_read_in_parts(function, tmp_path):
    """A row is summed in the parts in which it is read, so that one kernel reads it once."""
    folder = fuselab.eject(function, *EXAMPLES[function][0], out=tmp_path / function.__name__)
    assert (len(forward_kernels(folder)) == 1) is (function in IN_ONE_KERNEL)
    for args in EXAMPLES[function]:
        compare_cpp(folder, args)
    compare_interpreted(folder, EXAMPLES[function][0])


def gated_by_both_means(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean(-1, keepdim=True)) * torch.sigmoid(x.mean(-2, keepdim=True))


def test_a_function_of_a_sum_is_stored_in_its_place(tmp_path):
    x = normal(3, 4, 8, 9)
    folder = fuselab.eject(gated_by_both_means, x, out=tmp_path / "gated_by_both_means")
    first, second = forward_kernels(folder)
    assert first.count("math::sigmoid") == second.count("math::sigmoid") == 1
    compare_cpp(folder, [x])
    compare_cpp(folder, [normal(2, 5, 17, 3)])
    compare_interpreted(folder, [x])


def weighted_by_softmax(x: Tensor, scores: Tensor) -> Tensor:
    return (x * torch.softmax(scores, -1).unsqueeze(-1)).sum(1)


def test_shares_that_another_kernel_reads_often_are_stored(tmp_path):
    """The kernel that sums over the scores stores the softmax, from which the other one computes
    no exponential for each of its elements."""
    args = [normal(3, 8, 40), normal(3, 8)]
    folder = fuselab.eject(weighted_by_softmax, *args, out=tmp_path / "weighted_by_softmax")
    first, second = forward_kernels(folder)
    assert "math::exp" in first and "math::exp" not in second
    compare_cpp(folder, args)
    compare_cpp(folder, [normal(2, 1, 3), normal(2, 1)])
    compare_interpreted(folder, args)


def edge_strength(x: Tensor) -> Tensor:
    p = F.pad(x, (1, 1, 1, 1), mode="replicate")
    across = p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
    across = across - (p[..., :-2, :-2] + 2 * p[..., 1:-1, :-2] + p[..., 2:, :-2])
    along = p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
    along = along - (p[..., :-2, :-2] + 2 * p[..., :-2, 1:-1] + p[..., :-2, 2:])
    return torch.sqrt(across * across + along * along + 1e-6)


def test_a_gpu_does_not_compute_the_same_at_all_neighbours(tmp_path):
    """Each element of the gradient needs those of eight places, which need nine elements each: the
    two gradients of a place are stored. Not compiled as C++, which takes minutes."""
    folder = fuselab.eject(edge_strength, normal(1, 2, 40, 48), out=tmp_path / "edge_strength")
    text = (folder / "triton_kernels.py").read_text()
    assert len(re.findall(r"\ndef \w+\(", text)) == 3
    assert len(re.findall(r"\bload\(", text)) < 150
    compare_interpreted(folder, [normal(1, 1, 3, 4)])


def difference_of_edges(x: Tensor, y: Tensor) -> Tensor:
    def edges(z: Tensor) -> Tensor:
        across = z[:, 1:-1, 2:] - z[:, 1:-1, :-2]
        along = z[:, 2:, 1:-1] - z[:, :-2, 1:-1]
        return torch.sqrt(across * across + along * along + 1e-2)

    return (edges(x) - edges(y)).square().mean()


def test_gradients_that_are_read_at_several_places_are_stored(tmp_path):
    """In C++ one kernel computes the gradients of the edges, another one adds up four of them."""
    args = [normal(2, 20, 24), normal(2, 24, 20).transpose(1, 2)]
    folder = fuselab.eject(difference_of_edges, *args, out=tmp_path / "difference_of_edges")
    backward = (folder / "cpu_kernels.cpp").read_text().split("\n// Computes ")[2:]
    assert len(backward) == 2 and "math::sqrt" in backward[0] and "math::sqrt" not in backward[1]
    for given in (args, [normal(1, 4, 50), normal(1, 4, 50) * 2]):
        compare_cpp(folder, given)
    compare_interpreted(folder, [normal(1, 4, 5), normal(1, 4, 5) * 2])


def scores_with_slopes(scores: Tensor, position: Tensor) -> Tensor:
    slopes = torch.exp2(-torch.arange(1, scores.shape[-1] + 1) / 8)
    return torch.softmax(scores - slopes * position[:, None], -1)


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_a_kernel_with_sums_computes_values_of_columns_once(tmp_path, rows):
    position = torch.arange(700.0)
    scores = normal(700, 40)
    folder = fuselab.eject(scores_with_slopes, scores, position, out=tmp_path / "slopes")
    (kernel,) = forward_kernels(folder)
    assert "const auto slopes = column_value(" in kernel
    op = load_op(str(folder))
    for given in (scores[:rows], scores.t().contiguous().t()[:rows]):
        found = op.implementations["cpp"].forward(given, position[:rows])
        torch.testing.assert_close(found, scores_with_slopes(given, position[:rows]))
