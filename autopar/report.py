"""Who is told how far long work has come: called with a line of text at every phase."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]


def silent(_: str) -> None:
    """Report to nobody."""
