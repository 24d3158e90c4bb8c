"""How much stages compute again, so that they fit: no more than must.

A stage that does not fit goes from one level to the next (`recompute`); of those that compute whole blocks again, as many blocks are then
let off as there is room for, found for all ranks at a time by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from autopar.errors import InfeasibleError
from autopar.solve.places import MemoryLimit
from autopar.solve.recompute import MIXED, at_share, share_of

SHARES = 8
"""Parts of the blocks of a stage that are told apart."""


class Staging(Protocol):
    """Stages with levels, and the memory of every rank of their pipeline."""

    @property
    def levels(self) -> tuple[str, ...]: ...
    @property
    def rank_bytes(self) -> tuple[float, ...]: ...
    def fits(self, limit: MemoryLimit) -> bool: ...


Found = TypeVar("Found", bound=Staging)


def save(found: Found, remake: Callable[[tuple[str, ...]], Found], limit: MemoryLimit, taken_s: Callable[[Found], float]) -> Found:
    """The same with as little computed again as fits, or all if that is not enough.

    Args:
        found: what computes too little again, or fits.
        remake: the same with other levels.
        limit: of every rank.
        taken_s: seconds to compare two by.
    """
    if found.fits(limit):
        return found
    degree = len(found.rank_bytes)
    while not found.fits(limit):
        over = limit.over(found.rank_bytes)
        levels = tuple(_heavier(level) if over[stage % degree] else level for stage, level in enumerate(found.levels))
        if levels == found.levels:
            return found
        found = remake(levels)
    return let_off(found, remake, limit, taken_s)


def let_off(found: Found, remake: Callable[[tuple[str, ...]], Found], limit: MemoryLimit, taken_s: Callable[[Found], float]) -> Found:
    """The same, which fits, with as few blocks computed again whole as fit; arguments are those of `save`.

    What is shared anew may take other ranks more memory. Then, or if that is faster, those blocks all keep products of matrices alone, or
    all stays.
    """
    degree, whole = len(found.rank_bytes), {stage for stage, level in enumerate(found.levels) if level == MIXED}
    if not whole:
        return found

    def remade(levels: Sequence[str]) -> Found:
        """With other levels on the stages of every rank that compute all again."""
        return remake(tuple(levels[stage % degree] if stage in whole else level for stage, level in enumerate(found.levels)))

    def at_shares(parts: Sequence[int]) -> Found:
        return remade([at_share(MIXED, part, SHARES) for part in parts])

    low, high = ([part] * degree for part in (0, SHARES))
    while any(most - least > 1 for least, most in zip(low, high, strict=True)):
        middle = [(least + most) // 2 for least, most in zip(low, high, strict=True)]
        for rank, is_over in enumerate(limit.over(at_shares(middle).rank_bytes)):
            (low if is_over else high)[rank] = middle[rank]
    return min((one for one in (found, at_shares(high), remade(["selective"] * degree)) if one.fits(limit)), key=taken_s)


def down_to_fewest(made: Callable[[str], Found]) -> list[Found]:
    """What is ``made`` with all blocks computed again whole, and with fewer, down to as few as it can be made with.

    Raises:
        InfeasibleError: it cannot with all.
    """
    found, low, high = [made(MIXED)], -1, SHARES
    while high - low > 1:
        part = (low + high) // 2
        try:
            found.append(made(at_share(MIXED, part, SHARES)))
            high = part
        except InfeasibleError:
            low = part
    return found


def _heavier(level: str) -> str:
    """What computes more again."""
    name, share = share_of(level)
    if share < 1:
        return at_share(name, int(share * SHARES) + 1, SHARES)
    return "pointwise" if level == "none" else MIXED
