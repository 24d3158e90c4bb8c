"""Collectives start early and are waited for late, and what a graph computes stays what it was."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import Manual
from autopar.compile import plan_choices, plan_held
from autopar.mesh import Mesh
from autopar.ops.collectives import group_name
from autopar.passes.differentiate import differentiate
from autopar.passes.overlap import IN_FLIGHT, REDUCE_SCATTER, overlap
from autopar.passes.shard import shard_graph
from autopar.passes.stages import whole_part
from autopar.virtual import run_lockstep
from tests.marks import few
from tests.planning import Wanted, compiled, opened, planned, rank_inputs

_c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def gather(graph: fx.Graph, x: fx.Node, axis: str = "dp", numel: int = 80) -> fx.Node:
    started = graph.call_function(_c10d.all_gather_into_tensor.default, (x, 2, group_name(axis)))
    started.meta["val"] = torch.empty(numel, device="meta")
    return graph.call_function(_c10d.wait_tensor.default, (started,))


def names(module: fx.GraphModule) -> list[str]:
    short = {_c10d.all_gather_into_tensor.default: "gather", _c10d.wait_tensor.default: "wait", aten.mm.default: "mm"}
    return [short.get(node.target, str(node.target)) for node in module.graph.nodes if node.op == "call_function"]


def three_gathers() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for weight in [graph.placeholder(f"w{i}") for i in range(3)]:
        x = graph.call_function(aten.mm.default, (x, gather(graph, weight)))
    graph.output((x,))
    return fx.GraphModule({}, graph)


def test_gathers_start_one_ahead() -> None:
    assert names(three_gathers()) == ["gather", "wait", "mm"] * 3
    ordered = overlap(three_gathers(), parameters=[1, 2, 3])
    assert names(ordered) == ["gather", "wait", "gather", "mm", "wait", "gather", "mm", "wait", "mm"]


def placed(module: fx.GraphModule) -> str:
    """Starts and waits of gathers by the first letter of their parameter, in upper case and in lower case; and where they are used."""
    text = ""
    for node in (node for node in module.graph.nodes if node.op == "call_function"):
        of = node
        while of.op != "placeholder":
            of = of.args[0]
        is_start = node.target is _c10d.all_gather_into_tensor.default
        text += of.name.upper() if is_start else of.name if node.target is _c10d.wait_tensor.default else "."
    return text


@pytest.mark.parametrize(
    "sizes, order",
    [
        ({"w": 80, "b": 10, "v": 80}, "WBwV.b.v."),
        ({"w": 80, "b": 11, "v": 80}, "WwB.bV.v."),  # more than an eighth
        ({"w": 80, "b": 5, "c": 5, "d": 1, "v": 80}, "WBCwD.b.c.dV.v."),  # the last is too much
        ({"w": 80, "b": 8, "v": 8}, "WBwV.b.v."),  # behind one that is too much, the small ones after that
        ({"b": 1, "w": 80, "v": 80}, "BbW.wV.v."),  # nothing is before it
    ],
)
def test_small_gathers_start_with_the_one_before(sizes: dict[str, int], order: str) -> None:
    graph = fx.Graph()
    parameters = {name: graph.placeholder(name) for name in sizes}
    x = graph.placeholder("x")
    for name, numel in sizes.items():
        x = graph.call_function(aten.mm.default, (x, gather(graph, parameters[name], numel=numel)))
    graph.output((x,))
    module = overlap(fx.GraphModule({}, graph), parameters=range(len(sizes)))
    assert placed(module) == order


def test_a_small_gather_waits_for_no_other() -> None:
    """On another group, or of what is gathered itself, it has a start of its own, one ahead."""
    graph = fx.Graph()
    x, w, b, c = (graph.placeholder(name) for name in "xwbc")
    makes = (
        lambda: gather(graph, w),
        lambda: gather(graph, b, "tp", 1),
        lambda: gather(graph, gather(graph, c, "tp", 1), "dp", 1),
    )
    for make in makes:
        x = graph.call_function(aten.mm.default, (x, make()))
    graph.output((x,))
    assert placed(overlap(fx.GraphModule({}, graph), parameters=[1, 2, 3])) == "WwB.bC.cCc."


def test_gathers_of_one_group_are_one_at_a_time() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gathered = [gather(graph, x, axis) for axis in ("dp", "tp", "dp")]
    graph.output((graph.call_function(aten.mm.default, (x, x)), *gathered))
    ordered = overlap(fx.GraphModule({}, graph), parameters=[])
    assert names(ordered)[:5] == ["gather", "gather", "wait", "gather", "mm"]


def test_two_reduce_scatters_of_a_group_are_in_flight() -> None:
    """A gradient that waits for the end of the backward would stay whole until then."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = []
    for axis in ("dp", "dp", "tp", "dp", "dp", "dp", "dp"):
        grad = graph.call_function(aten.mm.default, (x, x))
        started = graph.call_function(REDUCE_SCATTER, (grad, "sum", 2, group_name(axis)))
        reduced.append(graph.call_function(_c10d.wait_tensor.default, (started,)))
    graph.output(tuple(reduced))
    order = ["start" if "reduce_scatter" in name else name for name in names(overlap(fx.GraphModule({}, graph), parameters=[]))]
    assert order == [*["mm", "start"] * 3, *["mm", "wait", "start"] * 4, *["wait"] * 3]


def test_views_come_with_the_wait_for_a_reduce_scatter() -> None:
    """Where they are, gradients add up; at the end of the backward all parts of gradients would wait for that."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = []
    for _ in range(5):
        started = graph.call_function(REDUCE_SCATTER, (graph.call_function(aten.mm.default, (x, x)), "sum", 2, group_name("dp")))
        waited = graph.call_function(_c10d.wait_tensor.default, (started,))
        reduced.append(graph.call_function(aten.view.default, (waited, [2, 4])))
    graph.output(tuple(reduced))
    order = ["start" if "reduce_scatter" in name else name for name in names(overlap(fx.GraphModule({}, graph), parameters=[]))]
    assert order[8:12] == ["mm", "wait", "aten.view.default", "start"]


def test_gathers_of_values_stay() -> None:
    assert names(overlap(three_gathers(), parameters=[])) == ["gather", "wait", "mm"] * 3


def test_a_wait_moves_to_its_first_use() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gathered = gather(graph, x)
    viewed = graph.call_function(aten.view.default, (gathered, [-1]))
    other = graph.call_function(aten.mm.default, (x, x))
    graph.output((graph.call_function(aten.add.Tensor, (viewed, other)),))
    ordered = overlap(fx.GraphModule({}, graph), parameters=[])
    assert names(ordered) == ["gather", "mm", "wait", "aten.view.default", "aten.add.Tensor"]


def test_a_gather_on_two_axes_does_not_get_ahead_of_itself() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    twice = gather(graph, gather(graph, first, "dp"), "tp")
    graph.output((graph.call_function(aten.mm.default, (twice, gather(graph, second))),))
    ordered = overlap(fx.GraphModule({}, graph), parameters=[0, 1])
    ordered.graph.lint()
    starts = [node for node in ordered.graph.nodes if node.target is _c10d.all_gather_into_tensor.default]
    assert [str(node.args[0]) for node in starts][:2] == ["first", "second"]


def test_late_reductions_come_last() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(_c10d.reduce_scatter_tensor.default, (x, "sum", 2, group_name("dp")))
    waited = graph.call_function(_c10d.wait_tensor.default, (reduced,))
    graph.output((waited, graph.call_function(aten.mm.default, (x, x))))
    assert names(overlap(fx.GraphModule({}, graph), parameters=[], late=[0]))[0] == "mm"
    assert names(overlap(fx.GraphModule({}, graph), parameters=[]))[0] == "_c10d_functional.reduce_scatter_tensor.default"


PLANS: dict[str, Wanted] = {
    "tp2_zero1": Manual(dp=2, tp=2, zero=1),
    "zero3": Manual(dp=4, zero=3),
    "auto": (2, 2),
    "auto_3_axes": (2, 2, 2),
}


@pytest.mark.parametrize("plan", few(2, PLANS))
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_results_stay_the_same(plan: str) -> None:
    example, session = opened("mlp")
    normal = session.normal
    made = planned(session, PLANS[plan])
    held = plan_held(normal, made)
    cpu = torch.device("cpu")
    part, choices = whole_part(normal.module), plan_choices(normal, made)
    local = shard_graph(normal.module, part, normal.factors, made.mesh, choices, held, device=cpu, training=True)
    halves = differentiate(local, gather_again=range(len(held)), device=cpu, training=True)
    assert halves.backward is not None
    inputs = rank_inputs(example, normal, made)
    before = run_lockstep(halves.forward, inputs, made.mesh)
    after = run_lockstep(overlap(halves.forward, parameters=range(len(held))), inputs, made.mesh)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    given = [[*result[halves.num_outputs :], torch.tensor(1.0)] for result in before]
    num_saved = len(given[0]) - 1
    grads = run_lockstep(halves.backward, given, made.mesh)
    ordered = overlap(halves.backward, parameters=range(num_saved), late=range(len(halves.with_grad)))
    torch.testing.assert_close(run_lockstep(ordered, given, made.mesh), grads, rtol=0, atol=0)
    assert sorted(map(str, names(ordered))) == sorted(map(str, names(halves.backward)))


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_waits_stand_at_their_first_use(half: str) -> None:
    """Or where the second reduce-scatter after it starts."""
    _, made = compiled("gpt2", Manual(dp=4, zero=3))
    module = getattr(made.halves, half)
    nodes = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    waits = [node for node in nodes if node.target is _c10d.wait_tensor.default]
    assert waits
    for wait in waits:
        started = wait.all_input_nodes[0]
        later = nodes[place[started] + 1 :] if started.target is REDUCE_SCATTER else []
        behind = [place[node] for node in later if (node.target, node.args[1:]) == (REDUCE_SCATTER, started.args[1:])]
        assert len([at for at in behind if at < place[wait]]) < IN_FLIGHT.get(started.target, 2)
        ends = [place[user] for user in wait.users] + behind[IN_FLIGHT[REDUCE_SCATTER] - 1 :]
        between = nodes[place[wait] + 1 : min(ends)]
        assert all(other.target is not aten.mm.default for other in between), f"{wait} stands before {between}"


def test_zero_1_reduces_when_the_backward_is_done() -> None:
    _, made = compiled("mlp", Manual(dp=4, zero=1))
    assert made.halves.backward is not None
    order = [node.target for node in made.halves.backward.graph.nodes if node.op == "call_function"]
    reductions = [i for i, target in enumerate(order) if target is _c10d.reduce_scatter_tensor.default]
    products = [i for i, target in enumerate(order) if target is aten.mm.default]
    assert reductions
    assert products
    assert min(reductions) > max(products)


def test_zero_2_reduces_along_the_way() -> None:
    _, made = compiled("mlp", Manual(dp=4, zero=2))
    assert made.halves.backward is not None
    order = [node.target for node in made.halves.backward.graph.nodes if node.op == "call_function"]
    products = [i for i, target in enumerate(order) if target is aten.mm.default]
    assert order.index(_c10d.reduce_scatter_tensor.default) < max(products)


def test_meshes_of_the_plans() -> None:
    assert planned(opened("mlp")[1], PLANS["auto_3_axes"]).mesh == Mesh.of((2, 2, 2))
