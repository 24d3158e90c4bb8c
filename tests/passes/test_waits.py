"""Every collective that a graph starts is waited for, once, before anything touches its result, and nothing writes to what it reads.

A start whose wait is missing would leave a backend's thread writing to a result that the graph has given up.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autopar import Manual
from autopar.passes.aliases import base_of, readers
from autopar.passes.overlap import ALL_GATHER, SMALL, STARTS
from tests.marks import few
from tests.planning import Wanted, compiled

_c10d = torch.ops._c10d_functional

PLANS: dict[str, Wanted] = {
    "dp": Manual(dp=4),
    "tp": Manual(tp=4),
    "tp_sequence": Manual(tp=4, sequence_parallel=True),
    "tp_zero1": Manual(dp=2, tp=2, zero=1),
    "tp_zero2": Manual(dp=2, tp=2, zero=2),
    "zero3": Manual(dp=4, zero=3),
    "tp_zero3": Manual(dp=2, tp=2, zero=3),
    "auto_2_axes": (2, 2),
}
CASES = [("gpt2", "zero3"), ("mlp", "tp_zero3"), ("mlp", "auto_2_axes"), ("vit", "tp_zero3")]
CASES += [("gpt2", plan) for plan in PLANS if plan != "zero3"]


def faults(module: fx.GraphModule) -> list[str]:
    """What is wrong with the collectives of a graph."""
    found = []
    in_flight: dict[object, fx.Node] = {}
    for node in module.graph.nodes:
        if node.target is ALL_GATHER and not is_small(node, in_flight.get(node.args[2])):
            if node.args[2] in in_flight:
                found.append(f"{node} and {in_flight[node.args[2]]} are in flight on one group")
            in_flight[node.args[2]] = node
        if node.target is _c10d.wait_tensor.default:
            in_flight = {group: gather for group, gather in in_flight.items() if gather is not node.args[0]}
        users = list(node.users)
        if is_started(node) and [user.target for user in users] != [_c10d.wait_tensor.default]:
            found.append(f"{node} is used by {users}, not by one wait")
        if node.target is _c10d.wait_tensor.default and not is_started(node.args[0]):
            found.append(f"{node} waits for {node.args[0]}, which is no collective")
        if node.target is _c10d.wait_tensor.default and not users:
            found.append(f"nothing uses {node}")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and not may_reduce(node):
            found.append(f"{node} writes to its operands: {node.target}")
    return found


def is_small(gather: fx.Node, other: fx.Node | None) -> bool:
    """Whether an all-gather may be in flight beside another of its group."""
    return other is not None and SMALL * gather.meta["val"].nbytes <= other.meta["val"].nbytes


def is_started(node: fx.Node) -> bool:
    """Whether a value is one that a collective will have written."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target is _c10d.all_reduce_coalesced_.default
    return node.target in STARTS and node.target is not _c10d.all_reduce_coalesced_.default


def may_reduce(node: fx.Node) -> bool:
    """Whether this is a collective in place, of what no other node reads."""
    return node.target in STARTS and all(
        base_of(used).op == "call_function" and readers(base_of(used)) == {node} for used in node.all_input_nodes
    )


@pytest.mark.parametrize("model, plan", few(3, CASES))
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_every_start_has_its_wait(model: str, plan: str) -> None:
    _, made = compiled(model, PLANS[plan])
    assert made.halves.backward is not None
    assert faults(made.halves.forward) == []
    assert faults(made.halves.backward) == []


def test_faults_are_seen() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(2):
        started = graph.call_function(_c10d.all_reduce.default, (x, "sum", "g"))
    early = graph.call_function(torch.ops.aten.add_.Tensor, (started, x))
    dead = graph.call_function(_c10d.wait_tensor.default, (started,))
    graph.call_function(_c10d.wait_tensor.default, (x,))
    graph.output((early,))
    assert dead.args == (started,)
    assert len(faults(fx.GraphModule({}, graph))) == 6


def test_two_gathers_of_one_group_are_seen() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = [graph.call_function(ALL_GATHER, (x, 2, group)) for group in ("g", "h", "g", "g")]
    for node, numel in zip(started, (80, 80, 10, 11), strict=True):
        node.meta["val"] = torch.empty(numel, device="meta")
    graph.output(tuple(graph.call_function(_c10d.wait_tensor.default, (gather,)) for gather in started))
    (fault,) = faults(fx.GraphModule({}, graph))
    assert "in flight on one group" in fault
