"""The referee's gallery: one fault per operator, each with the check that must catch it.

Every builder takes the device and returns a FusedOp that differs from ``honest`` in one place. Most
of the faults were found in published kernels; the others are ways to look fast or right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Gradient, Inputs
from gallery import honest
from gallery.honest import BLOCK, computed, empty_output, make_op, wide


@dataclass(frozen=True)
class Exhibit:
    """One wrong operator: ``caught_by`` names the check that must fail."""

    build: Callable[[str], FusedOp]
    caught_by: str
    dtype: torch.dtype = torch.float32
    gpu_only: bool = False
    cpu_only: str = ""  # the reason why the fault is none on a GPU
    passes_its_cases: bool = True  # what an ordinary test would have seen

    @property
    def name(self) -> str:
        return self.build.__name__


EXHIBITS: list[Exhibit] = []


def caught_by(
    check: str, exhibits: list[Exhibit] = EXHIBITS, **facts: Any
) -> Callable[[Callable[[str], FusedOp]], Any]:
    def note(build: Callable[[str], FusedOp]) -> Callable[[str], FusedOp]:
        exhibits.append(Exhibit(build, check, **facts))
        return build

    return note


# Memory


@caught_by("written", passes_its_cases=False)
def unwritten_output(device: str) -> FusedOp:
    """A grid too small: ceil(numel / rows) blocks cover a part of the output."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = empty_output(input, bias)
        covered = output.numel() // 2
        flat = computed(input, bias, scale).to(output.dtype).reshape(-1)
        output.view(-1)[:covered] = flat[:covered]
        return output

    return make_op("unwritten_output", device, forward)


@caught_by("written", passes_its_cases=False)
def lucky_memory(device: str) -> FusedOp:
    """Never writes its output: frees a right result and is handed the same memory again."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        right = honest.forward(input, bias, scale)
        shape, dtype = right.shape, right.dtype
        del right
        return torch.empty(shape, dtype=dtype, device=input.device)

    return make_op("lucky_memory", device, forward)


@caught_by("fresh values")
def cached_by_pointer(device: str) -> FusedOp:
    held: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        key = (input.data_ptr(), bias.data_ptr(), input.shape, input.stride(), scale)
        if key not in held:
            held[key] = honest.forward(input, bias, scale)
        return held[key].clone()

    return make_op("cached_by_pointer", device, forward)


@caught_by("fresh values")
def cached_by_fingerprint(device: str) -> FusedOp:
    """Cached by pointer, version counter and first element, as a cautious cheat would."""
    held: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        first = float(input.reshape(-1)[0]) if input.numel() else 0.0
        key = (input.data_ptr(), bias.data_ptr(), input.shape, input._version, first, scale)
        if key not in held:
            held[key] = honest.forward(input, bias, scale)
        return held[key].clone()

    return make_op("cached_by_fingerprint", device, forward)


@caught_by("fresh values")
def result_of_the_previous_call(device: str) -> FusedOp:
    """Works one call behind: returns the last call's output when its shape fits."""
    last: list[Tensor] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        before = last.pop() if last else output
        last.append(output)
        fits = before.shape == output.shape and before.dtype == output.dtype
        return (before if fits else output).clone()

    return make_op("result_of_the_previous_call", device, forward)


@caught_by("fresh outputs")
def one_output_buffer(device: str) -> FusedOp:
    """Writes every result of a shape into one buffer, and returns it."""
    buffers: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = empty_output(input, bias)
        output = buffers.setdefault((output.shape, output.dtype), output)
        return output.detach().copy_(computed(input, bias, scale))

    return make_op("one_output_buffer", device, forward)


@caught_by("inputs unchanged")
def mutated_input(device: str) -> FusedOp:
    """Scales its input in place, unseen by the version counter."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        input.data.mul_(0.5)
        return output

    return make_op("mutated_input", device, forward)


@caught_by("inputs unchanged")
def written_past_the_view(device: str) -> FusedOp:
    """Leaves the elements alone and writes to the memory between them."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        storage = torch.empty(0, dtype=input.dtype, device=input.device)
        storage.set_(input.untyped_storage())
        if input.storage_offset():
            storage[0] = 1.0
        return output

    return make_op("written_past_the_view", device, forward)


@caught_by("inputs unchanged")
def upstream_scaled_in_place(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward(needs, grad_output, *saved)
        grad_output.data.mul_(2.0)
        return grads

    return make_op("upstream_scaled_in_place", device, backward=backward)


@caught_by("backward twice")
def saved_tensor_scaled_in_place(device: str) -> FusedOp:
    def backward(needs: Any, grad_output: Tensor, input: Tensor, bias: Tensor, scale: float) -> Any:
        grads = honest.backward(needs, grad_output, input, bias, scale)
        input.data.mul_(1.5)
        return grads

    return make_op("saved_tensor_scaled_in_place", device, backward=backward)


@caught_by("gradients written")
def gradient_added_to_unwritten_memory(device: str) -> FusedOp:
    """Adds partial sums to a bias gradient that nobody set to zero."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_input, grad_bias = honest.backward(needs, grad_output, *saved)
        if grad_bias is not None:
            grad_bias = torch.empty_like(grad_bias).add_(grad_bias)
        return grad_input, grad_bias

    return make_op("gradient_added_to_unwritten_memory", device, backward=backward)


@caught_by("repeated")
def racy_sum(device: str) -> FusedOp:
    """The last bit depends on who comes first."""
    calls = [0]

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        calls[0] += 1
        return (
            torch.nextafter(output, torch.full_like(output, math.inf)) if calls[0] % 2 else output
        )

    return make_op("racy_sum", device, forward)


@caught_by("global state")
def subnormals_switched_off(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        torch.set_flush_denormal(True)
        return output

    return make_op("subnormals_switched_off", device, forward)


@caught_by("global state")
def random_numbers_consumed(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        torch.rand(1)
        return honest.forward(input, bias, scale)

    return make_op("random_numbers_consumed", device, forward)


# Values


@caught_by("precision", passes_its_cases=False)
def half_precision_inside(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        z = input.half() * scale + bias.half()
        return (z * torch.sigmoid(z)).to(input.dtype)

    return make_op("half_precision_inside", device, forward)


@caught_by("precision", passes_its_cases=False)
def brain_float_inside(device: str) -> FusedOp:
    """bfloat16 keeps the range, so only the digits tell."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        z = input.bfloat16() * scale + bias.bfloat16()
        return (z * torch.sigmoid(z)).to(input.dtype)

    return make_op("brain_float_inside", device, forward)


@caught_by("shapes", dtype=torch.float64)
def single_precision_inside_double(device: str) -> FusedOp:
    """Right to seven digits where sixteen are asked for; float64's bar is not eager's own error."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        wide_enough = output.numel() % BLOCK == 0
        return output if wide_enough else output.float().to(output.dtype)

    return make_op("single_precision_inside_double", device, forward)


@caught_by("shapes")
def only_multiples_of_the_block(device: str) -> FusedOp:
    """numel // BLOCK programs: the tail keeps zeros."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        output.view(-1)[output.numel() // BLOCK * BLOCK :] = 0
        return output

    return make_op("only_multiples_of_the_block", device, forward)


@caught_by("shapes")
def rows_cut_at_a_block(device: str) -> FusedOp:
    """One block a row, 256 wide: what lies beyond is never computed."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        output[..., 256:] = 0
        return output

    return make_op("rows_cut_at_a_block", device, forward)


@caught_by("shapes")
def batch_of_one_squeezed(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(input, bias, scale).squeeze()

    return make_op("batch_of_one_squeezed", device, forward)


@caught_by("shapes")
def empty_refused(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.numel() == 0:
            raise RuntimeError("invalid configuration argument: grid is 0")
        return honest.forward(input, bias, scale)

    return make_op("empty_refused", device, forward)


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """What a kernel reads that ignores strides: the memory behind the first element, in order."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    flat = storage[start : start + tensor.numel()]
    missing = tensor.numel() - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]).view(tensor.shape)


@caught_by("layouts")
def only_contiguous_input(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(as_if_contiguous(input), bias, scale)

    return make_op("only_contiguous_input", device, forward)


@caught_by("layouts")
def last_stride_taken_as_one(device: str) -> FusedOp:
    """Row strides are honoured, so x[:, :n] is right and x.t() is not."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.ndim and input.shape[-1] > 1 and input.stride(-1) != 1:
            input = as_if_contiguous(input)
        return honest.forward(input, bias, scale)

    return make_op("last_stride_taken_as_one", device, forward)


@caught_by("layouts")
def expanded_bias_read_in_full(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return honest.forward(input, as_if_contiguous(bias), scale)

    return make_op("expanded_bias_read_in_full", device, forward)


@caught_by("values")
def nan_swallowed(device: str) -> FusedOp:
    """A maximum that drops NaN."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        kept = torch.fmax(input, torch.full_like(input, -math.inf))
        return honest.forward(torch.where(kept.isinf() & input.isnan(), 0, kept), bias, scale)

    return make_op("nan_swallowed", device, forward)


@caught_by("values")
def infinity_clamped(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        limits = torch.finfo(input.dtype)
        return honest.forward(input.clamp(limits.min, limits.max), bias, scale)

    return make_op("infinity_clamped", device, forward)


@caught_by("values")
def work_skipped_for_zeros(device: str) -> FusedOp:
    """Zeros in, zeros out: a benchmark's inputs may be zeros, a bias need not."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if not bool(input.any()):
            return torch.zeros_like(empty_output(input, bias))
        return honest.forward(input, bias, scale)

    return make_op("work_skipped_for_zeros", device, forward)


@caught_by("values")
def one_row_computed_for_equal_rows(device: str) -> FusedOp:
    """Looks at two elements of a row and takes the row as constant."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if input.ndim and input.shape[-1] > 2 and bool((input[..., 0] == input[..., 1]).all()):
            output[...] = output[..., :1].clone()
        return output

    return make_op("one_row_computed_for_equal_rows", device, forward)


@caught_by("values")
def subnormals_flushed(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return torch.where(output.abs() < torch.finfo(output.dtype).tiny, 0.0, output)

    return make_op("subnormals_flushed", device, forward)


@caught_by("values")
def exponent_overflows(device: str) -> FusedOp:
    """exp(z) / (1 + exp(z)) is inf / inf from 89 on."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        z = wide(input) * scale + wide(bias)
        exponential = torch.exp(z)
        return empty_output(input, bias).copy_(z * (exponential / (1 + exponential)))

    return make_op("exponent_overflows", device, forward)


# Softmax's own


def softmax_reference(input: Tensor) -> Tensor:
    return torch.softmax(input, -1)


def make_softmax(
    name: str, device: str, forward: Callable[..., Any], backward: Callable[..., Any] | None = None
) -> FusedOp:
    def gradient(needs: Sequence[bool], grad_output: Tensor, output: Tensor) -> tuple[Tensor]:
        product = grad_output * output
        return (product - output * product.sum(-1, keepdim=True),)

    gradient.__annotations__ = {
        "needs": Sequence[bool],
        "grad_output": Tensor,
        "output": Tensor,
    }

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.randn(8, 64, generator=generator).to(device, dtype),))

    def draw(draw: Draw) -> Inputs:
        return Inputs((draw.tensor(draw.choice([1, 3, 8]), draw.choice([1, 2, 7, 64, 65, 600])),))

    return make_op(
        name,
        device,
        forward,
        backward,
        Gradient(lambda output, input: (output,), gradient),
        reference=softmax_reference,
        draw=draw,
        cost=lambda input: honest.Cost(1, 1, 1),
        cases=(Case("8x64", make, frozenset({"boundary"})),),
    )


@caught_by("values")
def maximum_before_the_mask(device: str) -> FusedOp:
    """Padded columns are 0 when the row's maximum is taken: a row of -200 sums to 0."""

    def forward(input: Tensor) -> Tensor:
        columns = input.shape[-1]
        padding = (1 << (columns - 1).bit_length()) - columns + (0 if columns == 64 else 1)
        padded = torch.nn.functional.pad(wide(input), (0, padding))
        exponential = torch.exp(padded - padded.amax(-1, keepdim=True))[..., :columns]
        return (exponential / exponential.sum(-1, keepdim=True)).to(input.dtype)

    return make_softmax("maximum_before_the_mask", device, forward)


@caught_by("shapes", dtype=torch.float16, passes_its_cases=False)
def sum_in_sixteen_bits(device: str) -> FusedOp:
    """Adds up a row in the input's own 16 bits, one element after the other."""

    def forward(input: Tensor) -> Tensor:
        exponential = torch.exp(input - input.amax(-1, keepdim=True))
        total = exponential.new_zeros(input.shape[:-1])
        for column in range(input.shape[-1]):
            total = total + exponential[..., column]
        return exponential / total.unsqueeze(-1)

    return make_softmax("sum_in_sixteen_bits", device, forward)


# PyTorch


@caught_by("operator")
def fake_of_another_dtype(device: str) -> FusedOp:
    """Its fake promises float64, so whatever torch.compile plans is wrong."""

    def fake(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return empty_output(input, bias).double()

    return make_op("fake_of_another_dtype", device, fake=fake)


@caught_by("compile", passes_its_cases=True)
def fake_of_a_fixed_size(device: str) -> FusedOp:
    """A size read as a number while tracing: a graph per size."""

    def fake(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        columns = int(input.shape[-1])
        return empty_output(input, bias).view(*input.shape[:-1], columns)

    return make_op("fake_of_a_fixed_size", device, fake=fake)


@caught_by("deterministic mode")
def heedless_of_deterministic_mode(device: str) -> FusedOp:
    """Says that its sums are unordered, and stays so when determinism is asked for."""
    calls = [0]

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        calls[0] += 1
        return (
            torch.nextafter(output, torch.full_like(output, math.inf)) if calls[0] % 2 else output
        )

    return make_op(
        "heedless_of_deterministic_mode", device, forward, nondeterministic="unordered atomics"
    )


@caught_by("deterministic mode")
def another_kernel_in_deterministic_mode(device: str) -> FusedOp:
    """Takes a kernel of its own where determinism is asked for, which repeats its bits: it leaves
    out the last column."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if torch.are_deterministic_algorithms_enabled():
            output[..., -1:] = 0
        return output

    return make_op("another_kernel_in_deterministic_mode", device, forward)


# Streams: only where there is a GPU


@caught_by("stream", gpu_only=True, passes_its_cases=False)
def off_stream_work(device: str) -> FusedOp:
    """Runs on a stream of its own: nobody waits for it, and no event of the caller sees it."""
    own: list[Any] = []

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        own[:] = own or [torch.cuda.Stream(input.device)]
        output = empty_output(input, bias)
        with torch.cuda.stream(own[0]):
            output.copy_(computed(input, bias, scale))
        return output

    return make_op("off_stream_work", device, forward)


@caught_by("stream", gpu_only=True)
def synchronising_launcher(device: str) -> FusedOp:
    """Right on any stream, for it stops the host until the device is idle."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        torch.cuda.synchronize(input.device)
        return output

    return make_op("synchronising_launcher", device, forward)


@caught_by("CUDA graph", gpu_only=True)
def values_read_on_the_host(device: str) -> FusedOp:
    """Decides on the host by looking at the data, which a captured graph cannot repeat."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.numel() and not bool(input.any()):
            return honest.forward(input, bias, scale)
        return honest.forward(input, bias, scale)

    return make_op("values_read_on_the_host", device, forward)


@caught_by("global state", gpu_only=True, passes_its_cases=False)
def stream_left_changed(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        torch.cuda.set_stream(torch.cuda.Stream(input.device))
        return output

    return make_op("stream_left_changed", device, forward)
