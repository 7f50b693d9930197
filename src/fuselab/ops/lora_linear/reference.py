"""act(input Wᵀ + bias + scale (input Aᵀ) Bᵀ) in plain PyTorch: the definition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fuselab.ops._shared import activations
from fuselab.ops._shared.matrices import as_rows


def reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str = "identity",
) -> Tensor:
    """Compute ``activation(input weightᵀ + bias + scale (input lora_aᵀ) lora_bᵀ)``.

    It is a frozen linear layer with the low-rank adapter of Hu et al., "LoRA" (arXiv:2106.09685),
    equation 3.

    Args:
        input: any shape ``(..., K)`` of one dimension or more, float32, float16, bfloat16 or
            float64, any strides.
        weight: ``(N, K)``, as ``nn.Linear`` keeps it; frozen. All tensors have one dtype.
        bias: ``(N,)`` or None; frozen.
        lora_a: ``(r, K)``, any rank r from 1.
        lora_b: ``(N, r)``.
        scale: a number, usually alpha / r. It has no gradient. Under torch.compile one graph
            serves all values once they are dynamic.
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh.

    Returns:
        ``(..., N)``, contiguous, in the dtype of ``input``. Our kernels add both products in one
        float32 accumulator and round once; eager PyTorch rounds both. ``input lora_aᵀ`` is rounded
        to the dtype by all (``cuda`` rounds its multiple by ``scale``). Float32 products are as
        exact as ``torch.backends.cuda.matmul.allow_tf32`` (or
        ``torch.set_float32_matmul_precision``) says.

    Differentiable twice in input, lora_a and lora_b. The backward keeps the operands and, for relu,
    leaky_relu, sigmoid and tanh, the output; it computes ``input lora_aᵀ`` again, and for gelu,
    gelu_tanh and silu the pre-activation. Our kernels sum in an order that does not vary from run
    to run; cuBLAS follows ``torch.use_deterministic_algorithms``.

    Raises:
        DifferentiationError (weight or bias requires a gradient), ShapeError, DtypeError,
        UnknownNameError (activation, implementation), DeviceError, UnsupportedError (an
        implementation asked for by name that cannot run here).
    """
    update = F.linear(F.linear(input, lora_a), lora_b)
    return activations.activation(activation).function(
        F.linear(input, weight, bias) + scale * update
    )


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, lora_a and lora_b, and None for the frozen weight and bias.

    ``output`` is given for the activations whose derivative is a function of it. The pullback is in
    float32 (float64 if the gradient is), the products in the operands' dtype.
    """

    def preactivation() -> Tensor:
        return reference(input, weight, bias, lora_a, lora_b, scale, "identity")

    exact = activations.pulled_back(activation, grad_output, output, preactivation)
    pulled = exact.to(grad_output.dtype)
    grad, rows = as_rows(pulled), as_rows(input)
    needs_input, _, _, needs_a, needs_b = needs
    grad_projection = scale * (grad @ lora_b) if needs_input or needs_a else None
    grad_input = grad_a = grad_b = None
    if grad_projection is not None and needs_input:
        grad_input = (grad @ weight + grad_projection @ lora_a).reshape(input.shape)
    if grad_projection is not None and needs_a:
        grad_a = grad_projection.t() @ rows
    if needs_b:
        grad_b = scale * (grad.t() @ F.linear(rows, lora_a))
    return grad_input, None, None, grad_a, grad_b


def in_place(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str = "identity",
) -> Tensor:
    """Compute the layer as an expert writes it: cuBLAS adds the update to the product, which saves
    two passes over the output. It is the benchmark's peer."""
    total = as_rows(F.linear(input, weight, bias))
    total = total.addmm_(as_rows(F.linear(input, lora_a)), lora_b.t(), alpha=scale)
    shape = (*input.shape[:-1], weight.shape[0])
    return activations.activation(activation).function(total.view(shape))
