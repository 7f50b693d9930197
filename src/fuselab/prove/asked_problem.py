"""Procedures for a problem and its answers: the convention of public kernel sets.

A problem's file has ``Model`` (an ``nn.Module``), ``get_inputs()`` and, where the model takes
arguments, ``get_init_inputs()``. An answer's file has ``ModelNew``, which takes the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import TargetError
from fuselab.op import tensors_in
from fuselab.prove.arguments import Storages, copy_of_storage, filled, mapped
from fuselab.prove.asked_edges import read_only
from fuselab.prove.load import changed_by_import_of, import_file
from fuselab.prove.process_state import ProcessState
from fuselab.prove.start_state import StartState, steering

PROBLEM, ANSWER = "Model", "ModelNew"
# How many calls follow one whose outputs are kept: fewer where they take long or leave much.
_MORE_CALLS = 32
_MORE_CALLS_S = 1.0
_MORE_BYTES = 1 << 28


@dataclass
class HeldModel:
    """A file with a model, and the model that was built of it."""

    path: str
    module: Any
    name: str
    model: nn.Module | None = None
    wide: nn.Module | None = None  # a copy in float64
    kept: list[Any] = field(default_factory=list)  # the outputs of the last kept call
    kept_args: list[Any] = field(default_factory=list)  # and its arguments
    several: list[list[Any]] = field(default_factory=list)  # arguments for many calls
    alive: list[list[Any]] = field(default_factory=list)  # and the outputs of these
    before: ProcessState | None = None  # the state of the process before the import
    changed: dict[str, list[str]] = field(default_factory=dict)  # see ``changed_at_start``

    def __call__(self, *args: Any) -> Any:
        """Call the model."""
        assert self.model is not None
        return self.model(*args)


def load_model(spec: str, name: str) -> HeldModel:
    """Import a file with the class ``name``. Raises TargetError where it has none, or raises."""
    path, before, start = Path(spec), ProcessState(of_import=True), StartState()
    module = import_file(path)
    changed = {"import": steering([*changed_by_import_of(module), *start.changed()])}
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TargetError(f"{path}: no nn.Module is called {name}.")
    if name == PROBLEM and not callable(getattr(module, "get_inputs", None)):
        raise TargetError(f"{path}: no function is called get_inputs.")
    return HeldModel(spec, module, name, before=before, changed=changed)


def problem_inputs(held: HeldModel, seed: int, device: torch.device) -> list[Any]:
    """Return the inputs that the problem's file makes after this seed."""
    torch.manual_seed(seed)
    return _placed(held.module.get_inputs(), device)


def initial_inputs(held: HeldModel, seed: int) -> list[Any]:
    """Return the arguments of the model's constructor."""
    torch.manual_seed(seed)
    make = getattr(held.module, "get_init_inputs", None)
    return [] if make is None else list(make())


def build(
    held: HeldModel,
    initial: Sequence[Any],
    seed: int,
    device: torch.device,
    state: dict[str, Tensor] | None,
) -> dict[str, Tensor]:
    """Build the model from its constructor's arguments after this seed, and return its state.

    A ``state`` with the same names and shapes is loaded; otherwise equal seeds must make equal
    parameters.
    """
    before = StartState()
    torch.manual_seed(seed)
    held.model = getattr(held.module, held.name)(*initial).to(device)
    held.wide = None
    held.changed["constructor"] = steering(before.changed())
    own = held.model.state_dict()
    if state is not None and {name: one.shape for name, one in own.items()} == {
        name: one.shape for name, one in state.items()
    }:
        held.model.load_state_dict(state)
    return state_of(held)


def changed_at_start(held: HeldModel) -> dict[str, list[str]]:
    """Return which state of the process the ``import`` of the file has changed, and the last call
    of the ``constructor``."""
    return held.changed


def load_state(held: HeldModel, state: dict[str, Tensor]) -> None:
    """Write other numbers into the parameters and buffers of the model that there is, in place."""
    assert held.model is not None
    held.model.load_state_dict(state)
    held.wide = None


def model_results(held: HeldModel, seed: int, values: Sequence[Any]) -> list[Tensor]:
    """Return the outputs for arguments, of which the last is the dtype of the arithmetic: float64
    asks a copy of the model in float64, any other the model as it is."""
    *args, dtype = values
    assert held.model is not None
    model = held.model
    if dtype == torch.float64:
        held.wide = held.wide or copy.deepcopy(model).double()
        model = held.wide
    torch.manual_seed(seed)
    with torch.no_grad():
        return _tensors(model(*args))


def read_only_results(held: HeldModel, seed: int, values: Sequence[Any]) -> list[Tensor]:
    """Return the outputs of a call as ``model_results`` does, on inputs in memory that may only be
    read; a call that writes there ends this process."""
    tensors = [read_only(tensor, at_end=False) for tensor in tensors_in(values)]
    return model_results(held, seed, filled(values, range(len(tensors)), tensors))


def returned(held: HeldModel, seed: int, values: Sequence[Any]) -> str:
    """Return in words what containers the outputs of a call are in; a list counts as a tuple."""
    *args, _ = values
    assert held.model is not None
    torch.manual_seed(seed)
    with torch.no_grad():
        return _containers(held.model(*args))


def _containers(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_containers, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_containers(one)}" for key, one in value.items()) + "}"
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def kept_results(held: HeldModel, seed: int, values: Sequence[Any]) -> list[Tensor]:
    """Return the outputs of a call as ``model_results`` does, and keep them here too."""
    held.kept, held.kept_args = model_results(held, seed, values), list(values)
    return held.kept


def results_kept(held: HeldModel, seed: int, values: Sequence[Any]) -> list[Any]:
    """Return the outputs that ``kept_results`` has kept, as they are after further calls for these
    values, of which two at least follow and whose outputs all stay alive."""
    begin = time.monotonic()
    alive: list[list[Tensor]] = []
    while len(alive) < _MORE_CALLS:
        alive.append(model_results(held, seed, values))
        bytes_alive = sum(one.nbytes for some in alive for one in tensors_in(some))
        is_enough = time.monotonic() - begin > _MORE_CALLS_S or bytes_alive > _MORE_BYTES
        if is_enough and len(alive) > 1:
            break
    return held.kept


def keep_several(held: HeldModel, several: Sequence[Sequence[Any]]) -> None:
    """Keep arguments for ``many_results``."""
    held.several = [list(values) for values in several]
    held.alive = []


def many_results(
    held: HeldModel, seed: int, turns: Sequence[int], copied: Sequence[int], taken: Sequence[int]
) -> list[list[Tensor]]:
    """Call for those of the kept arguments that ``turns`` names, one after the other, each after
    the seed with its number, and return the outputs of the calls whose numbers are ``taken``.

    The calls whose numbers are ``copied`` have copies of the arguments, which are gone when the
    call is done, so that the next ones lie where they lay. The outputs stay alive, as far as there
    is memory for them.
    """
    found = []
    left = _MORE_BYTES - sum(one.nbytes for some in held.alive for one in tensors_in(some))
    for number, turn in enumerate(turns):
        known: Storages = {}
        values = held.several[turn]
        if number in copied:
            values = [_copied(value, known) for value in values]
        outputs = model_results(held, seed + turn, values)
        left -= sum(one.nbytes for one in tensors_in(outputs))
        if left >= 0:
            held.alive.append(outputs)
        if number in taken:
            found.append(outputs)
    return found


def _copied(value: Any, known: Storages) -> Any:
    return copy_of_storage(value, known) if isinstance(value, Tensor) else value


def results_alive(held: HeldModel, numbers: Sequence[int]) -> list[list[Tensor]]:
    """Return the outputs of those of the calls of ``many_results``, counted from the first one,
    that are still alive."""
    return [held.alive[number] for number in numbers if number < len(held.alive)]


@torch.no_grad()
def results_kept_without_inputs(held: HeldModel) -> list[Any]:
    """Return the outputs that ``kept_results`` has kept, as they are once other values were written
    over the inputs of that call."""
    for one in tensors_in(held.kept_args):
        if one.dtype == torch.bool:
            one.logical_not_()
        elif one.is_floating_point() or one.is_complex():
            one.fill_(torch.nan)
        else:
            one.bitwise_not_()
    return held.kept


def moved_state(held: HeldModel, seed: int) -> dict[str, Tensor]:
    """Return the model's state with other numbers in its parameters, and in what a normalisation
    has counted, as training leaves them: a constructor's ones and zeros hide who does not read
    them. Parameters that are one tensor stay one."""
    assert held.model is not None
    generator = torch.Generator().manual_seed(seed)
    state = state_of(held)
    places = {name: one.data_ptr() for name, one in state.items()}
    trained = {name for name, _ in held.model.named_parameters(remove_duplicate=False)}
    known: dict[tuple[int, torch.Size], Tensor] = {}
    for name, one in state.items():
        is_counted = name.endswith(("running_mean", "running_var"))
        if not one.is_floating_point() or not (name in trained or is_counted):
            continue
        key = (places[name], one.shape)
        if key not in known:
            noise = torch.randn(one.shape, generator=generator).to(one) / 8
            is_constant = one.numel() < 2 or bool((one == one.reshape(-1)[0]).all())
            factor = noise.abs() if name.endswith("running_var") else noise
            known[key] = one + (factor if is_constant else one * factor)
        state[name] = known[key]
    return state


def changed_by_a_call(held: HeldModel, seed: int, values: Sequence[Any]) -> list[str]:
    """Return which state of the process a call changes that is not the first one, from that on
    which the process had before the file was imported."""
    *args, _ = values
    assert held.model is not None and held.before is not None
    now = ProcessState(of_import=True)
    held.before.restore()
    torch.manual_seed(seed)
    state = ProcessState()
    try:
        with torch.no_grad():
            held.model(*args)
        return state.changed()
    finally:
        now.restore()


def state_of(held: HeldModel) -> dict[str, Tensor]:
    """Return the model's parameters and buffers."""
    assert held.model is not None
    return {name: one.detach() for name, one in held.model.state_dict().items()}


def state_after(held: HeldModel, seed: int, values: Sequence[Any]) -> list[Tensor]:
    """Return the parameters and buffers that one call leaves, for values as in ``model_results``;
    the model itself stays as it is."""
    assert held.model is not None
    *args, dtype = values
    model = copy.deepcopy(held.model)
    model = model.double() if dtype == torch.float64 else model
    torch.manual_seed(seed)
    with torch.no_grad():
        model(*args)
    return [one.detach() for one in model.state_dict().values()]


def _placed(args: Sequence[Any], device: torch.device) -> list[Any]:
    return mapped(lambda one: one.to(device) if isinstance(one, Tensor) else one, list(args))


def _tensors(returned: Any) -> list[Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(returned)
    return [one.detach() if type(one) is Tensor else one for one in flat]
