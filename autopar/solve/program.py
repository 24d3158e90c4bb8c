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
    memory at moment t  sum bytes x + sum bytes k + sum u + sum bytes y <= peak <= limit (add_memory)
    kept once           k[value,layout] >= sum_{s wants it so} x[n,s]  for the ops n that keep the value (add_memory)
    gradient moved      u[value,e] >= sum bytes x[n',s] - sum bytes x[n,s], u >= 0: what it takes more as it is wanted (add_memory)

Pairs (p, q) without a way have no y. The equalities make the relaxation tight: it is integral in most cases. Rows of memory are added for
the moments that need them (`solve.intra`); they and `Prices.memory` count the same bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.graph import Value
from autopar.layout import Placement
from autopar.solve.linear import LinearProgram
from autopar.solve.liveness import Keeper, Moment
from autopar.solve.prices import Prices
from autopar.solve.problem import Edge, Problem
from autopar.solve.ways import Way


@dataclass(slots=True)
class Program:
    """The integer program under construction, in units that keep its numbers far above the tolerances of the solver; ``some`` are
    variants that are allowed."""

    prices: Prices
    unit_s: float
    limit_bytes: float
    some: Sequence[int]
    _unit_bytes: float = field(default=0.0, init=False)
    peak: int = field(init=False)
    linear: LinearProgram = field(default_factory=LinearProgram)
    x: list[list[int]] = field(default_factory=list)
    y: dict[tuple[Edge, int], Sequence[int]] = field(default_factory=dict)
    k: dict[tuple[Value, tuple[Keeper, ...], tuple[Placement, ...]], int] = field(default_factory=dict)
    more: dict[tuple[Value, Sequence[Edge]], int] = field(default_factory=dict)
    time: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    hidden: tuple[dict[int, float], ...] = field(default_factory=lambda: tuple(defaultdict(float) for _ in range(3)))

    @property
    def problem(self) -> Problem:
        return self.prices.problem

    @property
    def unit_bytes(self) -> float:
        """No more than the limit, nor than some assignment takes, which is only counted where memory matters."""
        if not self._unit_bytes:
            self._unit_bytes = max(1.0, min(self.limit_bytes, self.prices.memory(self.some).of_limit))
        return self._unit_bytes

    def pay(self, variables: Sequence[int], prices: np.ndarray) -> None:
        """Count seconds for variables that nothing was counted for yet: for each, what is waited for, and what may hide, as in
        `cost.pricing.EdgePrice`."""
        for sums, row in zip((self.time, *self.hidden), (prices / self.unit_s).T.tolist(), strict=True):
            sums.update((variable, seconds) for variable, seconds in zip(variables, row, strict=True) if seconds)


def add_variants(program: Program, allowed: Sequence[Sequence[int]]) -> None:
    """x, the one-hot rows and the time of every variant."""
    for cluster, times, rows in zip(program.problem.clusters, program.prices.times, allowed, strict=True):
        is_choice = len(rows) > 1
        chosen = set(rows)
        variables = [
            program.linear.variable(float(v in chosen and not is_choice), float(v in chosen), is_integer=is_choice)
            for v in range(len(cluster.variants))
        ]
        program.linear.balance(variables, (), bound=1.0)
        program.pay(variables, cluster.multiplicity * np.column_stack((times.total_s, times.copied_s[:, 1:])))
        program.x.append(variables)


def add_edges(program: Program) -> None:
    """y and its marginals, where it matters which way is gone."""
    for (edge, axis), table in program.prices.tables.items():
        if table.is_free:
            continue
        network = table.ways.network
        program.y[edge, axis] = variables = program.linear.variables(len(network.ways), upper=1.0)
        for ways, sharded in zip(network.from_sources, table.sources.values(), strict=True):
            program.linear.balance([variables[way] for way in ways], [program.x[edge.source][v] for v in sharded])
        for ways, sharded in zip(network.to_targets, table.targets.values(), strict=True):
            wished = [variables[way] for way in ways]
            if edge.target is None:
                program.linear.balance(wished, (), bound=1.0)
            else:
                program.linear.balance(wished, [program.x[edge.target][v] for v in sharded])


def add_fans(program: Program) -> None:
    """Prices of reshards: on y where one edge goes out, on z >= y where several do."""
    for fan in program.problem.fans:
        for axis in range(len(program.problem.mesh.sizes)):
            edges = [edge for edge in fan.edges if (edge, axis) in program.y]
            if len(edges) == 1:
                program.pay(program.y[edges[0], axis], fan.multiplicity * program.prices.tables[edges[0], axis].ways.paid)
                continue
            users: dict[Way, list[int]] = defaultdict(list)
            prices: dict[Way, np.ndarray] = {}
            for edge in edges:
                ways = program.prices.tables[edge, axis].ways
                is_paid = np.any(ways.paid, axis=1)
                for way, price, variable, pays in zip(ways.network.ways, ways.paid, program.y[edge, axis], is_paid, strict=True):
                    if pays:
                        users[way].append(variable)
                        prices[way] = price
            payers = [variables[0] if len(variables) == 1 else _payer(program.linear, variables) for variables in users.values()]
            if payers:
                program.pay(payers, fan.multiplicity * np.array([*prices.values()]))


def _payer(linear: LinearProgram, variables: Sequence[int]) -> int:
    """One that is no less than any of several."""
    payer = linear.variable(upper=1.0)
    for variable in variables:
        linear.row({payer: 1.0, variable: -1.0}, lower=0.0)
    return payer


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

    count: float
    nodes: Mapping[fx.Node, float]
    by_column = ((alive.parameters, [0, 2]), (alive.gradients, [1]), (alive.copies, [3]), (alive.reduced, [4]))
    for nodes, columns in by_column:
        for node, count in nodes.items():
            add(problem.cluster_of[node], count * footprint.parameters[problem.cluster_of[node]][:, columns].sum(axis=1))
    for value, count in alive.values.items():
        add(problem.cluster_of[value.node], count * footprint.values[value])
    for value, count in alive.joins.items():
        add(problem.cluster_of[value.node], count * footprint.joins(value))
    for nodes, bytes_of in (
        (alive.hidden, footprint.hidden),
        (alive.gathers, footprint.gathers),
        (alive.reductions, footprint.reductions),
        (alive.gathered_rows, footprint.in_rows),
        (alive.reduced_rows, footprint.reduced_in_rows),
        (alive.partials, footprint.partials),
        (alive.coming, footprint.coming),
        (alive.own_copies, footprint.copies),
        (alive.updated, footprint.updates),
        (alive.stepped, footprint.together),
    ):
        for node, count in nodes.items():
            add(problem.cluster_of[node], count * bytes_of[node])
    for (value, keepers), count in alive.kept.items():
        for layout, variable in _kept(program, value, keepers):
            row[variable] += count * footprint.kept_bytes(value, layout)
    for (value, keepers), count in alive.fetched.items() if footprint.moves else ():
        for layout, variable in _kept(program, value, keepers):
            row[variable] += count * footprint.moved_bytes(value, layout)
    for (value, keepers), count in alive.again.items():
        for layout, variable in _kept(program, value, keepers):
            row[variable] += count * footprint.bytes_in(value, layout)
    for (value, keepers), count in alive.beside.items():
        for layout, variable in _kept(program, value, (None, *keepers)):
            row[variable] += count * footprint.bytes_in(value, layout)
        index, layouts = footprint.keeper(value, None)
        add(index, -count * np.array([footprint.bytes_in(value, layout) for layout in layouts]))
    for (value, edges), count in alive.resharded.items():
        row[_more(program, value, edges)] += count * program.unit_bytes
    for moved, bytes_over in ((alive.joined, footprint.joined_over), (alive.scattered, footprint.scattered_over)):
        for edge, count in moved.items():
            for axis in range(len(problem.mesh.sizes)):
                ways = program.prices.tables[edge, axis].ways.network.ways
                for way, variable in zip(ways, program.y.get((edge, axis), ()), strict=False):
                    row[variable] += count * bytes_over(edge.value, axis, way.held, way.wanted, way.shards)
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


def _more(program: Program, value: Value, edges: Sequence[Edge]) -> int:
    """What a gradient takes more than its value where it is moved over edges, in units."""
    footprint = program.prices.footprint
    if (value, edges) not in program.more:
        program.more[value, edges] = more = program.linear.variable()
        own, layouts = footprint.keeper(value, None)
        for edge in edges:
            row: dict[int, float] = defaultdict(float, {more: 1.0})
            target, wanted = footprint.keeper(value, edge)
            for sign, index, held in ((1.0, own, layouts), (-1.0, target, wanted)):
                for variable, layout in zip(program.x[index], held, strict=True):
                    row[variable] += sign * footprint.bytes_in(value, layout) / program.unit_bytes
            program.linear.row(row, lower=0.0)
    return program.more[value, edges]


def build_program(
    prices: Prices, allowed: Sequence[Sequence[int]], *, limit_bytes: float = np.inf, counts_time: bool = True
) -> Program:
    """The program without memory rows and without its objective; what only the time needs may be left out."""
    problem = prices.problem
    whole_s = sum(float(t.total_s.min()) * c.multiplicity for t, c in zip(prices.times, problem.clusters, strict=True))
    program = Program(prices, unit_s=max(1e-12, whole_s) / 1e3, limit_bytes=limit_bytes, some=[rows[0] for rows in allowed])
    program.peak = program.linear.variable(upper=limit_bytes / program.unit_bytes if np.isfinite(limit_bytes) else np.inf)
    add_variants(program, allowed)
    add_edges(program)
    if counts_time:
        add_fans(program)
        add_overlap(program)
    return program
