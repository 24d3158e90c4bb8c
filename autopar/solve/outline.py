"""The search over shapes of a deep model by sketches: what a shape takes is told by a few blocks (`solve.parts`).

The program (`solve.intra`) shards the folded graph (`solve.fold`) on the mesh of a stage, and its blocks are shared among the stages. Where
a rank does not fit the memory limit, its stages compute more again, and where that is not enough the program is solved under a limit. So
the time of a shape hardly depends on the depth of the model nor on the number of micro-batches. The best shape is then made whole from what
was decided for the folded graph (`Search.take`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter

from autopar.cost.collectives import are_no_slower
from autopar.cost.device import DeviceProfile
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import Mesh
from autopar.passes.microbatch import batch_size
from autopar.plan import Alternative
from autopar.report import Counted
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_later_of, peak_of
from autopar.solve.bound import Bound
from autopar.solve.decide import Decision
from autopar.solve.fold import KEPT, Folded
from autopar.solve.inter import Costs
from autopar.solve.liveness import Staging
from autopar.solve.mixed import mixed
from autopar.solve.parts import Layout, Parts, Sketch, lay, least_shared_s, longest_rank_s, parts_of, play, played
from autopar.solve.places import MemoryLimit, Places, places_of
from autopar.solve.recompute import BESIDE, LEVELS, blocks_of, made_again, share_of
from autopar.solve.saving import save
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.units import seconds_text

PATIENCE = 2
"""One number may be slow only because its samples are not shared evenly by the ranks; where they never are, one is enough."""
AHEAD = 2
"""Programs that are solved beside what is done meanwhile."""
FINALISTS = 3
"""Shapes for which more is tried."""


class _Known:
    """What was counted of a decision, by the kinds of devices of a stage."""

    def __init__(self, decision: Decision, places: Places) -> None:
        self.decision = decision  # kept, so that no other gets its id
        costs = places.costs(decision.prices, decision.solution.variants)
        self.costs = {places.kinds_of(position): one for position, one in enumerate(costs)}
        self.parts: dict[tuple[str, tuple[int, ...]], Parts] = {}


@dataclass(slots=True)
class Outline:
    """Sketches shapes.

    Args:
        folded: the graph in short.
        search: what is searched for; it gets what was tried.
        found: what fits, of the shapes that are searched.
    """

    folded: Folded
    search: Search
    found: list[Sketch] = field(default_factory=list)
    _few: Search = field(init=False)
    _known: dict[tuple[int, object], _Known] = field(default_factory=dict)
    _works: dict[tuple[Mesh, int], list[tuple[int, float]]] = field(default_factory=dict)
    _floors: dict[object, list[tuple[tuple[LinkProfile, ...], float]]] = field(default_factory=dict)
    _alone: dict[DeviceProfile, Parts] = field(default_factory=dict)
    _bounds: dict[object, float] = field(default_factory=dict)
    _under_limit: dict[object, dict[tuple[float, float], Decision | InfeasibleError]] = field(default_factory=dict)
    _least_live: dict[object, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folded = self.folded
        self._few = self.search.alike(folded.normal, folded.repeats(KEPT + folded.removed), self.search.restrictions)
        self._few.known = self.search.known

    def search_shapes(self, shapes: Iterable[Shape]) -> list[Sketch]:
        """Shapes that fit, the fastest first; none that was seen to be slower than another.

        With as much computed again as the limit of memory asks for; where that is not enough, at the end, with another sharding under the
        limit. Meshes take turns, so that the program of one is made while those of others are solved. On a mesh more micro-batches are
        tried until `PATIENCE` numbers of them were no faster, by the floors of all schedules, than fewer, since bubbles get smaller and ops
        less efficient (one, from the number on that leaves just a sample for each rank that shares them); of those that do not fit as they
        are, also no faster than what fits elsewhere. Where the same mesh on links that are no slower was too slow, or given up, because the
        stages lie otherwise on the grid, it is not tried again (`_is_slower_elsewhere`). Both are likely and not proved: a complete search
        does neither. For the best `FINALISTS` the shardings are tried that the limit leaves to each level of what is computed again.
        """
        found = self.found = []
        heavy: list[Layout] = []
        climbs = [self._climb(family) for family in self._families(shapes)]
        pending, opened = deque((climb, next(climb)) for climb in climbs), 0
        try:
            while pending:
                climb, alike = pending.popleft()
                if opened < len(climbs):
                    self.search.report(Counted(f"sketching {alike[0]}", opened, len(climbs)))
                opened += 1
                self._begin(alike, self._best_s(found))
                for _, soon in islice(pending, AHEAD):
                    self._begin(soon, self._best_s(found))
                layouts = self._open_layouts(alike, self._best_s(found))
                heavy += self._play_fitting(layouts, found)
                with suppress(StopIteration):
                    pending.append((climb, climb.send(layouts)))
        finally:
            self._few.leave()
        for layout in heavy:
            self._note_live(layout.shape)
        for layout in sorted(heavy, key=lambda layout: layout.floor_s):
            self._play_limited(layout, found)
        found.sort(key=lambda sketch: sketch.step_time_s)
        found[:FINALISTS] = map(self._with_others, found[:FINALISTS])
        return self.finish()

    def _climb(self, family: Sequence[Sequence[Shape]]) -> Generator[Sequence[Shape], Sequence[Layout], None]:
        """Shapes of a mesh and a pipeline to open, which differ in the schedule alone; it gets their layouts. The likeliest number of
        micro-batches comes first, then few before many."""
        likeliest = _likeliest(family, batch_size(self.folded.normal.module))
        known = yield likeliest
        least_s, slower, even = math.inf, 0, family.index(likeliest)
        for number, alike in enumerate(family):
            layouts = known if alike is likeliest else (yield alike)
            if not layouts:
                continue
            fastest_s = min(layout.floor_s for layout in layouts)
            is_slower = fastest_s >= least_s and (fastest_s >= self._best_s(self.found) or self._any_fits(layouts))
            slower = slower + 1 if is_slower else 0
            if slower >= (PATIENCE if number < even else 1) and not self.search.is_complete:
                left = [shape for more in family[number + 1 :] if more is not likeliest for shape in more]
                self.search.pruned[Bound.PATIENCE] += len(left)
                for shape in left:
                    self._note_floor(shape, self._best_s(self.found))
                return
            least_s = min(least_s, fastest_s)

    def _best_s(self, found: Sequence[Sketch]) -> float:
        """Seconds of the fastest of them, and of what was made whole before they were searched."""
        best = [self.search.best.step_time_s] if self.search.best is not None else []
        return min((*best, *(sketch.step_time_s for sketch in found)), default=math.inf)

    def _any_fits(self, layouts: Sequence[Layout]) -> bool:
        return any(layout.fits(self.search.limit(layout.shape)) for layout in layouts)

    def _begin(self, shapes: Sequence[Shape], best_s: float) -> None:
        """Begin with the program of shapes that differ in the schedule alone, if any of them may take less than ``best_s``."""
        for shape in shapes:
            if self._is_behind(shape, best_s) is None:
                self._few.begin(shape)
                return

    def _is_behind(self, shape: Shape, best_s: float) -> Bound | None:
        """Why a shape takes no less than ``best_s``; None if it may."""
        if not math.isfinite(best_s):
            return None
        if self.least_step_time_s(shape) >= best_s:
            return Bound.WORK
        if self.search.is_complete:
            return None
        if self._least_shared_s(shape) >= best_s:
            return Bound.BLOCKS
        return Bound.LINKS if self._is_slower_elsewhere(shape, best_s) else None

    def _least_shared_s(self, shape: Shape) -> float:
        """What a sketch takes at least, with stages that all compute as much again, by the ops on one rank, evenly over all; nothing where
        devices differ."""
        machine = self.search.machine_of(shape.grid)
        if machine.kinds or shape.pipeline.degree == 1:
            return 0.0
        return self._of_alone(least_shared_s, shape, machine) / machine.device.sharing

    def _of_alone(self, bound: Callable[..., float], shape: Shape, machine: MachineProfile) -> float:
        """A bound of `solve.parts` for the ops on one rank, evenly over all; worked out once for a pipeline."""
        pipeline = replace(shape.pipeline, position=0)
        key = bound, pipeline, machine.device
        if key not in self._bounds:
            self._bounds[key] = bound(self._alone_on(machine), pipeline, in_two=pipeline.schedule == "zb-h1")
        return self._bounds[key] / shape.mesh.num_ranks

    def _is_slower_elsewhere(self, shape: Shape, best_s: float) -> bool:
        """Whether the same stages on the same mesh took no less on links that are no slower, with as much computed again as they had to.
        Any sharding would have; what was found is the best of all work, and another may leave ranks waiting less, or need less memory."""
        floors = self._floors.get(_elsewhere(shape), ())
        return any(floor_s >= best_s and are_no_slower(links, self._links_of(shape), shape.mesh.sizes) for links, floor_s in floors)

    def _note_floor(self, shape: Shape, floor_s: float) -> None:
        if not self.search.machine_of(shape.grid).kinds:
            self._floors.setdefault(_elsewhere(shape), []).append((self._links_of(shape), floor_s))

    def _links_of(self, shape: Shape) -> tuple[LinkProfile, ...]:
        return places_of(self.search.machine_of(shape.grid), shape).inside.links

    def finish(self) -> list[Sketch]:
        """What was found until now, the fastest first; it counts as tried."""
        for sketch in self.found:
            peak = int(max(sketch.rank_bytes))
            self.search.tried.append(Alternative(str(sketch.shape), sketch.step_time_s, sketch.bubble_fraction, peak, ""))
        return sorted(self.found, key=lambda sketch: sketch.step_time_s)

    def _families(self, shapes: Iterable[Shape]) -> list[list[list[Shape]]]:
        """By mesh and pipeline, those with most axes first, and of these those with stages on the outermost axis; in each by the number of
        micro-batches, few first."""
        families: dict[object, dict[int, list[Shape]]] = {}
        for shape in shapes:
            pipeline = shape.pipeline
            if pipeline.stages > self.folded.most_stages:
                self.search.pruned[Bound.STAGES] += 1
                continue
            family = families.setdefault((shape.mesh, pipeline.degree, pipeline.position), {})
            family.setdefault(pipeline.microbatches, []).append(shape)
        found = [[family[count] for count in sorted(family)] for family in families.values()]
        return sorted(found, key=lambda family: (-len(family[0][0].mesh.sizes), family[0][0].pipeline.position))

    def _open_layouts(self, shapes: Sequence[Shape], best_s: float) -> list[Layout]:
        """Those that may take less than ``best_s``, by what is known of their meshes; what cannot be says why."""
        layouts = []
        for shape in shapes:
            bound = self._is_behind(shape, best_s)
            if bound is not None:
                self.search.pruned[bound] += 1
                self._note_floor(shape, best_s)
                continue
            try:
                layout = self.layout(shape)
            except PlanError as error:
                self._refuse(shape, str(error))
                continue
            layouts.append(layout)
        return layouts

    def _play_fitting(self, layouts: Sequence[Layout], found: list[Sketch]) -> list[Layout]:
        """Add to ``found`` what may be the fastest, with as much computed again as it must; give back what does not fit with all computed
        again."""
        heavy = []
        for layout in sorted(layouts, key=lambda layout: layout.floor_s):
            limit, best_s = self.search.limit(layout.shape), self._best_s(found)
            light = layout if layout.floor_s >= best_s or layout.fits(limit) else self._lightest(layout, limit)
            self._note_floor(light.shape, light.floor_s)
            if light.floor_s >= best_s:
                self.search.pruned[Bound.LONGEST_RANK] += 1
            elif light.fits(limit):
                self._add(self.play(light), found)
            else:
                heavy.append(light)
        return heavy

    def _play_limited(self, layout: Layout, found: list[Sketch]) -> None:
        """Add to ``found`` what fits with another sharding, if it may be the fastest."""
        if layout.floor_s >= self._best_s(found):
            self.search.pruned[Bound.LONGEST_RANK] += 1
            return
        try:
            self._add(self._under(layout.shape), found)
        except InfeasibleError as error:
            self._refuse(layout.shape, str(error))

    def _add(self, sketch: Sketch, found: list[Sketch]) -> None:
        self.search.report(f"{sketch.shape}: step about {seconds_text(sketch.step_time_s)}")
        is_best = sketch.step_time_s < self._best_s(found)
        found.append(sketch)
        if is_best:
            self.search.report_best(sketch.shape, sketch.step_time_s, max(sketch.rank_bytes))

    def _refuse(self, shape: Shape, reason: str) -> None:
        self.search.tried.append(Alternative(str(shape), 0.0, 0.0, 0, reason))

    def layout(self, shape: Shape) -> Layout:
        """A shape without a limit of memory, with nothing computed again that it does not ask for.

        Raises:
            PlanError: it cannot be.
        """
        decision, pipeline = self._few.free(shape), shape.pipeline
        layout = self._lay(shape, decision, _asked(shape))
        if not self.search.machine_of(shape.grid).kinds:  # else what ranks take in the mean depends on who has which blocks
            work_s = (1 - decision.solution.gap) * pipeline.microbatches * sum(layout.busy_s) / pipeline.degree
            self._works.setdefault((shape.grid, pipeline.position), []).append((pipeline.microbatches, work_s))
        return layout

    def _lay(self, shape: Shape, decision: Decision, levels: tuple[str, ...]) -> Layout:
        machine = self.search.machine_of(shape.grid)
        places = places_of(machine, shape)
        parts = [self.parts(decision, level, places, stage, shape.pipeline.degree) for stage, level in enumerate(levels)]
        limit = self.search.limit(shape) if machine.kinds else None
        return lay(shape, decision, levels, parts, machine, training=self.search.training, limit=limit)

    def play(self, layout: Layout) -> Sketch:
        return play(layout, self.search.machine_of(layout.shape.grid), training=self.search.training)

    def least_step_time_s(self, shape: Shape) -> float:
        """What a step takes at least: its work, and the bubble of the schedule.

        The work is no less than that of the ops on one rank, evenly over all, nor than what was found for a divisor of the micro-batches on
        the same mesh: that can be sharded alike, and smaller ops are no faster. Backwards in two parts leave idle what they take less the
        time of two parts for weights (Qi et al. 2023), whose share is that of the ops on one rank. Of devices that differ only the first is
        known: all of them at work all the time.
        """
        pipeline, machine = shape.pipeline, self.search.machine_of(shape.grid)
        alone = [self._alone_on(kind) for _, kind in machine.kinds or ((1, machine),)]
        if machine.kinds:
            return 1 / sum(count / whole.of(0, [whole.blocks])["compute_s"] for (count, _), whole in zip(machine.kinds, alone, strict=True))
        whole, known = alone[0].of(0, [alone[0].blocks]), self._works.get((shape.grid, pipeline.position), ())
        found = [seconds for microbatches, seconds in known if pipeline.microbatches % microbatches == 0]
        work_s = max([whole["compute_s"] / shape.grid.num_ranks, *found])
        idle, in_two = (pipeline.degree - 1) / (pipeline.microbatches * (pipeline.stages // pipeline.degree)), pipeline.schedule == "zb-h1"
        if in_two:
            idle *= max(0.0, 1 - 2 * whole["weight_s"] / whole["compute_s"])
        longest_s = self._of_alone(longest_rank_s, shape, machine)
        return max(work_s, max(work_s * (1 + idle), longest_s) / machine.device.sharing)

    def _alone_on(self, machine: MachineProfile) -> Parts:
        """All on one rank."""
        if machine.device not in self._alone:
            alone = self._few.alike(self.folded.normal, self._few.repeats)
            shape = Shape(Mesh.of(1))
            alone.machine_of = lambda _: replace(machine, links=machine.links[:1], kinds=())
            self._alone[machine.device] = self.parts(alone.free(shape), "none", places_of(alone.machine_of(shape.grid), shape))
        return self._alone[machine.device]

    def sketch(self, shape: Shape) -> Sketch:
        """What a shape takes within the memory limit: with more computed again, or where that is not enough with another sharding.

        Raises:
            InfeasibleError: no way was found in which it fits.
            PlanError: it cannot be.
        """
        limit = self.search.limit(shape)
        light = self._lightest(self.layout(shape), limit)
        return self.play(light) if light.fits(limit) else self._under(shape)

    def _under(self, shape: Shape) -> Sketch:
        """A shape with the sharding that the memory limit leaves to what is computed again in part, or if there is none, in full.

        Raises:
            InfeasibleError: there is none.
        """
        if shape.recompute is None:
            with suppress(InfeasibleError):
                return self._limited(shape, "pointwise")
        return self._limited(shape, shape.recompute or "full")

    def _with_others(self, sketch: Sketch) -> Sketch:
        """The same shape with the sharding that the memory limit leaves to another level of what is computed again, if that is faster."""
        if sketch.shape.recompute is not None or set(sketch.levels) == {"none"}:
            return sketch
        found = [sketch]
        for level in LEVELS:
            with suppress(InfeasibleError):
                found.append(self._limited(sketch.shape, level))
        return min(found, key=lambda each: each.step_time_s)

    def parts(self, decision: Decision, level: str, places: Places, stage: int = 0, degree: int = 1) -> Parts:
        """A decision for the folded graph, by blocks that compute as much again on the devices of a stage, in a pipeline of ``degree``
        ranks."""
        name, share = share_of(level)
        if share < 1:
            light, heavy = (self.parts(decision, each, places, stage) for each in (BESIDE, name))
            return mixed(light, heavy, share, degree)
        known = self._known.get((id(decision), places.kinds))
        if known is None:
            known = self._known[id(decision), places.kinds] = _Known(decision, places)
        kinds = places.kinds_of(stage)
        if (level, kinds) not in known.parts:
            known.parts[level, kinds] = parts_of(known.costs[kinds], level, self.folded)
        return known.parts[level, kinds]

    def _lightest(self, layout: Layout, limit: MemoryLimit) -> Layout:
        """With as little computed again as fits, or all."""
        if layout.shape.recompute is not None:
            return layout
        return save(layout, partial(self._lay, layout.shape, layout.decision), limit, attrgetter("floor_s"))

    def _limited(self, shape: Shape, level: str) -> Sketch:
        """With the program solved for the first rank under the limit, all its stages as one, with the head of the model on it too.

        Raises:
            InfeasibleError: it does not fit.
        """
        limit = self.search.limit(shape)
        decision = self._decide_under(shape, level, limit)
        found = self._lightest(self._lay(shape, decision, _asked(shape)), limit)
        if not found.fits(limit):
            raise InfeasibleError(f"shape ({shape}): no plan of a few of its blocks was found that fits {limit} per rank")
        return self.play(found)

    def _live_of(self, shape: Shape) -> tuple[float, float]:
        return _live_of_rank(played(shape.pipeline, self.search.training))

    def _note_live(self, shape: Shape) -> None:
        """Note what is in flight at least of shapes whose stages are alike."""
        key, live = _stage_of(shape), self._live_of(shape)
        first, later = self._least_live.get(key, live)
        self._least_live[key] = min(first, live[0]), min(later, live[1])

    def _decide_under(self, shape: Shape, level: str, limit: MemoryLimit) -> Decision:
        """What `_solve_under` finds, once for all that are alike. With fewer in flight less is held: where something does not fit, it is
        also asked of the least of all schedules, and what does not fit so does not with any.

        Raises:
            InfeasibleError: nothing.
        """
        known, live = self._under_limit.setdefault((_stage_of(shape), level), {}), self._live_of(shape)
        if live not in known:
            too_many = (found for other, found in known.items() if other[0] <= live[0] and other[1] <= live[1])
            error = next((found for found in too_many if isinstance(found, InfeasibleError)), None)
            known[live] = error or self._solve_under(shape, live, level, limit)
        decision, least = known[live], self._least_live.get(_stage_of(shape), live)
        if isinstance(decision, InfeasibleError):
            if least not in known:
                known[least] = self._solve_under(shape, least, level, limit)
            raise decision
        return decision

    def _solve_under(self, shape: Shape, live: tuple[float, float], level: str, limit: MemoryLimit) -> Decision | InfeasibleError:
        decision = self._few.free(shape)
        costs = Costs(decision.prices, decision.solution.variants)
        stage_of = dict.fromkeys(costs.order, 0)
        blocks = blocks_of(decision.problem, costs.order, costs.crossing_bytes()) if level != "none" else {}
        again = made_again(decision.problem, stage_of, blocks, (level,))
        count, (first, later) = -(-self.folded.blocks // shape.pipeline.degree), live
        staging = Staging(stage_of, (first,), (later,), 1, {node: blocks[node] for node in again}, self.folded.repeats(count))
        try:
            return self._few.solve(shape, staging, min(limit.positions), explain=False)
        except InfeasibleError as error:
            return error


def _live_of_rank(schedule: Schedule) -> tuple[float, float]:
    """Micro-batches in flight on the first rank, in the mean of its stages, when they are most; and after its first backward."""
    row, chunks = schedule.ranks[0], schedule.stages // schedule.degree
    return peak_of(row) / chunks, peak_later_of(row) / chunks


def _stage_of(shape: Shape) -> object:
    """What shapes have in common that differ in the schedule alone."""
    return shape.grid, shape.pipeline.microbatches, shape.pipeline.position


def _elsewhere(shape: Shape) -> object:
    """What is the same of a shape wherever its stages lie on the grid."""
    return shape.mesh.sizes, replace(shape.pipeline, position=0), shape.recompute


def _likeliest(family: Sequence[Sequence[Shape]], samples: int) -> Sequence[Shape]:
    """The number of micro-batches that is tried first, so that a good step is known early: the most that leave samples for all ranks but
    those of the last axis, which share them."""
    mesh = family[0][0].mesh
    shared = [alike for alike in family if samples // alike[0].pipeline.microbatches % math.prod(mesh.sizes[:-1]) == 0]
    return shared[-1] if shared else family[0]


def _asked(shape: Shape) -> tuple[str, ...]:
    """How much every stage computes again if the memory does not ask for more."""
    return (shape.recompute or "none",) * shape.pipeline.stages
