"""Changes that the import of a model's file, and its constructor, make in the process's state.

An answer that sets the number of threads, or replaces a function of PyTorch, before its first call
would be judged and timed under other conditions than the problem's model.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuselab.prove.guard import functions_by_name, modes, restore_functions, restore_traces, traces
from fuselab.prove.process_state import Aspect, ProcessState

# No call depends on these: all come after a seed. Inductor raises the recursion limit itself.
_HARMLESS = {
    "the random number generator",
    "CUDA's random number generator",
    "the recursion limit",
    "which warnings are shown",
}
# Variables that only builds of extensions read, and the words before the names of variables.
_OF_BUILDS = {"TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "CUDA_HOME"}
_ENVIRONMENT = "the environment ("
# ``ProcessState`` of an import has the other parts.
_REPLACED = (
    Aspect("functions of PyTorch and Python", functions_by_name, restore_functions),
    Aspect("the functions that sys calls for every line", traces, restore_traces),
    Aspect("the modes that torch's operators run under", modes),
)


class StartState(ProcessState):
    """The state of this process before an import or a constructor."""

    def __init__(self) -> None:
        super().__init__(of_import=True)
        self.entries += [(aspect, aspect.read()) for aspect in _REPLACED]


def steering(changed: Iterable[str]) -> list[str]:
    """Return those of the names of ``ProcessState.changed`` on which later calls depend, each
    once."""
    return [
        name for name in dict.fromkeys(changed) if name not in _HARMLESS and not _is_of_builds(name)
    ]


def _is_of_builds(name: str) -> bool:
    if not name.startswith(_ENVIRONMENT):
        return False
    return _OF_BUILDS.issuperset(name.removeprefix(_ENVIRONMENT).rstrip(")").split(", "))
