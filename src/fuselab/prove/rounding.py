"""The rounding of a computation, shown by computing it again with other roundings.

The reference runs in float64, taken apart into simple operators, and the result of each is moved at
random by one rounding of the arithmetic that an implementation computes in: by 2^-23 of itself, or
by 2^-52 where that is float64 (the method is known as discrete stochastic arithmetic, Vignes 2004).
How far the end moves is how far two honest computations of the same formula may lie apart, also
where terms cancel.

A sum of n terms is moved by more, because eager adds on a CPU in pairs or in double, and a kernel
may add one after the other: by

    2^-24 * sqrt(n / 3) * max(|sum x|, sqrt(sum x^2))

which is the size of that error, not its worst case: its square is the sum of the squares of n
roundings of half an ulp, each of a partial sum, and partial sums grow evenly (Higham and Mary
2019). The roundings of equal terms have one sign and add up: a sum of them moves by n / 3 of half
an ulp. A product of matrices is a sum of K terms.

A run also shows whether the computation can jump: whether any of its operators, such as a
comparison, a sign or a sort, may give another result for inputs that are a rounding apart. A
continuous computation moves by about as much under every set of roundings, so few sets show how
much; a jump shows only under the few sets that take it to the other side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.op import tensors_in
from fuselab.prove.definitions import definitions

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.mv: (0, 1), _aten.dot: (0, 1)}
_PRODUCTS |= {_aten.addmm: (1, 2), _aten.baddbmm: (1, 2), _aten.addmv: (1, 2)}

# Operators that copy, choose or negate numbers and round none; those that only make views are known
# by their schema.
_EXACT = frozenset(
    getattr(_aten, name)
    for name in (
        *("abs", "amax", "amin", "bernoulli", "bernoulli_", "cat", "clamp", "clamp_max"),
        *("clamp_min", "clone", "copy"),
        *("_to_copy", "constant_pad_nd", "copysign", "cummax", "cummin", "embedding", "empty"),
        *("empty_like", "empty_strided", "eye", "fill", "flip", "full", "full_like", "gather"),
        *("glu_jvp", "index", "index_copy", "index_put", "index_select", "isnan", "kthvalue"),
        *("lift_fresh_copy", "masked_fill", "masked_scatter", "max", "maximum", "median", "min"),
        *("minimum", "mode", "nan_to_num", "neg", "new_empty", "new_empty_strided", "new_full"),
        *("new_ones", "new_zeros", "ones", "ones_like", "relu", "repeat", "roll", "round", "rot90"),
        *("scalar_tensor", "scatter", "select_backward", "select_scatter", "sgn", "sign"),
        *("slice_backward", "slice_scatter", "sort", "stack", "threshold", "threshold_backward"),
        *("topk", "tril", "triu", "trunc", "unfold_backward", "where", "zeros", "zeros_like"),
        *("floor", "ceil", "copy_", "fill_", "zero_", "masked_fill_", "index_put_", "scatter_"),
    )
)

# Operators whose results move a little where their floating inputs move a little. Of those that
# compute, any other one counts as one that can jump.
_CONTINUOUS = frozenset(
    getattr(_aten, name)
    for name in (
        *("_log_softmax", "_softmax", "_to_copy", "abs", "acos", "acosh", "add", "add_"),
        *("addmm", "addmv", "amax", "amin", "asin", "asinh", "atan", "atanh", "baddbmm", "bmm"),
        *("cat", "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_"),
        *("clone", "conj_physical", "constant_pad_nd", "convolution", "convolution_backward"),
        *("copy", "copy_", "cos", "cosh", "cumprod", "cumsum", "div", "div_", "dot", "elu"),
        *("embedding", "embedding_dense_backward", "empty_like", "erf", "erfc", "exp", "exp2"),
        *("expm1", "fill", "flip", "full_like", "gather", "gelu", "hypot", "index"),
        *("index_add", "index_copy", "index_put", "index_put_", "index_select", "leaky_relu"),
        *("lerp", "log", "log10", "log1p", "log2", "masked_fill", "masked_fill_", "maximum"),
        *("mean", "minimum", "mm", "mul", "mul_", "mv", "neg", "new_empty"),
        *("new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "pow", "prod"),
        *("reciprocal", "relu", "repeat", "roll", "rsqrt", "scatter", "scatter_add"),
        *("select_backward", "select_scatter", "sigmoid", "sin", "sinh", "slice_backward"),
        *("slice_scatter", "sqrt", "stack", "sub", "sub_", "sum", "tanh", "tril", "triu"),
        *("unfold_backward", "where", "zero_", "zeros_like"),
    )
)


@functools.cache
def _all_definitions() -> dict[Any, Any]:
    found = {**core_aten_decompositions(), **definitions()}
    # By its definition it would draw other numbers: the moved results must drop the same elements.
    found.pop(_aten.bernoulli.default, None)
    return found


class Rounded(TorchDispatchMode):
    """Move every result by at most ``unit`` of itself, at random after ``seed``.

    ``jumps`` says after a run whether any operator of it was one that can jump.
    """

    def __init__(self, seed: int, unit: float) -> None:
        super().__init__()
        self.unit, self.seed, self.jumps = unit, seed, False
        self.definitions = _all_definitions()
        self.least = 2.0**-149 if unit > 2.0**-52 else 2.0**-1074

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        definition = self.definitions.get(func)
        if definition is not None:
            with self:
                found = definition(*args, **kwargs)
            if found is not NotImplemented:
                return found
        found = func(*args, **kwargs)
        schema = func._schema
        is_view = any(one.alias_info is not None for one in schema.returns)
        if is_view and not schema.is_mutable:
            return found
        self.jumps |= _can_jump(func, args, kwargs, found)
        if func.overloadpacket in _EXACT:
            return found
        if isinstance(found, Tensor):
            return self._moved(found, self._factor(func, args, kwargs, found), schema.is_mutable)
        if isinstance(found, (tuple, list)) and not schema.is_mutable:
            return type(found)(self._moved(one, None, False) for one in found)
        return found

    def _moved(self, value: Any, size: Tensor | None, in_place: bool) -> Any:
        """Return ``value`` moved by at most ``unit`` of itself, or of ``size``; zeros, infinities
        and NaN stay."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            return value
        self.seed += 1
        generator = torch.Generator(value.device).manual_seed(self.seed)
        step = torch.randint(-1, 2, value.shape, generator=generator, device=value.device)
        size = value.abs() if size is None else size
        size = torch.where(size == 0, 0.0, (size * self.unit).clamp(min=self.least))
        moved = value + step.to(value.dtype) * size.to(value.dtype)
        moved = torch.where(moved.isfinite() & value.isfinite(), moved, value)
        return value.copy_(moved) if in_place else moved

    def _factor(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Tensor
    ) -> Tensor | None:
        """Return the size of a sum's rounding in roundings of 1; None of what is no sum."""
        packet = func.overloadpacket
        if not found.is_floating_point() or not found.numel():
            return None
        if packet in (_aten.sum, _aten.mean):
            terms = args[0].numel() / found.numel()
            squares = func(args[0].square(), *args[1:], **kwargs)
            if packet is _aten.mean:
                squares = squares / terms
            return _rounding_of(terms, found, squares.sqrt(), _is_equal(args, kwargs))
        if packet is _aten.cumsum:
            root = func(args[0].square(), *args[1:], **kwargs).sqrt()
            ones = torch.ones_like(found)
            lengths: Tensor = func(ones, *args[1:])
            return _rounding_of(lengths, found, root, _is_equal(args, {"keepdim": True}))
        if packet in _PRODUCTS:
            one, other = (args[place] for place in _PRODUCTS[packet])
            root = (one.square() @ other.square()).sqrt()
            return torch.maximum(found.abs(), _rounding_of(one.shape[-1], one @ other, root))
        return None


def _can_jump(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> bool:
    """Return whether an operator may give another result for floating inputs a rounding apart."""
    if (
        func.overloadpacket in _CONTINUOUS
        and kwargs.get("rounding_mode") is None
        and all(tensor.is_floating_point() for tensor in tensors_in([found]))
    ):
        return False
    return any(tensor.is_floating_point() for tensor in tensors_in([*args, *kwargs.values()]))


def _is_equal(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return which sums over the dimensions in ``args`` have equal terms."""
    dims = args[1] if len(args) > 1 and args[1] is not None else []
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not args[0].numel():
        return torch.zeros((), dtype=torch.bool, device=args[0].device)
    terms: Tensor = args[0]
    return terms.amax(dims, keepdim) == terms.amin(dims, keepdim)


def _rounding_of(
    terms: float | Tensor, total: Tensor, root: Tensor, is_equal: Tensor | None = None
) -> Tensor:
    """Return the size of the rounding of a sum in units of 2 * 2^-24, at least one of the sum."""
    length = torch.as_tensor(terms, dtype=total.dtype) / 12
    size = length.sqrt() if is_equal is None else torch.where(is_equal, 2 * length, length.sqrt())
    return torch.maximum(total.abs(), size * torch.maximum(total.abs(), root))
