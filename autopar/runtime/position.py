"""Where in its epochs a loader is: as many batches after the start of one, and what that start was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import LoaderError
from autopar.runtime.order import Random


@dataclass(frozen=True, slots=True)
class Position:
    """A place in an epoch, the same on all ranks.

    Args:
        order: what the order of the epoch is drawn from (`autopar.runtime.order`).
        random: the global random numbers at its start, of rank 0.
        draws_seed: whether a seed for workers is drawn from them, as a loader does that has no workers yet.
        given: batches that the script has had.
        seen: checksum of their indices, or of themselves.
        kept: state of a loader that keeps its own, known to rank 0.
    """

    order: dict[str, Any]
    random: Random
    draws_seed: bool
    given: int = 0
    seen: int = 0
    kept: object = None

    def after(self, seen: int) -> Position:
        """The place one batch on."""
        return replace(self, given=self.given + 1, seen=seen)

    def check(self, seen: int, who: str) -> None:
        """Compare what was given with what is found when the epoch is begun again.

        Raises:
            LoaderError: it is something else.
        """
        if seen != self.seen:
            raise LoaderError(
                f"the loader cannot go on after batch {self.given} of the epoch: {who} another order than when the state was saved; give "
                "it the same dataset, batch size and num_workers, and let its random numbers come from a generator or a seed"
            )
