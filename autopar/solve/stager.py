"""A decision -> its stages: those cuts that may be the fastest are played, and memory is counted for the one that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.cost.simulate import StagePrice, simulate
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_live
from autopar.schedule.lower import lower
from autopar.solve.cuts import cuts
from autopar.solve.decide import Decision
from autopar.solve.footprint import MemoryUse
from autopar.solve.inter import Costs, stage_prices
from autopar.solve.liveness import Staging
from autopar.solve.places import MemoryLimit, Places
from autopar.solve.recompute import blocks_of, made_again
from autopar.solve.shapes import Shape
from autopar.solve.staged import Staged


@dataclass(slots=True)
class Stager:
    """Makes stages of one decision.

    Args:
        shape: what was decided for.
        decision: the sharding of every op.
        levels: how much every stage computes again.
        places: of the shape.
        limit: of memory, of which stages have shares.
        training: whether there is a backward.
    """

    shape: Shape
    decision: Decision
    levels: tuple[str, ...]
    places: Places
    limit: MemoryLimit
    training: bool
    _schedule: Schedule = field(init=False)
    _live: tuple[int, ...] = field(init=False)
    _costs: tuple[Costs, ...] = field(init=False)
    _blocks: Mapping[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self._schedule = lower(self.shape.schedule(training=self.training))
        self._live = peak_live(self._schedule)
        self._costs = self.places.costs(self.decision.prices, self.decision.solution.variants)
        order, crossing = self._costs[0].order, self._costs[0].crossing_bytes()
        self._blocks = blocks_of(self.decision.problem, order, crossing) if set(self.levels) != {"none"} else {}

    def fastest(self, taken: Sequence[np.ndarray] = ()) -> Staged:
        """The stages of the shortest step; ``taken`` is that of `cuts_by_time`.

        Raises:
            PlanError: the model has no such stages.
        """
        found = cuts(self._costs, self.shape, self.places, taken)
        return self.staged(min(found, key=self._step_time_s) if len(found) > 1 else found[0])

    def staged(self, stage_of: Mapping[fx.Node, int]) -> Staged:
        """These stages, with their memory, and the schedule played."""
        decision, variants, again = self.decision, self.decision.solution.variants, self._again(stage_of)
        shares = self.limit.shares(self.shape.pipeline.stages)
        staging = replace(Staging.of(self._schedule, stage_of, {node: self._blocks[node] for node in again}), shares=shares)
        decision, costs = replace(decision, prices=decision.prices.staged(staging)), self._costs
        memory = tuple(decision.prices.footprint.uses(variants))
        if decision.prices.pricer.offload.activations:  # fewer are kept where some are made again
            decision = replace(decision, solution=replace(decision.solution, objective=decision.prices.objective(variants)))
            costs = self.places.costs(decision.prices, variants)
        prices, sharing = self._prices(costs, stage_of, again, memory), self.places.inside.device.sharing
        timeline = simulate(self._schedule, prices, sharing)
        return Staged(
            shape=self.shape,
            decision=decision,
            stage_of=stage_of,
            costs=costs,
            blocks=self._blocks,
            again=again,
            levels=self.levels,
            memory=memory,
            prices=tuple(prices),
            sharing=sharing,
            live=self._live,
            timeline=timeline,
            step_time_s=timeline.step_time_s,
        )

    def _step_time_s(self, stage_of: Mapping[fx.Node, int]) -> float:
        prices = self._prices(self._costs, stage_of, self._again(stage_of))
        return simulate(self._schedule, prices, self.places.inside.device.sharing).step_time_s

    def _again(self, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, str]:
        return made_again(self.decision.problem, stage_of, self._blocks, self.levels, self.shape.pipeline.degree)

    def _prices(
        self, costs: Sequence[Costs], stage_of: Mapping[fx.Node, int], again: Mapping[fx.Node, str], memory: Sequence[MemoryUse] = ()
    ) -> list[StagePrice]:
        stages = self.shape.pipeline.stages
        return stage_prices(costs, stage_of, stages, self.places.links, memory, self._live, again, in_two=self._schedule.is_in_two)
