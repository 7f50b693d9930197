"""Cut a Python file down to the statements that some of its names need."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fuselab.errors import TargetError


@dataclass(frozen=True)
class Slice:
    """The statements that names need, in the file's order and as they were written.

    ``defined`` are the names that the statements bind, without those that they import. ``files``
    holds, by name, what is needed of modules that lie beside the file.
    """

    text: str
    defined: frozenset[str]
    files: Mapping[str, str] = field(default_factory=dict)


def sliced(path: Path, names: Collection[str], given: Mapping[str, str] | None = None) -> Slice:
    """Return what ``names`` need of the file at ``path``.

    Names in ``given`` are not copied; they are imported from the module beside that it says.
    Modules that lie beside the file are cut down too, and imported as modules of the package.
    Raises TargetError where such a module cannot come along.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    given = dict(given or {})
    needed = _closure(tree, names, given)
    imports: list[str] = []
    parts: list[str] = []
    files: dict[str, str] = {}
    defined: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            kept = [one for one in statement.names if _bound(one) in needed or one.name == "*"]
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if kept and not future:
                imports.append(_imported(path, statement, kept, files))
        elif (needed - given.keys()) & set(_bindings(statement)):
            parts.append(_text_of(lines, statement))
            defined |= set(_bindings(statement))
    by_module: dict[str, list[str]] = {}
    for name in sorted(needed & given.keys()):
        by_module.setdefault(given[name], []).append(name)
    own = [f"from .{module} import {', '.join(used)}" for module, used in by_module.items()]
    own += [line for line in imports if line.startswith("from .")]
    others = sorted((line for line in imports if line not in own), key=_order)
    groups = [["from __future__ import annotations"], others, own]
    head = "\n\n".join("\n".join(group) for group in groups if group)
    return Slice("\n\n\n".join([head.rstrip(), *parts]) + "\n", frozenset(defined), files)


def _order(line: str) -> bool:
    """Return the sort key of an import: plain ones come first."""
    return line.startswith("from ")


def _closure(tree: ast.Module, names: Collection[str], given: Mapping[str, str]) -> set[str]:
    """Return ``names`` and all names of the file that their statements use."""
    makers: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _bindings(statement):
            makers.setdefault(name, []).append(statement)
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for statement in () if name in given else makers.get(name, ()):
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                waiting += [*_used_outside(statement), *_bindings(statement)]
    return found


def _bindings(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a file binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return  # what a script runs
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield _bound(node)


def _used(statement: ast.AST) -> Iterator[str]:
    """Yield all names in a piece of code."""
    for node in ast.iter_child_nodes(statement):
        yield from _used(node)
    if isinstance(statement, ast.Name):
        yield statement.id


def _used_outside(statement: ast.stmt) -> set[str]:
    """Return the names of the file that a statement at its top uses."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return set(_used(statement))
    arguments = [node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)]
    own = {*arguments, *(name for inner in statement.body for name in _bindings(inner))}
    around = [*statement.decorator_list, statement.args, *filter(None, [statement.returns])]
    found = {name for inner in statement.body for name in _used(inner)} - own
    return found.union(*(set(_used(one)) for one in around))


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _text_of(lines: list[str], statement: ast.stmt) -> str:
    """Return a statement as it was written, with its decorators and the comments right above."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(one.lineno for one in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith("#") and not lines[first - 1].startswith("#!"):
        first -= 1
    return "\n".join(lines[first : statement.end_lineno]).rstrip()


def _imported(
    path: Path,
    statement: ast.Import | ast.ImportFrom,
    kept: list[ast.alias],
    files: dict[str, str],
) -> str:
    """Return an import with the needed names alone; a module beside the file becomes one of the
    package, and its text is added to ``files``."""
    if isinstance(statement, ast.ImportFrom):
        names = ", ".join(map(ast.unparse, kept))
        beside = _beside(path, statement.module or "", statement.level)
        if beside is None:
            return f"from {'.' * statement.level}{statement.module or ''} import {names}"
        if not statement.module:
            raise TargetError(_not_alone(path, statement))
        wanted = [one.name for one in kept]
        if "*" in wanted:
            raise TargetError(_not_alone(path, statement))
        _bring(beside, wanted, files)
        return f"from .{beside.stem} import {names}"
    for one in kept:
        if _beside(path, one.name, 0) is not None:
            raise TargetError(_not_alone(path, statement))
    return f"import {', '.join(map(ast.unparse, kept))}"


def _beside(path: Path, module: str, level: int) -> Path | None:
    """Return the file of a module that lies beside ``path``; None of an installed one."""
    if level > 1 or (level == 1 and (not module or "." in module)):
        raise TargetError(
            f"{path} imports from a package around it; put what the kernel needs into one file."
        )
    file = path.with_name(f"{module.partition('.')[0]}.py")
    return file if level == 1 or file.is_file() else None


def _bring(file: Path, names: list[str], files: dict[str, str]) -> None:
    if file.name in files:
        raise TargetError(
            f"{file} is imported twice; import what is needed of it in one statement."
        )
    if file.stem in ("op", "reference", "triton_kernels", "launch", "gradient"):
        raise TargetError(f"{file} has a name that a kernel package uses itself; rename it.")
    cut = sliced(file, names)
    files[file.name] = f'"""The definitions of {file.name} that the package needs."""\n\n{cut.text}'
    files.update(cut.files)


def _not_alone(path: Path, statement: ast.stmt) -> str:
    return (
        f"{path}, line {statement.lineno}: write 'from MODULE import NAME' of the module beside "
        "it, so that what the kernel needs of it can come along."
    )
