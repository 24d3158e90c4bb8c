"""Models that change their buffers: batch statistics are those of the whole batch, on every plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Manual
from autopar.errors import MicrobatchError
from tests import models

PLANS = {
    "auto": None,
    "dp": Manual(dp=4),
    "tp": Manual(tp=4),
    "dp_tp": Manual(dp=2, tp=2, zero=1),
    "pp": Manual(pp=2, dp=2, microbatches=1),
}


@pytest.mark.parametrize("plan", PLANS)
def test_statistics_equal_the_model(plan: str) -> None:
    model, batch = models.batch_norm()
    found = autopar.verify(model, 4, batch, plan=PLANS[plan])
    assert found.output_error < 1e-5  # the loss, and what the buffers become
    assert found.grad_error < max(4 * found.reference_error, 1e-6)


def test_the_batch_stays_whole_and_the_plan_says_why() -> None:
    model, batch = models.batch_norm()
    plan = autopar.plan(model, Cluster(1, 4), batch)
    assert plan.pipeline.microbatches == 1
    assert "one micro-batch: the batch cannot be split into micro-batches: aten._native_batch_norm" in "\n".join(plan.notes)
    with pytest.raises(MicrobatchError, match="needs all samples at once"):
        autopar.verify(model, 4, batch, plan=Manual(pp=2, dp=2, microbatches=2))


class Instances(nn.Module):
    """Norms of every channel of every sample, which keep the means of their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x)).pow(3).mean()
        return result


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("plan", [Manual(dp=2), Manual(tp=2)], ids=str)
def test_statistics_of_instances_equal_the_model(plan: Manual, is_training: bool) -> None:
    torch.manual_seed(0)
    model, batch = Instances().train(is_training), (torch.randn(4, 4, 6),)
    found = autopar.verify(model, 2, batch, plan=plan)
    assert max(found.output_error, found.grad_error) < 1e-5, str(found)
    assert len(autopar.plan(model, 2, batch, plan=plan).graph.graph.find_nodes(op="output")[0].args[0]) == (3 if is_training else 1)
