"""Equal blocks share variables: find the runs of a graph that repeat, so that the integer program does not grow with depth.

Nodes get tokens (op, literals, shapes, factors). The period that covers most nodes is found, then the rest is searched again. Sharing is
always legal, since equal tokens have equal strategies and every edge keeps its own price; the search only decides how much is shared.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from torch import fx
from torch.utils import _pytree as pytree

from autopar.factors import Factors
from autopar.graph import is_call, operands_of, specs_of, value_spec


def representatives(
    module: fx.GraphModule, factors: Factors, tags: Mapping[fx.Node, Hashable], own: Mapping[fx.Node, Hashable] | None = None
) -> dict[fx.Node, fx.Node]:
    """For each call and placeholder, the node whose variables it shares (itself if it repeats nothing).

    Args:
        module: normal graph.
        factors: its factors.
        tags: what tells nodes apart beyond their structure (pins); nodes with different tags, or that read such, do not share.
        own: the same of a node alone, whatever reads it.
    """
    own = own or {}
    calls = [node for node in module.graph.nodes if is_call(node) and not node.meta["constant"]]
    shared = dict(zip(calls, calls, strict=True))
    for start, period, length in repeated_runs([(token(node, factors, tags), own.get(node)) for node in calls]):
        for position in range(start, start + length):
            shared[calls[position]] = calls[start + (position - start) % period]
    return shared | _shared_placeholders(module, factors, shared, tags)


def repeated_runs(tokens: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Runs ``(start, period, length)`` of at least two whole periods, disjoint, the longest first."""
    numbers: dict[Hashable, int] = {}
    coded = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int64)
    runs = []
    pending = [(0, len(coded))]
    while pending:
        low, high = pending.pop()
        found = _longest_run(coded[low:high])
        if found is not None:
            start, period, length = found
            runs.append((low + start, period, length))
            pending += [(low, low + start), (low + start + length, high)]
    return runs


def _longest_run(coded: np.ndarray) -> tuple[int, int, int] | None:
    best = None
    for period in range(1, len(coded) // 2 + 1):
        same = np.concatenate(([False], coded[period:] == coded[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        if not len(edges):
            continue
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax(ends - starts))
        matched = int(ends[longest] - starts[longest])
        if matched >= period and (best is None or matched + period > best[2]):
            best = (int(starts[longest]), period, matched + period)
    return best


def token(node: fx.Node, factors: Factors, tags: Mapping[fx.Node, Hashable]) -> Hashable:
    """What is equal for ops that are alike."""
    literals = pytree.tree_map(lambda x: "tensor" if isinstance(x, fx.Node) else x, (tuple(node.args), dict(node.kwargs)))
    operands = tuple(
        (value_spec(value), factors.values[value], value.node.meta["constant"], value.node.op) for value in operands_of(node)
    )
    letters = tuple(factors.letters.get(node, {}).items())
    tagged = (tags.get(node), *(tags.get(value.node) for value in operands_of(node)))
    return (str(node.target), repr(literals), operands, specs_of(node), letters, tagged)


def _shared_placeholders(
    module: fx.GraphModule, factors: Factors, shared: dict[fx.Node, fx.Node], tags: Mapping[fx.Node, Hashable]
) -> dict[fx.Node, fx.Node]:
    """Placeholders that are used alike (the same parameter of equal blocks) share."""
    users: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node, stands_for in shared.items():
        for position, value in enumerate(operands_of(node)):
            users.setdefault(value.node, []).append((stands_for, position))
    first: dict[Hashable, fx.Node] = {}
    result = {}
    for node in module.graph.find_nodes(op="placeholder"):
        source = node.meta["placeholder"].source
        key = (source, specs_of(node), factors.of(node), tags.get(node), tuple(users.get(node, [node])))
        result[node] = first.setdefault(key, node)
    return result
