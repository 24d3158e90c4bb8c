"""The outer search: one way to cut the grid, the batch and the model at a time, each solved and played.

A *shape* says which ranks are stages and which lie inside of one, into how many micro-batches the batch is cut, and by which schedule. For
a shape the program (`solve.intra`) shards the ops of the model on the mesh of a stage, the cut (`solve.inter`) makes stages of them,
and the simulator plays the schedule. Where a stage does not fit the memory limit, the program is solved again under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.simulate import Timeline, simulate
from autopar.errors import InfeasibleError
from autopar.factors import Factors
from autopar.mesh import Mesh
from autopar.passes.stages import follow_parameters
from autopar.plan import Pipeline
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_live
from autopar.schedule.lower import lower
from autopar.schedule.tables import forward_only, make_schedule
from autopar.solve.decide import Decision, decide
from autopar.solve.inter import Costs, cut_at_modules, cut_by_time, homes_of
from autopar.solve.liveness import MemoryUse, Staging
from autopar.solve.pins import Restriction
from autopar.units import bytes_text

MAX_CUTS = 4
"""How often a shape is cut and solved anew under the memory limit before it is given up."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to cut the grid, the batch and the model.

    Args:
        mesh: axes inside of a stage.
        pipeline: stages and micro-batches.
        cuts: modules at which stages begin, but for the first; found if empty.
        homes: stages that hold each parameter already, by name; None if that is open.
    """

    mesh: Mesh
    pipeline: Pipeline = field(default=Pipeline())
    cuts: tuple[str, ...] = ()
    homes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def grid(self) -> Mesh:
        return self.pipeline.grid(self.mesh)

    def __str__(self) -> str:
        pipeline = self.pipeline
        parts = [str(self.grid)]
        parts += [f"{pipeline.stages} stages"] if pipeline.stages > pipeline.degree else []
        parts += [f"{pipeline.microbatches} micro-batches"] if pipeline.microbatches > 1 else []
        parts += [pipeline.schedule] if pipeline.stages > 1 else []
        return ", ".join(parts)

    def schedule(self, *, training: bool) -> Schedule:
        """The table of computations; PlanError if the numbers do not fit it."""
        return plan_schedule(self.pipeline, training=training)


def plan_schedule(pipeline: Pipeline, *, training: bool) -> Schedule:
    """The table of computations of a pipeline."""
    if not training:
        return forward_only(pipeline.degree, pipeline.stages, pipeline.microbatches)
    return make_schedule(
        pipeline.schedule, degree=pipeline.degree, stages=pipeline.stages, microbatches=pipeline.microbatches
    )


@dataclass(frozen=True, slots=True)
class Staged:
    """A decision with its stages.

    Args:
        shape: what was decided for.
        decision: the sharding of every op.
        stage_of: stage of every op that has one.
        memory: of every stage.
        timeline: the simulated step; None without stages and micro-batches.
        step_time_s: predicted.
    """

    shape: Shape
    decision: Decision
    stage_of: Mapping[fx.Node, int]
    memory: tuple[MemoryUse, ...]
    timeline: Timeline | None
    step_time_s: float

    def homes(self) -> dict[fx.Node, tuple[int, ...]]:
        """The stages that use each parameter."""
        return homes_of(self.decision.problem, self.stage_of)


def decide_shape(
    module: fx.GraphModule,
    factors: Factors,
    shape: Shape,
    machine: MachineProfile,
    *,
    memory_limit_bytes: float,
    restrictions: Sequence[Restriction] = (),
    optimizer: str = "adamw",
    training: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Staged:
    """Solve one shape.

    Args:
        module: normal graph of the whole batch.
        factors: its factors.
        shape: what is to be decided for.
        machine: prices, one link per axis of the grid.

    The other arguments are those of `decide`.

    Raises:
        InfeasibleError: no plan of this shape fits, or none was found.
        MicrobatchError: the batch cannot be split so.
        PlanError: the stages or the schedule do not fit the model, or a pin leaves nothing.
    """
    pipeline = shape.pipeline
    inside, link = _machine_of_stage(machine, pipeline)
    schedule = shape.schedule(training=training)
    live = peak_live(schedule)
    limit = memory_limit_bytes if pipeline.stages == 1 else math.inf

    def solved(staging: Staging | None, limit_bytes: float) -> Decision:
        return decide(
            module,
            factors,
            shape.mesh,
            inside,
            memory_limit_bytes=limit_bytes,
            restrictions=restrictions,
            optimizer=optimizer,
            training=training,
            microbatches=pipeline.microbatches,
            staging=staging,
            report=report,
        )

    decision = solved(None, limit)
    for _ in range(MAX_CUTS):
        stage_of = _cut(decision, shape, link)
        if pipeline.stages > 1:
            decision.prices.stage(Staging(stage_of, live))
        memory = tuple(decision.prices.footprint.uses(decision.solution.variants))
        if max(use.total for use in memory) <= memory_limit_bytes or pipeline.stages == 1:
            return _played(shape, decision, stage_of, memory, lower(schedule), link)
        decision = solved(Staging(stage_of, live), memory_limit_bytes)
    raise InfeasibleError(
        f"shape ({shape}): no cut into stages was found that fits {bytes_text(memory_limit_bytes)} per rank; name the stages, use more "
        "ranks per stage, or smaller micro-batches"
    )


def _machine_of_stage(machine: MachineProfile, pipeline: Pipeline) -> tuple[MachineProfile, LinkProfile | None]:
    """Prices inside of a stage, and the link between stages."""
    if pipeline.degree == 1:
        return machine, None
    links = list(machine.links)
    link = links.pop(pipeline.position)
    return replace(machine, links=tuple(links)), link


def _cut(decision: Decision, shape: Shape, link: LinkProfile | None) -> dict[fx.Node, int]:
    stages = shape.pipeline.stages
    if shape.homes is not None:
        return follow_parameters(decision.problem.module, shape.homes, stages)
    costs = Costs(decision.prices, decision.solution.variants)
    if shape.cuts:
        return cut_at_modules(costs, shape.cuts)
    return cut_by_time(costs, stages, link)


def _played(
    shape: Shape,
    decision: Decision,
    stage_of: Mapping[fx.Node, int],
    memory: tuple[MemoryUse, ...],
    schedule: Schedule,
    link: LinkProfile | None,
) -> Staged:
    if shape.pipeline.stages == shape.pipeline.microbatches == 1:
        return Staged(shape, decision, stage_of, memory, None, decision.solution.objective.total_s)
    costs = Costs(decision.prices, decision.solution.variants)
    live = peak_live(schedule)
    prices = costs.stage_prices(stage_of, shape.pipeline.stages, link, memory, live)
    timeline = simulate(schedule, prices)
    return Staged(shape, decision, stage_of, memory, timeline, timeline.step_time_s)
