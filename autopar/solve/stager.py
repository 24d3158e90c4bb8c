"""A decision -> its stages: those cuts that may be the fastest are played, and memory is counted for the one that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.cost.simulate import StagePrice, simulate, step_times_s
from autopar.errors import PlanError
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_live
from autopar.solve.cuts import cuts
from autopar.solve.decide import Decision
from autopar.solve.footprint import MemoryUse
from autopar.solve.inter import Costs, stage_prices
from autopar.solve.liveness import Staging
from autopar.solve.places import MemoryLimit, Places
from autopar.solve.recompute import blocks_of, made_again
from autopar.solve.shapes import Shape
from autopar.solve.staged import Staged
from autopar.solve.tables import table_of

MAX_ESTIMATES = 4
"""How often what ops take of the memory is estimated anew."""
EVEN = 1.1
"""How much longer than in the most even cut a rank may take in one that is even enough: for ranks that share cores, and to fit."""
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
        self._schedule = table_of(self.shape.pipeline, self.training)
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
        return self.staged(found[int(np.argmin(self._scores_s(found)))] if len(found) > 1 else found[0])

    def within(self, taken: Sequence[np.ndarray]) -> Staged | None:
        """The fastest stages that keep to the limit by an estimate of what they take, which is raised where it is too low; None if none are
        found that fit. ``taken`` is that of `cuts_by_time`."""
        for _ in range(MAX_ESTIMATES):
            try:
                staged = self.fastest(taken)
            except PlanError:
                return None
            if staged.fits(self.limit):
                return staged
            more = [max(1.0, num_bytes / most) for num_bytes, most in zip(staged.rank_bytes, self.limit.positions, strict=True)]
            taken = [part * more[stage % len(more)] for stage, part in enumerate(taken)]
        return None

    def leanest(self) -> Staged:
        """Of the stages that are even enough those that are the least over the limit; errors are those of `fastest`."""
        found = cuts(self._costs, self.shape, self.places)
        longest_s = [self._longest_s(self._priced(stage_of)) for stage_of in found]
        even = [self.staged(cut) for cut, taken_s in zip(found, longest_s, strict=True) if taken_s <= EVEN * min(longest_s)]
        return min(even, key=lambda staged: sum(max(0.0, a - b) for a, b in zip(staged.rank_bytes, self.limit.positions, strict=True)))

    def _scores_s(self, found: Sequence[Mapping[fx.Node, int]]) -> list[float]:
        """Seconds of a step, by cut; where ranks share cores those of cuts that are not even enough count as `UNSURE` says."""
        sharing, prices = self.places.inside.device.sharing, [self._priced(stage_of) for stage_of in found]
        taken_s = step_times_s(self._schedule, prices, sharing)
        longest_s = [self._longest_s(own) for own in prices]
        most_s = EVEN * min(longest_s) if sharing > 1 else math.inf
        return [step_s * (1 + UNSURE * (longest > most_s)) for step_s, longest in zip(taken_s, longest_s, strict=True)]

    def _priced(self, stage_of: Mapping[fx.Node, int]) -> list[StagePrice]:
        return self._prices(self._costs, stage_of, self._again(stage_of))

    def _longest_s(self, prices: Sequence[StagePrice]) -> float:
        """What a micro-batch takes on the rank that it takes longest on."""
        degree = self.shape.pipeline.degree
        return max(sum(price.forward_s + price.backward_s for price in prices[rank::degree]) for rank in range(degree))

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
