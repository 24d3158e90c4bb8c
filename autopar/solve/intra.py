"""Prices -> solution: the optimum of the integer program (`solve.program`) by its relaxation, and where that is fractional by HiGHS.

A row of memory is added for the moment of the peak of the last solution, or of what the relaxation likes best, until the peak fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from ortools.math_opt.model_pb2 import ModelProto
from ortools.math_opt.python import mathopt
from ortools.math_opt.solution_pb2 import BasisProto
from ortools.util.python.solve_interrupter import SolveInterrupter

from autopar.errors import InfeasibleError, PlanError
from autopar.plan import MEMORY_KINDS
from autopar.solve.footprint import MemoryUse
from autopar.solve.heed import Running
from autopar.solve.highs import solve_integer, stop_integer
from autopar.solve.liveness import Moment
from autopar.solve.prices import Objective, Prices
from autopar.solve.program import Program, add_memory, build_program
from autopar.solve.solver import Answer, solve_relaxed
from autopar.units import bytes_text, seconds_text

Result = TypeVar("Result")

TOLERANCE = 1e-5
"""Part of the limit by which the solver's tolerances may overstep it."""
INTEGRAL = 1e-6
"""How far a value of the relaxation may be from a whole number that it stands for."""


Starts = dict[tuple[int, int], BasisProto]
"""Where relaxations of problems on one mesh ended, by variables and rows: another with as many differs from it mostly in its numbers alone,
and where it does not, the basis is only a worse one to begin with."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One variant per cluster, with what it costs."""

    variants: tuple[int, ...]
    objective: Objective
    gap: float
    solve_time_s: float
    num_variables: int


class Solving:
    """A program that is being solved, beside what else its caller does until it wants the `result`.

    Args:
        prices: the problem and its prices.
        memory_limit_bytes: bytes that a rank may hold at any time; of stages with other limits (`Staging.shares`) the largest.
        allowed: for each cluster the variants that pins leave; all if None.
        gap: relative gap at which the solver may stop.
        time_limit_s: limit of each call of the solver.
        explain: where nothing fits, find whether it is for want of memory, and what the smallest plan needs, which takes as long again.
        worth_s: seconds; a step that takes no less is not looked for.
        starts: where to begin; gets where the relaxation without a limit of memory ended.
    """

    def __init__(
        self,
        prices: Prices,
        *,
        memory_limit_bytes: float,
        allowed: Sequence[Sequence[int]] | None = None,
        gap: float = 1e-3,
        time_limit_s: float = 60.0,
        explain: bool = True,
        worth_s: float = math.inf,
        starts: Starts | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        started_s = time.perf_counter()
        self._prices, self._limit_bytes, self._explain, self._report = prices, memory_limit_bytes, explain, report
        self._allowed = allowed or [range(len(cluster.variants)) for cluster in prices.problem.clusters]
        self._gap, self._time_limit_s, self._worth_s = gap, time_limit_s, worth_s
        self._program = build_program(prices, self._allowed, limit_bytes=memory_limit_bytes)
        self._moments: set[Moment] = set()
        self._starts, self._size = starts if starts is not None else {}, self._program.linear.size
        self._solve_time_s = time.perf_counter() - started_s
        self._running = self._begin(self._starts.get(self._size))

    def leave(self) -> None:
        """End it without a result."""
        self._running.leave()

    def result(self) -> Solution:
        """The solution.

        Raises:
            InfeasibleError: nothing fits the memory limit, or nothing that is worth it.
            PlanError: what the pins leave does not go together, whatever the memory.
        """
        prices, is_possible = self._prices, False
        while True:
            relaxed, missing, found = self._running.result()
            if relaxed.basis is not None and self._program.linear.size == self._size:
                self._starts[self._size] = relaxed.basis
            if self._is_slow(relaxed):
                limit, least_s = bytes_text(self._limit_bytes), seconds_text(relaxed.objective * self._program.unit_s)
                raise InfeasibleError(f"what fits {limit} per rank on mesh ({prices.problem.mesh}) takes {least_s} or more")
            if found is not None:
                if found.variants is None:
                    raise self._failure(found.reason, is_possible=is_possible)
                is_possible = True
                objective = prices.objective(found.variants)
                self._report(f"step {seconds_text(objective.total_s)}")
                missing = _over(prices, found.variants, self._limit_bytes)
                if missing is None:
                    return Solution(found.variants, objective, found.gap, self._solve_time_s, len(self._program.linear.lower))
            assert missing is not None and missing not in self._moments, "the program and the prices count the same bytes"
            add_memory(self._program, missing)
            self._moments.add(missing)
            self._running = self._begin(relaxed.basis)

    def _begin(self, start: BasisProto | None) -> Running[tuple[Answer, Moment | None, _Found | None]]:
        """The relaxation, and the moment that it lacks a row for, or else what is found from there."""
        program, time_limit_s = self._program, self._time_limit_s

        def attempt(interrupter: SolveInterrupter) -> tuple[Answer, Moment | None, _Found | None]:
            started_s = time.perf_counter()
            relaxed = _relax(program, program.time, time_limit_s, interrupter, start)
            missing = _missing(program, relaxed, self._limit_bytes, self._moments)
            is_last = missing is None and not self._is_slow(relaxed)
            found = _found(program, program.time, relaxed, self._gap, time_limit_s, interrupter) if is_last else None
            self._solve_time_s += time.perf_counter() - started_s
            return relaxed, missing, found

        return _beside(attempt)

    def _is_slow(self, relaxed: Answer) -> bool:
        return relaxed.values is not None and relaxed.objective * self._program.unit_s >= self._worth_s

    def _failure(self, reason: mathopt.TerminationReason, *, is_possible: bool) -> PlanError:
        prices, allowed, explain = self._prices, self._allowed, self._explain
        is_bounded = is_possible or (bool(self._moments) and (not explain or goes_together(prices, allowed) is not False))
        return _failure(prices, self._limit_bytes, allowed, reason, is_bounded=is_bounded, explain=explain)


def solve(
    prices: Prices,
    *,
    memory_limit_bytes: float,
    allowed: Sequence[Sequence[int]] | None = None,
    gap: float = 1e-3,
    starts: Starts | None = None,
) -> Solution:
    """The result of `Solving`, with nothing beside it."""
    return Solving(prices, memory_limit_bytes=memory_limit_bytes, allowed=allowed, gap=gap, starts=starts).result()


def _beside(function: Callable[[SolveInterrupter], Result]) -> Running[Result]:
    """Calls of solvers in another thread, which end when they are left."""
    interrupter = SolveInterrupter()

    def stop() -> None:
        interrupter.interrupt()
        stop_integer(interrupter)

    return Running(lambda: function(interrupter), stop=stop)


def _missing(program: Program, relaxed: Answer, limit_bytes: float, moments: Set[Moment]) -> Moment | None:
    """The moment at which what the relaxation likes best takes more than the limit, if there is no row for it yet: each such row that is
    there before the program is solved spares to solve it for nothing."""
    if relaxed.values is None or not math.isfinite(limit_bytes):
        return None
    moment = _over(program.prices, _nearest(program, relaxed.values), limit_bytes)
    return None if moment in moments else moment


def _over(prices: Prices, variants: Sequence[int], limit_bytes: float) -> Moment | None:
    """When an assignment takes more memory than the limit, if it does."""
    if not math.isfinite(limit_bytes):
        return None
    memory = prices.memory(variants)
    return memory.moment if memory.of_limit > limit_bytes * (1 + TOLERANCE) else None


def least_memory(prices: Prices, allowed: Sequence[Sequence[int]], *, gap: float = 1e-2, time_limit_s: float = 20.0) -> MemoryUse | None:
    """What the plan of least memory needs, to the gap; None if the solver finds no plan in time."""
    program = build_program(prices, allowed, counts_time=False)
    best: MemoryUse | None = None
    moments = {prices.memory([rows[0] for rows in allowed]).moment}
    add_memory(program, *moments)
    peak = {program.peak: 1.0}
    while True:
        found = _optimum(program, peak, gap, time_limit_s)
        if found.variants is None:
            return best
        memory = prices.memory(found.variants)
        best = memory if best is None or memory.of_limit < best.of_limit else best
        if memory.moment in moments:
            return best
        add_memory(program, memory.moment)
        moments.add(memory.moment)


def goes_together(prices: Prices, allowed: Sequence[Sequence[int]], *, time_limit_s: float = 20.0) -> bool | None:
    """Whether there is an assignment at all, whatever it takes; None if the solver cannot tell in time."""
    program = build_program(prices, allowed, counts_time=False)
    found = _optimum(program, {}, 1.0, time_limit_s)
    if found.variants is not None:
        return True
    return None if found.reason is mathopt.TerminationReason.NO_SOLUTION_FOUND else False


@dataclass(frozen=True, slots=True)
class _Found:
    """What the solver has found, in the units of the program; no variants if nothing, with the reason."""

    reason: mathopt.TerminationReason
    variants: tuple[int, ...] | None = None
    objective: float = math.inf
    bound: float = -math.inf

    @property
    def gap(self) -> float:
        return max(0.0, (self.objective - self.bound) / abs(self.objective)) if self.objective else 0.0


def _optimum(program: Program, objective: Mapping[int, float], gap: float, time_limit_s: float) -> _Found:
    def both(interrupter: SolveInterrupter) -> _Found:
        relaxed = _relax(program, objective, time_limit_s, interrupter)
        return _found(program, objective, relaxed, gap, time_limit_s, interrupter)

    return _beside(both).result()


def _relax(
    program: Program,
    objective: Mapping[int, float],
    time_limit_s: float,
    interrupter: SolveInterrupter,
    start: BasisProto | None = None,
) -> Answer:
    model = program.linear.model(objective, is_relaxed=True)
    return solve_relaxed(model, start=start, time_limit_s=time_limit_s, interrupter=interrupter)


def _choices(program: Program) -> list[int]:
    """The variables that the relaxation lets be no whole numbers."""
    return [number for variables in program.x for number in variables if program.linear.integers[number]]


def _found(
    program: Program,
    objective: Mapping[int, float],
    relaxed: Answer,
    gap: float,
    time_limit_s: float,
    interrupter: SolveInterrupter,
) -> _Found:
    """The optimum of the relaxation, which is mostly one of the program. If it is not, that of the program with all clusters that the
    relaxation has decided as they are, and if that is not within the gap of it, of the program."""
    if relaxed.reason is mathopt.TerminationReason.INFEASIBLE:
        return _Found(relaxed.reason)
    if relaxed.values is not None:
        decided = [number for number in _choices(program) if relaxed.values.get(number, 0.0) > 1 - INTEGRAL]
        if len(decided) == sum(program.linear.integers[numbers[0]] for numbers in program.x):
            return _Found(relaxed.reason, _nearest(program, relaxed.values), relaxed.objective, relaxed.objective)
        model = program.linear.model(objective)
        for number in decided:
            model.variables.lower_bounds[number] = 1.0
        found = replace(_integer(program, model, gap, time_limit_s, interrupter), bound=relaxed.objective)
        if found.variants is not None and found.gap <= gap:
            return found
    return _integer(program, program.linear.model(objective), gap, time_limit_s, interrupter)


def _integer(program: Program, model: ModelProto, gap: float, time_limit_s: float, interrupter: SolveInterrupter) -> _Found:
    answer = solve_integer(model, gap=gap, time_limit_s=time_limit_s, interrupter=interrupter)
    if answer.values is None:
        return _Found(answer.reason)
    return _Found(answer.reason, _nearest(program, answer.values), answer.objective, answer.bound)


def _nearest(program: Program, values: Mapping[int, float]) -> tuple[int, ...]:
    """Of every cluster the variant that has most."""
    return tuple(int(np.argmax([values.get(number, 0.0) for number in numbers])) for numbers in program.x)


def _failure(
    prices: Prices,
    limit_bytes: float,
    allowed: Sequence[Sequence[int]],
    reason: mathopt.TerminationReason,
    *,
    is_bounded: bool,
    explain: bool,
) -> PlanError:
    """Why there is no solution, with what the plan of least memory would need."""
    mesh = prices.problem.mesh
    if reason is mathopt.TerminationReason.NO_SOLUTION_FOUND:
        return InfeasibleError(f"the solver found no plan in its time limit on mesh ({mesh}); pin some parameters, or use fewer axes")
    if not is_bounded:
        return PlanError(
            f"the pins do not go together on mesh ({mesh}): there is no way from what one fixes to what another wants; fix fewer "
            "parameters or ops"
        )
    use = least_memory(prices, allowed) if explain else None
    parts = "" if use is None else ", ".join(f"{kind} {bytes_text(getattr(use, kind))}" for kind in MEMORY_KINDS)
    needs = "" if use is None else f": even the plan of least memory needs {bytes_text(use.total)} ({parts})"
    limit = limit_bytes * (use.share if use is not None else 1.0)
    return InfeasibleError(
        f"no plan fits the memory limit of {bytes_text(limit)} per rank on mesh ({mesh}){needs}; raise memory_limit, use more "
        "ranks, or make the batch or the sequence smaller",
        least_bytes=None if use is None else use.total,
    )
