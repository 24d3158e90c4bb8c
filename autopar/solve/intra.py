"""The integer program: one variant for every cluster, least step time under a memory limit.

Sets: clusters n with variants s and multiplicities m_n; edges e = (n -> n') of a value on mesh axes a; fans f of edges.
For an edge on an axis, p is how the source holds the value, q how the target wants it, c the number of shards on the other axes.

    x[n,s]         in {0,1}   cluster n takes variant s
    y[e,a,p,q,c]   in [0,1]   the edge goes from p to q
    z[f,a,p,q,c]   in [0,1]   a fan of several edges pays for p -> q, once

    min   sum_n m_n time[n,s] x[n,s] + sum_f m_f blocking[p,q,c] z[f,a,p,q,c] + exposed_forward + exposed_backward

    one variant         sum_s x[n,s] = 1                                             (add_variants)
    edge, source side   sum_{q,c} y[e,a,p,q,c] = sum_{s holds p} x[n,s]                  (add_edges)
    edge, target side   sum_p y[e,a,p,q,c] = sum_{s wants q with c} x[n',s]              (add_edges)
    paid once           z[f,a,p,q,c] >= y[e,a,p,q,c]  for the edges e of f            (add_fans)
    overlap             exposed >= sum_f m_f hidden[p,q,c] z - overlap sum_n m_n time[n,s] x[n,s], one each for
                        forward and backward, exposed >= 0                           (add_overlap)
    memory at op t      sum bytes x + sum copies y <= limit                           (add_memory)

Pairs (p, q) without a way have no y. The equalities make the relaxation tight: it is integral in most cases. A memory row is added for the op
at which the exact peak of the last solution lies, until the exact peak fits.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt.python import mathopt
from torch import fx

from autopar.cost.pricing import EdgePrice, Pricer, local_bytes
from autopar.errors import InfeasibleError
from autopar.graph import Value, specs_of, value_spec
from autopar.layout import Placement
from autopar.solve.liveness import Liveness, MemoryUse, find_liveness, memory_use
from autopar.solve.problem import Cluster, Edge, Problem
from autopar.storage import Held

Way = tuple[Held, Placement, int]
"""(p, q, c): from, to, shards on the other axes."""

MAX_ROUNDS = 12
"""Memory rows added before giving up on the exact peak."""


@dataclass(slots=True)
class ClusterTime:
    """Seconds of each variant of a cluster, once."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    update_s: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True, slots=True)
class Objective:
    """Predicted seconds of a step, by kind."""

    forward_s: float
    backward_s: float
    update_s: float
    blocking_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s + self.blocking_s + self.exposed_s


@dataclass(frozen=True, slots=True)
class Solution:
    """One variant per cluster, with what it costs."""

    variants: tuple[int, ...]
    objective: Objective
    memory: MemoryUse
    gap: float
    solve_time_s: float
    num_variables: int


def cluster_times(problem: Problem, pricer: Pricer) -> list[ClusterTime]:
    """Price every variant of every cluster, all variants of an op at a time."""
    return [_cluster_time(problem, pricer, cluster) for cluster in problem.clusters]


def _cluster_time(problem: Problem, pricer: Pricer, cluster: Cluster) -> ClusterTime:
    count = len(cluster.variants)
    forward, backward, update = np.zeros(count), np.zeros(count), np.zeros(count)
    if cluster.leader.op == "placeholder":
        spec = specs_of(cluster.leader)[0]
        held = [cluster.gives(Value(cluster.leader), v) for v in range(count)]
        return ClusterTime(forward, backward, np.array([pricer.update_time_s(spec, h) for h in held]))
    for node in cluster.members:
        rule = problem.factors.rules.get(node)
        sizes = _local_sizes(problem, cluster, node)
        op = pricer.op_time(node, rule, sizes, count)
        forward = forward + op.forward_s
        backward = backward + op.backward_s
        for letter in rule.reduced if rule else ():
            forward = forward + _inside_time(problem, pricer, cluster, node, letter)
    return ClusterTime(forward, backward, update)


def _local_sizes(problem: Problem, cluster: Cluster, node: fx.Node) -> dict[str, np.ndarray]:
    """Local size of every factor of an op, for every variant of its cluster."""
    letters = problem.factors.letters.get(node, {})
    sizes = {letter: np.full(len(cluster.variants), float(np.prod(atoms))) for letter, atoms in letters.items()}
    for axis, axis_size in enumerate(problem.mesh.sizes):
        names = [choice.members[node].name.partition(".")[0] for choice in cluster.choices[axis]]
        picks = np.array([variant[axis] for variant in cluster.variants])
        for letter in sizes:
            chosen = np.array([name == letter for name in names])
            sizes[letter] = np.where(chosen[picks], sizes[letter] / axis_size, sizes[letter])
    return sizes


def _inside_time(problem: Problem, pricer: Pricer, cluster: Cluster, node: fx.Node, letter: str) -> np.ndarray:
    """Collectives on float32 rows inside the op where ``letter`` is sharded."""
    times = np.zeros(len(cluster.variants))
    sizes = _local_sizes(problem, cluster, node)
    others = np.prod([size for name, size in sizes.items() if name != letter], axis=0)
    for v, variant in enumerate(cluster.variants):
        for axis, pick in enumerate(variant):
            if cluster.choices[axis][pick].members[node].name.partition(".")[0] == letter:
                times[v] += pricer.inside_time_s(4.0 * float(others[v]), axis)
    return times


class EdgeTable:
    """Ways and prices of one edge on one axis."""

    def __init__(self, problem: Problem, pricer: Pricer, edge: Edge, axis: int) -> None:
        mesh = problem.mesh
        self.sources: dict[Held, list[int]] = defaultdict(list)
        self.targets: dict[tuple[Placement, int], list[int]] = defaultdict(list)
        source = problem.clusters[edge.source]
        for v in range(len(source.variants)):
            self.sources[source.gives(edge.value, v)[axis]].append(v)
        if edge.target is None or edge.operand is None:
            self.targets[Placement.parse("R"), 1] = [0]
        else:
            target = problem.clusters[edge.target]
            for v in range(len(target.variants)):
                wants = target.wants(edge.operand, v)
                self.targets[wants[axis], _other_shards(wants, axis, mesh.sizes)].append(v)
        spec = value_spec(edge.value)
        is_parameter = edge.value.node.op == "placeholder"
        price = pricer.parameter_edge if is_parameter else pricer.edge
        self.prices: dict[Way, EdgePrice] = {}
        for p in self.sources:
            for q, c in self.targets:
                found = price(p, q, spec.num_bytes / c, axis, needs_grad=spec.requires_grad)
                if found is not None:
                    self.prices[p, q, c] = found


def _other_shards(placements: Sequence[Placement], axis: int, sizes: Sequence[int]) -> int:
    shards = 1
    for other, placement in enumerate(placements):
        if other != axis and placement.is_sharded:
            shards *= sizes[other]
    return shards


class Prices:
    """Everything that the program and its checks need to know about a problem, worked out once."""

    def __init__(self, problem: Problem, pricer: Pricer) -> None:
        self.problem = problem
        self.pricer = pricer
        self.times = cluster_times(problem, pricer)
        self.liveness: Liveness = find_liveness(problem)
        self.tables: dict[tuple[Edge, int], EdgeTable] = {}
        for edge in problem.edges:
            for axis in range(len(problem.mesh.sizes)):
                self.tables[edge, axis] = EdgeTable(problem, pricer, edge, axis)

    def objective(self, variants: Sequence[int]) -> Objective:
        """The objective of the program at one variant per cluster; infinite where an edge has no way."""
        problem = self.problem
        sums = np.zeros(3)
        for cluster, times, v in zip(problem.clusters, self.times, variants, strict=True):
            sums += cluster.multiplicity * np.array([times.forward_s[v], times.backward_s[v], times.update_s[v]])
        paid = np.zeros(3)
        for fan in problem.fans:
            for axis in range(len(problem.mesh.sizes)):
                ways = {self.way(edge, axis, variants): edge for edge in fan.edges}
                for way, edge in ways.items():
                    price = self.tables[edge, axis].prices.get(way)
                    paid += fan.multiplicity * np.array(price if price is not None else (np.inf, 0.0, 0.0))
        forward, backward, update = sums
        overlap = self.pricer.overlap
        exposed = max(0.0, paid[1] - overlap * forward) + max(0.0, paid[2] - overlap * backward)
        return Objective(float(forward), float(backward), float(update), float(paid[0]), float(exposed))

    def way(self, edge: Edge, axis: int, variants: Sequence[int]) -> Way:
        """The way that an edge takes on an axis under an assignment."""
        held = self.problem.clusters[edge.source].gives(edge.value, variants[edge.source])[axis]
        if edge.target is None or edge.operand is None:
            return held, Placement.parse("R"), 1
        wants = self.problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
        return held, wants[axis], _other_shards(wants, axis, self.problem.mesh.sizes)

    def memory(self, variants: Sequence[int]) -> MemoryUse:
        return memory_use(self.problem, self.liveness, self.pricer, variants)


@dataclass(slots=True)
class Program:
    """The integer program under construction."""

    prices: Prices
    model: mathopt.Model = field(default_factory=lambda: mathopt.Model(name="intra"))
    x: list[list[mathopt.Variable]] = field(default_factory=list)
    y: dict[tuple[Edge, int], dict[Way, mathopt.Variable]] = field(default_factory=dict)
    objective: dict[mathopt.Variable, float] = field(default_factory=lambda: defaultdict(float))
    hidden: tuple[dict[mathopt.Variable, float], dict[mathopt.Variable, float]] = field(
        default_factory=lambda: (defaultdict(float), defaultdict(float))
    )

    @property
    def problem(self) -> Problem:
        return self.prices.problem

    def row(self, coefficients: Mapping[mathopt.Variable, float], *, lower: float = -np.inf, upper: float = np.inf) -> None:
        constraint = self.model.add_linear_constraint(lb=lower, ub=upper)
        for variable, coefficient in coefficients.items():
            constraint.set_coefficient(variable, coefficient)


def add_variants(program: Program, allowed: Sequence[Sequence[int]]) -> None:
    """x, the one-hot rows and the time of every variant."""
    for cluster, times, rows in zip(program.problem.clusters, program.prices.times, allowed, strict=True):
        is_choice = len(rows) > 1
        chosen = set(rows)
        variables = [
            program.model.add_variable(lb=float(v in chosen and not is_choice), ub=float(v in chosen), is_integer=is_choice)
            for v in range(len(cluster.variants))
        ]
        program.row(dict.fromkeys(variables, 1.0), lower=1.0, upper=1.0)
        for variable, cost in zip(variables, cluster.multiplicity * times.total_s, strict=True):
            program.objective[variable] += float(cost)
        program.x.append(variables)


def add_edges(program: Program) -> None:
    """y and its marginals."""
    for (edge, axis), table in program.prices.tables.items():
        ways = {way: program.model.add_variable(lb=0.0, ub=1.0) for way in table.prices}
        program.y[edge, axis] = ways
        for p, variants in table.sources.items():
            row = {variable: 1.0 for way, variable in ways.items() if way[0] == p}
            for v in variants:
                row[program.x[edge.source][v]] = -1.0
            program.row(row, lower=0.0, upper=0.0)
        for (q, c), variants in table.targets.items():
            row = {variable: 1.0 for way, variable in ways.items() if way[1:] == (q, c)}
            if edge.target is None:
                program.row(row, lower=1.0, upper=1.0)
                continue
            for v in variants:
                row[program.x[edge.target][v]] = row.get(program.x[edge.target][v], 0.0) - 1.0
            program.row(row, lower=0.0, upper=0.0)


def add_fans(program: Program) -> None:
    """Prices of reshards: on y where one edge goes out, on z >= y where several do."""
    for fan in program.problem.fans:
        for axis in range(len(program.problem.mesh.sizes)):
            users: dict[Way, list[mathopt.Variable]] = defaultdict(list)
            prices: dict[Way, EdgePrice] = {}
            for edge in fan.edges:
                table = program.prices.tables[edge, axis]
                for way, variable in program.y[edge, axis].items():
                    if any(table.prices[way]):
                        users[way].append(variable)
                        prices[way] = table.prices[way]
            for way, variables in users.items():
                payer = variables[0]
                if len(variables) > 1:
                    payer = program.model.add_variable(lb=0.0, ub=1.0)
                    for variable in variables:
                        program.row({payer: 1.0, variable: -1.0}, lower=0.0)
                blocking, forward, backward = (fan.multiplicity * price for price in prices[way])
                program.objective[payer] += blocking
                program.hidden[0][payer] += forward
                program.hidden[1][payer] += backward


def add_overlap(program: Program) -> None:
    """Exposed communication of parameters and gradients: what does not fit under the compute of its half."""
    for half, name in enumerate(("forward_s", "backward_s")):
        row = {variable: -cost for variable, cost in program.hidden[half].items() if cost}
        if not row:
            continue
        exposed = program.model.add_variable(lb=0.0)
        program.objective[exposed] += 1.0
        row[exposed] = 1.0
        for cluster, times, variables in zip(program.problem.clusters, program.prices.times, program.x, strict=True):
            for variable, cost in zip(variables, getattr(times, name), strict=True):
                if cost:
                    row[variable] = program.prices.pricer.overlap * cluster.multiplicity * float(cost)
        _scaled_row(program, row, lower=0.0)


def _scaled_row(program: Program, row: Mapping[mathopt.Variable, float], *, lower: float = -np.inf, upper: float = np.inf) -> None:
    """A row of very small or very large numbers, divided by its largest."""
    scale = max(abs(value) for value in row.values()) or 1.0
    program.row({variable: value / scale for variable, value in row.items()}, lower=lower / scale, upper=upper / scale)


def add_memory(program: Program, position: int, limit_bytes: float) -> None:
    """Bytes held at the backward of op ``position``: parameters, gradients, optimizer, and live activations."""
    problem, pricer = program.problem, program.prices.pricer
    row: dict[mathopt.Variable, float] = defaultdict(float)
    values, copies = program.prices.liveness.counts_at(position)
    for index, cluster in enumerate(problem.clusters):
        for v, variable in enumerate(program.x[index]):
            if cluster.leader.op == "placeholder":
                held = cluster.gives(Value(cluster.leader), v)
                row[variable] += cluster.multiplicity * pricer.parameter_bytes(specs_of(cluster.leader)[0], held).total
    for value, count in values.items():
        index = problem.cluster_of[value.node]
        for v, variable in enumerate(program.x[index]):
            row[variable] += count * local_bytes(value_spec(value), problem.clusters[index].gives(value, v), problem.mesh)
    for (edge, axis), ways in program.y.items():
        count = copies.get(edge.operand, 0) if edge.operand else 0
        for (p, q, c), variable in ways.items() if count else ():
            if p != q and isinstance(p, Placement) and not (p.holds_whole and q.holds_whole):
                shards = c * (problem.mesh.sizes[axis] if q.is_sharded else 1)
                row[variable] += count * value_spec(edge.value).num_bytes / shards
    _scaled_row(program, row, upper=limit_bytes)


def solve(
    prices: Prices,
    *,
    memory_limit_bytes: float,
    allowed: Sequence[Sequence[int]] | None = None,
    gap: float = 1e-3,
    time_limit_s: float = 60.0,
    report: Callable[[str], None] = lambda text: None,
) -> Solution:
    """Solve the program.

    Args:
        prices: the problem and its prices.
        memory_limit_bytes: bytes that a rank may hold at any time.
        allowed: for each cluster the variants that pins leave; all if None.
        gap: relative gap at which the solver may stop.
        time_limit_s: limit of each call of the solver.

    Raises:
        InfeasibleError: nothing fits the memory limit; the text says what the smallest plan needs.
    """
    started = time.perf_counter()
    problem = prices.problem
    allowed = allowed or [range(len(cluster.variants)) for cluster in problem.clusters]
    program = Program(prices)
    add_variants(program, allowed)
    add_edges(program)
    add_fans(program)
    add_overlap(program)
    scale = 1e3 / max(1e-12, sum(float(t.total_s.min()) * c.multiplicity for t, c in zip(prices.times, problem.clusters, strict=True)))
    program.model.minimize(sum(scale * cost * variable for variable, cost in program.objective.items() if cost))
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=gap, time_limit=datetime.timedelta(seconds=time_limit_s), random_seed=1
    )
    seen: set[int] = set()
    for _ in range(MAX_ROUNDS):
        with _silent_library():
            result = mathopt.solve(program.model, mathopt.SolverType.HIGHS, params=parameters)
        if not result.has_primal_feasible_solution():
            raise InfeasibleError(_shortage(prices, memory_limit_bytes, allowed))
        chosen = result.variable_values()
        variants = tuple(int(np.argmax([chosen[variable] for variable in variables])) for variables in program.x)
        memory = prices.memory(variants)
        report(f"step {prices.objective(variants).total_s * 1e3:.2f} ms, {memory.total / 2**30:.2f} GiB")
        if memory.total <= memory_limit_bytes * (1 + 1e-6):
            found = result.objective_value()
            bound = result.best_objective_bound()
            return Solution(
                variants,
                prices.objective(variants),
                memory,
                max(0.0, (found - bound) / abs(found)) if found else 0.0,
                time.perf_counter() - started,
                program.model.get_num_variables(),
            )
        if memory.position in seen:
            memory_limit_bytes_row = memory_limit_bytes - (memory.total - memory_limit_bytes)
            add_memory(program, memory.position, memory_limit_bytes_row)
        else:
            add_memory(program, memory.position, memory_limit_bytes)
        seen.add(memory.position)
    raise InfeasibleError(_shortage(prices, memory_limit_bytes, allowed))


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


def _shortage(prices: Prices, limit_bytes: float, allowed: Sequence[Sequence[int]]) -> str:
    """What the plan of least memory would need, against the limit."""
    variants = []
    for cluster, rows in zip(prices.problem.clusters, allowed, strict=True):
        if cluster.leader.op == "placeholder":
            spec = specs_of(cluster.leader)[0]
            needs = [prices.pricer.parameter_bytes(spec, cluster.gives(Value(cluster.leader), v)).total for v in rows]
        else:
            values = [value for value in cluster.choices[0][0].gives]
            needs = [
                sum(local_bytes(value_spec(u), cluster.gives(u, v), prices.problem.mesh) for u in values) for v in rows
            ]
        variants.append(rows[int(np.argmin(needs))])
    use = prices.memory(variants)
    gib = 2**30
    return (
        f"no plan fits the memory limit of {limit_bytes / gib:.3f} GiB per rank on mesh ({prices.problem.mesh}): even the plan of least memory "
        f"needs about {use.total / gib:.3f} GiB (parameters {use.parameters / gib:.3f}, gradients {use.gradients / gib:.3f}, optimizer "
        f"{use.optimizer / gib:.3f}, gathered {use.gathered / gib:.3f}, activations {use.activations / gib:.3f}); raise memory_limit, use more "
        "ranks, or make the batch or the sequence smaller"
    )
