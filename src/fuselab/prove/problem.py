"""A problem for ``fuselab judge``: its model in a process of its own, its inputs, and what is right
on each set of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import TargetError
from fuselab.op import tensors_in
from fuselab.prove import asked_problem
from fuselab.prove.accuracy import Bar
from fuselab.prove.asked_problem import model_results
from fuselab.prove.bar_of_end import bar_of_end
from fuselab.prove.check_memory import same_bits
from fuselab.prove.held import CandidateError, RemoteError, said
from fuselab.prove.outside_clock import near_inputs, runs_at, swapped_inputs
from fuselab.prove.processes import Process


@dataclass
class Problem:
    """A problem, held by a process of its own, with what is right on each set of inputs.

    The calls of a set come after a seed of their own, so that a mask of a dropout that is drawn
    once, and kept, is wrong in the next set.
    """

    reference: Process
    device: torch.device
    seed: int
    initial: list[Any] = field(default_factory=list)
    returned: str = ""  # what kinds of containers the model's outputs are in
    state: dict[str, Tensor] = field(default_factory=dict)
    trials: list[tuple[list[Any], Bar]] = field(default_factory=list)
    # The first inputs in another order, and with a few other elements, each with words for it.
    near: list[tuple[str, list[Any], Bar]] = field(default_factory=list)
    moved: dict[str, Tensor] = field(default_factory=dict)  # the state with other parameters
    # What the file changes of the process, by its ``import`` and its ``constructor``.
    changes_at_start: dict[str, list[str]] = field(default_factory=dict)
    changes_outside: list[str] = field(default_factory=list)  # of the process, by each call
    takes_read_only: bool = False  # inputs in memory that may only be read
    changes: list[str] = field(default_factory=list)  # the names of ``state`` that a call changes
    left: Bar | None = None  # the bar for what the first call leaves, if it changes any

    def prepare(self, count: int) -> None:
        """Build the model, and compute what is right on ``count`` sets of inputs.

        Raises TargetError where the problem itself does not run.
        """
        try:
            self.initial = self.reference.ask(asked_problem.initial_inputs, self.seed)
            self.state = self.reference.ask(
                asked_problem.build, self.initial, self.seed, self.device, None
            )
            self.changes_at_start = self.reference.ask(asked_problem.changed_at_start)
            for number in range(count):
                args = self.reference.ask(
                    asked_problem.problem_inputs, self.seed + number, self.device
                )
                self.trials.append((args, self.bar(args, self.seed + number)))
            self.returned = self.reference.ask(
                asked_problem.returned, self.seed, [*self.trials[0][0], torch.float32]
            )
            (first, _), (second, _) = self.trials[:2]
            chance = random.Random(self.seed)
            for how, near in (
                ("with two elements in each other's place", swapped_inputs(first, chance)),
                ("with a few other elements", near_inputs(first, second, chance)),
            ):
                if near is not None and self.runs(near):
                    self.near.append((how, near, self.bar(near)))
            self._learn_what_a_call_leaves()
            self.moved = self.reference.ask(asked_problem.moved_state, self.seed)
            values = [*first, torch.float32]
            self.changes_outside = self.reference.ask(
                asked_problem.changed_by_a_call, self.seed, values
            )
            self.takes_read_only = self._takes_read_only(values)
            self.build(self.reference)
        except (RemoteError, CandidateError) as error:
            raise TargetError(
                f"{self.reference.spec}: the problem does not run: {said(error, 200)}."
            ) from error

    def build(self, process: Process, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Build a model with the problem's state, or another one, in a process, and return its
        state."""
        found: dict[str, Tensor] = process.ask(
            asked_problem.build, self.initial, self.seed, self.device, state or self.state
        )
        return found

    def has_its_names(self, state: dict[str, Tensor]) -> bool:
        """Return whether a model's state has the names and shapes of the problem's."""
        shapes = {name: one.shape for name, one in self.state.items()}
        return {name: one.shape for name, one in state.items()} == shapes

    def _learn_what_a_call_leaves(self) -> None:
        """Find out whether a call changes the model's state, as one of a batch normalisation in
        training mode does."""
        self.build(self.reference)
        values = [*self.trials[0][0], torch.float32]
        left = self.reference.ask(asked_problem.state_after, self.seed, values)
        for (name, before), after in zip(self.state.items(), left, strict=True):
            if not same_bits([before], [after]):
                self.changes.append(name)
        if self.changes:
            self.left = bar_of_end(
                self.reference,
                asked_problem.state_after,
                values,
                arguments=lambda values: (self.seed, list(values)),
            )

    def _takes_read_only(self, values: Sequence[Any]) -> bool:
        """Return whether the problem's model runs on inputs in memory that may only be read, which
        only a CPU's can be. A model that writes to them ends its process, which begins anew."""
        if self.device.type != "cpu":
            return False
        try:
            self.reference.ask(asked_problem.read_only_results, self.seed, values)
        except (RemoteError, CandidateError):
            return False
        return True

    def fresh_inputs(self, chance: random.Random) -> list[Any] | None:
        """Draw inputs after another seed; None where the problem makes the same ones after any."""
        args: list[Any] = self.reference.ask(
            asked_problem.problem_inputs, chance.randrange(1 << 31), self.device
        )
        (first, _), *_ = self.trials
        same = same_bits(tensors_in(first), tensors_in(args))
        return None if same else args

    def kept_results(self) -> list[Any]:
        """Return the outputs on the first inputs, which the problem's process keeps too."""
        self.build(self.reference)
        values = [*self.trials[0][0], torch.float32]
        found: list[Any] = self.reference.ask(asked_problem.kept_results, self.seed, values)
        return found

    def runs(self, args: Sequence[Any]) -> bool:
        """Return whether the problem's model takes the arguments."""
        return runs_at(self.reference, model_results, self.seed, [*args, torch.float32])

    def bar(self, args: Sequence[Any], seed: int | None = None) -> Bar:
        """Return the bar for the outputs of a call after a seed, the problem's if it is None."""
        seed = self.seed if seed is None else seed
        # The dtype of the arithmetic is a value too, so that the bar widens it with the others.
        return bar_of_end(
            self.reference,
            model_results,
            [*args, torch.float32],
            arguments=lambda values: (seed, list(values)),
        )
