"""Dropout whose mask follows from a seed, so that a backward computes it again.

An element is kept or dropped by a random word of Philox-4x32-10 (J. Salmon and others, "Parallel
random numbers: as easy as 1, 2, 3", 2011). The key is the seed. The counter is the position of the
element in the contiguous mask, and the number of the dropout among those of the function. A mask is
therefore the same on every device, for all strides, and in every process; the kernels of ejected
functions compute it by the same integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# The negative limit of SELU, to which alpha dropout sets what it drops.
_SELU_LIMIT = -1.7580993408473766

# The functions of PyTorch that drop elements, by their names: those of one name compute the same.
ELEMENTS = frozenset({"dropout", "dropout_"})
CHANNELS = frozenset({"dropout1d", "dropout2d", "dropout3d", "feature_dropout"})
ALPHA = frozenset({"alpha_dropout", "feature_alpha_dropout"})
DROPOUTS = ELEMENTS | CHANNELS | ALPHA
_SPATIAL_DIMS = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}
_PARAMETERS = ("input", "p", "training", "inplace")

Mask = Callable[[Sequence[int], float], Tensor]  # of a shape and a probability


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the four random words of Philox-4x32-10.

    ``counter`` has four words and ``key`` two: int64 tensors of numbers below 2^32, as the results
    are. They broadcast.
    """
    first, second, third, fourth = counter
    left, right = key
    for turn in range(_ROUNDS):
        if turn:
            left, right = (left + _KEY_STEPS[0]) & _LOW_WORD, (right + _KEY_STEPS[1]) & _LOW_WORD
        # An int64 product wraps around, and its 64 bits are those of the product without a sign.
        even, odd = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            ((odd >> 32) & _LOW_WORD) ^ second ^ left,
            odd & _LOW_WORD,
            ((even >> 32) & _LOW_WORD) ^ fourth ^ right,
            even & _LOW_WORD,
        )
    return first, second, third, fourth


def dropout_mask(seed: Tensor, number: int, shape: Sequence[int], p: float) -> Tensor:
    """Return a mask of truth values of ``shape``: True with probability ``1 - p``.

    ``seed`` is an int64 tensor without dimensions, and ``number`` the number of the dropout among
    those that share the seed. Four elements in a row share a counter; each has a word of it.
    """
    position = torch.arange(math.prod(shape), device=seed.device)
    group = position >> 2
    zero = torch.zeros_like(group)
    words = philox(
        (group & _LOW_WORD, group >> 32, zero + number, zero),
        (seed & _LOW_WORD, (seed >> 32) & _LOW_WORD),
    )
    word = torch.stack(words, -1).gather(-1, (position & 3).unsqueeze(-1))
    return (word > last_dropped(p)).reshape(shape)


def last_dropped(p: float) -> int:
    """Return the largest random word of 32 bits by which an element is dropped."""
    return max(round(p * 2**32), 1) - 1


def dropout_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call that drops elements, by their names; None where it drops none
    or is the call of another function."""
    if getattr(func, "__name__", "") not in DROPOUTS or not callable(func):
        return None
    given = {"p": 0.5, "training": True, "inplace": False}
    if func.__name__ == "alpha_dropout" or func.__name__ == "feature_alpha_dropout":
        given["training"] = False
    given |= dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    given["training"] = given.pop("train", given["training"])
    given["inplace"] |= func.__name__.endswith("_")
    if not 0 <= given["p"] <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {given['p']}")
    return given if given["training"] and given["p"] > 0 else None


def drop(name: str, given: dict[str, Any], mask: Mask) -> Tensor:
    """Return what the dropout ``name`` makes of the arguments of ``dropout_call``, with the mask
    that ``mask(shape, p)`` returns."""
    source: Tensor = given["input"]
    p = float(given["p"])
    kept = mask(_mask_shape(name, source), p).to(source.dtype)
    result = source.mul_(kept) if given["inplace"] else source * kept
    if p == 1.0:
        return result
    scale, limit = 1 / (1 - p), 0.0
    if name in ALPHA:
        scale = 1 / math.sqrt((_SELU_LIMIT**2 * p + 1) * (1 - p))
        limit = _SELU_LIMIT * scale
    result = result.mul_(scale) if given["inplace"] else result * scale
    if name not in ALPHA:
        return result
    shift = (1 - kept) * limit - limit * p
    return result.add_(shift) if given["inplace"] else result + shift


def _mask_shape(name: str, source: Tensor) -> tuple[int, ...]:
    """Return the shape of the mask: that of ``source``, or one element for each channel."""
    shape = tuple(source.shape)
    if name not in CHANNELS and name != "feature_alpha_dropout":
        return shape
    kept_dims = 2
    if name in ("dropout1d", "dropout3d") and len(shape) == _SPATIAL_DIMS[name] + 1:
        kept_dims = 1  # without a batch
    return shape[:kept_dims] + (1,) * (len(shape) - kept_dims)


class SeededDropout(TorchFunctionMode):
    """Replay the dropouts of a function from a seed: within this context each call that drops
    elements takes the mask of its number.

    Args:
        seed: an int64 tensor without dimensions.
        numbers: those of the dropouts in the order of the calls; counted from 0 by default.
    """

    def __init__(self, seed: Tensor, numbers: Iterable[int] | None = None) -> None:
        super().__init__()
        self.seed = seed
        self.numbers = itertools.count() if numbers is None else iter(numbers)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dropout_call(func, args, kwargs or {})
        if given is None:
            return func(*args, **(kwargs or {}))
        number, seed = next(self.numbers), self.seed.to(given["input"].device)
        return drop(func.__name__, given, lambda shape, p: dropout_mask(seed, number, shape, p))


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """Return a seed as the int64 tensor on ``device`` that kernels read.

    None draws one from PyTorch's generator of the device, which ``torch.manual_seed`` repeats and a
    CUDA graph advances from replay to replay.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (), device=device)
    if isinstance(seed, Tensor):
        return seed.to(device, torch.int64).reshape(())
    return torch.tensor(seed, dtype=torch.int64, device=device)
