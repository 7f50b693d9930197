"""The bar over an end: what is right, measured where the reference is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fuselab.prove.accuracy import Bar
from fuselab.prove.asked_calls import by_definitions, by_rounding, each
from fuselab.prove.held import End

Arguments = Callable[[Sequence[Any]], Sequence[Any]]


def as_one_list(values: Sequence[Any]) -> tuple[list[Any]]:
    """Return the arguments of a procedure that takes all values as one list."""
    return (list(values),)


def bar_of_end(
    end: End,
    procedure: Callable[..., Any],
    values: Sequence[Any],
    names: Sequence[str] = (),
    arguments: Arguments = as_one_list,
    slack: float = 1.0,
    known: Sequence[Sequence[Tensor | None]] = (),
) -> Bar:
    """Return the bar for what ``procedure`` returns for ``values``.

    Every evaluation of the reference runs at ``end``, also those by the definitions of
    normalisations and those with roundings moved: a mode that is entered in this process reaches
    no other one. ``arguments(values)`` are what the procedure takes. ``names`` are those of the
    results; results without a name are called ``output``, with their number where there are
    several. The bar is ``slack`` times as wide. ``known`` are the results of
    ``accuracy.evaluations(values)``, where they were asked for together with those of other bars.
    """
    left = list(known)

    def all_of(several: Sequence[Sequence[Any]]) -> Sequence[Sequence[Tensor | None]]:
        if len(left) >= len(several):
            return [left.pop(0) for _ in several]
        found: list[Sequence[Tensor | None]] = end.ask(
            each, procedure, [tuple(arguments(values)) for values in several]
        )
        return found

    bar = Bar(
        lambda values: end.ask(procedure, *arguments(values)),
        values,
        names,
        slack,
        composed=lambda values: end.ask(by_definitions, procedure, *arguments(values)),
        rounded=lambda seed, unit, alike, lost, values: end.ask(
            by_rounding, seed, unit, alike, lost, procedure, *arguments(values)
        ),
        together=all_of,
    )
    left.clear()
    if not names:
        count = len(bar.eager)
        bar.names = ["output"] if count == 1 else [f"output {place}" for place in range(count)]
    return bar
