"""Shared loaders give every rank the batches of one device, load each sample once in the world, and go on where they were."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import transformers
from torch import nn
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import AutoparError, LoaderError
from autopar.runtime.delivery import pack, told, unpack
from autopar.runtime.loading import ShardedLoader
from autopar.runtime.shares import block, join, split
from tests.pool import RankPool

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
LINK = LinkProfile(alpha_s=1e-6, bandwidth=1e9)
SIZE = 11
"""Samples: with batches of 4 the last has 3, fewer than there are ranks."""


class Pair(NamedTuple):
    x: torch.Tensor
    text: str


def as_dict(i: int) -> dict[str, Any]:
    return {"x": torch.tensor([i, -i]), "text": f"sample {i}", "weight": i / 2}


def as_pair(i: int) -> Pair:
    return Pair(torch.tensor([i, -i]), f"sample {i}")


def as_tuple(i: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 2), i, dtype=torch.bfloat16), i


def as_ragged(i: int) -> torch.Tensor:
    return torch.arange(i + 1)


def noted(log: Path | None, i: int) -> None:
    """Note that a sample is loaded, in whatever process."""
    if log is not None:
        with log.open("a") as file:
            file.write(f"{i}\n")


class Samples(Dataset[Any]):
    def __init__(self, log: Path | None, make: Callable[[int], object] = as_dict) -> None:
        self.log, self.make = log, make

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> object:
        noted(self.log, i)
        return self.make(i)


class Table(Samples):
    """As a dataset of HF: asked for several rows at once; this one must not be asked for none."""

    def __getitems__(self, indices: list[int]) -> list[object]:
        assert indices
        return [self[i] for i in indices]


class Stream(IterableDataset[Any]):
    """Splits itself by workers, as the documentation of torch has it."""

    def __init__(self, log: Path | None) -> None:
        self.log, self.first = log, 0

    def set_epoch(self, epoch: int) -> None:
        self.first = 100 * epoch

    def __iter__(self) -> Iterator[object]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(start, SIZE, step):
            noted(self.log, i)
            yield as_dict(self.first + i)


class Draws(IterableDataset[Any]):
    """Depends on a random number that is drawn elsewhere."""

    seeds = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        return iter(range(next(self.seeds), 30))


class Uneven:
    """A batch sampler of one's own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        yield from (order[:1], order[1:7], order[7:9], order[9:])

    def __len__(self) -> int:
        return 4


def encode(samples: list[dict[str, Any]]) -> transformers.BatchEncoding:
    ids = torch.stack([sample["x"] for sample in samples])
    return transformers.BatchEncoding({"input_ids": ids, "more": {"return_loss": True, "names": tuple(s["text"] for s in samples)}})


def pad(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True), "longest": max(map(len, samples))}


def workers(count: int) -> dict[str, Any]:
    """Those of the pool would start theirs from a server that imports everything again."""
    return {"num_workers": count, "multiprocessing_context": "fork"}


LOADERS: dict[str, Callable[[Path | None], DataLoader[Any]]] = {
    "shuffled": lambda log: DataLoader(Samples(log), batch_size=4, shuffle=True),
    "in order": lambda log: DataLoader(Samples(log, as_tuple), batch_size=3),
    "own generator": lambda log: DataLoader(Samples(log), 4, True, generator=torch.Generator().manual_seed(3)),
    "own batches": lambda log: DataLoader(Samples(log, as_tuple), batch_sampler=Uneven()),
    "named tuples": lambda log: DataLoader(Samples(log, as_pair), batch_size=8, shuffle=True),
    "encoding": lambda log: DataLoader(Samples(log), batch_size=5, collate_fn=encode),
    "table": lambda log: DataLoader(Table(log), batch_size=4, shuffle=True),
    "workers": lambda log: DataLoader(Table(log), batch_size=2, shuffle=True, persistent_workers=True, **workers(2)),
    "stream": lambda log: DataLoader(Stream(log), batch_size=4),
    "streams": lambda log: DataLoader(Stream(log), batch_size=1, **workers(2)),
}


def model_of(world: int) -> nn.Module:
    """Any; nothing is asked of it but that it is parallel."""
    model = nn.Linear(2, 2)
    if world == 1:
        return model
    made: nn.Module = autopar.parallelize(model, world, plan=Manual(dp=world), profile=MachineProfile(DEVICE, (LINK, LINK)))
    return made


def shared(name: str, log: Path | None = None, world: int = 4) -> ShardedLoader:
    return autopar.shard_loader(LOADERS[name](log), model_of(world))


def epochs(rank: int, name: str, log: Path | None) -> list[list[str]]:
    """Two epochs on a rank that has a seed of its own."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # so that it may have workers
    loader = shared(name, log)
    torch.manual_seed(rank)
    return [list(map(repr, loader)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_one_device(ranks: RankPool, tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"
    found = ranks.run(epochs, name, log)
    loader = LOADERS[name](None)
    torch.manual_seed(0)
    expected = [list(map(repr, loader)) for _ in range(2)]
    assert found == [expected] * 4
    assert sorted(map(int, log.read_text().split())) == sorted([*range(SIZE)] * 2)  # once in the world, each epoch


def test_a_process_alone_draws_the_numbers_of_the_loader() -> None:
    def run(share: bool) -> list[str]:
        loader = LOADERS["own batches"](None)
        model = nn.Linear(1, 1)
        torch.manual_seed(5)
        batches = autopar.shard_loader(loader, model) if share else loader
        return [*map(repr, batches), str(torch.rand(1))]

    assert run(share=True) == run(share=False)


def test_a_loader_that_goes_ends_its_workers() -> None:
    """And does not leave that to the garbage collector, which closes the queues first in which they are told to."""
    loader = autopar.shard_loader(LOADERS["workers"](None), nn.Linear(1, 1))
    assert len(list(loader)) > 0
    inner = weakref.ref(cast(Any, loader)._reader._inner)
    gc.disable()
    try:
        del loader
        assert inner() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size, world", [(8, 4), (7, 4), (3, 4), (0, 2), (5, 1)])
def test_blocks_are_even_and_in_order(size: int, world: int) -> None:
    blocks = [range(size)[block(size, rank, world)] for rank in range(world)]
    assert [i for own in blocks for i in own] == [*range(size)]
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_shares_join_to_the_whole() -> None:
    whole: dict[str, Any] = {
        "bool": torch.tensor([True, False, True]),
        "half": torch.randn(3, 2, 2).half().transpose(1, 2),
        "empty": torch.zeros(3, 0),
        "names": ["a", "b", "c"],
        "none": None,
    }
    blocks = [(slice(0, 2), 2), (slice(2, 3), 1)]
    parts = [split({k: v and v[s] if k in ("names", "none") else v[s] for k, v in whole.items()}, rows) for s, rows in blocks]
    assert repr(join([share for share, _ in parts], [data for _, data in parts])) == repr(whole)


def test_any_value_is_packed_and_unpacked() -> None:
    tensor = torch.randn(3, 2).T
    sparse = torch.eye(2).to_sparse()
    value = {"twice": [tensor, tensor], "scalar": torch.tensor(2.5), "text": Pair(torch.zeros(0, 2), "x"), "sparse": sparse}
    again = unpack(pack(value))
    assert repr(again) == repr(value)
    assert again["twice"][0] is again["twice"][1]


def rest(rank: int, name: str, log: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """The state after the second batch of the second epoch; what follows in it; what follows for a loader made anew."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loader = shared(name)
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = iter(loader)
        if epoch == 0:
            list(batches)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    torch.manual_seed(9)
    other = shared(name, log)
    other.load_state_dict(copy.deepcopy(state))
    return state, list(map(repr, batches)), list(map(repr, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffled", "own generator", "workers", "streams"])
def test_an_epoch_goes_on_where_it_was(ranks: RankPool, tmp_path: Path, name: str) -> None:
    log, alone = tmp_path / "log", tmp_path / "alone"
    found = ranks.run(rest, name, log)
    state, following, resumed = found[0]
    assert resumed == following
    assert {repr(found[rank][1:]) for rank in range(4)} == {repr(found[0][1:])}
    loader = shared(name, alone, world=1)  # on another number of ranks
    loader.load_state_dict(state)
    assert list(map(repr, loader)) == following
    if name != "streams":  # what was given is not loaded again
        assert [len(path.read_text().split()) for path in (log, alone)] == [SIZE - 2 * (loader.loader.batch_size or 0)] * 2
    assert loader.state_dict()["given"] == 0


@pytest.mark.slow
def test_a_state_from_one_process_goes_on_in_many(ranks: RankPool) -> None:
    loader = shared("shuffled", world=1)
    batches = iter(loader)
    next(batches)
    assert ranks.run(resume, "shuffled", loader.state_dict()) == [list(map(repr, batches))] * 4


def resume(rank: int, name: str, state: dict[str, Any]) -> list[str]:
    loader = shared(name)
    loader.load_state_dict(state)
    return list(map(repr, loader))


def fails(call: Callable[[], object], kind: type[AutoparError] = LoaderError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_a_state_of_another_order_is_refused() -> None:
    def at(loader: DataLoader[Any]) -> ShardedLoader:
        return autopar.shard_loader(loader, nn.Linear(1, 1))

    loader = at(LOADERS["shuffled"](None))
    next(iter(loader))
    state = loader.state_dict()
    other = at(DataLoader(Samples(None), batch_size=3, shuffle=True))
    other.load_state_dict(state)
    assert "the loader cannot go on after batch 1 of the epoch: its samplers (BatchSampler, RandomSampler) draw" in fails(lambda: [*other])
    other = at(LOADERS["own generator"](None))
    other.load_state_dict(state)
    assert "its samplers, or their generators" in fails(lambda: [*other])
    draws = at(DataLoader(Draws(), batch_size=2))
    next(iter(draws))
    draws.load_state_dict(draws.state_dict())
    assert "its dataset gives another order" in fails(lambda: [*draws])
    assert "the state has the keys a, not format 1" in fails(lambda: draws.load_state_dict({"a": 1}))


class Broken(Samples):
    def __getitem__(self, i: int) -> object:
        if i == 6:
            raise OSError("sample 6 is not on the disk")
        return super().__getitem__(i)


def break_down(rank: int) -> list[str]:
    """A sample that only rank 2 loads, the rows of one rank that are longer, a sampler that fails on rank 1, and a rank with other data."""
    model = model_of(4)

    def over(loader: DataLoader[Any], **settings: Any) -> str:
        return fails(lambda: [*autopar.shard_loader(loader, model, **settings)])

    ragged = DataLoader(Samples(None, as_ragged), batch_size=8, collate_fn=pad)
    return [
        over(DataLoader(Broken(None), batch_size=8)),
        over(DataLoader(Broken(None), batch_size=8), collate="batch"),
        over(DataLoader(Stream(None), collate_fn=cannot if rank == 0 else None)),
        over(DataLoader(Samples(None), batch_sampler=[[1, 2]] if rank != 1 else cast(Any, 7))),
        over(ragged),
        over(DataLoader(Samples(None, as_ragged), batch_size=8, collate_fn=pad_only)),
        over(DataLoader(Samples(None), batch_size=2 + rank // 3)),
        fails(lambda: autopar.shard_loader(ragged, nn.Linear(1, 1))),
    ]


def cannot(samples: object) -> object:
    raise KeyError("text")


def pad_only(samples: list[torch.Tensor]) -> torch.Tensor:
    padded: torch.Tensor = pad(samples)["x"]
    return padded


@pytest.mark.slow
def test_what_goes_wrong_on_a_rank_is_told_by_all(ranks: RankPool) -> None:
    found = ranks.run(break_down, timeout=60)
    assert [found[0]] * 4 == found
    missing, whole, stream, sampler, number, width, other, plain = found[0]
    assert missing == whole == "rank 3: OSError: sample 6 is not on the disk"
    assert stream == "rank 0: KeyError: 'text'"
    assert sampler == "rank 1: TypeError: 'int' object is not iterable"
    assert number == (
        "rank 0: the batch['longest'] is 2, made of the 2 rows of one rank, and what it is for all rows cannot be told; give tensors with "
        "the batch in dim 0, or lists with an entry for each row, or let rank 0 collate the whole of each batch: shard_loader(..., "
        "collate='batch')"
    )
    assert width.startswith("the batch is int64[rows, 2] on cpu of rank 0 and int64[rows, 4] on cpu of rank 1: each rank collates its own")
    assert "pad to a fixed length (padding='max_length'), or let rank 0 collate the whole" in width
    assert other == "batch_size of the loader is 3 on rank 3 and 2 on rank 0; give the same loader, over the whole dataset, on every rank"
    assert plain == "the model, a Linear, is not parallel; give it to autopar.parallelize first"


def test_an_error_of_a_worker_is_told_without_its_traceback() -> None:
    try:
        Broken(None)[6]
    except OSError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(OSError, match="Caught OSError in DataLoader worker") as error:
        wrapped.reraise()
    assert told(error.value) == "OSError: sample 6 is not on the disk"


def collate_whole(rank: int, log: Path) -> list[str]:
    loader = DataLoader(Samples(log, as_ragged), batch_size=8, collate_fn=pad)
    return list(map(repr, autopar.shard_loader(loader, model_of(4), collate="batch")))


@pytest.mark.slow
def test_batches_that_are_padded_to_the_longest_are_collated_whole(ranks: RankPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    expected = list(map(repr, DataLoader(Samples(None, as_ragged), batch_size=8, collate_fn=pad)))
    assert ranks.run(collate_whole, log) == [expected] * 4
    assert sorted(map(int, log.read_text().split())) == [*range(SIZE)]


@pytest.mark.parametrize(
    "loader, text",
    [
        ([1, 2], "the loader is a list; give a torch"),
        (DataLoader(Samples(None), batch_size=None), "batch_size=None"),
        (DataLoader(Samples(None), sampler=DistributedSampler(Samples(None), 2, 0)), "a DistributedSampler with num_replicas=2"),
        (DataLoader(Samples(None), num_workers=1, in_order=False), "in_order=False"),
        (type("Mine", (DataLoader,), {"__iter__": lambda self: iter(())})(Samples(None)), "the loader is a Mine, whose own __iter__"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(loader: Any, text: str) -> None:
    assert text in fails(lambda: autopar.shard_loader(loader, nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "batch, text",
    [
        ({"x": torch.zeros(3, 2)}, "the batch['x'] is a tensor of shape (3, 2), made of the 2 rows of one rank"),
        ([torch.tensor(1.5)], "the batch[0] is a tensor a scalar, 1.5"),
        ({"x": torch.eye(2).to_sparse()}, "is a Tensor of torch.sparse_coo, whose rows cannot be joined"),
        ({"x": object()}, "the batch['x'] is of type object"),
    ],
)
def test_leaves_that_are_no_rows_are_refused(batch: object, text: str) -> None:
    assert text in fails(lambda: split(batch, 2))


def test_a_batch_without_rows_is_refused() -> None:
    loader = autopar.shard_loader(DataLoader(Samples(None), batch_sampler=[[1], []]), nn.Linear(1, 1))
    assert fails(lambda: [*loader]) == "batch 2 of the sampler has no indices; leave it out"


def test_shares_of_other_structures_are_refused() -> None:
    def joined(one: object, other: object) -> str:
        (first, data), (second, more) = split(one, 2), split(other, 2)
        return fails(lambda: join([first, second], [data, more]))

    x = torch.zeros(2)
    assert "the batch['y'] only on rank 1" in joined({"x": x}, {"x": x, "y": x})
    assert "the batch['task'] is 'a' on rank 0 and 'b' on rank 1" in joined({"task": "a"}, {"task": "b"})


class Points(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[i], "labels": self.rows[i].sin()}


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.mse_loss(super().forward(x), labels)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train(rank: int, plan: Manual, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of two epochs; and again of those after the first batch, when all of it was saved."""
    torch.manual_seed(0)
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.mesh.sizes))
    example = {"x": torch.zeros(8, 8), "labels": torch.zeros(8, 8)}
    model = autopar.parallelize(Mlp(), 4, example_batch=example, plan=plan, profile=profile)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(rank)
    loader = autopar.shard_loader(DataLoader(Points(), batch_size=8, shuffle=True), model)
    batches = iter(loader)
    losses = steps(model, optimizer, iter([next(batches)]))
    autopar.save(folder, model, optimizer, extra={"loader": loader})
    losses += steps(model, optimizer, batches) + steps(model, optimizer, iter(loader))
    autopar.load(folder, model, optimizer, extra={"loader": loader})
    return losses, steps(model, optimizer, iter(loader)) + steps(model, optimizer, iter(loader))


@pytest.mark.slow
def test_training_goes_as_on_one_device(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mlp()
    torch.manual_seed(0)
    loader = DataLoader(Points(), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    expected = steps(model, optimizer, iter(loader)) + steps(model, optimizer, iter(loader))
    for losses, again in ranks.run(train, Manual(dp=2, tp=2), tmp_path):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        assert again == losses[1:]
