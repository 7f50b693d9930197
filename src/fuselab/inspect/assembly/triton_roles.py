"""Read from a Triton kernel's text what it does with each of its parameters."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOADS, STORES, ADDS = "loads", "stores", "adds"
_ACCESSES = {"load": LOADS, "store": STORES}
_WITH_SIZES = ("make_block_ptr", "make_tensor_descriptor")
_POINTER_MAKERS = (
    "make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous",
)  # fmt: skip


@dataclass
class Roles:
    """The use that a kernel makes of its parameters, by name.

    ``accesses`` are the kinds of access to the memory behind a parameter; a number has none.
    ``programs`` are the axes of the grid that the kernel asks for. ``blocks`` is, by axis, the
    constant that a program's id is multiplied by, and ``limits`` the number that the positions of
    that axis stay below. ``widths`` is, by constant, the number that a range of so many positions
    stays below, where the range begins at the same place in every program. ``sizes`` is, by number,
    the size or stride that a block pointer takes it for: ``("a", "shape", 0)``.
    """

    accesses: dict[str, set[str]] = field(default_factory=dict)
    programs: set[int] = field(default_factory=set)
    blocks: dict[int, str] = field(default_factory=dict)
    limits: dict[int, str] = field(default_factory=dict)
    widths: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[str, str, int]] = field(default_factory=dict)


def roles_of(kernel: ast.FunctionDef, others: Mapping[str, ast.FunctionDef]) -> Roles:
    """Return the roles of a kernel's parameters; ``others`` are the file's kernels by name, which
    it may call."""
    names = parameters_of(kernel)
    reader = _Reader(names, others)
    for statement in kernel.body:
        reader.visit(statement)
    return reader.roles


def parameters_of(kernel: ast.FunctionDef) -> list[str]:
    """Return the names of a kernel's parameters, in order."""
    given = kernel.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def definition_of(function: Any) -> ast.FunctionDef:
    """Return the syntax tree of a Python function."""
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


class _Reader(ast.NodeVisitor):
    """Follows pointers and positions through assignments.

    ``bases`` tells for a variable the parameters that its addresses are counted from. ``marks``
    tells what a number is computed from: ``("program", axis)`` and ``("range", constant)``.
    """

    def __init__(self, names: list[str], others: Mapping[str, ast.FunctionDef]) -> None:
        self.names = names
        self.roles = Roles({name: set() for name in names})
        self.bases = {name: {name} for name in names}
        self.marks: dict[str, set[tuple[str, Any]]] = {}
        self.others = others

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            marks = self._marked(node.value)
            self.marks[node.target.id] = self.marks.get(node.target.id, set()) | marks

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if isinstance(other, ast.Name) and other.id in self.names:
                    for kind, axis in self._marked(one):
                        if kind == "program":
                            self.roles.blocks.setdefault(axis, other.id)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        limit = node.comparators[0]
        if not isinstance(node.ops[0], ast.Lt) or not isinstance(limit, ast.Name):
            return
        marks = self._marked(node.left)
        programs = [axis for kind, axis in marks if kind == "program"]
        if limit.id in self.names and len(programs) == 1:
            self.roles.limits.setdefault(programs[0], limit.id)
        elif limit.id in self.names and not programs:
            for _, constant in marks:
                self.roles.widths.setdefault(constant, limit.id)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _called(node)
        values = [*node.args, *(one.value for one in node.keywords)]
        if name == "program_id":
            self.roles.programs.add(_axis(node))
        elif name in _WITH_SIZES:
            self._of_block(node)
        elif name in _ACCESSES:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            pointer = owner if self._base(owner) else values[0] if values else None
            self._note(pointer, _ACCESSES[name])
        elif name.startswith("atomic_") and values:
            self._note(values[0], ADDS)
        elif name in self.others:
            self._of_called(self.others[name], node)

    def _of_block(self, node: ast.Call) -> None:
        """Take sizes, strides and the programs' places from a block pointer or a descriptor."""
        names = ("base", "shape", "strides", "offsets")
        given = dict(zip(names, node.args, strict=False))
        given |= {one.arg: one.value for one in node.keywords if one.arg in names}
        parts = {
            name: value.elts
            for name, value in given.items()
            if isinstance(value, ast.Tuple | ast.List)
        }
        for base in self._base(given.get("base")):
            for name, kind in (("shape", "shape"), ("strides", "stride")):
                for axis, one in enumerate(parts.get(name, ())):
                    if isinstance(one, ast.Name) and one.id in self.names:
                        self.roles.sizes.setdefault(one.id, (base, kind, axis))
        for place, size in zip(parts.get("offsets", ()), parts.get("shape", ()), strict=False):
            axes = [axis for kind, axis in self._marked(place) if kind == "program"]
            if len(axes) == 1 and isinstance(size, ast.Name) and size.id in self.names:
                self.roles.limits.setdefault(axes[0], size.id)

    def _of_called(self, kernel: ast.FunctionDef, call: ast.Call) -> None:
        """Take over what a called kernel does with the pointers that it is given."""
        others = {name: one for name, one in self.others.items() if one is not kernel}
        inner = roles_of(kernel, others)
        self.roles.programs |= inner.programs
        given = [*zip(parameters_of(kernel), call.args, strict=False)]
        given += [(one.arg, one.value) for one in call.keywords if one.arg is not None]
        for name, value in given:
            for access in inner.accesses.get(name, ()):
                self._note(value, access)

    def _note(self, pointer: ast.expr | None, access: str) -> None:
        for name in self._base(pointer):
            self.roles.accesses[name].add(access)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._assign(one, other)
        elif isinstance(target, ast.Name):
            self.bases[target.id] = self._base(value)
            self.marks[target.id] = self._marked(value)

    def _base(self, value: ast.expr | None) -> set[str]:
        """Return the parameters whose memory an expression points to: what it is added to."""
        if isinstance(value, ast.Name):
            return self.bases.get(value.id, set())
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
            return self._base(value.left) or self._base(value.right)
        if isinstance(value, ast.IfExp):
            return self._base(value.body) | self._base(value.orelse)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in _POINTER_MAKERS:
                first = [*value.args, *(one.value for one in value.keywords if one.arg == "base")]
                return self._base(first[0]) if first else set()
            if value.func.attr == "to":
                return self._base(value.func.value)
        return set()

    def _marked(self, value: ast.expr) -> set[tuple[str, Any]]:
        found: set[tuple[str, Any]] = set()
        for node in ast.walk(value):
            if isinstance(node, ast.Name):
                found |= self.marks.get(node.id, set())
            elif isinstance(node, ast.Call) and _called(node) == "program_id":
                found.add(("program", _axis(node)))
            elif isinstance(node, ast.Call) and _called(node) == "arange" and len(node.args) == 2:
                end = node.args[1]
                if isinstance(end, ast.Name) and end.id in self.names:
                    found.add(("range", end.id))
        return found


def _axis(node: ast.Call) -> int:
    values = [*node.args, *(one.value for one in node.keywords)]
    axis = values[0].value if values and isinstance(values[0], ast.Constant) else 0
    return axis if isinstance(axis, int) else 0


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
