"""The integer program: one variant for every cluster, least step time under a memory limit.

Sets: clusters n with variants s and multiplicities m_n; edges e = (n -> n') of a value on mesh axes a; fans f of edges.
With micro-batches, times are those of a step: of all its micro-batches, but for what is done to parameters once a step.
For an edge on an axis, p is how the source holds the value, q how the target wants it, c the number of shards on the other axes (of a
parameter: also of those ZeRO axes that are gathered later, so that p carries them).

    x[n,s]         in {0,1}   cluster n takes variant s
    y[e,a,p,q,c]   in [0,1]   the edge goes from p to q
    z[f,a,p,q,c]   in [0,1]   a fan of several edges pays for p -> q, once

    min   sum_n m_n time[n,s] x[n,s] + sum_f m_f blocking[p,q,c] z[f,a,p,q,c] + exposed_forward + exposed_backward + exposed_last

    one variant         sum_s x[n,s] = 1                                             (add_variants)
    edge, source side   sum_{q,c} y[e,a,p,q,c] = sum_{s holds p} x[n,s]                  (add_edges)
    edge, target side   sum_p y[e,a,p,q,c] = sum_{s wants q with c} x[n',s]              (add_edges)
    paid once           z[f,a,p,q,c] >= y[e,a,p,q,c]  for the edges e of f            (add_fans)
    overlap             exposed >= sum_f m_f hidden[p,q,c] z - sum_n m_n time[n,s] x[n,s], one each for forward and
                        backward, and for the last micro-batch with what these leave of its backward, exposed >= 0 (add_overlap)
    memory at moment t  sum bytes x + sum bytes k <= peak <= limit                       (add_memory)
    kept once           k[value,layout] >= sum_{s wants it so} x[n,s]  for the ops n that keep the value (add_memory)

Pairs (p, q) without a way have no y. The equalities make the relaxation tight: it is integral in most cases. A memory row is added for
the moment of the peak of the last solution, until the peak fits; rows and `Prices.memory` count the same bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from autopar.cost.pricing import EdgePrice
from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Value
from autopar.layout import Placement
from autopar.solve.footprint import MemoryUse
from autopar.solve.linear import LinearProgram
from autopar.solve.liveness import Keeper, Moment
from autopar.solve.prices import Objective, Prices, Way
from autopar.solve.problem import Edge, Problem
from autopar.units import bytes_text, seconds_text

TOLERANCE = 1e-5
"""Part of the limit by which the solver's tolerances may overstep it."""
INTEGRAL = 1e-6
"""How far a value of the relaxation may be from a whole number that it stands for."""
_ONLY_VALUES = mathopt.ModelSolveParameters(
    variable_values_filter=mathopt.SparseVectorFilter(skip_zero_values=True),
    dual_values_filter=mathopt.SparseVectorFilter(filtered_items=()),
    reduced_costs_filter=mathopt.SparseVectorFilter(filtered_items=()),
)
"""What the solver brings back: reading all of it takes longer than finding it (seen: ortools 9.15, 0.4 s of 0.6 for dual values alone)."""
_NO_RESTARTS = highs_pb2.HighsOptionsProto(bool_options={"mip_allow_restart": False})
"""Begun again each time that a tenth of the variables was fixed, before any branch is tried, the root takes half of the time, and its
bound stays where it was (seen: HiGHS 1.12 in ortools 9.15; the first branch closes the gap)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One variant per cluster, with what it costs."""

    variants: tuple[int, ...]
    objective: Objective
    memory: MemoryUse
    gap: float
    solve_time_s: float
    num_variables: int


@dataclass(slots=True)
class Program:
    """The integer program under construction, in units that keep its numbers far above the tolerances of the solver."""

    prices: Prices
    unit_s: float
    unit_bytes: float
    peak: int = field(init=False)
    linear: LinearProgram = field(default_factory=LinearProgram)
    x: list[list[int]] = field(default_factory=list)
    y: dict[tuple[Edge, int], list[int]] = field(default_factory=dict)
    k: dict[tuple[Value, tuple[Keeper, ...], tuple[Placement, ...]], int] = field(default_factory=dict)
    time: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    hidden: tuple[dict[int, float], ...] = field(default_factory=lambda: tuple(defaultdict(float) for _ in range(3)))

    @property
    def problem(self) -> Problem:
        return self.prices.problem


def add_variants(program: Program, allowed: Sequence[Sequence[int]]) -> None:
    """x, the one-hot rows and the time of every variant."""
    for cluster, times, rows in zip(program.problem.clusters, program.prices.times, allowed, strict=True):
        is_choice = len(rows) > 1
        chosen = set(rows)
        variables = [
            program.linear.variable(float(v in chosen and not is_choice), float(v in chosen), is_integer=is_choice)
            for v in range(len(cluster.variants))
        ]
        program.linear.row(dict.fromkeys(variables, 1.0), lower=1.0, upper=1.0)
        for variable, cost in zip(variables, cluster.multiplicity * times.total_s / program.unit_s, strict=True):
            program.time[variable] += float(cost)
        for variable, row in zip(variables, cluster.multiplicity * times.copied_s[:, 1:] / program.unit_s, strict=True):
            for sums, seconds in zip(program.hidden, row, strict=True):
                sums[variable] += float(seconds)
        program.x.append(variables)


def add_edges(program: Program) -> None:
    """y and its marginals, where it matters which way is gone."""
    for (edge, axis), table in program.prices.tables.items():
        if table.is_free:
            continue
        program.y[edge, axis] = variables = [program.linear.variable(upper=1.0) for _ in table.ways.ends]
        from_rows: list[dict[int, float]] = [{} for _ in table.sources]
        to_rows: list[dict[int, float]] = [{} for _ in table.targets]
        for (source, target), variable in zip(table.ways.ends, variables, strict=True):
            from_rows[source][variable] = to_rows[target][variable] = 1.0
        for row, sharded in zip(from_rows, table.sources.values(), strict=True):
            row.update((program.x[edge.source][v], -1.0) for v in sharded)
            program.linear.row(row, lower=0.0, upper=0.0)
        for row, sharded in zip(to_rows, table.targets.values(), strict=True):
            if edge.target is None:
                program.linear.row(row, lower=1.0, upper=1.0)
                continue
            row.update((program.x[edge.target][v], -1.0) for v in sharded)
            program.linear.row(row, lower=0.0, upper=0.0)


def add_fans(program: Program) -> None:
    """Prices of reshards: on y where one edge goes out, on z >= y where several do."""
    for fan in program.problem.fans:
        for axis in range(len(program.problem.mesh.sizes)):
            users: dict[Way, list[int]] = defaultdict(list)
            prices: dict[Way, EdgePrice] = {}
            for edge in fan.edges:
                if (edge, axis) not in program.y:
                    continue
                for (way, price), variable in zip(program.prices.tables[edge, axis].paid.items(), program.y[edge, axis], strict=True):
                    if any(price):
                        users[way].append(variable)
                        prices[way] = price
            for way, variables in users.items():
                payer = variables[0]
                if len(variables) > 1:
                    payer = program.linear.variable(upper=1.0)
                    for variable in variables:
                        program.linear.row({payer: 1.0, variable: -1.0}, lower=0.0)
                blocking, *hidden = (fan.multiplicity * price / program.unit_s for price in prices[way])
                program.time[payer] += blocking
                for sums, seconds in zip(program.hidden, hidden, strict=True):
                    sums[payer] += seconds


def add_overlap(program: Program) -> None:
    """Exposed communication of parameters and gradients: what does not fit under the compute of its part of the step."""
    forward, backward, last = program.hidden
    _expose(program, forward, _computed(program, "forward_s"))
    left = _expose(program, backward, _computed(program, "backward_s"))
    _expose(program, last, {variable: cost / program.problem.microbatches for variable, cost in left.items()})


def _computed(program: Program, name: str) -> dict[int, float]:
    """The row of what is computed in a part of the step."""
    row: dict[int, float] = {}
    for cluster, times, variables in zip(program.problem.clusters, program.prices.times, program.x, strict=True):
        for variable, cost in zip(variables, getattr(times, name), strict=True):
            if cost:
                row[variable] = cluster.multiplicity * float(cost) / program.unit_s
    return row


def _expose(program: Program, hidden: Mapping[int, float], cover: Mapping[int, float]) -> Mapping[int, float]:
    """Pay for what is hidden and finds no cover; the row of the cover that is left, which is no less than 0."""
    if not any(hidden.values()):
        return cover
    left = defaultdict(float, cover)
    for variable, cost in hidden.items():
        left[variable] -= cost
    exposed = program.linear.variable()
    program.time[exposed] += 1.0
    left[exposed] += 1.0
    program.linear.row(left, lower=0.0)
    return left


def add_memory(program: Program, moment: Moment) -> None:
    """Bytes held at a moment: parameters, gradients, optimizer, live activations and outputs."""
    problem, footprint = program.problem, program.prices.footprint
    alive = footprint.liveness.at(moment)
    row: dict[int, float] = defaultdict(float)

    def add(index: int, num_bytes: np.ndarray) -> None:
        for variable, size in zip(program.x[index], num_bytes, strict=True):
            row[variable] += float(size)

    for nodes, columns in ((alive.parameters, [0, 2]), (alive.gradients, [1]), (alive.copies, [3])):
        for node, count in nodes.items():
            add(problem.cluster_of[node], count * footprint.parameters[problem.cluster_of[node]][:, columns].sum(axis=1))
    for value, count in alive.values.items():
        add(problem.cluster_of[value.node], count * footprint.values[value])
    for nodes, bytes_of in (
        (alive.hidden, footprint.hidden),
        (alive.gathers, footprint.gathers),
        (alive.reductions, footprint.reductions),
        (alive.own_copies, footprint.copies),
        (alive.updated, footprint.updates),
    ):
        for node, count in nodes.items():
            add(problem.cluster_of[node], count * bytes_of[node])
    for (value, keepers), count in alive.kept.items():
        for layout, variable in _kept(program, value, keepers):
            row[variable] += count * footprint.kept_bytes(value, layout)
    for (value, keepers), count in alive.fetched.items() if footprint.moves else ():
        for layout, variable in _kept(program, value, keepers):
            row[variable] += count * footprint.moved_bytes(value, layout)
    unit_bytes = program.unit_bytes * footprint.liveness.shares[footprint.liveness.stage_of(moment)]
    scaled = {variable: size / unit_bytes for variable, size in row.items() if size}
    program.linear.row({**scaled, program.peak: -1.0}, upper=-alive.constant / unit_bytes)


def _kept(program: Program, value: Value, keepers: Sequence[Keeper]) -> Iterator[tuple[tuple[Placement, ...], int]]:
    """Layouts in which a value may be kept, each with the variables whose sum is 1 if it is."""
    users: dict[tuple[Placement, ...], list[list[int]]] = defaultdict(list)
    for by in keepers:
        index, layouts = program.prices.footprint.keeper(value, by)
        mine: dict[tuple[Placement, ...], list[int]] = defaultdict(list)
        for layout, variable in zip(layouts, program.x[index], strict=True):
            mine[layout].append(variable)
        for layout, variables in mine.items():
            users[layout].append(variables)
    for layout, wishes in users.items():
        if len(wishes) == 1:
            yield from ((layout, variable) for variable in wishes[0])
            continue
        key = value, tuple(keepers), layout
        if key not in program.k:
            program.k[key] = program.linear.variable(upper=1.0)
            for variables in wishes:
                program.linear.row({program.k[key]: 1.0, **dict.fromkeys(variables, -1.0)}, lower=0.0)
        yield layout, program.k[key]


def build_program(
    prices: Prices, allowed: Sequence[Sequence[int]], *, limit_bytes: float = np.inf, counts_time: bool = True
) -> Program:
    """The program without memory rows and without its objective; what only the time needs may be left out."""
    problem = prices.problem
    whole_s = sum(float(t.total_s.min()) * c.multiplicity for t, c in zip(prices.times, problem.clusters, strict=True))
    whole_bytes = prices.memory([rows[0] for rows in allowed]).of_limit
    program = Program(prices, unit_s=max(1e-12, whole_s) / 1e3, unit_bytes=max(1.0, min(limit_bytes, whole_bytes)))
    program.peak = program.linear.variable(upper=limit_bytes / program.unit_bytes)
    add_variants(program, allowed)
    add_edges(program)
    if counts_time:
        add_fans(program)
        add_overlap(program)
    return program


def solve(
    prices: Prices,
    *,
    memory_limit_bytes: float,
    allowed: Sequence[Sequence[int]] | None = None,
    gap: float = 1e-3,
    time_limit_s: float = 60.0,
    explain: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Solution:
    """Solve the program.

    Args:
        prices: the problem and its prices.
        memory_limit_bytes: bytes that a rank may hold at any time; of stages with other limits (`Staging.shares`) the largest.
        allowed: for each cluster the variants that pins leave; all if None.
        gap: relative gap at which the solver may stop.
        time_limit_s: limit of each call of the solver.
        explain: where nothing fits, find what the smallest plan needs, which takes as long again.

    Raises:
        InfeasibleError: nothing fits the memory limit.
        PlanError: what the pins leave does not go together, whatever the memory.
    """
    started = time.perf_counter()
    allowed = allowed or [range(len(cluster.variants)) for cluster in prices.problem.clusters]
    program = build_program(prices, allowed, limit_bytes=memory_limit_bytes)
    moments: set[Moment] = set()
    is_possible = False
    while True:
        relaxed = _relax(program, program.time, time_limit_s)
        if (missing := _missing(program, relaxed, memory_limit_bytes, moments)) is None:
            found = _found(program, relaxed, gap, time_limit_s)
            if found.variants is None:
                is_bounded = is_possible or (bool(moments) and goes_together(prices, allowed) is not False)
                raise _failure(prices, memory_limit_bytes, allowed, found.reason, is_bounded=is_bounded, explain=explain)
            is_possible = True
            memory, objective = prices.memory(found.variants), prices.objective(found.variants)
            report(f"step {seconds_text(objective.total_s)}, {bytes_text(memory.total)}")
            if _fits(memory, memory_limit_bytes):
                num_variables = len(program.linear.lower)
                return Solution(found.variants, objective, memory, found.gap, time.perf_counter() - started, num_variables)
            missing = memory.moment
        assert missing not in moments, "the program and the prices count the same bytes"
        add_memory(program, missing)
        moments.add(missing)


def _missing(program: Program, relaxed: _Relaxed, limit_bytes: float, moments: Set[Moment]) -> Moment | None:
    """The moment at which what the relaxation likes best takes more than the limit, if there is no row for it yet: each such row that is
    there before the program is solved spares to solve it for nothing."""
    if relaxed.values is None or not math.isfinite(limit_bytes):
        return None
    memory = program.prices.memory(_nearest(program, relaxed.values))
    return None if _fits(memory, limit_bytes) or memory.moment in moments else memory.moment


def _fits(memory: MemoryUse, limit_bytes: float) -> bool:
    return memory.of_limit <= limit_bytes * (1 + TOLERANCE)


def least_memory(prices: Prices, allowed: Sequence[Sequence[int]], *, gap: float = 1e-2, time_limit_s: float = 20.0) -> MemoryUse | None:
    """What the plan of least memory needs, to the gap; None if the solver finds no plan in time."""
    program = build_program(prices, allowed, counts_time=False)
    best: MemoryUse | None = None
    moments = {prices.memory([rows[0] for rows in allowed]).moment}
    add_memory(program, *moments)
    while True:
        found = _found(program, _relax(program, {program.peak: 1.0}, time_limit_s), gap, time_limit_s)
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
    found = _found(program, _relax(program, {}, time_limit_s), 1.0, time_limit_s)
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


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The model of a program, and the optimum of its relaxation: what is not zero, by variable; no values if it was not found."""

    model: mathopt.Model
    reason: mathopt.TerminationReason
    values: Mapping[int, float] | None
    objective: float


def _relax(program: Program, objective: Mapping[int, float], time_limit_s: float) -> _Relaxed:
    model = program.linear.model(objective)
    choices = [model.get_variable(number) for number in _choices(program)]
    for variable in choices:
        variable.integer = False
    result = mathopt.solve(
        model,
        mathopt.SolverType.GLOP,
        params=mathopt.SolveParameters(
            lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX, time_limit=datetime.timedelta(seconds=time_limit_s), random_seed=1
        ),
        model_params=_ONLY_VALUES,
    )
    for variable in choices:
        variable.integer = True
    reason = result.termination.reason
    if reason is not mathopt.TerminationReason.OPTIMAL:
        return _Relaxed(model, reason, None, math.nan)
    return _Relaxed(model, reason, _values(result), result.objective_value())


def _choices(program: Program) -> list[int]:
    """The variables that the relaxation lets be no whole numbers."""
    return [number for variables in program.x for number in variables if program.linear.integers[number]]


def _found(program: Program, relaxed: _Relaxed, gap: float, time_limit_s: float) -> _Found:
    """The optimum of the relaxation, which is mostly one of the program. If it is not, that of the program with all clusters that the
    relaxation has decided as they are, and if that is not within the gap of it, of the program."""
    if relaxed.reason is mathopt.TerminationReason.INFEASIBLE:
        return _Found(relaxed.reason)
    if relaxed.values is not None:
        decided = [number for number in _choices(program) if relaxed.values.get(number, 0.0) > 1 - INTEGRAL]
        if len(decided) == sum(program.linear.integers[numbers[0]] for numbers in program.x):
            return _Found(relaxed.reason, _nearest(program, relaxed.values), relaxed.objective, relaxed.objective)
        variables = [relaxed.model.get_variable(number) for number in decided]
        for variable in variables:
            variable.lower_bound = 1.0
        found = replace(_integer(program, relaxed.model, gap, time_limit_s), bound=relaxed.objective)
        for variable in variables:
            variable.lower_bound = 0.0
        if found.variants is not None and found.gap <= gap:
            return found
    return _integer(program, relaxed.model, gap, time_limit_s)


def _integer(program: Program, model: mathopt.Model, gap: float, time_limit_s: float) -> _Found:
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=gap, time_limit=datetime.timedelta(seconds=time_limit_s), random_seed=1, highs=_NO_RESTARTS
    )
    with _silent_library():
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    reason = result.termination.reason
    if not result.has_primal_feasible_solution():
        return _Found(reason)
    return _Found(reason, _nearest(program, _values(result)), result.objective_value(), result.best_objective_bound())


def _values(result: mathopt.SolveResult) -> dict[int, float]:
    return {variable.id: value for variable, value in result.variable_values().items()}


def _nearest(program: Program, values: Mapping[int, float]) -> tuple[int, ...]:
    """Of every cluster the variant that has most."""
    return tuple(int(np.argmax([values.get(number, 0.0) for number in numbers])) for numbers in program.x)


@contextlib.contextmanager
def _silent_library() -> Iterator[None]:
    """Keep standard output clean: the HiGHS of ortools 9.15 prints debug lines there from C++, whatever its parameters say."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


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
    kinds = ("parameters", "gradients", "optimizer", "gathered", "activations")
    parts = "" if use is None else ", ".join(f"{kind} {bytes_text(getattr(use, kind))}" for kind in kinds)
    needs = "" if use is None else f": even the plan of least memory needs {bytes_text(use.total)} ({parts})"
    limit = limit_bytes * (use.share if use is not None else 1.0)
    return InfeasibleError(
        f"no plan fits the memory limit of {bytes_text(limit)} per rank on mesh ({mesh}){needs}; raise memory_limit, use more "
        "ranks, or make the batch or the sequence smaller",
        least_bytes=None if use is None else use.total,
    )
