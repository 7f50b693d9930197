"""TARGET: the function or module that a verb looks at, found by file, by import path or by name.

``file.py``, ``file.py:name``, ``package.module:name`` or the name of a built-in model. The name is
a function, an ``nn.Module`` class or an ``nn.Module``; without one it is ``Model`` if the file
defines it, else the file's only public callable. The file offers ``get_inputs()``, which returns
the positional arguments, and for a class ``get_init_inputs()``, which returns those of its
constructor: the convention of public kernel problem sets.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import numpy
import torch
from torch import Tensor, nn

import fuselab.models
from fuselab import structures
from fuselab.device.select import select
from fuselab.errors import MissingTargetError, TargetError
from fuselab.inspect.user_code import (
    check_arguments,
    claim_file,
    describe_error,
    plain,
    raising_target_error,
)

SEED = 0

# The functions that a target's file may offer beside the target itself.
OFFERS = ("get_inputs", "get_init_inputs", "get_loss", "get_optimizer")


@dataclass(frozen=True)
class Target:
    """A callable with its inputs, both on ``device``.

    ``callable`` is a function or an ``nn.Module`` instance; ``args`` and ``kwargs`` are its
    arguments. ``loss`` and ``optimizer`` are the file's ``get_loss(output)`` and
    ``get_optimizer(module)``, or None if the file has none.
    """

    spec: str
    name: str
    file: str
    callable: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device
    data: str | None = None
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None

    @property
    def is_module(self) -> bool:
        return isinstance(self.callable, nn.Module)

    def run(self) -> Any:
        """Call it. Raises TargetError, with the user's line, if the user's code raises."""
        with raising_target_error(f"{self.name} raised when it ran:"):
            return self.callable(*self.args, **self.kwargs)


def load_callable(target: str, device: torch.device) -> Callable[..., Any]:
    """Return the function that a TARGET names, or an instance of its class, without its inputs.

    Raises TargetError.
    """
    with _seeded(device):
        module, name = _resolve(target)
        claim_file(_file_of(module))
        found = getattr(module, name) if name else _only_callable(module, target)
        function = _instantiate(found, name or _callable_name(module, found), module)
    return function.to(device) if isinstance(function, nn.Module) else function


def load(target: str, device: str | torch.device = "cpu", data: str | None = None) -> Target:
    """Load a TARGET, its inputs and, for a class, an instance; seeded, so that loads are equal.

    ``data`` is a path that the file's ``get_inputs(data=...)`` reads. The caller's random state is
    restored. Raises TargetError, DeviceError, or any error of the data's reader.
    """
    device = select(str(device))
    with _seeded(device):
        module, name = _resolve(target)
        claim_file(_file_of(module))
        found = getattr(module, name) if name else _only_callable(module, target)
        name = name or _callable_name(module, found)
        label = name if target not in fuselab.models.BUILT_IN else target
        function = _instantiate(found, name, module)
        args, kwargs = _inputs(module, function, name, data)
    if isinstance(function, nn.Module):
        function = function.to(device)
    return Target(
        spec=target,
        name=plain(label),
        file=_file_of(module),
        callable=function,
        args=_move(args, device),
        kwargs=_move(kwargs, device),
        device=device,
        data=data,
        loss=getattr(module, "get_loss", None),
        optimizer=getattr(module, "get_optimizer", None),
    )


def with_batch(target: Target, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with ``batch`` rows, by repeating or leaving out rows.

    Only tensors with as many rows as the target's first tensor change.
    """
    rows = batch_size(target)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows or rows == 0:
            return leaf
        repeats = (-(-batch // rows), *[1] * (leaf.dim() - 1))
        return leaf.detach().repeat(repeats)[:batch].requires_grad_(leaf.requires_grad)

    args, kwargs = target.args, dict(target.kwargs)
    return structures.mapped(args, resize), structures.mapped(kwargs, resize)


def batch_size(target: Target) -> int:
    """Return the number of rows of the first tensor argument; 0 if there is none."""
    given = structures.tensors([*target.args, *target.kwargs.values()])
    return next((leaf.shape[0] for leaf in given if leaf.dim() > 0), 0)


def on_host(target: Target) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a target's arguments on the host, in pinned memory if its device is a GPU."""
    host = torch.device("cpu")
    args, kwargs = _move(target.args, host), _move(target.kwargs, host)
    return (_pin(args), _pin(kwargs)) if target.device.type == "cuda" else (args, kwargs)


def to_device(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the result of ``on_host`` to ``device``; the copies do not wait."""
    return _move(arguments[0], device), _move(arguments[1], device)


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Start every random generator from SEED inside, and restore it after."""
    python, numbers = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        random.seed(SEED)
        numpy.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numbers)


# --- from the text to a Python module and a name in it -------------------------------------------


def _resolve(target: str) -> tuple[ModuleType, str | None]:
    """Return the imported module and the checked name in it, or None if the target has no name."""
    spec = fuselab.models.BUILT_IN.get(target, target)
    place, _, name = spec.partition(":") if ".py:" not in spec else _split_file(spec)
    if place.endswith(".py") or "/" in place or Path(place).is_file():
        module = _import_file(Path(place))
    elif name or "." in place:
        module = _import_module(place)
    else:
        raise TargetError(
            f"no file, module or built-in model is called '{plain(target)}'; a TARGET is file.py, "
            "file.py:name, package.module:name or a built-in model "
            f"({', '.join(sorted(fuselab.models.BUILT_IN)) or 'none'})"
            f"{_did_you_mean(target, fuselab.models.BUILT_IN)}."
        )
    if name:
        _check_name(module, name)
    return module, name or None


def _split_file(spec: str) -> tuple[str, str, str]:
    """Split a file spec at the colon after the last ``.py``, since a path may contain colons."""
    place, colon, name = spec.rpartition(".py:")
    return f"{place}.py", colon, name


def _import_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise TargetError(f"'{plain(path)}' is a folder; name the Python file in it.")
    if not path.is_file():
        raise MissingTargetError(f"no file '{plain(path)}'; check the path{_neighbour(path)}.")
    path = path.resolve()
    # A unique name, so that a file called torch.py or softmax.py shadows nothing.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"fuselab_target_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"'{plain(path.name)}' is not a Python file; a TARGET ends in .py.")
    module = importlib.util.module_from_spec(spec)
    _on_path(str(path.parent))
    sys.modules[name] = module
    try:
        # A script that reads the command line would read that of the verb.
        with mock.patch.object(sys, "argv", [str(path)]):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        hint = f"; {_profiled_as_script(path)}" if isinstance(error, SystemExit) else ""
        raise TargetError(
            f"importing {plain(path.name)} raised {describe_error(error)}{hint}."
        ) from error
    return module


def _profiled_as_script(path: Path) -> str:
    return f"if it is a script, 'fuselab profile -- python {plain(path.name)}' profiles it"


def _import_module(dotted: str) -> ModuleType:
    _on_path(str(Path.cwd()))
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if error.name and (dotted == error.name or dotted.startswith(f"{error.name}.")):
            raise TargetError(
                f"no module '{plain(error.name)}'; start fuselab where it can be imported, "
                "or name the file."
            ) from error
        raise TargetError(f"importing {plain(dotted)} raised {describe_error(error)}.") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {plain(dotted)} raised {describe_error(error)}.") from error


def _on_path(folder: str) -> None:
    """Keep the target's siblings importable, also those it imports when it runs."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return _did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")])


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{plain(close[0])}'?)" if close else ""


# --- from a module to the callable ---------------------------------------------------------------


def _public_callables(module: ModuleType) -> dict[str, Any]:
    """Return the public names that the file itself defines and that a TARGET may be."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in OFFERS
        and _is_target(value)
        and (isinstance(value, nn.Module) or getattr(value, "__module__", None) == module.__name__)
    }


def _is_target(value: Any) -> bool:
    if inspect.isclass(value):
        return issubclass(value, nn.Module)
    return callable(value)


def _check_name(module: ModuleType, name: str) -> None:
    file = plain(Path(_file_of(module)).name)
    if not hasattr(module, name):
        known = _public_callables(module)
        raise TargetError(
            f"{file} has no '{plain(name)}'; it has {', '.join(map(plain, known)) or 'no callable'}"
            f"{_did_you_mean(name, known)}."
        )
    if not _is_target(getattr(module, name)):
        kind = type(getattr(module, name)).__name__
        kind = "class that is no nn.Module" if kind == "type" else kind
        article = "an" if kind[0] in "aeiou" else "a"
        raise TargetError(
            f"'{plain(name)}' in {file} is {article} {kind}; a TARGET is a function or an "
            "nn.Module."
        )


def _only_callable(module: ModuleType, target: str) -> Any:
    public = _public_callables(module)
    named = getattr(module, "Model", None)  # also one that the file imports under this name
    if _is_target(named):
        return named
    if len(public) == 1:
        return next(iter(public.values()))
    file = plain(Path(_file_of(module)).name)
    if not public:
        raise TargetError(
            f"{file} defines no public function or nn.Module; it needs one to look at"
            + (f", or {_profiled_as_script(Path(file))}." if file.endswith(".py") else ".")
        )
    names = [plain(name) for name in public]
    raise TargetError(
        f"{file} defines {', '.join(names)}; say which, for example {plain(target)}:{names[0]}."
    )


def _callable_name(module: ModuleType, found: Any) -> str:
    return next(name for name, value in vars(module).items() if value is found)


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


# --- arguments -----------------------------------------------------------------------------------


def _instantiate(found: Any, name: str, module: ModuleType) -> Callable[..., Any]:
    if not inspect.isclass(found):
        return cast(Callable[..., Any], found)
    offered = callable(getattr(module, "get_init_inputs", None))
    args, kwargs = _init_arguments(_call_offer(module, "get_init_inputs") if offered else ())
    check_arguments(
        found,
        name,
        "get_init_inputs()" if offered else "building without get_init_inputs()",
        args,
        kwargs,
    )
    try:
        return cast(Callable[..., Any], found(*args, **kwargs))
    except Exception as error:
        raise TargetError(f"building {plain(name)} raised {describe_error(error)}.") from error


def _init_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs from ``[a, b]``, ``{"hidden": 8}`` or the problem sets'
    ``[[a, b], {"hidden": 8}]``."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, list | tuple):
        return (given,), {}
    if len(given) == 2 and isinstance(given[0], list | tuple) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def _inputs(
    module: ModuleType, function: Callable[..., Any], name: str, data: str | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    file = plain(Path(_file_of(module)).name)
    offer = getattr(module, "get_inputs", None)
    if not callable(offer):
        raise TargetError(
            f"{file} has no get_inputs(); add one that returns the list of arguments of "
            f"{plain(name)}."
        )
    if data is not None and "data" not in inspect.signature(offer).parameters:
        raise TargetError(
            f"--data was given, but get_inputs() in {file} takes no parameter 'data'; "
            "add it, or leave --data out."
        )
    given = _call_offer(module, "get_inputs", **({} if data is None else {"data": data}))
    if isinstance(given, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(given)
    elif isinstance(given, Tensor):
        args, kwargs = (given,), {}
    elif isinstance(given, list | tuple):
        args, kwargs = tuple(given), {}
    else:
        raise TargetError(
            f"get_inputs() in {file} returned {type(given).__name__}; it must return the list of "
            f"arguments of {plain(name)}."
        )
    called = function.forward if isinstance(function, nn.Module) else function
    check_arguments(called, name, "get_inputs()", args, kwargs)
    return args, kwargs


def _call_offer(module: ModuleType, offer: str, **arguments: Any) -> Any:
    torch.manual_seed(SEED)
    file = plain(Path(_file_of(module)).name)
    with raising_target_error(f"{offer}() in {file} raised"):
        return getattr(module, offer)(**arguments)


def _move(value: Any, device: torch.device) -> Any:
    """Move tensors and modules to ``device``; leaves stay leaves."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf.to(device)
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device, non_blocking=True)
        return moved.requires_grad_(leaf.requires_grad)

    return structures.mapped(value, move)


def _pin(value: Any) -> Any:
    def pin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().pin_memory().requires_grad_(leaf.requires_grad)

    return structures.mapped(value, pin)
