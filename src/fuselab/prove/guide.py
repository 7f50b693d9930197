"""The section of docs/check.md that says how to mend what a check found."""

from __future__ import annotations

PAGE = "docs/check.md"
OF_DECLARATION = "The declaration does not fit"

_CHECKS = {
    "A value misses the bar": (
        *("cases", "shapes", "sizes", "large", "large mixture", "very large", "values", "patterns"),
        *("precision", "mixture"),
        *(
            "other dtypes",
            "mixed dtypes",
            "other floats",
            "other options",
            "dimensions",
            "whole",
            "huge",
            "deterministic mode",
        ),
    ),
    "Strides and shared memory": ("layouts", "strides", "far strides", "aliases", "shared memory"),
    "Memory that is not written, or not its own": (
        *("written", "gradients written", "inputs unchanged", "guards", "version counters"),
        "programs",
    ),
    "Outputs of another kind": ("outputs", "held outputs", "fresh outputs", "leaks", "modes"),
    "State that stays": (
        *(
            "global state",
            "repeated",
            "fresh values",
            "near values",
            "many calls",
            "slices",
            "dtypes in turn",
            "several threads",
            "several large threads",
            "thread counts",
            "kinds of tensor",
            "import",
        ),
    ),
    "A gradient misses the bar": (
        *("gradient present", "gradients", "upstream", "upstream overflow", "summed"),
        *("some gradients", "backward twice", "writes before backward"),
    ),
    "Second derivatives": ("second derivative", "gradient penalty", "gradcheck"),
    "Inside PyTorch": ("operator", "compile", "compiled gradients", "autocast", "torch.func"),
    OF_DECLARATION: ("coverage", "cost", "peers", "eager"),
    "Builds, streams and graphs": ("build", "stream", "CUDA graph", "run", "interpreter"),
}
_SECTIONS = {check: section for section, checks in _CHECKS.items() for check in checks}


def section_of(check: str) -> str:
    """Return the heading in ``PAGE`` under which a failure of this check is explained."""
    return _SECTIONS[check]
