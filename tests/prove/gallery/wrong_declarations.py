"""The gallery's faults in what an operator declares: little to judge, a cost that is too high, a
reference that is another function."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuselab.op import Cost, Draw, FusedOp, Implementation, Inputs
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


@caught_by("cost")
def cost_of_three_passes(device: str) -> FusedOp:
    """Counts its input three times, so that it seems to run at three times its speed."""

    def cost(input: Tensor, bias: Tensor, scale: float) -> Cost:
        return Cost(3 * input.nbytes + bias.nbytes, input.nbytes, 6 * input.numel())

    return make_op("cost_of_three_passes", device, cost=cost)


@caught_by("cost")
def cost_of_a_large_output(device: str) -> FusedOp:
    def cost(input: Tensor, bias: Tensor, scale: float) -> Cost:
        return Cost(input.nbytes, 2 * input.nbytes, 6 * input.numel())

    return make_op("cost_of_a_large_output", device, cost=cost)


@caught_by("peers", passes_its_cases=False)
def reference_rounded_inside(device: str) -> FusedOp:
    """Its reference rounds to bfloat16, which makes the bar as wide as bfloat16's errors."""

    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        z = (input * scale + bias).bfloat16().to(input.dtype)
        return torch.nn.functional.silu(z)

    return make_op(
        "reference_rounded_inside", device, reference=reference, peers={"plain": honest.reference}
    )


@caught_by("peers", passes_its_cases=False)
def reference_of_another_function(device: str) -> FusedOp:
    """Its reference leaves out the scale, which its peer, the library's spelling, has."""

    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        return torch.nn.functional.silu(input + bias)

    return make_op(
        "reference_of_another_function",
        device,
        reference=reference,
        peers={"library": honest.reference},
    )


@caught_by("coverage")
def supports_numbers_only(device: str) -> FusedOp:
    """Refuses inputs with a NaN, so that none of them is judged, and drops it where it gets one."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(input.nan_to_num(0.0), bias.nan_to_num(0.0), scale)

    def supports(input: Tensor, bias: Tensor, scale: float) -> str | None:
        return "it holds a NaN" if bool(input.isnan().any() or bias.isnan().any()) else None

    kind = "cuda" if device == "cuda" else "cpu"
    implementation = Implementation(kind, forward, honest.backward, supports)
    return make_op("supports_numbers_only", device, implementations={"plain": implementation})


def supports_one_size(name: str, device: str) -> FusedOp:
    """Return an operator that is right for 37 columns, and supports nothing else."""

    def supports(input: Tensor, bias: Tensor, scale: float) -> str | None:
        return None if input.shape[-1] == 37 else "it takes 37 columns"

    kind = "cuda" if device == "cuda" else "cpu"
    implementation = Implementation(kind, honest.forward, honest.backward, supports)
    return make_op(name, device, implementations={"plain": implementation})


def draws_one_shape(name: str, device: str) -> FusedOp:
    """Return an operator whose draw has one shape."""

    def draw(draw: Draw) -> Inputs:
        return Inputs((draw.tensor(4, 8), draw.tensor(8), 0.5))

    return make_op(name, device, draw=draw)


def draws_its_tensors_itself(name: str, device: str) -> FusedOp:
    """Return an operator that is right for contiguous tensors, and whose draw gives no others."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(wrong.as_if_contiguous(input), bias, scale)

    def draw(draw: Draw) -> Inputs:
        rows, columns = draw.size(), draw.size()
        tensors = torch.randn(rows, columns), torch.randn(columns)
        return Inputs((*(tensor.to(draw.device, draw.dtype) for tensor in tensors), 0.5))

    return make_op(name, device, forward, draw=draw)


def draws_numbers_only(name: str, device: str) -> FusedOp:
    """Return an operator that drops NaN and infinities, whose draw does too."""

    def numbers(*tensors: Tensor) -> tuple[Tensor, ...]:
        finite = (bool(tensor.isfinite().all()) for tensor in tensors)
        return tuple(
            tensor if is_finite else tensor.nan_to_num(0.0, 1.0, -1.0)
            for tensor, is_finite in zip(tensors, finite, strict=True)
        )

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(*numbers(input, bias), scale)

    def draw(draw: Draw) -> Inputs:
        input, bias, scale = honest.draw(draw).args
        return Inputs((*numbers(input, bias), scale))

    return make_op(name, device, forward, draw=draw)
