"""tools/docstring_check.py: the docstrings it refuses."""

import importlib.util
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]


def tool():
    path = CLONE / "tools" / "docstring_check.py"
    spec = importlib.util.spec_from_file_location("docstring_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = tool()


def repository(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_nothing_is_refused_in_this_repository():
    assert CHECK.complaints(CLONE) == []


@pytest.mark.parametrize("word", ["Of", "That", "What", "As", "Without", "Where", "of"])
def test_a_refused_word_is_reported_with_its_line(tmp_path, word):
    text = f'"""A module."""\n\n\nclass Row:\n    """{word} a table, one line."""\n'
    root = repository(tmp_path, {"tools/a.py": text})
    assert CHECK.complaints(root) == [f'tools/a.py:5: the docstring begins with "{word}"']


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a module."""\n',
        'def f():\n    """Of a function."""\n',
        'async def f():\n    """\n    Of a coroutine.\n    """\n',
        'class A:\n    def f(self):\n        """``Of`` a method."""\n',
    ],
)
def test_every_kind_of_docstring_is_read(text):
    assert [word for _, word in CHECK.refused(text)] == ["Of"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"""Offers a module."""\n',
        '"""Asynchronous copies."""\n',
        'x = 1\n"""Of no object."""\n',
        "# Of a comment\n",
        'def f():\n    """"""\n',
    ],
)
def test_other_text_is_accepted(text):
    assert list(CHECK.refused(text)) == []


def test_the_exit_status_is_1_when_something_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CHECK, "REPOSITORY", repository(tmp_path, {"tools/a.py": '"""As is."""\n'}))
    assert CHECK.main() == 1
    assert capsys.readouterr().out == 'tools/a.py:1: the docstring begins with "As"\n'
    (tmp_path / "tools" / "a.py").write_text('"""A tool."""\n')
    assert CHECK.main() == 0
