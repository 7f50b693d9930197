"""The contract of ``fuselab::mlp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import (
    DtypeError,
    OperandError,
    ShapeError,
)
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.cost import bytes_behind, product_unit
from fuselab.ops._shared.dtypes import FLOATING, cast_floating, check_floating
from fuselab.ops.mlp import cuda_launch, layers_launch
from fuselab.ops.mlp.cuda_launch import CUDA, CUDA_EXPRESSIONS
from fuselab.ops.mlp.reference import gradient, names_of, reference

__all__ = ["CUDA", "CUDA_EXPRESSIONS", "MOST_ROWS", "OP"]


def _check_layers(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> None:
    """Names and shapes. Raises UnknownNameError, ArgumentError, ShapeError."""
    activation_named(activation)
    activation_named(output_activation)
    if not weights:
        raise OperandError("mlp: 'weights' is empty; expected one weight or more.")
    if biases and len(biases) != len(weights):
        raise OperandError(
            f"mlp: 'biases' has {len(biases)} tensors; expected one for each of the "
            f"{len(weights)} 'weights', or none at all."
        )
    if input.dim() == 0:
        raise ShapeError("mlp: 'input' has no dimension; expected (..., K).")
    depth, of = input.shape[-1], f"the last dimension of 'input' {tuple(input.shape)}"
    for place, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != depth:
            raise ShapeError(
                f"mlp: 'weights[{place}]' has shape {tuple(weight.shape)}; expected (N, {depth}), "
                f"{of}."
            )
        if biases and biases[place].shape != weight.shape[:1]:
            raise ShapeError(
                f"mlp: 'biases[{place}]' has shape {tuple(biases[place].shape)}; expected "
                f"({weight.shape[0]},), the first dimension of 'weights[{place}]'."
            )
        depth, of = weight.shape[0], f"the first dimension of 'weights[{place}]'"


def validate(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> None:
    _check_layers(input, weights, biases, activation, output_activation, dtype)
    own = weights[0].dtype
    check_floating("mlp", **{"weights[0]": own})
    for name, tensors in (("weights", weights), ("biases", biases)):
        for place, tensor in enumerate(tensors):
            if tensor.dtype != own:
                raise DtypeError(
                    f"mlp: '{name}[{place}]' is {tensor.dtype} and 'weights[0]' {own}; cast one, "
                    "or use torch.autocast."
                )
    if input.dtype != own and not (input.dtype == torch.float32 and own.itemsize == 2):
        raise DtypeError(
            f"mlp: 'input' is {input.dtype} and 'weights[0]' {own}; expected the same, or float32 "
            "beside weights of 16 bits."
        )
    if dtype not in (None, own) and not (dtype == torch.float32 and own.itemsize == 2):
        raise DtypeError(
            f"mlp: 'dtype' is {dtype}; expected None, {own} as the weights, or float32 where they "
            "are of 16 bits."
        )


def fake(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> Tensor:
    shape = (*input.shape[:-1], weights[-1].shape[0])
    return input.new_empty(shape, dtype=dtype or weights[0].dtype)


def autocast(
    autocast_dtype: torch.dtype,
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *rest: Any,
) -> tuple[Any, ...]:
    """As a chain of ``F.linear``: all but float64 in its dtype; ``dtype`` stays what was asked."""

    def cast(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple(cast_floating(tensor, autocast_dtype) for tensor in tensors)

    return *cast([input]), cast(weights), cast(biases), *rest


def save(output: Tensor, *args: Any) -> tuple[Any, ...]:
    """The arguments: no hidden activation was kept."""
    return args


def fake_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *rest: Any,
) -> tuple[Tensor | None, ...]:
    return tuple(
        value.new_empty(value.shape) if need else None
        for need, value in zip(needs, (input, *weights, *biases), strict=True)
    )


# DLRM's bottom and top layers in bfloat16 (H200, 2026-11-21), us of one launch and of the chain:
# 13.5 and 18.9, 12.8 and 18.6 at 128 rows; 18.8 and 19.9, 21.1 and 21.2 at 2048; 24.8 and 21.6,
# 29.4 and 24.6 at 4096, where a layer alone fills the GPU.
MOST_ROWS = 2048
_MOST_WEIGHTS = 1 << 19


def prefer(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Sequence[str]:
    """On a GPU one launch up to 2048 rows of DLRM's layers (0.32 million weights, and half as many
    again), fewer of larger ones, else the chain; on a CPU the reference. Every tile of rows reads
    all the weights, so rows times weights is what a launch moves; other layers are not timed."""
    if not input.is_cuda:
        return ("reference",)
    rows, elements = input.shape[:-1].numel(), sum(weight.numel() for weight in weights)
    few = rows <= MOST_ROWS and rows * elements <= MOST_ROWS * _MOST_WEIGHTS
    return ("cuda", "layers") if few else ("layers",)


def cost(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> Cost:
    """Input and weights read once, the output written once; hidden activations are neither.

    DLRM's prediction layers (368-512-256-1, bfloat16) are 0.64 MB and 0.64 MFLOP per sample: 2048
    samples are 2.2 MB and 1.3 GFLOP, about 2 us of an H200. What counts is that a launch and the
    wait for memory come once, not once per layer.
    """
    rows, own = input.shape[:-1].numel(), weights[0].dtype
    output_bytes = weights[-1].shape[0] * (dtype or own).itemsize
    names = names_of(weights, activation, output_activation)
    pointwise = sum(
        weight.shape[0] * (activation_named(name).flops + bool(biases))
        for weight, name in zip(weights, names, strict=True)
    )
    products = 2 * sum(weight.numel() for weight in weights)
    return Cost(
        bytes_behind(input, *weights, *biases),
        rows * output_bytes,
        rows * (products + pointwise),
        product_unit(own),
    )


def cost_backward(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> Cost:
    """Upstream gradient, input and weights read once, every gradient written once; the layers once
    more, and two products of each."""
    forward = cost(input, weights, *rest)
    operands = bytes_behind(input, *weights)
    return Cost(
        forward.bytes_written + operands,
        operands + bytes_behind(*rest[0]),
        3 * forward.flops,
        forward.unit,
    )


Make = Callable[[torch.device, torch.dtype, torch.Generator], Inputs]


def _case(
    leading: Sequence[int],
    widths: Sequence[int],
    activation: str = "relu",
    output_activation: str = "identity",
    bias: bool = True,
    from_float32: bool = False,
    to_float32: bool = False,
    lay_out: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Make:
    """Standard normal input; weights that keep its size through a relu. ``lay_out`` is given the
    input and the weights. ``from_float32``, ``to_float32``: input and output in float32 where the
    weights are of 16 bits."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def normal(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, to)

        def mixed(asked: bool) -> torch.dtype:
            return torch.float32 if asked and dtype.itemsize == 2 else dtype

        input = lay_out(normal(*leading, widths[0], to=mixed(from_float32)))
        weights = [
            lay_out(normal(columns, depth, scale=(2 / max(depth, 1)) ** 0.5))
            for depth, columns in pairwise(widths)
        ]
        biases = [normal(columns) for columns in widths[1:]] if bias else []
        output = mixed(to_float32) if to_float32 else None
        return Inputs((input, weights, biases, activation, output_activation, output))

    return make


BOTTOM, TOP = (13, 512, 256, 64, 16), (368, 512, 256, 1)  # DLRM's, of its published main size


def _cases() -> Iterator[Case]:
    for rows in (128, 2048, 65536):
        tags = frozenset({"bench", "sweep"} | ({"tiny"} if rows == 128 else set()))
        bottom = _case((rows,), BOTTOM, output_activation="relu", from_float32=True)
        yield Case(f"bottom {rows}", bottom, tags)
        top = _case((rows,), TOP, output_activation="sigmoid", to_float32=True)
        yield Case(f"top {rows}", top, tags)
    boundary = frozenset({"boundary"})
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
        yield Case(f"{shape} {'-'.join(map(str, sizes))}", _case(leading, sizes), boundary)
    for name in ACTIVATIONS:
        yield Case(name, _case((37,), (24, 40, 16), name, name), boundary)
    yield Case("no biases", _case((37,), (24, 40, 16), bias=False), boundary)
    yield Case("from float32", _case((37,), (13, 40, 16), from_float32=True), boundary)
    to_float32 = _case((37,), (24, 40, 1), output_activation="sigmoid", to_float32=True)
    yield Case("to float32", to_float32, boundary)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda tensor: tensor.t().contiguous().t(),
        "padded rows": lambda tensor: torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2],
        "every other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
        "one row": lambda tensor: tensor[:1].expand_as(tensor),
    }
    for name, lay_out in layouts.items():
        yield Case(name, _case((24,), (24, 40, 16), lay_out=lay_out), boundary)


def _tame(tensor: Tensor) -> Tensor:
    """Finite values no larger than the eighth root of the dtype's largest, in the same layout: a
    hidden sum that overflows is infinite or NaN by the order of additions, and any order is right.
    """
    limit = torch.finfo(tensor.dtype).max ** 0.125
    memory = tensor.untyped_storage().nbytes() // tensor.element_size()
    elements = tensor.as_strided((memory,), (1,), 0)
    elements.copy_(torch.where(elements.isfinite(), elements.clamp(-limit, limit), elements))
    return tensor


def draw(source: Draw) -> Inputs:
    """Any shapes and layouts, any activations, biases or none."""
    leading = [source.size(1, 16, 33) for _ in range(source.choice((1, 0, 2)))]
    count = source.choice((1, 2, 3))
    widths = [source.size(1, 13, 16, 17, 32, 33, 64) for _ in range(count + 1)]
    input = _tame(source.tensor(*leading, widths[0]))
    weights = [_tame(source.tensor(columns, depth)) for depth, columns in pairwise(widths)]
    biases: list[Tensor] = []
    if source.choice((True, False)):
        biases = [_tame(source.tensor(columns)) for columns in widths[1:]]
    names = source.choice(tuple(ACTIVATIONS)), source.choice(tuple(ACTIVATIONS))
    to = source.choice((None, torch.float32 if source.dtype.itemsize == 2 else source.dtype))
    return Inputs((input, weights, biases, *names, to))


OP = FusedOp(
    name="fuselab::mlp",
    reference=reference,
    implementations={
        "cuda": Implementation("cuda", cuda_launch.forward, supports=cuda_launch.supports),
        "layers": Implementation("cuda", layers_launch.forward),
        "triton": Implementation(
            "cuda", layers_launch.forward_triton, supports=layers_launch.supports_triton
        ),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=tuple(_cases()),
    gradient=Gradient(save, gradient, fake_gradient),
    draw=draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    autocast=autocast,
    dtypes=FLOATING,
    configs={"cuda": cuda_launch.configs},
)
