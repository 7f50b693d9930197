"""Find the chains of memory-bound operations in a traced forward that no operator covers.

A chain is a group of calls with no other call between them that eject may write as one kernel:
pointwise operations, reductions, normalisations, softmax and the views among them. Whether it
really can is known when it is tried.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fuselab.ejection.calls import INFIX, call_text
from fuselab.ejection.dropout import drops
from fuselab.ejection.groups import (
    ARRANGING,
    RESULT,
    groups_worth_a_kernel,
    is_worth_a_kernel,
)
from fuselab.ejection.libraries import HEAVY
from fuselab.ejection.plan import Namer
from fuselab.ejection.regions import RANDOM, written_over
from fuselab.fusion.expression import is_fused
from fuselab.fusion.layers import Form, form_of
from fuselab.fusion.trace import Traced
from fuselab.runtime.dropout import DROPOUTS

_MODULES_OF_CALLS = ("torch", "_operator", "builtins")
_STATISTICS = ("running_mean", "running_var")
_LONGEST_NAME = 4  # operations in an operator's name
# Calls whose results read the elements of windows. What stands before one in a kernel is computed
# anew for each window that an element is in.
_OF_WINDOWS = re.compile("pool|interpolate|upsample")


@dataclass(frozen=True)
class Chain:
    """Calls that one kernel may compute.

    ``inputs`` are traced nodes, or dotted paths of parameters and buffers; the function, with
    ``parameters`` in their order, computes ``outputs``, nodes that something outside reads.
    ``text`` is its Python text under the name ``{name}``. ``frozen`` are the parameters that
    PyTorch does not differentiate: running statistics. Those of the buffers ``updated``, given by
    their paths, get new values, which the function returns after its outputs; the buffers
    ``counters`` count the call. Where the chain ``drops`` elements, its operator takes a seed after
    the inputs.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node | str, ...]
    outputs: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    operations: tuple[str, ...]
    text: str
    frozen: tuple[str, ...]
    updated: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    drops: bool = False

    @property
    def chain(self) -> str:
        """The operations replaced, in the order they run: ``mul → gelu → layer_norm``."""
        return " → ".join(self.operations)

    @property
    def name(self) -> str:
        """The beginning of the operator's name."""
        return "_".join(self.operations[:_LONGEST_NAME])


class ChainFinder:
    """The chains of one traced forward.

    ``values`` has the value of each node in the recorded call, ``hooked`` the layers that must be
    called because of hooks.
    """

    def __init__(
        self, traced: Traced, values: Mapping[fx.Node, Any], hooked: Collection[str]
    ) -> None:
        self.traced, self.values, self.hooked = traced, values, hooked

    def chains(self) -> list[Chain]:
        """Return the largest chains, in the order in which they run."""
        return list(self._largest)

    @cached_property
    def _largest(self) -> list[Chain]:
        return self._among({node for node in self.calls if self._is_unusual(node)})

    def _is_unusual(self, node: fx.Node) -> bool:
        """Return whether a call reads or returns a tensor of which eject makes no kernel."""
        values = (self.values.get(one) for one in (node, *self.sources(node)))
        return any(
            isinstance(value, Tensor)
            and (value.is_complex() or value.is_quantized or value.layout != torch.strided)
            for value in values
        )

    def parts(self, chain: Chain) -> list[Chain]:
        """Return the chains that remain of ``chain``, each with one output."""
        found = []
        for output in chain.outputs:
            nodes = self._only_for(output, chain)
            if is_worth_a_kernel(nodes, self.name_of):
                found.append(self.chain_of(nodes))
        return found

    def _only_for(self, output: fx.Node, chain: Chain) -> list[fx.Node]:
        """Return the nodes of a chain that only serve to compute ``output``."""
        kept = {output}
        for node in reversed(chain.nodes):
            if kept.issuperset(self.readers(node)):
                kept.add(node)
        return [node for node in chain.nodes if node in kept]

    def without(
        self,
        chain: Chain,
        refused: Collection[fx.Node],
        apart: Collection[fx.Node] = (),
    ) -> list[Chain]:
        """Return the chains that remain of ``chain`` without some of its nodes. Those in ``apart``
        do not join what they read."""
        outside = {node for node in self.calls if node not in chain.nodes}
        return self._among(outside.union(refused), apart)

    def without_windows(self, chain: Chain) -> list[Chain]:
        """Return the chains that remain of ``chain`` without its calls on windows; none where it
        has no such call."""
        windows = [node for node in chain.nodes if _OF_WINDOWS.search(self.name_of(node))]
        return self.without(chain, windows) if windows else []

    def _among(self, refused: set[fx.Node], alone: Collection[fx.Node] = ()) -> list[Chain]:
        refused = refused | self.refused
        while True:
            groups = groups_worth_a_kernel(self.calls, self.before, refused, self.name_of, alone)
            apart = {node for group in groups for node in self._apart(group)}
            if not apart:
                return [self.chain_of(group) for group in groups]
            refused = refused | apart

    def _apart(self, group: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes of a group that share a tuple of tensors with a call outside, because a
        kernel takes and returns tensors alone; those that read a size of a tensor which no node
        of the group reads; and its dropouts but the first, because the proof gives all dropouts of
        a model one mask, that with number 0."""
        held = set(group)
        yield from [node for node in group if self.drops(node)][1:]
        places = {_place_of(used) for node in group for used in node.all_input_nodes}
        for node in group:
            sources = [] if node.op == "call_module" else self.sources(node)
            if any(one not in held and _place_of(one) not in places for one in sources):
                yield node
        for node in group:
            used = node.all_input_nodes
            is_read_outside = self.is_tuple(node) and not held.issuperset(node.users)
            if is_read_outside or any(self.is_tuple(one) and one not in held for one in used):
                yield node

    def is_part_of_a_chain(self, nodes: Collection[fx.Node]) -> bool:
        """Return whether a chain has all of ``nodes``, and other calls that compute something."""
        free = {RESULT, *ARRANGING}
        return any(
            set(chain.nodes).issuperset(nodes)
            and any(node not in nodes and self.name_of(node) not in free for node in chain.nodes)
            for chain in self._largest
        )

    def traffic(self, chain: Chain) -> int:
        """Return the bytes that the largest call of a chain reads and writes."""

        def size(node: fx.Node) -> int:
            value = self.values.get(node)
            return value.nbytes if isinstance(value, Tensor) else 0

        return max(size(node) + sum(map(size, self.sources(node))) for node in chain.nodes)

    # --- nodes

    @cached_property
    def forms(self) -> dict[fx.Node, Form]:
        """The calls of layers, as functions."""
        found = {}
        for node in self.traced.graph.nodes:
            if node.op == "call_module" and str(node.target) not in self.hooked:
                form = form_of(self.traced.module.get_submodule(str(node.target)))
                if form is None or len(node.args) != 1 or node.kwargs:
                    continue
                if not form.updated or self._is_called_once(node):
                    found[node] = form
        return found

    def _is_called_once(self, node: fx.Node) -> bool:
        """Return whether a layer is called in one place only, and nothing else reads its
        tensors."""
        layer = self.traced.module.get_submodule(str(node.target))
        for other in self.traced.graph.nodes:
            if other.op == "call_module" and other is not node:
                if self.traced.module.get_submodule(str(other.target)) is layer:
                    return False
            elif other.op == "get_attr" and str(other.target).startswith(f"{node.target}."):
                return False
        return True

    def name_of(self, node: fx.Node) -> str:
        """Return the plain name of what a node calls, the same for a function, method or layer."""
        if node in self.forms:
            name = self.forms[node].name
            return "detach" if name == "identity" else name  # it moves no data either
        if self.is_result(node) and self.name_of(node.all_input_nodes[0]) not in ARRANGING:
            return RESULT
        if node.op == "call_module":
            return type(self.traced.module.get_submodule(str(node.target))).__name__
        name = str(node.target if node.op == "call_method" else _function_name(node.target))
        return name.rstrip("_") if not name.startswith("_") else name

    def is_number(self, node: fx.Node) -> bool:
        """Return whether a node is a size, a shape, a dtype or a device, which is free to read."""
        value = self.values.get(node)
        items = value if isinstance(value, tuple) else (value,)  # a shape is recorded as a tuple
        return node.op in ("call_function", "call_method") and all(
            isinstance(item, (bool, int, float, torch.dtype, torch.device)) for item in items
        )

    def is_tuple(self, node: fx.Node) -> bool:
        """Return whether a node's value is a tuple of tensors, as of torch.max along a dim."""
        value = self.values.get(node)
        return (
            isinstance(value, (tuple, list))
            and len(value) > 0
            and all(isinstance(one, Tensor) for one in value)
        )

    def is_result(self, node: fx.Node) -> bool:
        """Return whether a node is one tensor of such a tuple."""
        return node.target in (operator.getitem, getattr) and self.is_tuple(node.all_input_nodes[0])

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls of the forward that are no numbers, in order."""
        return [
            node
            for node in self.traced.graph.nodes
            if node.op.startswith("call_") and not self.is_number(node)
        ]

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield what a call reads: tensors, and those whose sizes it reads."""
        for used in node.all_input_nodes:
            if self.is_number(used):
                yield from self.sources(used)
            else:
                yield used

    def readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that read a tensor, or one of its sizes."""
        for user in node.users:
            if self.is_number(user):
                yield from self.readers(user)
            else:
                yield user

    @cached_property
    def before(self) -> dict[fx.Node, set[fx.Node]]:
        """The calls that have to run before each call. Those that draw random numbers, write over a
        tensor or run other code keep their order."""
        found: dict[fx.Node, set[fx.Node]] = {}
        last: fx.Node | None = None
        for node in self.calls:
            found[node] = {used for used in self.sources(node) if used in found}
            if self.keeps_its_place(node):
                if last is not None:
                    found[node].add(last)
                last = node
        return found

    def keeps_its_place(self, node: fx.Node) -> bool:
        """Return whether a call's order among others of its kind matters."""
        is_layer = node.op == "call_module" and node not in self.forms
        # A call that reads what another writes over has to stay before it or behind it.
        reads_written = not self.written.isdisjoint(node.all_input_nodes)
        return is_layer or self.draws(node) or node in self.writing or reads_written

    def draws(self, node: fx.Node) -> bool:
        """Return whether a call draws random numbers whose order matters: not a dropout that a
        kernel may compute."""
        return self.name_of(node) in RANDOM and not self.drops(node)

    def drops(self, node: fx.Node) -> bool:
        """Return whether a call drops elements in training."""
        if node in self.forms:
            return self.forms[node].name in DROPOUTS
        return drops(node)

    @cached_property
    def writing(self) -> set[fx.Node]:
        """The calls that write over a tensor which something else may read."""
        return {node for node in self.calls if self._writes(node) and not self._owns_input(node)}

    def _writes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(
                getattr(self.traced.module.get_submodule(str(node.target)), "inplace", False)
            )
        return bool(written_over(node))

    def _owns_input(self, node: fx.Node) -> bool:
        """Return whether only this call reads its input, which another call has made anew."""
        first = node.args[0] if node.args else None
        return (
            isinstance(first, fx.Node)
            and first.op.startswith("call_")
            and len(first.users) == 1
            and node.kwargs.get("out") is None
            and node.target is not operator.setitem
            and self.name_of(first) not in ARRANGING
        )

    @cached_property
    def written(self) -> set[fx.Node]:
        """The tensors that a call writes over, and their views."""
        written = {
            one
            for node in self.writing
            for one in (
                node.all_input_nodes[:1] if node.op == "call_module" else written_over(node)
            )
        }
        views = {node for node in self.calls if self.name_of(node) in ARRANGING}
        while True:
            more = {node for node in views if written.intersection(node.all_input_nodes)}
            more |= {used for node in views & written for used in node.all_input_nodes}
            if more <= written:
                return written
            written |= more

    @cached_property
    def refused(self) -> set[fx.Node]:
        """The calls that no kernel of a chain computes."""
        return {
            node
            for node in self.calls
            if node in self.writing
            or self.written.intersection(node.all_input_nodes)
            or node not in self.needed
            or not self._may_join(node)
        }

    @cached_property
    def needed(self) -> set[fx.Node]:
        """The nodes whose values something reads in the end: the output, or a call that keeps its
        place."""
        found: set[fx.Node] = set()
        for node in reversed(self.traced.graph.nodes):
            is_end = node.op == "output" or (node in self.before and self.keeps_its_place(node))
            if is_end or node in found:
                found.update((node, *node.all_input_nodes))
        return found

    def _may_join(self, node: fx.Node) -> bool:
        name = self.name_of(node)
        if is_fused(node) or name in HEAVY or self.draws(node):
            return False
        if node.op == "call_module" and node not in self.forms:
            return False
        if node.op == "call_function":
            module = getattr(node.target, "__module__", None) or "torch"
            if module.partition(".")[0] not in _MODULES_OF_CALLS:
                return False
        if self.is_result(node):
            return self.name_of(node.all_input_nodes[0]) not in RANDOM
        if self.is_tuple(node) and not all(map(self.is_result, node.users)):
            return False
        tensors = [self.values.get(used) for used in self.sources(node)]
        return (
            (isinstance(self.values.get(node), Tensor) or self.is_tuple(node))
            and bool(tensors)
            and all(isinstance(tensor, Tensor) for tensor in tensors)
        )

    # --- text

    def chain_of(self, nodes: Sequence[fx.Node]) -> Chain:
        """Return the chain of some calls. Its text has names of its own, so that equal chains of
        other places in a model are equal texts."""
        held = set(nodes)
        inputs: dict[fx.Node | str, str] = {}
        namer = Namer(["torch", "Tensor"])
        names: dict[fx.Node, str] = {}

        def take(source: fx.Node) -> None:
            place = _place_of(source)
            if place not in inputs:
                wanted = place.rpartition(".")[2] if isinstance(place, str) else "input"
                inputs[place] = namer.name(wanted)
            names[source] = inputs[place]

        lines = []
        updated: dict[fx.Node | str, str] = {}  # paths, and the names of the new values
        counters: list[str] = []
        for node in nodes:
            for source in self.sources(node):
                if source not in held and source not in names:
                    take(source)
            for used in node.all_input_nodes:
                if self.is_number(used):
                    names[used] = self._number_text(used, names)
            form = self.forms.get(node)
            if form is not None and form.name == "identity":
                names[node] = names[node.args[0]]  # type: ignore[index]
                continue
            for attribute in form.tensors.values() if form is not None else ():
                path = f"{node.target}.{attribute}"
                if path not in inputs:
                    inputs[path] = namer.name(attribute)
            for attribute in form.updated if form is not None else ():
                path = f"{node.target}.{attribute}"
                updated[path] = namer.name(f"new_{attribute}")
                lines.append(f"    {updated[path]} = {inputs[path]}.clone()")
            counters += [f"{node.target}.{name}" for name in (form.counters if form else ())]
            text = self._call_text(node, names, inputs | updated)
            names[node] = namer.name(_label(self.name_of(node)))
            lines.append(f"    {names[node]} = {text}")
        outputs = [node for node in nodes if not held.issuperset(self.readers(node))]
        result = ", ".join([*(names[node] for node in outputs), *updated.values()])
        given = ", ".join(inputs.values())
        return Chain(
            tuple(nodes),
            tuple(inputs),
            tuple(outputs),
            tuple(inputs.values()),
            tuple(
                _label(self.name_of(node))
                for node in nodes
                if self.name_of(node) not in {RESULT, *ARRANGING}
            ),
            "\n".join([f"def {{name}}({given}):", *lines, f"    return {result}", ""]),
            tuple(dict.fromkeys(self._statistics(nodes, names, inputs))),
            tuple(map(str, updated)),
            tuple(counters),
            any(map(self.drops, nodes)),
        )

    def _statistics(
        self,
        nodes: Sequence[fx.Node],
        names: Mapping[fx.Node, str],
        inputs: Mapping[fx.Node | str, str],
    ) -> Iterator[str]:
        """Yield the names of running statistics, of layers and of calls like ``F.batch_norm``."""
        for node in nodes:
            form = self.forms.get(node)
            for statistic in _STATISTICS:
                if form is not None and statistic in form.tensors:
                    yield inputs[f"{node.target}.{statistic}"]
            if form is None and self.name_of(node) in ("batch_norm", "instance_norm"):
                given = [*node.args[1:3], *(node.kwargs.get(name) for name in _STATISTICS)]
                yield from (names[one] for one in given if isinstance(one, fx.Node))

    def _number_text(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        for used in node.all_input_nodes:
            if self.is_number(used):
                names[used] = self._number_text(used, names)
        text = call_text(node, names)
        return f"({text})" if node.target in INFIX else text

    def _call_text(
        self, node: fx.Node, names: Mapping[fx.Node, str], inputs: Mapping[fx.Node | str, str]
    ) -> str:
        form = self.forms.get(node)
        if form is not None:
            given = [names[node.args[0]]]  # type: ignore[index]
            given += [
                f"{key}={inputs[f'{node.target}.{name}']}" for key, name in form.tensors.items()
            ]
            given += [f"{key}={value!r}" for key, value in form.values.items()]
            return f"{form.function}({', '.join(given)})"
        if not self._writes(node):
            return call_text(node, names)
        # Only this call reads the tensor that it writes over, so that a new one will do.
        graph = fx.Graph()
        known = {used: graph.placeholder(f"input_{i}") for i, used in enumerate(names)}
        copied = graph.node_copy(node, lambda used: known[used])
        copied.kwargs = {key: value for key, value in copied.kwargs.items() if key != "inplace"}
        if copied.op == "call_method" or str(_function_name(copied.target)).endswith("_"):
            copied.op, copied.target = "call_method", self.name_of(node)
        return call_text(copied, {known[used]: name for used, name in names.items()})


def _place_of(source: fx.Node) -> fx.Node | str:
    """Return what a chain's input is known by: the path of a parameter or buffer, or the node."""
    return str(source.target) if source.op == "get_attr" else source


def _function_name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _label(name: str) -> str:
    """Return an operation's name as a variable's: ``truediv`` as ``div``."""
    return {"truediv": "div", "neg_": "neg"}.get(name, re.sub(r"\W", "", name))
