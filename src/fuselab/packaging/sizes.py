"""Find which size of which tensor a number among a kernel's parameters stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NUMEL = re.compile(r"n|numel|num_?el(ement)?s?|n_?elements?|size|total(_size)?|length|len|count")
_ROWS = re.compile(r"m|b|t|(n|num)_?rows?|rows?|batch(_size)?|(num_)?tokens|(n|num)_?batch(es)?")
_COLUMNS = re.compile(
    r"n|d|c|h|k|(n|num)_?col(umn)?s?|col(umn)?s?|width|dim|hidden(_(size|dim))?|feat(ure)?s?"
    r"(_(dim|size))?|(feat|row)_?(dim|size|len|length)|embed(ding)?_dim|head_dim|channels|inner"
)


@dataclass(frozen=True)
class Known:
    """A tensor that a launcher has at hand: its name, and its number of dimensions if known."""

    name: str
    dims: int | None


def size_texts(numbers: Sequence[str], tensors: Sequence[Known]) -> dict[str, str]:
    """Return, for those of ``numbers`` whose names tell it, the text of a size of ``tensors``.

    ``tensors`` are in the order in which a kernel takes them; sizes are taken of the first one that
    has the dimensions.
    """
    found = _strides([name for name in numbers if "stride" in name.lower()], tensors)
    others = [name for name in numbers if "stride" not in name.lower()]
    if not tensors:
        return found
    axes = _named_axes(numbers, found)
    names = {name.lower(): name for name in others}
    if {"m", "n", "k"} <= names.keys() and len(tensors) > 1 and not axes:  # a matrix product's
        one, other = tensors[0].name, tensors[1].name
        axes = {"m": f"{one}.shape[0]", "k": f"{one}.shape[-1]", "n": f"{other}.shape[-1]"}
    widest = max(tensors, key=lambda one: one.dims or 0)
    has_rows = any(_ROWS.fullmatch(name.lower()) for name in others)
    for name in others:
        plain = name.lower()
        tensor = next((one for one in tensors if plain.startswith(f"{one.name}_")), widest)
        plain = plain.removeprefix(f"{tensor.name}_")
        if plain in axes:
            found[name] = axes[plain]
            continue
        counted = re.sub(r"^(n|num)_", "", plain)
        if counted != plain and any(one.name == counted for one in tensors):
            found[name] = f"{counted}.numel()"
            continue
        is_count = _NUMEL.fullmatch(plain) and not (has_rows and plain == "n")
        if is_count:
            found[name] = f"{tensor.name}.numel()"
        elif _ROWS.fullmatch(plain) and tensor.dims == 2:
            found[name] = f"{tensor.name}.shape[0]"
        elif _ROWS.fullmatch(plain) and tensor.dims != 1:
            found[name] = f"{tensor.name}.numel() // max({tensor.name}.shape[-1], 1)"
        elif _COLUMNS.fullmatch(plain):
            found[name] = f"{tensor.name}.shape[-1]"
    return found


def _named_axes(numbers: Sequence[str], strides: Mapping[str, str]) -> dict[str, str]:
    """Return the sizes of the dimensions that strides name: ``stride_ak`` says that ``k`` is the
    size of a dimension of ``a``."""
    found: dict[str, str] = {}
    for number in numbers:
        tensor, _, axis = strides.get(number, "").removesuffix(")").partition(".stride(")
        letter = number[-1].lower()
        rest = number.lower().removesuffix(letter)
        is_named = bool(tensor) and rest.endswith((f"_{tensor[0].lower()}", tensor.lower()))
        if axis.isdigit() and letter.isalpha() and is_named:
            found.setdefault(letter, f"{tensor}.shape[{axis}]")
    return found


def _strides(numbers: Sequence[str], tensors: Sequence[Known]) -> dict[str, str]:
    """Return the strides that names tell: of the tensor that they begin or end with, in the order
    of its dimensions."""
    groups: dict[str, list[str]] = {}
    for number in numbers:
        tensor = _tensor_of(number.lower(), tensors)
        if tensor is not None:
            groups.setdefault(tensor, []).append(number)
    dims: Mapping[str, int | None] = {one.name: one.dims for one in tensors}
    found = {}
    for name, group in groups.items():
        for place, number in enumerate(group):
            digit = re.search(r"(\d)$", number)
            axis = int(digit[1]) if digit else place
            if len(group) == 1 and dims[name] and not digit:
                axis = -2 if dims[name] != 1 else 0  # the stride of a row
            found[number] = f"{name}.stride({axis})"
    return found


def _tensor_of(number: str, tensors: Sequence[Known]) -> str | None:
    rest = re.sub(r"_?strides?_?", "_", number).strip("_")
    fits = [
        one.name
        for one in tensors
        if re.fullmatch(rf"{re.escape(one.name.lower())}(_?\w{{1,5}})?", rest)
    ]
    if not fits:
        fits = [one.name for one in tensors if rest and one.name.lower().startswith(rest[0])]
        fits = fits if len(fits) == 1 and len(rest) <= 2 else []
    if not fits and len(tensors) and rest in ("", "row", "m", "b"):
        return tensors[0].name
    return max(fits, key=len) if fits else None
