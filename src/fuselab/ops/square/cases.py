"""The cases and draws of ``square``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.cases import BOUNDARY, Random, made, sized, sweep_tags, unchanged

_SWEEP = ((4, 4), (256, 256), (4096, 128), (16384, 256), (65536, 512), (262144, 1024))


# Sizes around a block's edge: 1024 elements, in Triton and in CUDA C++, in float32.
_BOUNDARY = ((), (0, 8), (1,), (2,), (3,), (1023,), (1024,), (1025,), (33, 31), (129, 257))


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda input: input.t(),
    "expanded": lambda input: input[:1].expand_as(input),
    "offset_rows": lambda input: input[1:, 3:],
    "every_other_column": lambda input: input[:, ::2],
    "rank_6": lambda input: input.view(2, 3, 2, 3, 2, 34)[..., :17].transpose(0, 4),
}


@made
def _case(
    random: Random, shape: Sequence[int], lay_out: Callable[[Tensor], Tensor] = unchanged
) -> Inputs:
    return Inputs((lay_out(random.normal(*shape)),))


def _cases() -> Iterator[Case]:
    for shape in _SWEEP:
        tags = sweep_tags(tiny=shape == (4, 4), huge=shape[0] == 262144)
        yield Case(sized(shape), _case(shape), tags)
    for edge in _BOUNDARY:
        yield Case(f"boundary_{sized(edge)}", _case(edge), BOUNDARY)
    for name, lay_out in _LAYOUTS.items():
        yield Case(f"layout_{name}", _case((72, 34), lay_out), BOUNDARY)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout."""
    sizes = [source.size(1, 3, 4, 33, 256, 257) for _ in range(source.choice((2, 1, 0, 3)))]
    return Inputs((source.tensor(*sizes),))


CASES = tuple(_cases())
