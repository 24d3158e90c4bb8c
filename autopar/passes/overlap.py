"""Order of a graph for overlap: collectives start as early and are waited for as late as the plan allows.

* A wait, and the views on what it waits for, move to just before their first use.
* Gathers of parameters start one ahead: each when the one before it is there. (A parameter that is gathered on one axis after the other
  does not get ahead of itself.)
* Small ones start with the one before them: as much as an eighth of it, as biases and norms beside matrices, which would be waited for
  right behind it.
* Copies of parameters from the host (`passes.offload`) start one ahead too, with gathers of what they bring one behind them.
* Other all-gathers of one group are one at a time: a second starts when the first has been waited for. Groups do them one by one anyway.
* Of the reduce-scatters of one group two are in flight: a third starts when the first has been waited for. What a collective works on
  stays in memory until then, and gradients that wait for the end of the backward would take as much as if nothing were sharded.
* Reductions of ZeRO-1 gradients start when the backward is done.
* What comes after the first collective of a compressed gradient (`ops.codec`) waits for the end of the graph, first what starts others; or
  until they take `WAITING_NUM_BYTES` more so than decoded: then all but the latest go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autopar.ops import codec
from autopar.ops.host import arrive, fetch
from autopar.passes.aliases import WAIT, only_looks

_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
IN_FLIGHT = {ALL_GATHER: 1, REDUCE_SCATTER: 2}
"""How many collectives of a kind a group may have started and not waited for."""
WAITING_NUM_BYTES = 25 * 2**20
"""How much more compressed gradients may take than decoded ones: a bucket of `DistributedDataParallel`, which holds them as well."""
LATEST = 2
"""Compressed gradients that are not decoded then: those that were sent last."""
SMALL = 8
"""What is together no more than one of so many parts of a gather starts with it."""
STARTS = frozenset(
    {
        _c10d.all_reduce.default,
        _c10d.all_reduce_.default,
        _c10d.all_reduce_coalesced_.default,
        ALL_GATHER,
        REDUCE_SCATTER,
        _c10d.all_to_all_single.default,
    }
)


def overlap(module: fx.GraphModule, *, parameters: Sequence[int], late: Collection[int] = ()) -> fx.GraphModule:
    """Reorder a forward or backward graph; what it computes does not change.

    Args:
        module: the graph.
        parameters: positions of the placeholders that hold stored parameters.
        late: positions of the outputs whose reduction starts last (ZeRO-1 gradients).
    """
    nodes = list(module.graph.nodes)
    (output,) = module.graph.find_nodes(op="output")
    deferred = {node for node in nodes if node.target in (WAIT, arrive)}
    deferred |= _reductions([output.args[0][i] for i in late])
    coded: dict[fx.Node, list[fx.Node]] = {}  # from a compressed gradient to the output, and so nobody else's concern: what it comes after
    for node in nodes:
        used = deferred.intersection(node.all_input_nodes) if node.op == "call_function" else set()
        if used and (node.target in codec.OPS or not used.isdisjoint(coded)):
            coded[node] = [other for other in node.all_input_nodes if other in used]
            deferred.add(node)
        elif used and node.target not in STARTS and only_looks(node):
            deferred.add(node)
    gathers = parameter_gathers(nodes, [module.graph.find_nodes(op="placeholder")[i] for i in parameters])
    order = _Order(gathers, _compressed(coded))
    for node in nodes:
        if node.op == "output":
            for start in nodes:
                if start in coded and start.target in STARTS:
                    order.put(start)
        if node not in deferred:
            order.put(node)
    return _rebuilt(module, order.nodes)


class _Order:
    """Puts nodes after what they need, parameter gathers after the wait for the one before, and few collectives of a group at a time."""

    def __init__(self, gathers: Sequence[fx.Node], compressed: Mapping[fx.Node, _Compressed]) -> None:
        self.nodes: list[fx.Node] = []
        self._compressed, self._under_way, self._gone_out = compressed, list[_Compressed](), set[_Compressed]()
        self._placed: set[fx.Node] = set()
        self._in_flight: dict[object, list[fx.Node]] = {}
        needs = {gather: _ancestors(gather) for gather in gathers}
        self._with = _small_ones(gathers, needs)
        self._small = {small for others in self._with.values() for small in others}
        gathers = [gather for gather in gathers if gather not in self._small]
        self._next: dict[fx.Node, fx.Node | None] = {}
        for alike in ([g for g in gathers if g.target is fetch], [g for g in gathers if g.target is not fetch]):
            self._next |= {a: next((b for b in alike[i + 1 :] if a not in needs[b]), None) for i, a in enumerate(alike)}

    def put(self, node: fx.Node, *, start_next: bool = True) -> None:
        if node in self._placed:
            return
        self._placed.add(node)
        for used in node.all_input_nodes:
            self.put(used)
        if node.target in IN_FLIGHT and node not in self._small:
            started = self._in_flight.setdefault((node.target, node.args[-1]), [])
            while len(started) >= IN_FLIGHT[node.target]:
                self._end(started.pop(0))
            started.append(node)
        if node in self._compressed:
            self._go_out(self._compressed[node])
        self.nodes.append(node)
        for small in self._with.get(node, ()):
            self.put(small)
        if node.target in (WAIT, arrive) and start_next:
            ahead = self._next.get(node.all_input_nodes[0])
            if ahead is not None:
                self.put(ahead)

    def _go_out(self, gradient: _Compressed) -> None:
        """A compressed gradient is about to: where it is too much with those that have, these are decoded first, but for the last."""
        if gradient in self._gone_out:
            return
        self._gone_out.add(gradient)
        self._under_way.append(gradient)
        if sum(other.num_bytes for other in self._under_way) <= WAITING_NUM_BYTES:
            return
        coming = [node for other in self._under_way[:-LATEST] for node in other.nodes]
        self._under_way = self._under_way[-LATEST:]
        for node in (*(node for node in coming if node.target in STARTS), *coming):
            self.put(node)

    def _end(self, started: fx.Node) -> None:
        """Wait for a collective. Views on a reduced gradient come with the wait: where they are, gradients add up (`passes.accumulate`)."""
        (wait,) = started.users
        self.put(wait, start_next=False)
        seen = [wait] if started.target is REDUCE_SCATTER else []
        while seen:
            views = [user for user in seen.pop().users if user.op == "call_function" and only_looks(user) and user not in self._placed]
            for view in views:
                self.put(view)
            seen += views


@dataclass(eq=False)
class _Compressed:
    """A compressed gradient.

    Args:
        nodes: all that comes after its first collectives.
    """

    nodes: list[fx.Node] = field(default_factory=list)

    @cached_property
    def num_bytes(self) -> int:
        """How much more they read than they give: what is gained once they have run."""
        read = {node for own in self.nodes for node in own.all_input_nodes if node.op == "call_function"}.difference(self.nodes)
        given = {node for node in self.nodes if not set(node.users).issubset(self.nodes)}
        read_bytes, given_bytes = (sum(int(node.meta["val"].nbytes) for node in nodes) for nodes in (read, given))
        return read_bytes - given_bytes


def _compressed(coded: Mapping[fx.Node, Sequence[fx.Node]]) -> dict[fx.Node, _Compressed]:
    """Compressed gradients by their first collectives; ``coded`` is what comes after these, and after what of that."""
    found: dict[fx.Node, _Compressed] = {}
    for node, after in coded.items():
        own, *others = dict.fromkeys(found.setdefault(n if n in coded else _started(n), _Compressed()) for n in after)
        for other in others:
            own.nodes += other.nodes
            found |= {key: own for key, gradient in found.items() if gradient is other}
        own.nodes.append(node)
        found[node] = own
    return {first: gradient for first, gradient in found.items() if first.target in STARTS and first not in coded}


def _started(node: fx.Node) -> fx.Node:
    """The collective that is waited for, and perhaps looked at, or the input of the graph that has it."""
    while node.target not in STARTS and node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _small_ones(gathers: Sequence[fx.Node], needs: Mapping[fx.Node, set[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """Small all-gathers by the one of their group that they start with: they come behind it, and need no other."""
    found: dict[fx.Node, list[fx.Node]] = {}
    last: dict[object, fx.Node] = {}
    taken: dict[fx.Node, int] = {}
    for gather in gathers:
        if gather.target is not ALL_GATHER:
            continue
        large, num_bytes = last.get(gather.args[-1]), gather.meta["val"].nbytes
        is_alone = needs[gather].isdisjoint(gathers)
        if large is not None and is_alone and SMALL * (taken[large] + num_bytes) <= large.meta["val"].nbytes:
            taken[large] += num_bytes
            found.setdefault(large, []).append(gather)
        else:
            last[gather.args[-1]], taken[gather] = gather, 0
    return found


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in seen:
                seen.add(used)
                stack.append(used)
    return seen


def _reductions(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The collectives from which outputs come, through waits and views."""
    found = set()
    for node in outputs:
        while node.op == "call_function" and (node.target in STARTS or only_looks(node)):
            if node.target in STARTS:
                found.add(node)
            node = node.all_input_nodes[0]
    return found


def parameter_gathers(nodes: Sequence[fx.Node], parameters: Collection[fx.Node]) -> list[fx.Node]:
    """Collectives, and copies from the host, that depend on parameters alone, in the order of their first use."""
    alone = set(parameters)
    starts = []
    for node in nodes:
        if node.op == "call_function" and node.all_input_nodes and all(used in alone for used in node.all_input_nodes):
            alone.add(node)
            if node.target in STARTS or node.target is fetch:
                starts.append(node)
    return starts


def _rebuilt(module: fx.GraphModule, order: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in (*placeholders, *(n for n in order if n.op != "placeholder")):
        env[node] = graph.node_copy(node, env.__getitem__)
    rebuilt = fx.GraphModule(module, graph)
    graph.lint()
    return rebuilt
