"""The outer search: one way to cut the grid, the batch and the model at a time, each solved and played.

For a shape the program (`solve.intra`) shards the ops of the model on the mesh of a stage, the cut (`solve.cuts`) makes stages of them,
and the simulator plays the schedule. Where a stage does not fit the memory limit, more is computed again in the backward, or the program is
solved again under the limit, whichever is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Unpack

from torch import fx

from autopar.compile import Normal
from autopar.compression import Compression
from autopar.cost.machine import MachineProfile
from autopar.errors import InfeasibleError, PlanError
from autopar.mesh import Mesh
from autopar.offload import NOTHING, Offload
from autopar.passes.microbatch import Split
from autopar.plan import Alternative, Pipeline
from autopar.report import Best, Counted, Stopping
from autopar.solve.bound import Bound
from autopar.solve.build import build_problem
from autopar.solve.cuts import most_stages
from autopar.solve.decide import Deciding, Decision, Settings
from autopar.solve.intra import Starts
from autopar.solve.liveness import Staging
from autopar.solve.pins import Restriction, pin_tags
from autopar.solve.places import MemoryLimit, places_of
from autopar.solve.prices import Prices
from autopar.solve.problem import Problem
from autopar.solve.recompute import LEVELS, MIXED
from autopar.solve.saving import down_to_fewest, save
from autopar.solve.shapes import Shape
from autopar.solve.staged import Staged
from autopar.solve.stager import Stager
from autopar.solve.state import Least
from autopar.units import bytes_text, seconds_text

MAX_CUTS = 4
"""How often a shape is cut and solved anew under the memory limit before it is given up."""


@dataclass(slots=True)
class Search:
    """Tries shapes for one call of a model; those that differ in the schedule only share a solution.

    Args:
        normal_for: the normal graph of the whole batch, or of one micro-batch of a pipeline that averages them.
        machine_of: prices of a grid, one link per axis.
        memory_limit_bytes: per rank; None: what the device can spare.
        restrictions, optimizer, training, report, compression: as for `Deciding`.
        repeats: as for `build_problem`.
        known: decisions without a limit of memory, by graph and shape: its own, and those of searches that differ in the limit alone.
        offload: what lies on the host.
        enough: shapes to try at most, of which the first that fits is taken for the best; None: all, for the best of them.
        keeps_best: whether an interrupt ends the search with the best so far.
        is_complete: whether only what is proved to be no faster is left out.
        is_interrupted: whether one has.
        closest: where shapes do not fit, that which needs least, with what was said of it.
    """

    normal_for: Callable[[Pipeline], Normal]
    machine_of: Callable[[Mesh], MachineProfile]
    memory_limit_bytes: float | None
    restrictions: Sequence[Restriction] = ()
    optimizer: str = "adamw"
    training: bool = True
    report: Callable[[str], None] = lambda text: None
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    compression: Compression | None = None
    known: dict[object, Decision] = field(default_factory=dict)
    offload: Offload = NOTHING
    enough: int | None = None
    keeps_best: bool = False
    is_complete: bool = False
    is_interrupted: bool = False
    tried: list[Alternative] = field(default_factory=list)
    best: Staged | None = None
    closest: tuple[Shape, InfeasibleError] | None = None
    pruned: Counter[Bound] = field(default_factory=Counter)
    _free: dict[tuple[Mesh, int, int], Decision] = field(default_factory=dict)
    _begun: dict[tuple[Mesh, int, int], Deciding] = field(default_factory=dict)
    _splits: dict[int, Split] = field(default_factory=dict)
    _problems: list[Problem] = field(default_factory=list)
    _starts: dict[tuple[int, ...], Starts] = field(default_factory=dict)
    _stages: dict[fx.GraphModule, int] = field(default_factory=dict)
    _whole_s: float = 0.0

    def limit(self, shape: Shape) -> MemoryLimit:
        return MemoryLimit.of(self.machine_of(shape.grid), shape, self.memory_limit_bytes)

    def try_shapes(self, shapes: Iterable[Shape]) -> None:
        """Decide each of them that could be better than the best; what does not fit or cannot be split says why."""
        shapes = list(shapes)
        for number, shape in enumerate(shapes):
            floor_s = self.least_step_time_s(shape)
            is_enough = self.enough is not None and (self.best is not None or len(self.tried) >= self.enough)
            if is_enough or (self.best is not None and floor_s >= self.best.step_time_s):
                self.pruned[Bound.ENOUGH if is_enough else Bound.WORK] += 1
                continue
            if shape.pipeline.stages > self._most_stages(shape):
                self.pruned[Bound.OPS] += 1
                continue
            self.report(Counted(f"trying {shape}", number, len(shapes)))
            try:
                if self.tried:  # the first is solved in any case: its error tells all kinds of memory
                    self.check_least(shape)
                staged = self.decide(shape)
            except PlanError as error:
                if shape.pipeline.stages == 1 and not isinstance(error, InfeasibleError):
                    raise
                self.refuse(shape, error)
                continue
            self._note(shape, staged)
            self.report(f"{shape}: step {seconds_text(staged.step_time_s)}")
            if self.best is None or staged.is_better_than(self.best):
                self._keep(staged)

    def _most_stages(self, shape: Shape) -> int:
        module = self.normal_for(shape.pipeline).module
        if module not in self._stages:
            self._stages[module] = most_stages(module)
        return self._stages[module]

    def _note(self, shape: Shape, staged: Staged | None, reason: str = "") -> None:
        """Tell what a shape takes or why it is no plan, in place of what was said of it."""
        figures = (staged.step_time_s, staged.bubble_fraction, int(max(staged.rank_bytes))) if staged is not None else (0.0, 0.0, 0)
        self.tried = [*(known for known in self.tried if known.shape != str(shape)), Alternative(str(shape), *figures, reason)]

    def _keep(self, staged: Staged) -> None:
        self.best = staged
        self.report_best(staged.shape, staged.step_time_s, max(staged.rank_bytes))

    def report_best(self, shape: Shape, step_time_s: float, num_bytes: float) -> None:
        """Tell of the best so far."""
        self.report(Best(f"step {seconds_text(step_time_s)}, {bytes_text(num_bytes)} a rank, {shape}"))

    def interrupt(self) -> None:
        """End the search by the interrupt that is being handled, which goes on where the best so far is not asked for."""
        if not self.keeps_best:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self.report(Stopping("interrupted: taking the best plan so far"))

    def alternatives(self) -> list[Alternative]:
        """What was tried, best first, what is no plan last."""
        return sorted(self.tried, key=lambda a: (bool(a.reason), a.step_time_s))

    def least_step_time_s(self, shape: Shape) -> float:
        """What a step takes at least: the work of a rank and the bubble of the schedule.

        The work is no less than what the unsharded ops take, over all ranks; nor than that of the program found for a divisor of the
        micro-batches on the same mesh, without what it counts as exposed, over the stages: it can be sharded alike, smaller ops are no
        faster, and reductions have less to hide behind, so that other layouts do not begin to pay. Zero-bubble schedules may idle a sixth
        of what others do. Where ranks share cores, those that wait leave theirs to the others. Of devices that differ nothing is known.
        """
        pipeline = shape.pipeline
        if self.machine_of(shape.grid).kinds:
            return 0.0
        known = [
            decision.solution.objective.work_s * (1 - decision.solution.gap) / pipeline.degree
            for (mesh, microbatches, position), decision in self._free.items()
            if mesh == shape.mesh and position == pipeline.position and pipeline.microbatches % microbatches == 0
        ]
        idle = (pipeline.degree - 1) / (pipeline.microbatches * (pipeline.stages // pipeline.degree))
        bubble = 1 + (idle / 6 if pipeline.schedule == "zb-h1" else idle)
        work_s = max([self._whole_s / shape.grid.num_ranks, *known])
        return work_s * max(1.0, bubble / self.machine_of(shape.grid).device.sharing)

    def alike(
        self, folded: Normal | None = None, repeats: Mapping[fx.Node, int] | None = None, restrictions: Sequence[Restriction] = ()
    ) -> Search:
        """A new search for the same, or in a folded graph whose nodes stand for several; under other restrictions."""
        normal_for = self.normal_for if folded is None else lambda _: folded
        other = self.offloading(self.offload)
        return replace(other, normal_for=normal_for, restrictions=restrictions, repeats=repeats or {}, known={})

    def under(self, restrictions: Sequence[Restriction], enough: int) -> Search:
        """A new search for the same under other restrictions, for any shape that fits."""
        return replace(self.offloading(self.offload), restrictions=restrictions, enough=enough, known={})

    def offloading(self, offload: Offload) -> Search:
        """A new search for the same with something else on the host; what is known of one is kept for the other."""
        return Search(
            self.normal_for,
            self.machine_of,
            self.memory_limit_bytes,
            self.restrictions,
            self.optimizer,
            self.training,
            self.report,
            compression=self.compression,
            known=self.known,
            offload=offload,
            is_complete=self.is_complete,
        )

    def begin(self, shape: Shape) -> None:
        """Begin with the decision without a limit of memory, which goes on beside whatever is done until `free` wants it."""
        key, known = self._keys(shape)
        if key in self._free or known in self.known or key in self._begun:
            return
        try:
            self._begun[key] = self._deciding(shape, None, math.inf)
        except PlanError:
            return  # `free` meets it again

    def leave(self) -> None:
        """End what was begun and is not wanted."""
        for begun in self._begun.values():
            begun.leave()
        self._begun.clear()

    def free(self, shape: Shape) -> Decision:
        """The decision without a limit of memory."""
        key, known = self._keys(shape)
        if key not in self._free:
            if known not in self.known:
                begun = self._begun.pop(key, None) or self._deciding(shape, None, math.inf)
                self.known[known] = begun.result()
            self._free[key] = self.known[known]
            self._note_whole(shape, self._free[key])
        return self._free[key]

    def _keys(self, shape: Shape) -> tuple[tuple[Mesh, int, int], object]:
        """What a decision without a limit of memory depends on: here, and among searches that share what is `known`."""
        key = shape.mesh, shape.pipeline.microbatches, shape.pipeline.position
        return key, (self.normal_for(shape.pipeline).module, *key, self.offload)

    def take(self, shape: Shape, levels: Sequence[str], like: Decision) -> None:
        """Make a shape, a decision for the same program in another graph, and how much each stage computes again, the best if it is faster;
        stages that do not fit compute more again.

        Raises:
            InfeasibleError: the whole does not fit; the best stays what it was.
        """
        decision, limit = self.solve(shape, None, math.inf, like=like), self.limit(shape)
        whole = self._stage(shape, decision, levels)
        staged = self._saving(whole, limit) if shape.recompute is None else whole
        others = [] if whole.fits(limit) else self._within(whole, limit)
        fitting = [other for other in (staged, *others) if other is not None and other.fits(limit)]
        staged = min(fitting, key=lambda other: other.step_time_s, default=None)
        if staged is not None:
            self._check_host(staged)
        else:
            peak = max(whole.rank_bytes)
            raise InfeasibleError(f"shape ({shape}): needs {bytes_text(peak)} per rank, the limit is {limit}", least_bytes=peak)
        self._note(shape, staged)
        if self.best is None or staged.step_time_s < self.best.step_time_s:
            self._keep(staged)

    def refuse(self, shape: Shape, error: PlanError) -> None:
        """Say why a shape, which may have seemed to be possible, is not."""
        self._note(shape, None, str(error))
        if isinstance(error, InfeasibleError) and error.least_bytes is not None:
            known = self.closest[1].least_bytes if self.closest is not None else None
            if known is None or error.least_bytes < known:
                self.closest = shape, error

    def check_least(self, shape: Shape) -> None:
        """Raise `InfeasibleError` if the memory limit is below what a rank holds at least."""
        least, limit = self.least(shape), self.limit(shape)
        if least.num_bytes > limit.mean:
            raise InfeasibleError(least.text(limit))

    def least(self, shape: Shape) -> Least:
        """What a rank holds at least, of parameters and their state nothing where they are on the host."""
        module, is_on_host = self.normal_for(shape.pipeline).module, self.offload.optimizer and self.machine_of(shape.grid).device.has_host
        return Least.of(module, shape.grid.num_ranks, "" if is_on_host else self.optimizer, training=self.training)

    def decide(self, shape: Shape) -> Staged:
        """Solve one shape.

        Raises:
            InfeasibleError: no plan of this shape fits, or none was found.
            MicrobatchError: the batch cannot be split so.
            PlanError: the stages or the schedule do not fit the model, or a pin leaves nothing.
        """
        staged = self._decide(shape)
        self._check_host(staged)
        return staged

    def _check_host(self, staged: Staged) -> None:
        """Raise `InfeasibleError` if what lies on the host is more than it has for a device, where that is known."""
        limit, most = self.machine_of(staged.shape.grid).device.host_memory_bytes, max(staged.host_bytes)
        if limit and most > limit:
            raise InfeasibleError(
                f"shape ({staged.shape}): offload={str(self.offload)!r} needs {bytes_text(most)} of the memory of the host per rank, which "
                f"has {bytes_text(limit)} for each; use more ranks, or offload less"
            )

    def _decide(self, shape: Shape) -> Staged:
        limit = self.limit(shape)
        free = self.unlimited(shape)
        if free.fits(limit):
            return free
        self._check_free(free, limit)

        def computing_again(level: str) -> Staged:
            return self._stage(shape, free.decision, (level,) * shape.pipeline.stages)

        def limited(staged: Staged) -> Staged:
            found.append(self._limited(staged, limit, self._worth_s(shape, found)))
            return found[-1]

        saving = self._saving(free, limit) if shape.recompute is None else None
        found = [*([saving] if saving is not None else []), *self._within(free, limit)]
        if found and self.enough is not None:
            return found[0]
        heaviest = computing_again(MIXED) if shape.recompute is None and self.training else free
        more: tuple[str, ...] = LEVELS[1:] if heaviest.again != free.again else ()
        try:
            limited(free)
        except InfeasibleError:
            is_enough = saving is not None and not any(level.startswith(MIXED) for level in saving.levels)
            if more and not is_enough:
                with suppress(InfeasibleError):
                    down_to_fewest(lambda level: limited(computing_again(level)))
                more = ("selective",)  # the others were among them
        for staged in map(computing_again, more if self.enough is None or not found else ()):
            if self.is_complete or all(staged.step_time_s < other.step_time_s for other in found):
                with suppress(InfeasibleError):
                    limited(staged)
        if not found:  # why is told in short where another shape fits
            found.append(self._limited(heaviest, limit, self._worth_s(shape, found), explain=self.best is None))
        return min(found, key=attrgetter("step_time_s"))

    def _worth_s(self, shape: Shape, found: Sequence[Staged]) -> float:
        """Seconds: what a step of a shape has to take less than; without stages it takes no less than what the program counts."""
        if shape.pipeline.stages > 1:
            return math.inf
        return min([other.step_time_s for other in (*found, self.best) if other is not None], default=math.inf)

    def _check_free(self, free: Staged, limit: MemoryLimit) -> None:
        """Raise `InfeasibleError` if a shape that does not fit as it is takes no less than the best even so. Likely, and not proved: its
        stages may be cut otherwise under the limit; a complete search does not do it."""
        best = self.best
        if best is None or self.is_complete or free.step_time_s * (1 - free.decision.solution.gap) < best.step_time_s:
            return
        raise InfeasibleError(
            f"shape ({free.shape}): does not fit {limit} as it is, and takes {seconds_text(free.step_time_s)} even so; ({best.shape}) fits "
            f"and takes {seconds_text(best.step_time_s)}"
        )

    def unlimited(self, shape: Shape) -> Staged:
        """A shape without a limit of memory, with nothing computed again that it does not ask for."""
        return self._stage(shape, self.free(shape), (shape.recompute or "none",) * shape.pipeline.stages)

    def _saving(self, staged: Staged, limit: MemoryLimit) -> Staged | None:
        """The same decision with more computed again on the stages that do not fit; None if all is not enough."""

        def remade(levels: Sequence[str]) -> Staged:
            return self._stager(staged.shape, staged.decision, levels).staged(staged.stage_of)

        saved = save(staged, remade, limit, attrgetter("step_time_s"))
        return saved if saved.fits(limit) else None

    def _within(self, staged: Staged, limit: MemoryLimit) -> list[Staged]:
        """The same decision, cut evenly, or so that no stage takes more memory than its device has, as it is or with all computed again;
        what fits of it."""
        shape = staged.shape
        if not shape.is_cut_by_time:
            return []
        even = self._stager(shape, staged.decision, staged.levels).leanest()
        found = [self._saving(even, limit) if shape.recompute is None else even]
        for level in ("none", "full") if shape.recompute is None else (shape.recompute,):
            stager = self._stager(shape, staged.decision, (level,) * shape.pipeline.stages)
            found.append(stager.within(staged.taken(limit, keeps=level != "full")))
        return [other for other in found if other is not None and other.fits(limit)]

    def _limited(self, staged: Staged, limit: MemoryLimit, worth_s: float, *, explain: bool = False) -> Staged:
        """A decision under the memory limit, which the stages of a rank share evenly, with as much computed again; ``worth_s`` and
        ``explain`` are those of `Deciding`.

        Raises:
            InfeasibleError: there is none.
        """
        pipeline = staged.shape.pipeline
        if staged.shape.is_cut_by_time:
            staged = self._stager(staged.shape, staged.decision, staged.levels).leanest()
        chunks, most, least = pipeline.stages // pipeline.degree, limit.most, math.inf
        for _ in range(MAX_CUTS):
            try:
                staging = replace(staged.staging(), shares=limit.shares(pipeline.stages))
                decision = self.solve(staged.shape, staging, most / chunks, explain=explain, worth_s=worth_s)
            except InfeasibleError as error:
                if most < limit.most:
                    break
                if chunks == 1:
                    raise
                text = f"each of the {chunks} stages of a rank has an even part of its limit: {error}"
                least_bytes = chunks * error.least_bytes if error.least_bytes is not None else None
                raise InfeasibleError(text, limit_bytes=limit.most, least_bytes=least_bytes) from error
            stager, solved_for = self._stager(staged.shape, decision, staged.levels), staged.stage_of
            staged = stager.fastest()
            if staged.fits(limit):
                return staged
            if staged.shape.is_cut_by_time and (kept := stager.staged(solved_for)).fits(limit):
                return kept
            least = min(least, max(staged.rank_bytes))
            most *= limit.most / max(staged.rank_bytes) if pipeline.stages == 1 else 1.0  # other cuts are other programs
        what, others = ("cut into stages", "name the stages, ") if pipeline.stages > 1 else ("layout", "")
        advice = f"{others}use more ranks per stage, or smaller micro-batches"
        raise InfeasibleError(f"shape ({staged.shape}): no {what} was found that fits {limit} per rank; {advice}", least_bytes=least)

    def _stage(self, shape: Shape, decision: Decision, levels: Sequence[str]) -> Staged:
        """The fastest stages of a decision."""
        return self._stager(shape, decision, levels).fastest()

    def _stager(self, shape: Shape, decision: Decision, levels: Sequence[str]) -> Stager:
        places = places_of(self.machine_of(shape.grid), shape)
        return Stager(shape, decision, tuple(levels), places, self.limit(shape), training=self.training)

    def compressed(self, shape: Shape, levels: Sequence[str], decision: Decision, how: Compression | None) -> Staged:
        """A decision as it is, with gradients that travel in another way."""
        prices, variants = Prices(decision.problem, replace(decision.prices.pricer, compression=how)), decision.solution.variants
        solution = replace(decision.solution, objective=prices.objective(variants))
        return self._stage(shape, replace(decision, prices=prices, solution=solution), levels)

    def solve(self, shape: Shape, staging: Staging | None, limit_bytes: float, **settings: Unpack[Settings]) -> Decision:
        """The decision under a limit of memory, for each stage of a staging by itself."""
        decision = self._deciding(shape, staging, limit_bytes, **settings).result()
        self._note_whole(shape, decision)
        return decision

    def _deciding(self, shape: Shape, staging: Staging | None, limit_bytes: float, **settings: Unpack[Settings]) -> Deciding:
        return Deciding(
            self._problem(shape),
            places_of(self.machine_of(shape.grid), shape).inside,
            memory_limit_bytes=limit_bytes,
            restrictions=self.restrictions,
            optimizer=self.optimizer,
            training=self.training,
            offload=self.offload,
            compression=self.compression,
            staging=staging,
            starts=self._starts.setdefault(shape.mesh.sizes, {}),
            report=self.report,
            **settings,
        )

    def _problem(self, shape: Shape) -> Problem:
        """The problem of a shape; what does not change with the number of micro-batches, or the mesh, is taken from one that was built."""
        normal, microbatches = self.normal_for(shape.pipeline), shape.pipeline.microbatches
        if microbatches > 1 and microbatches not in self._splits:
            self._splits[microbatches] = normal.split(microbatches)
        split = self._splits.get(microbatches)
        if split is None:
            return self._built(normal, shape.mesh, None)
        alike = [known for known in self._problems if known.module is normal.module and known.goes_alike(split)]
        for known in alike:
            if known.mesh.in_space == shape.mesh:
                return known.in_parts(split)
        problem = self._built(normal, shape.mesh.with_time(microbatches), split, like=alike[0] if alike else None)
        self._problems.append(problem)
        return problem

    def _built(self, normal: Normal, mesh: Mesh, split: Split | None, like: Problem | None = None) -> Problem:
        tags = pin_tags(normal.module, self.restrictions)
        return build_problem(normal.module, normal.factors, mesh, split=split, tags=tags, repeats=self.repeats, like=like)

    def _note_whole(self, shape: Shape, decision: Decision) -> None:
        if shape.pipeline.microbatches == 1:
            self._whole_s = max(self._whole_s, decision.unsharded_s)
