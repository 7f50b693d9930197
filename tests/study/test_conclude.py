"""The first screen's sentences, branch by branch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sample_study import WAYS, sample_study, way

from fuselab.study.conclude import conclude, fastest
from fuselab.study.facts import Headline, Study, Way

EAGER, FUSED, COMPILED, BOTH = WAYS
NO_FUSED = Way("fused", "fuselab.fuse", same_as="eager", reason="nothing was replaced")
NO_BOTH = Way("compiled_fused", "both", same_as="compiled", reason="nothing was replaced")
NO_COMPILED = Way("compiled", "torch.compile", reason="Unsupported: generator")


def study_of(*ways: Way) -> Study:
    return replace(sample_study(), ways=ways)


def test_both_together() -> None:
    found = conclude(study_of(EAGER, FUSED, COMPILED, BOTH))
    assert found == Headline(
        sentence="Fused kernels and torch.compile together make dlrm 2.17× as fast: "
        "41.2 ms becomes 19.0 ms.",
        slow="53.0 % of a call is moving data through memory. "
        "Where most can be gained: 3 operators could be one kernel (dlrm.py:116).",
        changed="2 groups of operations now run as one kernel each: bias_activation in dense_mlp "
        "(1.31×), mul_gelu_layer_norm_0a1b2c3d4e in the model (1.40×). That alone makes the whole "
        "call 1.06× as fast. Parameters and checkpoints stay as they are; outputs and gradients "
        "were proved first.",
        limit="No way of running this work here takes less than about 13.0 ms, the time of its "
        "arithmetic. Eager reaches 31.6 % of that limit, the fastest way 68.7 %.",
        compile="Not quite: torch.compile alone takes 19.9 ms, 2.08× as fast, 95.9 % of the "
        "gain; torch.compile of fused takes 19.0 ms, 2.17×. Compiling it takes 19.2 s at first, "
        "3.10 s from its cache later.",
    )


@pytest.mark.parametrize(
    ("fused", "says"),
    [
        (way("fused", "f", 41000.0, 1.006, "SAME"), "that makes no measurable difference"),
        (way("fused", "f", 41000.0, 1.006, "UNCLEAR"), "is lost in the scatter of the timings"),
        (way("fused", "f", 44000.0, 0.94, "SLOWER"), "makes the whole call 0.940× as fast"),
        (Way("fused", "f", reason="it raised"), "The whole call was not timed (it raised)."),
    ],
)
def test_what_a_kept_replacement_does_to_the_whole(fused: Way, says: str) -> None:
    assert says in conclude(study_of(EAGER, fused, COMPILED, BOTH)).changed


def test_compile_alone_is_enough() -> None:
    found = conclude(study_of(EAGER, NO_FUSED, COMPILED, NO_BOTH))
    assert found.sentence == (
        "torch.compile alone makes dlrm 2.08× as fast: 41.2 ms becomes 19.9 ms."
    )
    assert found.compile.startswith("Yes: torch.compile alone takes 19.9 ms, 2.08× as fast, and")


def test_within_the_noise_the_simpler_way_counts() -> None:
    close = way("compiled_fused", "both", 19700.0, 2.093, "FASTER")
    study = study_of(EAGER, FUSED, COMPILED, close)
    assert fastest(study) is COMPILED
    assert conclude(study).compile.startswith("Yes: ")
    tie = study_of(EAGER, way("fused", "f", 19870.0, 2.075, "FASTER"), COMPILED, BOTH)
    assert fastest(replace(tie, ways=(*tie.ways[:3], NO_BOTH))) is COMPILED


def test_compile_does_not_help() -> None:
    slower = way("compiled", "torch.compile", 43000.0, 0.9588, "SLOWER")
    found = conclude(study_of(EAGER, FUSED, slower, replace(slower, name="compiled_fused")))
    assert found.sentence.startswith("fuselab.fuse makes dlrm 1.06× as fast")
    assert found.compile.startswith("No: torch.compile alone takes 43.0 ms, 0.959× as fast, ")


def test_compile_does_not_run() -> None:
    found = conclude(
        study_of(EAGER, FUSED, NO_COMPILED, replace(NO_COMPILED, name="compiled_fused"))
    )
    assert found.compile == "No: it does not run this target (Unsupported: generator)."


def test_nothing_helps() -> None:
    same = way("compiled", "torch.compile", 41100.0, 1.003, "SAME")
    study = replace(study_of(EAGER, NO_FUSED, same, NO_BOTH), replaced=())
    found = conclude(study)
    assert found.sentence.endswith("no way tried beats eager's 41.2 ms.")
    assert (
        found.changed
        == "Nothing. No group of operations in it is one that a fused kernel computes."
    )
    assert "the fastest way" not in found.limit
    unclear = way("compiled", "torch.compile", 30000.0, 1.37, "UNCLEAR")
    found = conclude(study_of(EAGER, NO_FUSED, unclear, NO_BOTH))
    assert found.sentence.startswith("Nothing tried makes dlrm clearly faster than eager's 41.2 ms")
    assert found.compile.startswith("Not clear: torch.compile alone takes 30.0 ms, 1.37× as fast")
    assert "the fastest way" not in found.limit


def test_a_gain_that_the_medians_do_not_show_is_no_headline() -> None:
    close = way("compiled", "torch.compile", 40900.0, 1.03, "FASTER")
    found = conclude(study_of(EAGER, NO_FUSED, close, NO_BOTH))
    assert found.sentence.endswith("no way tried beats eager's 41.2 ms.")
    assert "which is within 2.0 % of eager's" in found.compile


def test_tried_and_not_kept() -> None:
    study = sample_study()
    found = conclude(replace(study, replaced=(study.replaced[1],)))
    assert found.changed.startswith(
        "Nothing. One group of operations was tried with a fused kernel"
    )


@pytest.mark.parametrize("share", [1.02, 1.2])
@pytest.mark.parametrize(
    ("bound", "why"),
    [("memory traffic", "stays in the cache"), ("arithmetic", "fuselab doctor --measure")],
)
def test_beyond_the_limit_says_why(share: float, bound: str, why: str) -> None:
    study = study_of(EAGER, FUSED, COMPILED, replace(BOTH, limit_share=share))
    assert study.limit is not None
    found = conclude(replace(study, limit=replace(study.limit, bound=bound)))
    assert (why in found.limit) == (share > 1.03)
    assert ("No way of running" in found.limit) == (share < 1.03)


def test_a_small_finding_gives_way_to_the_costliest_line() -> None:
    study = sample_study()
    found = conclude(replace(study, leads=(replace(study.leads[0], share=0.04),)))
    assert found.slow.endswith("The costliest line is dlrm.py:116, with 50.6 % of the time.")


def test_without_a_limit() -> None:
    assert conclude(replace(sample_study(), limit=None)).limit.startswith("Not known")
