"""A rank that holds its own rows of a batch trains as one that holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.passes.rows import RowSplit
from autopar.runtime.groups import device_mesh
from autopar.runtime.local_batch import Deal, deal_of
from autopar.runtime.module import Engine
from autopar.runtime.shares import leaves_of
from tests.marks import not_on_torch_2_11, only
from tests.pool import RankPool
from tests.runtime.test_loading import LOADERS

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
LINK = LinkProfile(alpha_s=1e-6, bandwidth=1e9)
PLANS = {
    "data": Manual(dp=4),
    "data and tensor": Manual(dp=2, tp=2),
    "zero, micro-batches": Manual(dp=4, zero=3, microbatches=2),
    "stages": Manual(pp=2, dp=2, microbatches=2),
}
WHOLE = torch.randint(12, (16, 7), generator=torch.Generator().manual_seed(0))


class Language(nn.Module):
    """Ignores some labels, whose count needs the rows of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(16, 12)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.inner(self.embed(x))).flatten(0, 1), y.flatten(), ignore_index=3)


def parallel(plan: Manual, *, is_planned: bool = True) -> nn.Module:
    torch.manual_seed(0)
    example = (WHOLE[:, :-1], WHOLE[:, 1:]) if is_planned else None
    profile = MachineProfile(DEVICE, (LINK,) * (3 if plan.pp > 1 else 2))
    made: nn.Module = autopar.parallelize(Language(), 4, plan=plan, profile=profile, example_batch=example)
    return made


def rows_by_hand(whole: torch.Tensor, share: autopar.BatchRank, microbatches: int) -> torch.Tensor:
    """As the documentation of `autopar.local_batch` says it."""
    return torch.cat([part.chunk(share.num_replicas)[share.rank] for part in whole.chunk(microbatches)])


def losses(rank: int, name: str) -> tuple[list[float], list[float], autopar.BatchRank]:
    """Two steps and an evaluation, with whole batches and with local ones."""
    found: list[list[float]] = []
    for is_local in (False, True):
        model = parallel(PLANS[name])
        optimizer, share = torch.optim.SGD(model.parameters(), 0.5), autopar.batch_rank(model)
        own = rows_by_hand(WHOLE, share, PLANS[name].microbatches or 1)
        batch = autopar.local_batch({"ids": own}, model)["ids"] if is_local else WHOLE
        assert batch.shape == WHOLE.shape
        assert isinstance(batch, DTensor) == is_local
        values = []
        for _ in range(2):
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(float(loss))
        with torch.no_grad():
            found.append([*values, float(model.eval()(batch[:, :-1], WHOLE[:, 1:]))])
    return found[0], found[1], share


@pytest.mark.parametrize("name", only(["stages"], PLANS))
def test_losses_are_those_of_whole_batches(ranks: RankPool, name: str) -> None:
    found = ranks.run(losses, name)
    assert all(local == whole for whole, local, _ in found)
    assert found[0][0][0] != found[0][0][1]
    replicas = 4 if PLANS[name].dp == 4 else 2
    assert {share.num_replicas for *_, share in found} == {replicas}
    assert sorted({share.rank for *_, share in found}) == [*range(replicas)]


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[:, 1:],
    lambda x: x.masked_fill(x > 5, -100),
    lambda x: x.float() / 255,
    lambda x: x.view(24, 1, 2),
    lambda x: torch.cat([x, x], 1),
]


def dealt_over(rank: int, axes: tuple[str, ...], microbatches: int) -> None:
    """What torch knows of rows that are dealt out is right, and ops keep them where they are."""
    grid, whole = Mesh(("a", "b"), (2, 2)), torch.arange(48).view(24, 2)
    deal = Deal.of(RowSplit(axes, microbatches), grid, device_mesh(grid, "cpu"))
    rows = deal.wrap(deal.cut(whole))
    assert deal.rows(range(24)) == [row[0] // 2 for row in rows.to_local().tolist()]
    assert torch.equal(rows.full_tensor(), whole)
    for change in CHANGES:
        changed = change(rows)
        assert isinstance(changed, DTensor)
        assert deal.has_dealt(changed)
        assert torch.equal(changed.full_tensor(), change(whole))


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=not_on_torch_2_11)])
@pytest.mark.parametrize("axes", [("a", "b"), ("a",), ("b",)], ids=" ".join)
def test_rows_are_dealt_out_over_axes(ranks: RankPool, axes: tuple[str, ...], microbatches: int) -> None:
    ranks.run(dealt_over, axes, microbatches)


def what_comes_in(rank: int, name: str) -> list[str]:
    """Whether inputs come as rows, by the shape of what the first graph is given."""
    model = parallel(PLANS[name])
    deal = deal_of(model)
    inputs, labels = (deal.wrap(deal.cut(x)) for x in (WHOLE[:, :-1], WHOLE[:, 1:]))
    model(inputs, labels)
    engine: Engine = model._autopar  # type: ignore[assignment]
    (built,) = [built for variants in engine.programs.values() for _, built in variants if any(built.split_inputs)]
    return [name for name, is_split in zip(("x", "y"), built.split_inputs, strict=True) if is_split]


def test_only_an_input_that_some_op_wants_whole_is_gathered(ranks: RankPool) -> None:
    assert ranks.run(what_comes_in, "data") == [["x", "y"]] * 4
    assert ranks.run(what_comes_in, "zero, micro-batches") == [["x"]] * 4  # labels that count are counted over all micro-batches


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [x for x in leaves_of(batch) if isinstance(x, torch.Tensor)]


def loaded(rank: int, name: str, microbatches: int) -> list[list[tuple[bool, list[Any]]]]:
    """The tensors of an epoch."""
    model = parallel(Manual(dp=2, tp=2, microbatches=microbatches))
    torch.manual_seed(rank)
    batches = autopar.shard_loader(LOADERS[name](None), model, collate="batch" if name == "encoding" else "share")
    found = []
    for batch in batches:
        found.append([(isinstance(x, DTensor), (x.to_local() if isinstance(x, DTensor) else x).tolist()) for x in tensors_of(batch)])
    return found


KINDS = ("shuffled", "table", "own batches", "encoding", "stream")


@pytest.mark.slow
@pytest.mark.parametrize("name, microbatches", only([*product(KINDS[:3], [2]), ("shuffled", 1)], product(KINDS, [1, 2])))
def test_a_loader_gives_a_rank_its_rows(ranks: RankPool, name: str, microbatches: int) -> None:
    found = ranks.run(loaded, name, microbatches)
    torch.manual_seed(0)
    for number, batch in enumerate(LOADERS[name](None)):
        for i, whole in enumerate(tensors_of(batch)):
            is_even = len(whole) % (2 * microbatches) == 0
            for rank in range(4):
                own = rows_by_hand(whole, autopar.BatchRank(2, rank // 2), microbatches) if is_even else whole
                assert found[rank][number][i] == (is_even, own.tolist())


def read_by(rank: int) -> tuple[list[int], list[int]]:
    """What this rank reads, and what it gets."""
    model, read = parallel(Manual(dp=2, tp=2)), list[int]()

    class Noting(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> int:
            read.append(i)
            return i

    got = [x for batch in autopar.shard_loader(DataLoader(Noting(), batch_size=8), model) for x in batch.to_local().tolist()]
    return read, got


def test_a_rank_reads_a_part_of_its_rows(ranks: RankPool) -> None:
    assert ranks.run(read_by) == [
        ([0, 1, 8, 9], [0, 1, 2, 3, 8, 9, 10, 11]),
        ([2, 3, 10, 11], [0, 1, 2, 3, 8, 9, 10, 11]),
        ([4, 5, 12, 13], [4, 5, 6, 7, 12, 13, 14, 15]),
        ([6, 7, 14, 15], [4, 5, 6, 7, 12, 13, 14, 15]),
    ]


def sampled(rank: int) -> list[float]:
    """A loader of one's own, sharded by torch."""
    model = parallel(Manual(dp=2, tp=2))
    sampler: DistributedSampler[Any] = DistributedSampler(WHOLE, **autopar.batch_rank(model)._asdict(), shuffle=False)  # type: ignore[arg-type]
    (own,) = DataLoader(WHOLE, batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    local = autopar.local_batch(own, model)
    in_order = torch.cat([WHOLE[0::2], WHOLE[1::2]])
    return [float(model.eval()(x[:, :-1], x[:, 1:])) for x in (local, in_order)]


def test_rows_of_a_distributed_sampler(ranks: RankPool) -> None:
    for local, whole in ranks.run(sampled):
        assert local == whole


def errors(rank: int) -> list[str]:
    def text(call: Any) -> str:
        with pytest.raises(AutoparError) as caught:
            call()
        return str(caught.value)

    model, unplanned = parallel(Manual(dp=2, microbatches=2, tp=2)), parallel(Manual(dp=4), is_planned=False)
    own = torch.full((4, 7), rank)
    other = DTensor.from_local(own, deal_of(model).mesh, [torch.distributed.tensor.Shard(1)], run_check=False)
    rows = autopar.local_batch(own, model)
    return [
        text(lambda: autopar.local_batch(own, unplanned)),
        text(lambda: autopar.local_batch(own[:3], model)),
        text(lambda: autopar.local_batch(torch.tensor(1), model)),
        text(lambda: model(other, WHOLE)),
        text(lambda: model(rows[:, :-1], rows[:, 1:])),
        text(lambda: autopar.shard_loader(DataLoader(WHOLE), model, give="all")),  # type: ignore[arg-type]
        text(lambda: autopar.batch_rank(nn.Linear(1, 1))),
    ]


def test_errors_say_what_to_do(ranks: RankPool) -> None:
    for unplanned, uneven, scalar, other, peers, give, plain in ranks.run(errors):
        assert unplanned.startswith("there is no plan yet, which says whose rows are whose: give parallelize an example_batch=")
        assert uneven == "a rank has 3 rows of a batch, which 2 micro-batches do not divide; give a multiple"
        assert scalar.startswith("a tensor of the local batch is a scalar")
        assert other.startswith("input 0 is a DTensor of [Shard(dim=1)], and not of the rows that this model takes")
        assert "ranks [1] were given another batch than 1 of 2 ranks [0, 1], which hold the same rows: input 0 has other values" in peers
        assert give == "give is 'all'; it can be 'rows' or 'whole'"
        assert plain.startswith("the model, a Linear, is not parallel")
