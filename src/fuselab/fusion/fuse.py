"""``fuselab.fuse``: replace a model's memory-bound chains where that is right and faster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuselab.errors import FuselabError
from fuselab.fusion.emit import Region, install, rewritten, shared_copy
from fuselab.fusion.expression import Expression, has_hooks, is_fused
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
from fuselab.notebook import ShownInNotebooks
from fuselab.op import FusedOp, Inputs
from fuselab.runtime.dispatch import check_types, choose, registered


class Decision(StrEnum):
    """The decision on one chain that an operator could replace."""

    KEPT = "kept"
    NOT_FASTER = "not faster"
    WRONG = "wrong"
    REFUSED = "refused"


@dataclass(frozen=True)
class Replacement:
    """One chain of the model and the operator that was tried in its place.

    ``module`` is the dotted path of the module whose forward contains the chain ("" is the model),
    ``chain`` the operations in order, ``source`` the user's ``file:line``. Times are microseconds
    per call, or None if it was not measured. ``inputs`` are the operator's arguments at the sizes
    found in the model.
    """

    op: FusedOp
    module: str
    chain: str
    source: str
    decision: Decision
    reason: str
    implementation: str | None = None
    before_us: float | None = None
    after_us: float | None = None
    verdict: Verdict | None = None
    inputs: Inputs = field(default_factory=Inputs, repr=False)


@dataclass(frozen=True)
class LeftAlone:
    """A module or layer that was left unchanged, and the reason."""

    module: str
    source: str
    reason: str


@dataclass(frozen=True)
class FuseResult(ShownInNotebooks):
    """The result of ``fuse``. ``model`` is the fused model; times are of the whole model, in us.

    ``training`` says whether forward and backward were timed, or only the forward. ``proof`` is the
    outcome of the whole-model comparison.
    """

    model: Any
    replacements: tuple[Replacement, ...]
    left: tuple[LeftAlone, ...]
    training: bool
    before_us: float
    after_us: float
    verdict: Verdict
    proof: str

    @property
    def kept(self) -> tuple[Replacement, ...]:
        """The replacements that are in the model now."""
        return tuple(tried for tried in self.replacements if tried.decision is Decision.KEPT)

    def __str__(self) -> str:
        what = "forward and backward" if self.training else "forward"
        lines = [
            f"{len(self.kept)} of {len(self.replacements)} chains replaced; {what} "
            f"{self.before_us:.1f} us before, {self.after_us:.1f} us after: "
            f"{self.verdict.outcome}; {self.proof}"
        ]
        for tried in self.replacements:
            times = f" ({tried.before_us:.1f} -> {tried.after_us:.1f} us)" if tried.after_us else ""
            lines.append(
                f"  {tried.decision}: {tried.chain} in {tried.module or 'the model'} -> "
                f"{tried.op.short_name}{times}: {tried.reason} [{tried.source}]"
            )
        lines += [
            f"  left alone: {module.module or 'the model'}: {module.reason}" for module in self.left
        ]
        return "\n".join(lines)


def fuse(
    model: nn.Module,
    example_inputs: Sequence[Any] | Tensor,
    *,
    ops: Sequence[FusedOp] | None = None,
    verbose: bool = False,
) -> nn.Module:
    """Return ``model`` with its memory-bound chains replaced by fused operators, where faster.

    The returned model has its own modules over the same parameters, buffers and hooks; ``model``
    itself is not changed. Every replacement is proved, outputs and gradients, against the original
    on ``example_inputs``, and kept only if it measured faster there: forward and backward when the
    model is in training mode, else the forward. ``ops`` are the operators that may be used; by
    default the library's and every other one registered in this process. ``verbose`` prints what
    was replaced and what was not, and why; ``fuse_with_report`` returns it.

    Raises TargetError when the model does not take ``example_inputs`` or raises on them.
    """
    result = fuse_with_report(model, example_inputs, ops=ops)
    if verbose:
        print(result)
    fused: nn.Module = result.model
    return fused


def fuse_with_report(
    model: nn.Module | Callable[..., Any],
    example_inputs: Sequence[Any] | Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ops: Sequence[FusedOp] | None = None,
    budget_s: float = 1.0,
) -> FuseResult:
    """Run ``fuse`` and return everything that was tried.

    ``budget_s`` bounds each measurement, in seconds. ``model`` may be a plain function of tensors;
    ``FuseResult.model`` is then one too.
    """
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    called = model.forward if isinstance(model, nn.Module) else model
    name = type(model).__name__ if isinstance(model, nn.Module) else _name_of(model)
    check_arguments(called, name, "example_inputs", args, kwargs or {})
    module = model if isinstance(model, nn.Module) else _FunctionModule(model)
    fusion = _Fusion(module, args, dict(kwargs or {}), _patterns(ops), budget_s)
    result = fusion.run()
    if module is model:
        return result
    return FuseResult(**{**vars(result), "model": result.model.forward})


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _patterns(ops: Sequence[FusedOp] | None) -> list[Pattern]:
    if ops is None:
        from fuselab.ops import contract, operators

        library = [contract(name) for name in operators()]
        ops = list({op.name: op for op in (*library, *registered().values())}.values())
    return [Pattern(op, rewrite) for op in ops for rewrite in op.rewrites]


class _FunctionModule(nn.Module):
    """A plain function as a module, so that it can be traced and rewritten like one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


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
        self.left: list[LeftAlone] = []
        self.places: set[tuple[str, str, str]] = set()
        self.measured: dict[Any, tuple[float, float, Verdict]] = {}

    def run(self) -> FuseResult:
        stage = shadow(self.model)
        calls = record_calls(stage, self.args, self.kwargs)
        fused = shared_copy(self.model)
        rewrites: list[tuple[str, Traced, Traced]] = []
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
                if final is not traced:
                    rewrites.append((path, traced, final))
        # Children first: a module runs its own rewritten forward only while its children's classes
        # are those at its installation, and installing gives a child another class.
        places = [(fused.get_submodule(path), traced, final) for path, traced, final in rewrites]
        for place in sorted(places, key=lambda place: sum(1 for _ in place[0].modules())):
            install(*place)
        return self._conclude(fused)

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
            self.places.add(where)
        return kept

    def _try(self, traced: Traced, match: Match, values: Mapping[fx.Node, Any]) -> Replacement:
        owner = _owner(traced, match.root.origin)
        source = _line_of(match.root.origin) or source_line(traced.module)
        if owner != traced.path:
            source = source_line(self.model.get_submodule(owner))

        def result(decision: Decision, reason: str, **more: Any) -> Replacement:
            # An operator's refusal begins with its name, which the report already shows.
            reason = reason.removeprefix(f"{match.op.short_name}: ")
            return Replacement(match.op, owner, match.chain, source, decision, reason, **more)

        region = Region(traced, match)
        tensors = [values[node] for node in region.inputs]
        try:
            inputs = _operator_inputs(region, tensors)
            arguments = match.op.bind(inputs)
            check_types(match.op, arguments)
            match.op.validate(*arguments)
            implementation = choose(match.op, arguments)
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
        before_us, after_us, decision = self._measure(region, tensors, arguments)
        more |= {"before_us": before_us, "after_us": after_us, "verdict": decision}
        if decision.outcome is Outcome.FASTER:
            return result(Decision.KEPT, f"{decision.speedup:.2f}x faster", **more)
        return result(Decision.NOT_FASTER, f"measured {decision}", **more)

    def _measure(
        self, region: Region, tensors: Sequence[Any], arguments: Sequence[Any]
    ) -> tuple[float, float, Verdict]:
        parameters = list(region.before.parameters())
        key = (
            region.match.op.name,
            region.match.chain,
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

    def _conclude(self, fused: nn.Module) -> FuseResult:
        kept = [tried for tried in self.tried if tried.decision is Decision.KEPT]
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
        before, after = shadow(self.model), shadow(fused)
        before_us, after_us, decision = measure(
            _bind(before, self.kwargs),
            _bind(after, self.kwargs),
            self.args,
            list({*before.parameters(), *after.parameters()}),
            training=self.training,
            budget_s=3 * self.budget_s,
        )
        return FuseResult(
            model=fused,
            replacements=tuple(self.tried),
            left=tuple(self.left),
            training=self.training,
            before_us=before_us,
            after_us=after_us,
            verdict=decision,
            proof=proof,
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
                failed = failed or f": {str(error).strip().partition(chr(10))[0]}"
                continue
            if problem is not None:
                return "the whole model was not reproduced, nothing is replaced", problem
            return f"{proof}{failed}", None
        return f"each replacement proved; the whole model could not be compared{failed}", None


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


def _operator_inputs(region: Region, tensors: Sequence[Any]) -> Inputs:
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


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _line_of(node: fx.Node) -> str | None:
    """Return ``file:line`` of the user's code that made a traced node, or None."""
    frames = _FRAME.findall(node.stack_trace or "")
    for file, line in reversed(frames):
        if not file.startswith("<") and "/torch/" not in file and "/fuselab/" not in file:
            return f"{file}:{line}"
    return None


__all__ = ["Decision", "FuseResult", "LeftAlone", "Replacement", "fuse", "fuse_with_report"]
