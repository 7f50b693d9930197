"""The sentences of a study's first screen: what was slow, what changed, what the limit is, and
whether torch.compile alone is enough.

``report.numbers`` formats every number in them from the rounded facts.
"""

from __future__ import annotations

from collections.abc import Sequence

from fuselab.measure.verdict import BAND, Outcome
from fuselab.report.numbers import duration, ratio, share
from fuselab.study.facts import Headline, Replaced, Study, Way

_PARTS = {
    "compute_us": "arithmetic",
    "memory_us": "moving data through memory",
    "overhead_us": "overhead: Python, dispatch and waiting, not work",
    "data_us": "waiting for input data",
}
_SIMPLEST_FIRST = ("eager", "compiled", "fused", "compiled_fused")
_WORTH_NAMING = 0.05  # the share of a call that a finding must save to be named
# Above this share of the limit, the caches must have held data that the limit reads from memory.
_PLAUSIBLE_SHARE = 1.03


def conclude(study: Study) -> Headline:
    """Return the headline of a study whose other facts are complete."""
    return Headline(
        sentence=_sentence(study),
        slow=_slow(study),
        changed=_changed(study),
        limit=_limit(study),
        compile=_compile(study),
    )


def fastest(study: Study) -> Way:
    """Return the fastest way among eager and those whose verdict is FASTER.

    Of ways within the noise it is the simplest, so torch.compile comes before fused kernels.
    """
    times = {
        name: way.us
        for name in _SIMPLEST_FIRST
        if (way := study.way(name)).us is not None
        and (name == "eager" or way.outcome == Outcome.FASTER)
    }
    least = min(times.values())
    return study.way(next(name for name, us in times.items() if us <= least * (1 + BAND)))


def _sentence(study: Study) -> str:
    name, eager, best = study.subject.name, study.way("eager"), fastest(study)
    if best.name == "eager":
        if Outcome.UNCLEAR in (way.outcome for way in study.ways):
            return (
                f"Nothing tried makes {name} clearly faster than eager's {duration(eager.us)}: "
                "the timings scatter too much to tell."
            )
        return (
            f"{name} is as fast as it gets here without new kernels: "
            f"no way tried beats eager's {duration(eager.us)}."
        )
    how = {
        "fused": f"fuselab.fuse makes {name}",
        "compiled": f"torch.compile alone makes {name}",
        "compiled_fused": f"Fused kernels and torch.compile together make {name}",
    }[best.name]
    return f"{how} {ratio(best.speedup)} as fast: {duration(eager.us)} becomes {duration(best.us)}."


def _slow(study: Study) -> str:
    split, whole = study.profile["split"], study.profile["step_us"]
    part = max(_PARTS, key=lambda key: split[key])
    text = f"{share(split[part] / whole)} of a call is {_PARTS[part]}."
    lines, leads = study.profile["lines"], study.leads
    if leads and leads[0].share >= _WORTH_NAMING:
        where = f" ({leads[0].line})" if leads[0].line else ""
        text += f" Where most can be gained: {leads[0].title}{where}."
    elif lines:
        top = max(lines, key=lambda row: row["share"])
        text += f" The costliest line is {top['name']}, with {share(top['share'])} of the time."
    return text


def _changed(study: Study) -> str:
    kept = [row for row in study.replaced if row.decision == "kept"]
    if kept:
        one = len(kept) == 1
        chains = (
            "One group of operations now runs as one kernel"
            if one
            else f"{len(kept)} groups of operations now run as one kernel each"
        )
        return (
            f"{chains}: {_named(kept)}. {_whole_call(study.way('fused'))} "
            "Parameters and checkpoints stay as they are; outputs and gradients were proved first."
        )
    if study.replaced:
        tried = (
            "One group of operations was"
            if len(study.replaced) == 1
            else f"{len(study.replaced)} groups of operations were"
        )
        return (
            f"Nothing. {tried} tried with a fused kernel, and the measurement kept none: "
            "a replacement stays only where it is faster."
        )
    return "Nothing. No group of operations in it is one that a fused kernel computes."


def _whole_call(fused: Way) -> str:
    if fused.us is None:
        return f"The whole call was not timed ({fused.reason})."
    if fused.outcome == Outcome.SAME:
        return "On the whole call that makes no measurable difference."
    if fused.outcome == Outcome.UNCLEAR:
        return "What that does to the whole call is lost in the scatter of the timings."
    return f"That alone makes the whole call {ratio(fused.speedup)} as fast."


def _named(kept: Sequence[Replaced]) -> str:
    names = [
        f"{row.operator} in {row.module or 'the model'} ({ratio(row.speedup)})" for row in kept
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _limit(study: Study) -> str:
    if study.limit is None:
        return "Not known: this target's arithmetic and bytes could not be counted."
    eager, best = study.way("eager"), fastest(study)
    reached = f"Eager reaches {share(eager.limit_share)} of that limit"
    if best.name != "eager":
        reached += f", the fastest way {share(best.limit_share)}"
    least = duration(study.limit.us)
    if best.limit_share is not None and best.limit_share > _PLAUSIBLE_SHARE:
        if study.limit.bound != "memory traffic":  # no cache shortens arithmetic or launches
            return (
                f"Its {study.limit.bound} alone would take {least} at the best rate kept for this "
                f"device. {reached}: that rate, measured again for this, is another size's, or "
                "the machine was busy both times ('fuselab doctor --measure' on an idle one)."
            )
        return (
            f"From memory, its {study.limit.bound} alone would take {least}. {reached}: "
            "this little data stays in the cache from call to call."
        )
    return (
        f"No way of running this work here takes less than about {least}, the time of its "
        f"{study.limit.bound}. {reached}."
    )


def _compile_time(study: Study) -> str:
    """Return the one sentence that says how long compiling takes."""
    cold, warm = study.compiler.cold_s, study.compiler.warm_s
    if cold is None:
        return ""
    again = "" if warm is None else f", {duration(1e6 * warm)} from its cache later"
    return f" Compiling it takes {duration(1e6 * cold)} at first{again}."


def _compile(study: Study) -> str:
    eager, compiled, best = study.way("eager"), study.way("compiled"), fastest(study)
    if compiled.us is None:
        return f"No: it does not run this target ({compiled.reason})."
    alone = f"torch.compile alone takes {duration(compiled.us)}, {ratio(compiled.speedup)} as fast"
    cost = _compile_time(study)
    if compiled.outcome == Outcome.UNCLEAR:
        return f"Not clear: {alone}, but the timings scatter too much to call it a gain.{cost}"
    if compiled.outcome != Outcome.FASTER:
        return f"No: {alone}, which is no gain.{cost}"
    if best.name == "eager":
        return f"No: {alone}, which is within {share(BAND)} of eager's.{cost}"
    if best.name == "compiled":
        return f"Yes: {alone}, and nothing tried is clearly faster.{cost}"
    together = f"{best.title} takes {duration(best.us)}, {ratio(best.speedup)}"
    if eager.us is not None and best.us is not None and compiled.us is not None:
        gained = (eager.us - compiled.us) / (eager.us - best.us)
        return f"Not quite: {alone}, {share(gained)} of the gain; {together}.{cost}"
    return f"Not quite: {alone}; {together}.{cost}"
