"""What the interactions' kernels are held to, and inputs on which such kernels go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp, Inputs
from fuselab.prove.accuracy import Bar
from fuselab.prove.trials import with_gradients

# (batch, tables, width): no table, one element, both sides of a block of 4, 16 and 32 vectors and
# elements, DLRM's own, and more samples than any program takes.
SHAPES = (
    (1, 0, 1),
    (2, 1, 1),
    (3, 0, 5),
    (9, 2, 3),
    (5, 3, 4),
    (5, 4, 5),
    (3, 15, 16),
    (3, 16, 17),
    (10, 26, 16),
    (2, 31, 33),
)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def vectors(
    batch: int, tables: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    return normal(batch, width, dtype=dtype), normal(batch, tables, width, dtype=dtype, seed=1)


def layer(
    batch: int, tables: int, width: int, columns: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of ``outer_interaction_linear``."""
    elements = (tables + 1) * width
    weight = normal(columns, elements**2, dtype=dtype, seed=2) / elements
    return *vectors(batch, tables, width, dtype), weight, normal(columns, dtype=dtype, seed=3)


def layouts(batch: int, tables: int, width: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Vectors that lie elsewhere than in a row: what a kernel must not read as contiguous."""
    dense, embeddings = vectors(batch, tables, width)
    room = normal(batch + 1, tables + 2, 2 * width + 3, seed=4)
    return {
        "tables first": (dense, embeddings.transpose(0, 1).contiguous().transpose(0, 1)),
        "offset rows": (room[1:, 0, 3 : width + 3], room[1:, 2:, 1 : width + 1]),
        "every other element": (
            room[1:, 0, : 2 * width : 2],
            room[1:, 1:-1, 1 : 2 * width + 1 : 2],
        ),
        "transposed": (
            dense.t().contiguous().t(),
            embeddings.movedim(2, 0).contiguous().movedim(0, 2),
        ),
        "one sample for all": (dense[:1].expand(batch, -1), embeddings[:1].expand(batch, -1, -1)),
        "one vector for all": (dense, embeddings[:, :1].expand(-1, tables, -1)),
        "one element for all": (dense[:, :1].expand(-1, width), embeddings),
    }


def moved(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """On the GPU, and in ``dtype``, with the same strides and offset."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to("cuda", dtype)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def special_vectors(dtype: torch.dtype, tables: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    """A sample per kind of value."""
    dense, embeddings = vectors(8, tables, width, dtype)
    dense[1, -1] = math.inf
    embeddings[2, 1, -1] = math.nan
    embeddings[3, 0, 0], embeddings[3, 1, 0] = math.inf, -math.inf
    embeddings[4] = -0.0
    dense[5], embeddings[5] = 0.0, math.inf
    dense[6] = torch.finfo(dtype).tiny / 4
    embeddings[7] = 1.0
    return dense, embeddings


def check_output(op: FusedOp, forward: Callable[..., Tensor], *args: Any) -> None:
    """The output alone: where elements are so large that the order of a gradient's additions says
    whether it overflows."""
    args = op.bind(Inputs(args))
    bar = Bar(lambda values: [op.reference(*values)], args, ["output"])
    (judgement,) = bar.judge([forward(*args)])
    assert judgement.problem is None, judgement.problem


def random_upstream(op: FusedOp, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Normal, but 0 where float64's pre-activation is within 2 eps of the kink of relu or
    leaky_relu, 0.2 % of outputs in float16 and 1.2 % in bfloat16.

    Pre-activations of ``layer`` are as large as 1. Eager rounds products and the sum: it is off by
    0.29 eps (root of the mean square, 140 x 3 x 16 -> 136). The kernels round products and
    W[i, j] + W[j, i]: 0.31 eps. On which side of the kink that leaves a sum is chance, the gradient
    of its whole sample hangs on it, and no bar on roundings can judge it.
    """
    upstream = normal(*output.shape, dtype=output.dtype, seed=9).to(output.device)
    values = dict(zip(op.signature.parameters, args, strict=True))
    if values.get("activation") in ("relu", "leaky_relu"):
        exact = (arg.double() if isinstance(arg, Tensor) else arg for arg in args[:-1])
        near = op.reference(*exact, "identity").abs() < 2 * torch.finfo(output.dtype).eps
        upstream[near] = 0.0
    return upstream


def check(
    op: FusedOp,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor | None, ...]],
    *args: Any,
    upstream: Tensor | None = None,
) -> None:
    """Output and gradients of an implementation within the bar, contiguous, inputs unchanged."""
    args = op.bind(Inputs(args))
    tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
    before = [args[place].clone() for place in tensors]
    output = forward(*args)
    assert op.fake is not None and op.gradient is not None
    assert output.is_contiguous() and output.shape == op.fake(*args).shape
    if upstream is None:
        upstream = random_upstream(op, args, output)
    parameters = [
        value
        for name, value in zip(op.signature.parameters, args, strict=True)
        if name in op.tensor_parameters
    ]
    needs = [value is not None for value in parameters]
    grads = backward(needs, upstream, *op.gradient.save(output, *args))
    for value, grad in zip(parameters, grads, strict=True):
        assert (grad is None) == (value is None)
        assert grad is None or (grad.shape == value.shape and grad.is_contiguous())
    names = ["output", *(list(op.signature.parameters)[place] for place in tensors)]
    bar = Bar(
        lambda values: with_gradients(op.reference, tensors, values), [*args, (upstream,)], names
    )
    ours = [output, *(grad for grad in grads if grad is not None)]
    for name, judgement in zip(names, bar.judge(ours), strict=True):
        assert judgement.problem is None, f"{name} {judgement.problem}"
    for place, value in zip(tensors, before, strict=True):
        assert torch.equal(args[place].nan_to_num(), value.nan_to_num()), "an input changed"


def check_alone(
    op: FusedOp,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor | None, ...]],
    *args: Any,
) -> None:
    """A gradient asked for alone is the same to the bit, and nothing else comes back."""
    args = op.bind(Inputs(args))
    output = forward(*args)
    assert op.gradient is not None
    saved = op.gradient.save(output, *args)
    upstream = normal(*output.shape, dtype=output.dtype, seed=9).to(output.device)
    together = backward([True] * len(op.tensor_parameters), upstream, *saved)
    for place, whole in enumerate(together):
        needs = [other == place for other in range(len(together))]
        alone = backward(needs, upstream, *saved)
        assert [grad is not None for grad in alone] == needs
        mine = alone[place]
        assert mine is not None and whole is not None and torch.equal(mine, whole)
