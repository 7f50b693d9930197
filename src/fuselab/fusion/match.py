"""Find where a rewrite's pattern occurs in an expression, as subgraph isomorphism from its root.

A match may use each inner value only once: what the chain computes on the way must have no other
reader, else the replacement would have to compute it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fuselab.fusion.expression import (
    COMMUTATIVE,
    Apply,
    Expression,
    Opaque,
    Value,
    elements_of,
    of_pattern,
    parameters_of,
    values_in,
)
from fuselab.op import FusedOp, Rewrite


@dataclass(frozen=True)
class Match:
    """One occurrence: ``root`` is the value replaced, ``bindings`` the call's parameters."""

    op: FusedOp
    rewrite: Rewrite
    root: Apply
    bindings: dict[str, Any]
    covered: tuple[Apply, ...]

    @property
    def origins(self) -> tuple[fx.Node, ...]:
        """The traced nodes that the match replaces, wholly or in part, in no fixed order."""
        return tuple({value.origin: None for value in self.covered})

    @property
    def chain(self) -> str:
        """The operations replaced, in the order they run: ``add → relu``, ``26 embedding``."""
        names = [value.name for value in self.covered]
        if not self.rewrite.lists:
            return " → ".join(names)
        counts = {name: names.count(name) for name in names}
        return " → ".join(
            name if count == 1 else f"{count} {name}" for name, count in counts.items()
        )


@dataclass(frozen=True)
class _Tree:
    """A pattern as an expression: its last operation, and which value is which parameter."""

    root: Apply | None
    parameters: dict[int, str]


@functools.cache
def _tree(pattern: Callable[..., Any], lists: tuple[str, ...], length: int) -> _Tree:
    """Kept for the next call of ``fuse`` too: tracing all patterns takes half a second."""
    expression = of_pattern(pattern, lists, length)
    parameters = {
        id(value): str(value.node.target)
        for value in expression.values.values()
        if isinstance(value, Opaque)
    }
    result = expression.result
    root = expression.values[result] if isinstance(result, fx.Node) else None
    return _Tree(root if isinstance(root, Apply) else None, parameters)


class Pattern:
    """A rewrite made ready for matching."""

    def __init__(self, op: FusedOp, rewrite: Rewrite) -> None:
        self.op, self.rewrite = op, rewrite
        taken = parameters_of(rewrite.call)
        self._names = [name for name in parameters_of(rewrite.pattern) if name in taken]
        self._parameters: dict[int, str] = {}

    def match(self, value: Apply, lengths: Collection[int] = ()) -> Match | None:
        """The occurrence of this pattern whose last operation is ``value``, or None.

        ``lengths`` are those to try for the pattern's lists.
        """
        for length in self._lengths(value, lengths) if self.rewrite.lists else (0,):
            tree = self._tree(length)
            if tree.root is None or tree.root.name != value.name:
                return None  # Every length has the same last operation.
            self._parameters = tree.parameters
            for found, covered in self._unify(tree.root, value, {}, ()):
                bindings = self._grouped(found, length)
                unique = self._replaced(value, (*covered, *self._unread(found, covered)))
                if (
                    self._fits(bindings)
                    and self._closed(value, unique)
                    and self._is_chain(value, unique)
                ):
                    return Match(self.op, self.rewrite, value, bindings, unique)
        return None

    def _lengths(self, value: Apply, lengths: Collection[int]) -> Collection[int]:
        """Those with which the last operation's own list is as long as that of ``value``."""
        two, three = (
            [len(item) for item in _lists_of(root)] if (root := self._tree(length).root) else []
            for length in (2, 3)
        )
        if two == three:
            return lengths
        found = _lists_of(value)
        return {len(found[0]) - two[0] + 2} & {*lengths} if found else ()

    def _tree(self, length: int) -> _Tree:
        return _tree(self.rewrite.pattern, tuple(self.rewrite.lists), length)

    def _grouped(self, found: dict[str, Any], length: int) -> dict[str, Any]:
        """The bindings of the call's parameters, lists as tuples."""
        return {
            name: tuple(found[element] for element in elements_of(name, length))
            if name in self.rewrite.lists
            else found[name]
            for name in self._names
        }

    def _unread(self, found: dict[str, Any], covered: tuple[Apply, ...]) -> Iterator[Apply]:
        """What only the pattern reads, where nothing else in the model does: it goes too."""
        for name, value in found.items():
            if (
                name not in self._names
                and name not in self.rewrite.lists
                and name.rpartition("_")[0] not in self.rewrite.lists
                and isinstance(value, Apply)
                and all(user in covered for user in value.users)
            ):
                yield value

    @staticmethod
    def _replaced(root: Apply, covered: tuple[Apply, ...]) -> tuple[Apply, ...]:
        """Without shapes and devices that others read too: those are read again, not computed."""
        unique = dict.fromkeys(covered)
        shared = [
            value
            for value in unique
            if value is not root
            and _is_shape(value)
            and not all(user in unique for user in value.users)
        ]
        return tuple(value for value in unique if value not in shared)

    def _unify(
        self, pattern: Any, value: Any, bindings: dict[str, Any], covered: tuple[Apply, ...]
    ) -> Iterator[tuple[dict[str, Any], tuple[Apply, ...]]]:
        name = self._parameters.get(id(pattern))
        if isinstance(pattern, tuple):
            if isinstance(value, tuple) and len(pattern) == len(value):
                pairs = list(zip(pattern, value, strict=True))
                yield from self._unify_all(pairs, (), bindings, covered)
            return
        if name is not None:
            if name not in bindings:
                yield {**bindings, name: value}, covered
            elif bindings[name] is value or (
                not isinstance(value, Value) and bindings[name] == value
            ):
                yield bindings, covered
            return
        if not isinstance(pattern, Value):
            if not isinstance(value, Value) and pattern == value:
                yield bindings, covered
            return
        if not (
            isinstance(pattern, Apply)
            and isinstance(value, Apply)
            and pattern.name == value.name
            and pattern.arguments.keys() == value.arguments.keys()
        ):
            return
        keys = list(pattern.arguments)
        orders = [keys]
        if pattern.name in COMMUTATIVE and len(keys) >= 2:
            orders.append([keys[1], keys[0], *keys[2:]])
        for order in orders:
            pairs = [
                (pattern.arguments[key], value.arguments[other])
                for key, other in zip(keys, order, strict=True)
            ]
            if value.in_place and id(pairs[0][0]) in self._parameters:
                continue  # It would change a value that the chain does not own.
            yield from self._unify_all(pairs, (value,), bindings, covered)

    def _unify_all(
        self,
        pairs: list[tuple[Any, Any]],
        last: tuple[Apply, ...],
        bindings: dict[str, Any],
        covered: tuple[Apply, ...],
    ) -> Iterator[tuple[dict[str, Any], tuple[Apply, ...]]]:
        if not pairs:
            yield bindings, (*covered, *last)
            return
        (pattern, argument), *rest = pairs
        for found, more in self._unify(pattern, argument, bindings, covered):
            yield from self._unify_all(rest, last, found, more)

    def _fits(self, bindings: dict[str, Any]) -> bool:
        """Tensors where the operator takes tensors and numbers where it takes numbers: in
        ``scale * update`` either factor may come first."""
        try:
            arguments = self.op.bind(self.rewrite.call(**bindings))
        except (TypeError, AttributeError):
            return True  # It computes: only tensors tell, and fuse asks again with them.
        return all(
            isinstance(argument, (Value, tuple)) or argument is None
            if name in self.op.tensor_parameters
            else not isinstance(argument, Value)
            for name, argument in zip(self.op.signature.parameters, arguments, strict=True)
        )

    @staticmethod
    def _closed(root: Apply, covered: tuple[Apply, ...]) -> bool:
        return all(
            user in covered for value in covered if value is not root for user in value.users
        )

    @staticmethod
    def _is_chain(root: Apply, covered: tuple[Apply, ...]) -> bool:
        """Whole traced nodes, or parts of at least two: half a Linear alone is nothing to gain."""
        origins = {value.origin for value in covered}
        if len(origins) > 1:
            return True
        parts = sum(
            1 for value in _operands(root) if isinstance(value, Apply) and value.origin in origins
        )
        return parts == len(covered)


def _lists_of(value: Apply) -> list[tuple[Any, ...]]:
    """The lists of values among the arguments of an operation."""
    return [item for item in value.arguments.values() if isinstance(item, tuple)]


def _is_shape(value: Any) -> bool:
    """A shape, a size of it, a dtype or a device: a property, which costs nothing to read."""
    return isinstance(value, Apply) and (
        value.name in ("getattr", "size")
        or (value.name == "getitem" and _is_shape(value.arguments["0"]))
    )


def _operands(root: Apply) -> list[Value]:
    found: list[Value] = []
    waiting: list[Value] = [root]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.append(value)
            if isinstance(value, Apply):
                waiting += value.operands
    return found


def find(expression: Expression, patterns: list[Pattern]) -> list[Match]:
    """Every match of every pattern: those that replace most first, of equals those of the operator
    that has the fewest patterns, which is the most special."""
    applications = list(expression.applications())
    lists = {
        len(argument)
        for value in applications
        for argument in value.arguments.values()
        if isinstance(argument, tuple) and values_in(argument)
    }
    # A list of vectors may have one more in front, the dense one.
    lengths = sorted({length - extra for length in lists for extra in (0, 1) if length - extra > 1})
    matches = [
        match
        for value in applications
        for pattern in patterns
        if (match := pattern.match(value, lengths)) is not None
    ]
    joined = {match.root: {*match.covered} for match in matches if match.rewrite.lists}

    def order(match: Match) -> tuple[bool, int, int]:
        """What takes the join of many values that could be one comes after that one."""
        covered = {*match.covered}
        takes_join = any(
            root in covered and root is not match.root and not parts <= covered
            for root, parts in joined.items()
        )
        return takes_join, -len(covered), len(match.op.rewrites)

    return sorted(matches, key=order)
