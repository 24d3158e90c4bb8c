"""What a shape takes, told by a few blocks of a deep model: the first with what is before, one in the middle, the last with what is after.

The program (`solve.intra`) shards the folded graph (`solve.fold`) on the mesh of a stage. Its ops in three parts give what a block takes,
and what the ends of the model take more; any number of blocks on a stage is a sum of these:

    stage of n blocks = n * block (+ first - its blocks) (+ last - its blocks)

Blocks go to the stages one by one, always to the one that takes least so far. The simulator plays the first rounds of the schedule; every
micro-batch more takes what the longest rank computes. Where a rank does not fit the memory limit, its stages compute more again, and where
that is not enough the program is solved under a limit. So the time of a shape hardly depends on the depth of the model nor on the number
of micro-batches. The best shape is then made whole from what was decided for the folded graph (`Search.take`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from autopar.cost.collectives import send_time_s
from autopar.cost.machine import LinkProfile
from autopar.cost.simulate import StagePrice, simulate
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Alternative, Pipeline
from autopar.schedule.actions import Kind, Schedule
from autopar.schedule.check import peak_kept, peak_live
from autopar.schedule.lower import lower
from autopar.solve.blocks import repeated_runs
from autopar.solve.decide import Decision
from autopar.solve.fold import KEPT, Folded
from autopar.solve.inter import Costs
from autopar.solve.intra import TOLERANCE
from autopar.solve.liveness import Staging
from autopar.solve.recompute import LEVELS, blocks_of, borders, made_again
from autopar.solve.search import Search, machine_of_stage
from autopar.solve.shapes import Shape, plan_schedule
from autopar.units import bytes_text, seconds_text

PATIENCE = 2
"""One number may be slow only because its samples are not shared evenly by the ranks."""
FINALISTS = 3
"""Shapes for which more is tried."""
ROUNDS = 2
"""Micro-batches that are played, for each rank of the pipeline."""
TIMES = ("forward_s", "backward_s", "input_s", "weight_s", "gather_s", "reduce_s", "covered_s", "update_s", "core_s")
"""Of a `StagePrice`, what adds up over the ops of a stage."""

Amounts = dict[str, float]
"""Seconds and bytes by name: `TIMES`, ``compute_s`` without communication, ``static`` and ``kept`` bytes."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a shape is thought to take.

    Args:
        shape: the shape.
        step_time_s: of a step.
        bubble_fraction: idle share of all ranks.
        busy_s: of a rank, in the mean.
        peak_bytes: of every rank of the pipeline.
        levels: how much each stage computes again.
        decision: for the folded graph.
    """

    shape: Shape
    step_time_s: float
    bubble_fraction: float
    busy_s: float
    peak_bytes: tuple[float, ...]
    levels: tuple[str, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Parts:
    """A decision for the folded graph, by blocks.

    Args:
        blocks: of the whole model.
        block: amounts of one in the middle.
        first, last: what the ends of the model have more.
        transient: bytes that come and go, at most.
        sent: bytes from block to block.
    """

    blocks: int
    block: Amounts
    first: Amounts
    last: Amounts
    transient: float
    sent: float

    def of(self, stage: int, counts: Sequence[int]) -> Amounts:
        """Amounts of a stage."""
        ends = [end for end, at in ((self.first, 0), (self.last, len(counts) - 1)) if at == stage]
        return {name: counts[stage] * one + sum(end[name] for end in ends) for name, one in self.block.items()}


@dataclass(slots=True)
class Outline:
    """Sketches shapes.

    Args:
        folded: the graph in short.
        search: what is searched for; it gets what was tried.
    """

    folded: Folded
    search: Search
    _few: Search = field(init=False)
    _parts: dict[tuple[int, str, bool], tuple[Decision, _Parts]] = field(default_factory=dict)
    _works: dict[tuple[Mesh, int], list[tuple[int, float]]] = field(default_factory=dict)
    _alone: Amounts = field(default_factory=dict)
    _under_limit: dict[object, Decision | InfeasibleError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folded = self.folded
        self._few = self.search.alike(folded.normal, folded.repeats(KEPT + folded.removed))

    def search_shapes(self, shapes: Iterable[Shape]) -> list[Sketch]:
        """Shapes that fit, the fastest first.

        First what each takes without a limit of memory, which is a bound; on a mesh more micro-batches are tried until `PATIENCE` numbers
        of them fit and were no faster with any schedule, since bubbles get smaller and ops less efficient. Then, in the order of these
        bounds, with as much computed again as the limit asks for. For the best `FINALISTS` another sharding under the limit is tried in
        its place.
        """
        found: list[Sketch] = []
        for bound in sorted(self.bounds(shapes), key=lambda sketch: sketch.step_time_s):
            if found and bound.step_time_s >= min(sketch.step_time_s for sketch in found):
                self.search.pruned += 1
                continue
            try:
                sketch = self.sketch(bound, found)
            except InfeasibleError as error:
                self.search.tried.append(Alternative(str(bound.shape), 0.0, 0.0, 0, str(error)))
                continue
            self.search.report(f"{sketch.shape}: step about {seconds_text(sketch.step_time_s)}")
            found.append(sketch)
        found.sort(key=lambda sketch: sketch.step_time_s)
        found[:FINALISTS] = map(self._without_again, found[:FINALISTS])
        for sketch in found:
            peak = int(max(sketch.peak_bytes))
            self.search.tried.append(Alternative(str(sketch.shape), sketch.step_time_s, sketch.bubble_fraction, peak, ""))
        return sorted(found, key=lambda sketch: sketch.step_time_s)

    def bounds(self, shapes: Iterable[Shape]) -> list[Sketch]:
        """Shapes without a limit of memory, but for those that take at least as long as one that fits."""
        families: dict[object, dict[int, list[Shape]]] = {}
        for shape in shapes:
            pipeline = shape.pipeline
            if pipeline.stages > self.folded.removed + KEPT:
                self.search.pruned += 1
                continue
            family = families.setdefault((shape.mesh, pipeline.degree, pipeline.position), {})
            family.setdefault(pipeline.microbatches, []).append(shape)
        bounds: list[Sketch] = []
        fitting_s = math.inf
        for family in families.values():
            least_s, slower = math.inf, 0
            for alike in (family[count] for count in sorted(family)):
                open_shapes = [shape for shape in alike if self.least_step_time_s(shape) < fitting_s]
                self.search.pruned += len(alike) - len(open_shapes)
                if not open_shapes:
                    continue
                found = [bound for shape in open_shapes if (bound := self._bound(shape)) is not None]
                fitting = [bound.step_time_s for bound in found if _fits(bound, self.search.limit_bytes(bound.shape))]
                fitting_s = min([fitting_s, *fitting])
                bounds += found
                fastest_s = min((bound.step_time_s for bound in found), default=math.inf)
                slower = slower + 1 if fitting and fastest_s >= least_s else 0
                if slower == PATIENCE:
                    break
                least_s = min(least_s, fastest_s)
        return bounds

    def _bound(self, shape: Shape) -> Sketch | None:
        """A shape without a limit of memory; None, with the reason kept, if it cannot be."""
        try:
            decision = self._few.free(shape)
            bound = self._composed(shape, decision, (shape.recompute or "none",) * shape.pipeline.stages)
            work_s = (1 - decision.solution.gap) * bound.busy_s
            self._works.setdefault((shape.mesh, shape.pipeline.position), []).append((shape.pipeline.microbatches, work_s))
            return bound
        except PlanError as error:
            self.search.tried.append(Alternative(str(shape), 0.0, 0.0, 0, str(error)))
            return None

    def least_step_time_s(self, shape: Shape) -> float:
        """What a step takes at least: its work, and the bubble of the schedule.

        The work is no less than that of the ops on one rank, evenly over all, nor than what was found for a divisor of the micro-batches on
        the same mesh: that can be sharded alike, and smaller ops are no faster. Backwards in two parts leave idle what they take less the
        time of two parts for weights (Qi et al. 2023), whose share is that of the ops on one rank.
        """
        pipeline = shape.pipeline
        whole, machine = self._whole(shape), self.search.machine_of(shape.grid)
        known = self._works.get((shape.mesh, pipeline.position), ())
        found = [seconds for microbatches, seconds in known if pipeline.microbatches % microbatches == 0]
        work_s = max([whole["compute_s"] / shape.grid.num_ranks, *found])
        idle = (pipeline.degree - 1) / (pipeline.microbatches * (pipeline.stages // pipeline.degree))
        if pipeline.schedule == "zb-h1":
            idle *= max(0.0, 1 - 2 * whole["weight_s"] / whole["compute_s"])
        return work_s * max(1.0, (1 + idle) / machine.device.sharing)

    def _whole(self, shape: Shape) -> Amounts:
        """Amounts of all blocks on one rank; the grid of the shape tells the machine."""
        if not self._alone:
            machine = self.search.machine_of(shape.grid)
            alone = self._few.alike(self.folded.normal, self._few.repeats)
            alone.machine_of = lambda _: replace(machine, links=machine.links[:1])
            parts = self.parts(alone.free(Shape(Mesh.of(1))), "none", in_two=True)
            self._alone = parts.of(0, [parts.blocks])
        return self._alone

    def sketch(self, bound: Sketch, found: Sequence[Sketch] = ()) -> Sketch:
        """What a shape takes within the memory limit: with more computed again, or where that is not enough with another sharding.

        Args:
            bound: the same without a limit.
            found: others; what cannot be faster than all of them is given up.

        Raises:
            InfeasibleError: no way was found in which it fits.
        """
        shape, limit = bound.shape, self.search.limit_bytes(bound.shape)
        if _fits(bound, limit):
            return bound
        saving = self._lightest(shape, self._few.free(shape), limit)
        if _fits(saving, limit):
            return saving
        if saving.step_time_s >= min((sketch.step_time_s for sketch in found), default=math.inf):
            raise InfeasibleError(f"shape ({shape}): all computed again is not enough, and slower than others")
        return self._limited(shape, "full", limit)

    def _without_again(self, sketch: Sketch) -> Sketch:
        """The same shape with another sharding in place of what is computed again, if that is faster."""
        if set(sketch.levels) == {"none"}:
            return sketch
        try:
            other = self._limited(sketch.shape, "none", self.search.limit_bytes(sketch.shape))
        except InfeasibleError:
            return sketch
        return min(sketch, other, key=lambda either: either.step_time_s)

    def parts(self, decision: Decision, level: str, *, in_two: bool = False) -> _Parts:
        """A decision for the folded graph, by blocks that compute as much again."""
        key = id(decision), level, in_two
        if key not in self._parts:
            self._parts[key] = decision, _parts_of(decision, level, self.folded, in_two=in_two)
        return self._parts[key][1]

    def _lightest(self, shape: Shape, decision: Decision, limit: float) -> Sketch:
        """With as little computed again as fits, or all."""
        levels: tuple[str, ...] = (shape.recompute or "none",) * shape.pipeline.stages
        while True:
            found = self._composed(shape, decision, levels)
            over = [peak > limit * (1 + TOLERANCE) for peak in found.peak_bytes]
            more = tuple(
                LEVELS[min(LEVELS.index(level) + over[stage % len(over)], len(LEVELS) - 1)] for stage, level in enumerate(levels)
            )
            if shape.recompute is not None or more == levels:
                return found
            levels = more

    def _limited(self, shape: Shape, level: str, limit: float) -> Sketch:
        """With the program solved for the first stage under the limit, with the head of the model on it too.

        Raises:
            InfeasibleError: it does not fit.
        """
        _, live = _played(shape.pipeline, self.search.training)
        key = shape.mesh, shape.pipeline.microbatches, shape.pipeline.position, shape.pipeline.stages, live[0], level
        if key not in self._under_limit:
            self._under_limit[key] = self._solve_under(shape, live[0], level, limit)
        decision = self._under_limit[key]
        if isinstance(decision, InfeasibleError):
            raise decision
        found = self._lightest(shape, decision, limit)
        if not _fits(found, limit):
            raise InfeasibleError(f"shape ({shape}): no plan of a few of its blocks was found that fits {bytes_text(limit)} per rank")
        return found

    def _solve_under(self, shape: Shape, live: int, level: str, limit: float) -> Decision | InfeasibleError:
        decision, pipeline = self._few.free(shape), shape.pipeline
        costs = Costs(decision.prices, decision.solution.variants)
        stage_of = dict.fromkeys(costs.order, 0)
        blocks = blocks_of(decision.problem, costs.order, costs.crossing_bytes()) if level != "none" else {}
        again = made_again(decision.problem, stage_of, blocks, (level,))
        count = -(-self.parts(decision, level).blocks // pipeline.stages)
        staging = Staging(stage_of, (live,), {node: blocks[node] for node in again}, self.folded.repeats(count))
        try:
            return self._few.solve(shape, staging, limit * pipeline.degree / pipeline.stages, explain=False)
        except InfeasibleError as error:
            return error

    def _composed(self, shape: Shape, decision: Decision, levels: tuple[str, ...]) -> Sketch:
        """Stages of a decision, and the step that they take."""
        pipeline = shape.pipeline
        schedule, _ = _played(pipeline, self.search.training)
        in_two = any(action.kind is Kind.WEIGHT for action in schedule.ranks[0])
        parts = [self.parts(decision, level, in_two=in_two) for level in levels]
        counts = _even(parts[0], pipeline.stages)
        stages = [part.of(stage, counts) for stage, part in enumerate(parts)]
        _, line = machine_of_stage(self.search.machine_of(shape.grid), pipeline)
        prices = [_price(stages[stage], parts[stage].sent, stage, line, pipeline) for stage in range(pipeline.stages)]
        sharing = self.search.machine_of(shape.grid).device.sharing
        played = schedule.microbatches
        busy_s = np.zeros(pipeline.degree)
        transient = max(part.transient for part in parts)
        peaks = np.array(peak_kept(schedule, [amounts["kept"] for amounts in stages], [transient] * pipeline.stages))
        for stage, amounts in enumerate(stages):
            rank = stage % pipeline.degree
            busy_s[rank] += amounts["forward_s"] + amounts["backward_s"]
            peaks[rank] += amounts["static"]
        pace_s = max(float(busy_s.max()) / sharing, float(busy_s.mean()))
        timeline = simulate(schedule, prices, sharing)
        step_time_s = timeline.step_time_s + (pipeline.microbatches - played) * pace_s
        bubble = timeline.bubble_fraction * timeline.step_time_s / step_time_s
        busy = pipeline.microbatches * float(busy_s.mean())
        return Sketch(shape, step_time_s, bubble, busy, tuple(map(float, peaks)), levels, decision)


def _fits(sketch: Sketch, limit_bytes: float) -> bool:
    return max(sketch.peak_bytes) <= limit_bytes * (1 + TOLERANCE)


def _parts_of(decision: Decision, level: str, folded: Folded, *, in_two: bool) -> _Parts:
    problem, variants = decision.problem, decision.solution.variants
    costs = Costs(decision.prices, variants)
    order, crossing = costs.order, costs.crossing_bytes()
    runs = repeated_runs([problem.shared[node] for node in order])
    start, period, length = next((run for run in runs if not folded.block.isdisjoint(order[run[0] : run[0] + run[2]])), (0, 0, 0))
    places = borders(start, period, length, crossing) if length else []
    whole = [i for i in range(len(places) - 1) if places[i + 1] - places[i] == period and places[i] > 0]
    if not whole:
        raise PlanError("the equal blocks of the model are not told apart by what crosses from one to the next")
    middle = whole[len(whole) // 2]
    begin, end = places[middle], places[middle + 1]
    part_of = {node: int(i >= begin) + int(i >= end) for i, node in enumerate(order)}
    blocks = blocks_of(problem, order, crossing) if level != "none" else {}
    again = made_again(problem, part_of, blocks, (level,) * 3)
    staging = Staging(part_of, (1, 1, 1), {node: blocks[node] for node in again})
    uses = decision.prices.staged(staging).footprint.uses(variants)
    prices = costs.stage_prices(part_of, 3, [], uses, (1, 1, 1), again, in_two=in_two)
    found: list[Amounts] = []
    for part, (price, use) in enumerate(zip(prices, uses, strict=True)):
        own = [costs.ops[node] for node in order if part_of[node] == part]
        amounts = {name: float(getattr(price, name)) for name in TIMES}
        amounts["compute_s"] = sum(op.forward_s + op.backward_s for op in own)
        amounts["static"], amounts["kept"] = use.parameters + use.gradients + use.optimizer + use.gathered, use.kept
        found.append(amounts)
    before, after = middle, len(places) - 2 - middle
    first, block, last = found
    return _Parts(
        blocks=len(places) - 1 + folded.removed,
        block=block,
        first={name: first[name] - before * block[name] for name in block},
        last={name: last[name] - after * block[name] for name in block},
        transient=max(max(0.0, use.activations - use.kept) for use in uses),
        sent=float(crossing[[begin - 1, end - 1]].max()),
    )


def _even(parts: _Parts, stages: int) -> list[int]:
    """Blocks of every stage, so that none takes much longer than the others."""
    if stages > parts.blocks:
        raise PlanError(f"{stages} stages are too many for a model of {parts.blocks} equal blocks; use fewer")
    taken = [(parts.of(stage, [0] * stages), stage) for stage in range(stages)]
    queue = [(ends["forward_s"] + ends["backward_s"], stage) for ends, stage in taken]
    each = parts.block["forward_s"] + parts.block["backward_s"]
    counts = [0] * stages
    heapq.heapify(queue)
    for _ in range(parts.blocks):
        time_s, stage = heapq.heappop(queue)
        counts[stage] += 1
        heapq.heappush(queue, (time_s + each, stage))
    return counts


def _price(amounts: Amounts, sent: float, stage: int, line: Sequence[LinkProfile], pipeline: Pipeline) -> StagePrice:
    """What the simulator wants to know of a stage; ``line`` leads from every position of the pipeline to the next."""
    times = {name: max(0.0, amounts[name]) for name in TIMES}
    for name, end, link in (
        ("send_forward_s", stage < pipeline.stages - 1, line[stage % len(line)] if line else None),
        ("send_backward_s", stage > 0, line[(stage - 1) % len(line)] if line else None),
    ):
        times[name] = float(send_time_s(sent, link)) if end and link is not None else 0.0
        if link is not None:  # at both ends
            times["core_s"] += 2 * pipeline.microbatches * (1 - link.overlap) * times[name]
    times["core_s"] *= min(1.0, ROUNDS * pipeline.degree / pipeline.microbatches)
    return StagePrice(**times)


@cache
def _played(pipeline: Pipeline, training: bool) -> tuple[Schedule, tuple[int, ...]]:
    """The first rounds of the schedule, and of every stage the micro-batches in flight."""
    count = min(pipeline.microbatches, ROUNDS * pipeline.degree)
    schedule = lower(plan_schedule(replace(pipeline, microbatches=count), training=training))
    return schedule, peak_live(schedule)
