"""Who is told how far long work has come: called with a line of text at every phase."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]


class Best(str):
    """A line about the best plan so far, which may be kept in view while others follow."""

    __slots__ = ()


class Counted(str):
    """A line about one of several things that take about as long: ``done`` are behind it, of ``total``."""

    __slots__ = ("done", "total")

    def __new__(cls, text: str, done: int, total: int) -> Counted:
        line = super().__new__(cls, text)
        line.done, line.total = done, total
        return line

    done: int
    total: int


class Stopping(str):
    """A line that says that an interrupt is heeded, and work comes to an end with what there is."""

    __slots__ = ()


def silent(_: str) -> None:
    """Report to nobody."""
