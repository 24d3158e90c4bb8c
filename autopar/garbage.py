"""Python's search for reference cycles, paused where graphs are made: it goes over all their nodes again and again, and finds little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the search; what has no cycle is freed as ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what others froze would not be frozen any more
                gc.freeze()  # takes what is new from the youngest generation, which would be searched at once
                gc.unfreeze()
            gc.enable()
