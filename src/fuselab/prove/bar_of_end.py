"""The bar over an end: what is right, measured where the reference is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
) -> Bar:
    """Return the bar for what ``procedure`` returns for ``values``.

    Every evaluation of the reference runs at ``end``, also those by the definitions of
    normalisations and those with roundings moved: a mode that is entered in this process reaches
    no other one. ``arguments(values)`` are what the procedure takes. ``names`` are those of the
    results; results without a name are called ``output``, with their number where there are
    several. The bar is ``slack`` times as wide.
    """
    bar = Bar(
        lambda values: end.ask(procedure, *arguments(values)),
        values,
        names,
        slack,
        composed=lambda values: end.ask(by_definitions, procedure, *arguments(values)),
        rounded=lambda seed, unit, alike, values: end.ask(
            by_rounding, seed, unit, alike, procedure, *arguments(values)
        ),
        together=lambda several: end.ask(
            each, procedure, [tuple(arguments(values)) for values in several]
        ),
    )
    if not names:
        count = len(bar.eager)
        bar.names = ["output"] if count == 1 else [f"output {place}" for place in range(count)]
    return bar
