"""Checks of the output's values: the operator's cases, shapes, special values, layouts."""

from __future__ import annotations

import contextlib

from fuselab.op import tensors_in
from fuselab.prove.arguments import tensor_names
from fuselab.prove.asked_calls import in_rows, joined, with_gradients
from fuselab.prove.asked_edges import at_a_distance
from fuselab.prove.asked_many_calls import THREADS, under_threads
from fuselab.prove.draw import FAR_LAYOUTS, LAYOUTS, SMALL_SWEPT, SWEPT, VALUES, TooLargeError
from fuselab.prove.held import results
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import (
    MOST_INTERPRETED_ROWS,
    QUICK_SWEEPS,
    Check,
    Outcome,
    call_bar,
    is_hurried,
    judged,
    rows_of,
)
from fuselab.prove.value_patterns import PATTERNS


def output_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output.

    In one process the bar's tensors stay alive, so the output cannot get their memory: an output
    that is never written cannot hold the right values left over from eager.
    """
    bar = subject.bar(trial.args)
    return judged(bar, subject.results(*trial.args))


def all_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output and every gradient, under an upstream gradient that is drawn alike.

    Where sizes are swept, a draw of too few dimensions has no meaning.
    """
    if not trial.draw.reaches_its_size:
        return Outcome(untried=True)
    bar, asked = call_bar(subject, trial)
    return judged(bar, subject.candidate.ask(*asked))


# Elements that lie between the first and the last of a tensor: more than an integer of 32 bits
# holds, with its sign and without.
_REACHES = (1 << 31, 1 << 32)


def far_strides_are_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output and every gradient of tensors with large strides, then on a CPU the same of
    tensors in which 2^31 elements and more lie between the first element and the last.

    What is written over is copied with its memory, which would take that of the machine. In
    Triton's interpreter a loop counts in 32 bits whatever its bounds are.
    """
    bar, asked = call_bar(subject, trial)
    outcome = judged(bar, subject.candidate.ask(*asked))
    if outcome.problem is not None or subject.op.mutates or subject.interpreted:
        return outcome
    if subject.device.type != "cpu":
        return outcome
    _, *places, values = asked if asked[0] is with_gradients else (None, None, asked[1:])
    start = trial.draw.below(8)
    for reach in _REACHES:
        found = subject.candidate.ask(at_a_distance, start, reach, *places, list(values))
        if found is None:
            continue
        after = f" (2^{reach.bit_length() - 1} elements and more lie within a tensor)"
        outcome = judged(bar, found, after=after)
        if outcome.problem is not None:
            return outcome
    return outcome


_JOINED = 256  # elements that make a row of a large result
# Elements up to which gradients are judged; with --quick the larger number in the first dtype only.
_MOST_FOR_GRADIENTS = (1 << 17, 1 << 20)
_COPIES = 3
_SMALL_COUNTS = 8  # of THREADS, for large inputs


def large_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output, and up to ``_MOST_FOR_GRADIENTS`` elements every gradient, of inputs with
    thousands to millions of elements.

    What goes wrong with size is an index, a grid or a split, which leaves whole stretches wrong.
    Rows are therefore joined to ``_JOINED`` elements: of a million narrow rows, eager is exact in
    some by luck, and to measure its error anew on copies would take most of the time of a check.
    How exact a narrow row is does not depend on how many there are; "shapes" judges that.

    A draw that reaches no such number, as of an operator of fixed sizes, has no meaning here.
    """
    numel = max((tensor.numel() for tensor in tensors_in(trial.args)), default=0)
    if numel <= trial.draw.target:
        return Outcome(untried=True)
    if is_hurried(subject) and rows_of(trial) > MOST_INTERPRETED_ROWS:
        return Outcome(not_judged="with --quick the interpreter is too slow for so many rows")
    op, values, labels = subject.op, list(trial.args), subject.result_names(trial.args)
    places = None
    most = _MOST_FOR_GRADIENTS[subject.first or not subject.quick]
    upstream = None
    if op.gradient is not None and numel <= most * 5 // 4:
        with contextlib.suppress(TooLargeError):  # outputs may have far more elements than inputs
            upstream = subject.upstream(trial)
    if upstream is not None:
        places, names = subject.differentiable(trial.args), tensor_names(op, trial.args)
        labels += [f"gradient of {names[place]}" for place in places]
        values.append(upstream)
    bar = subject.bar_for(values, labels, in_rows, _JOINED, places).with_few_copies(_COPIES)
    asked = (results, *values) if places is None else (with_gradients, places, values)
    if len(trial.draw.values) > 1:  # long enough to be split among any number of threads
        count = THREADS[trial.draw.below(_SMALL_COUNTS)]
        (given,) = subject.candidate.ask(under_threads, [count], *asked)
    else:
        given = subject.candidate.ask(*asked)
    found = joined(given, _JOINED)
    return judged(bar, found, after=f" (in rows of {_JOINED})")


def _compiled(subject: Subject) -> tuple[Verdict, str] | None:
    """Return None unless Triton's interpreter runs the kernels, which takes minutes for it."""
    return (Verdict.SKIPPED, "the interpreter is too slow for it") if subject.interpreted else None


CHECKS = (
    # The operator's own cases.
    Check("cases", output_is_right, source="cases"),
    # Any size, also one that no block divides.
    Check("shapes", output_is_right, quick=40, full=200, turns=True, together="results"),
    # Sizes of a long list, one after the other.
    Check(
        "sizes",
        all_is_right,
        quick=len(QUICK_SWEEPS) * SMALL_SWEPT + 40,
        full=2 * len(SWEPT),
        together="gradients",
        turns=True,
        swept=True,
        non_empty=True,
        shrink_tries=12,
    ),
    # Above 2^12, 2^16, 2^17 and 2^20 elements: many rows, wide rows.
    Check("large", large_is_right, quick=9, full=36, turns=True, large=True, shrink_tries=4),
    # The same with strides and with special values.
    Check(
        "large mixture",
        large_is_right,
        layouts=LAYOUTS,
        values=("normal", "infinities", "masked", "NaN"),
        quick=4,
        full=24,
        applies=_compiled,
        turns=True,
        large=True,
        shrink_tries=4,
        once=True,
    ),
    # Zeros, NaN, infinities, subnormal and largest numbers.
    Check(
        "values",
        output_is_right,
        values=VALUES,
        quick=72,
        full=288,
        max_numel=4096,
        turns=True,
        together="results",
    ),
    # Sorted, whole, all alike, one-hot, of one sign; in the upstream gradient too.
    Check(
        "patterns",
        all_is_right,
        values=("normal", *PATTERNS),
        quick=6 * len(PATTERNS),
        full=12 * len(PATTERNS),
        max_numel=1024,
        turns=True,
        non_empty=True,
        least_numel=24,
        together="gradients",
    ),
    # Rows that span many magnitudes, nothing narrower inside.
    Check(
        "precision",
        output_is_right,
        values=("wide", "normal"),
        quick=12,
        full=60,
        max_numel=4096,
        together="results",
    ),
    # Strides, offsets, expanded inputs.
    Check(
        "layouts",
        output_is_right,
        layouts=LAYOUTS,
        quick=56,
        full=224,
        max_numel=4096,
        turns=True,
        together="results",
    ),
    # The same on tensors of three dimensions, where the operator draws any.
    Check(
        "strides",
        output_is_right,
        layouts=LAYOUTS,
        quick=40,
        full=80,
        max_numel=1024,
        turns=True,
        deep=True,
        together="results",
    ),
    # Strides that 16 bits do not hold, and places that 32 do not.
    Check(
        "far strides",
        far_strides_are_right,
        layouts=FAR_LAYOUTS,
        quick=8,
        full=24,
        max_numel=32,
        turns=True,
        non_empty=True,
    ),
    # Layouts and values together.
    Check(
        "mixture",
        output_is_right,
        layouts=LAYOUTS,
        values=VALUES,
        quick=24,
        full=200,
        max_numel=4096,
        together="results",
    ),
)
