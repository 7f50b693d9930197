"""The sessions that docs/asm.md and docs/debug.md show print what the pages say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from fuselab.cli.main import run

CLONE = Path(__file__).resolve().parents[2]
# The indented block of a command, up to the next text.
SESSION = re.compile(r"^    \$ fuselab (?P<call>.+)\n(?P<said>(?:(?:    .*)?\n)+)", re.M)
TYPED = re.compile(r"^\(debug\) (.*)\n", re.M)


def sessions(page: str) -> list[tuple[str, str]]:
    text = (CLONE / "docs" / page).read_text(encoding="utf-8")
    found = []
    for match in SESSION.finditer(text):
        lines = [line.removeprefix("    ").rstrip() for line in match["said"].splitlines()]
        found.append((match["call"], "\n".join(lines).strip()))
    return found


@pytest.mark.parametrize(("call", "said"), sessions("asm.md"))
def test_asm(
    call: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CLONE)
    assert run(shlex.split(call)) == 0
    printed = capsys.readouterr().out
    if not triton.__version__.startswith("3.7."):
        pytest.skip("the page shows what Triton 3.7 compiles; another allocates other registers")
    assert "\n".join(line.rstrip() for line in printed.splitlines()).strip() == said


@pytest.mark.parametrize(("call", "said"), sessions("debug.md"))
def test_debug(call: str, said: str) -> None:
    """Type into pdb the words that the page shows behind ``(debug)``; pdb does not repeat them."""
    typed = "".join(f"{words}\n" for words in TYPED.findall(f"{said}\n"))
    done = subprocess.run(
        [sys.executable, "-m", "fuselab", *shlex.split(call)],
        input=typed,
        capture_output=True,
        text=True,
        cwd=CLONE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = TYPED.sub("(debug) ", f"{said}\n").strip()
    assert done.stdout.replace(f"{CLONE}/", ".../").strip() == expected
