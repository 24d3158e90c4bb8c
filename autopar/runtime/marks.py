"""Graphs that take the time as they run: wherever they go from one thing to another.

A graph is cut into *regions*, each of which computes something, starts a collective or waits for one. What marks cost is a call of a
Python method each, a fraction of a microsecond on CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import getitem

import torch
from torch import fx

from autopar.passes.aliases import WAIT
from autopar.passes.joint import BACKWARD
from autopar.passes.vectors import TOGETHER
from autopar.runtime.release import part_of, released, start_reduce
from autopar.runtime.watch import Clock, Ends, Moment

_c10d = torch.ops._c10d_functional
_KINDS = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_reduce_.default: "all_reduce",
    _c10d.all_reduce_coalesced_.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    start_reduce: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
}


RESHARDS = "reshards"
"""What compute is called that belongs to no op: views and copies before and after collectives."""


class What(Enum):
    COMPUTE, START, WAIT = "compute", "start", "wait"


@dataclass(frozen=True, slots=True)
class Region:
    """Successive nodes of a graph.

    Args:
        what: they do.
        phase: as of `measured.Communication` for a start, else that of the graph.
        values: the module that is computed, or what moves, by the names of the plan.
        kind: of the collective that starts.
        started: the region that started what this one waits for; None if that was in another graph.
    """

    what: What
    phase: str
    values: tuple[str, ...]
    kind: str = ""
    started: int | None = None


@dataclass(frozen=True, slots=True)
class Track:
    """A graph with marks: region i lasts from the i-th time that it takes to the next."""

    module: fx.GraphModule
    regions: tuple[Region, ...]


@dataclass(slots=True)
class Marks:
    """The times of one run."""

    clock: Clock
    ends: Ends
    times: list[Moment] = field(default_factory=list)

    def take(self) -> None:
        self.times.append(self.clock.now())
        self.ends.look()

    def look(self) -> None:
        self.ends.look()


def mark(module: fx.GraphModule, phase: str, parameters: Collection[str], modules: Mapping[str, str]) -> Track:
    """Put marks into a graph of `release.released`, which then takes `Marks` after its list.

    Args:
        module: the graph, not yet released.
        phase: ``forward`` or ``backward``.
        parameters: names in the plan.
        modules: for names of ops that of their module, by which compute is told.
    """
    plain = released(module)
    graph, env = fx.Graph(), {}
    regions: list[Region] = []
    begun: dict[fx.Node, int] = {}
    for node in plain.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
            marks = graph.placeholder("marks")
            continue
        region = _region(node, phase, parameters, begun, modules)
        last = regions[-1] if regions else None
        if node.op == "output" or last is None or not _continues(last, region):
            graph.call_method("take", (marks,))
            if node.op != "output":
                regions.append(region if region.values else replace(region, values=(RESHARDS,)))
        else:
            graph.call_method("look", (marks,))
        if region.what is What.START:
            begun[node] = len(regions) - 1
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return Track(fx.GraphModule(plain, graph), tuple(regions))


def _continues(last: Region, region: Region) -> bool:
    return last.what is region.what is What.COMPUTE and (region.values in ((), last.values))


def _region(node: fx.Node, phase: str, parameters: Collection[str], begun: Mapping[fx.Node, int], modules: Mapping[str, str]) -> Region:
    if node.target in _KINDS:
        entries = [user for user in node.users if user.target is getitem] or [node]
        values = tuple(name for entry in entries for name in _names(entry))
        return Region(What.START, _phase(entries[0], values, phase, parameters), values, _KINDS[node.target])
    if node.target in (WAIT, part_of):
        source = node.all_input_nodes[0]
        source = source.all_input_nodes[0] if source.target is getitem and source.all_input_nodes[0] in begun else source
        return Region(What.WAIT, phase, _names(node), started=begun.get(source))
    return Region(What.COMPUTE, phase, tuple(modules.get(name, name) for name in _names(node, ("of",))))


def _names(node: fx.Node, keys: Sequence[str] = ("moved", "of")) -> tuple[str, ...]:
    customs = node.meta.get(TOGETHER) or (node.meta.get("custom", {}),)
    return tuple(filter(None, (next((custom[key] for key in keys if custom.get(key)), "") for custom in customs)))


def _phase(node: fx.Node, values: tuple[str, ...], phase: str, parameters: Collection[str]) -> str:
    """What a collective is for. A backward gathers parameters again by nodes of the forward; those of its own move gradients."""
    if not all(value in parameters for value in values):
        return phase
    return "reduce" if node.meta.get("partitioner_tag") == BACKWARD else "gather"
