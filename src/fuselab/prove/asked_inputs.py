"""Procedures for the process that holds the reference: the operator's facts, and valid inputs.

They call what the operator declares (``draw``, ``validate``, ``supports``, ``autocast``, the cases)
and never an implementation.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fuselab.errors import ArgumentError, FuselabError
from fuselab.op import FusedOp, Inputs, tensors_in
from fuselab.prove.arguments import Storages, copy_of_storage, mapped
from fuselab.prove.draw import LARGE, RecordedDraw, TooLargeError
from fuselab.prove.facts import facts_of
from fuselab.prove.held import Held
from fuselab.runtime import dispatch
from fuselab.runtime.dispatch.overlap import overlaps_itself


def operator_facts(held: Held) -> dict[str, Any]:
    """Return the operator's ``Facts`` as plain values."""
    return facts_of(held.op).plain()


def drawn(
    held: Held,
    implementation: str,
    options: Mapping[str, Any],
    source: str,
    names: str | None,
    varied: Sequence[str],
    case_seed: int,
) -> dict[str, Any] | None:
    """Draw the arguments of one trial, and return them with the state of the draw; None where the
    reference or the implementation refuses them.

    ``options`` are those of ``RecordedDraw``, ``source`` and ``names`` seed its random sources. An
    operator without ``draw`` varies the cases named in ``varied``, made from ``case_seed``.
    """
    made = _inputs_drawn(held, options, source, names, varied, case_seed)
    if made is None:
        return None
    inputs, draw = made
    args = accepted(held, implementation, inputs)
    return None if args is None else {"args": args, "state": draw.state()}


def _inputs_drawn(
    held: Held,
    options: Mapping[str, Any],
    source: str,
    names: str | None,
    varied: Sequence[str],
    case_seed: int,
) -> tuple[Inputs, RecordedDraw] | None:
    """Return the inputs that the operator draws, and their draw; None where the reference accepts
    none of them."""

    def inputs_of(options: Mapping[str, Any]) -> tuple[Inputs, RecordedDraw]:
        draw = RecordedDraw(
            **options,
            source=random.Random(source),
            names=None if names is None else random.Random(names),
        )
        if held.op.draw is not None:
            return held.op.draw(draw), draw
        return _vary_a_case(held, draw, varied, case_seed), draw

    try:
        try:
            return inputs_of(options)
        except TooLargeError:  # a size stands for two dimensions, whose product is large enough
            exceeded = 1 << options["very_large"] if options["very_large"] else LARGE[-1]
            most = min(options["largest_size"], math.isqrt(exceeded) + 1)
            return inputs_of({**options, "largest_size": most})
    except ArgumentError:  # the reference accepts nothing that was drawn
        return None


def drawn_together(held: Held, several: Sequence[Sequence[Any]]) -> list[dict[str, Any] | None]:
    """Return what ``drawn`` gives for each list of its arguments."""
    return [drawn(held, *asked) for asked in several]


def refusals(held: Held, several: Sequence[Sequence[Any]]) -> list[str]:
    """Return why the operator or the implementation refuses what ``drawn`` draws for each list of
    its arguments; nothing for what is taken, or cannot be drawn."""
    reasons = []
    for implementation, *asked in several:
        made = _inputs_drawn(held, *asked)
        if made is None:
            continue
        try:
            reason = unsupported(held, implementation, held.op.bind(made[0]))
        except (FuselabError, TypeError) as error:
            reason = str(error)
        reasons += [] if reason is None else [reason]
    return reasons


def _vary_a_case(held: Held, draw: RecordedDraw, names: Sequence[str], seed: int) -> Inputs:
    """Return a case's inputs with drawn values and layouts, for an operator without ``draw``."""
    case = draw.choice([case for case in held.op.cases if case.name in names])
    # Integers and booleans keep the values of the case, which therefore differ between trials.
    generator = torch.Generator().manual_seed(seed + draw.below(1 << 16))
    made = case.make(torch.device("cpu"), draw.dtype, generator)

    def vary(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return draw.tensor(*value.shape, dtype=value.dtype)
        return value.to(draw.device) if isinstance(value, Tensor) else value

    values = mapped(vary, list(made.kwargs.values()))
    return Inputs(tuple(mapped(vary, made.args)), dict(zip(made.kwargs, values, strict=True)))


def made(
    held: Held, implementation: str, place: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Any, ...] | None:
    """Return the arguments of the operator's case at ``place``, or None where they are refused."""
    generator = torch.Generator().manual_seed(seed)
    return accepted(held, implementation, held.op.cases[place].make(device, dtype, generator))


def accepted(held: Held, implementation: str, inputs: Inputs) -> tuple[Any, ...] | None:
    """Return the bound arguments, or None where the operator or the implementation refuses them."""
    try:
        args = held.op.bind(inputs)
        held.op.validate(*args)
    except (FuselabError, TypeError):
        return None
    # An operator that overwrites such a tensor refuses it; the check "shared memory" covers that.
    if any(map(overlaps_itself, held.op.mutated(args))):
        return None
    if dispatch.why_not(held.op, implementation, args) is not None:
        return None
    return args


def refusal_of(held: Held, args: Sequence[Any]) -> str | None:
    """Return why the operator does not take ``args``, or None if it does."""
    try:
        held.op.validate(*args)
    except (FuselabError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


def unsupported(held: Held, implementation: str, args: Sequence[Any]) -> str | None:
    """Return why the operator or the implementation does not take ``args``, or None."""
    return refusal_of(held, args) or dispatch.why_not(held.op, implementation, args)


_DIMENSION = re.compile(r"(start_|end_)?(dim|axis)s?\d*")


def option_names(held: Held) -> tuple[str, ...]:
    """Return the names of the parameters that are options: all but floats and tensors that a call
    must have."""
    return tuple(
        name
        for name, parameter in held.op.signature.parameters.items()
        if parameter.annotation not in (Tensor, Sequence[Tensor], float)
    )


def other_options(
    held: Held, args: Sequence[Any], seen: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return calls that differ from ``args`` in options: for each, the new values by name.

    They are the call with every option at its default; each bool the other way; each dimension
    counted from the other end; float32 and float64 for each dtype; each optional argument left out;
    each optional tensor given, with the values of another argument. Apart from the first, a call
    is left out where ``seen``, values by name in the words of ``shown``, has several values of the
    option, or of a dimension the other one.
    """
    options, names = option_names(held), held.op.parameters
    given = dict(zip(names, args, strict=True))
    parameters = held.op.signature.parameters
    defaults = {
        name: parameters[name].default
        for name in options
        if parameters[name].default is not inspect.Parameter.empty
        and shown(parameters[name].default) != shown(given[name])
    }
    found = [defaults] if defaults else []
    first = next(iter(tensors_in(args)), None)
    for name in options:
        value, annotation = given[name], parameters[name].annotation
        if first is not None and _DIMENSION.fullmatch(name):
            turned = _turned(value, first.ndim)
            if turned is not None and shown(turned) not in seen.get(name, ()):
                found.append({name: turned})
        if len(seen.get(name, ())) > 1:
            continue
        if annotation is bool:
            found.append({name: not value})
        elif annotation is torch.dtype or torch.dtype in get_args(annotation):
            found += [{name: dtype} for dtype in (torch.float32, torch.float64) if dtype != value]
        elif type(None) in get_args(annotation) and value is not None:
            found.append({name: None})
        elif annotation == Tensor | None:
            found += [{name: tensor} for tensor in _tensors_like(args)]
    return [one for number, one in enumerate(found) if not number or one != defaults]


def shown(value: Any) -> str:
    """Return a value of an option as text, of a tensor that it is one."""
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _turned(value: Any, ndim: int) -> Any:
    """Return a dimension, or several, counted from the other end; None where it is none."""
    if isinstance(value, (tuple, list)):
        several = [_turned(one, ndim) for one in value]
        return None if not several or None in several else tuple(several)
    if not isinstance(value, int) or isinstance(value, bool) or not -ndim <= value < ndim:
        return None
    return value - ndim if value >= 0 else value + ndim


def _tensors_like(args: Sequence[Any]) -> list[Tensor]:
    """Return tensors that an optional argument might be: the last row of the first floating
    argument, and a copy of it."""
    first = next((one for one in tensors_in(args) if one.is_floating_point()), None)
    if first is None or not first.ndim or not first.numel():
        return []
    rows = first.detach().reshape(-1, first.shape[-1])
    return [rows[-1].clone(), first.detach().clone()]


def support_by_values(held: Held, implementation: str, args: Sequence[Any]) -> str | None:
    """Return how what the implementation ``supports`` differs for other values in the same memory,
    or None where only dtypes, shapes and strides decide."""
    first = dispatch.why_not(held.op, implementation, args)
    for number in (math.nan, math.inf, 0.0, 1.0):
        known: Storages = {}
        changed = mapped(lambda value: _all_being(value, number, known), list(args))  # noqa: B023
        reason = dispatch.why_not(held.op, implementation, changed)
        if (reason is None) != (first is None):
            takes, refuses = "of numbers", f"of {number:g}"
            if reason is None:
                takes, refuses = refuses, takes
            return f"takes tensors {takes} and refuses those {refuses}"
    return None


def _all_being(value: Any, number: float, known: Storages) -> Any:
    """Return a copy of a floating tensor in which all elements are ``number``, and anything else as
    it is."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    copy = copy_of_storage(value.detach(), known)
    whole = torch.empty(0, dtype=copy.dtype, device=copy.device)
    whole.set_(copy.untyped_storage()).fill_(number)
    return copy


def declared_cost(held: Held, args: Sequence[Any]) -> tuple[int, int] | None:
    """Return the bytes that the declared cost reads and writes; None where nothing is declared."""
    if getattr(held.op.cost, "__func__", None) is FusedOp._least_cost:
        return None
    cost = held.op.cost(*args)
    return int(cost.bytes_read), int(cost.bytes_written)


def peer_results(held: Held, args: Sequence[Any]) -> dict[str, list[Tensor]]:
    """Return the tensors that each of the operator's peers returns; a peer that refuses the
    arguments is left out."""
    found = {}
    for name, peer in held.op.peers.items():
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            found[name] = list(tensors_in((peer(*args),)))
    return found


def autocast_refusal(
    held: Held, implementation: str, autocast_dtype: torch.dtype, args: Sequence[Any]
) -> str | None:
    """Return why the implementation does not take what autocast makes of ``args``, or None."""
    cast = None if held.op.mutates else held.op.autocast
    made = args if cast is None else cast(autocast_dtype, *args)
    return dispatch.why_not(held.op, implementation, made)
