"""A decision -> its stages: those cuts that may be the fastest are played, and memory is counted for the one that is."""

from __future__ import annotations

import math
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

EVEN = 1.1
"""How much longer than in the most even cut the longest stage may take in one that is even enough for ranks that share cores."""
UNSURE = 0.1
"""What a step is shorter by where they take one that is not: uneven stages of four models took 1 % to 25 % longer there than even ones that
were to take 3 % to 6 % more (four processes on two cores, 2026-11-29)."""


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
        first, is_again = self._costs[0], set(self.levels) != {"none"}
        self._blocks = blocks_of(self.decision.problem, first.order, first.crossing_bytes()) if is_again else {}

    def fastest(self, taken: Sequence[np.ndarray] = ()) -> Staged:
        """The stages of the shortest step; ``taken`` is that of `cuts_by_time`.

        Raises:
            PlanError: the model has no such stages.
        """
        found = cuts(self._costs, self.shape, self.places, taken)
        return self.staged(found[self._fastest_of(found)] if len(found) > 1 else found[0])

    def _fastest_of(self, found: Sequence[Mapping[fx.Node, int]]) -> int:
        """Number of the cut of the shortest step; where ranks share cores those that are not even count as `UNSURE` says."""
        degree, sharing = self.shape.pipeline.degree, self.places.inside.device.sharing
        taken_s, longest_s = list[float](), list[float]()
        for stage_of in found:
            prices = self._prices(self._costs, stage_of, self._again(stage_of))
            taken_s.append(simulate(self._schedule, prices, sharing).step_time_s)
            longest_s.append(max(sum(price.forward_s + price.backward_s for price in prices[rank::degree]) for rank in range(degree)))
        most_s = EVEN * min(longest_s) if sharing > 1 else math.inf
        return min(range(len(found)), key=lambda i: taken_s[i] * (1 + UNSURE * (longest_s[i] > most_s)))

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

    def _again(self, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, str]:
        return made_again(self.decision.problem, stage_of, self._blocks, self.levels, self.shape.pipeline.degree)

    def _prices(
        self, costs: Sequence[Costs], stage_of: Mapping[fx.Node, int], again: Mapping[fx.Node, str], memory: Sequence[MemoryUse] = ()
    ) -> list[StagePrice]:
        stages = self.shape.pipeline.stages
        return stage_prices(costs, stage_of, stages, self.places.links, memory, self._live, again, in_two=self._schedule.is_in_two)
