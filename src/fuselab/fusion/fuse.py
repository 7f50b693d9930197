"""``fuselab.fuse``: replace a model's memory-bound chains where that is right and faster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import fuselab
from fuselab.errors import FuselabError, TargetError
from fuselab.fusion.chains import ChainFinder
from fuselab.fusion.closures import modules_in
from fuselab.fusion.emit import MatchRegion, Region, install, rewritten, shared_copy, with_chains
from fuselab.fusion.expression import Expression, has_hooks, is_fused
from fuselab.fusion.generate import Generator, Written
from fuselab.fusion.judge import (
    can_copy,
    measure,
    near_outputs,
    prove_model,
    prove_outputs,
    prove_region,
    values_of,
)
from fuselab.fusion.match import Match, Pattern, find
from fuselab.fusion.result import Decision, FuseResult, LeftAlone, Replacement
from fuselab.fusion.trace import (
    Call,
    Traced,
    is_compiled,
    modules_to_look_into,
    record_calls,
    shadow,
    source_line,
    trace_forward,
)
from fuselab.inspect.user_code import check_arguments
from fuselab.measure.verdict import Outcome, Verdict
from fuselab.op import FusedOp, Inputs
from fuselab.report.progress import say
from fuselab.runtime.dispatch import check_types, choose, registered, registration_of


def fuse(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    ops: Sequence[FusedOp] | None = None,
    verbose: bool = False,
) -> nn.Module:
    """Return ``model`` with its memory-bound chains replaced by fused operators, where faster.

    The returned model has its own modules over the same parameters, buffers and hooks; ``model``
    itself is not changed. Every replacement is proved, outputs and gradients, against the original
    on ``example_inputs`` (a tensor, a list of arguments, or a dict of named ones), and kept only if
    it measured faster there: forward and backward when the model is in training mode, else the
    forward. ``ops`` are the operators that may be used; by
    default the library's and every other one registered in this process, and for chains that none
    of them computes, kernels are written (``fuselab.eject``) and compiled, once per machine.
    ``verbose`` prints what was replaced and what was not, and why, and the progress on stderr;
    ``fuse_with_report`` returns it.

    Raises TargetError when the model does not take ``example_inputs`` or raises on them.
    """
    progress: Callable[[str], None] = say if verbose else lambda text: None
    result = fuse_with_report(model, example_inputs, ops=ops, progress=progress)
    if verbose:
        print(result)
    fused: nn.Module = result.model
    return fused


def fuse_with_report(
    model: nn.Module | Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ops: Sequence[FusedOp] | None = None,
    budget_s: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> FuseResult:
    """Run ``fuse`` and return everything that was tried.

    ``budget_s`` bounds each measurement, in seconds. ``progress`` is called with a line of text
    before long steps. ``model`` may be a plain function of tensors;
    ``FuseResult.model`` is then one too.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TargetError(
            f"kwargs is a {type(kwargs).__name__}, not a dict of keyword arguments; several inputs "
            "are one tuple: fuse_with_report(model, (x, y))."
        )
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), {**example_inputs, **(kwargs or {})}
    else:
        args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    called = model.forward if isinstance(model, nn.Module) else model
    name = type(model).__name__ if isinstance(model, nn.Module) else _name_of(model)
    check_arguments(called, name, "example_inputs", args, kwargs or {})
    module = model if isinstance(model, nn.Module) else _FunctionModule(model)
    fusion = _Fusion(module, args, dict(kwargs or {}), _patterns(ops), budget_s)
    if ops is None:
        fusion.generator = Generator(progress)
    result = fusion.run()
    if module is model:
        return result
    return FuseResult(**{**vars(result), "model": result.model.forward})


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _patterns(ops: Sequence[FusedOp] | None) -> list[Pattern]:
    if ops is None:
        from fuselab.ops import contract, operators

        library = {op.name: op for op in map(contract, operators())}
        ops = list((library | registered()).values())
    return [Pattern(op, rewrite) for op in ops for rewrite in op.rewrites]


class _FunctionModule(nn.Module):
    """A plain function as a module, so that it can be traced and rewritten like one. The modules
    that it refers to are children."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        modules = modules_in(function)
        for name, module in modules.items():
            self.add_module(name, module)
        self.training = any(module.training for module in modules.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _LookedInto:
    """A module's forward as it was traced, and as it is now; ``hooked`` names layers below it."""

    path: str
    traced: Traced
    final: Traced
    hooked: set[str]


class _Fusion:
    """One run of ``fuse``: looks at every module, tries every chain, puts in what is kept."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        patterns: list[Pattern],
        budget_s: float,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.patterns, self.budget_s = patterns, budget_s
        self.training = model.training and any(p.requires_grad for p in model.parameters())
        self.tried: list[Replacement] = []
        self.paths: list[str] = []  # of the modules in which they were tried
        self.left: list[LeftAlone] = []
        self.places: set[tuple[str, str, str]] = set()
        self.measured: dict[Any, tuple[float, float, Verdict]] = {}
        self.generator: Generator | None = None
        self.chains_first = True  # a kernel of a whole chain before an operator for a part of it
        self.seen = 0  # operations in the forwards that were looked into

    def run(self) -> FuseResult:
        stage = shadow(self.model)
        calls = record_calls(stage, self.args, self.kwargs)
        looked_into: list[_LookedInto] = []
        for path, module in modules_to_look_into(stage):
            if is_compiled(module):
                reason = "it is compiled already; fuse first, then compile"
                self.left.append(LeftAlone(path, type(module).__qualname__, reason))
            if path not in calls or _is_plain_layer(module) or _is_fused_layer(module):
                continue
            hooked = self._hooked(path)
            traced = self._trace(path, module, calls[path], hooked)
            if traced is not None:
                final = self._rewrite(traced, hooked)
                looked_into.append(_LookedInto(path, traced, final, hooked))
        if self.generator is not None:
            looked_into = self._generate(self.generator, looked_into)
            self.chains_first = False
            looked_into = [
                replace(one, final=self._rewrite(one.final, one.hooked)) for one in looked_into
            ]
        changed = [one for one in looked_into if one.final is not one.traced]
        return self._conclude(self._installed(changed), changed)

    def _installed(self, changed: Sequence[_LookedInto]) -> nn.Module:
        """Return the model over the same parameters, with the forwards that were changed."""
        fused = shared_copy(self.model)
        # Children first: a module runs its own rewritten forward only while its children's classes
        # are those at its installation, and installing gives a child another class.
        places = [(fused.get_submodule(one.path), one.traced, one.final) for one in changed]
        for place in sorted(places, key=lambda place: sum(1 for _ in place[0].modules())):
            install(*place)
        return fused

    def _hooked(self, path: str) -> set[str]:
        """Return the names, below ``path``, of modules that must still be called because of
        hooks."""
        original = self.model.get_submodule(path)
        return {name for name, child in original.named_modules() if name and has_hooks(child)}

    def _rewrite(self, traced: Traced, hooked: set[str]) -> Traced:
        """Replace in rounds until nothing more is kept.

        One replacement may complete the beginning of another chain, as the look-up of all
        embeddings does for an interaction of them.
        """
        done: set[tuple[str, str, str]] = set()
        while True:
            kept = self._choose(traced, hooked, done)
            if not kept:
                return traced
            traced = rewritten(traced, kept)

    def _trace(self, path: str, module: nn.Module, call: Call, hooked: set[str]) -> Traced | None:
        try:
            return trace_forward(path, module, call, hooked)
        except Exception as error:  # torch.fx raises many kinds of errors for code it cannot follow
            reason = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            self.left.append(LeftAlone(path, source_line(module), reason))
            return None

    def _choose(
        self, traced: Traced, hooked: set[str], done: set[tuple[str, str, str]]
    ) -> list[Match]:
        """Return the matches of one round that are kept; ``done`` are those tried in earlier
        rounds."""
        expression = Expression(traced.graph, traced.module, keep=hooked)
        for name, reason in expression.kept.items():
            path = f"{traced.path}.{name}" if traced.path else name
            if path not in {left.module for left in self.left}:
                self.left.append(LeftAlone(path, source_line(traced.module), reason))
        matches = find(expression, self.patterns)
        if not matches:
            return []
        values = values_of(traced.graph, traced.module, traced.tensors)
        if self.generator is not None and self.chains_first:
            finder = ChainFinder(traced, values, hooked)
            matches = [one for one in matches if not finder.is_part_of_a_chain(one.origins)]
        taken: set[fx.Node] = set()
        kept: list[Match] = []
        tried: dict[tuple[str, fx.Node, str], Replacement] = {}
        for match in matches:
            same = match.op.name, match.root.origin.name, match.chain
            if not taken.isdisjoint(match.origins) or same in done:
                continue
            # One chain can match with its operands swapped, and another operator's pattern where
            # its arguments do not fit; only a match that fits counts.
            key = match.op.name, match.root.origin, match.chain
            if key in tried and tried[key].decision is not Decision.REFUSED:
                continue
            tried[key] = self._try(traced, match, values)
            if tried[key].decision is Decision.KEPT:
                taken.update(match.origins)
                kept.append(match)
                if match.rewrite.lists:
                    break  # the operator that joins its output may now be part of a longer chain
        done.update((op, root.name, chain) for op, root, chain in tried)
        fitting = {
            root for (_, root, _), one in tried.items() if one.decision is not Decision.REFUSED
        }
        for (op, root, chain), one in tried.items():
            # An nn.Sequential is looked at inside the module that calls it, and by itself.
            where = op, chain, _place(traced, root)
            if where not in self.places and (
                one.decision is not Decision.REFUSED or root not in fitting
            ):
                self.tried.append(one)
                self.paths.append(traced.path)
            self.places.add(where)
        return kept

    def _try(self, traced: Traced, match: Match, values: Mapping[fx.Node, Any]) -> Replacement:
        owner = _owner(traced, match.root.origin)
        source = _line_of(match.root.origin) or source_line(traced.module)
        lines = _lines_of(match.origins)
        if owner != traced.path:
            source = source_line(self.model.get_submodule(owner))

        def result(decision: Decision, reason: str, **more: Any) -> Replacement:
            # An operator's refusal begins with its name, which the report already shows.
            reason = reason.removeprefix(f"{match.op.short_name}: ")
            return Replacement(
                match.op, owner, match.chain, source, decision, reason, lines=lines, **more
            )

        try:
            region = MatchRegion(traced, match)
            tensors = [values[node] for node in region.inputs]
            inputs = _operator_inputs(region, tensors)
        except FuselabError as error:
            return result(Decision.REFUSED, str(error))
        return self._judged(result, region, match.op, match.chain, tensors, inputs)

    def _judged(
        self,
        result: Callable[..., Replacement],
        region: Region,
        op: FusedOp,
        chain: str,
        tensors: Sequence[Any],
        inputs: Inputs,
    ) -> Replacement:
        """Return ``result`` of what was decided on a region, proved and measured."""
        try:
            arguments = op.bind(inputs)
            check_types(registration_of(op), arguments)
            op.validate(*arguments)
            implementation = choose(op, arguments)
        except FuselabError as error:
            return result(Decision.REFUSED, str(error))
        if implementation == "reference":
            return result(
                Decision.REFUSED,
                "no implementation is meant for these sizes on this device",
                inputs=inputs,
            )
        more: dict[str, Any] = {"implementation": implementation, "inputs": inputs}
        try:
            problem = prove_region(region, tensors)
        except FuselabError as error:
            return result(Decision.REFUSED, str(error), **more)
        if problem is not None:
            return result(Decision.WRONG, problem, **more)
        before_us, after_us, decision = self._measure(region, op, chain, tensors, arguments)
        more |= {"before_us": before_us, "after_us": after_us, "verdict": decision}
        if decision.outcome is Outcome.FASTER:
            return result(Decision.KEPT, f"{decision.speedup:.2f}x faster", **more)
        return result(Decision.NOT_FASTER, f"measured {decision}", **more)

    def _generate(
        self, generator: Generator, looked_into: Sequence[_LookedInto]
    ) -> list[_LookedInto]:
        """Try generated kernels for the chains that no operator covers; return what they change."""
        finders: list[ChainFinder] = []
        written: list[Written] = []
        for one in looked_into:
            values = values_of(one.final.graph, one.final.module, one.final.tensors)
            finder = ChainFinder(one.final, values, one.hooked)
            self.seen += len(finder.calls)
            finders.append(finder)
            written += generator.written(finder, finder.chains())
        kept, slower = self._tried(generator, written)
        parts = [
            part
            for one in slower
            for part in generator.written(one.finder, one.finder.without_windows(one.chain))
        ]
        kept += self._tried(generator, parts)[0]
        for finder, chain, reason in generator.refused:
            owner = _owner(finder.traced, chain.outputs[-1])
            self._leave(owner, finder.traced, f"{chain.chain}: {reason}")
        changed = []
        for one, finder in zip(looked_into, finders, strict=True):
            ops = {each.chain: each.op for each in kept if each.finder is finder}
            final = with_chains(one.final, finder, ops) if ops else one.final
            changed.append(replace(one, final=final))
        return changed

    def _tried(
        self, generator: Generator, written: Sequence[Written]
    ) -> tuple[list[Written], list[Written]]:
        """Compile and try generated kernels; return those that are kept, and those that are right
        and not faster."""
        generator.compile(written, training=self.training)
        outcomes = [(one, self._try_written(one).decision) for one in written]
        kept = [one for one, decision in outcomes if decision is Decision.KEPT]
        return kept, [one for one, decision in outcomes if decision is Decision.NOT_FASTER]

    def _leave(self, path: str, traced: Traced, reason: str) -> None:
        left = LeftAlone(path, source_line(traced.module), reason)
        if left not in self.left:
            self.left.append(left)

    def _try_written(self, written: Written) -> Replacement:
        """Prove and measure a generated kernel, and note the outcome."""
        traced, chain, last = written.finder.traced, written.chain, written.chain.outputs[-1]
        owner = _owner(traced, last)
        source = _line_of(last) or source_line(traced.module)
        lines = _lines_of(chain.nodes)
        if owner != traced.path:
            source = source_line(self.model.get_submodule(owner))

        def result(decision: Decision, reason: str, **more: Any) -> Replacement:
            return Replacement(
                written.op,
                owner,
                chain.chain,
                source,
                decision,
                reason.removeprefix(f"{written.op.short_name}: "),
                folder=written.folder,
                lines=lines,
                **more,
            )

        if written.failed is not None:
            tried = result(Decision.REFUSED, written.failed)
        else:
            inputs = Inputs(tuple(written.arguments()))
            tried = self._judged(
                result, written.region, written.op, chain.chain, written.tensors, inputs
            )
        place = written.op.name, chain.chain, _place(traced, last)
        if place not in self.places:
            self.tried.append(tried)
            self.paths.append(traced.path)
        self.places.add(place)
        return tried

    def _measure(
        self,
        region: Region,
        op: FusedOp,
        chain: str,
        tensors: Sequence[Any],
        arguments: Sequence[Any],
    ) -> tuple[float, float, Verdict]:
        parameters = list(region.before.parameters())
        key = (
            op.name,
            chain,
            *(_likeness(value) for value in (*arguments, *tensors, *parameters)),
        )
        if key not in self.measured:
            self.measured[key] = measure(
                region.before.forward,
                region.after.forward,
                tensors,
                parameters,
                training=self.training,
                budget_s=self.budget_s,
            )
        return self.measured[key]

    def _conclude(self, fused: nn.Module, changed: Sequence[_LookedInto]) -> FuseResult:
        kept, problem = self.kept, None
        proof = "nothing replaced, nothing to prove"
        if kept and not can_copy(self.model):
            proof = "each replacement proved; the whole model is too large for a float64 copy"
        elif kept:
            proof, problem = self._prove_whole(fused)
            if problem is not None:
                # Each replacement was right by itself: something outside them changes a tensor
                # between where a chain began and where its one call now stands.
                fused = shared_copy(self.model)
                self.tried = [
                    replace(tried, decision=Decision.WRONG, reason=f"in the whole model: {problem}")
                    if tried.decision is Decision.KEPT
                    else tried
                    for tried in self.tried
                ]
        before_us, after_us, decision = self._measure_whole(fused)
        if decision.outcome is Outcome.SLOWER and self.kept:
            # PyTorch's transformer layers, for one, have a faster path than the forward that was
            # read, which they leave for a rewritten one.
            slower = [one for one in changed if self._is_slower(fused, one)]
            changed = [one for one in changed if one not in slower]
            if slower and changed:
                self._drop([one.path for one in slower], decision)
                fused = self._installed(changed)
                before_us, after_us, decision = self._measure_whole(fused)
        if decision.outcome is Outcome.SLOWER and self.kept:
            self._drop(None, decision)
            fused = shared_copy(self.model)
            before_us, after_us, decision = self._measure_whole(fused)
        if kept and not self.kept and problem is None:
            proof = "nothing is replaced, because the whole model became slower"
        return FuseResult(
            model=fused,
            replacements=tuple(self.tried),
            left=tuple(self.left),
            training=self.training,
            before_us=before_us,
            after_us=after_us,
            verdict=decision,
            proof=proof,
            searched=self._searched(),
        )

    @property
    def kept(self) -> list[Replacement]:
        return [tried for tried in self.tried if tried.decision is Decision.KEPT]

    def _measure_whole(self, fused: nn.Module) -> tuple[float, float, Verdict]:
        before, after = shadow(self.model), shadow(fused)
        return measure(
            _bind(before, self.kwargs),
            _bind(after, self.kwargs),
            self.args,
            list({*before.parameters(), *after.parameters()}),
            training=self.training,
            budget_s=3 * self.budget_s,
        )

    def _is_slower(self, fused: nn.Module, one: _LookedInto) -> bool:
        """Return whether the forward of a module that was changed is slower by itself, outside of
        training."""
        if self.training:
            return False
        before, after = (shadow(model).get_submodule(one.path) for model in (self.model, fused))
        call = one.traced.call
        _, _, decision = measure(
            _bind(before, call.kwargs),
            _bind(after, call.kwargs),
            call.args,
            [],
            training=False,
            budget_s=self.budget_s,
        )
        return decision.outcome is Outcome.SLOWER

    def _drop(self, paths: Sequence[str] | None, decision: Verdict) -> None:
        """Note that what was kept in the modules at ``paths``, or anywhere, is not kept."""
        self.tried = [
            replace(
                tried,
                decision=Decision.NOT_FASTER,
                reason=f"faster alone, and the whole model was measured {decision} with it",
            )
            if tried.decision is Decision.KEPT and (paths is None or path in paths)
            else tried
            for tried, path in zip(self.tried, self.paths, strict=True)
        ]

    def _searched(self) -> str:
        """Return what was looked for and where, for a result that has nothing else to tell."""
        ops = len({pattern.op.name for pattern in self.patterns})
        text = f"looked for the chains of {ops} operators"
        if self.generator is None:
            return text
        return (
            f"{text}, and for two or more memory-bound operations in a row that a kernel could be "
            f"written for; saw {self.seen} operations"
        )

    def _prove_whole(self, fused: nn.Module) -> tuple[str, str | None]:
        """Compare the whole models; return the outcome, and what is wrong, if anything."""
        failed = ""
        for proof, prove in (
            ("outputs and gradients of the whole model proved against float64", prove_model),
            ("outputs of the whole model proved against float64, without gradients", prove_outputs),
            ("each replacement proved; the whole model does not run in float64", near_outputs),
        ):
            try:
                problem = prove(shadow(self.model), shadow(fused), self.args, self.kwargs)
            except FuselabError:
                raise
            except Exception as error:  # for example, the code requires the model's own dtype
                said = str(error).strip().partition(chr(10))[0]
                if _runs(prove, self.model, self.args, self.kwargs):
                    return "the whole model was not reproduced, nothing is replaced", said
                failed = failed or f": {said}"
                continue
            if problem is not None:
                return "the whole model was not reproduced, nothing is replaced", problem
            return f"{proof}{failed}", None
        return f"each replacement proved; the whole model could not be compared{failed}", None


def _runs(
    prove: Callable[..., str | None], model: nn.Module, args: Any, kwargs: dict[str, Any]
) -> bool:
    """Return whether a proof runs on the original alone, so that an error is a replacement's."""
    try:
        prove(shadow(model), shadow(model), args, kwargs)
    except Exception:  # the same that the comparison raised, for example
        return False
    return True


def _is_plain_layer(module: nn.Module) -> bool:
    """Return whether this is a layer of torch.nn without children, which contains no chain."""
    return type(module).__module__.startswith("torch.nn.") and not any(
        True for _ in module.children()
    )


def _is_fused_layer(module: nn.Module) -> bool:
    """Return whether this is a layer of fuselab.nn, which is a fused operator already."""
    return type(module).__module__.startswith("fuselab.nn.")


def _owner(traced: Traced, root: fx.Node) -> str:
    """Return the path of the module whose forward contains a node: the traced module itself, or an
    ``nn.Sequential`` in it."""
    name = str(root.target) if root.op == "call_module" else ""
    return ".".join(filter(None, (traced.path, name.rpartition(".")[0])))


def _place(traced: Traced, root: fx.Node) -> str:
    """Return a node's path in the model, the same whichever module it was traced in."""
    return ".".join(
        filter(None, (traced.path, str(root.target) if root.op == "call_module" else root.name))
    )


def _bind(model: nn.Module, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda *args: model(*args, **kwargs)


def _operator_inputs(region: MatchRegion, tensors: Sequence[Any]) -> Inputs:
    """Return the operator's own arguments at this place in the model."""
    recorded: list[Any] = []

    def record(*args: Any) -> None:
        recorded.extend(args)

    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in region.after.graph.nodes:
        known[node] = graph.node_copy(node, lambda used: known[used])
        if is_fused(node):
            known[node].target = record
            graph.output(known[node])
            break
    with torch.no_grad():
        fx.GraphModule(region.traced.module, graph)(*tensors)
        match = region.match
        return match.rewrite.call(**dict(zip(match.bindings, recorded, strict=True)))


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return value


# The code that traces; the models that come with fuselab are a user's code.
_TRACERS = tuple(
    f"{os.path.dirname(str(package.__file__))}{os.sep}" for package in (torch, fuselab)
)
_MODELS = os.path.join(_TRACERS[1], "models", "")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _line_of(node: fx.Node) -> str | None:
    """Return ``file:line`` of the user's code that made a traced node, or None."""
    frames = _FRAME.findall(node.stack_trace or "")
    for file, line in reversed(frames):
        is_tracer = file.startswith(_TRACERS) and not file.startswith(_MODELS)
        if not file.startswith("<") and not is_tracer:
            return f"{file}:{line}"
    return None


def _lines_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Return ``file:line`` of the user's code for traced nodes, each once."""
    return tuple(dict.fromkeys(filter(None, map(_line_of, nodes))))


__all__ = ["Decision", "FuseResult", "LeftAlone", "Replacement", "fuse", "fuse_with_report"]
