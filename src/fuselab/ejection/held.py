"""The Python text of the tensors that a launcher holds: arguments, results, and slices of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import sympy

from fuselab.ejection.exact_sizes import in_example
from fuselab.ejection.loops import Node, Pieces, Regrouped, Window
from fuselab.ejection.plan import Sizes
from fuselab.ejection.stored import constant_of, leaves, paths


class Held:
    """The texts of the tensors that stand at some place of a launcher."""

    def __init__(self, sizes: Sizes, known: Mapping[Node, str]) -> None:
        self.sizes = sizes
        self.texts = dict(known)
        self.wholes: dict[Node, Pieces] = {}  # of each part that a kernel stores

    def expect(self, nodes: Sequence[Node]) -> None:
        """Note which tensors are put together from parts."""
        for node in nodes:
            if isinstance(node, Pieces):
                self.wholes.update(dict.fromkeys(leaves(node), node))

    def text(self, node: Node | None) -> str:
        if node is None:
            return "None"
        if node in self.texts:
            return self.texts[node]
        if isinstance(node, Window):
            return self.slice(self.text(node.source), node, node.dim, node.start, node.step)
        assert isinstance(node, Regrouped), node
        return f"{self.text(node.source)}.reshape({', '.join(map(self.sizes.text, node.sizes))})"

    def slice(self, text: str, part: Node, dim: int, start: sympy.Expr, step: int) -> str:
        """Return the text of the slice of a tensor that has the sizes of ``part``."""
        length = part.sizes[dim]
        if step == 1:
            return f"{text}.narrow({dim}, {self.sizes.text(start)}, {self.sizes.text(length)})"
        end = self.sizes.text(sympy.expand(start + step * length))
        return f"{text}[{':, ' * dim}{self.sizes.text(start)} : {end} : {step}]"

    def numel(self, node: Node) -> int:
        """Return how many elements a tensor has in the example."""
        return math.prod(in_example(size, self.sizes.hints) for size in node.sizes)

    def allocated(self, whole: Pieces, name: str) -> Iterator[str]:
        """Take ``name`` for what is put together, and yield the statements that fill its parts that
        are the same number everywhere. Where most of it is zero, all of it is filled: memory in one
        line is filled faster than a smaller part that lies apart."""
        self.texts[whole] = name
        zeros = [leaf for leaf in leaves(whole) if (held := constant_of(leaf)) and held.value == 0]
        is_sparse = 2 * sum(map(self.numel, zeros)) >= self.numel(whole)
        if is_sparse:
            yield f"{name}.zero_()"
        for leaf, path in paths(whole).items():
            text = name
            for dim, part in path:
                text = self.slice(text, part, dim, part.start, part.step)
            self.texts[leaf] = text
            number = constant_of(leaf)
            if number is not None and not (is_sparse and number.value == 0):
                yield f"{text}.fill_({number.value!r})"
