"""Plain tables of at most 80 columns: names to the left, numbers to the right, one line per row."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 80


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int], indent: int = 1
) -> list[str]:
    """Lines of a table. ``right`` are the columns set to the right; the widest left column gives
    way where the whole does not fit, its texts cut with an ellipsis."""
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
    """``text`` in at most ``width`` characters, the end replaced by an ellipsis."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def bar(share: float, width: int) -> str:
    """A bar of ``share`` of ``width`` characters, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
