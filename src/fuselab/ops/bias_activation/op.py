"""The contract of ``fuselab::bias_activation``: ``add_mul_activation`` without an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DtypeError, ShapeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Implementation, Inputs, Rewrite
from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.activations import activation as activation_named
from fuselab.ops.activations.layout import arithmetic_unit, bytes_behind, promoted
from fuselab.ops.add_mul_activation import launch
from fuselab.ops.bias_activation.reference import gradient, reference
from fuselab.runtime.cpp_source import CppSource
from fuselab.runtime.cuda_source import CudaSource

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
CUDA_EXPRESSIONS = launch.cuda_expressions(has_update=False)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def validate(input: Tensor, bias: Tensor, activation: str) -> None:
    activation_named(activation)
    for name, tensor in (("input", input), ("bias", bias)):
        if tensor.dtype not in DTYPES:
            raise DtypeError(
                f"bias_activation: '{name}' is {tensor.dtype}; expected float32, float16, bfloat16 "
                "or float64."
            )
    if input.dim() == 0:
        raise ShapeError("bias_activation: 'input' has no dimension; expected one or more.")
    if bias.shape != input.shape[-1:]:
        raise ShapeError(
            f"bias_activation: 'bias' has shape {tuple(bias.shape)}; expected "
            f"{tuple(input.shape[-1:])}, the last dimension of 'input' {tuple(input.shape)}."
        )


def fake(input: Tensor, bias: Tensor, activation: str) -> Tensor:
    return launch.empty_output(input, None, bias)


def save(output: Tensor, input: Tensor, bias: Tensor, activation: str) -> tuple[Any, ...]:
    """The output where the derivative is a function of it, the operands where it is not."""
    derivative_of = activation_named(activation).derivative_of
    from_operands = derivative_of == "preactivation"
    return (
        output if derivative_of == "output" else None,
        input if from_operands else None,
        bias if from_operands else None,
        activation,
        input.dtype,
        bias.dtype,
    )


def _saved(
    output: Tensor | None,
    input: Tensor | None,
    bias: Tensor | None,
    activation: str,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> launch.Saved:
    return launch.Saved(activation, 1.0, output, input, None, bias, input_dtype, None, bias_dtype)


Backward = Callable[[Sequence[bool], Tensor, launch.Saved], launch.Gradients]


def _without_update(
    backward: Backward, needs: Sequence[bool], grad_output: Tensor, saved: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    needs_input, needs_bias = needs
    grads = backward((needs_input, False, needs_bias), grad_output, _saved(*saved))
    return grads[0], grads[2]


def fake_gradient(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    def empty(needs: Sequence[bool], grad: Tensor, kept: launch.Saved) -> launch.Gradients:
        return kept.empty_gradients(needs, grad)

    return _without_update(empty, needs, grad_output, saved)


def _forward_triton(input: Tensor, bias: Tensor, activation: str) -> Tensor:
    return launch.forward_triton(input, None, bias, 1.0, activation)


def _backward_triton(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return _without_update(launch.backward_triton, needs, grad_output, saved)


def _forward_cuda(input: Tensor, bias: Tensor, activation: str) -> Tensor:
    return launch.forward_cuda(CUDA, input, None, bias, 1.0, activation)


def _backward_cuda(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return _without_update(
        lambda *args: launch.backward_cuda(CUDA, *args), needs, grad_output, saved
    )


def _forward_cpp(input: Tensor, bias: Tensor, activation: str) -> Tensor:
    return launch.forward_cpp(CPP, input, None, bias, 1.0, activation)


def _backward_cpp(
    needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    return _without_update(lambda *args: launch.backward_cpp(CPP, *args), needs, grad_output, saved)


def cost(input: Tensor, bias: Tensor, activation: str) -> Cost:
    """Input and bias read once, the output written once."""
    dtype = promoted(input, bias)
    return Cost(
        bytes_behind(input) + bytes_behind(bias),
        input.numel() * dtype.itemsize,
        input.numel() * (1 + activation_named(activation).flops),
        arithmetic_unit(dtype),
    )


def cost_backward(input: Tensor, bias: Tensor, activation: str) -> Cost:
    """Upstream gradient and saved tensors read once, both gradients written once."""
    dtype = promoted(input, bias)
    derivative_of = activation_named(activation).derivative_of
    read = input.numel() * dtype.itemsize
    if derivative_of == "output":
        read *= 2
    elif derivative_of == "preactivation":
        read += bytes_behind(input) + bytes_behind(bias)
    return Cost(
        read,
        input.numel() * input.element_size() + bias.numel() * bias.element_size(),
        input.numel() * (2 + activation_named(activation).flops),
        arithmetic_unit(dtype),
    )


def prefer(input: Tensor, bias: Tensor, activation: str) -> Sequence[str]:
    """CUDA C++ for contiguous inputs; else Triton, whose strided kernel works in square tiles and
    so reads a transposed operand line by line."""
    return ("cuda", "triton", "cpp") if input.is_contiguous() else ("triton", "cuda", "cpp")


_SIZES = (
    (4, 4),
    (256, 256),
    (4096, 128),
    (16384, 256),
    (65536, 512),
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

Make = Callable[[torch.device, torch.dtype, torch.Generator], Inputs]


def _case(
    shape: Sequence[int], activation: str, lay_out: Callable[[Tensor], Tensor] = lambda x: x
) -> Make:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        input = lay_out(torch.randn(tuple(shape), generator=generator).to(device, dtype))
        bias = torch.randn(input.shape[-1:], generator=generator).to(device, dtype)
        return Inputs((input, bias, activation))

    return make


def _cases() -> Iterator[Case]:
    for rows, columns in _SIZES:
        tags = {"bench", "sweep"}
        if rows * columns <= 64 * 64:
            tags.add("tiny")
        if rows * columns >= 2**27:
            tags.add("huge")
        yield Case(f"{rows}x{columns}", _case((rows, columns), "relu"), frozenset(tags))
    boundary = frozenset({"boundary"})
    for rows, columns in _BOUNDARY:
        yield Case(f"boundary_{rows}x{columns}", _case((rows, columns), "relu"), boundary)
    for name in ACTIVATIONS:
        yield Case(f"{name}_37x65", _case((37, 65), name), boundary)
    layouts: dict[str, tuple[Sequence[int], Callable[[Tensor], Tensor]]] = {
        "1d": ((1000,), lambda input: input),
        "transposed": ((65, 34), lambda input: input.t()),
        "expanded": ((65, 34), lambda input: input[:1].expand(65, 34)),
        "offset_rows": ((65, 40), lambda input: input[1:, 3:]),
        "every_other_column": ((17, 66), lambda input: input[:, ::2]),
        "channels_last": (
            (2, 5, 3, 7),
            lambda input: input.movedim(1, -1).contiguous().movedim(-1, 1),
        ),
    }
    for name, (shape, lay_out) in layouts.items():
        yield Case(f"layout_{name}", _case(shape, "relu", lay_out), boundary)


def draw(source: Draw) -> Inputs:
    """Any shape and layout, any activation."""
    leading = [source.size(1, 2, 33) for _ in range(source.choice((1, 0, 2, 3)))]
    columns = source.size(1, 3, 4, 128, 255, 256, 257)
    input = source.tensor(*leading, columns)
    return Inputs((input, source.tensor(columns), source.choice(tuple(ACTIVATIONS))))


def _rewrites() -> Iterator[Rewrite]:
    """Every spelling of every activation; identity is left out, for it is one kernel already."""

    def spelt(act: Callable[[Tensor], Tensor], name: str) -> Iterator[Rewrite]:
        def call(input: Tensor, bias: Tensor) -> Inputs:
            return Inputs((input, bias, name))

        yield Rewrite(lambda input, bias: act(input + bias), call)
        yield Rewrite(lambda input, bias: act(bias + input), call)
        yield Rewrite(lambda input, bias: act(torch.add(input, bias)), call)

    for entry in ACTIVATIONS.values():
        if entry.name != "identity":
            for spelling in entry.spellings:
                yield from spelt(spelling, entry.name)


OP = FusedOp(
    name="fuselab::bias_activation",
    reference=reference,
    implementations={
        "triton": Implementation("cuda", _forward_triton, _backward_triton),
        "cuda": Implementation("cuda", _forward_cuda, _backward_cuda),
        "cpp": Implementation("cpu", _forward_cpp, _backward_cpp),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=tuple(_cases()),
    gradient=Gradient(save, gradient, fake_gradient),
    draw=draw,
    validate=validate,
    fake=fake,
    prefer=prefer,
    rewrites=tuple(_rewrites()),
    dtypes=DTYPES,
)
