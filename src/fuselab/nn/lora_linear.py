"""A frozen linear layer with a low-rank adapter that trains, in one fused operator.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685). Checkpoints of
the peft library are read and written by ``fuselab.nn.peft_checkpoint``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import (
    ArgumentError,
    ArgumentTypeError,
    DifferentiationError,
    DtypeError,
    OperandError,
    ShapeError,
)
from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops.linear_activation import linear_activation
from fuselab.ops.lora_linear import lora_linear


def _is_rank(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


class LoRALinear(nn.Module):
    """``activation(x Wᵀ + bias + alpha / rank (x Aᵀ) Bᵀ)``: an ``nn.Linear``, adapted.

    Attributes:
        weight, bias: (N, K), and (N,) or None: the layer's own parameters, frozen.
        lora_a, lora_b: (rank, K) and (N, rank), the parameters that train, in the dtype and on the
            device of ``weight``.
        merged_weight: (N, K) while merged, else None; a buffer that is not saved.

    Its state_dict is that of ``nn.Linear`` and the adapter. A state_dict without the adapter, as
    the layer had before it was wrapped, loads too and leaves the adapter as it is.
    """

    weight: Tensor
    bias: Tensor | None
    merged_weight: Tensor | None

    def __init__(
        self, linear: nn.Linear | LoRALinear, rank: int, alpha: float, activation: str = "identity"
    ) -> None:
        """Wrap ``linear`` with a new adapter, which changes nothing until it is trained.

        Args:
            linear: its parameters are frozen and shared, not copied.
            rank: of the update, an int from 1.
            alpha: the update is scaled by alpha / rank; finite.
            activation: applied after the layer and computed with it: identity, relu, leaky_relu
                (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or tanh.

        Raises:
            ArgumentError: rank or alpha is invalid, ``linear`` is not a linear layer, or its weight
                does not exist yet or is computed from other parameters.
            DtypeError: the weight is not floating.
            UnknownNameError: no such activation.
        """
        super().__init__()
        if not _is_rank(rank):
            raise ArgumentError(f"LoRALinear: 'rank' is {rank!r}; expected an int, 1 or more.")
        if not is_finite(alpha):
            raise ArgumentError(f"LoRALinear: 'alpha' is {alpha!r}; expected a finite number.")
        is_linear = isinstance(linear, (nn.Linear, LoRALinear))
        if not is_linear or isinstance(linear, nn.LazyLinear):
            raise ArgumentTypeError(
                f"LoRALinear: 'linear' is {type(linear).__name__}; expected an nn.Linear."
            )
        if not isinstance(linear.weight, nn.Parameter):
            raise ArgumentError(
                "LoRALinear: the weight of 'linear' is no parameter but computed from some; remove "
                "its parametrization first (torch.nn.utils.parametrize.remove_parametrizations)."
            )
        if not linear.weight.is_floating_point():
            raise DtypeError(
                f"LoRALinear: the weight of 'linear' is {linear.weight.dtype}; expected a floating "
                "dtype."
            )
        activation_named(activation)
        self.out_features, self.in_features = linear.weight.shape
        self.rank, self.activation = int(rank), activation
        self.alpha = alpha if isinstance(alpha, int) else float(alpha)
        self.weight, self.bias = linear.weight, linear.bias
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.lora_a = nn.Parameter(self.weight.new_empty(self.rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.out_features, self.rank))
        self.register_buffer("merged_weight", None, persistent=False)
        self.reset_adapter()
        self.train(linear.training)

    @classmethod
    def wrap(
        cls, linear: nn.Linear, rank: int, alpha: float, activation: str = "identity"
    ) -> LoRALinear:
        """Return ``LoRALinear(linear, rank, alpha, activation)`` for a layer without an adapter.

        Raises ArgumentError for a layer with an adapter, which the constructor would drop.
        """
        if isinstance(linear, LoRALinear):
            raise ArgumentError(
                "LoRALinear.wrap: 'linear' has an adapter; go on with that one, or begin anew by "
                "its reset_adapter()."
            )
        return cls(linear, rank, alpha, activation)

    @property
    def scale(self) -> float:
        """The factor of the update."""
        return self.alpha / self.rank

    def reset_adapter(self) -> None:
        """Draw A as ``nn.Linear`` draws its weight, and set B to zero: no update, as peft
        begins."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., K) to (..., N); while merged, this is one linear layer.

        Raises DifferentiationError if merged, in training mode and with gradients enabled, because
        the adapter would not train.
        """
        if self.merged_weight is None:
            return lora_linear(
                input,
                self.weight,
                self.bias,
                self.lora_a,
                self.lora_b,
                self.scale,
                self.activation,
            )
        if self.training and torch.is_grad_enabled():
            raise DifferentiationError(
                "LoRALinear: a merged adapter does not train; call unmerge(), or eval() to infer."
            )
        return linear_activation(input, self.merged_weight, self.bias, self.activation)

    @property
    def merged(self) -> bool:
        """Whether ``forward`` uses the merged weight."""
        return self.merged_weight is not None

    # not an inference tensor, because a backward may go through it to the input
    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self) -> None:
        """Use W + alpha / rank B A, rounded once to the weight's dtype, until ``unmerge``.

        ``weight`` stays as it is, so ``unmerge`` restores every bit; while merged, a second weight
        takes memory. Changes to the adapter need another merge.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        update = self.scale * (self.lora_b.to(dtype) @ self.lora_a.to(dtype))
        self.merged_weight = (self.weight.to(dtype) + update).to(self.weight.dtype)

    def unmerge(self) -> None:
        """Use the layer and its adapter separately again."""
        self.merged_weight = None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, alpha={self.alpha}, "
            f"activation={self.activation!r}, merged={self.merged}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        adapter = {f"{prefix}lora_a", f"{prefix}lora_b"}
        if f"{prefix}weight" in state_dict and adapter.isdisjoint(state_dict):
            own = {f"{prefix}lora_a": self.lora_a, f"{prefix}lora_b": self.lora_b}
            state_dict = {**state_dict, **own}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.merged:
            self.merge()


def add_adapters(
    model: nn.Module, target_modules: str | Sequence[str], rank: int, alpha: float
) -> nn.Module:
    """Wrap the linear layers of ``model`` that a pattern names, and freeze all but adapters.

    Args:
        model: changed in place and returned. A layer under several names stays one.
        target_modules: as in peft, a regular expression that a layer's whole dotted name matches,
            or names, each a layer's whole name or the end of it after a dot.
        rank, alpha: as for ``LoRALinear.wrap``.

    Raises:
        ArgumentError: the pattern is invalid, or names no layer, or names a subclass of
            ``nn.Linear``, whose owner may read its weight without calling it
            (``nn.MultiheadAttention`` does). The model is then unchanged.
    """
    is_named = _matcher(target_modules)
    names = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name and isinstance(module, nn.Linear) and is_named(name)
    ]
    if not names:
        raise ArgumentError(
            f"add_adapters: 'target_modules' {target_modules!r} names no nn.Linear inside the "
            "model; named_modules() lists the names, and LoRALinear.wrap takes a single layer."
        )
    linears: dict[str, nn.Linear] = {}
    for name in names:
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear:
            raise ArgumentError(
                f"add_adapters: '{name}' is a {type(linear).__name__}, not an nn.Linear; name the "
                "others, and replace this one by LoRALinear.wrap where its owner calls it."
            )
        linears[name] = linear
    layers = {
        linear: LoRALinear.wrap(linear, rank, alpha) for linear in dict.fromkeys(linears.values())
    }
    for name, linear in linears.items():
        replace_layer(model, name, layers[linear])
    freeze_all_but_adapters(model)
    return model


def replace_layer(model: nn.Module, name: str, layer: LoRALinear) -> None:
    """Put ``layer`` at the dotted ``name`` of ``model``."""
    owner_name, _, attribute = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    setattr(owner, attribute, layer)
    if isinstance(owner, nn.TransformerEncoderLayer):
        # Its inference path reads linear1.weight itself; without this flag it calls the layers.
        owner.activation_relu_or_gelu = 0


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Freeze all parameters except those of adapters."""
    adapters = {
        parameter
        for layer in model.modules()
        if isinstance(layer, LoRALinear)
        for parameter in (layer.lora_a, layer.lora_b)
    }
    for parameter in model.parameters():
        if parameter not in adapters:
            parameter.requires_grad_(False)


def _matcher(target_modules: str | Sequence[str]) -> Callable[[str], bool]:
    """Return a function that says whether a dotted name matches. Raises ArgumentError."""
    if not isinstance(target_modules, str | Iterable):
        raise ArgumentTypeError(
            f"add_adapters: 'target_modules' is {target_modules!r}; expected a regular expression "
            "or a list of names."
        )
    if not isinstance(target_modules, str):
        ends = tuple(f".{target}" for target in target_modules)
        return lambda name: f".{name}".endswith(ends)
    try:
        pattern = re.compile(target_modules)
    except re.error as error:
        raise ArgumentError(
            f"add_adapters: 'target_modules' {target_modules!r} is no regular expression: {error}."
        ) from error
    return lambda name: pattern.fullmatch(name) is not None


@dataclass(frozen=True)
class AdapterFit:
    """An adapter ``lora_a`` (rank, K) and ``lora_b`` (N, rank), with the error of every rank.

    ``error_per_rank[r]`` is the relative error in the Frobenius norm of the best update of rank r,
    for r from 0 to min(N, K); float64. All are 0 for a difference of 0.
    """

    lora_a: Tensor
    lora_b: Tensor
    error_per_rank: Tensor


@torch.no_grad()
def adapters_from_difference(
    weight_difference: Tensor, rank: int, scale: float = 1.0
) -> AdapterFit:
    """Return the adapter whose update, scale B A, is nearest to a difference of two weights.

    It is the truncated singular value decomposition, by the theorem of Eckart and Young; the
    singular values are split equally between A and B.

    Args:
        weight_difference: (N, K), fine-tuned minus original, floating; decomposed in float32, or in
            float64 if it is float64.
        rank: 1 to min(N, K).
        scale: the layer's alpha / rank, not 0.

    Raises:
        DtypeError: not floating.
        ShapeError: not a matrix.
        ArgumentError: rank or scale out of range, or values not finite.
    """
    if not weight_difference.is_floating_point():
        raise DtypeError(
            f"adapters_from_difference: 'weight_difference' is {weight_difference.dtype}; expected "
            "a floating dtype."
        )
    if weight_difference.dim() != 2:
        raise ShapeError(
            f"adapters_from_difference: 'weight_difference' has shape "
            f"{tuple(weight_difference.shape)}; expected (N, K)."
        )
    full_rank = min(weight_difference.shape)
    if not _is_rank(rank) or rank > full_rank:
        raise ArgumentError(
            f"adapters_from_difference: 'rank' is {rank!r}; expected 1 to {full_rank} for a "
            f"difference of shape {tuple(weight_difference.shape)}."
        )
    if not is_finite(scale) or scale == 0:
        raise ArgumentError(
            f"adapters_from_difference: 'scale' is {scale!r}; expected not 0, finite."
        )
    if not weight_difference.isfinite().all():
        raise OperandError("adapters_from_difference: 'weight_difference' has NaN or infinity.")
    dtype = torch.promote_types(weight_difference.dtype, torch.float32)
    left, singular, right = torch.linalg.svd(weight_difference.to(dtype), full_matrices=False)
    root = (singular[:rank] / abs(scale)).sqrt()
    squares = singular.double().square().flip(0)
    rest = torch.cat([squares.new_zeros(1), squares.cumsum(0)]).flip(0)
    return AdapterFit(
        (root[:, None] * right[:rank]).to(weight_difference.dtype),
        (left[:, :rank] * (math.copysign(1.0, scale) * root)).to(weight_difference.dtype),
        (rest / rest[0].clamp(min=torch.finfo(torch.float64).tiny)).sqrt(),
    )
