"""Write and compile kernels for the chains of a model that no operator covers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fuselab.ejection.generated import Generated, generated, planned
from fuselab.ejection.groups import ARRANGING, first_that_does_not_join
from fuselab.errors import FuselabError
from fuselab.fusion.chains import Chain, ChainFinder
from fuselab.fusion.emit import ChainRegion
from fuselab.inspect.user_code import describe_error, plain
from fuselab.inspect.work_kinds import DISPATCH_BYTES
from fuselab.measure.steady_step import step
from fuselab.op import FusedOp
from fuselab.runtime import fallback, rehearsal
from fuselab.runtime.dropout import seed_tensor


@dataclass
class Written:
    """A chain and the operator that was written for it; ``failed`` says why it does not compile."""

    finder: ChainFinder
    chain: Chain
    made: Generated
    failed: str | None = None

    @property
    def op(self) -> FusedOp:
        return self.made.op

    @property
    def folder(self) -> Path:
        return self.made.folder

    @cached_property
    def region(self) -> ChainRegion:
        """The chain before and after, as modules."""
        return ChainRegion(self.finder.traced, self.chain, self.op)

    @property
    def tensors(self) -> list[Any]:
        """The region's inputs in the recorded call."""
        return [self.finder.values[node] for node in self.region.inputs]

    def arguments(self) -> list[Tensor]:
        """Return the operator's arguments in the recorded call, with a seed if it takes one."""
        given = arguments_of(self.finder, self.chain)
        seeds = [seed_tensor(0, given[0].device)] if self.chain.drops else []
        return [*given, *seeds]


def arguments_of(finder: ChainFinder, chain: Chain) -> list[Tensor]:
    """Return the values of a chain's inputs in the recorded call."""
    module = finder.traced.module
    return [
        _attribute(module, place) if isinstance(place, str) else finder.values[place]
        for place in chain.inputs
    ]


def _attribute(module: torch.nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    value: Tensor = getattr(module.get_submodule(owner), name)
    return value


class Generator:
    """Writes the kernels of chains, each kind of chain once.

    ``refused`` has the chains that stay as they are, with the reason. ``progress`` is called with a
    line of text before long steps.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.refused: list[tuple[ChainFinder, Chain, str]] = []
        self._outcomes: dict[Any, Generated | str] = {}
        self._possible: dict[Any, bool] = {}

    def written(self, finder: ChainFinder, chains: Sequence[Chain]) -> list[Written]:
        """Return those of a forward's ``chains``, or their parts, for which eject writes
        kernels."""
        found: list[Written] = []
        waiting = list(chains)
        while waiting:
            chain = waiting.pop(0)
            reason = self._too_small(finder, chain)
            if reason is None:
                self.progress(f"writing a kernel for {chain.chain}")
                outcome = self._outcome(finder, chain)
                if isinstance(outcome, Generated):
                    found.append(Written(finder, chain, outcome))
                    continue
                parts = self._parts(finder, chain)
                if parts:
                    waiting = [*parts, *waiting]
                    continue
                reason = outcome
            self.refused.append((finder, chain, reason))
        return found

    def compile(self, written: Sequence[Written], *, training: bool) -> None:
        """Compile all kernels side by side, by calling each operator once."""
        by_name = {one.op.name: one for one in written}
        if not by_name:
            return
        self.progress(f"compiling the kernels of {len(by_name)} chain{'s' * (len(by_name) > 1)}")
        failed: dict[str, str | None] = {}

        def call(one: Written) -> None:
            parameters = list(one.region.before.parameters())
            once = step(one.region.after, one.tensors, {}, parameters, backward=training)
            with rehearsal.expecting_backward():
                try:
                    once()
                except FuselabError as error:
                    failed[one.op.name] = str(error)
                except Exception as error:  # no kernel is worth the user's model
                    said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
                    failed[one.op.name] = f"its kernel raised {type(error).__name__}: {said}"
            self.progress(f"compiled {one.chain.chain}")

        with fallback.strict(), ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(call, by_name.values()))
        for one in written:
            one.failed = failed.get(one.op.name)

    @staticmethod
    def _too_small(finder: ChainFinder, chain: Chain) -> str | None:
        """Return why a chain is not memory-bound: on a CPU, calls on little data cost their
        dispatch, of which a kernel has one too. On a GPU every launch that is saved counts."""
        on_cpu = all(not value.is_cuda for value in arguments_of(finder, chain))
        most = finder.traffic(chain)
        if not on_cpu or most > DISPATCH_BYTES:
            return None
        return (
            f"no call in it moves more than {most} bytes, so that it costs its dispatch, not its "
            "traffic"
        )

    def _outcome(self, finder: ChainFinder, chain: Chain) -> Generated | str:
        """Return the operator of a chain, or why eject cannot write it."""
        arguments = arguments_of(finder, chain)
        key = chain.text, chain.frozen, *map(_likeness, arguments)
        if key not in self._outcomes:
            try:
                self._outcomes[key] = generated(chain.name, chain.text, arguments, chain.frozen)
            except FuselabError as error:
                self._outcomes[key] = plain(error)
            except Exception as error:  # Dynamo raises many kinds where it cannot trace
                self._outcomes[key] = f"eject raised {describe_error(error)}"
        return self._outcomes[key]

    def _parts(self, finder: ChainFinder, chain: Chain) -> list[Chain]:
        """Return smaller chains to try in place of one that eject cannot write."""
        refused = [node for node in chain.nodes if not self._is_possible(finder, node)]
        if not refused and len(chain.outputs) > 1 and (parts := finder.parts(chain)):
            return parts
        if not refused:
            refused = [node for node in chain.nodes if finder.name_of(node) in ARRANGING]
        if refused:
            return finder.without(chain, refused)
        first = first_that_does_not_join(
            chain.nodes, lambda nodes: self._is_planned(finder.chain_of(nodes), finder)
        )
        parts = [] if first is None else finder.without(chain, (), [first])
        return [] if any(one.nodes == chain.nodes for one in parts) else parts

    def _is_possible(self, finder: ChainFinder, node: fx.Node) -> bool:
        """Return whether eject can write one call alone; of a view, the negated result. One of
        several results is as possible as the call."""
        if finder.is_result(node):
            return True
        alone = finder.chain_of([node])
        text = alone.text
        if finder.name_of(node) in ARRANGING:
            head, _, result = text.rpartition("return ")
            first = "[0]" if finder.is_tuple(node) else ""
            text = f"{head}return torch.neg({result.strip()}{first})\n"
        return self._is_planned(replace(alone, text=text), finder)

    def _is_planned(self, chain: Chain, finder: ChainFinder) -> bool:
        """Return whether eject can write a chain, by planning its kernels."""
        arguments = arguments_of(finder, chain)
        key = chain.text, *map(_likeness, arguments)
        if key not in self._possible:
            try:
                planned(chain.text, arguments, "alone", chain.frozen)
            except Exception:  # as above
                self._possible[key] = False
            else:
                self._possible[key] = True
        return self._possible[key]


def _likeness(value: Tensor) -> Any:
    return tuple(value.shape), value.stride(), value.dtype
