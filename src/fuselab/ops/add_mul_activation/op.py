"""The contracts of ``fuselab::add_mul_activation`` and of its in-place form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Cost, FusedOp, Gradient, Implementation, Inputs, Rewrite, tensors_in
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.cost import arithmetic_unit, bytes_behind, bytes_of
from fuselab.ops._shared.dtypes import FLOATING, check_floating, promoted
from fuselab.ops.add_mul_activation import (
    cases,
    configs,
    cpu_launch,
    cuda_launch,
    layout,
    triton_launch,
)
from fuselab.ops.add_mul_activation.reference import gradient, reference, reference_in_place
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CUDA_EXPRESSIONS = cuda_launch.cuda_expressions(has_update=True)


def check_operands(
    op_name: str,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float,
    activation: str,
) -> None:
    """Raise the errors of the reference's docstring, in the name of ``op_name``."""
    activation_named(activation)
    check_floating(op_name, input=input, update=update, bias=bias)
    if update is not None and input.shape != update.shape:
        raise ShapeError(
            f"{op_name}: 'update' has shape {tuple(update.shape)} and 'input' "
            f"{tuple(input.shape)}; they must be equal (expand the smaller one)."
        )
    if bias is not None and (input.dim() == 0 or bias.shape != input.shape[-1:]):
        raise ShapeError(
            f"{op_name}: 'bias' has shape {tuple(bias.shape)}; expected "
            f"{tuple(input.shape[-1:]) or 'None'}, the last dimension of 'input' "
            f"{tuple(input.shape)}."
        )


def fake(input: Tensor, update: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return layout.empty_output(input, update, bias)


def save(
    output: Tensor,
    input: Tensor,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float,
    activation: str,
) -> tuple[Any, ...]:
    """Save the output if the derivative is a function of it, and the operands if it needs the
    pre-activation."""
    derivative_of = activation_named(activation).derivative_of
    from_operands = derivative_of == "preactivation"
    return (
        output if derivative_of == "output" else None,
        input if from_operands else None,
        update if from_operands else None,
        bias if from_operands else None,
        scale,
        activation,
        input.dtype,
        None if update is None else update.dtype,
        None if bias is None else bias.dtype,
    )


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return layout.Saved(*saved).empty_gradients(needs, grad_output)


Forward = Callable[..., Tensor]
Backward = Callable[[Sequence[bool], Tensor, layout.Saved], layout.Gradients]


def _launchers(
    cuda: CudaSource, cpp: CppSource
) -> Iterator[tuple[str, Literal["cuda", "cpu"], Forward, Backward]]:
    """Yield name, device, forward and backward of every implementation, by a package's kernels."""
    yield "triton", "cuda", triton_launch.forward, triton_launch.backward
    yield "cuda", "cuda", partial(cuda_launch.forward, cuda), partial(cuda_launch.backward, cuda)
    yield "cpp", "cpu", partial(cpu_launch.forward, cpp), partial(cpu_launch.backward, cpp)


def implementations(
    cuda: CudaSource,
    cpp: CppSource,
    operands: Callable[..., tuple[Any, ...]],
    backward_by: Callable[..., tuple[Tensor | None, ...]],
) -> dict[str, Implementation]:
    """Return the implementations of an operator whose arguments ``operands`` turns into those of
    the launchers; ``backward_by(backward, needs, grad_output, *saved)`` calls a launcher's."""
    return {
        name: Implementation(
            device, partial(_forward_by, forward, operands), partial(backward_by, backward)
        )
        for name, device, forward, backward in _launchers(cuda, cpp)
    }


def implementations_in_place(
    cuda: CudaSource, cpp: CppSource, operands: Callable[..., tuple[Any, ...]]
) -> dict[str, Implementation]:
    """Return the implementations of the form that writes over its input."""
    return {
        name: Implementation(device, partial(_overwrite_by, forward, operands))
        for name, device, forward, _ in _launchers(cuda, cpp)
    }


def _forward_by(forward: Forward, operands: Callable[..., tuple[Any, ...]], *args: Any) -> Tensor:
    return forward(*operands(*args))


def _overwrite_by(forward: Forward, operands: Callable[..., tuple[Any, ...]], *args: Any) -> None:
    layout.overwrite(forward, *operands(*args))


def _backward_by(
    backward: Backward, needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return backward(needs, grad_output, layout.Saved(*saved))


def _operands(*args: Any) -> tuple[Any, ...]:
    return args


def cost(
    input: Tensor, update: Tensor | None, bias: Tensor | None, scale: float, activation: str
) -> Cost:
    """Return the least traffic: input, update and bias read once, the output written once."""
    dtype = promoted(input, update, bias)
    flops = 2 * (update is not None) + (bias is not None) + activation_named(activation).flops
    return Cost(
        bytes_behind(input, update, bias),
        input.numel() * dtype.itemsize,
        input.numel() * flops,
        arithmetic_unit(dtype),
    )


def cost_backward(
    input: Tensor, update: Tensor | None, bias: Tensor | None, scale: float, activation: str
) -> Cost:
    """Return the least traffic: upstream gradient and saved tensors read once, gradients written
    once."""
    dtype = promoted(input, update, bias)
    derivative_of = activation_named(activation).derivative_of
    read = input.numel() * dtype.itemsize
    if derivative_of == "output":
        read *= 2
    elif derivative_of == "preactivation":
        read += bytes_behind(input, update, bias)
    written = bytes_of(input, update, bias)
    flops = 1 + (update is not None) + (bias is not None) + activation_named(activation).flops
    return Cost(read, written, input.numel() * flops, arithmetic_unit(dtype))


def prefer(input: Tensor, update: Tensor, *rest: Any) -> Sequence[str]:
    """Return CUDA C++ first if input and update are contiguous alike. Otherwise Triton is first,
    whose strided kernel works in square tiles and so reads a transposed operand by whole lines."""
    alike = input.stride() == update.stride() and input.is_contiguous()
    return ("cuda", "triton") if alike else ("triton", "cuda")


def layout_regime(activation: str, *tensors: Tensor | None) -> str:
    """Return the key of a pointwise kernel's speed on a CPU: the activation, then the layout unless
    all tensors are dense (``rows``: gaps between dense rows; else ``strided``), or ``mixed
    dtypes``."""
    name = activation_named(activation).name
    given = [tensor for tensor in tensors if tensor is not None]
    if len({tensor.dtype for tensor in given}) > 1:
        return f"{name}, mixed dtypes"
    if all(tensor.is_contiguous() for tensor in given):
        return name
    rows = all(tensor.dim() > 0 and tensor.stride(-1) == 1 for tensor in given)
    return f"{name}, rows" if rows else f"{name}, strided"


def regime(
    input: Tensor, update: Tensor, bias: Tensor | None, scale: float, activation: str
) -> str:
    """Return ``layout_regime`` of the operands."""
    return layout_regime(activation, input, update, bias)


def prefer_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[str]:
    """Return the order by the same rule as ``prefer``; in CUDA C++ the bias's gradient too is
    faster (143 us for 152 at 65536 x 512 float32 on an H200)."""
    alike = all(tensor.is_contiguous() for tensor in tensors_in((grad_output, *saved)))
    return ("cuda", "triton", "cpp") if alike else ("triton", "cuda", "cpp")


# The published sweep has these shapes, and sizes around a block's edge: Triton's flat block in
# float32, its strided tile, a CUDA block and a CPU tile all have 1024 elements.


def _rewrites() -> Iterator[Rewrite]:
    """Yield a rewrite for every spelling of every activation over every spelling of the sum."""

    def with_bias(act: Callable[[Tensor], Tensor], name: str) -> Iterator[Rewrite]:
        def call(input: Tensor, update: Tensor, bias: Tensor, scale: float) -> Inputs:
            return Inputs((input, update, bias, scale, name))

        def unscaled(input: Tensor, update: Tensor, bias: Tensor) -> Inputs:
            return Inputs((input, update, bias, 1.0, name))

        yield Rewrite(lambda input, update, bias, scale: act(input + scale * update + bias), call)
        yield Rewrite(lambda input, update, bias, scale: act(input + update * scale + bias), call)
        yield Rewrite(lambda input, update, bias, scale: act(input + bias + scale * update), call)
        yield Rewrite(lambda input, update, bias, scale: act(input + bias + update * scale), call)
        yield Rewrite(lambda input, update, bias, scale: act(scale * update + input + bias), call)
        yield Rewrite(lambda input, update, bias, scale: act(update * scale + input + bias), call)
        yield Rewrite(
            lambda input, update, bias, scale: act(torch.add(input, update, alpha=scale) + bias),
            call,
        )
        yield Rewrite(lambda input, update, bias: act(input + update + bias), unscaled)

    def without_bias(act: Callable[[Tensor], Tensor], name: str) -> Iterator[Rewrite]:
        def call(input: Tensor, update: Tensor, scale: float) -> Inputs:
            return Inputs((input, update, None, scale, name))

        def unscaled(input: Tensor, update: Tensor) -> Inputs:
            return Inputs((input, update, None, 1.0, name))

        yield Rewrite(lambda input, update, scale: act(input + scale * update), call)
        yield Rewrite(lambda input, update, scale: act(input + update * scale), call)
        yield Rewrite(lambda input, update, scale: act(scale * update + input), call)
        yield Rewrite(lambda input, update, scale: act(update * scale + input), call)
        if name != "identity":  # torch.add alone is one kernel already
            yield Rewrite(
                lambda input, update, scale: act(torch.add(input, update, alpha=scale)), call
            )
            yield Rewrite(lambda input, update: act(input + update), unscaled)

    for entry in ACTIVATIONS.values():
        for spelling in entry.spellings:
            yield from with_bias(spelling, entry.name)
            yield from without_bias(spelling, entry.name)


OP = FusedOp(
    name="fuselab::add_mul_activation",
    reference=reference,
    implementations=implementations(CUDA, CPP, _operands, _backward_by),
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save, gradient, fake_gradient, prefer_backward),
    draw=cases.draw,
    validate=partial(check_operands, "add_mul_activation"),
    fake=fake,
    prefer=prefer,
    rewrites=tuple(_rewrites()),
    dtypes=FLOATING,
    configs={"cuda_backward": configs.configs},
    regime=regime,
    cpu_cases=cases.CPU_CASES,
)


def prefer_in_place(input: Tensor, *others: Any) -> Sequence[str]:
    """Return the order by the same rule as ``prefer``: the kernels are the same."""
    alike = all(tensor.is_contiguous() for tensor in tensors_in((input, *others)))
    return ("cuda", "triton") if alike else ("triton", "cuda")


IN_PLACE = FusedOp(
    name="fuselab::add_mul_activation_",
    reference=reference_in_place,
    implementations=implementations_in_place(CUDA, CPP, _operands),
    cost=cost,
    cases=tuple(filter(cases.is_writable, cases.CASES)),
    draw=cases.draw,
    validate=partial(check_operands, "add_mul_activation_"),
    prefer=prefer_in_place,
    dtypes=FLOATING,
    mutates=("input",),
    regime=regime,
    cpu_cases=cases.CPU_CASES,
)
