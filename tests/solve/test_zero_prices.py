"""Of several ZeRO axes, what the outer one moves is still split by the inner ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from tests.models import mlp


@pytest.mark.parametrize("outer, inner, split", [("zero3", "zero3", 2), ("replicated", "zero2", 2), ("zero3", "replicated", 1)])
def test_bytes_of_the_outer_axis(outer: str, inner: str, split: int) -> None:
    """Hierarchical gathering: the buffer that crosses the outer link is a part of what crosses the inner one."""
    example = mlp()
    name = next(n for n, p in example.model.named_parameters() if p.dim() == 2)
    pins = [autopar.pin(name, outer=outer, inner=inner), autopar.pin("*linear*", outer="b0", inner="b0")]
    plan = autopar.plan(example.model, autopar.Mesh(("outer", "inner"), (2, 2)), example.batch, constraints=pins)
    whole = 4
    for size in plan.parameter(name).shape:
        whole *= size
    moved = {(c.axis, c.phase, c.kind): c.num_bytes for c in plan.collectives if c.value == name}
    outer_bytes = {num_bytes for (axis, _, _), num_bytes in moved.items() if axis == "outer"}
    assert outer_bytes == {whole // split}, moved
    if inner != "replicated":
        assert {num_bytes for (axis, _, _), num_bytes in moved.items() if axis == "inner"} == {whole}


class Alike(nn.Module):
    """A vector and a matrix of as many elements, neither of which the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.matrix = nn.Parameter(torch.ones(64 * 64)), nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((x * self.vector).reshape(-1, 64) + x.reshape(-1, 64) @ self.matrix).square().mean()
        return loss


@pytest.mark.parametrize("level", [1, 2, 3])
def test_vectors_share_a_collective_and_matrices_of_as_many_bytes_have_their_own(level: int) -> None:
    """A part of 4 MiB is carried, where the latency of a collective is most of what a matrix takes. The step, in which nothing hides, has
    both at what they take."""
    device = DeviceProfile("toy", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e15, 0.0, "slices its input in no time")
    profile = MachineProfile(device, 2 * (LinkProfile(1e-4, 1e9, overlap=0.0),))
    plan = autopar.plan(Alike(), 4, (torch.ones(64, 64 * 64),), plan=Manual(dp=4, zero=level), profile=profile)
    times = {name: [c.time_s for c in plan.collectives if c.value == name] for name in ("vector", "matrix")}
    assert len(times["vector"]) == len(times["matrix"]) == 2
    assert 3 * max(times["vector"]) < min(times["matrix"])
    assert plan.prediction.exposed_comm_s == pytest.approx(sum(c.time_s * c.count for c in plan.collectives), rel=1e-3)
