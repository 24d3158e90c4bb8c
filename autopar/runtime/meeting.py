"""Ranks that come together before they talk, so that one that does not come is named, and nobody waits for it in a collective.

The store of the job is asked, in which every rank leaves a note; unlike a group, it needs no other rank to answer.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime.groups import job_store, job_timeout

PATIENCE = timedelta(minutes=5)
"""How long ranks wait at most for each other; less if the job's own timeout is less."""
_meetings: Counter[str] = Counter()


def meet(what: str, remedy: str, patience: timedelta | None = None) -> None:
    """Wait until all ranks call this.

    Args:
        what: they come for.
        remedy: what to do if some do not come.
        patience: how long they wait; by default as `PATIENCE` says.

    Raises:
        RankError: some did not come in time.
    """
    number = _meetings[what]
    store = job_store(f"{what}/{number}")
    store.set(str(dist.get_rank()), "here")
    patience = min(PATIENCE, job_timeout()) if patience is None else patience
    everyone = [str(rank) for rank in range(dist.get_world_size())]
    try:
        store.wait(everyone, patience)
    except RuntimeError as error:
        absent = [int(rank) for rank in everyone if not store.check([rank])]
        if absent:
            store.delete_key(str(dist.get_rank()))
            raise RankError(f"ranks {absent} did not come to {what} within {patience.total_seconds():g} s; {remedy}") from error
    _meetings[what] += 1
