"""Find where a rewrite's pattern occurs in an expression, as subgraph isomorphism from its root.

Inner values of a match must have no reader outside the chain, otherwise the replacement would have
to compute them again.
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
    """A pattern as an expression: its last operation, and the parameter name of each input
    value."""

    root: Apply | None
    parameters: dict[int, str]


@functools.cache
def _tree(pattern: Callable[..., Any], lists: tuple[str, ...], length: int) -> _Tree:
    """Trace a pattern, once per process, because tracing all patterns takes half a second."""
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
        """Return the occurrence of this pattern whose last operation is ``value``, or None.

        ``lengths`` are the lengths to try for the pattern's lists.
        """
        for length in self._lengths(value, lengths) if self.rewrite.lists else (0,):
            tree = self._tree(length)
            if tree.root is None or tree.root.name != value.name:
                return None  # every length has the same last operation
            self._parameters = tree.parameters
            for found, covered in self._unify(tree.root, value, {}, ()):
                bindings = self._grouped(found, length)
                unique = self._replaced(value, (*covered, *self._unread(found, covered)))
                # In ``y + y`` with ``y = 2 * x``, ``y`` would be an operand and replaced too.
                if (
                    not {*values_in(bindings.values())} & {*unique}
                    and self._fits(bindings)
                    and self._closed(value, unique)
                    and self._is_chain(value, unique)
                ):
                    return Match(self.op, self.rewrite, value, bindings, unique)
        return None

    def _lengths(self, value: Apply, lengths: Collection[int]) -> Collection[int]:
        """Return the lengths for which the last operation's own list is as long as that of
        ``value``."""
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
        """Return the bindings of the call's parameters, lists as tuples."""
        return {
            name: tuple(found[element] for element in elements_of(name, length))
            if name in self.rewrite.lists
            else found[name]
            for name in self._names
        }

    def _unread(self, found: dict[str, Any], covered: tuple[Apply, ...]) -> Iterator[Apply]:
        """Yield the values that only the pattern reads and nothing else in the model; they go
        too."""
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
        """Return the replaced values without shapes and devices that others read too.

        Those are read again, not computed.
        """
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
                continue  # it would change a value that the chain does not own
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
        """Return whether tensors are bound where the operator takes tensors and numbers elsewhere.

        In ``scale * update``, for example, either factor may come first.
        """
        try:
            arguments = self.op.bind(self.rewrite.call(**bindings))
        except (TypeError, AttributeError):
            # the call computes with its arguments, so only real tensors can tell; fuse checks again
            return True
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
        """Return whether the match covers whole traced nodes, or parts of at least two.

        Replacing half a Linear alone would gain nothing.
        """
        origins = {value.origin for value in covered}
        if len(origins) > 1:
            return True
        parts = sum(
            1 for value in _operands(root) if isinstance(value, Apply) and value.origin in origins
        )
        return parts == len(covered)


def _lists_of(value: Apply) -> list[tuple[Any, ...]]:
    """Return the lists of values among the arguments of an operation."""
    return [item for item in value.arguments.values() if isinstance(item, tuple)]


def _is_shape(value: Any) -> bool:
    """Return whether a value is a shape, a size, a dtype or a device, which is free to read."""
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
    """Return every match of every pattern, in the order to try them.

    Those that replace most come first; among equals, the operator with the fewest patterns, since
    it is the most special.
    """
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
        """Order a match that takes only the join of many values after the match that takes them
        all."""
        covered = {*match.covered}
        takes_join = any(
            root in covered and root is not match.root and not parts <= covered
            for root, parts in joined.items()
        )
        return takes_join, -len(covered), len(match.op.rewrites)

    return sorted(matches, key=order)
