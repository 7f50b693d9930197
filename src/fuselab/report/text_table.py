"""Plain tables of at most 80 columns: text left-aligned, numbers right-aligned, one line per
row."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 80


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int], indent: int = 1
) -> list[str]:
    """Return the lines of a table.

    ``right`` lists the columns to align right. If the whole does not fit, the widest left columns
    shrink, and their texts are cut with an ellipsis.
    """
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    over = indent + sum(widths) + 2 * (len(columns) - 1) - WIDTH
    left = [column for column in range(len(columns)) if column not in right]
    for _ in range(over):  # one character at a time, so that wide columns end up alike
        widths[max(left, key=lambda column: widths[column])] -= 1
    lines = []
    for row in [columns, *rows]:
        cells = [
            cut(cell, width).rjust(width) if column in right else cut(cell, width).ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    lines.insert(1, " " * indent + "─" * (sum(widths) + 2 * (len(columns) - 1)))
    return lines


def cut(text: str, width: int) -> str:
    """Cut ``text`` to at most ``width`` characters, with an ellipsis for the end."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def bar(share: float, width: int) -> str:
    """Return a bar of ``share`` of ``width`` characters, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
