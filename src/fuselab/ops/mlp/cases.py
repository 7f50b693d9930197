"""The cases and draws of ``mlp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.cases import BOUNDARY, Random, made, sweep_tags, tame, unchanged


@made
def _case(
    random: Random,
    leading: Sequence[int],
    widths: Sequence[int],
    activation: str = "relu",
    output_activation: str = "identity",
    bias: bool = True,
    from_float32: bool = False,
    to_float32: bool = False,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
) -> Inputs:
    """Build standard normal inputs, and weights that keep their size through a relu. ``lay_out`` is
    applied to the input and the weights. ``from_float32``, ``to_float32``: input and output are
    float32 if the weights have 16 bits."""

    def mixed(asked: bool) -> torch.dtype:
        return torch.float32 if asked and random.dtype.itemsize == 2 else random.dtype

    input = lay_out(random.normal(*leading, widths[0], dtype=mixed(from_float32)))
    weights = [
        lay_out(random.normal(columns, depth, deviation=(2 / max(depth, 1)) ** 0.5))
        for depth, columns in pairwise(widths)
    ]
    biases = [random.normal(columns) for columns in widths[1:]] if bias else []
    output = mixed(to_float32) if to_float32 else None
    return Inputs((input, weights, biases, activation, output_activation, output))


BOTTOM, TOP = (13, 512, 256, 64, 16), (368, 512, 256, 1)  # DLRM's layers in its main size


def _cases() -> Iterator[Case]:
    for rows in (128, 2048, 65536):
        tags = sweep_tags(tiny=rows == 128)
        bottom = _case((rows,), BOTTOM, output_activation="relu", from_float32=True)
        yield Case(f"bottom {rows}", bottom, tags)
        top = _case((rows,), TOP, output_activation="sigmoid", to_float32=True)
        yield Case(f"top {rows}", top, tags)
    shapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((1,), (1, 1)),
        ((15,), (7, 1)),
        ((16,), (8, 16)),
        ((17,), (13, 33)),
        ((33,), (32, 32, 32)),
        ((64,), (31, 17, 8)),
        ((65,), (33, 65, 1)),
        ((5,), (13, 17, 33, 511, 3)),
        ((40,), (24, 512, 40, 1, 24)),
        ((3,), (256, 264, 128)),
        ((2,), (9,) * 18),
        ((0,), (8, 8, 8)),
        ((4,), (0, 8, 8)),
        ((4,), (8, 0, 8)),
        ((4,), (8, 8, 0)),
        ((40,), (24, 16, 8)),
        ((2, 3, 5), (24, 16, 8)),
        ((), (24, 16, 8)),
    )
    for leading, sizes in shapes:
        shape = "x".join(map(str, leading)) or "vector"
        yield Case(f"{shape} {'-'.join(map(str, sizes))}", _case(leading, sizes), BOUNDARY)
    for name in ACTIVATIONS:
        yield Case(name, _case((37,), (24, 40, 16), name, name), BOUNDARY)
    yield Case("no biases", _case((37,), (24, 40, 16), bias=False), BOUNDARY)
    yield Case("from float32", _case((37,), (13, 40, 16), from_float32=True), BOUNDARY)
    to_float32 = _case((37,), (24, 40, 1), output_activation="sigmoid", to_float32=True)
    yield Case("to float32", to_float32, BOUNDARY)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda tensor: tensor.t().contiguous().t(),
        "padded rows": lambda tensor: torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2],
        "every other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
        "one row": lambda tensor: tensor[:1].expand_as(tensor),
    }
    for name, lay_out in layouts.items():
        yield Case(name, _case((24,), (24, 40, 16), lay_out=lay_out), BOUNDARY)


def draw(source: Draw) -> Inputs:
    """Draw any shapes and layouts, any activations, biases or none."""
    leading = [source.size(1, 16, 33) for _ in range(source.choice((1, 0, 2)))]
    count = source.choice((1, 2, 3))
    widths = [source.size(1, 13, 16, 17, 32, 33, 64) for _ in range(count + 1)]
    input = tame(source.tensor(*leading, widths[0]), 8)
    weights = [tame(source.tensor(columns, depth), 8) for depth, columns in pairwise(widths)]
    biases: list[Tensor] = []
    if source.choice((True, False)):
        biases = [tame(source.tensor(columns), 8) for columns in widths[1:]]
    names = source.choice(tuple(ACTIVATIONS)), source.choice(tuple(ACTIVATIONS))
    to = source.choice((None, torch.float32 if source.dtype.itemsize == 2 else source.dtype))
    return Inputs((input, weights, biases, *names, to))


CASES = tuple(_cases())
