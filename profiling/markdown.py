"""Tables as Markdown that read as plain text too. Standard library only."""

from collections.abc import Sequence

__all__ = ["aligned"]


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """Return the lines of a table; the first `text_columns` are aligned to the left.

    A cell is one line, whatever is in it.
    """
    escaped = [[" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in cells]
    # Not all readers of Markdown take a rule of less than three characters.
    widths = [max(3, *map(len, column)) for column in zip(head, *escaped, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [line(row) for row in (head, rule, *escaped)]
