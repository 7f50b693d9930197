"""Hooks of mkdocs for ``make docs``: the pages of the clone's root, the order, links out of docs/.

Links in our Markdown are those of the repository, so that they work where it is browsed. On the
site a link to a page becomes one to that page of the site, and a link to any other file of the
clone becomes one to the public repository. A link to a file that does not exist stays, and
``mkdocs build --strict`` refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parents[1]
# Pages of the clone's root, with their place in the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
GUIDES = ("profile", "explain", "check", "bench", "fuse", "study", "data", "train")
REFERENCE = ("api", "contract", "extension")

# Code is matched first, so that what looks like a link in it stays.
_LINK = re.compile(r"```.*?```|`[^`]*`|\]\(([^)\s]+)\)", re.DOTALL)
_ELSEWHERE = re.compile(r"[a-z]+:|#")
# Python-Markdown takes one word behind a fence, GitHub any number.
_FENCE = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Give mkdocs the order of all pages."""
    config["nav"] = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the clone's root."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        text = (CLONE / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point a page's links to where they lead on the site, and give its fences one word."""
    return _FENCE.sub(r"\1", relinked(markdown, page.file.src_uri, config["repo_url"]))


def navigation() -> list[Any]:
    """Return mkdocs' ``nav``: guides, operators, tutorials, reference, project; every page once."""
    sections = [_page_names("operators"), _page_names("tutorials")]
    guides = [f"{name}.md" for name in GUIDES]
    reference = [f"{name}.md" for name in REFERENCE]
    others = sorted(path.name for path in (CLONE / "docs").glob("*.md"))
    guides += [name for name in others if name not in guides + reference]
    return [
        "index.md",
        {"Guides": guides},
        {"Operators": sections[0]},
        {"Tutorials": sections[1]},
        {"Reference": reference},
        {"Project": [page for page in ROOT_PAGES.values() if page != "index.md"]},
    ]


def _page_names(folder: str) -> list[str]:
    """Return the pages of a folder of docs/, its README first."""
    names = (path.name for path in (CLONE / "docs" / folder).glob("*.md"))
    return [
        f"{folder}/{name}" for name in sorted(names, key=lambda name: (name != "README.md", name))
    ]


def relinked(markdown: str, page: str, repository: str) -> str:
    """Return a page's Markdown with its links as the site has them.

    Args:
        page: the page's place in the site, such as ``"operators/softmax.md"``.
        repository: the public repository's address.
    """
    root_page = {place: name for name, place in ROOT_PAGES.items()}.get(page)
    source = root_page or f"docs/{page}"

    def relink(found: re.Match[str]) -> str:
        link = found.group(1)
        if link is None or _ELSEWHERE.match(link):
            return found.group(0)
        path, hash_, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = ROOT_PAGES.get(target) or (
            target.removeprefix("docs/") if target.startswith("docs/") else None
        )
        if place is not None:
            path = posixpath.relpath(place, posixpath.dirname(page) or ".")
        elif (CLONE / target).exists():
            kind = "tree" if (CLONE / target).is_dir() else "blob"
            path = f"{repository}/{kind}/main/{target}"
        return f"]({path}{hash_}{anchor})"

    return _LINK.sub(relink, markdown)
