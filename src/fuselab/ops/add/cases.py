"""The cases and draws of ``add``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.cases import BOUNDARY, Random, made, sized, sweep_tags

_SWEEP = ((4, 4), (256, 256), (4096, 128), (16384, 256), (65536, 512), (262144, 1024))


# Sizes around a block's edge: 1024 elements, in Triton and in CUDA C++, in float32.
_BOUNDARY = (
    ((), ()),
    ((1,), ()),
    ((0, 8), (8,)),
    ((1023,), (1023,)),
    ((1024,), (1024,)),
    ((1025,), (1025,)),
    ((7, 1), (1, 9)),
    ((33, 31), (31,)),
    ((33, 32), (32,)),
    ((33, 32), (33, 1)),
    ((32,), (41, 32)),
    ((2, 1, 5), (3, 1)),
    ((129, 257), ()),
)


_LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "transposed": lambda input, other: (input.t(), other.t()),
    "transposed_other": lambda input, other: (input, other.t().contiguous().t()),
    "expanded": lambda input, other: (input[:1].expand_as(input), other[:, :1].expand_as(other)),
    "offset_rows": lambda input, other: (input[1:, 3:], other[1:, 3:]),
    "every_other_column": lambda input, other: (input[:, ::2], other[:, ::2]),
    "rank_6": lambda input, other: (
        input.view(2, 3, 2, 3, 2, 34)[..., :17].transpose(0, 4),
        other.view(2, 3, 2, 3, 2, 34)[..., 1::2].transpose(0, 4).contiguous(),
    ),
}


@made
def _case(
    random: Random,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    lay_out: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda *pair: pair,
) -> Inputs:
    pair = (random.normal(*shape) for shape in (input_shape, other_shape))
    return Inputs(lay_out(*pair))


def _cases() -> Iterator[Case]:
    for shape in _SWEEP:
        tags = sweep_tags(tiny=shape == (4, 4), huge=shape[0] == 262144)
        yield Case(sized(shape), _case(shape, shape), tags)
    rows = _case((65536, 512), (512,))
    yield Case("65536x512_one_row", rows, frozenset({"bench"}))
    for input_shape, other_shape in _BOUNDARY:
        name = f"boundary_{sized(input_shape, other_shape)}"
        yield Case(name, _case(input_shape, other_shape), BOUNDARY)
    for name, lay_out in _LAYOUTS.items():
        yield Case(f"layout_{name}", _case((72, 34), (72, 34), lay_out), BOUNDARY)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout; dimensions of either may be broadcast or missing in front."""
    shape = [source.size(1, 3, 4, 33, 256, 257) for _ in range(source.choice((2, 1, 0, 3)))]

    def broadcast() -> list[int]:
        kept = [1 if source.choice((False, False, True)) else size for size in shape]
        return kept[source.choice(range(len(shape) + 1)) if source.choice((False, True)) else 0 :]

    one, other = broadcast(), broadcast()
    return Inputs((source.tensor(*one), source.tensor(*other)))


CASES = tuple(_cases())
