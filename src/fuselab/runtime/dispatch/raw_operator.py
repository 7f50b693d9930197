"""Raw operators: the operators that PyTorch's dispatcher calls, without a gradient of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuselab.errors import DifferentiationError, UnsupportedError
from fuselab.op import tensors_in
from fuselab.runtime.dispatch.schema import is_scalar_tensor

_libraries: dict[str, torch.library.Library] = {}


class RawOperator:
    """One raw operator with its two overloads (floats as floats, floats as 0-d tensors).

    It returns ``result``, and writes over the parameters named in ``mutates``.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, str]],
        result: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        differentiate: Callable[..., Any] | None = None,
        mutates: Sequence[str] = (),
    ) -> None:
        namespace, short = name.split("::")
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        aliases = {mutated: f"Tensor(a{place}!)" for place, mutated in enumerate(mutates)}
        has_float = any(is_scalar_tensor(kind) for _, kind in parameters)
        self.overloads: list[Any] = []
        for suffix in ("", ".scalar_tensor") if has_float else ("",):
            kinds = (
                "Tensor" if suffix and is_scalar_tensor(kind) else kind for _, kind in parameters
            )
            listed = ", ".join(
                f"{kind.replace('Tensor', aliases.get(parameter, 'Tensor'))} {parameter}"
                for (parameter, _), kind in zip(parameters, kinds, strict=True)
            )
            library.define(f"{short}{suffix}({listed}, str implementation) -> {result}")
            packet = getattr(getattr(torch.ops, namespace), short)
            overload = getattr(packet, suffix[1:] or "default")
            for key in ("CPU", "CUDA"):
                library.impl(f"{short}{suffix}", kernel, key)
            library.impl(
                f"{short}{suffix}",
                _autograd_kernel(overload, parameters, differentiate),
                "Autograd",
            )
            if mutates:
                places = [place for place, (known, _) in enumerate(parameters) if known in mutates]
                bumping = _version_kernel(overload, places)
                library.impl(f"{short}{suffix}", bumping, "ADInplaceOrView")
            torch.library.register_fake(f"{name}{suffix}", fake, lib=library)
            rule = _refuse_vmap(short) if mutates else _loop_over_batch(overload)
            torch.library.register_vmap(f"{name}{suffix}", rule, lib=library)
            if result == "Tensor[]":
                library.impl(f"{short}{suffix}", _refuse_batched_gradients(short), "Batched")
            self.overloads.append(overload)

    def __call__(self, scalar_tensors: bool, *args: Any) -> Any:
        return self.overloads[1 if scalar_tensors else 0](*args)


def _autograd_kernel(
    overload: Any,
    parameters: Sequence[tuple[str, str]],
    differentiate: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """Return the Autograd kernel of a raw operator. It passes the call on if no gradient is needed.

    An exported program calls raw operators with parameters that require gradients; then
    ``differentiate`` computes the call. A gradient that nothing defines is refused, never dropped.
    """
    tensors = tuple(kind in ("Tensor", "Tensor?", "Tensor[]") for _, kind in parameters)

    def kernel(*args: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        wanted = False
        for place, given in enumerate(args):
            for value in tensors_in((given,)):
                needs_grad = grad_enabled and value.requires_grad
                wanted |= needs_grad
                if forward_ad.unpack_dual(value).tangent is not None or (
                    needs_grad and (differentiate is None or not tensors[place])
                ):
                    raise DifferentiationError(
                        f"the raw operator {overload} carries no gradient of "
                        f"'{parameters[place][0]}'; call the public function, detach the tensor, "
                        "or use torch.no_grad()."
                    )
        if wanted and differentiate is not None:
            return differentiate(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return kernel


def _version_kernel(overload: Any, mutated: Sequence[int]) -> Callable[..., Any]:
    """Return the ADInplaceOrView kernel of an operator that writes over arguments, by which
    autograd notices that a tensor that it saved has changed."""

    def kernel(*args: Any) -> Any:
        bump_versions(tensors_in(args[place] for place in mutated))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload(*args)

    return kernel


def bump_versions(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that these tensors were written over."""
    torch.autograd.graph.increment_version(
        [tensor for tensor in tensors if not tensor.is_inference()]
    )


def _refuse_vmap(short: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise UnsupportedError(
            f"{short}: it writes over its arguments, which torch.func.vmap cannot follow; use the "
            "operator that returns a new tensor."
        )

    return rule


def _refuse_batched_gradients(short: str) -> Callable[..., Any]:
    """Refuse is_grads_batched=True for an operator that returns a list, which PyTorch's own loop
    over the batch cannot handle."""

    def kernel(*args: Any) -> Any:
        raise UnsupportedError(
            f"{short}: torch.autograd.grad(..., is_grads_batched=True) cannot follow the gradients "
            "of a list of tensors; use torch.func.vmap over torch.func.vjp, or one call per "
            "upstream gradient."
        )

    return kernel


def _select(value: Any, dim: Any, index: int) -> Any:
    """Return one sample of a value along its vmap dimension, or of each tensor of a sequence."""
    if isinstance(dim, (list, tuple)):
        return [_select(item, of_item, index) for item, of_item in zip(value, dim, strict=True)]
    return value.select(dim, index) if isinstance(dim, int) else value


def _one_of_zeros(value: Any, dim: Any) -> Any:
    """Return ``value`` with one sample of zeros in place of its empty batch."""
    if isinstance(dim, (list, tuple)):
        return [_one_of_zeros(item, of_item) for item, of_item in zip(value, dim, strict=True)]
    if not isinstance(dim, int):
        return value
    return value.new_zeros((*value.shape[:dim], 1, *value.shape[dim + 1 :]))


def _loop_over_batch(overload: Any) -> Callable[..., Any]:
    """Return a vmap rule for any raw operator: one call per sample, results stacked.

    It is right for every operator because it assumes nothing. An operator with leading batch
    dimensions is faster if it is called with them instead of under vmap.
    """

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:  # one sample of zeros gives the shapes of the results
            args = tuple(map(_one_of_zeros, args, in_dims))
        samples = [
            overload(
                *(_select(value, dim, index) for value, dim in zip(args, in_dims, strict=True))
            )
            for index in range(max(info.batch_size, 1))
        ]
        if isinstance(samples[0], (list, tuple)):
            kind = type(samples[0])
            stacked = kind(
                torch.stack(column)[: info.batch_size] for column in zip(*samples, strict=True)
            )
            return stacked, kind([0] * len(stacked))
        return torch.stack(samples)[: info.batch_size], 0

    return rule
