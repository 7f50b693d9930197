"""Match the parameters of a kernel with the operator's arguments, its outputs and their sizes."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fuselab.packaging.definition import MISSING, Definition, Parameter, literal
from fuselab.packaging.sizes import Known, size_texts

INPUT, OUTPUT, ADDED, UPDATED, NUMBER, CONSTANT = (
    "input", "output", "added", "updated", "number", "constant",
)  # fmt: skip
WRITTEN = (OUTPUT, ADDED, UPDATED)


@dataclass(frozen=True)
class KernelParameter:
    """A parameter of a kernel.

    ``kind`` is that of a pointer by what the kernel does with it (``input`` is loaded, ``output``
    stored, ``added`` to, or ``updated``: loaded and stored), ``number``, or ``constant``: known
    when the kernel is compiled. ``code`` is the C++ type of a number, ``default`` a value. ``size``
    is the size that the kernel's text shows a number to be: ``"width"``, of a row, or a pointer's
    name with ``.shape[0]`` behind it.
    """

    name: str
    kind: str
    code: str = ""
    default: Any = MISSING
    size: str = ""

    @property
    def plain(self) -> str:
        """The name without what says that it is a pointer."""
        return plain_name(self.name)


@dataclass
class Launch:
    """How a launcher calls one kernel.

    ``allocations`` are statements, ``given`` is the text of each of the kernel's parameters by
    name, ``outputs`` are the tensors to return. ``blanks`` are what only the user can know, each as
    a variable of the launcher and a sentence; ``guesses`` are what follows from names alone.
    """

    allocations: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    blanks: list[tuple[str, str]] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def blank(self, name: str, told: str) -> str:
        """Note what is to be filled in and return the variable that stands for it."""
        self.blanks.append((name, told))
        return name


def plain_name(name: str) -> str:
    """Return a pointer's name without ``_ptr`` and the like, in lower case."""
    text = re.sub(r"_?(ptrs?|pointer|data)$|^(ptr|p|d|g|in)_(?=\w)", "", name.lower()).strip("_")
    text = text or name.lower()
    if keyword.iskeyword(text):
        return "input" if text == "in" else f"{text}_"
    return text


def parameters_for(kernel: Sequence[KernelParameter]) -> list[Parameter]:
    """Return the parameters of an operator of which nothing but its kernel is known: the tensors
    that it loads, and its numbers that are no sizes."""
    tensors = [one for one in kernel if one.kind in (INPUT, UPDATED)]
    known = [Known(one.plain, None) for one in tensors]
    numbers = [one for one in kernel if one.kind == NUMBER]
    sized = size_texts([one.name for one in numbers], known)
    found = [Parameter(one.plain, "Tensor", _example(one)) for one in tensors]
    for one in numbers:
        if one.name not in sized and _is_real(one):
            value = one.default if isinstance(one.default, float) else MISSING
            found.append(Parameter(one.name, "float", value))
        elif one.name not in sized and one.name.lower() == "seed":
            found.append(Parameter(one.name, "int"))
    return found


def _example(one: KernelParameter) -> Any:
    return one.default if isinstance(one.default, Tensor) else MISSING


def _is_real(one: KernelParameter) -> bool:
    words = (
        r"eps(ilon)?|alpha|beta|scale|slope|factor|lr|p|negative_slope|value|momentum|temperature"
    )
    if one.code:
        return one.code in ("f32", "f64")
    return isinstance(one.default, float) or re.fullmatch(words, one.name.lower()) is not None


def arranged(kernel: Sequence[KernelParameter], definition: Definition) -> Launch:
    """Return how a launcher gives a kernel the operator's arguments."""
    launch = Launch()
    _inputs(kernel, definition, launch)
    _outputs(kernel, definition, launch)
    _numbers(kernel, definition, launch)
    return launch


def _inputs(kernel: Sequence[KernelParameter], definition: Definition, launch: Launch) -> None:
    """Match what the kernel loads: by name, and the rest in order if the numbers agree."""
    names = {plain_name(name): name for name in definition.tensors}
    loaded = [one for one in kernel if one.kind in (INPUT, UPDATED)]
    for one in loaded:
        if one.plain in names:
            launch.given[one.name] = names[one.plain]
    left = [one for one in loaded if one.name not in launch.given and one.kind == INPUT]
    free = [name for name in definition.tensors if name not in launch.given.values()]
    if free and not left:
        launch.guesses.append(f"the kernel reads nothing of {', '.join(free)}")
    if len(left) == len(free):
        for one, name in zip(left, free, strict=True):
            launch.given[one.name] = name
            if left != loaded or len(left) > 1:
                launch.guesses.append(f"{one.name} is {name}, by its place")
        return
    for one in left:
        told = f"the tensor that the kernel loads from {one.name}"
        launch.given[one.name] = launch.blank(one.plain, told)


def _outputs(kernel: Sequence[KernelParameter], definition: Definition, launch: Launch) -> None:
    """Allocate what the kernel stores: the operator's outputs, in order."""
    written = [one for one in kernel if one.kind in WRITTEN]
    arguments = ", ".join(definition.names)
    taken = {*definition.names, *launch.given.values()}
    names = {}
    for one in written:
        names[one.name] = f"new_{one.plain}" if one.plain in taken else one.plain
        taken.add(names[one.name])
    if len(written) != definition.outputs:
        counted = f"{definition.outputs} tensor{'s' * (definition.outputs != 1)}"
        for one in written:
            told = (
                f"the tensor that the kernel writes to {one.name} (the reference returns {counted})"
            )
            launch.given[one.name] = launch.blank(names[one.name], told)
        launch.outputs = [launch.blank("output", "what the operator returns")]
        return
    targets = [names[one.name] for one in written]
    fresh = [one for one in written if one.name not in launch.given]
    if fresh and len(targets) == 1:
        launch.allocations.append(f"{targets[0]} = output_like(reference, {arguments})")
    elif fresh:
        launch.allocations.append(f"{', '.join(targets)} = outputs_like(reference, {arguments})")
    for one in written:
        if one.name in launch.given:  # it is loaded too: a copy is written over
            source = launch.given[one.name]
            launch.allocations.append(f"{names[one.name]} = {source}.clone()")
        elif one.kind == ADDED:
            launch.allocations.append(f"{names[one.name]}.zero_()")
        launch.given[one.name] = names[one.name]
    launch.outputs = targets


def _numbers(kernel: Sequence[KernelParameter], definition: Definition, launch: Launch) -> None:
    """Give numbers and constants: arguments of the same name, sizes, or the example's values."""
    arguments = {one.name.lower(): one for one in definition.parameters if not one.is_tensor}
    dims: Mapping[str, int] = {
        one.name: one.value.dim() for one in definition.parameters if isinstance(one.value, Tensor)
    }
    tensors = [
        Known(launch.given[one.name], dims.get(launch.given[one.name]))
        for one in kernel
        if one.kind in (INPUT, *WRITTEN)
    ]
    numbers = [one for one in kernel if one.kind in (NUMBER, CONSTANT)]
    by_value = _by_value(kernel)
    by_name = {text.name: text for text in tensors}
    aliases = {one.plain: launch.given[one.name] for one in kernel if one.kind in (INPUT, *WRITTEN)}
    known = [Known(alias, by_name[name].dims) for alias, name in aliases.items()]
    sized = size_texts([one.name for one in numbers if one.kind == NUMBER], known)
    sized |= _by_text(numbers, known)
    fixed = {name.lower(): value for name, value in definition.fixed.items()}
    for one in numbers:
        if one.name.lower() in fixed:
            launch.given[one.name] = literal(fixed[one.name.lower()])
            continue
        argument = arguments.get(one.name.lower())
        if argument is not None:
            # torch.compile passes floats as 0-d tensors, which a kernel takes for pointers.
            is_float = argument.annotation == "float"
            text = f"float({argument.name})" if is_float else argument.name
            launch.given[one.name] = text
        elif one.name in sized and sized[one.name] in by_value.get(one.name, [sized[one.name]]):
            alias = sized[one.name].partition(".")[0]
            text = re.sub(rf"\b{re.escape(alias)}\b", aliases[alias], sized[one.name])
            launch.given[one.name] = text
            if not one.size:
                launch.guesses.append(f"{one.name} is {text}, by its name")
        elif one.kind == NUMBER and by_value.get(one.name):
            is_stride = re.search(r"stride|^s[a-z0-9]$", one.name.lower()) is not None
            texts = by_value[one.name]
            text = next((text for text in texts if ("stride" in text) == is_stride), texts[0])
            alias = text.partition(".")[0]
            launch.given[one.name] = re.sub(rf"^{re.escape(alias)}\b", aliases[alias], text)
            launch.guesses.append(f"{one.name} is {launch.given[one.name]}, by its value")
        elif one.kind == NUMBER:
            launch.given[one.name] = launch.blank(one.name, f"the kernel's {one.name}")


def _by_text(numbers: Sequence[KernelParameter], known: Sequence[Known]) -> dict[str, str]:
    """Return the sizes that a kernel's text shows its numbers to be."""
    found = {}
    for one in numbers:
        if one.size == "width" and known:
            found[one.name] = f"{max(known, key=lambda each: each.dims or 0).name}.shape[-1]"
        elif one.size and one.size != "width":
            found[one.name] = one.size
    return found


def _by_value(kernel: Sequence[KernelParameter]) -> dict[str, list[str]]:
    """Return, for each number whose value the example gives, the sizes of the example's tensors
    that have this value; where only an output has the size, of that."""
    tensors = [
        (one, one.default)
        for kinds in ((INPUT, UPDATED), (OUTPUT, ADDED))
        for one in kernel
        if one.kind in kinds and isinstance(one.default, Tensor)
    ]
    found: dict[str, list[str]] = {}
    for one in kernel:
        if one.kind != NUMBER or type(one.default) is not int or not tensors:
            continue
        found[one.name] = [
            f"{pointer.plain}.{text}"
            for pointer, tensor in tensors
            for text, value in _sizes_of(tensor)
            if value == one.default
        ]
    return found


def _sizes_of(tensor: Tensor) -> list[tuple[str, int]]:
    dims = tensor.dim()
    found = [("numel()", tensor.numel())]
    if dims:
        found += [("shape[-1]", tensor.shape[-1])]
    found += [(f"shape[{axis}]", size) for axis, size in enumerate(tensor.shape)]
    found += [(f"stride({axis})", step) for axis, step in enumerate(tensor.stride())]
    if dims > 1:
        found += [("stride(-2)", tensor.stride(-2))]
    return found
