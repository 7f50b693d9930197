"""The pages for those who join name folders, files, functions and make targets that exist."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[1]
PAGES = {
    name: (CLONE / name).read_text(encoding="utf-8")
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
}
SOURCE = CLONE / "src" / "fuselab"
# | step | `file` | `function` | what happens |
STEPS = re.findall(r"^\| [\w ]+ \| `(\S+)` \| `(\w+)` \|", PAGES["ARCHITECTURE.md"], re.M)


def defined_names(file: Path) -> set[str]:
    """Return the functions and methods that a Python file defines, or a CUDA file's words."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return set(re.findall(r"\w+", text))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, functions)}


def test_the_way_of_a_call_is_told() -> None:
    assert len(STEPS) == 10
    assert [Path(file).name for file, _ in STEPS][-1] == "cuda_kernels.cu"


@pytest.mark.parametrize(("file", "function"), STEPS)
def test_each_step_of_a_call_exists(file: str, function: str) -> None:
    assert function in defined_names(CLONE / file)


def test_every_room_is_described() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    rows = "\n".join(re.findall(r"^\| .* \| .* \|$", PAGES["CONTRIBUTING.md"], re.M))
    assert folders == set(re.findall(r"`(\w+)/`", rows))
    picture = (CLONE / "docs" / "pictures" / "architecture.svg").read_text(encoding="utf-8")
    assert folders <= set(re.findall(r'class="name">(\w+)<', picture))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path, modules: set[str]) -> set[str]:
    """Return the modules of ours that a file imports, those inside functions included; what is for
    type checkers alone is never imported."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{file}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names | ({node.module} if names - modules else set())
        waiting += ast.iter_child_nodes(node)
    return found & modules - {module_name(file)}


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module_name(file): file for file in SOURCE.rglob("*.py")}
    graph = {name: imported(file, set(files)) for name, file in files.items()}
    assert graph["fuselab.cli.doctor"] >= {"fuselab.runtime.cache", "fuselab.device.ceiling"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_linked_files_exist(page: str) -> None:
    named = re.findall(r"`((?:src|tests|tools|examples|docs|benchmarks)/[^`\s]*)`", PAGES[page])
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", PAGES[page])
    templates = [name for name in named if "NAME" in name]
    for name in {*named, *linked}.difference(templates):
        assert (CLONE / name).exists(), name
    for name in templates:
        assert (CLONE / name.replace("NAME", "square")).exists(), name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (CLONE / "Makefile").read_text(), re.M))
    words = re.findall(r"`make ([a-z][a-z -]*)", PAGES["CONTRIBUTING.md"] + PAGES["CHANGELOG.md"])
    assert (
        {"install", "test", "format", "build", "docs"}
        <= {word for text in words for word in text.split()}
        <= targets
    )


def test_continuous_integration_runs_what_everyone_can_run() -> None:
    workflow = (CLONE / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +- run: (.*)$", workflow, re.M) == ["bash .ci/run"]
    hooks = (CLONE / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"entry: \.venv/bin/python -m (\w+)", hooks)
    assert entries == ["ruff", "ruff", "mypy"]


def test_the_package_says_where_its_project_is() -> None:
    urls = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) == {"Repository", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
