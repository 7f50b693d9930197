"""The definition of a new package's operator: its signature, its reference, and example inputs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.ejection.package import Package, planned_package
from fuselab.ejection.write_reference import outputs_type, reference_text
from fuselab.errors import EjectError, TargetError
from fuselab.inspect.user_code import raising_target_error
from fuselab.op import dtype_name
from fuselab.packaging.python_source import sliced

MISSING: Any = inspect.Parameter.empty
ANNOTATIONS = (
    "Tensor", "Tensor | None", "Sequence[Tensor]", "float", "int", "int | None", "bool", "str",
    "str | None", "torch.dtype", "torch.dtype | None", "Sequence[int]", "Sequence[bool]",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter of the operator. ``value`` is the example's, ``default`` is Python text."""

    name: str
    annotation: str
    value: Any = MISSING
    default: str | None = None

    @property
    def is_tensor(self) -> bool:
        return "Tensor" in self.annotation

    @property
    def text(self) -> str:
        return f"{self.name}: {self.annotation}" + (f" = {self.default}" if self.default else "")


@dataclass(frozen=True)
class Definition:
    """The operator: its signature, its reference, and examples of its arguments.

    ``text`` is that of ``reference.py``, whose ``reference`` takes ``parameters`` and returns
    ``outputs`` tensors. ``package`` is what eject makes of it, from which the shapes that go
    together are known, and its backward; None where eject refuses it. ``blanks`` are what only the
    user can know. ``fixed`` are arguments of the function that the operator does not have, with
    their values.
    """

    parameters: tuple[Parameter, ...]
    outputs: int
    text: str
    package: Package | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    blanks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters)

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.parameters if one.is_tensor)

    @property
    def has_examples(self) -> bool:
        return all(one.value is not MISSING or one.default for one in self.parameters)


def of_callable(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    backward: bool,
) -> Definition:
    """Return the definition by a plain PyTorch function or module, with its example inputs.

    With ``backward``, or of a module, arguments that are no tensors are fixed as the example gives
    them. Raises EjectError where that backward cannot be ejected; TargetError.
    """
    if not backward and not isinstance(function, nn.Module):
        return _of_function(function, args, kwargs, name)
    if backward:
        args, kwargs = _requiring_gradients(args, kwargs, isinstance(function, nn.Module))
    package = planned_package(function, args, kwargs, name, not backward, keeps_residuals=False)
    captured = package.captured
    if captured.seed is not None or captured.written:
        what = "drops elements at random" if captured.seed else "writes over its arguments"
        raise EjectError(f"{name} {what}, which a kernel of your own cannot be compared with.")
    if backward and not package.backward:
        raise EjectError(f"{name} has no gradient that --backward could write.")
    fixed = _fixed(function, args, kwargs)
    values = {
        one.name: _like(one.tensor, captured.ranges.get(one.name, (0, 1)))
        for one in captured.arguments
    }
    return Definition(
        parameters=tuple(Parameter(one, "Tensor", values[one]) for one in package.parameters),
        outputs=len(package.output_names),
        text=reference_text(package.formulas, package.output_names),
        package=package,
        notes=tuple(f"{key} is fixed at {value!r}" for key, value in fixed.items()),
        fixed=fixed,
    )


def _fixed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an example, and the defaults, that are no tensors."""
    called = function.forward if isinstance(function, nn.Module) else function
    bound = inspect.signature(called).bind(*args, **kwargs)
    bound.apply_defaults()
    plain = (bool, int, float, str)
    return {key: value for key, value in bound.arguments.items() if isinstance(value, plain)}


def _like(tensor: Tensor, limits: tuple[int, int]) -> Tensor:
    """Return a tensor with a captured one's sizes: without memory, or of integers in limits."""
    shape = [one if isinstance(one, int) else one.node.hint for one in tensor.shape]
    if tensor.is_floating_point():
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    low, high = limits
    values = torch.full(shape, low, dtype=tensor.dtype)
    values.view(-1)[-1:] = high
    return values


def _requiring_gradients(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_module: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the example with every floating tensor requiring a gradient, unless it says itself
    which do."""
    given = [*args, *kwargs.values()]
    said = any(isinstance(one, Tensor) and one.requires_grad for one in given)

    def required(value: Any) -> Any:
        if said or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().clone().requires_grad_()

    return [required(one) for one in args], {key: required(one) for key, one in kwargs.items()}


def _of_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Definition:
    label = getattr(function, "__name__", name)
    parameters = parameters_of(function, args, kwargs, label)
    outputs = _outputs_of(function, args, kwargs, label)
    text, files = _reference_file(function, label, parameters, outputs)
    package = None
    try:
        planned = planned_package(function, args, kwargs, name, inference=True)
    except EjectError:
        planned = None
    if planned is not None:
        tensors = tuple(one.name for one in parameters if one.is_tensor)
        captured = planned.captured
        if captured.parameters == tensors and not captured.written:
            package = planned
    return Definition(tuple(parameters), outputs, text, package, files)


def parameters_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], label: str
) -> list[Parameter]:
    """Return a function's parameters, annotated as it says or as the example shows. Raises
    TargetError."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise TargetError(
            f"the example inputs of get_inputs() do not fit {label}{signature}: {error}."
        ) from error
    found = []
    for name, one in signature.parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise TargetError(
                f"{label} takes *{name}; an operator has a fixed number of parameters: name them."
            )
        value = bound.arguments.get(name, one.default)
        annotation = _annotation(one, value, f"{label}({name})")
        if name in bound.arguments and not _suits(annotation, value):
            raise TargetError(
                f"the example inputs of get_inputs() do not fit {label}{signature}: '{name}' is "
                f"{annotation}, and they have {annotation_of(value)} there."
            )
        found.append(Parameter(name, annotation, value, _default(one.default)))
    return found


def _suits(annotation: str, value: Any) -> bool:
    """Return whether an example's value can be one of a parameter annotated so."""
    found = annotation_of(value)
    if value is None:
        return annotation.endswith("| None")
    plain = annotation.removesuffix(" | None")
    return found in (None, plain) or (plain, found) == ("float", "int")


def _default(value: Any) -> str | None:
    if value is MISSING:
        return None
    return literal(value)


def literal(value: Any) -> str:
    """Return the Python text of a plain value."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _annotation(parameter: inspect.Parameter, value: Any, label: str) -> str:
    """Return the annotation of a parameter in the words of the contract. Raises TargetError."""
    written = parameter.annotation
    if written is not MISSING:
        text = written if isinstance(written, str) else inspect.formatannotation(written)
        text = text.replace("torch.Tensor", "Tensor").replace("typing.", "")
        text = text.replace("collections.abc.", "").replace("List[", "Sequence[")
        if text.startswith("Optional["):
            text = f"{text[9:-1]} | None"
        text = text.replace("list[", "Sequence[")
        if text in ANNOTATIONS:
            return text
    kind = annotation_of(value)
    if kind == "Tensor" and parameter.default is None:
        return "Tensor | None"
    if kind is None:
        said = "has no annotation and no example" if value is MISSING else f"is {value!r}"
        raise TargetError(
            f"{label} {said}; a parameter of an operator is one of {', '.join(ANNOTATIONS)}: "
            "annotate it, or give it a value in get_inputs()."
        )
    return kind


def annotation_of(value: Any) -> str | None:
    """Return the annotation of an example's value; None for a value that no operator takes."""
    if isinstance(value, Tensor):
        return "Tensor"
    if value is None:
        return "Tensor | None"
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind.__name__
    if isinstance(value, torch.dtype):
        return "torch.dtype"
    if isinstance(value, list | tuple) and value:
        inner = {annotation_of(one) for one in value}
        if inner in ({"Tensor"}, {"int"}, {"bool"}):
            return f"Sequence[{inner.pop()}]"
    return None


def _outputs_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], label: str
) -> int:
    """Return how many tensors a function returns for the example. Raises TargetError."""
    with torch.no_grad(), raising_target_error(f"{label} raised for its example inputs:"):
        returned = function(*args, **kwargs)
    if isinstance(returned, Tensor):
        return 1
    is_tuple = isinstance(returned, tuple) and len(returned) > 1
    if is_tuple and all(isinstance(one, Tensor) for one in returned):
        return len(returned)
    raise TargetError(
        f"{label} returns {type(returned).__name__}; the reference of an operator returns one "
        "tensor, or a flat tuple of several."
    )


def _reference_file(
    function: Callable[..., Any], label: str, parameters: Sequence[Parameter], outputs: int
) -> tuple[str, Mapping[str, str]]:
    """Return the text of ``reference.py`` and the files that come along: the user's function, and
    ``reference`` with annotations around it."""
    file = inspect.getsourcefile(function)
    if file is None or "." in function.__qualname__ or label == "<lambda>":
        raise TargetError(
            f"{function.__qualname__} is no function at the top of a file; its code cannot be "
            "copied into the package."
        )
    cut = sliced(Path(file), [label])
    by_name = {
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    given = [f"{one.name}={one.name}" if one.name in by_name else one.name for one in parameters]
    head = f"def reference({', '.join(one.text for one in parameters)})"
    told = f"Compute {label}({', '.join(one.name for one in parameters)})."
    called = f"{label}({', '.join(given)})"
    files = dict(cut.files)
    if label == "reference":
        files["definition.py"] = f'"""The definition, as its author wrote it."""\n\n{cut.text}'
        called = f"definition.{called}"
        body = "from __future__ import annotations\n"
        imports = ["from . import definition"]
    else:
        body, imports = cut.text, []
    text = f'"""The definition of what is right, in plain PyTorch."""\n\n{body}'
    if "from torch import Tensor" not in text:
        imports.append("from torch import Tensor")
    if any("Sequence" in one.annotation for one in parameters) and "import Sequence" not in text:
        imports.append("from collections.abc import Sequence")
    if any("torch." in one.text for one in parameters) and "import torch\n" not in text:
        imports.append("import torch")
    mark = "from __future__ import annotations\n"
    lines = "\n".join(sorted(imports, key=lambda line: line.startswith("from .")))
    plain = mark + "\nimport torch\n"
    if plain in text and imports == ["from torch import Tensor"]:
        text, lines = text.replace(plain, f"{plain}{lines}\n", 1), ""
    if lines:
        text = text.replace(mark, f"{mark}\n{lines}", 1)
    result = outputs_type(outputs)
    returned = f"    result: {result} = {called}\n    return result\n"
    return f'{text.rstrip()}\n\n\n{head} -> {result}:\n    """{told}"""\n{returned}', files


def undefined(name: str, parameters: Sequence[Parameter], outputs: int | None) -> Definition:
    """Return the definition that the user still has to write; its signature is known."""
    result = outputs_type(outputs or 1)
    head = f"def reference({', '.join(one.text for one in parameters)}) -> {result}:"
    more = "" if outputs else ", and whether that is one tensor or a tuple"
    text = f'''\
"""The definition of what is right, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


{head}
    # FILL IN: what {name} computes, in plain PyTorch that autograd understands{more}
    raise NotImplementedError
'''
    if any("Sequence" in one.annotation for one in parameters):
        text = text.replace("from torch", "from collections.abc import Sequence\n\nfrom torch", 1)
    return Definition(tuple(parameters), outputs or 1, text, blanks=("reference",))


def example_texts(definition: Definition) -> list[str]:
    """Return the texts of an example's arguments, random ones for tensors, made with ``generator``
    in ``dtype`` on ``device``."""
    return [_example_text(one) for one in definition.parameters]


def _example_text(parameter: Parameter) -> str:
    value = parameter.value
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return f"[{', '.join(map(_random, value))}]"
    if isinstance(value, Tensor):
        return _random(value)
    return literal(value) if value is not MISSING else parameter.default or "None"


def _random(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    if tensor.is_floating_point():
        return f"torch.randn({shape}, generator=generator).to(device, dtype)"
    if tensor.device.type == "meta" or not tensor.numel():
        low, high = 0, 1
    else:
        low, high = int(tensor.min()), int(tensor.max()) + 1
    drawn = f"torch.randint({low}, {high}, {shape}, generator=generator)"
    return f"{drawn}.to(device, torch.{dtype_name(tensor.dtype)})"
