"""Why nothing fits the memory limit: the shape that is closest to it, what the state of the model takes at least, and which pins are to
blame.

A set of pins, with or without a configuration, is to blame if nothing fits under it and something fits without any of its members
(`solve.conflict`). Whether something fits is asked of the search, which stops at the first shape that does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

from autopar.errors import AutoparError, InfeasibleError
from autopar.solve.conflict import Conflict, find_conflict, is_in_words, words
from autopar.solve.pins import Restriction
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.units import bytes_text, seconds_text

MAX_SHAPES = 24
"""Shapes that are tried for a set of pins, at most; if none of these fits, and there are more, the set is not judged."""
MAX_SEARCHES = 12
"""Sets of pins that are tried, at most."""

Under = Callable[[Sequence[Restriction]], Search]
"""Searches the same for any shape that fits, under some of the restrictions."""


def explain_shortage(search: Search, shape: Shape, under: Under | None, way_out: str = "") -> InfeasibleError:
    """What to raise where a search found nothing that fits.

    Args:
        search: as it ended.
        shape: any of those that were tried first.
        under: asks whether something fits under fewer restrictions; None: which of them are to blame is not told.
        way_out: what was not tried, in words.
    """
    if search.closest is not None:
        closest, error = search.closest
        least_bytes = error.least_bytes
        lines = [str(error)]
        if len(search.tried) > 1:
            assert least_bytes is not None
            lines.append(f"shape ({closest}) is the closest that was worked out, with {bytes_text(least_bytes)} per rank")
    else:
        least_bytes = None
        lines = list(dict.fromkeys(alternative.reason for alternative in search.tried))
    limit, least = search.limit(shape), search.least(shape)
    if least.text(limit) not in lines:
        lines.append(least.text(limit))
    pins = tuple(dict.fromkeys(restriction for restriction in search.restrictions if is_in_words(restriction)))
    members: tuple[str, ...] = ()
    if under is not None and pins and least.num_bytes <= limit.mean:
        blame, members = _blame(search, shape, pins, under)
        lines += blame
    text = "\n".join([*lines, way_out] if way_out else lines)
    return InfeasibleError(text, limit_bytes=limit.mean, least_bytes=least_bytes, state_bytes=sum(least.state), members=members)


def _blame(search: Search, shape: Shape, pins: Sequence[Restriction], under: Under) -> tuple[list[str], tuple[str, ...]]:
    """Lines about pins and the configuration, and those of them that are to blame."""
    asked: dict[tuple[Restriction, ...], Search | None] = {}

    def ended(chosen: Sequence[Restriction]) -> Search | None:
        """The search under some pins; None if it is not made or has another end than that nothing fits."""
        key = tuple(chosen)
        if key not in asked:
            asked[key] = None
            if len(asked) <= MAX_SEARCHES:
                kept = [restriction for restriction in search.restrictions if not is_in_words(restriction) or restriction in chosen]
                search.report(f"trying what fits under {', '.join(map(words, chosen)) or 'no pins'}")
                with suppress(AutoparError):  # then it is not found out
                    asked[key] = under(kept)
        return asked[key]

    def can_hold(chosen: Sequence[Restriction]) -> bool | None:
        other = ended(chosen)
        if other is None:
            return None
        return True if other.best is not None else None if other.pruned.total() else False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        free = can_hold(())
        what = ", ".join(map(words, pins))
        if free is None:
            why = f": none of {MAX_SHAPES} shapes does" if ended(()) is not None else ""
            return [f"whether anything fits without {what} was not found out{why}"], ()
        if free is False:
            return [f"without {what} nothing fits either{_least(ended(()), 'without')}"], ()
        alone = next((pin for pin in pins if can_hold((pin,)) is False), None) if len(pins) > 1 else pins[0]
        found = Conflict((alone,)) if alone is not None else find_conflict(pins, can_hold)
        limit = f"memory limit {search.limit(shape)}"
        names = tuple(map(words, found.members))
        under_them = ended(found.members) if len(found.members) < len(pins) else search
        lines = [f"these cannot hold together: {', '.join([*names, limit])}{_least(under_them, 'with')}"]
        for pin, name in zip(found.members, names, strict=True):
            other = ended([member for member in found.members if member is not pin])
            if other is not None and other.best is not None:
                lines.append(
                    f"without {name} a plan of {bytes_text(max(other.best.rank_bytes))} per rank fits, step "
                    f"{seconds_text(other.best.step_time_s)}, shape ({other.best.shape})"
                )
    if not found.is_proved:
        lines.append(f"stopped after {MAX_SEARCHES} sets of pins and {MAX_SHAPES} shapes of each: not all of these may be needed for it")
    return lines, names


def _least(search: Search | None, how: str) -> str:
    """What the closest shape of a search with or without pins needs, to be added to a line."""
    if search is None or search.closest is None or search.closest[1].least_bytes is None:
        return ""
    return f"; the least {how} them is {bytes_text(search.closest[1].least_bytes)} per rank"
