"""Batches of a map-style dataset: rank 0 draws the indices of a whole batch, each rank loads some of them, and gets the rows that it wants.

Collectives run where the batch is asked for, never in a sampler: how far the workers of a rank have run ahead then does not matter. With a
batch goes the list of indices that is drawn next, so that workers always find as many as they load ahead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from autopar.errors import LoaderError
from autopar.runtime.delivery import attempt, deliver, gather, told
from autopar.runtime.local_batch import Deal, DealFor, Loaded
from autopar.runtime.order import checksum, draw_seed, random_as, samplers_of, seeds_of
from autopar.runtime.position import Position
from autopar.runtime.ranks import Ranks
from autopar.runtime.shares import block

Indices = list[Any]


class _Queue:
    """The batch sampler of a rank: the blocks that came for it."""

    def __init__(self) -> None:
        self.blocks: deque[Indices] = deque()

    def __iter__(self) -> Iterator[Indices]:
        return self._drain(self.blocks)

    @staticmethod
    def _drain(blocks: deque[Indices]) -> Iterator[Indices]:
        while blocks:
            yield blocks.popleft()


class _Fetching(Dataset[Any]):
    """A dataset that is asked for several samples at once, and never for none."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Indices) -> Any:
        return self.dataset.__getitems__(indices) if indices else []


@dataclass(frozen=True, slots=True)
class _Worker:
    """Starts a worker as the loader's own: it sees the dataset that the user gave."""

    init: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, _Fetching):
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset.dataset
            )
        if self.init is not None:
            self.init(worker_id)


@dataclass(frozen=True, slots=True)
class _Collate:
    """Collates a share, or leaves its samples as they are; a share without rows is None."""

    collate: Callable[[Any], Any] | None

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, list) and not samples:
            return None
        return samples if self.collate is None else self.collate(samples)


class IndexReader:
    """Reads the epochs of a loader over a map-style dataset."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, deal_for: DealFor, *, is_collated_whole: bool) -> None:
        self._loader, self._ranks, self._deal_for = loader, ranks, deal_for
        self._rank, self._world = (0, 1) if ranks.group is None else (dist.get_rank(), dist.get_world_size())
        self._is_collated_whole = is_collated_whole and self._world > 1
        self._lookahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._queue, self._seeds = _Queue(), torch.Generator()
        dataset = loader.dataset
        self._inner: DataLoader[Any] = DataLoader(
            _Fetching(dataset) if hasattr(dataset, "__getitems__") else dataset,
            batch_sampler=self._queue,
            num_workers=loader.num_workers,
            collate_fn=_Collate(None if self._is_collated_whole else loader.collate_fn),
            timeout=loader.timeout,
            worker_init_fn=_Worker(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._seeds,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def epoch(self, start: Position) -> Iterator[tuple[Loaded, Position]]:
        """The batches that follow a position, each with the position after it."""
        drawing, ahead = self._draw(start)
        queue = self._queue.blocks = deque(self._own(*drawn) for drawn in ahead)
        self._seeds.set_state(seeds_of(start.order, start.random).get_state())
        for _ in range(self._rank):
            draw_seed(self._seeds)
        loading = self._ranks.together(lambda: iter(self._inner))
        position = start
        while ahead:
            indices, deal = ahead.popleft()
            if not indices:
                raise LoaderError(f"batch {position.given + 1} of the sampler has no indices; leave it out")
            batch, lists = self._load(loading, drawing, len(self._own(indices, deal)), deal)
            drawn = self._dealt(lists)
            ahead.extend(drawn)
            queue.extend(self._own(*each) for each in drawn)
            position = position.after(checksum(indices, position.seen))
            yield Loaded(batch, deal, len(indices), is_cut=not self._is_collated_whole), position
        next(loading, None)  # lets the workers end

    def _draw(self, start: Position) -> tuple[Iterator[Any], deque[tuple[Indices, Deal | None]]]:
        """The samplers, drawn up to a position, and the lists of rank 0 that its workers begin with."""

        def draw() -> tuple[Iterator[Any], list[Indices]]:
            drawing = iter(self._loader.batch_sampler or ())
            if start.draws_seed:
                draw_seed(self._loader.generator)
            seen = 0
            for indices in itertools.islice(drawing, start.given):
                seen = checksum(list(indices), seen)
            if self._ranks.is_first:
                start.check(seen, f"its samplers ({', '.join(type(sampler).__name__ for sampler in samplers_of(self._loader))}) draw")
            return drawing, self._lists(drawing, self._lookahead + 1)

        with random_as(start.random) if start.given else nullcontext():
            drawing, first = self._ranks.together(draw)
        return drawing, deque(self._dealt(self._ranks.from_first(lambda: first)))

    def _dealt(self, lists: Sequence[Indices]) -> list[tuple[Indices, Deal | None]]:
        """Lists of indices, and whose rows are whose. (That changes when the first call of a model makes its plan.)"""
        return [(indices, self._deal_for(len(indices))) for indices in lists]

    def _own(self, indices: Indices, deal: Deal | None) -> Indices:
        """What this rank loads of a batch: a part of the rows that it and its peers hold."""
        if deal is None or self._is_collated_whole:
            return indices[block(len(indices), self._rank, self._world)]
        rows, peers = deal.rows(indices), deal.peers
        return rows[block(len(rows), peers.index(self._rank), len(peers))]

    def _load(self, loading: Iterator[Any], drawing: Iterator[Any], rows: int, deal: Deal | None) -> tuple[Any, list[Indices]]:
        """The next batch, or this rank's rows of it, and the list that rank 0 draws."""
        if self._world == 1:
            return next(loading), self._lists(drawing, 1)
        both = attempt(lambda: (next(loading), self._lists(drawing, 1)))
        share, drawn = (both, []) if isinstance(both, Exception) else both
        if self._is_collated_whole:
            return self._collate_whole(share, drawn)
        return gather(self._ranks, share, rows, drawn, () if deal is None else deal.peers)

    @staticmethod
    def _lists(drawing: Iterator[Any], count: int) -> list[Indices]:
        return [list(indices) for indices in itertools.islice(drawing, count)]

    def _collate_whole(self, share: Any, drawn: list[Indices]) -> tuple[Any, list[Indices]]:
        problem = told(share) if isinstance(share, Exception) else None
        if problem is None and not isinstance(share, list | None):
            problem = f"__getitems__ of the dataset gives a {type(share).__name__}, which cannot be joined; give a list of samples"
        parts: list[Any] | None = [None] * self._world if self._ranks.is_first else None
        dist.gather_object((problem, None if problem else share), parts, 0, group=self._ranks.group)

        def collate() -> tuple[Any, list[Indices]]:
            self._ranks.refuse([found for found, _ in parts or ()], None)
            return self._loader.collate_fn([sample for _, samples in parts or () for sample in samples or ()]), drawn

        try:
            return deliver(self._ranks, 0, collate)
        except LoaderError as error:
            raise error from (share if isinstance(share, Exception) else error.__cause__)
