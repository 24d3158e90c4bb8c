"""The integer program against trying every assignment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.math_opt.python import mathopt
from torch import nn

from autopar.cost.updates import FOREACH_COPIES, UPDATE_COPIES
from autopar.errors import InfeasibleError, PlanError
from autopar.graph import is_call, value_spec
from autopar.layout import REPLICATED
from autopar.mesh import Mesh
from autopar.planner.session import open_session
from autopar.solve import intra
from autopar.solve.build import build_problem
from autopar.solve.intra import Solving, least_memory, solve
from autopar.solve.liveness import Phase, Staging
from autopar.solve.prices import Prices
from autopar.solve.program import add_memory, build_program
from autopar.solve.ways import Way
from autopar.units import bytes_text
from tests.marks import few
from tests.solve.problems import (
    SMALL,
    enumerate_all,
    machine,
    prices_of,
    random_allowed,
    random_machine,
    session,
    small,
    walk,
)

pytestmark = pytest.mark.slow

GAP = 1e-3


def whole_program_at(prices: Prices, variants: tuple[int, ...]) -> tuple[float, float]:
    """Seconds and peak bytes that the program itself gives an assignment."""
    program = build_program(prices, [[v] for v in variants])
    add_memory(program, prices.memory(variants).moment)
    model = mathopt.Model.from_model_proto(program.linear.model({**program.time, program.peak: 1e-6}))
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    values = {variable.id: value for variable, value in result.variable_values().items()}
    time_s = program.unit_s * sum(cost * values[x] for x, cost in program.time.items())
    return time_s, program.unit_bytes * values[program.peak]


def check_against_enumeration(prices: Prices, seed: int, *, limit: int) -> None:
    """Without a limit, and under the quartile and the median of the memories of all assignments."""
    best = solve(prices, memory_limit_bytes=np.inf).variants
    allowed = random_allowed(prices, seed, limit=limit, include=best if seed % 2 else ())
    tried = list(enumerate_all(prices, allowed))
    needs = sorted(t.memory.total for t in tried)
    for limit_bytes in (np.inf, needs[len(needs) // 2], needs[len(needs) // 4]):
        found = solve(prices, memory_limit_bytes=limit_bytes, allowed=allowed, gap=GAP)
        assert prices.memory(found.variants).total <= limit_bytes * (1 + 1e-5)
        fitting = min(t.time_s for t in tried if t.memory.total <= limit_bytes * (1 + 1e-5))
        assert found.objective.total_s == pytest.approx(prices.objective(found.variants).total_s, rel=1e-12)
        assert fitting * (1 - 1e-9) <= found.objective.total_s <= fitting * (1 + 2 * GAP)
        assert all(v in rows for v, rows in zip(found.variants, allowed, strict=True))


@pytest.mark.parametrize("sizes", few(1, [[2, 2], [4], [2]]), ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_optimum_is_that_of_enumeration(name: str, sizes: list[int]) -> None:
    check_against_enumeration(prices_of(small(name), tuple(sizes), machine(len(sizes))), seed=1, limit=300)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(SMALL)), sizes=st.sampled_from([(2,), (4,), (2, 2)]), seed=st.integers(0, 10_000))
def test_optimum_is_that_of_enumeration_whatever_the_prices(name: str, sizes: tuple[int, ...], seed: int) -> None:
    check_against_enumeration(prices_of(small(name), sizes, random_machine(len(sizes), seed)), seed, limit=100)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(name=st.sampled_from([*sorted(SMALL), "mlp"]), seed=st.integers(0, 10_000))
def test_program_and_prices_are_one_function(name: str, seed: int) -> None:
    """At random assignments, so also far from the optimum: time, and bytes at the peak."""
    normal = session("mlp", 3).normal if name == "mlp" else small(name)
    prices = prices_of(normal, (2, 2), random_machine(2, seed))
    for variants in walk(prices, seed):
        time_s, peak = whole_program_at(prices, tuple(variants))
        assert time_s == pytest.approx(prices.objective(variants).total_s, rel=1e-6)
        assert peak == pytest.approx(prices.memory(variants).total, rel=1e-6)


@pytest.mark.parametrize("name", ["chain", "attention"])
def test_program_and_prices_are_one_function_with_micro_batches(name: str) -> None:
    """What costs nothing on the axis in time, and has no variables there, counts for nothing in both."""
    prices = prices_of(small(name), (2, 2), random_machine(2, 4), microbatches=2)
    assert any(table.is_free for table in prices.tables.values())
    variants = solve(prices, memory_limit_bytes=np.inf, gap=1e-6).variants
    best_s = prices.objective(variants).total_s
    assert whole_program_at(prices, variants)[0] == pytest.approx(best_s, rel=1e-6)
    allowed = random_allowed(prices, 4, limit=300, include=variants)
    assert min(t.time_s for t in enumerate_all(prices, allowed)) == pytest.approx(best_s, rel=1e-5)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(name=st.sampled_from(["chain", "attention", "norms"]), seed=st.integers(0, 10_000))
def test_program_and_prices_hide_alike_with_micro_batches(name: str, seed: int) -> None:
    """What is reduced once has the cover that what is reduced for every micro-batch leaves of the last backward."""
    prices = prices_of(small(name), (2, 2), random_machine(2, seed), microbatches=2)
    for variants in walk(prices, seed):
        assert whole_program_at(prices, tuple(variants))[0] == pytest.approx(prices.objective(variants).total_s, rel=1e-6)


def test_every_way_has_the_price_of_its_parts() -> None:
    """What is priced once for all edges of as many bytes is what each would be priced at."""
    prices = prices_of(small("attention"), (2, 4), machine(2))
    different = set()
    for (edge, axis), table in prices.tables.items():
        spec, is_parameter = value_spec(edge.value), edge.value.node.op == "placeholder"
        of_parameter = partial(prices.pricer.parameter_edge, is_read_again=is_parameter and prices.is_read_again(edge.value.node))
        price = of_parameter if is_parameter else prices.pricer.edge
        for way in table.ways.network.ways:
            found = table.price(way)
            assert found == price(way.held, way.wanted, spec.num_bytes / way.parts, axis, needs_grad=spec.requires_grad)
            different.add((way.held, way.wanted, way.parts, found))
    assert len({(held, wanted) for held, wanted, _, _ in different}) < len(different)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_paid_in_a_step_by_hand(microbatches: int) -> None:
    """All is paid for every micro-batch, but what is done at the ends of a step for parameters; a fifth of what may hide does not."""
    plain = machine(2)
    overlapping = replace(plain, links=tuple(replace(link, overlap=0.8) for link in plain.links))
    prices = prices_of(small("attention"), (2, 2), overlapping, microbatches=microbatches)
    kinds = set()
    for (edge, axis), table in prices.tables.items():
        is_parameter, overlap = edge.value.node.op == "placeholder", 1.0 if axis == 2 else 0.8
        spec = value_spec(edge.value)
        for way in table.ways.network.ways:
            waits_s, forward_s, backward_s, last_s = table.price(way)
            assert last_s == 0
            if microbatches > 1 and is_parameter and not way.is_each(spec):
                waits_s, forward_s, backward_s, last_s = forward_s, 0.0, 0.0, waits_s + backward_s
            else:
                waits_s, forward_s, backward_s = (microbatches * seconds for seconds in (waits_s, forward_s, backward_s))
            hidden = forward_s, backward_s, last_s
            expected = [waits_s + (1 - overlap) * sum(hidden), *(overlap * seconds for seconds in hidden)]
            assert table.paid(way) == pytest.approx(expected, rel=1e-12)
            if any(hidden) or waits_s:
                kinds.add((is_parameter, way.is_each(spec), bool(last_s)))
        assert table.paid(Way(REPLICATED, 7, REPLICATED, 7)) is None
    of_parameters = {(True, True, False), (True, False, True)} if microbatches > 1 else {(True, False, False)}
    assert kinds >= {(False, False, False), *of_parameters}


class Ends(nn.Module):
    """Most parameters are in the first linear, most bytes of activations in what the last one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 8, bias=False), nn.Linear(8, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(cast(torch.Tensor, self.last(torch.relu(self.first(x)))))


PHASES = [
    *((60, 0, Phase.FIRST, False), (5, 3, Phase.LATER, False), (1, 1, Phase.LAST, False), (1, 0, Phase.END, False)),
    *((1, 0, Phase.UPDATE, by_foreach) for by_foreach in (False, True)),
]


@pytest.mark.parametrize("live, later, phase, by_foreach", PHASES, ids=str)
def test_program_and_prices_are_one_function_in_every_phase(
    live: int, later: int, phase: Phase, by_foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However parameters are stored; all but the last op are a stage, whose micro-batches in flight say in which phase its peak is."""
    monkeypatch.setitem(FOREACH_COPIES if by_foreach else UPDATE_COPIES, "adamw", 2 if phase is Phase.UPDATE else 0)
    ours = machine(2)
    if by_foreach:
        ours = replace(ours, device=replace(ours.device, host_bytes_per_s=1e9))
    prices = prices_of(open_session(Ends(), (torch.randn(8, 512),), {}).normal, (2, 2), ours)
    *ops, last = [node for node in prices.problem.module.graph.nodes if is_call(node)]
    prices = prices.staged(Staging({**dict.fromkeys(ops, 0), last: 1}, (live, 1), (later, 0), degree=2))
    rows = [range(len(c.variants) if c.leader.op == "placeholder" else 1) for c in prices.problem.clusters]
    random = np.random.default_rng(3)
    phases: set[Phase] = set()
    for _ in range(40):
        variants = tuple(map(int, map(random.choice, rows))) if phases else (0,) * len(rows)  # first all is replicated
        if np.isfinite(prices.objective(variants).total_s):
            memory = prices.memory(variants)
            assert whole_program_at(prices, variants)[1] == pytest.approx(memory.total, rel=1e-6)
            phases.add(memory.moment.phase)
    assert phase in phases


def test_least_memory_is_that_of_enumeration() -> None:
    prices = prices_of(small("attention"), (2, 2), machine(2))
    allowed = random_allowed(prices, 5, limit=400)
    least = min(t.memory.total for t in enumerate_all(prices, allowed))
    found = least_memory(prices, allowed, gap=1e-4)
    assert found is not None
    assert found.total == pytest.approx(least, rel=1e-3)


def test_rows_of_memory_are_found_by_the_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is solved once, with all rows that it needs, where without a limit it needs none of them."""
    prices = prices_of(small("attention"), (2, 2), machine(2))
    free = prices.memory(solve(prices, memory_limit_bytes=np.inf).variants)
    least = least_memory(prices, [range(len(c.variants)) for c in prices.problem.clusters])
    assert least is not None
    rows, solved = Mock(wraps=add_memory), Mock(wraps=intra._found)
    monkeypatch.setattr(intra, "add_memory", rows)
    monkeypatch.setattr(intra, "_found", solved)
    solve(prices, memory_limit_bytes=(free.total + least.total) / 2)
    assert rows.call_count > 0
    assert solved.call_count == 1


@pytest.mark.parametrize("name", ["attention", "norms"])
def test_what_takes_too_long_is_told_before_it_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it takes at least, and no solution that is worth it is lost."""
    prices = prices_of(small(name), (2, 2), machine(2))
    limit_bytes = 0.9 * prices.memory(solve(prices, memory_limit_bytes=np.inf).variants).total
    found = solve(prices, memory_limit_bytes=limit_bytes)
    least_s = found.objective.total_s

    def under(worth_s: float) -> Solving:
        return Solving(prices, memory_limit_bytes=limit_bytes, worth_s=worth_s)

    assert under(least_s * (1 + GAP)).result().objective.total_s == pytest.approx(least_s, rel=GAP)
    monkeypatch.setattr(intra, "_found", Mock(side_effect=AssertionError("it is looked for")))
    with pytest.raises(InfeasibleError, match=r"what fits .* per rank on mesh \(d0=2,d1=2\) takes .* or more"):
        under(0.8 * least_s).result()


def test_limit_below_the_least_is_refused_with_numbers() -> None:
    prices = prices_of(small("chain"), (2,), machine(1))
    least = least_memory(prices, [range(len(c.variants)) for c in prices.problem.clusters])
    assert least is not None
    with pytest.raises(InfeasibleError, match=rf"needs {bytes_text(least.total)} .*raise memory_limit"):
        solve(prices, memory_limit_bytes=least.total * 0.9)
    found = solve(prices, memory_limit_bytes=least.total * 1.02)
    assert prices.memory(found.variants).total <= least.total * 1.02


@pytest.mark.parametrize("limit_bytes", [np.inf, 1.0])
def test_variants_that_do_not_go_together_are_no_question_of_memory(limit_bytes: float) -> None:
    prices = prices_of(small("chain"), (2,), machine(1))
    problem = prices.problem
    allowed = [list(range(len(c.variants))) for c in problem.clusters]
    edge = next(e for e in problem.edges if e.value.node.op == "placeholder" and e.value.node.meta["specs"][0].requires_grad)
    assert edge.target is not None
    source, target = problem.clusters[edge.source], problem.clusters[edge.target]
    allowed[edge.source] = [v for v in allowed[edge.source] if source.choice_names(v) == ("S0",)]
    allowed[edge.target] = [v for v in allowed[edge.target] if target.choice_names(v) == ("R",)]
    assert allowed[edge.source]
    assert allowed[edge.target]
    with pytest.raises(PlanError, match="pins do not go together") as caught:
        solve(prices, memory_limit_bytes=limit_bytes, allowed=allowed)
    assert not isinstance(caught.value, InfeasibleError)


@pytest.mark.parametrize("seed", range(1, 3))
def test_sharing_costs_nothing_it_does_not_tell(seed: int) -> None:
    """An assignment of shared blocks, replayed without sharing, has the same price and memory; the optimum can only be dearer."""
    normal = session("mlp", 3).normal
    profile = random_machine(1, seed)
    shared, single = prices_of(normal, (4,), profile), prices_of(normal, (4,), profile, share=False)
    assert len(shared.problem.clusters) < len(single.problem.clusters)
    found = solve(shared, memory_limit_bytes=np.inf, gap=1e-5)
    problem = shared.problem
    replayed = [
        found.variants[problem.cluster_of[problem.shared[cluster.leader]]] for cluster in single.problem.clusters
    ]
    names = [c.choice_names(v) for c, v in zip(single.problem.clusters, replayed, strict=True)]
    assert names == [
        problem.clusters[problem.cluster_of[problem.shared[c.leader]]].choice_names(v)
        for c, v in zip(single.problem.clusters, replayed, strict=True)
    ]
    assert single.objective(replayed).total_s == pytest.approx(found.objective.total_s, rel=1e-9)
    assert single.memory(replayed).total == pytest.approx(shared.memory(found.variants).total, rel=1e-9)
    free = solve(single, memory_limit_bytes=np.inf, gap=1e-5)
    assert free.objective.total_s <= found.objective.total_s * (1 + 2e-5)


def test_shared_optimum_is_the_free_one_where_communication_is_free() -> None:
    normal = session("mlp", 3).normal
    profile = machine(1, alpha_s=1e-12, link_bandwidth=1e18)
    shared, single = (solve(prices_of(normal, (4,), profile, share=s), memory_limit_bytes=np.inf, gap=1e-5) for s in (True, False))
    assert shared.objective.total_s == pytest.approx(single.objective.total_s, rel=1e-4)


def test_one_rank_has_one_assignment() -> None:
    normal = small("chain")
    problem = build_problem(normal.module, normal.factors, Mesh.of(1))
    assert {len(cluster.variants) for cluster in problem.clusters} == {1}


class Biased(nn.Module):
    """Products with biases, two of which read a view of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.up, self.gate, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(torch.tanh(x * self.scale) * self.scale).flatten(0, 1)
        return cast(torch.Tensor, self.down(torch.tanh(self.up(x)) * self.gate(x))).sum()


def test_program_and_prices_are_one_function_of_what_is_computed_again() -> None:
    """At the peaks some of it is there in two layouts, a view beside what it views, gradients are moved, and parts are joined."""
    prices = prices_of(open_session(Biased(), (torch.randn(8, 64, 8),), {}).normal, (4,), machine(1))
    *ops, _ = [node for node in prices.problem.module.graph.nodes if is_call(node)]
    prices = prices.staged(Staging({}, (1,), (0,), again=dict.fromkeys(ops, 0)))
    footprint, live, random = prices.footprint, prices.footprint.liveness, np.random.default_rng(5)
    kinds: Counter[str] = Counter()
    for _ in range(2000):
        variants = tuple(int(random.integers(len(cluster.variants))) for cluster in prices.problem.clusters)
        if not np.isfinite(prices.objective(variants).total_s):
            continue
        memory = prices.memory(variants)
        assert whole_program_at(prices, variants)[1] == pytest.approx(memory.total, rel=1e-6)
        t = memory.moment.position
        layouts = [{footprint.layout_of(entry.value, by, variants) for by in entry.at(t)} for entry in live.again]
        kinds["in two layouts"] += any(len(found) > 1 for found in layouts)
        own = {entry: footprint.layout_of(entry.value, None, variants) for entry in live.again if entry.is_beside}
        kinds["beside"] += any(footprint.layout_of(entry.value, by, variants) != own[entry] for entry in own for by in entry.at(t))
        kinds["moved"] += any(num_bytes > 0 and at == t for num_bytes, at in footprint._resharding(variants))
        kinds["joined"] += any(footprint.joined_bytes(edge, variants) > 0 and at == t for at, edge in live.joined)
    assert set(+kinds) == {"in two layouts", "beside", "moved", "joined"}
