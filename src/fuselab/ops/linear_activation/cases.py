"""What ``linear_activation`` is tried and timed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS

Make = Callable[[torch.device, torch.dtype, torch.Generator], Inputs]


def _case(
    shape: Sequence[int],
    columns: int,
    activation: str = "relu",
    bias: bool = True,
    lay_out: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Make:
    """Standard normal input; weights scaled as nn.Linear starts them. ``lay_out`` is given the
    input and the weight."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        input = lay_out(random(*shape))
        depth = shape[-1]
        weight = lay_out(random(columns, depth, scale=max(depth, 1) ** -0.5))
        return Inputs((input, weight, random(weight.shape[0]) if bias else None, activation))

    return make


_BENCH = (
    (16, 16, 16),
    (65536, 13, 512),
    (65536, 512, 256),
    (65536, 256, 64),
    (16384, 1024, 1024),
    (4096, 4096, 4096),
)


# Around the edges of the tiles (16 to 128 rows, 32 to 256 columns, 16 to 64 deep), of a store (8
# columns) and of the shallow kernels (16 and 32 deep).
_BOUNDARY = (
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (2, 3, 1),
    (3, 2, 9),
    (15, 13, 33),
    (17, 16, 8),
    (129, 17, 40),
    (64, 32, 127),
    (65, 33, 129),
    (5, 64, 16),
    (16, 65, 257),
    (130, 129, 64),
)


def _cases() -> Iterator[Case]:
    for rows, depth, columns in _BENCH:
        tags = {"bench", "sweep"} | ({"tiny"} if rows == 16 else set())
        name = f"{rows}x{depth}->{columns}"
        yield Case(name, _case((rows, depth), columns), frozenset(tags))
    boundary = frozenset({"boundary"})
    for rows, depth, columns in _BOUNDARY:
        name = f"boundary_{rows}x{depth}->{columns}"
        yield Case(name, _case((rows, depth), columns), boundary)
    for name in ACTIVATIONS:
        yield Case(f"{name}_37x13->65", _case((37, 13), 65, name), boundary)
        yield Case(f"{name}_37x40->65", _case((37, 40), 65, name), boundary)
    yield Case("no_bias", _case((33, 40), 24, bias=False), boundary)
    yield Case("1d", _case((40,), 24), boundary)
    yield Case("4d", _case((2, 3, 5, 40), 24), boundary)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda tensor: tensor.t(),
        "every_other": lambda tensor: tensor[:, ::2],
        "offset": lambda tensor: tensor[1:, 3:],
        "one_row": lambda tensor: tensor[:1].expand_as(tensor),
        "one_column": lambda tensor: tensor[:, :1].expand_as(tensor),
    }
    for name, lay_out in layouts.items():
        yield Case(f"layout_{name}", _case((48, 48), 48, lay_out=lay_out), boundary)


def draw(source: Draw) -> Inputs:
    """Any shape and layout, any activation, a bias or none."""
    leading = [source.size(1, 16, 65) for _ in range(source.choice((1, 0, 2)))]
    depth = source.size(1, 13, 16, 17, 32, 33, 64)
    columns = source.size(1, 3, 8, 64, 129)
    input, weight = source.tensor(*leading, depth), source.tensor(columns, depth)
    bias = source.tensor(columns) if source.choice((True, False)) else None
    return Inputs((input, weight, bias, source.choice(tuple(ACTIVATIONS))))


CASES = tuple(_cases())
