"""Reductions of what is put together along the dimension that they go over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, compare_interpreted
from torch import Tensor

import fuselab
from fuselab.prove.load import load_op


def merged_patches(x: Tensor, weight: Tensor) -> Tensor:
    corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
    joined = torch.cat(corners, -1)
    return F.layer_norm(joined, joined.shape[-1:], weight)


def mean_of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.stack((a, b * 2, c)).mean(0).tanh()


def largest_of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.stack((a, b * 2, c), -1).amax(-1) * a


def shares_of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.stack((a, b, c), 1).softmax(1) * 2


def deviation_of_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.stack((a, b, c), 1).std(1, keepdim=True) + 1


def product_of_rows(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((a, b), 0).prod(0) * 2


def norm_of_features(a: Tensor, b: Tensor) -> Tensor:
    joined = torch.cat((a, b), -1)
    return F.layer_norm(joined, joined.shape[-1:]) + joined


def shares_of_features(a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(torch.cat((a.relu(), -b), -1), -1)


def box_overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    size = (torch.minimum(boxes[:, None, 2:], others[:, 2:]) - low).clamp(min=0)
    both = size[..., 0] * size[..., 1]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    other_area = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    return both / (area[:, None] + other_area - both)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def boxes(count: int) -> Tensor:
    corners = torch.rand(count, 2, generator=torch.Generator().manual_seed(count))
    return torch.cat((corners, corners + 0.6), 1)


EXAMPLES: dict[Callable[..., Tensor], list[list[Tensor]]] = {
    merged_patches: [[normal(2, 4, 6, 8), normal(32)], [normal(3, 8, 2, 8), normal(32)]],
    mean_of_three: [[normal(5, 7)] * 3, [normal(40, 33), normal(40, 33) * 2, normal(40, 33) - 1]],
    largest_of_three: [[normal(5, 7), normal(5, 7) * 2, normal(5, 7) - 1]],
    shares_of_three: [[normal(5, 7), normal(5, 7) * 2, normal(5, 7) - 1]],
    deviation_of_three: [[normal(5, 7), normal(5, 7) * 2, normal(5, 7) - 1]],
    product_of_rows: [[normal(3, 17), normal(3, 17) + 1]],
    norm_of_features: [[normal(6, 20), normal(6, 12)], [normal(9, 5), normal(9, 70)]],
    shares_of_features: [[normal(6, 20), normal(6, 12)], [normal(9, 5), normal(9, 70)]],
    box_overlaps: [[boxes(9), boxes(12)], [boxes(33), boxes(40)]],
}


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Callable[..., Tensor], tmp_path: Path) -> None:
    calls = EXAMPLES[function]
    folder = tmp_path / function.__name__
    fuselab.eject(function, *[one.clone().requires_grad_() for one in calls[0]], out=folder)
    for args in calls:
        compare_cpp(folder, args)
    compare_interpreted(folder, calls[-1])


def forward_of(function: Callable[..., Tensor], folder: Path) -> str:
    """Return the launcher of the forward."""
    example = [one.clone().requires_grad_() for one in EXAMPLES[function][0]]
    fuselab.eject(function, *example, out=folder)
    text = (folder / "op.py").read_text(encoding="utf-8")
    return text[text.index("def _forward") : text.index("def _backward")]


@pytest.mark.parametrize(
    "function",
    [merged_patches, mean_of_three, largest_of_three, shares_of_three, deviation_of_three],
    ids=lambda function: function.__name__,
)
def test_parts_of_one_size_are_reduced_in_one_kernel(
    function: Callable[..., Tensor], tmp_path: Path
) -> None:
    launcher = forward_of(function, tmp_path / "package")
    assert launcher.count("sweeps.run(") == 1


def test_parts_of_several_sizes_are_stored_as_they_are_and_read_by_one_kernel(
    tmp_path: Path,
) -> None:
    launcher = forward_of(shares_of_features, tmp_path / "package")
    assert launcher.count("sweeps.run(") == 3  # one for each part, and the softmax
    assert launcher.count("torch.empty(") + launcher.count("empty_in_order(") == 1
    assert "torch.promote_types(a.dtype, b.dtype)" in launcher
    op = load_op(str(tmp_path / "package"))
    half = [one.half() for one in EXAMPLES[shares_of_features][1]]
    found = op.implementations["cpp"].forward(*half)
    expected = shares_of_features(*[one.double() for one in half])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


def test_many_stacked_tensors_are_stored_and_read_by_one_kernel(tmp_path: Path) -> None:
    def deviation_of_nine(x: Tensor) -> Tensor:
        return torch.stack([x * number for number in range(9)]).std(0) + 1

    folder = tmp_path / "deviation_of_nine"
    fuselab.eject(deviation_of_nine, normal(5, 7), out=folder, inference=True)
    launcher = (folder / "op.py").read_text(encoding="utf-8")
    assert launcher.count("torch.empty(") == 1  # the stacked tensor alone
    compare_cpp(folder, [normal(5, 7)])


def test_a_slice_of_a_slice_is_read_as_one(tmp_path: Path) -> None:
    launcher = forward_of(box_overlaps, tmp_path / "package")
    assert launcher.count("boxes.narrow(") == launcher.count("others.narrow(") == 4
    assert ").narrow(" not in launcher
