"""Cut a function into regions that become fused operators, and the PyTorch calls between them.

The function's graph of PyTorch calls (``torch.nn.functional.linear``, ``+``, ``.view``) is cut, so
that what comes out reads like the user's code. A call joins a region if eject can write its kernel.
A region grows over all calls that depend on each other, as long as no other call has to run between
two of its own.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import operator
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from fuselab.ejection.blocks import Blocks, blocks_of, in_blocks
from fuselab.ejection.calls import (
    IN_PLACE,
    INFIX,
    call_name,
    call_text,
    drop_assertions,
    is_number,
    source_line,
    without_kept_inputs,
)
from fuselab.ejection.capture import Captured, argument_name, trace
from fuselab.ejection.dropout import dropouts_in, drops
from fuselab.ejection.equal_sizes import hint_of
from fuselab.ejection.followed_dtypes import follow_dtypes, followed
from fuselab.ejection.from_text import function_of
from fuselab.ejection.groups import (
    ARRANGING,
    first_that_does_not_join,
    groups_worth_a_kernel,
)
from fuselab.ejection.kernels import DoesNotFitError
from fuselab.ejection.libraries import HEAVY
from fuselab.ejection.package import Package, planned_package
from fuselab.ejection.plan import Namer, Sizes, printed
from fuselab.ejection.recurrent import RECURRENCES
from fuselab.ejection.taken import argument_of
from fuselab.ejection.written import updated_lists, updated_statistics
from fuselab.errors import EjectError

# Calls that read or write the state of the random number generator: their order must stay. The
# masks of dropouts follow from a seed, in any order.
RANDOM = frozenset(
    (
        "alpha_dropout", "bernoulli", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "feature_alpha_dropout", "multi_head_attention_forward", "multinomial", "normal", "poisson",
        "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "rrelu",
        "scaled_dot_product_attention", *RECURRENCES,
    )
)  # fmt: skip


ALONE = "alone it would gain nothing"  # why a call that could have a kernel gets none
LIBRARY = "a library computes it"
MOVES_NOTHING = "it moves no data"


@dataclass(frozen=True, eq=False)
class Region:
    """Calls that become one fused operator, ``package``, which takes the tensors that they read,
    ``inputs``, and returns ``outputs``."""

    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    package: Package

    @property
    def name(self) -> str:
        return self.package.name


@dataclass(frozen=True)
class _Part:
    """Some calls as a function of the tensors that they read."""

    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    function: FunctionType
    numbers: tuple[int, ...]  # of its dropouts

    @property
    def kind(self) -> Any:
        """The facts from which kernels follow, names of variables apart: parts of one kind compute
        the same."""
        code = self.function.__code__
        places = {name: f"<{place}>" for place, name in enumerate(code.co_varnames)}
        text = inspect.getsource(self.function).partition("\n")[2]
        examples = [
            (tuple(one.shape), one.stride(), one.dtype, one.device, _value(node).requires_grad)
            for node in self.inputs
            for one in (_example(_value(node)),)
        ]
        return _renamed(text, places), tuple(examples), self.numbers

    def planned(self, inference: bool) -> Region:
        """Return the part with its kernels. Raises EjectError."""
        names = self.function.__code__.co_varnames
        frozen = [
            argument_of(name)
            for name, node in zip(names, self.inputs, strict=False)
            if not _value(node).requires_grad
        ]
        examples = [_example(_value(one)) for one in self.inputs]
        name = self.function.__name__
        package = planned_package(
            self.function, examples, {}, name, inference, frozen, self.numbers
        )
        return Region(self.calls, self.inputs, self.outputs, package)


@dataclass(frozen=True, eq=False)
class Cut:
    """A function as steps in the order in which they run: regions, and calls that stay PyTorch's.

    ``newer`` has what took the place of a tensor that the code writes over; ``reasons`` says of
    calls why they cannot become kernels; ``frozen`` names the arguments that
    get no gradient, such as the running statistics of a batch norm; ``numbers`` has those of the
    dropouts.
    """

    captured: Captured
    sizes: Sizes
    names: Mapping[fx.Node, str]
    steps: tuple[Region | fx.Node, ...]
    newer: Mapping[fx.Node, fx.Node]
    reasons: Mapping[fx.Node, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    numbers: Mapping[fx.Node, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.captured.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.captured.parameters

    @property
    def multiples(self) -> dict[str, int]:
        """Sizes that have to be multiples of a number: none that is known."""
        return {}

    @property
    def shares(self) -> list[str]:
        """Conditions under which sizes are multiples of other sizes: none that is known."""
        return []

    @property
    def least(self) -> dict[str, int]:
        """Sizes that must not be below a number: none that is known."""
        return {}

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(step for step in self.steps if isinstance(step, Region))

    @property
    def operators(self) -> tuple[Region, ...]:
        """The regions with packages of their own; others use that of an earlier one."""
        return tuple({one.name: one for one in reversed(self.regions)}.values())[::-1]

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls that stay PyTorch's."""
        return tuple(step for step in self.steps if not isinstance(step, Region))

    def newest(self, node: fx.Node) -> fx.Node:
        """Return what took the place of a tensor that the code writes over, or the tensor."""
        while node in self.newer:
            node = self.newer[node]
        return node

    def reason(self, node: fx.Node) -> str:
        """Return why a call stays PyTorch's."""
        if call_name(node) in ARRANGING:
            return MOVES_NOTHING
        return self.reasons.get(node) or ALONE


def cut(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
) -> Cut:
    """Return ``function``, called with ``args`` and ``keywords``, cut into regions.

    Raises EjectError where the function cannot be one graph.
    """
    traced = trace(function, args, keywords, name, inference)
    if not inference and not traced.returned.results:  # nothing that could have a gradient
        return cut(function, args, keywords, name, True)
    follow_dtypes(traced, inference)
    return _Cutter(traced, inference).cut()


def _sentence(error: Exception) -> str:
    return str(error).partition(" (")[0].partition(";")[0] or "it fits no kernel"


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


class _Cutter:
    def __init__(self, traced: Captured, inference: bool) -> None:
        self.traced = traced
        self.inference = inference
        self.graph = traced.traced.graph
        drop_assertions(self.graph)
        self.numbers = {node: place for place, node in enumerate(dropouts_in(self.graph))}
        self.newer = without_kept_inputs(self.graph)
        self.newer |= _without_in_place(self.graph)
        self.sizes = Sizes(traced)
        self.names = _names(self.graph)
        self.reasons: dict[fx.Node, str] = {}
        self.apart: set[fx.Node] = set()  # calls that fit no kernel with what they read
        self.judged: dict[Any, str | None] = {}
        self.planned: dict[Any, Region] = {}
        self.packages: dict[Any, Package] = {}  # by the kind of their part

    @cached_property
    def calls(self) -> list[fx.Node]:
        return [
            node
            for node in self.graph.nodes
            if node.op not in ("placeholder", "output") and not is_number(node)
        ]

    @cached_property
    def before(self) -> dict[fx.Node, set[fx.Node]]:
        """The calls that have to run before each call: its operands, and for a call that draws
        random numbers or writes to a tensor, the one before it. A call that updates running
        statistics comes after those that read them before, and before those that do so later."""
        found: dict[fx.Node, set[fx.Node]] = {}
        last: fx.Node | None = None
        users: dict[fx.Node, list[fx.Node]] = {}
        updated: dict[fx.Node, fx.Node] = {}
        for node in self.calls:
            found[node] = {one for one in node.all_input_nodes if one in found}
            found[node].update(updated[one] for one in node.all_input_nodes if one in updated)
            for one in updated_statistics(node):
                found[node].update(users.get(one, ()))
                updated[one] = node
            for one in node.all_input_nodes:
                users.setdefault(one, []).append(node)
            if _keeps_its_place(node):
                if last is not None:
                    found[node].add(last)
                last = node
        return found

    def cut(self) -> Cut:
        for node in self.calls:
            if isinstance(node.target, HigherOrderOperator):
                line = f" ({text})" if (text := source_line(node)) else ""
                raise EjectError(
                    f"{self.traced.name} calls a custom autograd function, or control flow as an "
                    f"operator{line}; eject the parts before and after it."
                )
            if any(is_number(one) and not self._is_known(one) for one in node.all_input_nodes):
                line = f" ({text})" if (text := source_line(node)) else ""
                raise EjectError(
                    f"{self.traced.name} reads a size that depends on values{line}; eject the "
                    "parts before and after it."
                )
        written = _aliases_of_written(self.calls)
        for node in self.calls:
            if node in written:
                self.reasons[node] = "it shares memory with a tensor that is written over"
            elif reason := self.plain_reason(node):
                self.reasons[node] = reason
        while True:
            namer = Namer([self.traced.name])
            found = [self.region(group, namer) for group in self.groups()]
            regions = [one for one in found if one is not None]
            if len(found) == len(regions):
                break
        fused = {node for region in regions for node in region.calls}
        self.note_refused([node for node in self.calls if node not in fused])
        frozen = frozenset(
            argument.name
            for argument in self.traced.arguments
            if not _value(argument.node).requires_grad
        )
        return Cut(
            self.traced,
            self.sizes,
            self.names,
            self.ordered(regions),
            self.newer,
            self.reasons,
            frozen,
            self.numbers,
        )

    def _is_known(self, number: fx.Node) -> bool:
        """Return whether a number depends on the sizes of the arguments alone."""
        known = {*self.sizes.names, *self.sizes.equal}
        return known.issuperset(_symbols_in(_value(number)))

    def plain_reason(self, node: fx.Node) -> str | None:
        """Return why eject writes no kernel of a call, where that is known without trying one."""
        if call_name(node) in HEAVY:
            return LIBRARY
        if node.op == "get_attr" or not isinstance(_value(node), (Tensor, tuple, list)):
            return "it is no call on tensors"
        if any(_is_unusual(_value(one)) for one in (node, *node.all_input_nodes)):
            return "kernels take dense real tensors, of shapes that depend on no values"
        return self.reasons.get(source) if (source := _call_of_several(node)) else None

    def note_refused(self, calls: Sequence[fx.Node]) -> bool:
        """Note why eject can write no kernel of each of some calls alone; return whether there is
        one of which it cannot."""
        refused = False
        for node in calls:
            if node not in self.reasons and (reason := self.reason(node)):
                self.reasons[node] = reason
                refused = True
        return refused

    def reason(self, node: fx.Node) -> str | None:
        """Return None if eject can write the call's kernel, else why not, after trying it."""
        if reason := self.plain_reason(node):
            return reason
        if source := _call_of_several(node):
            return self.reason(source)
        key = _signature(node)
        if key not in self.judged:
            refused = self._refused([node], call_name(node) in ARRANGING)
            # What an einsum computes only its equation and the sizes tell.
            is_product = refused is not None and call_name(node) == "einsum"
            self.judged[key] = LIBRARY if is_product else refused
        return self.judged[key]

    def _refused(self, calls: Sequence[fx.Node], is_negated: bool = False) -> str | None:
        """Return None if eject can write the kernels of some calls, else why not. Of calls that
        only arrange a tensor it writes none, so their negated result is tried."""
        try:
            part = self.made(calls, "alone", is_negated)
            if part is None:
                return "its sizes are known only outside of it"
            part.planned(self.inference)
        except (EjectError, DoesNotFitError, AssertionError) as error:
            return _sentence(error)
        return None

    def groups(self) -> list[list[fx.Node]]:
        """Return the groups of fusible calls that are worth a kernel."""
        return groups_worth_a_kernel(self.calls, self.before, self.reasons, call_name, self.apart)

    # --- regions

    def region(self, group: Sequence[fx.Node], namer: Namer) -> Region | None:
        """Return the group as a region; None if it has to be smaller, after noting the reason, or
        where it falls into two."""
        last = re.sub(r"\W", "_", self.names[group[-1]])
        name = namer.name(f"{self.traced.name}_{last}")
        key = tuple(group), name
        if key not in self.planned:
            made = self.made(group, name)
            try:
                if made is None:
                    raise EjectError("its sizes are known only outside of it")
                self.planned[key] = self._planned(made)
            except (EjectError, DoesNotFitError, AssertionError) as error:
                if self.note_refused(group):
                    return None
                arranging = [node for node in group if call_name(node) in ARRANGING]
                first = None
                if not arranging:
                    first = first_that_does_not_join(group, lambda some: not self._refused(some))
                if first is not None and first not in self.apart:
                    self.apart.add(first)
                    return None
                for node in arranging or group:
                    self.reasons[node] = _sentence(error)
                return None
        return self.planned[key]

    def _planned(self, part: _Part) -> Region:
        """Return a part with its kernels: those of an earlier part of its kind, as the steps of a
        recurrent cell are. Raises EjectError."""
        package = self.packages.get(part.kind)
        if package is not None:
            return Region(part.calls, part.inputs, part.outputs, package)
        region = part.planned(self.inference)
        self.packages[part.kind] = region.package
        return region

    def made(self, calls: Sequence[fx.Node], name: str, is_negated: bool = False) -> _Part | None:
        """Return some calls as a function, or None if they read a size that is none of their
        inputs'."""
        held = set(calls)
        drops = held.intersection(self.numbers)
        read = dict.fromkeys(one for node in calls for one in _tensors_read(node))
        inputs = [one for one in read if one not in held]
        outputs = tuple(
            node for node in calls if any(user not in held for user in node.users) or not node.users
        )
        if inputs:
            inputs += self.carriers(calls, self.places(inputs))
        places = self.places(inputs)
        names: dict[Any, str] = dict(self.names)
        if inputs:
            names[torch.device] = f"{self.names[inputs[0]]}.device"
            names |= followed(inputs, self.names)
        sizes = _SizesOf(places)
        lines: list[tuple[Blocks, str]] = []
        try:
            for node in self.graph.nodes:
                if is_number(node):
                    names[node] = sizes.text(_value(node)) if _is_read(node, held) else ""
                elif node in held:
                    text = f"{names[node]} = {call_text(node, names)}"
                    lines.append((blocks_of(node), text))
        except KeyError:
            return None
        given = ", ".join(self.names[one] for one in inputs)
        result = ", ".join(self.names[one] for one in outputs)
        if is_negated:
            first = "" if isinstance(_value(outputs[0]), Tensor) else "[0]"
            result = f"torch.neg({result}{first})"
        body = textwrap.indent("\n".join([*in_blocks(lines), f"return {result}"]), "    ")
        text = f"def {name}({given}):\n{body}\n"
        numbers = tuple(self.numbers[node] for node in self.graph.nodes if node in drops)
        return _Part(tuple(calls), tuple(inputs), outputs, function_of(name, text), numbers)

    def places(self, inputs: Sequence[fx.Node]) -> dict[sympy.Symbol, str]:
        """Return where each size is found among the shapes of ``inputs``, as Python text."""
        found: dict[sympy.Symbol, str] = {}
        for one in inputs:
            for dim, size in enumerate(_value(one).shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    found.setdefault(size.node.expr, f"{self.names[one]}.shape[{dim}]")
        return found

    def carriers(
        self, calls: Sequence[fx.Node], known: Mapping[sympy.Symbol, str]
    ) -> list[fx.Node]:
        """Return the arguments of the function that have the sizes which ``calls`` read and which
        are not ``known``."""
        held = set(calls)
        numbers = [node for node in self.graph.nodes if is_number(node) and _is_read(node, held)]
        wanted = {symbol for node in numbers for symbol in _symbols_in(_value(node))} - set(known)
        arguments = {one.name: one.node for one in self.traced.arguments}
        places = {self.traced.sizes[one][0] for one in wanted if one in self.traced.sizes}
        return [node for name, node in arguments.items() if name in places]

    def ordered(self, regions: Sequence[Region]) -> tuple[Region | fx.Node, ...]:
        """Return regions and calls such that each comes after those that it needs, and otherwise
        in the order of the user's code."""
        region_of = {node: region for region in regions for node in region.calls}
        done: dict[Any, None] = {}

        def visit(node: fx.Node) -> None:
            step: Region | fx.Node = region_of.get(node, node)
            if step in done:
                return
            own = step.calls if isinstance(step, Region) else (step,)
            for one in own:
                for source in sorted(self.before[one] - set(own), key=self.calls.index):
                    visit(source)
            done[step] = None

        for node in self.calls:
            visit(node)
        return tuple(done)


@dataclass(frozen=True)
class _SizesOf:
    """Texts of sizes in terms of the shapes of a region's inputs."""

    places: Mapping[sympy.Symbol, str]

    def text(self, value: Any) -> str:
        """Return the text of a size; KeyError if none of the inputs has it."""
        if isinstance(value, torch.Size):
            inner = ", ".join(map(self.text, value))
            return f"({inner}{',' if len(value) == 1 else ''})"
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            return repr(value)
        return size_text(value.node.expr, {one: self.places[one] for one in _symbols(value)})


def size_text(size: sympy.Expr, places: Mapping[sympy.Symbol, str]) -> str:
    """Return a size as Python text, its symbols replaced by the texts in ``places``."""
    stand_ins = {symbol: sympy.Symbol(f"size_{place}") for place, symbol in enumerate(places)}
    text = printed(size.subs(stand_ins))
    for symbol, stand_in in stand_ins.items():
        text = re.sub(rf"\b{stand_in.name}\b", places[symbol], text)
    return text


def _symbols(value: Any) -> list[sympy.Symbol]:
    return sorted(value.node.expr.free_symbols, key=str)


def _symbols_in(value: Any) -> set[sympy.Symbol]:
    """Return the symbols of a number, or of those in a shape."""
    several = value if isinstance(value, torch.Size) else [value]
    held = [one for one in several if isinstance(one, (torch.SymInt, torch.SymFloat))]
    return {symbol for one in held for symbol in _symbols(one)}


def _is_read(node: fx.Node, held: set[fx.Node]) -> bool:
    """Return whether calls of a region read a number, directly or through others."""
    return any(user in held or (is_number(user) and _is_read(user, held)) for user in node.users)


def _tensors_read(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensors that a call reads."""
    for one in node.all_input_nodes:
        if not is_number(one):
            yield one


def _call_of_several(node: fx.Node) -> fx.Node | None:
    """Return the call that returns several tensors of which ``node`` takes one; None where it does
    something else."""
    source = node.all_input_nodes[0] if node.target is operator.getitem else None
    return None if source is None or isinstance(_value(source), Tensor) else source


def _is_unusual(value: Any) -> bool:
    """Return whether a value is a complex or sparse tensor, or of a shape that depends on
    values."""
    return isinstance(value, Tensor) and (
        value.is_complex()
        or value.is_quantized
        or value.layout != torch.strided
        or any(isinstance(size, torch.SymInt) and size.node.hint is None for size in value.shape)
    )


def _keeps_its_place(node: fx.Node) -> bool:
    is_random = call_name(node) in RANDOM and not drops(node)
    return is_random or bool(written_over(node))


def written_over(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a call writes over."""
    if lists := updated_lists(node):
        return lists
    name = call_name(node)
    is_method = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    is_function = node.op == "call_function" and name.endswith("_") and not name.startswith("_")
    is_function &= node.target not in INFIX  # `&` is ``operator.and_``
    written = node.target in IN_PLACE or node.target is operator.setitem
    if is_method or is_function or written or _is_asked_to_write(node):
        first = node.args[0] if node.args else node.kwargs.get("input")
        return (first,) if isinstance(first, fx.Node) and not is_number(first) else ()
    out = node.kwargs.get("out")
    given = out if isinstance(out, (list, tuple)) else (out,)
    return tuple(one for one in given if isinstance(one, fx.Node))


def _is_asked_to_write(node: fx.Node) -> bool:
    """Return whether a call has ``inplace=True``, by name or, as ``nn.Hardswish`` passes it, by
    position."""
    place = _place_of_inplace(node.target) if node.op == "call_function" else None
    by_position = place is not None and node.args[place:] == (True,)
    return by_position or node.kwargs.get("inplace") is True


@functools.cache
def _place_of_inplace(target: Any) -> int | None:
    """Return which parameter of a function is ``inplace``, its last; None where it has none."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin
        return None
    return len(names) - 1 if names and names[-1] == "inplace" else None


def _storage(node: fx.Node) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _aliases_of_written(calls: Sequence[fx.Node]) -> set[fx.Node]:
    """Return all calls that read or make a tensor of which some call overwrites the memory."""
    storages = {_storage(one) for node in calls for one in written_over(node)} - {None}
    return {
        node
        for node in calls
        if written_over(node)
        or any(_storage(one) in storages for one in (node, *node.all_input_nodes))
    }


def _is_view(node: fx.Node) -> bool:
    """Return whether a call gives another tensor over the memory of one that it takes."""
    shares = any(_storage(one) == _storage(node) for one in node.all_input_nodes)
    return call_name(node) in ARRANGING or (shares and not written_over(node))


def _without_in_place(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Replace calls that write over a tensor of the graph's own by those that return a new one,
    where nothing else shares the tensor's memory; return the new one of each such tensor."""
    newer: dict[fx.Node, fx.Node] = {}
    nodes = list(graph.nodes)
    views = {*filter(_is_view, nodes)}  # before calls that write are made others
    for place, node in enumerate(nodes):
        written = written_over(node)
        if len(written) != 1 or updated_lists(node) or node.target is operator.setitem:
            continue
        (target,) = written
        if target.op == "placeholder":
            continue
        sharing = [one for one in nodes if _storage(one) == _storage(target)]
        operands = [one for one in node.all_input_nodes if isinstance(_value(one), Tensor)]
        same = all(_value(one).dtype == _value(target).dtype for one in operands)
        name = call_name(node)
        if any(one.op == "placeholder" for one in sharing) or not same or node.kwargs.get("out"):
            continue
        if views.intersection(sharing) or name in ("copy_", "set_"):
            continue
        if list(map(hint_of, _value(node).shape)) != list(map(hint_of, _value(target).shape)):
            continue
        _make_new(node, name)
        for user in list(target.users):
            if user is not node and nodes.index(user) > place:
                user.replace_input_with(target, node)
        newer[target] = node
    return newer


def _make_new(node: fx.Node, name: str) -> None:
    target: Any = node.target
    if target in IN_PLACE:
        node.target = IN_PLACE[target][1]
    elif _is_asked_to_write(node):
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        node.args = node.args[: _place_of_inplace(target)]
    elif node.op == "call_method":
        node.target = name[:-1]
    else:
        node.op, node.target = "call_method", name[:-1]


# What the attributes of a tensor are that are tensors and whose names are letters.
_ATTRIBUTES = dict.fromkeys(("T", "mT", "H", "mH"), "transposed")


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return a name for every tensor: the user's, or that of the call."""
    namer = Namer(["torch", "Tensor"], in_kernel=False)
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and not is_number(node):
            names[node] = namer.name(argument_name(node))
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not is_number(node):
            name = re.sub(r"_\d+$", "", node.name)
            if node.target is getattr:
                name = _ATTRIBUTES.get(str(node.args[1]), str(node.args[1]))
            names[node] = namer.name(call_name(node) if name in dir(builtins) else name)
    return names


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return Python text with its variables renamed, attributes and keywords apart."""
    words = [*tokenize.generate_tokens(io.StringIO(textwrap.dedent(text)).readline)]
    found = []
    for place, word in enumerate(words):
        is_attribute = place > 0 and words[place - 1].string == "."
        is_keyword = words[place + 1 :][:1] and words[place + 1].string == "="
        is_keyword = is_keyword and words[place + 1].start == word.end
        is_variable = word.type == tokenize.NAME and not is_attribute and not is_keyword
        found.append(names.get(word.string, word.string) if is_variable else word.string)
    return " ".join(found)


def _signature(node: fx.Node) -> Any:
    """Return what a call's kernel depends on: the function, and its arguments' kinds."""

    def kind(value: Any) -> Any:
        if isinstance(value, fx.Node):
            held = _value(value)
            if isinstance(held, Tensor):
                return held.dtype, tuple(isinstance(size, int) and size == 1 for size in held.shape)
            return type(held)
        if isinstance(value, (list, tuple)):
            return tuple(map(kind, value))
        return repr(value)

    keywords = tuple(sorted(node.kwargs.items()))
    follows = node.meta.get("follows")
    return node.op, node.target, kind(node.args), kind(keywords), blocks_of(node), follows


def _example(fake: Tensor) -> Tensor:
    """Return a tensor of the shape, strides and dtype that a fake tensor has in the example."""
    sizes, strides = list(map(hint_of, fake.shape)), list(map(hint_of, fake.stride()))
    made = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
    return made if fake.is_floating_point() else made.zero_()
