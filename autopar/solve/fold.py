"""A deep model in short: its graph with all but a few of the equal blocks taken out, by which `outline` judges shapes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.exporting import code_when_called
from autopar.compile import Normal
from autopar.factors import Factors
from autopar.graph import Value, is_call, is_getitem, operands_of
from autopar.solve.blocks import repeated_runs, token

KEPT, ENDS = 4, 2
"""Blocks that are left: one at each end of the run, which other ops may cut into, and two between."""
LEAST_REMOVED = 4
"""It is not worth it for fewer blocks than these."""
MOST_ELSE = 2
"""How many blocks' worth of ops may be out of the run: what is there goes to the first and the last stage."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph with blocks taken out.

    Args:
        normal: the graph.
        removed: how many blocks.
        block: ops and parameters of a block that is left.
    """

    normal: Normal
    removed: int
    block: frozenset[fx.Node]

    @property
    def blocks(self) -> int:
        """Of the whole model."""
        return self.removed + KEPT

    @property
    def most_stages(self) -> int:
        """One for each block of the model, and for what is before and behind them."""
        return self.blocks + ENDS

    def repeats(self, blocks: int) -> dict[fx.Node, int]:
        """How many nodes each node of `block` stands for, if there are so many blocks in place of those left."""
        return dict.fromkeys(self.block, max(1, 1 + blocks - KEPT))


def fold(normal: Normal) -> Folded | None:
    """The graph without most of the blocks of its longest run of equal ones; None if there are few, much else, or other wires."""
    calls = [node for node in normal.module.graph.nodes if is_call(node) and not node.meta["constant"]]
    runs = repeated_runs([token(node, normal.factors, {}) for node in calls])
    if not runs:
        return None
    start, period, length = max(runs, key=lambda run: run[2])
    removed = length // period - KEPT
    if removed < LEAST_REMOVED or len(calls) - length > MOST_ELSE * period or not _wired_alike(calls, start, period, length):
        return None
    begin, shift = start + (KEPT // 2) * period, removed * period
    gone = set(calls[begin : begin + shift])
    # what is read of a block that is gone is read of the one before: the wires of the first block after it lead there
    before = {calls[i]: calls[begin - period + (i - begin) % period] for i in range(begin, begin + shift)}
    short, env = _without(normal, gone, before)
    ops = [env[node] for node in calls[begin - period : begin]]
    own = {node for op in ops for node in op.all_input_nodes if node.op == "placeholder" and set(node.users) <= set(ops)}
    return Folded(short, removed, frozenset({*ops, *own}))


def _wired_alike(calls: list[fx.Node], start: int, period: int, length: int) -> bool:
    """Whether ops of the run read of their block, of the one before, and from before the run what those of the next block do."""
    place = {node: i for i, node in enumerate(calls)}
    for i in range(start + period, start + length - period):
        for own, later in zip(operands_of(calls[i]), operands_of(calls[i + period]), strict=True):
            at, then = place.get(own.node, -1), place.get(later.node, -1)
            is_inside = at >= start and then - at == period and i - at < 2 * period
            if own.index != later.index or (not is_inside and not at == then < start):
                return False
    return True


def _without(normal: Normal, gone: set[fx.Node], before: dict[fx.Node, fx.Node]) -> tuple[Normal, dict[fx.Node, fx.Node]]:
    """The graph without some nodes, each with one in its place; and where every node is now."""
    module = normal.module
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results = {(node.args[0], node.args[1]): node for node in module.graph.nodes if is_getitem(node)}
    for node in module.graph.nodes:
        if node in gone:
            env[node] = env[before[node]]
        elif is_getitem(node) and node.args[0] in gone:
            env[node] = env[results[before[node.args[0]], node.args[1]]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    for node in reversed(module.graph.nodes):
        if node.users and node not in gone and not env[node].users:
            graph.erase_node(env[node])
    with code_when_called():
        short = fx.GraphModule(module, graph)
    left = set(graph.nodes)
    now = {node: env[node] for node in module.graph.nodes if node not in gone and env[node] in left}
    factors = normal.factors
    return Normal(
        short,
        Factors(
            {Value(now[value.node], value.index): atoms for value, atoms in factors.values.items() if value.node in now},
            {now[node]: rule for node, rule in factors.rules.items() if node in now},
            {now[node]: letters for node, letters in factors.letters.items() if node in now},
        ),
    ), env
