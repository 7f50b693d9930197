"""The site of ``make docs`` has every page, and its links lead where the repository's do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CLONE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CLONE / "tools"))

import docs_site  # noqa: E402

REPOSITORY = "https://example.org/fuselab"


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[x](docs/profile.md)", "[x](profile.md)"),
        ("index.md", "![x](docs/pictures/report.png)", "![x](pictures/report.png)"),
        ("index.md", "[x](CONTRIBUTING.md#style)", "[x](contributing.md#style)"),
        ("operators/softmax.md", "[x](../check.md#words)", "[x](../check.md#words)"),
        ("operators/softmax.md", "[x](../../README.md)", "[x](../index.md)"),
        ("bench.md", "[x](operators/README.md)", "[x](operators/README.md)"),
        ("api.md", "[`x`](../LICENSE)", f"[`x`]({REPOSITORY}/blob/main/LICENSE)"),
        ("api.md", "[x](../benchmarks)", f"[x]({REPOSITORY}/tree/main/benchmarks)"),
        ("api.md", "[x](../nowhere.md)", "[x](../nowhere.md)"),
        ("api.md", "[x](https://a.b/c.md) [y](#z)", "[x](https://a.b/c.md) [y](#z)"),
        ("api.md", "`configs[name](*args)`", "`configs[name](*args)`"),
        ("api.md", "```python\na[0](../LICENSE)\n```", "```python\na[0](../LICENSE)\n```"),
    ],
)
def test_links(page: str, written: str, shown: str) -> None:
    assert docs_site.relinked(written, page, REPOSITORY) == shown


def test_a_fence_has_one_word() -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="api.md"))
    config = {"repo_url": REPOSITORY}
    text = "```text measured\n1 us\n```\n"
    assert docs_site.on_page_markdown(text, page, config, None) == "```text\n1 us\n```\n"


def pages(nav: list[Any]) -> list[str]:
    """Return the pages of a ``nav``, its sections opened."""
    sections = [{"": [entry]} if isinstance(entry, str) else entry for entry in nav]
    return [page for section in sections for listed in section.values() for page in listed]


def test_every_page_is_in_the_navigation_once() -> None:
    docs = CLONE / "docs"
    every = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(pages(docs_site.navigation())) == sorted([*every, *docs_site.ROOT_PAGES.values()])
    assert all((CLONE / name).is_file() for name in docs_site.ROOT_PAGES)
