"""The activations that fused operators offer, each defined once.

An ``Activation`` carries its PyTorch definition, its pullback (the derivative times an upstream
gradient) and the other ways people write it, which ``fuselab.fuse`` recognises. The device code is
``activations.h`` (CUDA and C++) and ``triton_activations.py``; both compute what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.errors import UnknownNameError

LEAKY_RELU_SLOPE = 0.01
_SQRT_HALF = math.sqrt(0.5)
_INVERSE_SQRT_TWO_PI = 1 / math.sqrt(2 * math.pi)
_SQRT_TWO_OVER_PI = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True)
class Activation:
    """One activation function.

    ``function`` maps a pre-activation to the output. ``pullback(grad, saved)`` returns the gradient
    of the pre-activation; ``derivative_of`` says what ``saved`` is: the ``"output"``, the
    ``"preactivation"`` or ``"nothing"``. ``functor`` is the activation's name in ``activations.h``.
    ``flops`` is the arithmetic per element, in which a transcendental function counts as one.
    ``spellings`` are equivalent PyTorch expressions, the most common one first.
    """

    name: str
    functor: str
    function: Callable[[Tensor], Tensor]
    pullback: Callable[[Tensor, Tensor], Tensor]
    derivative_of: Literal["nothing", "output", "preactivation"]
    flops: int
    spellings: tuple[Callable[[Tensor], Tensor], ...]
    smooth: bool = True


def activation(name: str) -> Activation:
    """Return the activation called ``name``; UnknownNameError lists the known names."""
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        raise UnknownNameError("activation", name, ACTIVATIONS) from None


def pulled_back(
    name: str, grad_output: Tensor, output: Tensor | None, preactivation: Callable[[], Tensor]
) -> Tensor:
    """Return the gradient of the pre-activation, in float32, or in float64 if the upstream gradient
    is. ``output`` is given if the derivative is a function of it; ``preactivation()`` is called if
    the derivative needs it."""
    entry = activation(name)
    arithmetic = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    saved = grad_output
    if output is not None:
        saved = output.to(arithmetic)
    elif entry.derivative_of == "preactivation":
        saved = preactivation().to(arithmetic)
    return entry.pullback(grad_output.to(arithmetic), saved)


def _identity(x: Tensor) -> Tensor:
    return x


# F.gelu is not accurate enough for a float64 reference: 1 + erf and 1 + tanh cancel for negative x,
# and gelu(-9) becomes 0. erfc and the sigmoid keep full relative precision. Second derivatives are
# checked against autograd of these lines, so the sigmoid of gelu_tanh is written as
# exp(-softplus): autograd differentiates torch.sigmoid as y (1 - y), which loses half of its digits
# at x = 6 and is then multiplied by about 500 (x times the squared slope).
def _gelu(x: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        return F.gelu(x)
    return x * (0.5 * torch.erfc(-x * _SQRT_HALF))


def _gelu_tanh(x: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        return F.gelu(x, approximate="tanh")
    return x * _sigmoid_of(2 * _SQRT_TWO_OVER_PI * (x + _GELU_CUBIC * x * x * x))


def _sigmoid_of(x: Tensor) -> Tensor:
    """Return the sigmoid; in float64 one whose derivative by autograd keeps its digits too."""
    if x.dtype != torch.float64:
        return torch.sigmoid(x)
    # Beyond the threshold softplus is the identity: exp(-40) is below float64's rounding of 40.
    return torch.exp(-F.softplus(-x, threshold=40.0))


# A selection, not a product, to agree with eager: where the output is 0, relu's gradient is 0 even
# for an infinite upstream gradient; where the output is NaN, the upstream gradient passes through.
def _relu_pullback(grad: Tensor, output: Tensor) -> Tensor:
    return torch.where(output <= 0, torch.zeros_like(grad), grad)


# The slope is positive, so the output and the pre-activation have the same sign.
def _leaky_relu_pullback(grad: Tensor, output: Tensor) -> Tensor:
    return torch.where(output > 0, grad, grad * LEAKY_RELU_SLOPE)


def _gelu_pullback(grad: Tensor, x: Tensor) -> Tensor:
    distribution = 0.5 * torch.erfc(-x * _SQRT_HALF)
    density = torch.exp(-0.5 * x * x) * _INVERSE_SQRT_TWO_PI
    return grad * (distribution + x * density)


def _gelu_tanh_pullback(grad: Tensor, x: Tensor) -> Tensor:
    # 0.5 (1 + tanh(u)) = sigmoid(2 u), which keeps its relative precision for negative u.
    inner = 2 * _SQRT_TWO_OVER_PI * (x + _GELU_CUBIC * x * x * x)
    slope = 2 * _SQRT_TWO_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
    gate, rest = _sigmoid_of(inner), _sigmoid_of(-inner)
    return grad * (gate + x * gate * rest * slope)


def _silu_pullback(grad: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return grad * gate * (1 + x * torch.sigmoid(-x))


def _sigmoid_pullback(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output * (1 - output)


def _tanh_pullback(grad: Tensor, output: Tensor) -> Tensor:
    return grad * (1 - output * output)


ACTIVATIONS: dict[str, Activation] = {
    entry.name: entry
    for entry in (
        Activation(
            "identity",
            "Identity",
            _identity,
            lambda grad, saved: grad.clone(),
            "nothing",
            0,
            (_identity,),
        ),
        Activation(
            "relu",
            "Relu",
            torch.relu,
            _relu_pullback,
            "output",
            1,
            (
                torch.relu,
                lambda x: x.clamp(min=0),
                lambda x: torch.clamp_min(x, 0),
                lambda x: torch.maximum(x, torch.zeros_like(x)),
                lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
                lambda x: torch.where(x > 0, x, 0.0),
                lambda x: x * (x > 0),
            ),
            smooth=False,
        ),
        Activation(
            "leaky_relu",
            "LeakyRelu",
            F.leaky_relu,
            _leaky_relu_pullback,
            "output",
            2,
            (
                F.leaky_relu,
                lambda x: torch.where(x > 0, x, LEAKY_RELU_SLOPE * x),
                lambda x: torch.where(x > 0, x, x * LEAKY_RELU_SLOPE),
                lambda x: torch.maximum(x, LEAKY_RELU_SLOPE * x),
                lambda x: torch.maximum(x, x * LEAKY_RELU_SLOPE),
            ),
            smooth=False,
        ),
        Activation(
            "gelu",
            "Gelu",
            _gelu,
            _gelu_pullback,
            "preactivation",
            5,
            (
                F.gelu,
                lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
                lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
                lambda x: 0.5 * x * (1 + torch.erf(x * _SQRT_HALF)),
                lambda x: x * 0.5 * (1 + torch.erf(x * _SQRT_HALF)),
                lambda x: x * (0.5 * (1 + torch.erf(x / math.sqrt(2)))),
            ),
        ),
        Activation(
            "gelu_tanh",
            "GeluTanh",
            _gelu_tanh,
            _gelu_tanh_pullback,
            "preactivation",
            9,
            (
                lambda x: F.gelu(x, approximate="tanh"),
                lambda x: 0.5 * x * (1 + torch.tanh(_SQRT_TWO_OVER_PI * (x + 0.044715 * x**3))),
                lambda x: (
                    0.5
                    * x
                    * (1 + torch.tanh(_SQRT_TWO_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0))))
                ),
                lambda x: (
                    0.5 * x * (1 + torch.tanh(_SQRT_TWO_OVER_PI * (x + 0.044715 * x * x * x)))
                ),
                lambda x: (
                    0.5 * x * (1 + torch.tanh(x * _SQRT_TWO_OVER_PI * (1 + 0.044715 * x * x)))
                ),
            ),
        ),
        Activation(
            "silu",
            "Silu",
            F.silu,
            _silu_pullback,
            "preactivation",
            4,
            (
                F.silu,
                lambda x: x * torch.sigmoid(x),
                lambda x: x / (1 + torch.exp(-x)),
            ),
        ),
        Activation(
            "sigmoid",
            "Sigmoid",
            torch.sigmoid,
            _sigmoid_pullback,
            "output",
            3,
            (
                torch.sigmoid,
                lambda x: 1 / (1 + torch.exp(-x)),
            ),
        ),
        Activation(
            "tanh",
            "Tanh",
            torch.tanh,
            _tanh_pullback,
            "output",
            1,
            (
                torch.tanh,
                lambda x: 2 * torch.sigmoid(2 * x) - 1,
            ),
        ),
    )
}


def spellings() -> Iterator[tuple[Callable[[Tensor], Tensor], str]]:
    """Yield every spelling of every activation with the activation's name, but not identity."""
    for entry in ACTIVATIONS.values():
        if entry.name != "identity":
            yield from ((spelling, entry.name) for spelling in entry.spellings)
