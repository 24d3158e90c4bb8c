"""Every optimizer of torch on shards does what it does on one device, or says why it cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import PlanError
from tests.marks import only
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK, batches, build, whole

pytestmark = pytest.mark.slow

PLAN = Manual(dp=2, tp=2, zero=3)
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "eps": 1e-4, "foreach": True, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "eps": 1e-4, "fused": True},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 1e-2, "eps": 1e-4},
    "NAdam": {"lr": 1e-2, "eps": 1e-4},
    "RAdam": {"lr": 1e-2, "eps": 1e-4},
    "ASGD": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "eps": 1e-3},
    "Muon": {"lr": 1e-2},
}


def parallel(model: nn.Module) -> nn.Module:
    profile = MachineProfile(DEVICE, (LINK,) * 2)
    made: nn.Module = autopar.parallelize(model, 4, plan=PLAN, profile=profile, example_batch=batches(1)[0])
    return made


def steps(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Parameters after three steps; Muon takes matrices alone."""
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    optimizer = getattr(torch.optim, name)(parameters, **KINDS[name])
    for batch in batches(3):
        model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad()
    return whole(model)


def differ(rank: int, name: str) -> None:
    reference = build("gpt2").model
    model = parallel(copy.deepcopy(reference))
    tolerance = 2e-3 if name == "Muon" else 1e-6  # its iteration is in bfloat16; losses of transformers are in float32
    torch.testing.assert_close(steps(model, name), steps(reference, name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", only(["SGD", "Muon"], KINDS))
def test_steps_are_those_of_one_device(ranks: RankPool, name: str) -> None:
    ranks.run(differ, name)


def refuse(rank: int) -> list[str]:
    model = parallel(build("gpt2").model)
    before, texts = whole(model), []
    loss = model(**batches(1)[0]).loss
    loss.backward()
    for kind in (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.LBFGS):
        optimizer: Any = kind(model.parameters())
        with pytest.raises(PlanError) as caught:
            optimizer.step(lambda: loss)
        texts.append(str(caught.value))
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
    alone = nn.Linear(2, 2)
    alone(torch.ones(1, 2)).sum().backward()
    torch.optim.Rprop(alone.parameters()).step()
    return texts


def test_those_that_need_whole_tensors_say_so(ranks: RankPool) -> None:
    for adafactor, rprop, lbfgs in ranks.run(refuse):
        assert adafactor.startswith("Adafactor needs norms of whole matrices, and a parameter of shape (64, 32) is stored as (")
        assert rprop.startswith("Rprop needs whole parameters")
        assert lbfgs.startswith("LBFGS needs all gradients in one place")
