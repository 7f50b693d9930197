"""Chains of memory-bound operators that one kernel could compute, found in the watched step.

Two operators belong to one chain when the second reads what the first wrote, both are pointwise or
reductions, both belong to the same pass, and no operator outside the chain stands between them in
the data flow (otherwise the one kernel would have to run both before and after it). Where the host
reads a value of the chain, the chain ends, because the host may decide by it what runs next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fuselab.inspect.kineto import Detail
from fuselab.inspect.user_code import SourceLine
from fuselab.inspect.work_kinds import (
    DISPATCH_BYTES,
    HOST_SYNC,
    RETURNS_ITS_INPUT,
    is_compute_op,
    is_fusible,
    is_reduction,
    is_work,
)

Storage = tuple[int, int]
State = tuple[Storage, int]
_RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_LAYERS = frozenset(f"aten::{name}{cell}" for name in _RECURRENT for cell in ("", "_cell"))


@dataclass(eq=False)
class Call:
    """A primitive operator with the bytes that it reads and writes, per storage."""

    op: Detail
    reads: dict[Storage, int]
    writes: dict[Storage, int]
    numel: int
    # the states of the storages that it reads and leaves; each write makes a new state
    uses: frozenset[State] = frozenset()
    makes: frozenset[State] = frozenset()

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def written_numel(self) -> int:
        """The number of elements in its result, assuming the dtype of its first input."""
        size = max(self.writes.values(), default=0)
        return size // self.op.inputs[0].dtype.itemsize if self.op.inputs else size


@dataclass(eq=False)
class Chain:
    """Two or more calls that one kernel could compute.

    ``separate_bytes`` is the traffic of the separate calls, ``fused_bytes`` the traffic that
    remains in one kernel.
    """

    calls: list[Call]
    fused_bytes: int = 0
    separate_bytes: int = 0
    read: set[State] = field(default_factory=set)
    written: set[State] = field(default_factory=set)
    # what other operators computed from what it wrote
    behind: set[State] = field(default_factory=set)
    # The host has read something of it, and may decide by the value what runs next.
    is_read_by_host: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(call.op.name for call in self.calls)

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        return tuple(dict.fromkeys(call.op.line for call in self.calls if call.op.line))

    @property
    def backward(self) -> bool:
        return self.calls[0].op.backward

    @property
    def bytes_saved(self) -> int:
        return self.separate_bytes - self.fused_bytes

    def saved_us(self, cost: Mapping[int, float]) -> float:
        """Return the microseconds that one kernel would save.

        ``cost`` gives the members' microseconds by ``id`` of the operator. A large member saves its
        share of the removed traffic; the small members save all dispatches but one.
        """
        kept = self.fused_bytes / self.separate_bytes
        saved = 0.0
        for call in self.calls:
            large = call.bytes > DISPATCH_BYTES
            saved += cost.get(id(call.op), 0.0) * (1 - (kept if large else 1 / len(self.calls)))
        return saved


def find_chains(ops: Sequence[Detail]) -> list[Chain]:
    """Return the chains of a step, in order of their first call."""
    calls = _calls(ops)
    chains: list[Chain] = []
    states: dict[Storage, int] = {}
    for call in calls:
        _note_states(call, states)
        parts: list[Chain] = []
        fusible = is_fusible(call.op.name) and call.op.line is not None
        if fusible:
            parts, joined = _join(call, chains)
            chains = [chain for chain in chains if chain not in parts]
        for other in chains:
            if call.uses & (other.written | other.behind):
                other.behind |= call.makes
                other.is_read_by_host |= call.op.name in HOST_SYNC
        if fusible:
            chains.append(joined)
    order = {id(call): position for position, call in enumerate(calls)}
    found = [chain for chain in chains if len(chain.calls) > 1]
    for chain in found:
        chain.calls.sort(key=lambda call: order[id(call)])
        _count_traffic(chain, calls)
    found.sort(key=lambda chain: order[id(chain.calls[0])])
    return [chain for chain in found if chain.bytes_saved > 0]


def _note_states(call: Call, states: dict[Storage, int]) -> None:
    """Note which state of each storage a call reads and makes, and count them in ``states``."""
    call.uses = frozenset((storage, states.get(storage, 0)) for storage in call.reads)
    for storage in call.writes:
        states[storage] = states.get(storage, 0) + 1
    call.makes = frozenset((storage, states[storage]) for storage in call.writes)


def _join(call: Call, chains: Sequence[Chain]) -> tuple[list[Chain], Chain]:
    """Return the chains that ``call`` continues, and one chain that joins them with ``call``.

    If it continues none, the second result is a new chain of ``call`` alone.
    """
    parts: list[Chain] = []
    joined = Chain([])
    for chain in reversed(chains):  # the latest first
        if (
            chain.backward == call.op.backward
            and not chain.is_read_by_host
            and call.uses & chain.written
            and _same_iteration(chain, call)
        ):
            both = _merged(joined, chain)
            if both is not None and not call.uses & both.behind:
                parts.append(chain)
                joined = both
    joined.calls.append(call)
    joined.read |= call.uses
    joined.written |= call.makes
    return parts, joined


def _merged(one: Chain, other: Chain) -> Chain | None:
    """Return two chains as one, or None if an outside operator stands between them."""
    if (one.behind - other.written) & other.read or (other.behind - one.written) & one.read:
        return None
    written = one.written | other.written
    return Chain(
        calls=[*one.calls, *other.calls],
        read=one.read | other.read,
        written=written,
        behind=(one.behind | other.behind) - written,
    )


def _same_iteration(chain: Chain, call: Call) -> bool:
    """Return whether ``call`` can run over the elements of one of the chain's members.

    One kernel iterates over one set of elements. After a reduction, a chain may continue over the
    reduction's result or, as softmax does, over the full rows again.
    """
    return any(
        call.numel == member.numel
        or (is_reduction(member.op.name) and call.numel == member.written_numel)
        for member in chain.calls
    )


def primitive_calls(ops: Sequence[Detail]) -> list[Call]:
    """Return the operators that touch elements, without wrappers around them or calls inside
    them."""
    return [call for call in _calls(ops) if _does_work(call.op)]


def _calls(ops: Sequence[Detail]) -> list[Call]:
    """Return the primitive operators, and the host's reads of a value among them."""
    return [call for op in ops if op.parent is None for call in _primitives(op)]


def _primitives(op: Detail) -> list[Call]:
    if _is_whole(op.name):
        return [_call(op)]
    in_place = is_fusible(op.name) and op.name.endswith("_")
    own = in_place or any(a.bytes > 0 for a in op.allocations)
    if not own and any(_does_work(deeper) for child in op.children for deeper in child.walk()):
        below = [call for child in op.children for call in _primitives(child)]
        # relu calls clamp_min, and relu6 calls clamp with a result that it allocated before: the
        # outer call has the name that the user wrote, and all that is read and written.
        return [_call(op)] if len(below) == 1 and is_fusible(op.name) else below
    if _does_work(op):
        return [_call(op)]
    return [_call(deeper) for deeper in op.walk() if deeper.name in HOST_SYNC][-1:]


def _is_whole(name: str) -> bool:
    """Return whether the user, who cannot change what the operator calls, sees one operator.

    Those are recurrent layers, convolutions, attention and products, whose copies, zeros and masks
    are a part of the arithmetic.
    """
    norm = name.startswith("aten::linalg_")  # it calls a reduction, which a chain can hold
    return name in _LAYERS or (is_compute_op(name) and not is_fusible(name) and not norm)


def _does_work(op: Detail) -> bool:
    if op.name in RETURNS_ITS_INPUT and not any(
        _does_work(deeper) for child in op.children for deeper in child.walk()
    ):
        return False
    return is_work(op.name) or (not op.name.startswith("aten::") and bool(op.allocations))


def _call(op: Detail) -> Call:
    changes = [allocation for deeper in op.walk() for allocation in deeper.allocations]
    # the operator's own workspace
    freed = {change.storage for change in changes if change.bytes < 0}
    writes = {
        change.storage: change.bytes
        for change in changes
        if change.bytes > 0 and change.storage not in freed
    }
    reads = {use.storage: use.bytes for use in op.inputs if use.storage not in writes}
    if op.name.endswith("_") and op.inputs:
        target = op.inputs[0]
        writes[target.storage] = target.bytes
        if op.name in ("aten::copy_", "aten::fill_", "aten::zero_"):
            reads.pop(target.storage, None)
    numel = max([use.numel for use in op.inputs] or [0])
    if not is_reduction(op.name) and op.inputs:
        numel = max(numel, max(writes.values(), default=0) // op.inputs[0].dtype.itemsize)
    return Call(op, reads, writes, numel)


def _count_traffic(chain: Chain, calls: Sequence[Call]) -> None:
    members = set(map(id, chain.calls))
    last = next(i for i in range(len(calls) - 1, -1, -1) if calls[i] is chain.calls[-1])
    read_by_others = {
        storage for call in calls if id(call) not in members for storage in call.reads
    }
    read_inside = {storage for call in chain.calls for storage in call.reads}
    external: dict[Storage, int] = {}
    kept: dict[Storage, int] = {}
    written: set[Storage] = set()
    for call in chain.calls:
        for storage, size in call.reads.items():
            if storage not in written:
                external[storage] = max(size, external.get(storage, 0))
        for storage, size in call.writes.items():
            written.add(storage)
            if storage in read_by_others or storage not in read_inside:
                kept[storage] = max(size, kept.get(storage, 0))
    for storage, size in calls[last].writes.items():
        kept[storage] = max(size, kept.get(storage, 0))
    chain.separate_bytes = sum(call.bytes for call in chain.calls)
    chain.fused_bytes = sum(external.values()) + sum(kept.values())
