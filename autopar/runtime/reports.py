"""What ranks tell rank 0 of a step, through the store of the job: a rank leaves its report and goes on, and rank 0 looks what is there.

No rank waits for another, and none needs the others to take part.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist

from autopar.runtime.groups import job_store

SLOTS = 2
"""Reports of a rank that lie in the store at a time: ranks of a model are never further apart than one step."""


@dataclass(frozen=True, slots=True)
class Report:
    """A rank, over the steps since its last report.

    Args:
        step: the last of them.
        step_time_s: seconds of a step, on average; None if none was timed.
        wait_s: seconds that a sampled step waited for collectives, and ``idle_s`` for other stages; None if none was sampled.
        peak_memory_bytes: since the process began, or since the script has reset the peak of its device.
    """

    step: int
    step_time_s: float | None
    wait_s: float | None
    idle_s: float | None
    peak_memory_bytes: int


class Reports:
    """The reports of all ranks.

    Args:
        name: the same on all ranks, of nothing else in the job.
    """

    def __init__(self, name: str) -> None:
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._store = job_store(name) if self.num_ranks > 1 else None
        self._own: Report | None = None
        self._count = 0

    def put(self, report: Report) -> int:
        """Leave a report; gives its number, which is the same on all ranks."""
        self._own, number, self._count = report, self._count, self._count + 1
        if self._store is not None:
            self._store.set(_key(number, self._rank), json.dumps(asdict(report)))
        return number

    def get(self, number: int, step: int) -> dict[int, Report]:
        """The reports of a step with that number that are there, by rank."""
        if self._store is None:
            return {0: self._own} if self._own is not None else {}
        keys = [_key(number, rank) for rank in range(self.num_ranks)]
        if self._store.check(keys) and self._store.has_extended_api():  # type: ignore[attr-defined]
            texts = dict(enumerate(self._store.multi_get(keys)))  # at once: not a way there and back for each
        else:
            texts = {rank: self._store.get(key) for rank, key in enumerate(keys) if self._store.check([key])}
        found = {rank: Report(**json.loads(text)) for rank, text in texts.items()}
        return {rank: report for rank, report in found.items() if report.step == step}


def _key(number: int, rank: int) -> str:
    return f"{number % SLOTS}/{rank}"
