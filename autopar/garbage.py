"""Python's search for reference cycles, paused where graphs are made: it goes over all their nodes again and again, and finds little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_others_freeze = False
"""Whether others were found to have frozen objects. Then it is asked no more, for each object is counted: those that torch and transformers
import take tens of milliseconds."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the search; what has no cycle is freed as ever."""
    global _others_freeze
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _others_freeze = _others_freeze or gc.get_freeze_count() > 0
            if not _others_freeze:  # what they froze would not be frozen any more
                gc.freeze()  # takes what is new from the youngest generation, which would be searched at once
                gc.unfreeze()
            gc.enable()
