"""Check the arguments of a generated launcher, and allocate the tensors that it returns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.op import dtype_name, on_meta, tensors_in
from fuselab.runtime.launch_recording import unseen

_OUTPUTS: dict[Any, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]] = {}
_WITHOUT_ELEMENTS: dict[Any, Tensor] = {}
_HELD = 4096  # entries of each; a program has few shapes, a server may have many
_PLAIN = (Tensor, torch.nn.Parameter)


def mismatch(
    *operands: tuple[Tensor, str],
    multiples: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
    widest: torch.dtype | None = None,
    decided: Mapping[str, Callable[..., bool]] | None = None,
    integers: Mapping[int, torch.dtype] | None = None,
    dtypes: Mapping[tuple[int, ...], tuple[torch.dtype, ...]] | None = None,
) -> str | None:
    """Return None if the tensors have the shapes that the kernels were written for, else the
    reason in a few words.

    Args:
        operands: each tensor with its dimensions: a name, which stands for one size in all
            tensors; a number; ``name//2`` for a share of such a size; ``_`` for any size.
        multiples: what has to be a multiple of a number: the size of a name, or a sum of products
            of such sizes, as ``length * width + 2 * height``.
        least: names whose size must not be below a number.
        widest: a dtype that the function computes in of its own accord; kernels do not round to it.
        decided: conditions on the sizes of names, such as ``width > 64``, each with a function of
            these names. The function has taken the way that the kernels compute because they held.
        integers: the dtype of arguments, by their place, with which kernels compute: those of
            another dtype would wrap around elsewhere.
        dtypes: the dtypes of arguments, by their places, in which the function does what the
            kernels do: where it reads the dtype, it computes something else in others.
    """
    sizes: dict[str, int] = {}
    for place, (tensor, pattern) in enumerate(operands, 1):
        words = pattern.split()
        if tensor.dim() != len(words):
            return f"argument {place} has {tensor.dim()} dimensions, the kernels take {len(words)}"
        for size, word in zip(tensor.shape, words, strict=True):
            if "//" in word or word == "_":
                continue
            expected = int(word) if word.isdigit() else sizes.setdefault(word, size)
            if size != expected:
                return f"argument {place} has a dimension of size {size} where {expected} is needed"
    for place, (tensor, pattern) in enumerate(operands, 1):
        for size, word in zip(tensor.shape, pattern.split(), strict=True):
            name, _, count = word.partition("//")
            if count and size != sizes[name] // int(count):
                return f"argument {place} has a dimension of size {size}, which is not {word}"
    for text, factor in (multiples or {}).items():
        size = sum_of_products(text, sizes)
        if size % factor:
            return f"{text} is {size}, which is no multiple of {factor}"
    for word, size in (least or {}).items():
        if sizes[word] < size:
            return f"{word} is {sizes[word]}, which is below {size}"
    for text, holds in (decided or {}).items():
        if not holds(**sizes):
            return f"the function computes something else where not {text}"
    for places, alike in (dtypes or {}).items():
        for place in places:
            if (found := operands[place - 1][0].dtype) not in alike:
                return f"the function computes something else in {dtype_name(found)}"
    for place, (tensor, _) in enumerate(operands, 1):
        dtype = (integers or {}).get(place, tensor.dtype)
        if tensor.dtype != dtype:
            return (
                f"argument {place} is {dtype_name(tensor.dtype)}, and the kernels compute with "
                f"integers of {dtype_name(dtype)}"
            )
        if widest is not None and _is_finer(tensor.dtype, widest):
            return (
                f"argument {place} is {dtype_name(tensor.dtype)}, and the function computes in "
                f"{dtype_name(widest)} between its steps"
            )
    return None


def sum_of_products(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a text such as ``length * width + 2 * height``."""
    products = (product.split(" * ") for product in text.split(" + "))
    return sum(
        math.prod(int(word) if word.lstrip("-").isdigit() else sizes[word] for word in words)
        for words in products
    )


def _is_finer(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps < torch.finfo(than).eps


def output_like(reference: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return an empty tensor with the shape, strides and dtype of ``reference(*args)``."""
    (output,) = outputs_like(reference, *args)
    return output


def outputs_like(reference: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Return an empty tensor for each output of ``reference(*args)``, with its shape, strides and
    dtype.

    The reference runs on meta tensors, or on the arguments if it refuses those, once for each
    combination of shapes, strides and dtypes.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    key = (
        reference,
        tuple(
            (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args
        ),
    )
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        like = tensors_in((reference(*on_meta(args)),))  # sizes to be, which no table holds
        return tuple(
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=tensors[0].device)
            for one in like
        )
    found = _OUTPUTS.get(key)
    if found is None:
        if len(_OUTPUTS) >= _HELD:
            _OUTPUTS.clear()
        with unseen():
            try:
                like = reference(*on_meta(args))
            except (RuntimeError, NotImplementedError):  # it makes tensors of its own on a device
                with torch.no_grad():
                    like = reference(*args)
        found = _OUTPUTS[key] = [
            (tuple(one.shape), one.stride(), one.dtype) for one in tensors_in((like,))
        ]
    return tuple(
        torch.empty_strided(shape, strides, dtype=dtype, device=tensors[0].device)
        for shape, strides, dtype in found
    )


def without_elements(tensor: Tensor) -> Tensor:
    """Return what is saved of an argument of which the backward reads the shape, the dtype and the
    device alone: a tensor of these over one element, so that the argument can be freed, and written
    over before the backward, as one that PyTorch does not save.

    A tensor whose dimensions lie in another order is returned itself, because its gradient has that
    order, as are tensors that a compiler, or a transform of functions, follows.
    """
    is_followed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    is_plain = type(tensor) in _PLAIN and tensor.is_contiguous() and tensor.numel() > 1
    if is_followed or not is_plain:
        return tensor
    key = tensor.shape, tensor.dtype, tensor.device
    found = _WITHOUT_ELEMENTS.get(key)
    if found is None:
        found = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        if torch.is_inference_mode_enabled() or _is_captured(tensor):
            return found  # its memory is the graph's, or no gradient may be recorded for it
        if len(_WITHOUT_ELEMENTS) >= _HELD:
            _WITHOUT_ELEMENTS.clear()
        _WITHOUT_ELEMENTS[key] = found
    return found


def _is_captured(tensor: Tensor) -> bool:
    """Return whether memory on the tensor's device belongs to a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def float32_on_gpu(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments, tensors of 16 bits on a GPU as float32: what ``torch.autocast`` does
    there for softmax, normalisations and sums."""
    return tuple(
        float32_everywhere([arg])[0] if isinstance(arg, Tensor) and arg.is_cuda else arg
        for arg in args
    )


def float32_everywhere(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments, tensors of 16 bits as float32: what ``torch.autocast`` does for
    losses."""
    return tuple(
        arg.float()
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.element_size() == 2
        else arg
        for arg in args
    )


def autocast_products(
    dtype: torch.dtype, args: Sequence[Any], float32_of: Mapping[str, Sequence[torch.dtype]]
) -> tuple[Any, ...]:
    """Return the arguments in ``dtype``, as ``torch.autocast`` casts those of a matrix product, or
    as float32 where the results are: on some kinds of devices, for arguments of some dtypes."""
    floats = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    own = functools.reduce(torch.promote_types, (arg.dtype for arg in floats))
    if own in float32_of.get(floats[0].device.type, ()):
        return float32_everywhere(args)
    return tuple(
        arg.to(dtype)
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64
        else arg
        for arg in args
    )


def accepted(
    reference: Callable[..., Tensor], drawn: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the first of ``drawn()`` that the reference accepts, tried on meta tensors.

    Raises ArgumentError if it accepts none of 20.
    """
    for _ in range(20):
        args = drawn()
        try:
            reference(*on_meta(args))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        return args
    raise ArgumentError("the reference accepts none of 20 draws.")
