"""The subject of a check: one implementation of one operator, in one dtype, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ArgumentError, FuselabError
from fuselab.op import Case, FusedOp, Inputs, dtype_name, tensors_in
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import (
    differentiable,
    mapped,
    tensor_names,
    with_own_copies,
    written_places,
)
from fuselab.prove.draw import LARGE, LAYOUTS, VALUES, RecordedDraw, describe
from fuselab.prove.outputs import floating, output_names, outputs_in
from fuselab.runtime import dispatch
from fuselab.runtime.dispatch.overlap import overlaps_itself

_INTERPRETED_SIZE = 1900  # the interpreter takes 0.6 ms per program, of which a row may be one


@dataclass(frozen=True)
class Trial:
    """One set of arguments to try; ``draw`` continues drawing (upstream gradients, fresh
    values)."""

    args: tuple[Any, ...]
    draw: RecordedDraw
    title: str

    def describe(self, op: FusedOp) -> tuple[str, ...]:
        """Return one line per argument (one per tensor of a sequence), then a line for each other
        draw."""
        lines = []
        notes = list(self.draw.notes)
        names = iter(tensor_names(op, self.args))
        for name, value in zip(op.signature.parameters, self.args, strict=True):
            tensors = tensors_in((value,))
            if not tensors:
                lines.append(f"{name}={value!r}")
            for tensor in tensors:
                # The note of a drawn tensor also says which kind of values it holds.
                text = describe(tensor)
                note = next((note for note in notes if note.startswith(f"{text} ")), None)
                if note is not None:
                    notes.remove(note)
                lines.append(f"{next(names)}: {note or text}")
        return (*lines, *(f"upstream: {note}" for note in notes))


@dataclass(frozen=True)
class Subject:
    """One implementation, dtype and device, and the source of its inputs.

    ``first`` marks the first of the dtypes under check. ``spec`` is the text by which the user
    named the operator; a failure's command repeats it. ``budget_s`` is the time in seconds for all
    checks; None selects the default of ``fuselab.prove.check_group``.
    """

    op: FusedOp
    implementation: str
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    quick: bool = False
    interpreted: bool = False
    first: bool = True
    spec: str = ""
    budget_s: float | None = None
    public: Callable[..., Any] = field(init=False)
    is_written: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "public", dispatch.operator(self.op))
        is_written = tuple(name in self.op.mutates for name in self.op.signature.parameters)
        object.__setattr__(self, "is_written", is_written)

    def settings(self) -> dict[str, Any]:
        """Return what another process needs to make this subject, as plain JSON values."""
        kept = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        del kept["op"]
        return kept | {"device": str(self.device), "dtype": self.dtype_name}

    @classmethod
    def of_settings(cls, op: FusedOp, settings: Mapping[str, Any]) -> Subject:
        """Return the subject that ``settings`` describes, of an operator that this process
        loaded."""
        device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
        return cls(op, **{**settings, "device": device, "dtype": dtype})

    def call(self, *args: Any) -> Any:
        """Call the public function with this implementation asked for by name.

        Returns its result; for an operator that overwrites arguments, returns their new values,
        which are written to copies.
        """
        return self._called(self.public_named, args)

    def call_alone(self, *args: Any) -> Any:
        """Call the implementation's own forward, without the public function around it; see
        ``call``."""
        return self._called(self.op.implementations[self.implementation].forward, args)

    def public_named(self, *args: Any) -> Any:
        return self.public(*args, implementation=self.implementation)

    def _called(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if not self.op.mutates:
            return function(*args)
        if torch.compiler.is_compiling():
            return self._called_in_a_graph(args)
        args = with_own_copies(self.op, args)
        function(*args)
        return self.op.mutated(args)

    def _called_in_a_graph(self, args: Sequence[Any]) -> Any:
        copies = [
            mapped(torch.clone, [value])[0] if is_written else value
            for value, is_written in zip(args, self.is_written, strict=True)
        ]
        self.public_named(*copies)
        return tensors_in(
            [copy for copy, is_written in zip(copies, self.is_written, strict=True) if is_written]
        )

    def results(self, *args: Any) -> list[Tensor]:
        """Return the tensors that ``call`` returns, as a list."""
        return list(outputs_in(self.call(*args)))

    def expected(self, *args: Any) -> list[Tensor]:
        """Return the tensors that the reference returns, as a list."""
        return list(outputs_in(self.op.reference(*args)))

    def bar(self, args: Sequence[Any]) -> Bar:
        """Return the bar for the results of a call."""
        return Bar(lambda values: self.expected(*values), args, self.result_names(args))

    def result_names(self, args: Sequence[Any]) -> list[str]:
        """Return the name of each result of a call: an output, or an argument written over."""
        arguments = tensor_names(self.op, args)
        written = [arguments[place] for place in written_places(self.op, args)]
        return written or output_names(self.op)

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def max_numel(self) -> int:
        """The largest product of drawn sizes; the interpreter's 0.6 ms per program limits it."""
        if self.interpreted:
            return 1 << 10
        return 1 << (18 if self.device.type == "cuda" else 14)

    def source(self, check: str, index: int) -> random.Random:
        """Return one trial's random source; every implementation gets the same, and so the same
        inputs."""
        return random.Random(f"{self.seed}|{self.op.name}|{self.dtype_name}|{check}|{index}")

    def draw(
        self,
        check: str,
        index: int,
        layouts: Sequence[str] = LAYOUTS,
        values: Sequence[str] = VALUES,
        replay: Sequence[int] | None = None,
        max_numel: int | None = None,
        turn: int | None = None,
        large: bool = False,
        small: bool = False,
    ) -> Trial | None:
        """Draw one trial, or return None where the reference or the implementation refuses it.

        A ``large`` one exceeds a number of elements of ``LARGE``; under the interpreter only the
        first of them, with at most ``_INTERPRETED_SIZE`` rows. The sizes of
        a ``small`` one are below 10.
        """
        draw = RecordedDraw(
            self.device,
            self.dtype,
            source=self.source(check, index),
            replay=replay,
            layouts=layouts,
            values=values,
            max_numel=min(max_numel or self.max_numel, self.max_numel)
            if not large
            else 2 * LARGE[-1],
            turn=turn,
            names=random.Random(f"{self.seed}|{self.op.name}") if self.quick else None,
            small=small,
            large=0 if not large else 1 if self.interpreted else len(LARGE),
            largest_size=_INTERPRETED_SIZE if self.interpreted else 1 << 30,
        )
        try:
            inputs = self.op.draw(draw) if self.op.draw is not None else self._vary_a_case(draw)
        except ArgumentError:  # the reference accepts nothing that was drawn
            return None
        return self._accepted(inputs, draw, "drawn")

    def from_case(self, check: str, case: Case) -> Trial | None:
        """Return the trial that one of the operator's own cases makes, or None where it is
        refused."""
        draw = RecordedDraw(
            self.device,
            self.dtype,
            source=self.source(check, 0),
            layouts=("contiguous",),
            values=("normal",),
        )
        generator = torch.Generator().manual_seed(self.seed)
        inputs = case.make(self.device, self.dtype, generator)
        return self._accepted(inputs, draw, case.name)

    def redrawn(self, trial: Trial) -> Trial | None:
        """Draw ``trial`` again with contiguous tensors and other seeds for all values."""
        choices = list(trial.draw.choices)
        for place in trial.draw.seeds:
            choices[place] += 1
        return self.draw("redrawn", 0, ("contiguous",), ("normal",), choices, trial.draw.max_numel)

    def _accepted(self, inputs: Inputs, draw: RecordedDraw, title: str) -> Trial | None:
        try:
            args = self.op.bind(inputs)
            self.op.validate(*args)
        except (FuselabError, TypeError):
            return None
        # An operator that overwrites such a tensor refuses it; the check "shared memory" covers
        # that.
        if any(map(overlaps_itself, self.op.mutated(args))):
            return None
        if dispatch.why_not(self.op, self.implementation, args) is not None:
            return None
        return Trial(args, draw, title)

    def small_cases(self) -> list[Case]:
        """Return the cases to check: those tagged ``boundary``, or in a full check on a GPU all
        that are not huge.

        If none is tagged ``boundary``, return those that are not for timing, or else the first one.
        """
        cases = [case for case in self.op.cases if "huge" not in case.tags]
        if self.device.type == "cuda" and not self.quick:
            return cases
        timed = {"bench", "sweep"}
        return (
            [case for case in cases if "boundary" in case.tags]
            or [case for case in cases if not case.tags & timed]
            or cases[:1]
        )

    def _vary_a_case(self, draw: RecordedDraw) -> Inputs:
        """Return a case's inputs with drawn values and layouts, for an operator without
        ``draw``."""
        case = draw.choice(self.small_cases())
        # Integers and booleans keep the case's values, which therefore differ between trials.
        generator = torch.Generator().manual_seed(self.seed + draw.below(1 << 16))
        made = case.make(torch.device("cpu"), self.dtype, generator)

        def vary(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return draw.tensor(*value.shape, dtype=value.dtype)
            return value.to(self.device) if isinstance(value, Tensor) else value

        values = mapped(vary, list(made.kwargs.values()))
        return Inputs(tuple(mapped(vary, made.args)), dict(zip(made.kwargs, values, strict=True)))

    def differentiable(self, args: Sequence[Any]) -> list[int]:
        """Return the places of the tensors that can have a gradient."""
        return differentiable(self.op, args)

    def upstream(self, trial: Trial) -> tuple[Tensor, ...]:
        """Draw an upstream gradient for each floating output of ``trial``."""
        return tuple(
            trial.draw.gradient(*output.shape, dtype=output.dtype)
            for output in floating(self.expected(*trial.args))
        )
