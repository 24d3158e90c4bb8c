"""Prices far outside of what was measured are said to be."""

from __future__ import annotations

import pytest

from autopar import Manual, api
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.solve.range import FAR
from tests import models


def notes(side: int, num_bytes: float) -> tuple[str, ...]:
    """Of a plan whose linears multiply 8 x 32 x 64 and whose gradients are reduced, on a machine that was measured up to these sizes."""
    device = DeviceProfile("toy", 2**30, (MatmulSample(side, side, side, "float32", 1e9),), 1e9, 1e-6, "made up")
    link = LinkProfile(1e-6, 1e9, measured={"all_reduce": ((1.0, 1e-6), (num_bytes, 1e-3))}, group_size=2)
    model, batch = models.mlp(layers=1, batch=16)
    return api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(device, (link, link))).notes


def test_within_the_range_there_is_nothing_to_say() -> None:
    assert notes(32, 32 * 64 * 4) == ()
    assert notes(64, 1e9) == ()


def test_far_outside_is_said() -> None:
    (matmul,) = notes(8, 1e9)
    assert matmul == "matmuls of 32.8 kflop (torch.float32) are priced at the rate of the largest sample, 1.02 kflop"
    (collective,) = notes(32, 512.0)
    assert collective == "all_reduce on axis dp of 8 KiB is priced by the model alone: measured up to 512 B"


@pytest.mark.parametrize("factor, count", [(0.9, 0), (1.1, 1)])
def test_far_is_a_factor(factor: float, count: int) -> None:
    assert len(notes(32, 32 * 64 * 4 / (factor * FAR))) == count
