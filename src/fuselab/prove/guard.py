"""Notice, and undo, that what an operator declares replaces functions by which it is judged.

The process that holds the reference imports the user's file, as it must. A file that replaces
``torch.nn.functional.silu`` there would make the reference compute what its kernel computes. This
guard compares the functions and classes of the modules that a reference may call with those before
the import, after the import and after every answer. It is code in the same process, so it stops
what a file does openly, and not what hides from it; docs/threat_model.md says so.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Iterator
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULES = (
    *("torch", "torch._C._nn", "torch._C._linalg", "torch._C._special", "torch._C._fft"),
    *("torch.nn.functional", "torch.linalg", "torch.special", "torch.fft", "torch.autograd"),
    *("torch.nn", "torch.functional", "torch._VF"),
    *("torch.func", "torch.library", "torch.random", "torch.testing", "torch.utils._pytree"),
)
_code = attrgetter("__code__")
# PyTorch replaces them itself when its compiler is first imported, which any call may do.
_OF_DYNAMO = {
    (torch, "manual_seed"),
    (torch.nn.Module, "__init__"),
    (torch.nn.Module, "__setstate__"),
}


class Guard:
    """The functions and classes of the modules that matter, as they are when it is made."""

    def __init__(self) -> None:
        found = [(holder, _functions(holder)) for holder in _holders()]
        # itemgetter gives a tuple of two items or more.
        self._before = [(holder, functions) for holder, functions in found if len(functions) > 1]
        # Reading and comparing all values of a holder at once takes a tenth of a loop's time.
        self._all_of = [
            (itemgetter(*functions), tuple(functions.values())) for _, functions in self._before
        ]
        self._layers: list[tuple[Any, FunctionType]] = []
        written = {
            value: f"{_name(holder)}.{name}"
            for holder, functions in found
            for name, value in functions.items()
            if isinstance(value, FunctionType)
        }
        for layer in vars(torch.nn).values():
            forward = vars(layer).get("forward") if isinstance(layer, type) else None
            if isinstance(forward, FunctionType):
                written.setdefault(forward, f"{_name(layer)}.forward")
                self._layers.append((layer, forward))
        self._written, self._names = tuple(written), tuple(written.values())
        self._bodies = tuple(map(_body, self._written))
        self._traces = traces()
        self._kernels, self._modes = _kernels_of_torch(), modes()
        self._registered = len(torch.library._impls)

    def undo(self) -> list[str]:
        """Put back what was replaced since, and return the names.

        A kernel of PyTorch's own operators and a mode cannot be put back; they are named once.
        """
        replaced = [] if self._is_untouched() else self._restored()
        replaced += self._replaced_layers()
        if not all(map(is_, map(_code, self._written), map(itemgetter(0), self._bodies))):
            replaced += self._rewritten()
        if traces() != self._traces:
            replaced.append("the functions that sys calls for every line")
            restore_traces(self._traces)
        kernels, entered = self._kernels, modes()
        if len(torch.library._impls) != self._registered:
            kernels, self._registered = _kernels_of_torch(), len(torch.library._impls)
        replaced += [f"the kernel of {name}" for name in sorted(kernels - self._kernels)]
        if entered != self._modes:
            replaced.append("the mode that torch's operators run under")
        self._kernels, self._modes = kernels, entered
        return replaced

    def _is_untouched(self) -> bool:
        try:
            return all(
                all(map(is_, get(vars(holder)), values))
                for (holder, _), (get, values) in zip(self._before, self._all_of, strict=True)
            )
        except KeyError:  # one of them was deleted
            return False

    def _replaced_layers(self) -> list[str]:
        """Give layers whose ``forward`` was replaced their own, and return the names."""
        replaced = []
        for layer, forward in self._layers:
            if layer.forward is not forward:
                replaced.append(f"{_name(layer)}.forward")
                layer.forward = forward
        return replaced

    def _rewritten(self) -> list[str]:
        """Give functions whose body was exchanged their own, and return the names."""
        changed = []
        for function, name, body in zip(self._written, self._names, self._bodies, strict=True):
            if function.__code__ is not body[0]:
                changed.append(f"the body of {name}")
                function.__code__, function.__defaults__ = body
        return changed

    def _restored(self) -> list[str]:
        replaced = []
        is_of_dynamo = False
        for holder, functions in self._before:
            now = vars(holder)
            for name, value in functions.items():
                if now.get(name) is not value:
                    if (holder, name) in _OF_DYNAMO and _is_of_dynamo(now.get(name), value):
                        functions[name], is_of_dynamo = now[name], True
                        continue
                    replaced.append(f"{_name(holder)}.{name}")
                    setattr(holder, name, value)
        if is_of_dynamo:
            self._all_of = [
                (itemgetter(*functions), tuple(functions.values())) for _, functions in self._before
            ]
        return replaced


def _is_of_dynamo(now: Any, before: Any) -> bool:
    """Return whether a method of a layer is the one by which torch.compile, when it first compiles
    a model, has it counted, and calls the one that was there."""
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    install = getattr(guard, "install_generation_tagging_init", None)
    if not isinstance(install, FunctionType) or not isinstance(now, FunctionType):
        return False
    held = [cell.cell_contents for cell in now.__closure__ or ()]
    return now.__code__ in install.__code__.co_consts and held == [before]


@functools.cache
def _functions_of_torch() -> tuple[tuple[Any, str], ...]:
    return tuple(
        (holder, name)
        for holder in (*_holders_of_torch(), builtins, math)
        for name in _functions(holder)
        if (holder, name) not in _OF_DYNAMO
    )


def functions_by_name() -> dict[str, Any]:
    """Return the functions and classes of PyTorch's modules, and Python's own, that there were at
    the first call, under their full names."""
    return {
        f"{_name(holder)}.{name}": vars(holder).get(name) for holder, name in _functions_of_torch()
    }


def restore_functions(before: dict[str, Any]) -> None:
    """Put back the functions that ``functions_by_name`` has returned, where others stand now."""
    for (holder, name), value in zip(_functions_of_torch(), before.values(), strict=True):
        if vars(holder).get(name) is not value:
            setattr(holder, name, value)


def attributes_by_name() -> dict[str, Any]:
    """Return the attributes of PyTorch's modules but for modules, which are imported late, and what
    its compiler notes in classes: plain values as they are, and the classes of all others, under
    their full names."""
    return {
        f"{_name(holder)}.{name}": value if _is_plain(value) else type(value)
        for holder, name, value in _attributes_of_torch()
    }


def restore_attributes(before: dict[str, Any]) -> None:
    """Delete the attributes that ``attributes_by_name`` has not returned, and give plain ones their
    values back."""
    for holder, name, value in _attributes_of_torch():
        full = f"{_name(holder)}.{name}"
        if full not in before:
            delattr(holder, name)
        elif _is_plain(value) and _is_plain(before[full]) and value != before[full]:
            setattr(holder, name, before[full])


def _attributes_of_torch() -> list[tuple[Any, str, Any]]:
    return [
        (holder, name, value)
        for holder in _holders_of_torch()
        for name, value in vars(holder).items()
        if not (isinstance(value, ModuleType) or name.startswith("___"))
    ]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and value == value


def _holders_of_torch() -> Iterator[Any]:
    yield from (sys.modules[name] for name in _MODULES if name in sys.modules)
    yield torch.Tensor
    yield torch.nn.Module


def _holders() -> Iterator[Any]:
    yield from (*_holders_of_torch(), builtins, math)
    yield from (
        module for name, module in list(sys.modules.items()) if name.startswith("fuselab.prove.")
    )


def _functions(holder: Any) -> dict[str, Any]:
    """Return the functions, classes and modules that a module or class holds under a name."""
    return {
        name: value
        for name, value in vars(holder).items()
        if name != "__class__" and (callable(value) or isinstance(value, ModuleType))
    }


def _body(function: FunctionType) -> tuple[CodeType, Any]:
    return function.__code__, function.__defaults__


def traces() -> tuple[Any, Any]:
    """Return the functions that Python calls for every line and for every call."""
    return sys.gettrace(), sys.getprofile()


def restore_traces(before: tuple[Any, Any]) -> None:
    """Give Python the functions back that ``traces`` has returned."""
    sys.settrace(before[0])
    sys.setprofile(before[1])


def modes() -> list[Any]:
    """Return the modes of Python that PyTorch's operators run under."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def _kernels_of_torch() -> set[str]:
    """Return the kernels of PyTorch's own operators that were registered from Python and compute.

    PyTorch itself registers others late: those of shapes, and those that vmap takes apart.
    """
    computing = ("/CPU", "/CUDA", "Autograd", "AutogradCPU", "AutogradCUDA")
    return {
        key
        for key in map(str, torch.library._impls)
        if key.startswith("aten/") and key.endswith(computing)
    }


def _name(holder: Any) -> str:
    if holder is torch.Tensor:
        return "torch.Tensor"
    inside = f"{holder.__module__}." if isinstance(holder, type) else ""
    return f"{inside}{holder.__name__}"
