"""Habits of other people's code: flattened losses, columns of boxes, arguments by position."""

from __future__ import annotations

import ast
import enum
import importlib
import logging
import operator
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_structure

import fuselab
from fuselab.ejection.calls import call_text
from fuselab.ejection.eject import eject
from fuselab.ejection.fold import formatted
from fuselab.ejection.package import planned_package
from fuselab.ejection.regions import Region, call_name, cut
from fuselab.errors import EjectError
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def shifted_loss(logits, labels):
    before = logits[..., :-1, :].contiguous()
    return F.cross_entropy(before.view(-1, before.size(-1)), labels[..., 1:].reshape(-1))


def test_a_loss_of_flattened_tensors(tmp_path: Path) -> None:
    """PyTorch knows of the products alone that they are equal; kernels need the dimensions."""
    eject(shifted_loss, torch.ones(3, 5, 8), torch.zeros(3, 5).long(), out=tmp_path / "loss")
    loss = load_op(str(tmp_path / "loss")).implementations["cpp"]
    generator = torch.Generator().manual_seed(0)
    for batch, length, classes in ((3, 5, 8), (2, 7, 3), (1, 2, 11)):
        logits = torch.randn(batch, length, classes, generator=generator)
        labels = torch.randint(classes, (batch, length), generator=generator)
        torch.testing.assert_close(loss.forward(logits, labels), shifted_loss(logits, labels))
    other = loss.supports(torch.ones(3, 5, 8), torch.zeros(4, 4).long())
    assert other == "argument 2 has a dimension of size 4 where 3 is needed"


def with_a_margin(scores, label):
    cosine = scores.tanh() * 0.9
    shifted = cosine * 0.8 - (1 - cosine**2).sqrt() * 0.6
    chosen = F.one_hot(label, cosine.shape[1]).to(cosine.dtype)
    return F.cross_entropy(10 * (chosen * shifted + (1 - chosen) * cosine), label)


def test_a_value_that_a_sweep_keeps_is_read_at_a_single_column(tmp_path: Path) -> None:
    args = torch.linspace(-2, 2, 24).reshape(3, 8), torch.tensor([1, 7, 0])
    eject(with_a_margin, *args, out=tmp_path / "margin", inference=True)
    margin = load_op(str(tmp_path / "margin")).implementations["cpp"]
    torch.testing.assert_close(margin.forward(*args), with_a_margin(*args))


def overlap(scores, target):
    probability, wanted = scores.sigmoid().flatten(1), target.flatten(1)
    return (probability * wanted).sum(1) / (probability.sum(1) + wanted.sum(1) + 1)


def different_ways(one, other):
    return (one.flatten() * other.flatten()).sum()


def test_dimensions_of_flattened_tensors_are_paired_by_their_order() -> None:
    package = planned_package(overlap, (torch.ones(2, 6, 6), torch.ones(2, 6, 6)), {}, "overlap")
    first, second = (argument.tensor.shape for argument in package.captured.arguments)
    texts = [[package.sizes.text(size.node.expr) for size in one] for one in (first, second)]
    assert texts[0] == texts[1]
    with pytest.raises(EjectError, match=r"split in different ways \(.*one.flatten"):
        planned_package(different_ways, (torch.ones(2, 6), torch.ones(4, 3)), {}, "different")


def centres(offsets, boxes):
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    x = offsets[:, 0] * width + boxes[:, 0] + 0.5 * width
    return torch.stack((x, offsets[:, 1].exp() * height + boxes[:, 1]), 1)


def test_the_last_columns_of_boxes_that_are_read_one_by_one() -> None:
    package = planned_package(centres, (torch.ones(5, 2), torch.ones(5, 4)), {}, "centres")
    assert package.least == {"width": 2, "boxes_width": 4}


def gated(x: Tensor, weight: Tensor) -> Tensor:
    return x * F.hardsigmoid(F.linear(x, weight), True)


def dropped(x: Tensor, weight: Tensor) -> Tensor:
    hidden = F.linear(x, weight)
    F.dropout(hidden, 0.5, True, True)
    return hidden.relu() * 2 + 1


def test_inplace_given_by_position() -> None:
    args = torch.ones(4, 8), torch.ones(8, 8)
    made = cut(gated, args, {}, "gated")
    (region,) = made.regions
    assert [call_name(node) for node in region.calls] == ["hardsigmoid", "mul"]
    names = [
        [call_name(one) for one in step.calls] if isinstance(step, Region) else call_name(step)
        for step in cut(dropped, args, {}, "dropped").steps
    ]
    assert names == ["linear", ["dropout", "relu", "mul", "add"]]


def off_the_diagonal(x: Tensor, weight: Tensor) -> Tensor:
    products = x @ weight
    on = torch.diagonal(products).add_(-1).pow_(2).sum()
    return on + (products * 0.1).exp().sum()


def test_writing_through_a_view_changes_what_is_viewed() -> None:
    """The view of a diagonal was taken for a new tensor: the products stayed as they were."""
    args = torch.ones(4, 8), torch.ones(8, 4)
    made = cut(off_the_diagonal, args, {}, "off_the_diagonal")
    steps = [step.calls if isinstance(step, Region) else [step] for step in made.steps]
    names = [call_name(node) for calls in steps for node in calls]
    assert names.index("pow_") < names.index("exp")
    assert names.index("pow_") < names.index("mul")


def test_a_product_of_sizes_is_divided_by_as_a_whole() -> None:
    """``a / (b * c)`` was written as ``a / b * c``."""
    graph = fx.Graph()
    x, count = graph.placeholder("x"), graph.placeholder("count")
    divided = graph.call_function(operator.truediv, (x, count))
    text = call_text(divided, {x: "x", count: "z.shape[1] * z.shape[0]"})
    assert text == "x / (z.shape[1] * z.shape[0])"


def crossed(x: Tensor, y: Tensor) -> Tensor:
    return torch.cross(x.tanh(), y, dim=-1) * 2


def wrapped_neighbours(u: Tensor) -> Tensor:
    return u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + torch.roll(u, (1, -1), (0, 2)) - 4 * u


def rolled_windows(x: Tensor) -> Tensor:
    batch, height, width, channels = x.shape
    x = torch.roll(x, shifts=(-2, 1), dims=(1, 2))
    x = x.view(batch, height // 4, 4, width // 4, 4, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels) * 0.5 + 1


def pooled_shares(x: Tensor) -> Tensor:
    return F.max_pool3d(F.max_pool3d(torch.softmax(x, 1), 2), 2)


@pytest.mark.parametrize(
    ("function", "shapes", "kernels"),
    [
        (pooled_shares, [(2, 3, 5, 8, 4)], 3),
        (crossed, [(5, 3), (5, 3)], 1),
        (wrapped_neighbours, [(5, 6, 7)], 1),
        (rolled_windows, [(2, 8, 12, 5)], 1),
    ],
)
def test_few_kernels_compute_it(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], kernels: int, tmp_path: Path
) -> None:
    """Rolling along three dimensions cut a tensor into 27 parts, windows of a rolled image need six
    loops, whose positions no copy takes the place of, and those in three dimensions of what all
    channels share need eight."""
    generator = torch.Generator().manual_seed(5)
    args = [torch.randn(shape, generator=generator) for shape in shapes]
    folder = eject(function, *args, out=tmp_path / "few", inference=True)
    text = (folder / "triton_kernels.py").read_text("utf-8")
    assert text.count("@triton.jit") == kernels
    op = load_op(str(folder))
    found = (
        op.implementations["cpp"].forward(*args),
        op.implementations["cpp"].forward(
            *(one.transpose(0, 1).contiguous().transpose(0, 1) for one in args)
        ),
    )
    interpreted = interpreter.run(f"{folder}/op.py:forward_triton", *args)
    for one in (*found, interpreted):
        torch.testing.assert_close(one, function(*args))


def similarities(z: Tensor) -> Tensor:
    itself = torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    return (z @ z.t() / 0.5).masked_fill(itself, -1e9).softmax(-1)


def similarities_of_pairs(z: Tensor) -> Tensor:
    rows, columns = torch.tril_indices(5, 5, device=z.device)
    return (z @ z.t())[rows, columns].exp() * 2


@pytest.mark.parametrize(
    ("function", "file", "device"),
    (
        (similarities, "similarities_softmax/reference.py", "matmul.device"),
        (similarities_of_pairs, "composed.py", "z.device"),
    ),
)
def test_tensors_are_made_on_the_device_of_the_arguments(
    function: Any, file: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = function.__name__
    folder = fuselab.eject(function, torch.ones(5, 4), out=tmp_path / name)
    assert f"device={device}" in (folder / file).read_text("utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    z = torch.arange(10.0).reshape(5, 2) / 10
    found = getattr(importlib.import_module(name), name)(z)
    torch.testing.assert_close(found, function(z))


def test_statements_that_share_a_line_are_not_folded() -> None:
    one = "    value = torch.max(first_operand, second_operand) - torch.min(first, second)"
    two = f"{one}; total = value.pow(2).sum(1) + 1e-7"
    comment = f"    # {'word ' * 20} (first + second) + third"
    assert formatted(f"{two}\n{comment}") == f"{two}\n{comment}"
    assert formatted(f"{one} + first_operand * second_operand").startswith("    value = (\n")


def weighted_loss(logits, target, weight):
    return F.binary_cross_entropy_with_logits(logits * 2, target, pos_weight=weight.exp())


def margin_of_signs(scores, target):
    return F.soft_margin_loss(scores.tanh(), target)


@pytest.mark.parametrize("function", [weighted_loss, margin_of_signs])
def test_arguments_for_which_pytorch_has_no_gradient(
    function: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch raises a RuntimeError if the weight or the target requires a gradient."""
    generator = torch.Generator().manual_seed(2741)
    weights = [torch.randn(11, generator=generator)] if function is weighted_loss else []
    logits, other = torch.randn(2, 9, 11, generator=generator).unbind()
    args = [logits.requires_grad_(), (other > 0).float(), *weights]
    package = planned_package(function, args, {}, "loss")
    gradients = [gradient is not None for gradient in package.captured.gradients]
    assert gradients == [True, bool(weights), False][: len(args)]
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"constants_{function.__name__}"
    eject(function, *args, out=tmp_path / label, name=label)
    found, expected = getattr(importlib.import_module(label), label)(*args), function(*args)
    torch.testing.assert_close(found, expected)
    (have,), (want,) = (torch.autograd.grad(one, logits) for one in (found, expected))
    torch.testing.assert_close(have, want)


def largest_of_doubled(x):
    return torch.max(x * 2, -1)


def halves_of_sum(x):
    mantissa, exponent = torch.frexp(x * 2 + 1)
    return mantissa.exp() * 3, exponent


def largest_three(x):
    return {"top": torch.topk(x.exp() * 2, 3), "all": x}


@pytest.mark.parametrize("function", [largest_of_doubled, halves_of_sum, largest_three])
def test_results_of_a_call_with_several(
    function: Callable[[Tensor], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own named tuples are returned as such, from one kernel or from a call between."""
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"several_results_{function.__name__}"
    eject(function, torch.ones(4, 6), out=tmp_path / label, name=label)
    made = getattr(importlib.import_module(label), label)
    x = torch.linspace(-3, 4, 35).reshape(5, 7).requires_grad_()
    found, expected = made(x), function(x)
    assert tree_structure(found) == tree_structure(expected)
    for mine, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs)
    floating = [one for one in tree_leaves(expected) if one.is_floating_point()]
    mine = [one for one in tree_leaves(found) if one.is_floating_point()]
    (want,) = torch.autograd.grad([one.square().sum() for one in floating], x)
    (have,) = torch.autograd.grad([one.square().sum() for one in mine], x)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda x: x[x > 0], r"aten\.index\.Tensor gives a tensor whose size depends on values \("),
        (lambda x: x.unique() * 2, "the derivative for '_unique2' is not implemented"),
    ],
)
def test_sizes_that_depend_on_values_are_refused(
    function: Callable[[Tensor], Tensor], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(EjectError, match=sentence):
        eject(function, torch.ones(4, 6), out=tmp_path / "refused", name="refused")
    assert not (tmp_path / "refused").exists()


class Mode(enum.Enum):
    SCALED = "scaled"
    PLAIN = "plain"


class Settings:
    epsilon = 0.5


def of_a_default(x, act=F.relu):
    return act(x * 2) + 1


def of_an_enum(x, mode=Mode.SCALED):
    return (x * 2).tanh() + 1 if mode is Mode.SCALED else x


def of_a_class(x):
    return (x * Settings.epsilon).tanh() + 1


@pytest.mark.parametrize("function", [of_a_default, of_an_enum, of_a_class])
def test_a_package_needs_no_file_of_the_user(
    function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """The reference once imported the user's classes, from modules that others do not find."""
    label = f"alone_{function.__name__}"
    eject(function, torch.ones(4, 6), out=tmp_path / label, name=label)
    x = torch.linspace(-1, 1, 15).reshape(3, 5)
    code = f"from {label} import {label}; import torch; x = torch.linspace(-1, 1, 15).view(3, 5)\n"
    code += (
        "print(["
        + f"{label}(x, implementation=one).sum().item() for one in ('auto', 'reference')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(fuselab.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    for one in ast.literal_eval(done.stdout):
        assert one == pytest.approx(function(x).sum().item(), rel=1e-5)


def of_the_chosen(logits):
    _, index = torch.topk(logits.softmax(-1) * 2, 2, dim=-1)
    mask = F.one_hot(index, num_classes=logits.shape[-1]).to(logits.dtype).sum(1)
    return (mask * logits.exp()).sum(-1) + 1


def test_a_number_of_classes_that_the_tracer_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other numbers of classes are left to the reference."""
    monkeypatch.syspath_prepend(str(tmp_path))
    eject(of_the_chosen, torch.ones(6, 8), out=tmp_path / "of_the_chosen")
    made = importlib.import_module("of_the_chosen").of_the_chosen
    for shape in ((6, 8), (2, 8), (3, 5)):
        logits = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape).cos()
        torch.testing.assert_close(made(logits), of_the_chosen(logits))


def repeated(x, weight):
    for _ in range(24):
        x = (x * weight + 0.1).tanh()
    return x


def stacked(x, weight):
    for _ in range(12):
        x = x + 0.1 * F.layer_norm(x, (8,), weight)
    return x


@pytest.mark.parametrize("function", [repeated, stacked])
def test_long_functions_take_no_longer_for_each_operation(
    function: Callable[[Tensor, Tensor], Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step once doubled the time. These take 3 s, and took more than 10 minutes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"long_{function.__name__}"
    before = time.process_time()
    eject(function, torch.ones(4, 8), torch.ones(8), out=tmp_path / label, name=label)
    assert time.process_time() - before < 60
    x = torch.linspace(-2, 2, 24).reshape(3, 8).requires_grad_()
    weight = torch.linspace(0.5, 1, 8)
    found, expected = getattr(importlib.import_module(label), label)(x, weight), function(x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (mine,) = torch.autograd.grad(found.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def weighted_by_a_joined_tensor(logits, labels):
    weight = torch.ones(4, dtype=logits.dtype)
    weight = torch.cat((weight[:-1], weight.new_full((1,), 0.1)))
    return F.cross_entropy(logits.transpose(1, 2), labels, weight)


def test_what_is_joined_from_numbers_alone_is_made_for_the_kernel_that_reads_it(
    tmp_path: Path,
) -> None:
    """No kernel stores a part of it, so that it was never allocated."""
    args = (
        torch.linspace(-2, 2, 40).reshape(2, 5, 4).contiguous(),
        torch.arange(10).reshape(2, 5) % 4,
    )
    op = load_op(str(eject(weighted_by_a_joined_tensor, *args, out=tmp_path / "weighted")))
    found = interpreter.run(f"{tmp_path / 'weighted'}/op.py:forward_triton", *args)
    torch.testing.assert_close(op.without_residuals(found), weighted_by_a_joined_tensor(*args))


def _half_rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotated_keys(key, cosine, sine):
    rotated = key * cosine.unsqueeze(1) + _half_rotated(key) * sine.unsqueeze(1)
    batch, heads, length, width = rotated.shape
    repeated = rotated[:, :, None].expand(batch, heads, 2, length, width)
    return repeated.reshape(batch, heads * 2, length, width)


def test_slices_that_hold_together_where_sizes_of_two_arguments_agree(tmp_path: Path) -> None:
    """Keys and angles have sizes of their own in the graph, as in grouped-query attention."""
    args = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    op = load_op(str(eject(rotated_keys, *args, out=tmp_path / "rotated")))
    supports = op.implementations["triton"].supports
    assert supports(*args) is None
    found = interpreter.run(f"{tmp_path / 'rotated'}/op.py:forward_triton", *args)
    torch.testing.assert_close(found, rotated_keys(*args))


def attention_of_a_graph(source, target, edges, values):
    scores = F.leaky_relu(source[:, None] + target[None, :], 0.2)
    scores = scores.masked_fill(~edges[..., None], float("-inf"))
    return torch.einsum("ijh,jhd->ihd", scores.softmax(1), values)


def test_a_call_of_booleans_alone_is_tried_without_an_error(tmp_path: Path) -> None:
    """Where a call only arranges a tensor, eject tries to negate it; booleans cannot be negated."""
    args = torch.ones(5, 2), torch.ones(5, 2), torch.eye(5) > 0, torch.ones(5, 2, 3)
    parts = cut(attention_of_a_graph, args, {}, "graph")
    assert [call_name(one) for one in parts.calls if call_name(one) == "einsum"] == ["einsum"]
    assert "masked_fill" in {call_name(one) for region in parts.regions for one in region.calls}


LOGGER = logging.getLogger("model")


@pytest.mark.filterwarnings("ignore:many rows")
def test_what_only_tells_something_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """Layers of PyTorch warn of their arguments, and much code prints shapes."""

    def talkative(x: Tensor) -> Tensor:
        print("rows", x.shape[0])
        warnings.warn("many rows", UserWarning, stacklevel=2)
        LOGGER.warning("%s rows", x.shape[0])
        return torch.tanh(x + 1) * 2

    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    op = load_op(str(eject(talkative, x, out=tmp_path / "talkative")))
    capsys.readouterr()
    found = op.implementations["cpp"].forward(x)
    assert capsys.readouterr().out == ""
    torch.testing.assert_close(found, torch.tanh(x + 1) * 2)


def test_a_sum_over_places_in_three_dimensions_needs_no_more_loops_than_there_are(
    tmp_path: Path,
) -> None:
    """The gradient of the factor in front of a pooling in three dimensions computes three places,
    each in a loop of its own, beside those of the batch and the channels."""

    def pooled_scale(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (F.avg_pool3d(x * scale, 2) + bias) * 0.5

    generator = torch.Generator().manual_seed(9)
    shapes = (2, 3, 4, 6, 5), (), (3, 1, 1, 1)
    args = [torch.randn(shape, generator=generator) for shape in shapes]
    op = load_op(str(eject(pooled_scale, *args, out=tmp_path / "pooled_scale")))
    cpp = op.implementations["cpp"]
    compare(op, cpp.forward, cpp.backward, args)
