"""What the tests of linear_activation share: inputs, layouts, and the comparison with eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pointwise_cases import assert_within_bar
from torch import Tensor

from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.linear_activation.reference import reference

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "padded_rows": lambda tensor: torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2],
    "every_other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
    "one_row": lambda tensor: tensor[:1].expand_as(tensor),
    "one_column": lambda tensor: tensor[:, :1].expand_as(tensor),
}

# rows, depth, columns: around tiles of 16 to 128 rows, 32 to 256 columns and 16 to 64 deep, around
# the shallow kernels' depths and the width of a store.
SHAPES = (
    (1, 1, 1),
    (2, 3, 1),
    (3, 2, 9),
    (15, 13, 33),
    (17, 16, 8),
    (70, 17, 40),
    (33, 32, 127),
    (65, 33, 70),
    (5, 64, 16),
    (16, 65, 129),
)


def operands(
    rows: int,
    depth: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Standard normal input and bias; weights as large as nn.Linear's."""
    generator = torch.Generator().manual_seed(rows + depth + columns)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = normal(columns, depth) * max(depth, 1) ** -0.5
    vector = normal(columns).to(device, dtype) if bias else None
    return normal(rows, depth).to(device, dtype), weight.to(device, dtype), vector


def check(
    forward: Forward,
    backward: Backward,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "relu",
    upstreams: Sequence[Tensor] | None = None,
) -> None:
    """Output and every gradient, each alone and all together, against float64 and eager."""
    output = forward(input, weight, bias, activation)
    assert output.dtype == input.dtype and output.is_contiguous()

    double = input.dtype == torch.float64

    def leaves(dtype: torch.dtype, of: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [
            None if value is None else value.detach().to(dtype, copy=True).requires_grad_()
            for value in of
        ]

    # Inputs and results: eager's (of float64 float32's, as ``assert_within_bar`` says), those of
    # float64, and where these differ, float64's of eager's.
    operands = (input, weight, bias)
    inputs = [leaves(torch.float32 if double else input.dtype, operands)]
    inputs.append(leaves(torch.float64, operands))
    if double:
        inputs.append(leaves(torch.float64, inputs[0]))
    results = [reference(*tensors, activation) for tensors in inputs]
    eager, exact, eager_exact = (result.detach() for result in (*results[:2], results[-1]))
    assert_within_bar(output, eager, exact, f"{activation} forward", eager_exact)
    saved = save(output, input, weight, bias, activation)
    if upstreams is None:
        generator = torch.Generator().manual_seed(1)
        random = torch.randn(output.shape, generator=generator).to(output)
        upstreams = (random, torch.full((), 0.3).to(output).expand(output.shape))
    has_bias = bias is not None
    for count, upstream in enumerate(upstreams):
        everything = [*backward((True, True, has_bias), upstream, *saved)]
        assert (everything[2] is not None) == has_bias
        places = [place for place in range(3) if everything[place] is not None]
        of_eager = upstream.to(eager.dtype)
        gradients = [
            torch.autograd.grad(
                result, [tensors[place] for place in places], grad, retain_graph=True
            )
            for tensors, result, grad in zip(
                inputs, results, (of_eager, upstream.double(), of_eager.double()), strict=False
            )
        ]
        for place, their, true, third in zip(
            places, gradients[0], gradients[1], gradients[-1], strict=True
        ):
            assert everything[place].dtype == input.dtype and everything[place].is_contiguous()
            what = f"{activation} gradient {place}"
            assert_within_bar(everything[place], their, true, what, third)
            if count > 0:
                continue
            alone = backward(tuple(index == place for index in range(3)), upstream, *saved)
            assert [grad is not None for grad in alone] == [index == place for index in range(3)]
            assert_within_bar(alone[place], their, true, f"{what} alone", third)
