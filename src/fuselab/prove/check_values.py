"""Checks of the output's values: the operator's cases, shapes, special values, layouts."""

from __future__ import annotations

from fuselab.prove.draw import LAYOUTS, VALUES
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, judged


def output_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output.

    The bar's tensors stay alive, so the output cannot get their memory: an output that is never
    written cannot hold the right values left over from eager.
    """
    bar = subject.bar(trial.args)
    return judged(bar, subject.results(*trial.args))


CHECKS = (
    Check("cases", "the operator's own cases", output_is_right, source="cases"),
    Check(
        "shapes", "any size, also one that no block divides", output_is_right, quick=40, full=200
    ),
    Check(
        "values",
        "zeros, NaN, infinities, subnormal and largest numbers",
        output_is_right,
        values=VALUES,
        quick=64,
        full=256,
        max_numel=4096,
        turns=True,
    ),
    Check(
        "precision",
        "rows that span many magnitudes, nothing narrower inside",
        output_is_right,
        values=("wide", "normal"),
        quick=12,
        full=60,
        max_numel=4096,
    ),
    Check(
        "layouts",
        "strides, offsets, expanded inputs",
        output_is_right,
        layouts=LAYOUTS,
        quick=56,
        full=224,
        max_numel=4096,
        turns=True,
    ),
    Check(
        "mixture",
        "layouts and values together",
        output_is_right,
        layouts=LAYOUTS,
        values=VALUES,
        quick=24,
        full=200,
        max_numel=4096,
    ),
)
