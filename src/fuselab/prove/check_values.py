"""Checks of the output's values: the operator's cases, shapes, special values, layouts."""

from __future__ import annotations

from fuselab.prove.draw import LAYOUTS, VALUES
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, judged


def output_is_right(subject: Subject, trial: Trial) -> Outcome:
    """Judge the output.

    In one process the bar's tensors stay alive, so the output cannot get their memory: an output
    that is never written cannot hold the right values left over from eager.
    """
    bar = subject.bar(trial.args)
    return judged(bar, subject.results(*trial.args))


CHECKS = (
    # The operator's own cases.
    Check("cases", output_is_right, source="cases"),
    # Any size, also one that no block divides.
    Check("shapes", output_is_right, quick=40, full=200),
    # Zeros, NaN, infinities, subnormal and largest numbers.
    Check("values", output_is_right, values=VALUES, quick=64, full=256, max_numel=4096, turns=True),
    # Rows that span many magnitudes, nothing narrower inside.
    Check(
        "precision", output_is_right, values=("wide", "normal"), quick=12, full=60, max_numel=4096
    ),
    # Strides, offsets, expanded inputs.
    Check(
        "layouts", output_is_right, layouts=LAYOUTS, quick=56, full=224, max_numel=4096, turns=True
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
    ),
)
