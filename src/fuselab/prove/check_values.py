"""Checks of the output's values: shapes, special values, layouts, dynamic range, the op's own cases."""

from __future__ import annotations

from fuselab.prove.accuracy import Bar
from fuselab.prove.draw import LAYOUTS, SPECIAL_VALUES, VALUES
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import Check, Outcome, judged


def output_is_right(subject: Subject, trial: Trial) -> Outcome:
    """The output against the bar. The bar's tensors stay alive, so their memory cannot be the
    output's: an output that is never written cannot hold the right values left over from eager."""
    bar = Bar(lambda values: [subject.op.reference(*values)], trial.args, ["output"])
    return judged(bar.judge([subject.call(*trial.args)]), bar.names)


CHECKS = (
    Check("cases", "the operator's own cases", output_is_right, source="cases"),
    Check(
        "shapes", "any size, also one that no block divides", output_is_right, quick=24, full=100
    ),
    Check(
        "values",
        "zeros, NaN, infinities, subnormal and largest numbers",
        output_is_right,
        values=SPECIAL_VALUES,
        quick=24,
        full=100,
        max_numel=4096,
    ),
    Check(
        "precision",
        "rows that span many magnitudes, nothing narrower inside",
        output_is_right,
        values=("wide", "normal"),
        quick=8,
        full=32,
        max_numel=4096,
    ),
    Check(
        "layouts",
        "strides, offsets, expanded inputs",
        output_is_right,
        layouts=LAYOUTS[1:],
        quick=24,
        full=100,
        max_numel=4096,
    ),
    Check(
        "mixture",
        "layouts and values together",
        output_is_right,
        layouts=LAYOUTS,
        values=VALUES,
        quick=12,
        full=100,
        max_numel=4096,
    ),
)
