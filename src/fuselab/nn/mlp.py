"""A multilayer perceptron whose linear layers and activations run as one kernel each, or all as
one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentTypeError, OperandError
from fuselab.nn.plain_module import is_plain
from fuselab.ops._shared.activations import LEAKY_RELU_SLOPE, activation
from fuselab.ops.linear_activation import linear_activation
from fuselab.ops.linear_sigmoid import linear_sigmoid
from fuselab.ops.mlp import mlp

_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(LEAKY_RELU_SLOPE),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}
_NAMES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}


class MLP(nn.Sequential):
    """Linear layers with activations between them, in fused calls.

    It is the ``nn.Sequential`` of ``nn.Linear`` and ``nn.ReLU`` (or another) that it replaces, with
    the same children, parameters and state_dict keys (``0.weight``, ``0.bias``, ``2.weight``, ...).

    Every pair of a linear layer and an activation after it is one call of ``linear_activation``, or
    of ``linear_sigmoid`` if the activation is sigmoid and the layer has one output. A child that is
    neither, that has hooks or whose ``forward`` was replaced runs as it is. On a GPU without
    gradients, all layers are one call of ``mlp`` if all are pairs (the last layer needs no
    activation), all but the last have the same activation, and either all or none have a bias. No
    gradient is needed under ``torch.inference_mode()`` or ``torch.no_grad()``; ``eval()`` alone
    still keeps what a backward would need.

    Args:
        sizes: widths from the input's to the output's, ``(13, 512, 256, 64)``; at least two.
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh, after every layer but the last.
        last_activation: after the last layer; identity adds no child.
        bias: whether the layers have one.
        device, dtype: of the parameters, which start as ``nn.Linear``'s.

    Shapes: input ``(..., sizes[0])``, output ``(..., sizes[-1])``.

    Raises:
        ArgumentError: sizes.
        UnknownNameError: activation, last_activation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        last_activation: str = "identity",
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if (
            not isinstance(sizes, Sequence)
            or len(sizes) < 2
            or not all(isinstance(size, Integral) and size >= 1 for size in sizes)
        ):
            raise OperandError(
                f"MLP: 'sizes' is {sizes!r}; expected two widths or more, each at least 1."
            )
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers.append(nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype))
            layers.append(_layer(activation))
        layers[-1:] = [] if last_activation == "identity" else [_layer(last_activation)]
        super().__init__(*layers)

    @classmethod
    def from_sequential(cls, module: nn.Sequential) -> MLP:
        """Return an MLP over the children of ``module``, and so its parameters; ``module`` is
        unchanged.

        Raises ArgumentError for anything but an ``nn.Sequential`` with its own forward.
        """
        if not isinstance(module, nn.Sequential) or (
            type(module).forward not in (nn.Sequential.forward, cls.forward)
            or "forward" in vars(module)
        ):
            raise ArgumentTypeError(
                f"MLP.from_sequential: 'module' is {type(module).__qualname__}; expected an "
                "nn.Sequential whose forward is nn.Sequential's."
            )
        made = cls.__new__(cls)
        for name, value in vars(module).items():
            made.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
        return made

    def __getitem__(self, index: int | slice) -> Any:
        """Return a child, or an MLP of several for a slice."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        # nn.Sequential would pass them to this class's __init__.
        named = list(self._modules.items())[index]
        return type(self).from_sequential(nn.Sequential(OrderedDict(named)))

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        if input.is_cuda and not self._wants_gradient(input):
            whole = _whole(layers)
            if whole is not None and input.dtype == whole[0][0].dtype:
                return mlp(input, *whole)
        place = 0
        while place < len(layers):
            layer = layers[place]
            following = layers[place + 1] if place + 1 < len(layers) else None
            name = None if following is None else _activation_of(following)
            if type(layer) is nn.Linear and name is not None and is_plain(layer):
                if name == "sigmoid" and layer.out_features == 1:
                    input = linear_sigmoid(input, layer.weight, layer.bias)
                else:
                    input = linear_activation(input, layer.weight, layer.bias, name)
                place += 2
            else:
                input = layer(input)
                place += 1
        return input

    def _wants_gradient(self, input: Tensor) -> bool:
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (input, *self.parameters())
        )


def _whole(
    layers: Sequence[nn.Module],
) -> tuple[list[Tensor], list[Tensor], str, str] | None:
    """Return the arguments of one ``mlp`` call for all layers (weights, biases and two
    activations), or None if there is none."""
    names: list[str] = []
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if type(layer) is nn.Linear and is_plain(layer) and len(names) == len(weights):
            weights.append(layer.weight)
            if (bias := layer.bias) is not None:  # reading a module's attribute takes 0.5 us
                biases.append(bias)
        elif len(names) < len(weights) and (name := _activation_of(layer)) is not None:
            names.append(name)
        else:
            return None
    if not weights:
        return None
    if len(names) < len(weights):
        names.append("identity")
    if len({*names[:-1]}) > 1 or len(biases) not in (0, len(weights)):
        return None
    if {tensor.dtype for tensor in (*weights, *biases)} != {weights[0].dtype}:
        return None
    return weights, biases, names[0], names[-1]


def _layer(name: str) -> nn.Module:
    """Return the module of an activation. Raises UnknownNameError."""
    return _LAYERS[activation(name).name]()


def _activation_of(layer: nn.Module) -> str | None:
    """Return the name of the activation by which a fused call can replace the module, or None."""
    if not is_plain(layer):
        return None
    if type(layer) is nn.GELU:
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu"
    if type(layer) is nn.LeakyReLU:
        return "leaky_relu" if layer.negative_slope == LEAKY_RELU_SLOPE else None
    return _NAMES.get(type(layer))
