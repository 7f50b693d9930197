"""The cases and draws of ``add_mul_activation``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.cases import BOUNDARY, Make, Random, made, sweep_tags

_SWEEP = (
    (4, 4),
    (64, 64),
    (256, 256),
    (1024, 128),
    (4096, 128),
    (16384, 256),
    (65536, 512),
    (131072, 1024),
    (262144, 1024),
)


_BOUNDARY = (
    (0, 8),
    (3, 0),
    (1, 1),
    (1, 3),
    (7, 1),
    (1, 1023),
    (1, 1024),
    (1, 1025),
    (33, 31),
    (32, 32),
    (41, 25),
    (129, 257),
)


@made
def _matrix_case(random: Random, rows: int, columns: int, activation: str = "relu") -> Inputs:
    input = random.normal(rows, columns)
    update = random.normal(rows, columns)
    bias = random.normal(columns)
    return Inputs((input, update, bias, 0.5, activation))


@made
def _layout_case(
    random: Random,
    shape: Sequence[int],
    lay_out: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    bias: bool,
) -> Inputs:
    input, update = lay_out(random.normal(*shape), random.normal(*shape))
    vector = random.normal(*input.shape[-1:]) if bias else None
    return Inputs((input, update, vector, -1.5, "relu"))


def _cases() -> Iterator[Case]:
    for rows, columns in _SWEEP:
        name = f"{rows}x{columns}"
        yield Case(
            name,
            _matrix_case(rows, columns),
            sweep_tags(tiny=rows * columns <= 64 * 64, huge=rows * columns >= 2**27),
        )
    for rows, columns in _BOUNDARY:
        yield Case(f"boundary_{rows}x{columns}", _matrix_case(rows, columns), BOUNDARY)
    for name in ACTIVATIONS:
        yield Case(f"{name}_37x65", _matrix_case(37, 65, name), BOUNDARY)
    layouts: dict[str, tuple[Sequence[int], Callable[..., tuple[Tensor, Tensor]], bool]] = {
        "0d": ((), lambda input, update: (input, update), False),
        "1d": ((1000,), lambda input, update: (input, update), True),
        "no_bias": ((33, 129), lambda input, update: (input, update), False),
        "transposed": ((65, 34), lambda input, update: (input.t(), update.t()), True),
        "transposed_update": (
            (65, 34),
            lambda input, update: (input, update.t().contiguous().t()),
            True,
        ),
        "expanded": (
            (65, 34),
            lambda input, update: (input[:1].expand(65, 34), update[:, :1].expand(65, 34)),
            True,
        ),
        "offset_rows": ((65, 40), lambda input, update: (input[1:, 3:], update[1:, 3:]), True),
        "every_other_column": (
            (17, 66),
            lambda input, update: (input[:, ::2], update[:, ::2]),
            True,
        ),
        "channels_last": (
            (2, 5, 3, 7),
            lambda input, update: (input.movedim(1, -1).contiguous().movedim(-1, 1), update),
            True,
        ),
        "rank_6": (
            (2, 3, 2, 3, 2, 5),
            lambda input, update: (input.transpose(0, 4), update.transpose(0, 4).contiguous()),
            True,
        ),
    }
    for name, (shape, lay_out, bias) in layouts.items():
        yield Case(f"layout_{name}", _layout_case(shape, lay_out, bias), BOUNDARY)


def _cpu_cases() -> Iterator[Case]:
    """Yield every activation on dense tensors, with gaps between rows, and transposed."""
    for place, (rows, columns) in enumerate(cpu_sizes.MATRICES):
        name = ("relu", "gelu", "silu")[place % 3]
        yield Case(f"{rows}x{columns} {name}", _matrix_case(rows, columns, name), cpu_sizes.ROW)
    for name in ACTIVATIONS:
        for rows, columns in cpu_sizes.EVERY_DTYPE:
            make = _matrix_case(rows, columns, name)
            yield Case(f"{rows}x{columns} {name}", make, cpu_sizes.DTYPES)
        for rows, columns in cpu_sizes.EVERY_DTYPE[3:4]:
            for how, lay_out in (
                ("rows", lambda tensor: tensor[:, :-1]),
                ("strided", lambda tensor: tensor.t()),
            ):
                make = _laid_out_case(_matrix_case(rows, columns, name), lay_out)
                yield Case(f"{rows}x{columns} {name}, {how}", make, cpu_sizes.DTYPES)


@made
def _laid_out_case(random: Random, of: Make, lay_out: Callable[[Tensor], Tensor]) -> Inputs:
    """Build the case ``of`` with input and update in another layout, and a bias for their last
    dimension."""
    input, update, _, scale, activation = of(random.device, random.dtype, random.generator).args
    input, update = lay_out(input), lay_out(update)
    return Inputs((input, update, random.normal(*input.shape[-1:]), scale, activation))


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout, any activation, a bias or none, any scale."""
    leading = [source.size(1, 2, 33) for _ in range(source.choice((1, 0, 2, 3)))]
    columns = source.size(1, 3, 4, 128, 255, 256, 257)
    input = source.tensor(*leading, columns)
    update = source.tensor(*leading, columns)
    bias = source.tensor(columns) if source.choice((True, False)) else None
    scale = source.choice((1.0, 0.5, 0.0, source.uniform(-2.0, 2.0)))
    return Inputs((input, update, bias, scale, source.choice(tuple(ACTIVATIONS))))


def is_writable(case: Case) -> bool:
    """Return whether the case's input may be written over: whether it is not expanded."""
    return case.name != "layout_expanded"


CASES = tuple(_cases())
CPU_CASES = tuple(_cpu_cases())
