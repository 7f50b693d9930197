"""docs/api.md tells the truth: every name is there, with these parameters and defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fuselab
import fuselab.nn
from fuselab import errors, ops

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
LINES: dict[str, str | None] = dict(re.findall(r"^- `(fuselab[\w.]*)(?:\((.*)\))?`", PAGE, re.M))
# Backticked names in running text, which must exist too.
MENTIONED = set(re.findall(r"`(fuselab\.[\w.]+)`", PAGE)) - set(LINES)


def resolve(name: str) -> Any:
    """Return what ``name`` stands for: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        if name.startswith("fuselab.ops.") and len(parts) > 2:
            found, count = fuselab.ops, 2
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} is nowhere")


def written_parameters(text: str) -> tuple[ast.arguments, bool]:
    """Return the parameters between the parentheses, and whether ``...`` ends them."""
    open_ended = text.endswith("...")
    text = text.removesuffix("...").rstrip(", ")
    definition = ast.parse(f"def function({text}): pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.args, open_ended


@pytest.mark.parametrize("name", sorted(LINES))
def test_the_signature(name: str) -> None:
    found = resolve(name)
    if not LINES[name] and inspect.isclass(found):
        return
    arguments, open_ended = written_parameters(LINES[name] or "")
    real = dict(inspect.signature(found).parameters)
    if name.startswith("fuselab.ops.") and "implementation" in real:
        assert real.pop("implementation").default == "auto"
    written = [*arguments.args, *([arguments.vararg] if arguments.vararg else [])]
    written += arguments.kwonlyargs
    names = [argument.arg for argument in written]
    if open_ended:
        assert names == list(real)[: len(names)]
        rest = list(real.values())[len(names) :]
        assert rest
        assert all(parameter.default is not parameter.empty for parameter in rest)
    else:
        assert names == list(real)
    by_name = {argument.arg for argument in arguments.kwonlyargs}
    assert by_name == {
        known for known in names if real[known].kind is inspect.Parameter.KEYWORD_ONLY
    }
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    defaults = {
        argument.arg: ast.literal_eval(value)
        for argument, value in [
            *zip(positional, arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        if value is not None
    }
    assert defaults == {
        known: real[known].default
        for known in names
        if real[known].default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize("name", sorted(MENTIONED))
def test_a_name_in_running_text_exists(name: str) -> None:
    assert resolve(name) is not None


def test_every_public_name_is_on_the_page() -> None:
    on_page = set(LINES) | MENTIONED
    assert {f"fuselab.{name}" for name in fuselab.__all__} <= on_page
    assert {f"fuselab.nn.{name}" for name in fuselab.nn.__all__} <= on_page
    assert {f"fuselab.ops.{name}" for name in ops.operators()} <= on_page


def test_every_error_is_on_the_page() -> None:
    section = PAGE.split("## Errors")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+Error)`", section))
    assert named == {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.FuselabError)
    } - {"FuselabError"}


def test_the_version_is_the_changelogs_newest() -> None:
    changelog = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.M)
    assert newest is not None
    assert newest.group(1) == fuselab.__version__
