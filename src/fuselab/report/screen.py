"""Text for a screen of 80 columns: tables, folded paragraphs, cut lines and bars.

rich lays out the tables. It comes with the extra ``cli``, and is imported where a table is made.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from fuselab.errors import MissingDependencyError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
_TIED = "\N{NO-BREAK SPACE}"  # at which textwrap breaks no line
_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:%|×|(?:n|µ|u|m)?s|[kMGT]?B(?:/s)?|[KMGT]iB(?:/s)?|[GT]FLOP/s|MHz|ulp)(?!\w))"
)


def as_text(show: Callable[[Console], object]) -> str:
    """Return what ``show`` prints on a console of 80 columns, without colours.

    Raises MissingDependencyError without rich.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError.of_extra("tables need", "rich", "cli") from error
    printed = io.StringIO()
    show(Console(file=printed, width=WIDTH, highlight=False, no_color=True))
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip("\n").split("\n"))


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int],
    whole: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table, one per row; without rows there is no table.

    ``right`` lists the columns of numbers, which are aligned right and stay whole, as do those of
    ``whole``. If a row does not fit, the widest other columns shrink, and their texts are cut with
    an ellipsis.

    Raises MissingDependencyError without rich.
    """

    def show(console: Console) -> None:
        from rich import box
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for place, heading in enumerate(columns):
            text = Text(heading, no_wrap=True, overflow="ellipsis")
            justify: Literal["left", "right"] = "right" if place in right else "left"
            made.add_column(text, justify=justify, no_wrap=place in right or place in whole)
        for row in rows:
            made.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row))
        console.print(Padding(made, (0, 0, 0, 1)))

    return as_text(show).split("\n") if rows else []


def cut(text: str, width: int = WIDTH) -> str:
    """Cut ``text`` to at most ``width`` characters, with an ellipsis for the end."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def cut_place(text: str, width: int) -> str:
    """Cut a place in a file, such as ``model.py:12``, in its middle: the line number stays whole,
    and of the name as much as fits."""
    if len(text) <= width:
        return text
    name, colon, number = text.partition(":")
    kept = max(width - len(colon + number) - 1, 1)
    return f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}{colon}{number}"


def folded(
    head: str, text: str, *, indent: int | None = None, width: int = WIDTH, whole: bool = False
) -> list[str]:
    """Return ``head`` and ``text`` as lines of at most ``width`` columns.

    Later lines are indented to the end of ``head``, or by ``indent``. A number stays on the line of
    its unit. With ``whole`` a word longer than a line, such as a path, is not broken.
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(_TIED, text),
        width,
        initial_indent=head,
        subsequent_indent=" " * (len(head) if indent is None else indent),
        break_long_words=not whole,
        break_on_hyphens=False,
    )
    return [line.replace(_TIED, " ") for line in lines]


def print_folded(head: str, text: str, indent: int | None = None) -> None:
    """Print ``head`` and ``text`` folded, but a word longer than a line, such as a path, whole."""
    print("\n".join(folded(head, text, indent=indent, whole=True)))


def bar(share: float, width: int) -> str:
    """Return a bar of ``share`` of ``width`` characters, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
