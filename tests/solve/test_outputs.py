"""What the model gives back is gathered, and costs something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.cluster import Cluster
from autopar.cost.collectives import collective_time_s
from autopar.cost.machine import LinkProfile
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.schedule.actions import Action, Kind
from autopar.show.compare import plan_row
from autopar.show.pictures import timeline_svg
from autopar.show.text import plan_text
from autopar.show.timeline import play, predicted_processes
from autopar.solve import parts
from autopar.solve.inter import over_stages_s
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


def test_outputs_of_a_stage_are_broadcast_to_the_others() -> None:
    """Logits by the last, a loss alone in little but the latency; a ring of four passes on S bytes in three steps and S / B."""
    example, cluster = models.gpt2(layers=4, batch=8), Cluster(1, 4, "h100")
    config: Any = example.model.config
    link = cluster.with_mesh(Mesh.of((4, 1))).profile.links[0]
    for outputs in ("whole", "loss"):
        plan = autopar.plan(example.model, cluster, example.batch, plan=autopar.Manual(pp=4, microbatches=4), outputs=outputs)
        logits = example.batch["input_ids"].numel() * config.vocab_size * 4 * (outputs == "whole")
        expected_s = float(collective_time_s("broadcast", logits + 4, 4, link))
        assert [stage.output_s for stage in plan.stages] == [0.0, 0.0, 0.0, pytest.approx(expected_s)]
        assert plan_row("mine", plan).exposed_by_kind_s["broadcast"] == pytest.approx(expected_s)
        without = play(replace(plan, stages=tuple(replace(stage, output_s=0.0) for stage in plan.stages)))
        assert play(plan).step_time_s == pytest.approx(plan.prediction.step_time_s)
        assert plan.prediction.step_time_s - without.step_time_s == pytest.approx(expected_s)


def test_without_a_pipeline_nothing_is_broadcast() -> None:
    example = models.gpt2(layers=1, batch=8)
    plan = autopar.plan(example.model, Cluster(1, 2, "h100"), example.batch, plan=autopar.Manual(dp=2))
    assert plan.stages[0].output_s == 0.0
    assert "broadcast" not in plan_row("mine", plan).exposed_by_kind_s


def test_the_slowest_hop_bounds_a_broadcast_also_in_sketches() -> None:
    fast, slow = LinkProfile(1e-6, 1e10), LinkProfile(1e-5, 1e8)
    line = (fast, slow, fast, fast)
    expected_s = float(collective_time_s("broadcast", 1e6, 4, slow))
    assert over_stages_s("broadcast", 1e6, len(line), line) == expected_s
    assert over_stages_s("broadcast", 1e6, 1, ()) == over_stages_s("broadcast", 0.0, len(line), line) == 0.0
    amounts = dict.fromkeys((*parts.TIMES, "covered_s", "covered_in_two_s"), 0.0) | {"output_num_bytes": 1e6}
    assert parts._price(amounts, 0.0, 3, line, Pipeline(4, 4, 8), in_two=False).output_s == expected_s


class Normed(nn.Module):
    """Batch statistics, and an output beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.norm: nn.Module = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.last(self.norm(self.first(x)))
        return (found - y).square().mean(), found


def test_broadcasts_of_outputs_are_shown() -> None:
    """On the timeline of all ranks before they update, and in the table of collectives, each with its part of the time."""
    batch = (torch.randn(8, 16), torch.randn(8, 8))
    config, cluster = autopar.Manual(pp=2, microbatches=1), Cluster(1, 2, "h100")
    model = Normed()
    model.norm = nn.Identity()  # whose statistics would be outputs too
    plan = autopar.plan(model, cluster, batch, plan=config)
    given = [c for c in plan.collectives if c.kind == "broadcast"]
    assert [(c.axis, c.num_bytes) for c in given] == [("pp", 4), ("pp", 8 * 8 * 4)]
    assert sum(c.time_s for c in given) == pytest.approx(plan.stages[1].output_s)
    assert "axis pp: 2 collectives, 260 B, " in plan_text(plan)
    loss = autopar.plan(model, cluster, batch, plan=config, outputs="loss")
    saved_s = plan.stages[1].output_s - loss.stages[1].output_s
    assert plan.prediction.blocking_comm_s - loss.prediction.blocking_comm_s == pytest.approx(saved_s)
    events = play(plan).events
    sent = [event for event in events if event.action == Action(1, Kind.OUTPUT)]
    assert [event.rank for event in sent] == [0, 1]
    assert [event.start_s for event in events if event.action is None] == [event.end_s for event in sent]
    assert timeline_svg(plan).count(">pp</text>") == 2
    shown = [each for each in predicted_processes(plan)[0].slices if each.lane == "communication pp"]
    assert [each.name for each in shown] == [f"broadcast {c.value}" for c in given]


def test_outputs_of_averaged_micro_batches_are_those_of_the_batch() -> None:
    batch, cluster = (torch.randn(8, 16), torch.randn(8, 8)), Cluster(1, 2, "h100")
    taken = []
    for count in (1, 2, 4):
        config = autopar.Manual(pp=2, microbatches=count)
        plan = autopar.plan(Normed(), cluster, batch, plan=config, average_microbatches=True)
        assert plan.pipeline.is_average is (count > 1)
        taken.append([stage.output_s for stage in plan.stages])
    assert taken[0] == taken[1] == taken[2]
    assert taken[0][1] > 0
