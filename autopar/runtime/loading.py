"""`shard_loader`: a loader of which every rank loads a share of the samples, and gets its own rows of every batch (`local_batch`).

Each sample is loaded once in the world, whatever the plan: tensor-parallel ranks, which get the same rows, do not load the same ones. The
batches and their order are those of the loader on one device, for which rank 0 stands.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from autopar.errors import LoaderError
from autopar.runtime.groups import host_group
from autopar.runtime.indexed import IndexReader
from autopar.runtime.local_batch import Deal
from autopar.runtime.module import Engine, ParallelModule
from autopar.runtime.order import global_random, order_of, samplers_of, set_order
from autopar.runtime.position import Position
from autopar.runtime.ranks import Ranks
from autopar.runtime.streamed import StreamReader

FORMAT = 1
Collate = Literal["share", "batch"]
Give = Literal["rows", "whole"]


def _deal_for(engine: Engine | None, rows: int) -> Deal | None:
    """How a batch of so many rows is dealt out now."""
    deal = engine.deal if engine is not None else None
    return deal if deal is not None and deal.fits(rows) else None


class ShardedLoader:
    """What `shard_loader` gives: iterated as the loader, on all ranks alike.

    Args:
        loader: the one that was given.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, collate: Collate, engine: Engine | None, give: Give) -> None:
        self.loader = loader
        self._ranks = ranks
        self._reader: IndexReader | StreamReader
        # Nothing of this: torch waits in vain, 5 s each, for persistent workers of a loader that the garbage collector has to find.
        deal_for = partial(_deal_for, engine if give == "rows" else None)
        if isinstance(loader.dataset, IterableDataset):
            self._reader = StreamReader(loader, ranks, deal_for)
        else:
            self._reader = IndexReader(loader, ranks, deal_for, is_collated_whole=collate == "batch")
        self._position: Position | None = None
        self._is_resumed = self._has_workers = False
        self._epoch: int | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for loaded, position in self._reader.epoch(self._begin()):
            self._position = position
            yield loaded.given(is_pinned=self.loader.pin_memory and torch.accelerator.is_available())
        self._position = None

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the epoch to the samplers and the dataset, those of them that want it."""
        self._epoch = epoch
        for owner in (*samplers_of(self.loader), self.loader.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the script is: after the last batch that it was given. The same on all ranks, but for a StatefulDataLoader over an iterable
        dataset, of which rank 0 knows."""
        position = self._position or self._start()
        kept = self._reader.kept() if isinstance(self._reader, StreamReader) and position.given else None
        return {
            "format": FORMAT,
            "epoch": self._epoch,
            "order": position.order,
            "random": position.random,
            "draws_seed": position.draws_seed,
            "given": position.given,
            "seen": position.seen,
            "kept": position.kept if self._is_resumed else kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch be what is left of that of the state, whatever the number of ranks then and now.

        Raises:
            LoaderError: it is not the state of such a loader.
        """
        if state.get("format") != FORMAT:
            known = f"format {state['format']}" if "format" in state else f"the keys {', '.join(map(str, state))}"
            raise LoaderError(f"the state has {known}, not format {FORMAT} of autopar.shard_loader; give what its state_dict() gave")
        if state["epoch"] is not None:
            self.set_epoch(state["epoch"])
        self._position = Position(**{name: state[name] for name in ("order", "random", "draws_seed", "given", "seen", "kept")})
        self._is_resumed = True

    def _start(self) -> Position:
        """The beginning of an epoch, if it were now."""
        return Position(order_of(self.loader), global_random(), draws_seed=not self._has_workers)

    def _begin(self) -> Position:
        """Where the epoch begins, agreed by all ranks."""
        resumed = self._position if self._is_resumed else None
        self._is_resumed = False

        def begin() -> Position:
            if resumed is not None:
                set_order(self.loader, resumed.order)
            return self._start()

        start = self._ranks.together(begin)
        self._has_workers = self.loader.persistent_workers
        return resumed if resumed is not None and resumed.given else self._ranks.from_first(lambda: start)


def shard_loader(
    loader: DataLoader[Any], model: nn.Module, *, collate: Collate = "share", give: Give = "rows"
) -> ShardedLoader:
    """Let each rank load only its share of every batch of a loader; the loop and its batches stay those of one device.

    The public ``autopar.shard_loader``; all ranks call it, with the same loader. Of a map-style dataset (HF datasets too) each rank loads
    and collates some rows of each batch, by workers of its own; indices are those that rank 0 draws, so that samplers need no common seed.
    Of an iterable dataset the streams that the workers read are dealt out to the ranks: ``num_workers`` counts those of all ranks, and with
    one or none only rank 0 reads. Random transforms draw from the numbers of the rank that loads a row.

    A rank gets only the rows of a batch that it computes on, as a `local_batch`: DTensors with the shape of the global batch. Batches come
    whole, as plain tensors, before there is a plan, where the plan wants all rows on all ranks, and where their rows do not come out even.

    Args:
        loader: over the whole dataset, for the global batch; without a sampler that shards.
        model: of `parallelize`; any other in a single process, where the batches are just those of the loader.
        collate: ``"share"``: each rank collates its own rows, and tensors are joined along dim 0. ``"batch"``: ranks load samples, and rank
            0 collates the whole of each batch: for a ``collate_fn`` whose result is not rows put together, as one that pads to the longest.
        give: ``"rows"``: only those of this rank. ``"whole"``: whole batches, as plain tensors: for a loop that computes on batches what
            DTensors cannot.

    Returns:
        An iterable with ``len``, ``set_epoch``, ``state_dict`` and ``load_state_dict``; give it to `save` and `load` as ``extra``.

    Raises:
        LoaderError: the loader cannot be shared out; on all ranks.
    """
    ranks = Ranks(None, LoaderError)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if not isinstance(model, ParallelModule):
            raise LoaderError(f"the model, a {type(model).__name__}, is not parallel; give it to autopar.parallelize first")
        ranks = replace(ranks, group=host_group("loading"))
    about = ranks.gather(ranks.together(lambda: _checked(loader, collate, give)))
    for rank, theirs in enumerate(about):
        different = [name for name, value in about[0].items() if theirs[name] != value]
        if different:
            name = different[0]
            raise LoaderError(
                f"{name} of the loader is {theirs[name]} on rank {rank} and {about[0][name]} on rank 0; give the same loader, over the "
                "whole dataset, on every rank"
            )
    return ShardedLoader(loader, ranks, collate, model._autopar if isinstance(model, ParallelModule) else None, give)


def _checked(loader: DataLoader[Any], collate: str, give: str) -> dict[str, object]:
    """What must be the same on all ranks.

    Raises:
        LoaderError: the loader cannot be shared out.
    """
    if collate not in ("share", "batch"):
        raise LoaderError(f"collate is {collate!r}; it can be 'share' or 'batch'")
    if give not in ("rows", "whole"):
        raise LoaderError(f"give is {give!r}; it can be 'rows' or 'whole'")
    if not isinstance(loader, DataLoader):
        raise LoaderError(f"the loader is a {type(loader).__name__}; give a torch.utils.data.DataLoader over the dataset")
    dataset, kind, is_iterable = loader.dataset, type(loader), isinstance(loader.dataset, IterableDataset)
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise LoaderError(f"the dataset is a data pipe, {type(dataset).__name__}, which torch shards by itself; give a plain Dataset")
    if kind.__iter__ is not DataLoader.__iter__ and kind.__module__.partition(".")[0] != "torchdata":
        raise LoaderError(f"the loader is a {kind.__name__}, whose own __iter__ would be passed by; give a torch.utils.data.DataLoader")
    if not is_iterable and loader.batch_sampler is None:
        raise LoaderError("the loader has batch_size=None: there are no batches to share out; give a batch_size, or a batch_sampler")
    if not loader.in_order:
        raise LoaderError("the loader has in_order=False, and shares of a batch could not be told apart; leave it True")
    if not is_iterable and hasattr(loader, "state_dict") and hasattr(dataset, "state_dict"):
        raise LoaderError(f"the {type(dataset).__name__} keeps a state of its own, on each rank another; give a dataset without state_dict")
    for sampler in samplers_of(loader):
        if getattr(sampler, "num_replicas", 1) > 1:
            raise LoaderError(
                f"the sampler is a {type(sampler).__name__} with num_replicas={sampler.num_replicas}, which shards; give the sampler and "
                "the global batch size of one device"
            )
    if getattr(dataset, "_distributed", None) is not None:
        raise LoaderError("the dataset is split by node already (split_dataset_by_node); give the whole dataset on every rank")
    return {
        "the kind of dataset": type(dataset).__name__,
        "the length of the dataset": len(dataset) if hasattr(dataset, "__len__") else None,
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "collate": collate,
        "give": give,
        "the order of the shuffled dataset (shuffle wants a seed)": _shuffle_of(loader) if is_iterable else None,
    }


def _shuffle_of(loader: DataLoader[Any]) -> str | None:
    """What an IterableDataset of HF draws the order of its shards and rows from, where several ranks read it. Without a seed it is
    different in every process, and ranks would read some shards twice and others never."""
    if loader.num_workers < 2 or hasattr(loader, "state_dict"):
        return None
    states = [repr(found.bit_generator.state) for found in _generators_in(loader.dataset, set())]
    return f"{zlib.crc32(repr(states).encode()):08x}" if states else None


def _generators_in(owner: object, seen: set[int]) -> Iterator[numpy.random.Generator]:
    """Of numpy in the objects of HF datasets that one is made of; where they lie there changes from version to version."""
    if isinstance(owner, numpy.random.Generator):
        yield owner
    elif type(owner).__module__.partition(".")[0] == "datasets" and id(owner) not in seen:
        seen.add(id(owner))
        for part in vars(owner).values():
            for each in part if isinstance(part, list | tuple) else (part,):
                yield from _generators_in(each, seen)
