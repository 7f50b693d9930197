"""The cases and draws of ``lora_linear``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.cases import BOUNDARY, Random, made, tame, unchanged


@made
def _case(
    random: Random,
    leading: Sequence[int],
    inner: int,
    columns: int,
    rank: int,
    activation: str = "relu",
    has_bias: bool = True,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
) -> Inputs:
    """Build weights like a trained layer's, of order 1 / sqrt(K), and an update a quarter as
    large."""

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return lay_out(random.normal(*shape, deviation=deviation))

    deviation = max(inner, 1) ** -0.5
    return Inputs(
        (
            normal(*leading, inner),
            normal(columns, inner, deviation=deviation),
            normal(columns) if has_bias else None,
            normal(rank, inner, deviation=deviation),
            normal(columns, rank, deviation=0.25 * rank**-0.5),
            0.5,
            activation,
        )
    )


def _every_other(tensor: Tensor) -> Tensor:
    """Return the same values as every other element of a larger tensor."""
    spread = tensor.new_empty((*tensor.shape, 2))
    spread[..., 0] = tensor
    return spread[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


# Rows, K, N, r: a transformer's projections, and a layer with many rows and few columns.
CASES_TO_BEAT = (
    (4096, 1024, 1024, 16),
    (8192, 4096, 4096, 16),
    (8192, 4096, 11008, 16),
    (65536, 512, 512, 8),
)


def _cases() -> Iterator[Case]:
    for rows, inner, columns, rank in CASES_TO_BEAT:
        name = f"{rows}x{inner} -> {columns} r{rank}"
        yield Case(name, _case((rows,), inner, columns, rank), frozenset({"bench"}))
    for rank in (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100):
        yield Case(f"rank {rank}", _case((33,), 40, 48, rank), BOUNDARY)
    for rows, inner, columns in ((0, 8, 8), (3, 8, 0), (1, 1, 1), (2, 3, 5), (65, 129, 63)):
        yield Case(f"{rows}x{inner} -> {columns}", _case((rows,), inner, columns, 4), BOUNDARY)
    for name in ACTIVATIONS:
        yield Case(f"{name} 37x24 -> 40", _case((37,), 24, 40, 8, name), BOUNDARY)
    yield Case("no bias", _case((17,), 32, 24, 8, has_bias=False), BOUNDARY)
    yield Case("vector", _case((), 32, 24, 8), BOUNDARY)
    yield Case("two leading dimensions", _case((3, 5), 32, 24, 8), BOUNDARY)
    yield Case("every other", _case((9,), 32, 24, 8, lay_out=_every_other), BOUNDARY)
    yield Case("transposed", _case((9,), 32, 24, 8, lay_out=_transposed), BOUNDARY)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout, any rank and activation, a bias or none, any scale."""
    leading = [source.size(1, 2, 33) for _ in range(source.choice((1, 0, 2)))]
    inner, columns = source.size(1, 3, 64, 128), source.size(1, 3, 64, 128)
    rank = max(1, source.size(1, 3, 8, 16, 17, 64, 100))
    input, weight = tame(source.tensor(*leading, inner), 4), source.tensor(columns, inner)
    bias = source.tensor(columns) if source.choice((True, False)) else None
    lora_a, lora_b = source.tensor(rank, inner), tame(source.tensor(columns, rank), 4)
    scale = source.choice((1.0, 0.5, 0.0, source.uniform(-2.0, 2.0)))
    activation = source.choice(tuple(ACTIVATIONS))
    return Inputs((input, weight, bias, lora_a, lora_b, scale, activation))


def space(source: Draw) -> Inputs:
    """Draw any layer, with the ranks that are used and weights of a trained layer's size."""
    leading = [source.size() for _ in range(source.choice((1, 2)))]
    inner, columns = source.size(768, 4096), source.size(768, 4096, 11008)
    rank = source.choice((8, 4, 16, 32, 64, 128))
    bias = source.tensor(columns) if source.choice((True, False)) else None
    return Inputs(
        (
            source.tensor(*leading, inner),
            source.tensor(columns, inner) * inner**-0.5,
            bias,
            source.tensor(rank, inner) * inner**-0.5,
            source.tensor(columns, rank) * (0.25 * rank**-0.5),
            source.choice((0.5, 1.0, 2.0)),
            source.choice(tuple(ACTIVATIONS)),
        )
    )


CASES = tuple(_cases())
