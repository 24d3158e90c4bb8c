"""Memory of a step on four real processes under every level of ZeRO: as much as predicted, and no longer than `autopar.storage` says."""

from __future__ import annotations

import gc
from importlib.util import module_from_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.passes.overlap import IN_FLIGHT, REDUCE_SCATTER
from tests.marks import exhaustive
from tests.pool import RankPool

pytestmark = pytest.mark.slow

MEASURE = Path(__file__).parents[2] / "benchmarks" / "cluster" / "memory.py"
LAYERS, WIDTH, ROWS = 8, 512, 32
WEIGHT = WIDTH * WIDTH * 4
DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
MACHINE = MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9),) * 2)


class Layers(nn.Module):
    """Linears that are alike, and activations that are small beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def measure() -> ModuleType:
    spec = spec_from_file_location("measure", MEASURE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(rank: int, wanted: Manual) -> tuple[int, int, int]:
    """The most bytes of a step, predicted and beside what was there before the model; and of blocks as large as a weight."""
    memory = measure()
    gc.collect()
    before, x = memory.held_bytes(), torch.randn(ROWS, WIDTH)
    model = autopar.parallelize(Layers(), 4, plan=wanted, profile=MACHINE, example_batch=(x,))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    gc.collect()
    held = memory.held_bytes() - before
    changes = [change.num_bytes for change in memory.changes_of(step)]
    peak = held + max(accumulate(changes, initial=0))
    whole = max(accumulate((change for change in changes if abs(change) == WEIGHT), initial=0))
    return model._autopar.plan.prediction.peak_memory_bytes[0], peak, whole


UPDATE, GLOO = 3, 3
"""Weights that there are beside: what AdamW takes for itself (one of them is that of the weight before), what gloo gathers into, and what
its two threads may hold a little longer."""
REDUCED = IN_FLIGHT[REDUCE_SCATTER] + 1


@pytest.mark.parametrize(
    "zero, least, most",
    [
        pytest.param(0, LAYERS, LAYERS + UPDATE, marks=exhaustive),  # whole gradients
        (1, 2 * LAYERS, 2 * LAYERS + GLOO),  # whole gradients beside copies, until the end
        pytest.param(2, LAYERS, LAYERS + REDUCED, marks=exhaustive),  # copies, and the gradients on their way
        pytest.param(3, 2, 2 + GLOO + REDUCED, marks=exhaustive),  # the gradients on their way, and copies in use, ahead and under way
    ],
)
def test_peak_and_lifetimes(ranks: RankPool, zero: int, least: int, most: int) -> None:
    for predicted, peak, whole in ranks.run(train, Manual(dp=4, zero=zero, microbatches=2)):
        assert -2 * WEIGHT <= peak - predicted <= (3 if zero != 1 else 3 + LAYERS / 4) * WEIGHT  # whole gradients beside their parts
        assert least * WEIGHT <= whole <= most * WEIGHT
