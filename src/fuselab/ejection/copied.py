"""Copy what a standalone package uses of fuselab's runtime, definition by definition.

A module is copied without the definitions that the package does not need, and with relative
imports. So the package has the same text as fuselab, and every rule has one home. A module of
``runtime/standalone`` takes the place of the runtime's module of the same name.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fuselab.ejection.fold import COLUMNS
from fuselab.runtime.cache import HEADERS, included

STANDALONE = "fuselab.runtime.standalone"
RUNTIME = "fuselab.runtime"
FOLDER = "runtime"  # of the package

_Needed = tuple[str, str]  # a module's full name, and a name in it


@dataclass(frozen=True)
class _Statement:
    """A statement of a module's top level: its text with the comments before it, the names that it
    defines, and those that it uses: names of its own module, and of modules of fuselab."""

    node: ast.stmt
    text: str
    defines: frozenset[str]
    uses: frozenset[str]
    attributes: frozenset[tuple[str, str]]  # (name, attribute) of names that may be modules
    inner_imports: tuple[ast.ImportFrom, ...] = ()


@dataclass
class _Module:
    """A module of fuselab, and the names that are needed of it."""

    name: str
    docstring: str
    statements: list[_Statement]
    needed: set[str] = field(default_factory=set)

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]


def copied(imports: Iterable[_Needed]) -> dict[str, str]:
    """Return the texts of the modules that are imported, and of those that they need, by file name.

    Args:
        imports: pairs of a module's full name and a name in it.
    """
    modules: dict[str, _Module] = {}
    waiting = list(imports)
    while waiting:
        module_name, name = waiting.pop()
        module = modules.get(module_name)
        if module is None:
            module = modules[module_name] = _read(module_name)
        if name not in module.needed:
            module.needed.add(name)
            waiting += _need(module)
    stems = [module.stem for module in modules.values()]
    assert len(set(stems)) == len(stems), f"two modules have one name: {sorted(stems)}"
    return {f"{module.stem}.py": _text(module) for module in modules.values()}


def needs(text: str) -> list[_Needed]:
    """Return what the text of a module uses of fuselab: (module, name) pairs. Of a module that is
    imported whole these are the attributes that the text names."""
    parts = list(ast.walk(ast.parse(text)))
    found: list[_Needed] = []
    for node in parts:
        if not (isinstance(node, ast.ImportFrom) and _is_ours(node)):
            continue
        for alias in node.names:
            module, name = _place(node, alias)
            found.append((module, name))
            if not name:
                called = alias.asname or alias.name
                found += [(module, attribute) for attribute in _attributes_of(parts, called)]
    return found


def _attributes_of(parts: Iterable[ast.AST], name: str) -> list[str]:
    return [
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == name
    ]


def with_relative_imports(text: str, package: str) -> str:
    """Return the text of a package's module with imports of ``package``, such as ``.runtime``, in
    place of those of fuselab's runtime."""
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and _is_ours(node):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                line = lines[number]
                lines[number] = line.replace(f"from {node.module} ", _from(node, package), 1)
    return "".join(lines)


def headers(source: str) -> dict[str, str]:
    """Return the texts of fuselab's public headers that a C++ text includes, by file name."""
    found: dict[str, str] = {}
    waiting = included(source)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (HEADERS / name).read_text(encoding="utf-8")
            waiting += included(found[name])
    return dict(sorted(found.items()))


# --- reading --------------------------------------------------------------------------------------


@functools.cache
def _source(name: str) -> str:
    found = find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is no module"
    return Path(found.origin).read_text(encoding="utf-8")


def _read(name: str) -> _Module:
    source = _source(name)
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    docstring = ast.get_docstring(ast.Module(body, []), clean=False) or ""
    end = body[0].end_lineno or 0 if docstring else 0
    statements = []
    for node in body[1 if docstring else 0 :]:
        last = node.end_lineno or node.lineno
        statements.append(_statement(node, "".join(lines[end:last])))
        end = last
    return _Module(name, docstring, statements)


def _statement(node: ast.stmt, text: str) -> _Statement:
    parts = list(ast.walk(node))
    names = frozenset(
        part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    )
    attributes = frozenset(
        (part.value.id, part.attr)
        for part in parts
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    )
    inner = tuple(
        part
        for part in parts
        if part is not node and isinstance(part, ast.ImportFrom) and _is_ours(part)
    )
    return _Statement(node, text, frozenset(_defined(node)), names, attributes, inner)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _is_ours(node: ast.ImportFrom) -> bool:
    return node.level == 0 and (node.module or "").partition(".")[0] == "fuselab"


def _place(node: ast.ImportFrom, alias: ast.alias) -> _Needed:
    """Return the module and the name that an import of fuselab stands for; the name is empty where
    a module is imported."""
    path = f"{node.module}.{alias.name}"
    if _is_module(path):
        return _replaced(path), ""
    return _replaced(node.module or ""), alias.name


@functools.cache
def _is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


def _replaced(path: str) -> str:
    """Return the module that stands for ``path`` in a package."""
    own = f"{STANDALONE}.{path.rpartition('.')[2]}"
    return own if path.startswith(f"{RUNTIME}.") and _is_module(own) else path


# --- choosing -------------------------------------------------------------------------------------


def _need(module: _Module) -> list[_Needed]:
    """Add to ``module.needed`` what its needed definitions use, and return what they need of
    other modules."""
    own = frozenset().union(*(one.defines for one in module.statements if not _imports(one.node)))
    while True:
        kept = list(_kept(module))
        found = {name for one in kept for name in (*one.uses, *one.defines)} & own
        if found <= module.needed:
            break
        module.needed |= found
    needed: list[_Needed] = []
    for one in module.statements:
        if isinstance(one.node, ast.ImportFrom) and _is_ours(one.node):
            for alias in one.node.names:
                needed += _of_alias(module, one.node, alias, kept)
        if one in kept:
            pairs = ((node, alias) for node in one.inner_imports for alias in node.names)
            needed += [_place(node, alias) for node, alias in pairs]
    return needed


def _of_alias(
    module: _Module, node: ast.ImportFrom, alias: ast.alias, kept: Sequence[_Statement]
) -> list[_Needed]:
    """Return what the kept statements use of an imported name: itself, or parts of a module."""
    called = alias.asname or alias.name
    is_passed_on = called in module.needed
    if not is_passed_on and not any(called in one.uses for one in kept):
        return []
    path, name = _place(node, alias)
    if name:
        return [(path, name)]
    parts = {attribute for one in kept for holder, attribute in one.attributes if holder == called}
    return [(path, part) for part in sorted(parts)]


def _kept(module: _Module) -> Iterator[_Statement]:
    """Yield the statements that are kept, imports aside: those that define a needed name, and those
    that define nothing and use one, as a registration does."""
    for one in module.statements:
        if _imports(one.node):
            continue
        if one.defines & module.needed or (not one.defines and one.uses & module.needed):
            yield one


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


# --- writing --------------------------------------------------------------------------------------


def _text(module: _Module) -> str:
    kept = list(_kept(module))
    used = module.needed.union(*(one.uses for one in kept))
    docstring = module.docstring
    if not module.name.startswith(f"{RUNTIME}."):  # of another subject, and most of it is left out
        listed = ", ".join(sorted(name for name in module.needed if name[0] != "_"))
        docstring = "\n".join(textwrap.wrap(f"Parts of ``{module.name}``: {listed}.", COLUMNS - 3))
    groups: list[list[str]] = [[]]
    for one in module.statements:
        if _imports(one.node):
            if one.text.startswith("\n"):
                groups.append([])
            groups[-1] += _import(one, used)
    imports = "\n".join("".join(group) for group in groups if group)
    body = "".join(_with_own_imports(one) for one in kept).lstrip("\n")
    gap = "\n\n" if re.match(r"@|def |class ", body) else "\n"
    return f'"""{docstring}"""\n\n{imports}{gap if body else ""}{body}'


def _import(one: _Statement, used: Set[str]) -> list[str]:
    """Return the lines of an import without the names that are not used; none if no name is."""
    node = one.node
    assert isinstance(node, ast.Import | ast.ImportFrom)
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return [one.text.lstrip("\n")]
    names = [
        alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in used
    ]
    if not names:
        return []
    texts = [f"{one.name} as {one.asname}" if one.asname else one.name for one in names]
    head = ""
    if isinstance(node, ast.ImportFrom):
        head = _from(node, "") if _is_ours(node) else f"from {node.module} "
    line = f"{head}import {', '.join(texts)}\n"
    if len(line) > COLUMNS:
        return [f"{head}import (\n", *(f"    {text},\n" for text in texts), ")\n"]
    return [line]


def _with_own_imports(one: _Statement) -> str:
    text = one.text
    for node in one.inner_imports:
        text = text.replace(f"from {node.module} ", _from(node, ""))
    return text


def _from(node: ast.ImportFrom, package: str) -> str:
    """Return ``from .module `` for an import of fuselab; ``package`` is the folder of the
    modules, as ``.runtime``, or empty between them."""
    path, name = _place(node, node.names[0])
    stem = path.rpartition(".")[2]
    if not name:
        return f"from {package or '.'} "
    return f"from {package}.{stem} "
