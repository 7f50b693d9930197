"""PyTorch's own samples (OpInfo) of the operators it knows, through ours: values and gradients.

An outside oracle: nobody here chose the shapes, strides and values. ``ADAPTERS`` says which of our
operators computes an OpInfo's; another one is one line. float32 and float64: in 16 bits ours round
once where PyTorch rounds at every step, and each operator's own tests hold that to float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab import ops
from fuselab.runtime.fallback import strict

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
from torch.testing._internal.common_methods_invocations import op_db

# Our call for a sample's arguments; None where ours has no such parameter.
Adapter = Callable[..., Callable[[], Tensor] | None]


def same(name: str, *keywords: str) -> Adapter:
    """Our function of the same parameters; of keyword arguments it has ``keywords``."""

    def adapt(*args: Any, **kwargs: Any) -> Callable[[], Tensor] | None:
        known = set(kwargs) <= set(keywords)
        return partial(getattr(ops, name), *args, **kwargs) if known else None

    return adapt


def activation(name: str) -> Adapter:
    """bias_activation with a bias of zeros; a bias wants a dimension."""

    def adapt(input: Tensor, inplace: bool = False) -> Callable[[], Tensor] | None:
        if inplace or input.dim() == 0:
            return None
        return lambda: ops.bias_activation(input, input.new_zeros(input.shape[-1]), name)

    return adapt


def gelu(input: Tensor, approximate: str = "none") -> Callable[[], Tensor] | None:
    return activation("gelu_tanh" if approximate == "tanh" else "gelu")(input)


def leaky_relu(input: Tensor, negative_slope: float = 0.01) -> Callable[[], Tensor] | None:
    return activation("leaky_relu")(input) if negative_slope == 0.01 else None


def addcmul(
    input: Tensor, first: Tensor, second: Tensor, value: float = 1.0
) -> Callable[[], Tensor] | None:
    """input + value * (first * second); ours takes the product whole and broadcasts nothing."""
    update = first * second
    if input.shape != update.shape:
        return None
    return lambda: ops.add_mul_activation(input, update, None, float(value), "identity")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[], Tensor]:
    return lambda: ops.linear_activation(input, weight, bias, "identity")


def embedding(weight: Tensor, ids: Tensor, **options: Any) -> Callable[[], Tensor] | None:
    """One table; ours takes ids of shape (batch, tables). OpInfo gives the weight first."""
    if options:
        return None
    shape = (*ids.shape, weight.shape[1])
    return lambda: ops.embedding_lookup([weight], ids.reshape(-1, 1)).reshape(shape)


def binary_cross_entropy(
    logits: Tensor, target: Tensor, reduction: str = "mean", **weights: Any
) -> Callable[[], Tensor] | None:
    """The last layer with a weight of 1: its input is the logit."""
    if weights or logits.dim() == 0:
        return None
    one, target = logits.new_ones(1, 1), target.unsqueeze(-1)
    call = partial(
        ops.linear_binary_cross_entropy, logits.unsqueeze(-1), one, None, target, reduction
    )
    return (lambda: call().squeeze(-1)) if reduction == "none" else call


# OpInfo's name: our package, and our call.
ADAPTERS: dict[str, tuple[str, Adapter]] = {
    "softmax": ("softmax", same("softmax", "dtype")),
    "log_softmax": ("log_softmax", same("log_softmax", "dtype")),
    "add": ("add", same("add")),
    "square": ("square", same("square")),
    "nn.functional.relu": ("bias_activation", activation("relu")),
    "nn.functional.leaky_relu": ("bias_activation", leaky_relu),
    "nn.functional.gelu": ("bias_activation", gelu),
    "nn.functional.silu": ("bias_activation", activation("silu")),
    "sigmoid": ("bias_activation", activation("sigmoid")),
    "tanh": ("bias_activation", activation("tanh")),
    "addcmul": ("add_mul_activation", addcmul),
    "nn.functional.linear": ("linear_activation", linear),
    "nn.functional.embedding": ("embedding_lookup", embedding),
    "nn.functional.binary_cross_entropy_with_logits": (
        "linear_binary_cross_entropy",
        binary_cross_entropy,
    ),
}
# Of the sample's tensors, the place of one whose gradient ours refuses.
REFUSED = {"nn.functional.binary_cross_entropy_with_logits": 1}
INFOS = [
    pytest.param(info, id=" ".join(filter(None, (info.name, info.variant_test_name))))
    for info in op_db
    if info.name in ADAPTERS
    and info.variant_test_name != "complex"
    and ADAPTERS[info.name][0] in ops.operators()
]


def test_every_adapter_has_its_samples():
    assert set(ADAPTERS) <= {info.name for info in op_db}
    assert len(INFOS) >= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("info", INFOS)
def test_samples(info: Any, dtype: torch.dtype) -> None:
    _, adapt = ADAPTERS[info.name]
    compared = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        args = [sample.input, *sample.args]
        if info.name in REFUSED:
            args[REFUSED[info.name]] = args[REFUSED[info.name]].detach()
        call = adapt(*args, **sample.kwargs)
        if call is None:
            continue
        with strict():
            ours = call()
        theirs = info.op(*args, **sample.kwargs)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        leaves = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
        upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0)).to(theirs)
        with strict():
            gradients = torch.autograd.grad(ours, leaves, upstream)
        for gradient, expected in zip(
            gradients, torch.autograd.grad(theirs, leaves, upstream), strict=True
        ):
            torch.testing.assert_close(gradient, expected, equal_nan=True)
        compared += 1
    assert compared, "no sample of PyTorch's fits the adapter"
