"""The cases and draws of ``generalized_box_iou_loss``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.cases import BOUNDARY, Random, made, sweep_tags, unchanged
from fuselab.ops.generalized_box_iou_loss import reference


def random_boxes(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw float32 boxes with corners in [0, 2), many of which overlap."""
    low, size = (torch.rand((*shape, 2), generator=generator) for _ in range(2))
    return torch.cat((low, low + size), -1)


def grid_boxes(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw boxes with corners in {0, 1, 2, 3, 4}: edges tie, areas are 0, boxes are equal."""
    low, size = (torch.randint(0, 3, (*shape, 2), generator=generator) for _ in range(2))
    return torch.cat((low, low + size), -1).float()


Boxes = Callable[[Sequence[int], torch.Generator], Tensor]


LAYOUTS: dict[str, tuple[Sequence[int], Callable[[Tensor], Tensor]]] = {
    "one_box": ((), lambda boxes: boxes),
    "coordinates_first": ((65,), lambda boxes: boxes.t().contiguous().t()),
    "transposed": ((9, 7), lambda boxes: boxes.transpose(0, 1)),
    "sliced": ((9, 7), lambda boxes: boxes[1:, 2:]),
    "every_other": ((9, 14), lambda boxes: boxes[:, ::2]),
    "expanded": ((9, 1), lambda boxes: boxes.expand(9, 7, 4)),
    "odd_offset": ((66,), lambda boxes: boxes.flatten()[1:-3].view(-1, 4)),
    "four_loops": ((3, 4, 5, 6), lambda boxes: boxes.permute(3, 1, 0, 2, 4)),
    "one_number": ((), lambda boxes: boxes[:1].expand(5, 4)),
}


@made
def _case(
    random: Random,
    shape: Sequence[int],
    reduction: str,
    boxes: Boxes = random_boxes,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
) -> Inputs:
    first, second = (random.moved(boxes(shape, random.generator)) for _ in range(2))
    return Inputs((lay_out(first), lay_out(second)), {"reduction": reduction})


def _cases() -> Iterator[Case]:
    for batch in (32, 1024, 16384, 65536):
        for reduction in ("none", "mean"):
            tags = sweep_tags(tiny=batch == 32, huge=batch == 65536)
            name = f"{batch}x256" + ("" if reduction == "none" else f" {reduction}")
            yield Case(name, _case((batch, 256), reduction), tags)
    for count in (0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 1025):
        for reduction in reference.REDUCTIONS:
            yield Case(f"{count} {reduction}", _case((count,), reduction), BOUNDARY)
    # Both sides of the largest count that one block of cuda_kernels.cu reduces.
    for count in (8192, 8193):
        yield Case(f"{count} sum", _case((count,), "sum"), BOUNDARY)
    for reduction in reference.REDUCTIONS:
        yield Case(f"ties {reduction}", _case((300,), reduction, grid_boxes), BOUNDARY)
    for name, (shape, lay_out) in LAYOUTS.items():
        yield Case(f"layout {name}", _case(shape, "none", random_boxes, lay_out), BOUNDARY)


# Numbers of pairs of boxes: 36 bytes per pair in float32.
CPU_PAIRS = (
    *(1820, 3001, 10000, 30001, 65536, 100_003),
    *(262_144, 500_001, 1_000_000, 1_500_001, 3_000_000, 5_600_000),
)


def _cpu_cases() -> Iterator[Case]:
    for place, count in enumerate(CPU_PAIRS):
        reduction = ("none", "mean")[place % 2]
        yield Case(f"{count} {reduction}", _case((count,), reduction), cpu_sizes.ROW)
    for count in (5, 500, 20000):
        for reduction in reference.REDUCTIONS:
            yield Case(f"{count} {reduction}", _case((count,), reduction), cpu_sizes.DTYPES)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout; coordinates are in any order, so sides may be negative."""
    leading = [source.size(256, 512) for _ in range(source.choice((1, 2, 0, 3)))]
    first, second = source.tensor(*leading, 4), source.tensor(*leading, 4)
    return Inputs((first, second, source.choice(reference.REDUCTIONS)))


CASES = tuple(_cases())
CPU_CASES = tuple(_cpu_cases())
