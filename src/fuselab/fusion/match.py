"""Find where a rewrite's pattern occurs in an expression, as subgraph isomorphism from its root.

A match may use each inner value only once: what the chain computes on the way must have no other
reader, else the replacement would have to compute it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fuselab.fusion.expression import (
    COMMUTATIVE,
    Apply,
    Expression,
    Opaque,
    Value,
    of_pattern,
    parameters_of,
)
from fuselab.op import FusedOp, Rewrite


@dataclass(frozen=True)
class Match:
    """One occurrence: ``root`` is the value replaced, ``bindings`` the pattern's parameters."""

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
        """The operations replaced, in the order they run: ``add → relu``."""
        return " → ".join(value.name for value in self.covered)


class Pattern:
    """A rewrite made ready for matching."""

    def __init__(self, op: FusedOp, rewrite: Rewrite) -> None:
        self.op, self.rewrite = op, rewrite
        expression = of_pattern(rewrite.pattern)
        names = {
            value.node.target: value
            for value in expression.values.values()
            if isinstance(value, Opaque)
        }
        self._parameters = {id(names[name]): name for name in parameters_of(rewrite.pattern)}
        result = expression.result
        root = expression.values[result] if isinstance(result, fx.Node) else None
        self.root = root if isinstance(root, Apply) else None

    def match(self, value: Apply) -> Match | None:
        """The occurrence of this pattern whose last operation is ``value``, or None."""
        if self.root is None:
            return None
        for bindings, covered in self._unify(self.root, value, {}, ()):
            unique = tuple(dict.fromkeys(covered))
            if (
                self._fits(bindings)
                and self._closed(value, unique)
                and self._is_chain(value, unique)
            ):
                return Match(self.op, self.rewrite, value, bindings, unique)
        return None

    def _unify(
        self, pattern: Any, value: Any, bindings: dict[str, Any], covered: tuple[Apply, ...]
    ) -> Iterator[tuple[dict[str, Any], tuple[Apply, ...]]]:
        name = self._parameters.get(id(pattern))
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
            yield from self._unify_all(pairs, value, bindings, covered)

    def _unify_all(
        self,
        pairs: list[tuple[Any, Any]],
        value: Apply,
        bindings: dict[str, Any],
        covered: tuple[Apply, ...],
    ) -> Iterator[tuple[dict[str, Any], tuple[Apply, ...]]]:
        if not pairs:
            yield bindings, (*covered, value)
            return
        (pattern, argument), *rest = pairs
        for found, more in self._unify(pattern, argument, bindings, covered):
            yield from self._unify_all(rest, value, found, more)

    def _fits(self, bindings: dict[str, Any]) -> bool:
        """Tensors where the operator takes tensors and numbers where it takes numbers: in
        ``scale * update`` either factor may come first."""
        arguments = self.op.bind(self.rewrite.call(**bindings))
        return all(
            isinstance(argument, Value) or argument is None
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


def _operands(root: Apply) -> list[Value]:
    found: list[Value] = []
    waiting: list[Value] = [root]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.append(value)
            if isinstance(value, Apply):
                waiting += [item for item in value.arguments.values() if isinstance(item, Value)]
    return found


def find(expression: Expression, patterns: list[Pattern]) -> list[Match]:
    """Every match of every pattern, those that replace most first."""
    matches = [
        match
        for value in expression.applications()
        for pattern in patterns
        if (match := pattern.match(value)) is not None
    ]
    return sorted(matches, key=lambda match: -len(match.covered))
