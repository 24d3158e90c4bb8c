"""Check the programs of a plan on all its ranks, in this process and without their memory: shapes, communication, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from autopar.capture.loss import LossFn
from autopar.dry.agree import disagreements
from autopar.dry.build import build
from autopar.dry.play import Programs, Trail, play
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.planner.request import Batch, check_functions, check_plan, load_plan, positional_and_keyword, precision_of
from autopar.planner.session import Session, open_session
from autopar.report import Report, silent
from autopar.runtime.module import make_skeleton
from autopar.schedule.check import check as check_schedule
from autopar.units import bytes_text, is_whole, number_text, share_text

TOLERANCE = 0.05
"""How far the memory counted in the graphs may be from the predicted one."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of a rank in bytes, as predicted, and as counted over the rewritten graphs, that also by kind."""

    rank: int
    predicted: int
    counted: int
    by_kind: Mapping[str, int]

    @property
    def ratio(self) -> float:
        """Counted over predicted."""
        return self.counted / self.predicted if self.predicted else float(self.counted > 0) + 1.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {bytes_text(num_bytes)}" for kind, num_bytes in self.by_kind.items() if num_bytes)
        both = f"{bytes_text(self.counted)} counted, {bytes_text(self.predicted)} predicted ({share_text(self.ratio)})"
        return f"rank {self.rank}: {both}: {kinds}"


@dataclass(frozen=True, slots=True)
class Checked:
    """What `check` found.

    Args:
        ranks: that were asked for.
        num_programs: different programs that they and those whom they talk to run.
        num_graphs: different graphs, each of which was run on fake tensors.
        num_calls: communication calls in a step of the first of ``ranks``, messages included.
        memory: of the first of ``ranks`` at each position of the pipeline.
        findings: what is wrong, in words; empty if nothing is.
    """

    ranks: tuple[int, ...]
    num_programs: int
    num_graphs: int
    num_calls: int
    memory: tuple[RankMemory, ...]
    findings: tuple[str, ...]

    def __str__(self) -> str:
        asked = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else number_text(len(self.ranks), "rank")
        calls = f"{number_text(self.num_calls, 'communication call')} in a step of rank {self.ranks[0]}"
        head = f"{asked}: {number_text(self.num_programs, 'program')}, {number_text(self.num_graphs, 'graph')}, {calls}"
        findings = [f"finding: {text}" for text in self.findings] or ["nothing wrong"]
        return "\n".join([head, *map(str, self.memory), *findings])


def check(
    model: nn.Module,
    plan: Plan | str,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    outputs: str = "whole",
    ranks: Iterable[int] | None = None,
    report: Report = silent,
) -> Checked:
    """Build the programs that ranks of a plan run, as they would be built at run time, and check them without devices or processes.

    Checked are the shapes of all values (graphs are run on fake tensors), the communication calls of these ranks against those of all ranks
    they talk to (each group agrees on op, order, dtype and size, each send has its receive, all come to the end), and peak memory by
    liveness against the predicted one.

    Args:
        model: the module, which may be on meta.
        plan: a plan for it, or its path.
        batch: what it was made for, which may be on meta.
        loss_fn: what it was made with (`autopar.plan`).
        outputs: likewise.
        ranks: of the plan's grid; by default all.
        report: called with a line of text at every phase.

    Raises:
        PlanError: the plan is of another model or batch, or there is no such rank.
    """
    session, made = open_plan(model, plan, batch, loss_fn=loss_fn, outputs=outputs, report=report)
    asked = _ranks(made, ranks)
    programs, findings = build(session, made, report=report)
    report("playing the step")
    return check_programs(made, lambda _: programs, asked, findings)


def open_plan(
    model: nn.Module, plan: Plan | str, batch: Batch, *, loss_fn: LossFn | None, outputs: str, report: Report
) -> tuple[Session, Plan]:
    """Capture the model that a plan is for; arguments and errors are those of `check`."""
    made = load_plan(plan)
    if not isinstance(made, Plan):
        raise PlanError(f"a plan is wanted, or the path of one, got {made}; make it with autopar.plan(..., plan={made})")
    check_functions(loss_fn, report)
    args, kwargs = positional_and_keyword(batch)
    precision = precision_of(None, made)
    session = open_session(
        make_skeleton(model), args, kwargs, loss_fn=loss_fn, outputs=outputs, precision=precision, symbolic=False, report=report
    )
    check_plan(made, session)
    return session, made


def _ranks(plan: Plan, ranks: Iterable[int] | None) -> tuple[int, ...]:
    count = plan.grid.num_ranks
    given = ranks if isinstance(ranks, Iterable | None) else (ranks,)
    asked = tuple(range(count)) if given is None else tuple(dict.fromkeys(given))
    if not all(is_whole(rank) for rank in asked):
        raise PlanError(f"ranks are whole numbers, as [0, 3], got {ranks!r}")
    wrong = [rank for rank in asked if not 0 <= rank < count]
    if wrong or not asked:
        named = f"there is no rank {wrong[0]}" if wrong else "no ranks are given"
        raise PlanError(f"{named}: the plan's grid ({plan.grid}) has ranks 0 to {count - 1}; name some of them")
    return asked


def check_programs(plan: Plan, programs_of: Callable[[int], Programs], ranks: Sequence[int], findings: Iterable[str] = ()) -> Checked:
    """Check what ranks run.

    Args:
        plan: the plan.
        programs_of: what each rank runs, the same object for ranks that run the same.
        ranks: to be checked.
        findings: of what has been checked before.
    """
    found = dict.fromkeys(findings)
    trails: dict[tuple[int, int], Trail] = {}
    sound: dict[int, bool] = {}

    def trail_of(rank: int) -> Trail:
        programs = programs_of(rank)
        position = position_of(plan, rank)
        if id(programs) not in sound:
            sound[id(programs)] = _is_sound(programs, found)
        key = id(programs), position
        if key not in trails:
            trails[key] = play(programs, position) if sound[id(programs)] else Trail((), 0, 0, {}, ())
            found.update(dict.fromkeys(trails[key].findings))
        return trails[key]

    first = trail_of(ranks[0])
    disagreeing = disagreements(plan, trail_of, ranks)
    memory: dict[int, RankMemory] = {}
    for rank in ranks:
        position, trail = position_of(plan, rank), trail_of(rank)
        if position not in memory and sound[id(programs_of(rank))]:
            memory[position] = RankMemory(rank, plan.prediction.peak_memory_bytes[position], trail.peak_bytes, trail.at_peak)
    found.update(dict.fromkeys(disagreeing if all(sound.values()) else ()))
    for use in memory.values():
        if abs(use.ratio - 1) > TOLERANCE:
            found[f"memory is not within {share_text(TOLERANCE)} of the prediction: {use}"] = None
    everyone = {id(programs): programs for programs in map(programs_of, ranks)}
    num_graphs = sum(len(programs.observed) for programs in everyone.values())
    return Checked(tuple(ranks), len(trails), num_graphs, len(first.calls), tuple(memory.values()), tuple(found))


def position_of(plan: Plan, rank: int) -> int:
    """Position of a rank on the pipeline axis."""
    return plan.grid.coordinate(rank)[plan.pipeline.position] if plan.pipeline.degree > 1 else 0


def _is_sound(programs: Programs, found: dict[str, None]) -> bool:
    """Whether the schedule can be played; if not, why is found."""
    if programs.pipeline is None:
        return True
    try:
        check_schedule(programs.pipeline.schedule)
    except PlanError as error:
        found[str(error)] = None
        return False
    return True
