"""Every way to run an operator's call: eager, its peers, TorchScript, torch.compile, ours."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import UnknownNameError
from fuselab.op import FusedOp, tensors_in
from fuselab.prove.arguments import filled
from fuselab.runtime import dispatch

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Provider:
    """One way to run the call.

    ``prepare(args)`` returns the function to time and the arguments to call it with. It may
    compile, and it raises any error that prevents the call. ``refuses(args)`` returns in a few
    words why an implementation does not take these arguments, or None; ``note(args)`` returns what
    a reader of the provider's row must know, or None. A provider with ``asked_only`` runs only when
    asked for by name. The results of one that draws random numbers of its own are not
    ``is_compared``.
    """

    name: str
    kind: str
    prepare: Callable[[Arguments], tuple[Function, Arguments]]
    refuses: Callable[[Arguments], str | None] = lambda args: None
    note: Callable[[Arguments], str | None] = lambda args: None
    asked_only: bool = False
    is_compared: bool = True


def providers(op: FusedOp) -> dict[str, Provider]:
    """Return every provider of ``op`` by name, in the order of the tables."""
    plain = op.drawing or op.reference
    spellings = {"eager": plain, **op.peers}
    found = [
        _plain(name, "eager" if name == "eager" else "peer", spelling)
        for name, spelling in spellings.items()
    ]
    found += [_library(name, load) for name, load in op.libraries.items()]
    found.append(Provider("torchscript", "torchscript", functools.partial(_torchscript, plain)))
    for name, spelling in spellings.items():
        title = "compile" if name == "eager" else f"compile({name})"
        found.append(_compiled(title, spelling, None))
    found.append(_compiled("compile-max-autotune", plain, "max-autotune-no-cudagraphs"))
    if op.drawing is not None:
        drawn = ("eager", "torchscript", "compile", "compile-max-autotune")
        found = [replace(one, is_compared=one.name not in drawn) for one in found]
    found += [_implementation(op, name) for name in op.implementations]
    found.append(_auto(op))
    return {provider.name: provider for provider in found}


def select(op: FusedOp, names: Sequence[str] | None) -> list[Provider]:
    """Return the providers asked for, always with ``eager`` among them.

    If ``names`` is None, return all except those that run only when asked for (max-autotune
    compiles for minutes). Raises UnknownNameError.
    """
    known = providers(op)
    if names is None:
        return [provider for provider in known.values() if not provider.asked_only]
    for name in names:
        if name not in known:
            raise UnknownNameError("provider", name, known)
    return [provider for name, provider in known.items() if name == "eager" or name in names]


def _plain(name: str, kind: str, function: Function) -> Provider:
    return Provider(name, kind, lambda args: (function, args))


def _library(name: str, load: Callable[[], Function]) -> Provider:
    return Provider(name, "peer", lambda args: (load(), args))


def _compiled(name: str, function: Function, mode: str | None) -> Provider:
    def prepare(args: Arguments) -> tuple[Function, Arguments]:
        # Every case is compiled for its own static shapes, as a user's fixed batch would be.
        return torch.compile(function, dynamic=False, mode=mode), args

    return Provider(name, "compile", prepare, asked_only=mode is not None)


def _torchscript(plain: Function, args: Arguments) -> tuple[Function, Arguments]:
    """Return the reference scripted, or a trace for these arguments where scripting fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit warns on every use that it is deprecated
        try:
            scripted = torch.jit.script(plain)
            scripted(*args)
            return scripted, args
        except Exception:  # the script compiler may raise anything
            tensors = tensors_in(args)
            places = range(len(tensors))

            def reference(*tensors: Tensor) -> Any:
                return plain(*filled(args, places, tensors))

            detached = tuple(value.detach() for value in tensors)
            return torch.jit.trace(reference, detached, check_trace=False), tensors


def _implementation(op: FusedOp, name: str) -> Provider:
    return Provider(
        name,
        "implementation",
        lambda args: (functools.partial(dispatch.operator(op), implementation=name), args),
        refuses=lambda args: dispatch.why_not(op, name, args),
    )


def _auto(op: FusedOp) -> Provider:
    def note(args: Arguments) -> str:
        chosen = dispatch.choose(op, args)
        if chosen == "reference":
            return "auto runs the reference, PyTorch's own kernels: not a result of ours"
        by = ", which a survey found faster" if dispatch.is_by_survey(op, args) else ""
        return f"auto takes {chosen}{by}"

    return Provider("auto", "auto", lambda args: (dispatch.operator(op), args), note=note)


def best_peer(medians: Mapping[str, float], kinds: Mapping[str, str]) -> str | None:
    """Return the provider with the lowest median that is not ours; None if there is none."""
    others = {
        name: median
        for name, median in medians.items()
        if kinds.get(name) in ("eager", "peer", "torchscript", "compile")
    }
    return min(others, key=others.__getitem__) if others else None
