"""Shared loaders over what torchdata and HF datasets give: stateful loaders and samplers, tables, streams of shards."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import autopar
from autopar.errors import LoaderError
from tests.pool import RankPool
from tests.runtime.test_loading import model_of, noted, workers

SIZE, SHARDS, BATCH = 24, 6, 5


def table() -> Any:
    return datasets.Dataset.from_dict({"x": list(range(SIZE))}).with_format("torch")


def stream(log: Path | None = None) -> Any:
    """Rows in shards, each noted when it is read."""

    def read(rows: dict[str, Any]) -> dict[str, Any]:
        noted(log, int(rows["x"]))
        return rows

    return table().to_iterable_dataset(num_shards=SHARDS).map(read)


class Numbers(IterableDataset[Any]):
    """Without a state: a loader reads up to the place."""

    def __iter__(self) -> Any:
        return iter(range(SIZE))


def shared(loader: DataLoader[Any]) -> Any:
    return autopar.shard_loader(loader, nn.Linear(1, 1))


MAKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "table": lambda: DataLoader(table(), batch_size=BATCH),
    "shuffled table": lambda: DataLoader(table(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "stateful table": lambda: StatefulDataLoader(table(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "stateful sampler": lambda: StatefulDataLoader(table(), BATCH, sampler=StatefulDistributedSampler(table(), 1, 0, seed=2)),
    "stream": lambda: DataLoader(stream().shuffle(3, buffer_size=4), batch_size=BATCH),
    "stateful stream": lambda: StatefulDataLoader(stream().shuffle(3, buffer_size=1), batch_size=BATCH),
    "stateful numbers": lambda: StatefulDataLoader(Numbers(), batch_size=BATCH),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_epoch_goes_on_with_loaders_and_datasets_of_libraries(name: str) -> None:
    """The second epoch, by the loader alone; shared; and what a loader made anew gives of its state after two batches."""
    alone, loader, other = MAKERS[name](), shared(MAKERS[name]()), shared(MAKERS[name]())
    for epoch in range(2):
        for owner in (alone.sampler, alone.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        whole = list(map(repr, alone))
    loader.set_epoch(0)
    list(loader)
    loader.set_epoch(1)
    batches = iter(loader)
    given = [repr(next(batches)) for _ in range(2)]
    other.load_state_dict(copy.deepcopy(loader.state_dict()))
    rest = list(map(repr, batches))
    assert given + rest == whole
    assert len(whole) == -(-SIZE // BATCH)
    assert list(map(repr, other)) == rest


def test_what_a_stateful_loader_and_dataset_gave_is_not_read_again(tmp_path: Path) -> None:
    loader = shared(StatefulDataLoader(stream(), batch_size=BATCH))
    next(iter(loader))
    state, log = loader.state_dict(), tmp_path / "log"
    other = shared(StatefulDataLoader(stream(log), batch_size=BATCH))
    other.load_state_dict(state)
    list(other)
    assert [int(line) for line in log.read_text().split()] == [*range(BATCH, SIZE)]
    other.load_state_dict(state | {"kept": None})
    with pytest.raises(LoaderError, match="nothing of the StatefulDataLoader, which only rank 0 reads; save the state of rank 0"):
        list(other)


def test_a_dataset_that_is_split_by_node_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(LoaderError, match="split by node already"):
        shared(DataLoader(split_dataset_by_node(stream(), rank=0, world_size=2)))


def read(rank: int, log: Path) -> tuple[list[list[str]], str]:
    """Tables and shards that are shuffled with a seed; what is said of shards without, which every process has in another order."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that it may have workers
    model = model_of(4)
    batches = [list(map(repr, autopar.shard_loader(loader, model))) for loader in read_alone(log)]
    unseeded = [DataLoader(stream().shuffle(buffer_size=1), batch_size=2, **options) for options in (workers(2), {})]
    with pytest.raises(LoaderError) as error:
        autopar.shard_loader(unseeded[0], model)
    autopar.shard_loader(unseeded[1], model)  # rank 0 alone reads it
    return batches, str(error.value)


def read_alone(log: Path | None = None) -> list[DataLoader[Any]]:
    return [
        MAKERS["shuffled table"](),
        MAKERS["stateful table"](),
        DataLoader(stream(log).shuffle(3, buffer_size=1), batch_size=2, **workers(2)),
    ]


@pytest.mark.slow
def test_ranks_read_what_one_device_reads(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(read, tmp_path / "log")
    expected = [list(map(repr, loader)) for loader in read_alone()]
    assert [batches for batches, _ in found] == [expected] * 4
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == [*range(SIZE)]
    for _, text in found:
        assert text.startswith("the order of the shuffled dataset (shuffle wants a seed) of the loader is ")
