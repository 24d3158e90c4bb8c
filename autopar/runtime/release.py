"""Graphs that let go of what they are given, so that each saved activation is freed after its last use and not when the backward is over.

A Python call holds its arguments until it returns. So the graph is called with one list instead, which it empties first.

gloo reduces and scatters by reducing a copy of the whole on all ranks. Where a graph may write to what it reduces, and waits for it, it is
reduced in place on CPUs instead: the same sums without the copy, of which two may be in flight (`passes.overlap`). Likewise rows are copied
into what was made for them, a part among zeros (`collectives`), without a copy of the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import fx

from autopar.passes.aliases import WAIT, may_write
from autopar.passes.launches import launch_fast

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_KEY = "autopar.released"


def run_released(module: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a graph on the values in ``given``, which is empty then."""
    if _KEY not in module.meta:
        module.meta[_KEY] = released(module)
    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = module.meta[_KEY]
    return list(run(given))


def released(module: fx.GraphModule) -> fx.GraphModule:
    """The graph as one of a list, which it empties; nodes keep their ``meta``."""
    graph, own = fx.Graph(), {}
    given = graph.placeholder("given")
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        own[node] = graph.call_function(operator.getitem, (given, i))
        own[node].meta = {key: value for key, value in node.meta.items() if key == "val"}
    graph.call_method("clear", (given,))
    waits = _waits_in_place(module.graph)
    for node in module.graph.nodes:
        if node in waits.values():
            own[node] = graph.call_function(start_reduce, tuple(own.get(arg, arg) for arg in node.args))
        elif node in waits:
            _, _, size, group = waits[node].args
            own[node] = graph.call_function(part_of, (own[waits[node]], size, group))
        elif node.target is aten.index_copy.default and may_write(node.args[0], node):
            own[node] = graph.call_function(aten.index_copy_.default, tuple(own.get(arg, arg) for arg in node.args))
        elif node.op != "placeholder":
            own[node] = graph.node_copy(node, own.__getitem__)
        if node.op != "placeholder":
            own[node].meta = node.meta
    launch_fast(graph)
    return fx.GraphModule(module, graph)


def _waits_in_place(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The reduce-scatters that may write to their operand, by the only node that waits for each."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=_c10d.reduce_scatter_tensor.default):
        users = list(node.users)
        if len(users) == 1 and users[0].target is WAIT and may_write(node.args[0], node):
            found[users[0]] = node
    return found


def start_reduce(whole: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """Start to reduce and scatter; on CPUs what comes is the whole."""
    on_cpu = whole.device.type == "cpu"
    started: torch.Tensor = _c10d.all_reduce_(whole, op, group) if on_cpu else _c10d.reduce_scatter_tensor(whole, op, size, group)
    return started


def part_of(started: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Wait for it, and keep this rank's part alone."""
    done: torch.Tensor = _c10d.wait_tensor(started)
    if done.device.type != "cpu":
        return done
    own: int = dist.distributed_c10d._resolve_process_group(group).rank()  # type: ignore[attr-defined, arg-type]
    return done.chunk(size)[own].clone()
