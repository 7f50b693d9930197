"""The gallery's faults that show only in some calls: the two-thousandth, another thread's, one
without gradients."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuselab.op import FusedOp
from gallery import honest, wrong
from gallery.honest import make_op
from gallery.wrong import Exhibit

EXHIBITS: list[Exhibit] = []
caught_by = functools.partial(wrong.caught_by, exhibits=EXHIBITS)


@caught_by("many calls")
def race_of_one_in_three_hundred(device: str) -> FusedOp:
    """Rarely reads an element before it is written; here every 300th call does."""
    count = itertools.count(1)

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        if next(count) % 300 == 0 and output.numel():
            output.view(-1)[-1] = torch.nextafter(output.view(-1)[-1], output.new_tensor(math.inf))
        return output

    return make_op("race_of_one_in_three_hundred", device, forward)


@caught_by("many calls")
def stale_every_two_thousandth_call(device: str) -> FusedOp:
    """Returns the result before the last one where nobody looks that long."""
    count, last = itertools.count(1), {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        before = last.get((output.shape, output.dtype), output)
        last[output.shape, output.dtype] = output.clone()
        return before.clone() if next(count) % 2000 == 0 else output

    return make_op("stale_every_two_thousandth_call", device, forward)


@caught_by("many calls")
def gradient_races(device: str) -> FusedOp:
    """The backward drops the last row's share of the bias gradient in one call of 700."""
    count = itertools.count(1)

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_input, grad_bias = honest.backward(needs, grad_output, *saved)
        if next(count) % 700 == 0 and grad_bias is not None:
            grad_bias = grad_bias * 0.5
        return grad_input, grad_bias

    return make_op("gradient_races", device, backward=backward)


@caught_by("many calls")
def unordered_beyond_rounding(device: str) -> FusedOp:
    """Declares that its order is not fixed, and is now and then off by more than any order."""
    count = itertools.count(1)

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output * 1.001 if next(count) % 900 == 0 else output

    return make_op(
        "unordered_beyond_rounding", device, forward, nondeterministic="unordered atomics"
    )


@caught_by("several threads")
def scratch_of_all_threads(device: str) -> FusedOp:
    """Computes in a buffer that belongs to the module, so that two threads share it."""
    buffers: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        z = honest.computed(input, bias, scale)
        scratch = buffers.setdefault((z.shape, z.dtype), torch.empty_like(z))
        scratch.detach().copy_(z)
        time.sleep(0)
        return scratch.to(torch.promote_types(input.dtype, bias.dtype), copy=True)

    return make_op("scratch_of_all_threads", device, forward)


@caught_by("several threads")
def scratch_of_two_threads(device: str) -> FusedOp:
    """Has scratch for two calls at a time, which a third one shares with the first."""
    free = [0]

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        free[0] += 1
        try:
            time.sleep(0)
            output = honest.forward(input, bias, scale)
            return output if free[0] < 3 else torch.zeros_like(output)
        finally:
            free[0] -= 1

    return make_op("scratch_of_two_threads", device, forward)


@caught_by("several large threads")
def large_scratch_of_all_threads(device: str) -> FusedOp:
    """Shares its scratch among threads for large inputs only, for which it allocates none."""
    buffers: dict[Any, Tensor] = {}

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        z = honest.computed(input, bias, scale)
        if z.numel() < 1 << 17:
            return z.to(torch.promote_types(input.dtype, bias.dtype))
        scratch = buffers.setdefault((z.shape, z.dtype), torch.empty_like(z))
        scratch.detach().copy_(z)
        time.sleep(0.001)
        return scratch.to(torch.promote_types(input.dtype, bias.dtype), copy=True)

    return make_op("large_scratch_of_all_threads", device, forward)


@caught_by("several threads")
def right_in_the_first_thread_only(device: str) -> FusedOp:
    """Sets up its thread where it is imported; another thread finds nothing."""
    local = threading.local()
    local.ready = True

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output if getattr(local, "ready", False) else torch.zeros_like(output)

    return make_op("right_in_the_first_thread_only", device, forward)


@caught_by("several threads", cpu_only="autograd runs all backwards of a GPU in one thread")
def backward_scratch_of_all_threads(device: str) -> FusedOp:
    buffers: dict[Any, Tensor] = {}

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grads = honest.backward(needs, grad_output, *saved)
        if grads[1] is None:
            return grads
        key = grads[1].shape, grads[1].dtype
        scratch = buffers.setdefault(key, torch.empty_like(grads[1]))
        scratch.detach().copy_(grads[1])
        time.sleep(0)
        return grads[0], scratch.clone()

    return make_op("backward_scratch_of_all_threads", device, backward=backward)


@caught_by("modes")
def coarse_in_inference_mode(device: str) -> FusedOp:
    """Rounds to half precision where no gradient can follow: nobody trains on it."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.bfloat16().to(output.dtype) if torch.is_inference_mode_enabled() else output

    return make_op("coarse_in_inference_mode", device, forward)


@caught_by("modes")
def refuses_inference_mode(device: str) -> FusedOp:
    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if input.is_inference():
            raise RuntimeError("Inference tensors do not track version counter.")
        return honest.forward(input, bias, scale)

    return make_op("refuses_inference_mode", device, forward)


@caught_by("modes")
def skips_the_bias_without_gradients(device: str) -> FusedOp:
    """Tells evaluation by grad mode, as a function with batch statistics might."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        in_evaluation = input.requires_grad and not torch.is_grad_enabled()
        return honest.forward(input, torch.zeros_like(bias) if in_evaluation else bias, scale)

    return make_op("skips_the_bias_without_gradients", device, forward)


@caught_by("backward twice")
def third_backward_is_wrong(device: str) -> FusedOp:
    """Its saved values are right for two passes, which is what most tests make."""
    passes: dict[Any, int] = {}

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        key = grad_output.data_ptr()
        passes[key] = passes.get(key, 0) + 1
        grads = honest.backward(needs, grad_output, *saved)
        again = passes[key] > 2
        return tuple(grad if grad is None or not again else grad * 2 for grad in grads)

    return make_op("third_backward_is_wrong", device, backward=backward)


@caught_by("backward twice")
def kept_for_the_backward_by_its_input(device: str) -> FusedOp:
    """Keeps a pre-activation of the last forward for the backward, under the address of its input
    alone: the projections of one layer have one input and other weights."""
    last: dict[str, Any] = {}

    def key_of(input: Tensor) -> tuple[Any, ...]:
        return input.data_ptr(), input.shape, input.stride(), input.dtype

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        last.update(key=key_of(input), bias=bias.detach().clone())
        return honest.forward(input, bias, scale)

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        input, bias, scale = saved
        if last.get("key") == key_of(input) and last["bias"].shape == bias.shape:
            bias = last["bias"]
        return honest.backward(needs, grad_output, input, bias, scale)

    return make_op("kept_for_the_backward_by_its_input", device, forward, backward)


@caught_by("backward twice")
def third_backward_is_wrong_by_chance(device: str) -> FusedOp:
    """The same under the name of an order that is not fixed."""
    op = third_backward_is_wrong(device)
    return replace(
        op, name="gallery::third_backward_is_wrong_by_chance", nondeterministic="atomics"
    )


@caught_by("thread counts", cpu_only="its threads are the CPU's")
def wrong_with_three_threads(device: str) -> FusedOp:
    """Gives each thread the same number of elements, and forgets what is left."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        threads = torch.get_num_threads()
        if threads == 3:
            output.view(-1)[output.numel() // threads * threads :] = 0
        return output

    return make_op("wrong_with_three_threads", device, forward)


@caught_by("modes")
def follows_the_default_dtype(device: str) -> FusedOp:
    """Names no dtype for what it computes in, as code that was tried in float32 alone."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = torch.empty(honest.empty_output(input, bias).shape, device=device)
        return output.copy_(honest.computed(input, bias, scale))

    return make_op("follows_the_default_dtype", device, forward)


def zeros_where(name: str, device: str, is_on: Callable[[], bool], backward: bool) -> FusedOp:
    """Return the honest operator, whose forward or ``backward`` gives zeros while ``is_on()``."""

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        output = honest.forward(input, bias, scale)
        return torch.zeros_like(output) if is_on() and not backward else output

    def gradients(*args: Any) -> Any:
        grads = honest.backward(*args)
        return tuple(
            torch.zeros_like(grad) if grad is not None and is_on() and backward else grad
            for grad in grads
        )

    return make_op(name, device, forward, gradients)


@caught_by("modes")
def wrong_without_a_collector(device: str) -> FusedOp:
    """Frees its scratch by a cycle that the garbage collector breaks, as training loops that
    collect by hand never let it."""
    is_on = lambda: not gc.isenabled()  # noqa: E731
    return zeros_where("wrong_without_a_collector", device, is_on, backward=False)


@caught_by("modes")
def backward_wrong_without_a_collector(device: str) -> FusedOp:
    is_on = lambda: not gc.isenabled()  # noqa: E731
    return zeros_where("backward_wrong_without_a_collector", device, is_on, backward=True)


@caught_by("modes")
def wrong_under_a_profiler(device: str) -> FusedOp:
    """Runs another kernel while it is watched, which its author never looked at."""
    is_on = torch.autograd._profiler_enabled
    return zeros_where("wrong_under_a_profiler", device, is_on, backward=False)


@caught_by("modes")
def wrong_where_it_is_traced(device: str) -> FusedOp:
    """Looks for a debugger, or a measure of coverage."""
    is_on = lambda: sys.gettrace() is not None  # noqa: E731
    return zeros_where("wrong_where_it_is_traced", device, is_on, backward=False)


@caught_by("modes")
def backward_wrong_in_anomaly_mode(device: str) -> FusedOp:
    is_on = torch.is_anomaly_enabled
    return zeros_where("backward_wrong_in_anomaly_mode", device, is_on, backward=True)


@caught_by("modes")
def backward_follows_the_default_dtype(device: str) -> FusedOp:
    """Names no dtype for a factor of the gradient, which float64 as the default makes double."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        factor = 1.0 if torch.get_default_dtype() == torch.float32 else 2.0
        return honest.backward(needs, grad_output * factor, *saved)

    return make_op("backward_follows_the_default_dtype", device, backward=backward)


@caught_by("thread counts", cpu_only="its threads are the CPU's")
def backward_wrong_with_three_threads(device: str) -> FusedOp:
    """Gives each thread the same number of elements of the gradient, and forgets what is left."""

    def backward(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
        threads = torch.get_num_threads()
        if threads == 3:
            grad_output.view(-1)[grad_output.numel() // threads * threads :] = 0
        return honest.backward(needs, grad_output, *saved)

    return make_op("backward_wrong_with_three_threads", device, backward=backward)
