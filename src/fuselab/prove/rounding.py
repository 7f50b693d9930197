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
an ulp, and one in which a term has m equal ones on average by sqrt(n / 3 * (1 + m / 3)), which lies
between the two. A product of matrices is a sum of K terms. A product of n factors has n roundings.

Arithmetic rounds equal numbers equally. With ``alike``, equal elements of a tensor move alike, so
that equal terms stay equal; without, every element moves by a chance of its own.

A run also shows whether the computation can jump: whether any of its operators, such as a
comparison, a sign or a sort, may give another result for inputs that are a rounding apart. A
continuous computation moves by about as much under every set of roundings, so few sets show how
much; a jump shows only under the few sets that take it to the other side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
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


# Operators that compare numbers, which the derivatives of activations are made of.
_COMPARED = frozenset(
    getattr(_aten, name) for name in ("eq", "ge", "gt", "le", "lt", "ne", "sgn", "sign")
)


@functools.cache
def _all_definitions() -> dict[Any, Any]:
    found = {**core_aten_decompositions(), **get_decompositions([_aten.gelu]), **definitions()}
    # By its definition it would draw other numbers: the moved results must drop the same elements.
    found.pop(_aten.bernoulli.default, None)
    return found


class Rounded(TorchDispatchMode):
    """Move every result by at most ``unit`` of itself, at random after ``seed``.

    With ``alike``, equal elements of one result move alike. What is compared with a number counts
    as 0 up to ``lost``, as where a kernel keeps it in a dtype that holds no smaller one: the
    gradient of a ReLU is taken from its stored result. ``jumps`` says after a run whether any
    operator of it was one that can jump.
    """

    def __init__(self, seed: int, unit: float, alike: bool = False, lost: float = 0.0) -> None:
        super().__init__()
        self.lost = lost
        self.unit, self.seed, self.alike, self.jumps = unit, seed, alike, False
        self.definitions = _all_definitions()
        self.least = 2.0**-149 if unit > 2.0**-52 else 2.0**-1074
        # Of every product: itself, so that its memory is not used again, and its rounding's size.
        self.products: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._softmax_backward_data.default:
            return self._softmax_backward(*args, **kwargs)
        definition = self.definitions.get(func)
        if definition is not None:
            with self:
                found = definition(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if self.lost and func.overloadpacket in _COMPARED:
            args = [self._without_lost(value) for value in args]
        found = func(*args, **kwargs)
        schema = func._schema
        is_view = any(one.alias_info is not None for one in schema.returns)
        if is_view and not schema.is_mutable:
            return found
        self.jumps |= _can_jump(func, args, kwargs, found)
        if func.overloadpacket in _EXACT:
            return found
        if isinstance(found, Tensor):
            size = self._factor(func, args, kwargs, found)
            moved = self._moved(found, size, schema.is_mutable)
            if size is not None and func.overloadpacket in _PRODUCTS:
                self.products[_memory_of(moved)] = moved, size
            return moved
        if isinstance(found, (tuple, list)) and not schema.is_mutable:
            return type(found)(self._moved(one, None, False) for one in found)
        return found

    def _softmax_backward(
        self, grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
    ) -> Tensor:
        """Return what aten._softmax_backward_data does.

        Where the upstream gradient is a product, as in an attention, a kernel computes the sum of
        upstream gradients times outputs from the attention's output (Dao 2023, section 3.1): the
        roundings of the product's sums do not cancel there, so the sum moves by them.
        """
        with self:
            terms = grad_output * output
            total = terms.sum(dim, keepdim=True)
        product, size = self.products.get(_memory_of(grad_output), (None, None))
        if product is not None and size is not None and product.numel() == grad_output.numel():
            size = (size.reshape(grad_output.shape) * output.abs()).sum(dim, keepdim=True)
            total = self._moved(total, size, False)
        with self:
            return (terms - output * total).to(input_dtype)

    def _without_lost(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.where(value.abs() <= self.lost, 0.0, value)

    def _moved(self, value: Any, size: Tensor | None, in_place: bool) -> Any:
        """Return ``value`` moved by at most ``unit`` of itself, or of ``size``; zeros, infinities
        and NaN stay."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            return value
        if value._is_zerotensor():  # autograd's zeros, which have no memory
            return value
        self.seed += 1
        step = steps(value, self.seed, self.alike)
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
            return _rounding_of(terms, found, squares.sqrt(), _equal_terms(args, kwargs))
        if packet is _aten.cumsum:
            root = func(args[0].square(), *args[1:], **kwargs).sqrt()
            equal = _equal_terms(args, {"keepdim": True})
            return _rounding_of(_lengths(found, args[1]), found, root, equal)
        if packet is _aten.cumprod:
            growth: Tensor = (_lengths(found, args[1]) / 4).sqrt().clamp(min=1)
            return found.abs() * growth
        if packet is _aten.prod:
            factors = args[0].numel() / found.numel()
            return found.abs() * max(1.0, math.sqrt(factors / 4))
        if packet in _PRODUCTS:
            one, other = (args[place] for place in _PRODUCTS[packet])
            root = (one.square() @ other.square()).sqrt()
            return torch.maximum(found.abs(), _rounding_of(one.shape[-1], one @ other, root))
        return None


def _memory_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _can_jump(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> bool:
    """Return whether an operator may give another result for floating inputs a rounding apart."""
    if (
        func.overloadpacket in _CONTINUOUS
        and kwargs.get("rounding_mode") is None
        and all(tensor.is_floating_point() for tensor in tensors_in([found]))
    ):
        return False
    return any(tensor.is_floating_point() for tensor in tensors_in([*args, *kwargs.values()]))


def steps(value: Tensor, seed: int, alike: bool) -> Tensor:
    """Return -1, 0 or 1 for every element, at random after ``seed``; with ``alike`` the same for
    equal elements, and for those of the other sign the opposite."""
    if not alike:
        generator = torch.Generator(value.device).manual_seed(seed)
        return torch.randint(-1, 2, value.shape, generator=generator, device=value.device)
    bits = value.detach().abs().double().contiguous().view(torch.int64)
    for shift in (29, 32):  # two rounds of a multiplicative hash
        bits = (bits ^ (bits >> shift) ^ seed) * 0x1B873593CC9E2D51
    return ((bits >> 33) % 3 - 1) * value.detach().sign().nan_to_num(0.0).long()


_MOST_TERMS = 1024  # of a sum that are compared with each other


def _equal_terms(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return the chance that two terms of a sum over the dimensions in ``args`` are equal."""
    dims = args[1] if len(args) > 1 and args[1] is not None else []
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return chance_of_equal_terms(args[0], [dims] if isinstance(dims, int) else dims, keepdim)


def chance_of_equal_terms(terms: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return, for every sum over ``dims`` (all where there are none), the chance that two of its
    terms are equal and not 0, less the chance that they cancel, and at least 0.

    Of long sums some terms, evenly spaced, are looked at.
    """
    places = range(terms.ndim)
    summed = sorted(dim % terms.ndim for dim in dims) if terms.ndim and dims else [*places]
    kept = [dim for dim in places if dim not in summed]
    shape = [1 if dim in summed else terms.shape[dim] for dim in places]
    lengths = shape if keepdim else [terms.shape[dim] for dim in kept]
    count = math.prod(terms.shape[dim] for dim in summed)
    if count < 2 or not terms.numel():
        return terms.new_zeros(lengths)
    several = terms.detach().permute(*kept, *summed).flatten(len(kept))
    if count > _MOST_TERMS:
        evenly = torch.linspace(0, count - 1, _MOST_TERMS, dtype=torch.float64, device=terms.device)
        several, count = several[..., evenly.long()], _MOST_TERMS
    ordered, order = several.abs().sort(-1)
    group = F.pad((ordered[..., 1:] != ordered[..., :-1]).cumsum(-1), (1, 0))
    signs = several.sign().gather(-1, order)
    sizes = torch.zeros_like(ordered).scatter_add_(-1, group, signs)
    chance = (sizes.square().sum(-1) - signs.abs().sum(-1)) / (count * (count - 1))
    return chance.clamp(min=0).reshape(lengths)


def _lengths(found: Tensor, dim: int) -> Tensor:
    """Return how many terms each element of a running sum over ``dim`` has."""
    return torch.ones_like(found).cumsum(dim)


def _rounding_of(
    terms: float | Tensor, total: Tensor, root: Tensor, equal: float | Tensor = 0.0
) -> Tensor:
    """Return the size of the rounding of a sum in units of 2 * 2^-24, at least one of the sum.
    ``equal`` is the chance that two of its terms are equal."""
    length = torch.as_tensor(terms, dtype=total.dtype)
    size = (length / 12 * (1 + (length - 1) * equal / 3)).sqrt()
    return torch.maximum(total.abs(), size * torch.maximum(total.abs(), root))
