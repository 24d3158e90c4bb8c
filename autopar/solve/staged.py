"""One shape as it was decided: stages, memory, prices and the played step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.cost.simulate import StagePrice, Timeline
from autopar.schedule.held import Sent, peak_bytes
from autopar.solve.decide import PLAN_GAP, Decision
from autopar.solve.footprint import MemoryUse
from autopar.solve.inter import Costs, homes_of
from autopar.solve.liveness import Staging
from autopar.solve.places import MemoryLimit
from autopar.solve.shapes import Shape
from autopar.solve.tables import held_by


@dataclass(frozen=True, slots=True)
class Staged:
    """A decision with its stages.

    Args:
        shape: what was decided for.
        decision: the sharding of every op.
        stage_of: stage of every op that has one.
        costs: at every position of the pipeline; one if they are alike.
        blocks: block of every op that is in one.
        again: ops that the backward computes again, with the level.
        levels: how much every stage computes again.
        memory: of every stage.
        prices: of every stage, as they are simulated.
        sharing: how many times as fast a rank computes alone.
        live: for each stage the micro-batches in flight, at most.
        timeline: the simulated step.
        step_time_s: predicted.
    """

    shape: Shape
    decision: Decision
    stage_of: Mapping[fx.Node, int]
    costs: tuple[Costs, ...]
    blocks: Mapping[fx.Node, int]
    again: Mapping[fx.Node, str]
    levels: tuple[str, ...]
    memory: tuple[MemoryUse, ...]
    prices: tuple[StagePrice, ...]
    sharing: float
    live: tuple[int, ...]
    timeline: Timeline
    step_time_s: float

    def is_better_than(self, other: Staged) -> bool:
        """By the step time; where that is the same as far as the solver can tell, by memory."""
        if abs(self.step_time_s - other.step_time_s) > PLAN_GAP * other.step_time_s:
            return self.step_time_s < other.step_time_s
        return max(self.rank_bytes) < max(other.rank_bytes)

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Peak of every rank of the pipeline, with all its stages."""
        held, sent = [use.held for use in self.memory], [Sent(p.send_forward_num_bytes, p.send_backward_num_bytes) for p in self.prices]
        return peak_bytes(held_by(self.shape.pipeline, any(self.live)), held, sent)

    @property
    def host_bytes(self) -> tuple[float, ...]:
        """What every rank of the pipeline has in the memory of the host, with all its stages."""
        degree = self.shape.pipeline.degree
        return tuple(sum(use.host for use in self.memory[position::degree]) for position in range(degree))

    @property
    def bubble_fraction(self) -> float:
        return self.timeline.bubble_fraction if self.shape.pipeline.stages * self.shape.pipeline.microbatches > 1 else 0.0

    def fits(self, limit: MemoryLimit) -> bool:
        return limit.holds(self.rank_bytes)

    def taken(self, limit: MemoryLimit, *, keeps: bool) -> list[np.ndarray]:
        """For each stage the part of the memory of its own rank that every op would take in it, in order; ``keeps``: with what the backward
        needs, and not computed again."""
        by_op, pipeline = self.decision.prices.footprint.by_op(self.decision.solution.variants), self.shape.pipeline
        state, kept = np.array([by_op[node] for node in self.costs[0].order]).T
        chunks = pipeline.stages // pipeline.degree
        each = [state + live * kept * keeps for live in self.live]
        return [chunks * num_bytes / limit.positions[stage % pipeline.degree] for stage, num_bytes in enumerate(each)]

    def costs_of(self, stage: int) -> Costs:
        return self.costs[stage % len(self.costs)]

    def staging(self) -> Staging:
        schedule = self.shape.schedule(training=any(self.live))
        return Staging.of(schedule, self.stage_of, {node: self.blocks[node] for node in self.again})

    def homes(self) -> dict[fx.Node, tuple[int, ...]]:
        """The stages that use each parameter."""
        return homes_of(self.decision.problem, self.stage_of)
