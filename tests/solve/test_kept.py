"""What planning keeps instead of working it out anew is what would be worked out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import autopar
from autopar.compile import Normal
from autopar.compression import Compression
from autopar.cost import compute
from autopar.cost.compute import node_cost, op_cost
from autopar.cost.pricing import Pricer
from autopar.errors import PlanError
from autopar.graph import call_of, is_call, specs_of
from autopar.layout import REPLICATED, Atoms, shard
from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.planner.session import open_session
from autopar.precision import Master
from autopar.rules.notation import Rule
from autopar.rules.registry import TensorSpec
from autopar.solve.build import build_problem
from autopar.solve.liveness import Staging
from autopar.solve.pins import pin_tags
from autopar.solve.prices import Prices
from autopar.solve.problem import Cluster, Problem, local_sizes
from autopar.solve.search import Search
from autopar.solve.shapes import Shape
from autopar.storage import Held, Stored, has_room, storage_layout, use_layout
from tests.solve.problems import SMALL, machine, prices_of, random_machine, session, small, walk

aten = torch.ops.aten
MESH = Mesh.of((2, 2))


def built(normal: Normal, microbatches: int, tags: dict[fx.Node, str], repeats: dict[fx.Node, int]) -> Problem:
    grid, split = MESH.with_time(microbatches), normal.split(microbatches)
    return build_problem(normal.module, normal.factors, grid, split=split, tags=tags, repeats=repeats)


def prices_in_time(problem: Problem) -> Prices:
    return Prices(problem, Pricer(random_machine(2, 1).for_mesh(MESH), problem.mesh))


@pytest.mark.parametrize("name", ["chain", "attention", "norms", "mlp"])
def test_a_problem_in_other_parts_is_that_built_anew(name: str) -> None:
    normal = small(name) if name in SMALL else session(name, 2).normal
    calls = [node for node in normal.module.graph.nodes if is_call(node) and not node.meta["constant"]]
    tags, repeats = {calls[0]: "pinned"}, dict.fromkeys(calls[len(calls) // 2 :], 3)
    known = built(normal, 2, tags, repeats)
    prices_in_time(known)  # keeps sizes, which are those of halves
    variants = [list(cluster.variants) for cluster in known.clusters]
    found, anew = known.in_parts(normal.split(4)), built(normal, 4, tags, repeats)
    assert found == anew
    assert found is not None
    assert found.mesh != known.mesh
    assert [list(cluster.variants) for cluster in found.clusters] != variants, "as many samples for every micro-batch are no test"
    assert [list(cluster.variants) for cluster in known.clusters] == variants
    mine, other = prices_in_time(found), prices_in_time(anew)
    for assignment in walk(other, 2):
        assert mine.objective(assignment) == other.objective(assignment)
        assert mine.memory(assignment) == other.memory(assignment)


def test_a_problem_whose_ops_go_another_way_is_not_taken() -> None:
    normal = small("chain")
    known, split = built(normal, 2, {}, {}), normal.split(4)
    assert known.goes_alike(split)
    whole = build_problem(normal.module, normal.factors, MESH)
    assert not whole.goes_alike(split)
    assert not known.goes_alike(None)
    assert not known.goes_alike(normal.split(1))
    assert not known.goes_alike(open_session(SMALL["chain"][0](), (torch.randn(8, 8),), {}).normal.split(4))
    node, *_ = split.choices
    assert not known.goes_alike(replace(split, choices={**split.choices, node: normal.split(1).choices[node]}))


def test_a_problem_like_one_on_another_mesh() -> None:
    normal = small("chain")
    known, split = built(normal, 2, {}, {}), normal.split(2)
    mesh = Mesh(("a", "b"), (2, 4)).with_time(2)
    alone = build_problem(normal.module, normal.factors, mesh, split=split)
    assert build_problem(normal.module, normal.factors, mesh, split=split, like=known) == alone


def test_a_search_takes_the_problem_of_other_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its pins and with what nodes stand for; and what it decides is what it would have decided first."""
    normal = session("mlp", 3).normal
    line = Mesh.of(2)
    shared = build_problem(normal.module, normal.factors, line).shared
    name = next(node.meta["placeholder"].name for node in shared if node.op == "placeholder" and shared[node] is not node)
    pins = [autopar.pin(name, d0="zero3")]
    repeats = dict.fromkeys([node for node in normal.module.graph.nodes if is_call(node)][:3], 2)
    shapes = [Shape(line, Pipeline(microbatches=number)) for number in (2, 4)]

    def search() -> Search:
        return Search(lambda _: normal, lambda grid: machine(len(grid.sizes)), float("inf"), pins, repeats=repeats)

    used, anew = search(), search()
    used.free(shapes[0])
    with monkeypatch.context() as patched:
        patched.setattr("autopar.solve.search.build_problem", lambda *args, **kwargs: pytest.fail("built anew"))
        found = used.free(shapes[1])
    expected = anew.free(shapes[1])
    in_time, asked = line.with_time(4), {"tags": pin_tags(normal.module, pins), "repeats": repeats}
    assert found.problem == build_problem(normal.module, normal.factors, in_time, split=normal.split(4), **asked)  # type: ignore[arg-type]
    assert (found.solution.variants, found.solution.objective) == (expected.solution.variants, expected.solution.objective)


ATTENTION = Rule.parse("b h s d!, b h t! d!, b h t! e! -> b h s e!")


def attention_and_dropout() -> tuple[fx.Node, fx.Node]:
    """softmax(q k) v, causal; then dropout."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    attention = graph.call_function(aten.scaled_dot_product_attention.default, tuple(operands), {"is_causal": True})
    dropout = graph.call_function(aten.dropout.default, (attention, 0.5, True))
    for node in (*operands, attention, dropout):
        node.meta["specs"] = (TensorSpec((2, 4, 8, 16), requires_grad=True),)
    return attention, dropout


def set_spec(node: fx.Node, spec: TensorSpec) -> None:
    node.meta["specs"] = (spec,)


CHANGES: dict[str, Callable[[fx.Node, fx.Node], object]] = {
    "args": lambda _, dropout: setattr(dropout, "args", (dropout.args[0], 0.0, True)),
    "kwargs": lambda attention, _: setattr(attention, "kwargs", {"is_causal": False}),
    "target": lambda _, dropout: setattr(dropout, "target", aten.alpha_dropout.default),
    "shape of an operand": lambda attention, _: set_spec(attention.all_input_nodes[0], TensorSpec((2, 4, 4, 16), requires_grad=True)),
    "gradient of an operand": lambda attention, _: set_spec(attention.all_input_nodes[1], TensorSpec((2, 4, 8, 16))),
    "gradient of a result": lambda _, dropout: set_spec(dropout, TensorSpec((2, 4, 8, 16))),
    "dtype of a result": lambda _, dropout: set_spec(dropout, TensorSpec((2, 4, 8, 16), torch.bfloat16, requires_grad=True)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_cost_of_an_op_is_worked_out_anew_when_it_is_another(change: Callable[[fx.Node, fx.Node], object]) -> None:
    nodes = attention_and_dropout()
    before = [node_cost(node, None) for node in nodes]
    change(*nodes)
    after = [node_cost(node, None) for node in nodes]
    assert after == [op_cost(call_of(node), None) for node in nodes]
    assert after != before


def test_the_cost_of_an_op_is_that_of_its_rule() -> None:
    attention, _ = attention_and_dropout()
    for rule in (None, ATTENTION, replace(ATTENTION, operands=ATTENTION.operands[:2] + ATTENTION.operands[1:2]), None):
        assert node_cost(attention, rule) == op_cost(call_of(attention), rule)
    assert node_cost(attention, ATTENTION) != node_cost(attention, None)


def test_the_cost_of_an_op_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = attention_and_dropout()
    costs = [node_cost(node, None) for node in nodes]
    monkeypatch.setattr(compute, "op_cost", lambda *_: pytest.fail("worked out anew"))
    assert all(node_cost(node, None) is cost for node, cost in zip(nodes, costs, strict=True))


def stagings(prices: Prices) -> list[Staging]:
    """One stage with several micro-batches in flight, two stages, and two with all ops of the first computed again."""
    ops = [node for node in prices.problem.module.graph.nodes if is_call(node) and node in prices.problem.shared]
    half = len(ops) // 2
    stage_of = {node: int(i >= half) for i, node in enumerate(ops)}
    again = dict.fromkeys(ops[: half - 1], 0)
    return [
        Staging(dict.fromkeys(ops, 0), (3,), (2,)),
        Staging(stage_of, (3, 1), (2, 0), 2),
        Staging(stage_of, (3, 1), (2, 0), 2, again, shares=(1.0, 0.5)),
    ]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["chain", "norms"])
def test_memory_by_stages_is_that_counted_so_from_the_start(name: str, microbatches: int) -> None:
    prices = prices_of(small(name), (2, 2), machine(2), microbatches=microbatches)
    untouched = prices_of(small(name), (2, 2), machine(2), microbatches=microbatches)
    assignments = [*walk(prices, 7), with_zero2(prices)]
    for staging in stagings(prices):
        staged, anew = prices.staged(staging), Prices(prices.problem, prices.pricer, staging)
        twice = prices.staged(stagings(prices)[0]).staged(staging)
        for variants in assignments:
            uses = anew.footprint.uses(variants)
            assert len(uses) == len(staging.live)
            assert staged.footprint.uses(variants) == twice.footprint.uses(variants) == uses
            assert staged.footprint.by_op(variants) == anew.footprint.by_op(variants)
            assert prices.footprint.uses(variants) == untouched.footprint.uses(variants) != uses


def with_zero2(prices: Prices) -> list[int]:
    """All parameters at ZeRO-2 on the first axis, of which every micro-batch has a copy of its own where there are several or stages."""
    found = []
    for cluster in prices.problem.clusters:
        names = [cluster.choice_names(v)[:2] for v in range(len(cluster.variants))]
        found.append(names.index(("Z2", "R")) if ("Z2", "R") in names else 0)
    assert any(found)
    return found


def test_copies_of_zero2_are_told_by_the_staging() -> None:
    """Without stages and micro-batches they are gathered once a step."""
    prices = prices_of(small("chain"), (2, 2), machine(2))
    variants = with_zero2(prices)
    staged = prices.staged(stagings(prices)[1])
    assert sum(use.held.copies for use in prices.footprint.uses(variants)) > 0
    assert sum(use.held.copies for use in staged.footprint.uses(variants)) == 0
    assert sum(use.held.copies for use in prices.footprint.uses(variants)) > 0


def test_prices_on_another_machine_have_the_memory_of_their_own_staging() -> None:
    plain = prices_of(small("chain"), (2, 2), machine(2))
    other, variants = random_machine(2, 3).for_mesh(MESH), with_zero2(plain)
    plain.on(other)
    first, second = (plain.staged(staging) for staging in stagings(plain)[:2])
    for prices, moved in [(prices, prices.on(other)) for prices in (first, second, plain)]:
        assert moved.footprint.uses(variants) == prices.footprint.uses(variants)
        assert moved.objective(variants) == Prices(plain.problem, replace(plain.pricer, machine=other)).objective(variants)
    assert first.footprint.uses(variants) != second.footprint.uses(variants)


class Alike(nn.Module):
    """Parameters of one shape, and one of another shape that has as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.last = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(cast(torch.Tensor, layer(x)))
        return cast(torch.Tensor, self.last(torch.cat((x, x), -1))).sum()


@cache
def alike() -> Normal:
    """Of the parameters of one shape two are narrower, one of which is stored and reduced as wide as the first, and one is not trained."""
    normal = open_session(Alike(), (torch.randn(8, 8),), {}).normal
    _, stored, narrow, frozen, _ = (node for node in normal.module.graph.find_nodes(op="placeholder") if specs_of(node)[0].requires_grad)
    for node, master in ((stored, Master(torch.float32, torch.float32)), (narrow, None)):
        node.meta["specs"] = (replace(specs_of(node)[0], dtype=torch.bfloat16, master=master),)
    frozen.meta["specs"] = (replace(specs_of(frozen)[0], requires_grad=False),)
    return normal


class Forgetful(dict[object, Any]):
    """Knows nothing of what it was told."""

    def __contains__(self, key: object) -> bool:
        return False


def priced_alone(prices: Prices) -> Prices:
    """The same with the table of every edge, and each way in it, worked out by itself."""
    alone = copy(prices)
    alone.tables = {}
    for edge in prices.problem.edges:
        lone = copy(prices)
        lone.problem, lone.pricer = replace(prices.problem, edges=[edge]), replace(prices.pricer)  # which know nothing yet
        lone._known, lone._ways = defaultdict[object, Any](Forgetful), {}
        alone.tables |= dict(lone._tables())
    assert alone.tables.keys() == prices.tables.keys()
    return alone


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    name=st.sampled_from([*sorted(SMALL), "alike", "mlp"]),
    microbatches=st.sampled_from([1, 2]),
    compression=st.sampled_from([None, "powersgd:1"]),
    seed=st.integers(0, 10_000),
)
def test_tables_that_edges_share_are_those_of_each_by_itself(name: str, microbatches: int, compression: str | None, seed: int) -> None:
    normal = alike() if name == "alike" else small(name) if name in SMALL else session(name, 2).normal
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autopar.compression.MIN_NUM_ELEMENTS", 16)
        prices = prices_of(normal, (2, 2), random_machine(2, seed), microbatches=microbatches if name != "diamond" else 1)
        if compression is not None:
            prices = Prices(prices.problem, replace(prices.pricer, compression=Compression.of(compression)))
        alone = priced_alone(prices)
    for key, table in alone.tables.items():
        shared = prices.tables[key]
        assert (shared.sources, shared.targets) == (table.sources, table.targets)
        assert shared.ways.network == table.ways.network
        assert np.array_equal(shared.ways.prices, table.ways.prices)
        assert np.array_equal(shared.ways.paid, table.ways.paid)
    for variants in walk(prices, seed, every=10):
        assert prices.objective(variants) == alone.objective(variants)


def test_equal_edges_share_their_ways() -> None:
    tables = prices_of(small("attention"), (2, 2), machine(2)).tables.values()
    assert len({id(table.ways) for table in tables}) < len(tables)


def sizes_by_hand(problem: Problem, cluster: Cluster, node: fx.Node, variant: int) -> dict[str, float]:
    sizes = {letter: float(np.prod(atoms)) for letter, atoms in problem.factors.letters.get(node, {}).items()}
    for axis, pick in enumerate(cluster.variants[variant]):
        letter = cluster.choices[axis][pick].members[node].name.partition(".")[0]
        if letter in sizes:
            sizes[letter] /= problem.mesh.sizes[axis]
    return sizes


@pytest.mark.parametrize("name", ["chain", "attention", "norms"])
def test_local_sizes_are_those_of_their_problem(name: str) -> None:
    """Of several that share a graph, one after the other."""
    normal = small(name)
    known = built(normal, 2, {}, {})
    problems = [known, known.in_parts(normal.split(4)), build_problem(normal.module, normal.factors, MESH), known]
    for problem in problems:
        assert problem is not None
        for cluster in problem.clusters:
            for node in cluster.members if is_call(cluster.leader) else ():
                sizes = local_sizes(problem, cluster, node)
                for v in range(len(cluster.variants)):
                    assert {letter: size[v] for letter, size in sizes.items()} == sizes_by_hand(problem, cluster, node, v)


def is_made(layout: Callable[[Mesh, Atoms, tuple[Held, ...]], object], *case: *tuple[Mesh, Atoms, tuple[Held, ...]]) -> bool:
    try:
        layout(*case)
    except PlanError:
        return False
    return True


def test_whether_a_tensor_has_room_is_told_of_each_by_itself() -> None:
    """Whatever was asked before: meshes, factors and ways to hold them in turn, each twice."""
    ways: list[Held] = [REPLICATED, shard(0), shard(1), Stored(1), Stored(3)]
    meshes = [Mesh.of((2, 2)), Mesh.of((2, 4)), Mesh.of((4, 2))]
    atoms: list[Atoms] = [((4,), (2,)), ((8,), (1,)), ((2,), (2, 2))]
    asked = [case for case in product(meshes, atoms, product(ways, ways)) if is_made(use_layout, *case)] * 2
    found = [has_room(*case) for case in asked]
    assert found == [is_made(storage_layout, *case) for case in asked]
    assert any(found)
    assert not all(found)
