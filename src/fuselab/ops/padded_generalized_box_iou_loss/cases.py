"""The cases and draws of ``padded_generalized_box_iou_loss``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.cases import BOUNDARY, Random, made, sweep_tags, unchanged
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.generalized_box_iou_loss.cases import CPU_PAIRS, LAYOUTS, random_boxes


def pad(target: Tensor, generator: torch.Generator, share: float = 0.4) -> Tensor:
    """Return ``target`` with zeros in that share of its rows, as a padded batch has them."""
    keep = torch.rand(target.shape[:-1], generator=generator) >= share
    return target * keep.unsqueeze(-1)


@made
def _case(
    random: Random,
    shape: Sequence[int],
    share: float = 0.4,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
    pred_dtype: torch.dtype | None = None,
) -> Inputs:
    pred = random_boxes(shape, random.generator).to(random.device, pred_dtype or random.dtype)
    target = pad(random_boxes(shape, random.generator), random.generator, share)
    return Inputs((lay_out(pred), lay_out(random.moved(target))))


def _cases() -> Iterator[Case]:
    for batch in (32, 1024, 16384, 65536):
        tags = sweep_tags(tiny=batch == 32, huge=batch == 65536)
        yield Case(f"{batch}x256", _case((batch, 256)), tags)
    for batch, count in ((0, 5), (1, 1), (1, 2), (1, 255), (1, 256), (1, 257), (3, 171), (32, 256)):
        yield Case(f"{batch}x{count}", _case((batch, count)), BOUNDARY)
    # One pair more than a block of cuda_kernels.cu counts by itself.
    yield Case("8193", _case((8193,)), BOUNDARY)
    yield Case("all padding", _case((4, 9), share=1.0), BOUNDARY)
    yield Case("no padding", _case((4, 9), share=0.0), BOUNDARY)
    for dtype in FLOATING:
        name = f"pred {str(dtype).removeprefix('torch.')}"
        yield Case(name, _case((5, 60), pred_dtype=dtype), BOUNDARY)
    for name, (shape, lay_out) in LAYOUTS.items():
        yield Case(f"layout {name}", _case(shape, 0.4, lay_out), BOUNDARY)


def _cpu_cases() -> Iterator[Case]:
    for count in CPU_PAIRS:
        yield Case(f"{count}", _case((count,)), cpu_sizes.ROW)
    for count in (5, 500, 20000):
        yield Case(f"{count}", _case((count,)), cpu_sizes.DTYPES)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout; about half of the bottoms are below 0 and so padding."""
    leading = [source.size(256, 512) for _ in range(source.choice((2, 1, 0, 3)))]
    return Inputs((source.tensor(*leading, 4), source.tensor(*leading, 4)))


CASES = tuple(_cases())
CPU_CASES = tuple(_cpu_cases())
