"""Batches of an iterable dataset: each of the streams that its workers read is read on one rank, and its batches go from there to all.

One process with ``num_workers=n`` takes batches of n streams in turn. Here stream i of n is read on rank i modulo the number of ranks, by a
worker that takes itself for worker i of n, as datasets that split themselves ask `get_worker_info`. A dataset without workers is one
stream, which cannot be split and keep its order: rank 0 reads it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from autopar.errors import LoaderError
from autopar.runtime.delivery import deliver
from autopar.runtime.local_batch import DealFor, Loaded
from autopar.runtime.order import checksum, draw_seed, random_as, seeds_of
from autopar.runtime.position import Position
from autopar.runtime.ranks import Ranks
from autopar.runtime.shares import leaves_of

END = object()


@dataclass(frozen=True, slots=True)
class _Worker:
    """Starts the only worker of a stream as worker ``stream`` of ``count``, with the random numbers of that one."""

    stream: int
    count: int
    init: Callable[[int], None] | None
    base_seed: int

    def __call__(self, _: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed = self.base_seed + self.stream
        torch_worker._worker_info = torch_worker.WorkerInfo(id=self.stream, num_workers=self.count, seed=seed, dataset=info.dataset)
        random.seed(seed)
        torch.manual_seed(seed)
        numpy.random.seed(torch_worker._generate_state(self.base_seed, self.stream))
        if self.init is not None:
            self.init(self.stream)


class StreamReader:
    """Reads the epochs of a loader over an iterable dataset."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, deal_for: DealFor) -> None:
        self._loader, self._ranks, self._deal_for = loader, ranks, deal_for
        self._rank, self._world = (0, 1) if ranks.group is None else (dist.get_rank(), dist.get_world_size())
        self._keeps_state = hasattr(loader, "state_dict")
        self._count = 1 if self._world == 1 or self._keeps_state else max(1, loader.num_workers)
        self._streams = {i: self._stream() for i in range(self._rank, self._count, self._world) if self._count > 1}

    def kept(self) -> object:
        """The state of a loader that keeps its own; None on other ranks than 0."""
        return self._loader.state_dict() if self._keeps_state and self._ranks.is_first else None  # type: ignore[attr-defined]

    def epoch(self, start: Position) -> Iterator[tuple[Loaded, Position]]:
        """The batches that follow a position, each with the position after it."""
        skipped = 0 if self._keeps_state else start.given
        position = start if self._keeps_state else replace(start, given=0, seen=0)
        with random_as(start.random) if start.given else nullcontext():
            reading = self._ranks.together(lambda: self._open(start))
            turns = deque(range(self._count))
            for _ in range(skipped):
                found = self._next(reading, turns, position.seen, is_skipped=True)
                position = position.after(found[1] if found is not None else ~start.seen)
        start.check(position.seen, "its dataset gives")
        while (found := self._next(reading, turns, position.seen)) is not None:
            position = position.after(found[1])
            rows = next((len(x) for x in leaves_of(found[0]) if isinstance(x, torch.Tensor) and x.dim()), 0)
            yield Loaded(found[0], self._deal_for(rows), rows, is_cut=False), position

    def _next(
        self, reading: dict[int, Iterator[Any]], turns: deque[int], seen: int, *, is_skipped: bool = False
    ) -> tuple[Any, int] | None:
        """The next batch, of the stream whose turn it is, and the checksum with it; None at the end of all."""
        while turns:
            stream = turns[0]

            def take(stream: int = stream) -> tuple[Any, int] | None:
                batch = next(reading[stream], END)
                return None if batch is END else (None if is_skipped else batch, checksum(batch, seen))

            found = deliver(self._ranks, stream % self._world, take)
            if found is not None:
                turns.rotate(-1)
                return found
            turns.popleft()
        return None

    def _open(self, start: Position) -> dict[int, Iterator[Any]]:
        """The streams of this rank, from their beginning; random numbers are drawn alike on all ranks."""
        if self._keeps_state and start.given and self._ranks.is_first:
            if start.kept is None:
                kind = type(self._loader).__name__
                raise LoaderError(f"the state has nothing of the {kind}, which only rank 0 reads; save the state of rank 0")
            self._loader.load_state_dict(start.kept)  # type: ignore[attr-defined]
        if self._count == 1 and self._rank == 0:
            return {0: iter(self._loader)}  # it draws the seed itself
        if start.draws_seed:
            draw_seed(self._loader.generator)
        base_seed = draw_seed(seeds_of(start.order, start.random))
        for stream, loader in self._streams.items():
            loader.worker_init_fn = _Worker(stream, self._count, self._loader.worker_init_fn, base_seed)
        return {stream: iter(loader) for stream, loader in self._streams.items()}

    def _stream(self) -> DataLoader[Any]:
        """A loader with the one worker of a stream."""
        loader = self._loader
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            num_workers=1,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
