"""Findings: changes that a profile suggests, ranked by the time they would save.

Each is a pattern in the recorded calls with the user's line. ``saved_us`` estimates by how much a
step would become shorter; each rule's docstring says how. Two findings may count the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuselab.inspect.findings import arithmetic, gradients, host, layout, memory, optimizer
from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import Search
from fuselab.inspect.kineto import Details, Window
from fuselab.inspect.step_split import Split

__all__ = ["Finding", "find"]

SMALLEST_SHARE = 0.002  # the least share of the step for a finding to be shown
# These cost little on a CPU, where nothing runs ahead of the host, so its profile understates them.
ALWAYS = ("host sync", "tensor built in forward")

RULES = (
    host.host_syncs,
    host.tensors_built,
    host.copies_in_forward,
    host.pageable_copies,
    host.starving_loader,
    host.repeated_small_operators,
    memory.quadratic_lookups,
    memory.blown_up_operands,
    gradients.dense_embedding_gradients,
    gradients.gradients_of_slices,
    memory.chains,
    layout.strided_copies,
    layout.casts_there_and_back,
    layout.converted_convolutions,
    arithmetic.float32_products,
    arithmetic.unaligned_products,
    arithmetic.spelt_out_attention,
)
# What these say is about the whole step.
RULES_OF_STEP = (
    host.launch_bound,
    host.few_blocks,
    memory.compile_instead,
    optimizer.many_small_kernels,
)


def find(
    windows: Sequence[Window],
    details: Details,
    split: Split,
    on_gpu: bool,
    *,
    whole: bool = True,
) -> list[Finding]:
    """Return every finding worth at least 0.2 % of the step, the largest saving first.

    Without ``whole`` the windows are a part of the step, and what is said of the whole step, as
    that it is launch-bound, is left out. On a CPU the kinds in ``ALWAYS`` are returned whatever
    their share, since they cost more on a GPU.
    """
    search = Search(windows, details, split, on_gpu)
    found = list(_found(search, whole))
    worth = [f for f in found if f.share >= SMALLEST_SHARE or (f.kind in ALWAYS and not on_gpu)]
    return sorted(worth, key=lambda finding: (-finding.saved_us, finding.kind, finding.line or ""))


def _found(search: Search, whole: bool) -> Iterator[Finding]:
    for rule in (*RULES, *(RULES_OF_STEP if whole else ())):
        yield from rule(search)
