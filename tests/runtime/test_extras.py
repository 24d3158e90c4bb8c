"""What is kept beside a model: what is sharded in it is that of all ranks, and comes back as it lies under another plan."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import Manual
from autopar.errors import CheckpointError
from tests.pool import RankPool
from tests.runtime.test_checkpoint import SHARDED, STAGES, make, profile_for, train
from tests.runtime.test_train import whole

pytestmark = pytest.mark.slow


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters of all stages, by name."""
    if not dist.is_initialized():
        return whole(model)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, whole(model))
    return {name: value for part in parts for name, value in part.items()}


class Frozen(dict[str, int]):
    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("it is frozen")


class Seen:
    """Its state has dicts of other kinds, one of them what it goes on counting in."""

    def __init__(self) -> None:
        self.counts = Counter("aab")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "options": Frozen(a=1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


def test_dicts_of_other_kinds_stay_as_they_are(tmp_path: Path) -> None:
    made, seen = make(None), Seen()
    for _ in range(2):
        autopar.save(tmp_path, *made[:2], extra={"seen": seen})
        seen = Seen()
        kept = autopar.load(tmp_path, *made[:2], extra={"seen": seen})
        assert seen.counts == Counter(a=2, b=1)
        assert isinstance(kept["seen"]["options"], Frozen)


def move_average(rank: int, folder: str) -> tuple[dict[str, torch.Tensor], bool]:
    """An average of stages, saved, loaded into shards, saved and loaded into stages; whether it was the same everywhere."""
    made = make(STAGES)
    ema = averaged(made[0])
    for number in (0, 1):
        train(made, [number])
        ema.update_parameters(made[0])
    autopar.save(folder, *made[:2], extra={"ema": ema, "step": 2})
    expected = values(ema.module)
    is_same = not torch.equal(expected["embed.weight"], values(made[0])["embed.weight"])
    for plan in (SHARDED, STAGES):
        made = make(plan)
        assert autopar.load(folder, *made[:2]).keys() == {"step"}, "what is sharded is read where it is asked for"
        ema = averaged(made[0])
        extra = autopar.load(folder, *made[:2], extra={"ema": ema})
        found = values(ema.module)
        is_same &= int(ema.n_averaged) == 2 and extra["step"] == 2 and found.keys() == expected.keys()
        is_same &= all(torch.equal(found[name], value) for name, value in expected.items())
        autopar.save(folder, *made[:2], extra={"ema": ema, "step": 2}, background=True).wait()
    return expected, is_same


def test_averages_of_weights_move_between_plans(ranks: RankPool, tmp_path: Path) -> None:
    """And to one device."""
    (expected, _), *_ = found = ranks.run(move_average, str(tmp_path))
    assert all(is_same for _, is_same in found)
    made = make(None)
    ema = averaged(made[0])
    autopar.load(tmp_path, *made[:2], extra={"ema": ema})
    torch.testing.assert_close(values(ema.module), expected, rtol=0, atol=0)


class Other:
    """Keeps what it is given."""

    def __init__(self, kept: object = None) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def train_by_extra(rank: int, folder: str) -> tuple[list[list[float]], list[list[float]]]:
    """Losses with an optimizer that is saved as extra, unbroken and under another plan."""
    made = make(SHARDED)
    train(made, [0, 1])
    autopar.save(folder, made[0], extra={"optimizer": made[1], "scheduler": made[2]})
    unbroken = train(made, [2, 3])
    made = make(Manual(dp=2, tp=2, zero=1))
    autopar.load(folder, made[0], extra={"optimizer": made[1], "scheduler": made[2]})
    assert all(isinstance(state["exp_avg"], DTensor) for state in made[1].state.values())
    return unbroken, train(made, [2, 3])


def test_an_optimizer_is_kept_as_extra(ranks: RankPool, tmp_path: Path) -> None:
    for unbroken, found in ranks.run(train_by_extra, str(tmp_path)):
        torch.testing.assert_close(found, unbroken, rtol=1e-5, atol=1e-6)


def keep_parts(rank: int, folder: str) -> tuple[Any, Any]:
    """States that hold parts in all ways, and what comes back of them where nothing has room for them."""
    whole, mesh = torch.arange(8.0), init_device_mesh("cpu", (4,))
    part = DTensor.from_local(whole[2 * rank : 2 * rank + 2].clone(), mesh, [Shard(0)])
    state: Any = OrderedDict({"a": {"b.c": part, 1: [part, (part, 5)], None: 3}, "n": rank})
    state._metadata = {"version": 2}
    model = nn.Linear(2, 2)
    plan = Manual(dp=4)
    model = autopar.parallelize(model, 4, plan=plan, profile=profile_for(plan), example_batch=(torch.ones(4, 2),), loss_fn=squares)
    for background in (False, True):
        autopar.save(folder, model, extra={"own": Other(state), "rank": rank}, background=background).wait()
    assert state["a"]["b.c"] is part, "what the object has is left as it is"
    empty, same = Other(), Other({"a": {"b.c": torch.zeros_like(part)}})
    autopar.load(folder, model, extra={"own": empty})
    loaded = autopar.load(folder, model, extra={"own": same})
    assert loaded["rank"] == 0
    kept: Any = same.kept
    assert kept["a"]["b.c"].placements == (Shard(0),)
    kept["a"]["b.c"] = kept["a"]["b.c"].full_tensor()
    return empty.kept, kept


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def test_parts_anywhere_in_a_state(ranks: RankPool, tmp_path: Path) -> None:
    x = torch.arange(8.0)
    for states in ranks.run(keep_parts, str(tmp_path)):
        for state in states:
            assert state._metadata == {"version": 2}
            torch.testing.assert_close({**state}, {"a": {"b.c": x, 1: [x, (x, 5)], None: 3}, "n": 0})


class Hidden:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def save_wrongly(rank: int, folder: str) -> list[str]:
    """Errors of parts outside of a state, of numbers under stages, of ranks that give none, and of what no rank has."""
    made = make(STAGES)
    train(made, [0])
    model, optimizer, _ = made
    ema, weight = averaged(model), model.get_parameter("embed.weight")
    other = next(p for p in model.parameters() if p.dim() == 1)
    wrong: list[Mapping[str, object]] = [
        {"ema": ema.state_dict()},
        {"ema": Other({"shadow": Hidden(weight)})},
        {"optimizer": optimizer},
        {"ema": ema} if rank != 3 else {},
        {"ema": Other({"a": weight if rank != 1 else other})},
        {"ema": Other({"a": {"b": weight} if rank != 0 else 3})},
    ]
    found = []
    for extra in wrong:
        with pytest.raises(CheckpointError) as caught:
            autopar.save(folder, model, extra=extra)
        found.append(str(caught.value))
    assert not [*Path(folder).iterdir()]
    autopar.save(folder, model, extra={"ema": Other({"gone": weight})})
    with pytest.raises(CheckpointError) as caught:
        autopar.load(folder, model, extra={"ema": ema})
    return [*found, str(caught.value)]


def test_what_cannot_be_kept_whole_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Before anything is written."""
    expected = [
        "rank 0: extra 'ema' holds a DTensor of shape (64, 32) where rank 0 alone would save it",
        "rank 0: extra 'ema' holds a DTensor of shape (64, 32) where rank 0 alone would save it",
        "extra.optimizer['state'][0]['exp_avg'] is a DTensor under a number",
        "extra 'ema' is sharded, and rank 3 gives none; give it on all ranks",
        "extra.ema['a'] is (32,) on rank 1 and (64, 32) on others",
        "rank 0: extra.ema['a']['b'] is not in a dict on rank 0",
        "the checkpoint has what no rank has, extra.ema['gone'] (1 in all)",
    ]
    for found in ranks.run(save_wrongly, str(tmp_path)):
        assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected
