"""A second CUDA stream for what the next kernel does not wait for.

In a step of small batches most kernels leave most of the GPU idle. The gradients of weights and
biases, the loss itself, the look-up and its update are off the chain of products that forward and
backward are; on a stream of their own they run beside it, in a CUDA graph as branches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuselab.ops import linear_activation, linear_binary_cross_entropy


class Branch:
    """Work beside the current stream, from ``beside`` to the next ``join``."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.used: list[Tensor] = []

    @contextlib.contextmanager
    def beside(self, *used: Tensor) -> Iterator[None]:
        """Work of the block begins behind what is enqueued so far. ``used`` are tensors of the
        current stream that it reads: their memory is handed out again after the join only."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.used.extend(used)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """The current stream goes on behind the branch."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.used.clear()


def branch_of(device: torch.device, batch_size: int) -> Branch | None:
    """A branch where a pass over so many rows leaves enough of the GPU idle for one, else None.

    us a training step of DLRM's main configuration in bfloat16, without and with a branch, on an
    H200 (torch 2.11, 2026-11-21): 110.7 and 87.2 of 128 rows, 147.2 and 133.5 of 2048, 1089 and
    1134 of 65536; outer 1783 and 1763 of 2048. Between 2048 and 65536 nothing was timed.
    """
    return Branch(device) if device.type == "cuda" and batch_size <= 8192 else None


def beside(branch: Branch | None, *used: Tensor) -> contextlib.AbstractContextManager[None]:
    """``branch.beside``; without a branch the block runs where it stands."""
    return contextlib.nullcontext() if branch is None else branch.beside(*used)


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor, branch: Branch) -> Tensor:
    """``linear_activation`` with relu, whose backward forms the gradients of weight and bias on the
    branch; join it before they are used. The mask is applied twice, once on either stream."""
    output: Tensor = _LinearRelu.apply(input, weight, bias, branch)
    return output


class _LinearRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, branch: Branch) -> Tensor:
        output = linear_activation(input, weight, bias, "relu")
        ctx.save_for_backward(output, input, weight)
        ctx.branch = branch
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, input, weight = ctx.saved_tensors

        def gradients(*needs: bool) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.fuselab.linear_activation_backward(
                list(needs), grad, output, input, weight, None, "relu", "auto"
            )
            return found

        if not ctx.needs_input_grad[0]:  # the last of the chain: nothing is left to run beside it
            return None, *gradients(False, True, True)[1:], None
        with ctx.branch.beside(grad, output, input):
            _, of_weight, of_bias = gradients(False, True, True)
        return gradients(True, False, False)[0], of_weight, of_bias, None


def linear_loss(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, branch: Branch, implementation: str
) -> Tensor:
    """``linear_binary_cross_entropy`` on the branch, the loss as well as the gradients of weight
    and bias; join it before they are used. The chain goes on with the input's gradient, which forms
    the logit again: it waits for none of 4 launches, 2 of the loss and 2 of sums."""
    loss: Tensor = _LinearLoss.apply(input, weight, bias, target, branch, implementation)
    return loss


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        target: Tensor,
        branch: Branch,
        implementation: str,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias, target)
        ctx.branch, ctx.implementation = branch, implementation
        with branch.beside(input, target):
            return linear_binary_cross_entropy(
                input, weight, bias, target, implementation=implementation
            )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target = ctx.saved_tensors

        def gradients(*needs: bool) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = torch.ops.fuselab.linear_binary_cross_entropy_backward(
                [*needs, False], grad, input, weight, bias, target, "mean", ctx.implementation
            )
            return found

        with ctx.branch.beside(grad, input, target):
            _, of_weight, of_bias, _ = gradients(False, True, True)
        return gradients(True, False, False)[0], of_weight, of_bias, None, None, None
