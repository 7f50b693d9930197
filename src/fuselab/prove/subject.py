"""The subject of a check: one implementation of one operator, in one dtype, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import TargetError
from fuselab.op import FusedOp, tensors_in
from fuselab.op import dtype_name as name_of_dtype
from fuselab.prove import asked_inputs
from fuselab.prove.accuracy import Bar
from fuselab.prove.arguments import differentiable, tensor_names, written_places
from fuselab.prove.asked_calls import with_gradients
from fuselab.prove.bar_of_end import as_one_list, bar_of_end
from fuselab.prove.draw import LARGE, LAYOUTS, VALUES, RecordedDraw, describe
from fuselab.prove.facts import CaseFacts, Facts, facts_of
from fuselab.prove.held import End, Held, Here, RemoteError, results, said
from fuselab.prove.outputs import floating, output_names

_INTERPRETED_SIZE = 1900  # the interpreter takes 0.6 ms per program, of which a row may be one
_INTERPRETED_SWEEP = 130  # all small sizes, whatever programs are made of them


@dataclass(frozen=True)
class Trial:
    """One set of arguments to try; ``draw`` continues drawing (upstream gradients, fresh
    values)."""

    args: tuple[Any, ...]
    draw: RecordedDraw
    title: str

    def describe(self, op: Facts, args: Sequence[Any] | None = None) -> tuple[str, ...]:
        """Return one line per argument (one per tensor of a sequence), then a line for each other
        draw. ``args`` are shown in place of the trial's, where a call was made with others."""
        lines = []
        notes = list(self.draw.notes)
        given = self.args if args is None else args
        names = iter(tensor_names(op, given))
        for name, value, shown in zip(op.parameters, self.args, given, strict=True):
            drawn, tensors = tensors_in((value,)), tensors_in((shown,))
            if not tensors:
                lines.append(f"{name}={shown!r}")
            for place in range(max(len(drawn), len(tensors))):
                # The note of a drawn tensor also says which kind of values it holds.
                text = f"{describe(drawn[place])} " if place < len(drawn) else ""
                note = next((note for note in notes if text and note.startswith(text)), text)
                if note != text:
                    notes.remove(note)
                if place < len(tensors):
                    line = f"{next(names)}: {describe(tensors[place])} {note.removeprefix(text)}"
                    lines.append(line.rstrip())
        return (*lines, *(f"upstream: {note}" for note in notes))


@dataclass(frozen=True)
class Subject:
    """One implementation, dtype and device, and the two ends that answer for them.

    ``reference`` answers for the declaration: inputs, and what is right. ``candidate`` runs the
    implementation. Of the operator itself the subject has the ``Facts`` alone. ``device`` is where
    the ends work; tensors that come from another process lie on the CPU here. ``first`` marks the
    first of the dtypes under check. ``spec`` is the text by which the user named the operator; a
    failure's command repeats it. ``budget_s`` is the time in seconds for all checks; None selects
    the default of ``fuselab.prove.check_group``. ``copies`` bounds how many copies of the inputs a
    bar measures eager's error on; None makes as many as ``fuselab.prove.accuracy`` says.
    """

    op: Facts
    reference: End
    candidate: End
    implementation: str
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    quick: bool = False
    interpreted: bool = False
    first: bool = True
    spec: str = ""
    budget_s: float | None = None
    copies: int | None = None

    @classmethod
    def here(
        cls,
        op: FusedOp,
        implementation: str,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        quick: bool = False,
        **options: Any,
    ) -> Subject:
        """Return the subject of an operator that this process holds, both ends in this process."""
        ends = Here(Held(op)), Here(Held(op, implementation))
        return cls(facts_of(op), *ends, implementation, device, dtype, seed, quick, **options)

    def results(self, *args: Any) -> list[Tensor]:
        """Return the tensors that a call of the implementation returns, as a list."""
        found: list[Tensor] = self.candidate.ask(results, *args)
        return found

    def expected(self, *args: Any) -> list[Tensor]:
        """Return the tensors that the reference returns, as a list."""
        found: list[Tensor] = self.reference.ask(results, *args)
        return found

    def bar(self, args: Sequence[Any]) -> Bar:
        """Return the bar for the results of a call."""
        return self.bar_for(args, self.result_names(args), results)

    def result_names(self, args: Sequence[Any]) -> list[str]:
        """Return the name of each result of a call: an output, or an argument written over."""
        arguments = tensor_names(self.op, args)
        written = [arguments[place] for place in written_places(self.op, args)]
        return written or output_names(self.op)

    def bar_for(
        self,
        values: Sequence[Any],
        names: Sequence[str],
        procedure: Callable[..., Any],
        *options: Any,
        known: Sequence[Sequence[Tensor | None]] = (),
    ) -> Bar:
        """Return the bar for what ``procedure`` returns after ``options`` for ``values``, which it
        takes one by one if it is ``results``, else as one list; ``names`` are those of the
        results, ``known`` is for ``bar_of_end``."""

        def asked(values: Sequence[Any]) -> tuple[Any, ...]:
            return (*options, *(values if procedure is results else as_one_list(values)))

        bar = bar_of_end(self.reference, procedure, values, names, asked, known=known)
        return bar if self.copies is None else bar.with_few_copies(self.copies)

    def call_bar(
        self,
        values: Sequence[Any],
        places: Sequence[int] | None,
        known: Sequence[Sequence[Tensor | None]] = (),
    ) -> Bar:
        """Return the bar for the results of a call on ``values``, or for its outputs and the
        gradients of the tensors at ``places``; the upstream gradients then end ``values``."""
        if places is None:
            return self.bar_for(values, self.result_names(values), results, known=known)
        names = tensor_names(self.op, values[:-1])
        labels = [*output_names(self.op), *(f"gradient of {names[place]}" for place in places)]
        return self.bar_for(values, labels, with_gradients, places, known=known)

    @property
    def dtype_name(self) -> str:
        return name_of_dtype(self.dtype)

    @property
    def max_numel(self) -> int:
        """The largest product of drawn sizes; the interpreter's 0.6 ms per program limits it."""
        if self.interpreted:
            return 1 << 10
        return 1 << (18 if self.device.type == "cuda" else 14)

    def source(self, check: str, index: int) -> str:
        """Return the seed of one trial's random source; every implementation gets the same, and so
        the same inputs."""
        return f"{self.seed}|{self.op.name}|{self.dtype_name}|{check}|{index}"

    def draw(self, check: str, index: int, *args: Any, **options: Any) -> Trial | None:
        """Draw one trial, or return None where the reference or the implementation refuses it; the
        other arguments are those of ``_draw_asked``.

        A ``large`` one exceeds a number of elements of ``LARGE``; under the interpreter only the
        first of them, with at most ``_INTERPRETED_SIZE`` rows. The sizes of a ``small`` one are
        below 10.
        """
        asked = self._draw_asked(check, index, *args, **options)
        return self._trial(check, index, asked, self._declared(asked_inputs.drawn, *asked))

    def draw_together(
        self, check: str, indices: Sequence[int], turns: Sequence[int | None], **options: Any
    ) -> list[Trial | None]:
        """Draw the trials with several indices in one message; see ``draw``."""
        several = [
            self._draw_asked(check, index, turn=turn, **options)
            for index, turn in zip(indices, turns, strict=True)
        ]
        found = self._declared(asked_inputs.drawn_together, several)
        return [
            self._trial(check, index, asked, one)
            for index, asked, one in zip(indices, several, found, strict=True)
        ]

    def refusals(self, check: str, indices: Sequence[int], **options: Any) -> list[str]:
        """Return why the inputs of trials with these indices are refused, where they are; the
        options are those of ``draw``."""
        several = [self._draw_asked(check, index, **options) for index in indices]
        found: list[str] = self._declared(asked_inputs.refusals, several)
        return found

    def _draw_asked(
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
        swept: bool = False,
        very_large: int = 0,
    ) -> tuple[Any, ...]:
        """Return the arguments of ``asked_inputs.drawn`` for one trial."""
        most = min(max_numel or self.max_numel, self.max_numel)
        if swept and self.interpreted:
            most = _INTERPRETED_SWEEP
        options: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "replay": None if replay is None else list(replay),
            "layouts": tuple(layouts),
            "values": tuple(values),
            "max_numel": 2 * LARGE[-1] if large else most,
            "turn": turn,
            "small": small,
            "swept": swept,
            "very_large": very_large,
            "large": 0 if not large else 1 if self.interpreted else len(LARGE),
            "largest_size": _INTERPRETED_SIZE if self.interpreted else 1 << 30,
        }
        return (
            self.implementation,
            options,
            self.source(check, index),
            f"{self.seed}|{self.op.name}" if self.quick else None,
            [case.name for case in self.small_cases()],
            self.seed,
        )

    def _trial(self, check: str, index: int, asked: Sequence[Any], found: Any) -> Trial | None:
        """Return the trial that the reference's process drew, or None where it refused it."""
        if found is None:
            return None
        _, options, *_ = asked
        return Trial(found["args"], self._resumed(options, check, index, found["state"]), "drawn")

    def _declared(self, procedure: Callable[..., Any], *args: Any) -> Any:
        """Ask for inputs. Raises TargetError where what the operator declares raises."""
        try:
            return self.reference.ask(procedure, *args)
        except RemoteError as error:
            raise TargetError(
                f"{self.spec}: drawing its inputs raised {said(error, 200)}."
            ) from error

    def _resumed(self, options: Any, check: str, index: int, state: Any) -> RecordedDraw:
        source = random.Random(f"{self.source(check, index)}|more")
        draw = RecordedDraw(**{**options, "device": self.place}, source=source)
        return draw if state is None else draw.resumed(state)

    @property
    def place(self) -> torch.device:
        """The device of the tensors that this process draws and judges."""
        return self.device if isinstance(self.reference, Here) else torch.device("cpu")

    def from_case(self, check: str, case: CaseFacts) -> Trial | None:
        """Return the trial that one of the operator's own cases makes, or None where it is
        refused."""
        place = self.op.cases.index(case)
        args = self._declared(
            asked_inputs.made, self.implementation, place, self.device, self.dtype, self.seed
        )
        if args is None:
            return None
        options = {
            "device": self.device,
            "dtype": self.dtype,
            "layouts": ("contiguous",),
            "values": ("normal",),
        }
        return Trial(args, self._resumed(options, check, 0, None), case.name)

    def redrawn(self, trial: Trial) -> Trial | None:
        """Draw ``trial`` again with contiguous tensors and other seeds for all values."""
        choices = list(trial.draw.choices)
        for place in trial.draw.seeds:
            choices[place] += 1
        return self.draw("redrawn", 0, ("contiguous",), ("normal",), choices, trial.draw.max_numel)

    def small_cases(self) -> list[CaseFacts]:
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

    def differentiable(self, args: Sequence[Any]) -> list[int]:
        """Return the places of the tensors that can have a gradient."""
        return differentiable(self.op, args)

    def upstream(
        self, trial: Trial, expected: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Draw an upstream gradient for each floating output of ``trial``; ``expected`` are the
        reference's outputs where they are known."""
        outputs = self.expected(*trial.args) if expected is None else expected
        return tuple(
            trial.draw.gradient(*output.shape, dtype=output.dtype) for output in floating(outputs)
        )
