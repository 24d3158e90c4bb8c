"""Plain text tables, the same on every terminal and in every file: ASCII, no colours, no trailing blanks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LINES = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
"""A rule below the header and above the footer, nothing else."""


def table_text(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, footer: Sequence[str] = (), wide: Sequence[str] = ()
) -> str:
    """Rows under their columns, at most ``width`` characters wide; long cells go on below.

    Args:
        columns: a heading that starts with ``>`` is of numbers, and stands to the right.
        rows: one cell per column.
        width: of the whole table.
        footer: a last row for totals.
        wide: headings of the columns that give way when there is no room.
    """
    table = Table(box=_LINES, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), show_footer=bool(footer))
    for i, heading in enumerate(columns):
        name = heading.removeprefix(">")
        table.add_column(
            Text(name),
            Text(footer[i]) if footer else "",
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
            no_wrap=bool(wide) and name not in wide,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out = StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
