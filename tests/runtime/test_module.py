"""What else modules are asked for: to move, to take a state dict, to be copied and pickled."""

from __future__ import annotations

import copy
import io
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import PlanError
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK

pytestmark = pytest.mark.slow

DATA, STAGES = Manual(dp=4, zero=3), Manual(pp=2, dp=2, microbatches=2)


class Normed(nn.Module):
    """With a buffer, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.last(self.norm(self.first(x))) + self.shift).square().mean()
        return loss


def parallel(model: nn.Module, plan: Manual) -> nn.Module:
    made: nn.Module = autopar.parallelize(model, 4, plan=plan, profile=MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes)))
    return made


def start() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Normed(), torch.randn(8, 8)


def failure(kind: type[Exception], call: Any, *args: object) -> str:
    with pytest.raises(kind) as caught:
        call(*args)
    return str(caught.value)


def assert_like(model: nn.Module, reference: nn.Module) -> None:
    """What this rank has of a model is as in another."""
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(found.detach(), reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def move_and_cast(rank: int) -> list[str]:
    """Errors of casts, before and once there is a plan; moves to where everything is change nothing."""
    model, x = start()
    made, texts = parallel(model, DATA), list[str]()
    for _ in range(2):
        before = list(made.parameters())
        for same in (made.to("cpu"), made.cpu(), made.float(), made.to(torch.float32), nn.Sequential(made).cpu()[0]):
            assert same is made
        assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
        changes = (made.double, lambda: made.to("meta"), lambda: made.to_empty(device="cpu"))
        texts += [failure(PlanError, change) for change in changes]
        made(x).backward()
    return texts


def test_models_stay_where_they_are(ranks: RankPool) -> None:
    for texts in ranks.run(move_and_cast):
        assert len(texts) == 6
        assert all(text.startswith("first.weight is torch.float32 on cpu, and would be torch.") for text in texts)
        assert "float64 on cpu: plans hold for" in texts[0]
        assert "float32 on meta: plans hold for" in texts[1]


def load_plain(rank: int, plan: Manual) -> None:
    """The state dict of one device, before and once there is a plan, and inside of another module."""
    model, x = start()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) / 100 + number)
    state = copy.deepcopy(other.state_dict())
    made = parallel(model, plan)
    made.load_state_dict(state)
    found = made(x)
    torch.testing.assert_close(found, other(x), rtol=1e-5, atol=1e-5)
    assert_like(made, other)
    for outer, prefix in ((made, ""), (nn.Sequential(made), "0.")):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        outer.load_state_dict({prefix + name: value for name, value in state.items()})
        assert_like(made, other)
    outer.load_state_dict(outer.state_dict())
    assert_like(made, other)
    assert "Unexpected key" in failure(RuntimeError, made.load_state_dict, state | {"more": x})
    assert "size mismatch" in failure(RuntimeError, made.load_state_dict, state | {"first.bias": x, "last.bias": x})


@pytest.mark.parametrize("plan", [DATA, STAGES], ids=str)
def test_state_dicts_of_one_device_are_loaded(ranks: RankPool, plan: Manual) -> None:
    ranks.run(load_plain, plan)


def average(rank: int, plan: Manual) -> list[str]:
    """A moving average beside a model that trains, by which it evaluates, and a copy that trains on; why others cannot be copied."""
    model, x = start()
    reference = copy.deepcopy(model)
    made = parallel(model, plan)
    texts = [failure(PlanError, copy.deepcopy, made), failure(PlanError, torch.save, made, io.BytesIO())]
    made(x)
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for one in (made, reference)]

    def train(*models: nn.Module) -> None:
        for one in models:
            optimizer = torch.optim.Rprop(one.parameters(), lr=1e-2)  # needs whole parameters, which those of a copy have to be known for
            for _ in range(2):
                one(x).backward()
                largest = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None], torch.inf)
                norms.append(torch.stack((largest, nn.utils.clip_grad_norm_(one.parameters(), 0.1))))
                assert not isinstance(norms[-1], DTensor), "whole, as on one device"
                optimizer.step()
                optimizer.zero_grad()
                for averaged, of in zip(averages, (made, reference), strict=True):
                    if one is of:
                        averaged.update_parameters(one)

    norms = list[torch.Tensor]()
    train(made, reference)
    assert_like(made, reference)
    assert_like(averages[0].module, averages[1].module)
    with torch.no_grad():
        torch.testing.assert_close(averages[0](x), averages[1](x), rtol=1e-4, atol=1e-5)
    copies = [copy.deepcopy(one) for one in (made, reference)]
    assert cast(Any, copies[0])._autopar.number != cast(Any, made)._autopar.number
    train(*copies)
    assert_like(copies[0], copies[1])
    assert_like(made, reference)
    torch.testing.assert_close(norms[:2] + norms[4:6], norms[2:4] + norms[6:], rtol=1e-4, atol=1e-5)
    assert "Normed cannot be pickled" in failure(PlanError, torch.save, copies[0], io.BytesIO())
    return texts


def dropped(rank: int) -> list[torch.Tensor]:
    """Which elements are kept: by a model, by two copies of it, by the model again."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    made = parallel(model, Manual(dp=4))
    made(x)
    return [one(x) != 0 for one in (made, copy.deepcopy(made), copy.deepcopy(made), made)]


def test_a_copy_draws_numbers_of_its_own(ranks: RankPool) -> None:
    of_ranks = ranks.run(dropped)
    for kept in of_ranks:
        assert all(torch.equal(own, first) for own, first in zip(kept, of_ranks[0], strict=True))
        for i, own in enumerate(kept):
            assert all(0.3 < float((own == other).float().mean()) < 0.7 for other in kept[:i])


@pytest.mark.parametrize("plan", [DATA, STAGES], ids=str)
def test_copies_train_and_average(ranks: RankPool, plan: Manual) -> None:
    for copied, pickled in ranks.run(average, plan):
        assert copied.startswith("there is no plan yet, and a copy would be stored otherwise")
        assert pickled.startswith("a ParallelNormed cannot be pickled")
        assert "autopar.save" in pickled
