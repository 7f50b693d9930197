"""A second CUDA stream for work that the next kernel does not wait for.

In a step of small batches most kernels leave most of the GPU idle. The gradients of weights and
biases, the loss itself, the look-up and its update do not belong to the chain of products in
forward and backward. On their own stream they run beside it, in a CUDA graph as branches.
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
        """Run the block on the branch, after all work enqueued so far.

        ``used`` are tensors of the current stream that the block reads; they are kept alive until
        the join, so that their memory is not reused before.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.used.extend(used)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.used.clear()


def branch_of(device: torch.device, batch_size: int) -> Branch | None:
    """Return a branch if a pass over ``batch_size`` rows leaves enough of the GPU idle, else None.

    On an H200 with torch 2.11, a training step of DLRM's main configuration in bfloat16 took,
    without and with a branch, 110.7 and 87.2 us at 128 rows, 147.2 and 133.5 us at 2048, 1089 and
    1134 us at 65536; with the outer interaction 1783 and 1763 us at 2048. No size between 2048 and
    65536 was timed.
    """
    return Branch(device) if device.type == "cuda" and batch_size <= 8192 else None


def beside(branch: Branch | None, *used: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return ``branch.beside(*used)``; without a branch the block runs on the current stream."""
    return contextlib.nullcontext() if branch is None else branch.beside(*used)


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor, branch: Branch) -> Tensor:
    """Compute ``linear_activation`` with relu; its backward runs partly on the branch.

    The gradients of weight and bias are computed on the branch, so join it before they are used.
    The mask is applied twice, once on each stream.
    """
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

        # the last layer of the chain, with nothing left to run beside it
        if not ctx.needs_input_grad[0]:
            return None, *gradients(False, True, True)[1:], None
        with ctx.branch.beside(grad, output, input):
            _, of_weight, of_bias = gradients(False, True, True)
        return gradients(True, False, False)[0], of_weight, of_bias, None


def linear_loss(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, branch: Branch, implementation: str
) -> Tensor:
    """Compute ``linear_binary_cross_entropy`` on the branch.

    The loss and the gradients of weight and bias are computed there, so join it before they are
    used. The chain continues with the input's gradient, which computes the logit again; it then
    need not wait for 4 launches, 2 of the loss and 2 of sums.
    """
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
