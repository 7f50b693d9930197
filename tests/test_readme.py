"""README.md promises only what exists: verbs, options, make targets, names, files."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

import fuselab
from fuselab.cli.main import build_app

CLONE = Path(__file__).resolve().parents[1]
README = (CLONE / "README.md").read_text(encoding="utf-8") if (CLONE / "README.md").exists() else ""
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL_LINES = [
    line.removeprefix("$ ").split(" #")[0].strip()
    for language, text in BLOCKS
    if language in ("", "bash", "console", "sh", "shell")
    for line in text.splitlines()
]


def lines_of(program: str) -> list[str]:
    return [line for line in SHELL_LINES if line.split(" ")[0].split("/")[-1] == program]


def test_the_two_commands_come_first() -> None:
    assert re.search(r"\bmake demo\b", README)
    assert re.search(r"\bmake test\b", README)
    assert "Apache-2.0" in README


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (CLONE / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for line in lines_of("make")
        for word in shlex.split(line)[1:]
        if "=" not in word and not word.startswith("-")
    }
    assert named <= targets


def test_verbs_and_their_options_exist() -> None:
    """Also in running text: every ``fuselab verb`` between backticks."""
    spoken = [text for text in re.findall(r"`(fuselab [^`]+)`", README) if "\n" not in text]
    for line in lines_of("fuselab") + spoken:
        command = typer.main.get_command(build_app())
        words = shlex.split(line)[1:]
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {"-h", "--help"} | {
            name
            for parameter in command.params
            for name in parameter.opts + parameter.secondary_opts
        }
        for word in words:
            if word == "--":
                break
            assert not word.startswith("-") or word.split("=")[0] in known, f"{line}: {word}"


def test_python_parses_and_its_names_exist() -> None:
    for language, text in BLOCKS:
        if language != "python":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fuselab":
                assert hasattr(fuselab, node.attr), f"fuselab.{node.attr}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fuselab.ops":
                assert node.attr in fuselab.ops.operators()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README))))
def test_linked_files_exist(link: str) -> None:
    assert (CLONE / link).exists()


def test_the_table_is_made_from_the_results() -> None:
    sys.path.insert(0, str(CLONE / "tools"))
    import readme_table

    assert readme_table.written(README) == README
    assert "| **" in readme_table.table()
