"""What a reader makes of a configuration of another system."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.solve.manual import Manual


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration of another system.

    Args:
        config: what autopar can express of it.
        batch_size: rows of the global batch, stated or implied; None if it says nothing of it.
        sequence: tokens per row, if stated.
        left_out: settings that change speed or memory of a run and that a `Manual` cannot say, each with its value and why.
        unknown: settings that the reader does not know, verbatim.
    """

    config: Manual
    batch_size: int | None
    sequence: int | None
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
