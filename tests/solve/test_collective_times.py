"""The times of a plan's collectives are those that are in the price of its step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.passes.buckets import SMALL_NUM_BYTES
from tests.cost.test_pricing import DEVICE


@pytest.mark.parametrize("crowded_s", [0.0, 2e-3])
def test_they_add_up_to_what_the_step_pays_where_nothing_hides(crowded_s: float) -> None:
    """Small gradients travel together, and what is waited for takes longer in a crowd."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    link = LinkProfile(alpha_s=1e-3, bandwidth=1e9, overlap=0.0, crowded_s=crowded_s)
    batch = torch.randn(16, 256), torch.randint(8, (16,))
    plan = autopar.plan(
        model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(DEVICE, (link, link)), loss_fn=nn.functional.cross_entropy
    )
    (stage,) = plan.stages
    listed = {phase: sum(c.time_s * c.count for c in plan.collectives if c.phase == phase) for phase in ("forward", "backward")}
    assert listed["forward"] == pytest.approx(stage.forward_comm_s)
    assert listed["backward"] == pytest.approx(stage.backward_comm_s, rel=5e-3)  # which has slices too, that the device makes
    small = [c for c in plan.collectives if c.phase == "backward" and c.num_bytes < SMALL_NUM_BYTES]
    assert small
    assert all(c.time_s < link.alpha_s for c in small)
