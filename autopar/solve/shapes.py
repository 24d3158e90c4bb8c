"""The ways to cut the grid, the batch and the model that the search tries, before anything is priced.

A *shape* says which ranks are stages and which lie inside of one, into how many micro-batches the batch is cut, and by which schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.schedule.actions import Schedule
from autopar.schedule.tables import forward_only, make_schedule


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to cut the grid, the batch and the model.

    Args:
        mesh: axes inside of a stage.
        pipeline: stages and micro-batches.
        cuts: modules at which stages begin, but for the first; found if empty.
        homes: stages that hold each parameter already, by name; None if that is open.
        recompute: a level (`recompute`) for all stages; None: as much as the memory limit asks for.
    """

    mesh: Mesh
    pipeline: Pipeline = field(default=Pipeline())
    cuts: tuple[str, ...] = ()
    homes: Mapping[str, tuple[int, ...]] | None = None
    recompute: str | None = None

    @property
    def grid(self) -> Mesh:
        return self.pipeline.grid(self.mesh)

    @property
    def is_cut_by_time(self) -> bool:
        """Whether where its stages begin is open."""
        return self.pipeline.stages > 1 and not self.cuts and self.homes is None

    def __str__(self) -> str:
        pipeline = self.pipeline
        parts = [str(self.grid)]
        parts += [f"{pipeline.stages} stages"] if pipeline.stages > pipeline.degree else []
        parts += [f"{pipeline.microbatches} {'averaged ' if pipeline.is_average else ''}micro-batches"] if pipeline.microbatches > 1 else []
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


MICROBATCHES_PER_RANK = (1, 2, 4)
"""Micro-batches that are tried, per rank of the pipeline; more make the bubble smaller and the ops less efficient."""
MANY_MICROBATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The same for deep models, of which shapes are sketched (`outline`)."""
SCHEDULES = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2))
"""Schedules that are tried, with stages per rank."""
UNLOOPED = (("1f1b", 1), ("zb-h1", 1))
"""Those that run with fewer micro-batches than ranks."""
MANY_SCHEDULES = (*SCHEDULES, *(("interleaved", chunks) for chunks in (3, 4, 6, 8, 12, 16)))
"""The same for deep models."""


def pipelined(
    grids: Sequence[Mesh],
    batch_size: int,
    *,
    kept: Set[str] = frozenset(),
    per_rank: Sequence[int] = MICROBATCHES_PER_RANK,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
) -> list[Shape]:
    """The shapes with stages on some grids: an axis not in ``kept``, an outer part of it, or several axes next to each other with an outer
    part of the last, as the pipeline axis; none twice.

    Those whose stages have few axes, which take least time to solve, come first, and few micro-batches before many, whose bound they are;
    last those with fewer than ranks, which pay where hardly anything but the launch of ops takes time.

    Args:
        grids: of all ranks.
        batch_size: samples.
        kept: axes that are never stages.
        per_rank: micro-batches, for each rank of the pipeline.
        schedules: with stages per rank.
    """
    shapes: dict[object, Shape] = {}
    for grid in grids:
        for first, last in combinations_with_replacement(range(len(grid.sizes)), 2):
            if not kept.isdisjoint(grid.names[first : last + 1]):
                continue
            for part in (d for d in range(2, grid.sizes[last] + 1) if grid.sizes[last] % d == 0):
                degree = math.prod(grid.sizes[first:last]) * part
                mesh = _without(grid, first, last, grid.sizes[last] // part)
                few = [2**i for i in range(degree.bit_length()) if 2**i < degree]
                for count in (*few, *(times * degree for times in per_rank)):
                    for schedule, chunks in schedules if count >= degree else UNLOOPED:
                        pipeline = Pipeline(degree, degree * chunks, count, schedule, _axis_name(mesh), position=first)
                        if batch_size % count == 0:
                            shapes.setdefault((mesh.sizes, pipeline), Shape(mesh, pipeline))
    return sorted(shapes.values(), key=lambda shape: (len(shape.mesh.sizes), shape.pipeline.microbatches < shape.pipeline.degree))


def _axis_name(mesh: Mesh) -> str:
    """What the axis of stages is called beside the axes of a stage, of which one may have its usual name."""
    return next(name for name in ("pp", *(f"pp{i}" for i in range(2, len(mesh.names) + 2))) if name not in mesh.names)


def _without(grid: Mesh, first: int, last: int, left: int) -> Mesh:
    """A grid without some axes but for ``left`` ranks of the last of them; an axis of one rank goes, if another is left."""
    names, sizes = (*grid.names[:first], *grid.names[last:]), (*grid.sizes[:first], left, *grid.sizes[last + 1 :])
    kept = [i for i in range(len(sizes)) if i != first or left > 1 or len(sizes) == 1]
    return Mesh(tuple(names[i] for i in kept), tuple(sizes[i] for i in kept))


def accumulating(grids: Sequence[Mesh], batch_size: int) -> list[Shape]:
    """The shapes without stages on some grids that run the batch in parts, which takes less memory."""
    counts = [count for count in range(2, batch_size + 1) if batch_size % count == 0]
    return [Shape(grid, Pipeline(microbatches=count)) for grid in grids for count in counts]
