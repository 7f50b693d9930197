"""Every figure in README.md, docs/train.md and docs/tutorials/, from the files of benchmarks/.

python tools/figures.py   write them

Between ``<!-- figures: KIND FILE -->`` and ``<!-- end of figures -->`` comes the text that KIND
makes of benchmarks/nvidia-h200/FILE, or nothing without that file. KIND is one of the tables of
``tutorials.TABLES``, or ``sentence``, the README's sentence on a training step.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import readme_table
import tutorials

CLONE = Path(__file__).resolve().parents[1]
# with the path from the page to the clone
PAGES = {CLONE / "README.md": ".", CLONE / "docs" / "train.md": ".."}
BLOCK = re.compile(
    r"(<!-- figures: (\w+) (\S+) -->\n).*?(<!-- end of figures -->)", re.MULTILINE | re.DOTALL
)
BATCHES = ("dot-128", "dot-2048", "dot-65536")


def written(text: str, root: str) -> str:
    """Return a page with its blocks made anew; ``root`` is the path from it to the clone."""

    def block(found: re.Match[str]) -> str:
        begin, kind, name, end = found.groups()
        file = tutorials.RESULTS / name
        made = sentence(file) if kind == "sentence" else tutorials.trained(kind, file, root)
        return f"{begin}\n{made}\n\n{end}" if made else begin + end

    return BLOCK.sub(block, text)


def sentence(file: Path) -> str:
    """Return a sentence on how long a training step takes, ours and plain PyTorch's best.

    It is empty if a time is missing.
    """
    payload = json.loads(file.read_text()) if file.exists() else {"measured": []}
    times = tutorials.step_times(payload, "{provider}, {precision}")
    ways = [times.get(f"{provider}, bf16", {}) for provider in ("ours", "strong")]
    if any(case not in found for found in ways for case in BATCHES):
        return ""
    (small, middle, large), strong = ([f"{found[case]:.0f}" for case in BATCHES] for found in ways)
    return textwrap.fill(
        "A fused step of the main configuration with Kaggle's whole tables (33.8 million "
        f"embeddings, dot interaction, bfloat16) takes {small} us at 128 rows on an H200, {middle} "
        f"at 2048 and {large} at 65536. The strongest plain PyTorch that we know to write, one "
        f"table and one CUDA graph, takes {', '.join(strong[:2])} and {strong[2]}.",
        100,
    )


def main() -> None:
    for path, root in PAGES.items():
        text = written(path.read_text(encoding="utf-8"), root)
        if path.name == "README.md":
            text = readme_table.written(text)
        path.write_text(text, encoding="utf-8")
    for name in tutorials.STORIES:
        tutorials.renew(name)
    tutorials.write("README", tutorials.index())


if __name__ == "__main__":
    main()
