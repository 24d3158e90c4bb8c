"""What the model gives back is gathered, and costs something."""

from __future__ import annotations

import autopar
from autopar.cost.cluster import Cluster
from tests import models


def test_outputs_that_every_rank_wants_whole_are_paid_for_every_micro_batch() -> None:
    """Logits gathered over data-parallel ranks: as much of the step in two micro-batches as in one."""
    example = models.gpt2(layers=1, batch=8)
    gathered = {}
    for count in (1, 2):
        plans = [
            autopar.plan(
                example.model, Cluster(1, 2, "h100"), example.batch, plan=autopar.Manual(dp=2, microbatches=count), outputs=outputs
            )
            for outputs in ("whole", "loss")
        ]
        whole, loss = (plan.prediction.step_time_s for plan in plans)
        gathers = [c for c in plans[0].collectives if c.kind == "all_gather"]
        assert sum(c.count for c in gathers) == count
        gathered[count] = sum(c.count * c.time_s for c in gathers)
        assert gathered[count] <= whole - loss < 2 * gathered[count]
    assert gathered[2] >= gathered[1] > 0
