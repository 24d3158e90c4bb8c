"""Which values are alive when, where the backward of a stage is in two parts (`passes.split_backward`).

I makes the gradients of received values with all that they are made of; W the rest. So W works on:

| kind                        | from                                                                                             |
|-----------------------------|--------------------------------------------------------------------------------------------------|
| kept of the forward         | operands of products with weights, and of ops whose gradient reaches no received value           |
| gradients that I makes      | of the results of these ops                                                                      |
| gradients of weights        | of norms and convolutions, which come with those of what they read                               |
| what is computed again in I | what such operands are made of; if nothing in I wants it, W computes it again                    |

and all of that lies there from I to W. A stage that receives nothing has nothing to do in I, and all its backward is W.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.graph import Value, operands_of, specs_of, value_spec
from autopar.solve.liveness import Interval, InTwo, Keeper, Kept, Link, Span, Stay, Wanted
from autopar.solve.problem import Edge
from autopar.solve.views import passes_gradient


@dataclass(frozen=True, slots=True)
class Walked:
    """What a walk over the ops has found (`solve.lives`).

    Args:
        position: of every op.
        stage_at: stage of every op.
        roots: the values whose storage values share.
        spans: of the roots.
        read: of what is computed again, as it is wanted, the positions whose backward reads it so.
        again: ops that are computed again.
        weights: positions of ops whose weight's gradient is worked out by itself, of what they keep and the gradient of their result.
        biases: positions of ops that add a bias.
        edges: over which a value goes to an operand of an op.
        wanted: as what an operand of an op is wanted.
        kernels: ops whose backward also reads what their forward has kept of its own.
        twice: position of an op and what it reads, of which its backward makes two gradients.
    """

    position: Mapping[fx.Node, int]
    stage_at: Sequence[int]
    roots: Mapping[Value, Value]
    spans: Mapping[Value, Span]
    read: Mapping[Wanted, Sequence[int]]
    again: Collection[fx.Node]
    weights: Collection[int]
    biases: Collection[int]
    edges: Callable[[Value, fx.Node, int], Keeper]
    wanted: Callable[[Value, fx.Node, int], Wanted]
    kernels: Collection[fx.Node]
    twice: Mapping[int, Value]


def halve(walked: Walked, kept: Sequence[Kept]) -> InTwo:
    """Tell which part of the backward reads what; of what is ``kept`` by whom."""
    late = _late(walked)
    stages = max(walked.stage_at, default=0) + 1
    stays: list[list[Stay]] = [[] for _ in range(stages)]
    borders: list[list[int]] = [[] for _ in range(stages)]
    for t, stage in enumerate(walked.stage_at):
        borders[stage].append(t)
    ends = [(own[0], own[-1]) if own else (0, -1) for own in borders]
    early = _early(walked, late)
    joined = tuple(_add_made_again(walked, late, early, stays, ends))
    _add_gradients(walked, late, stays, ends)
    read_late = {t for node, t in walked.position.items() if node in walked.again and node not in early}
    weights: list[list[tuple[int, tuple[Link, ...]]]] = [[] for _ in range(stages)]
    for node, t in walked.position.items():
        stage = walked.stage_at[t]
        if t not in late and (t in walked.weights or t in walked.biases):
            weights[stage].append((t, tuple(_links(walked, Value(node), ends))))
        elif t not in late:
            begin, end = ends[stage]
            trained = [value for value in operands_of(node) if value.node.op == "placeholder" and value_spec(value).requires_grad]
            stays[stage] += (Stay(value, (begin, t), (t, end), is_gradient=True) for value in trained)
    return InTwo(
        late=late,
        reads_late=frozenset({*read_late, *late, *walked.weights}),
        stays=tuple(map(tuple, stays)),
        joined=joined,
        weights=tuple(map(tuple, weights)),
        kept=tuple(tuple(_kept_in(stage, walked, kept)) for stage in range(stages)),
    )


def _kept_in(stage: int, walked: Walked, kept: Sequence[Kept]) -> Iterator[tuple[Kept, tuple[tuple[int, Keeper], ...]]]:
    for entry in kept:
        if own := tuple((t, by) for t, by in entry.keepers if walked.stage_at[t] == stage):
            yield entry, own


def _links(walked: Walked, value: Value, ends: Sequence[Interval]) -> Iterator[Link]:
    """The values of a stage whose gradients may be that of ``value``: through views and sums that are all that is made of it."""
    stage = walked.stage_at[walked.position[value.node]]
    while True:
        root, users = walked.roots[value], list(value.node.users)
        last = min(walked.spans[root].end, ends[stage][1])
        user = users[0] if len(users) == 1 and walked.position.get(users[0], -1) >= 0 else None
        if user is None or walked.stage_at[walked.position[user]] != stage or not passes_gradient(user, value):
            yield Link(value, root, last, None)
            return
        yield Link(value, root, last, walked.edges(value, user, operands_of(user).index(value)))
        value = Value(user)


def _late(walked: Walked) -> frozenset[int]:
    """Positions of ops whose gradients reach no received value."""
    reached = set[fx.Node]()
    for node, t in walked.position.items():
        for value in operands_of(node):
            at = walked.position.get(value.node)
            if at is None or not value_spec(value).requires_grad:
                continue
            if value.node in reached or walked.stage_at[at] != walked.stage_at[t]:
                reached.add(node)
    return frozenset(t for node, t in walked.position.items() if node not in reached)


def _early(walked: Walked, late: Collection[int]) -> set[fx.Node]:
    """The ops that I computes again: those that it wants itself, and those for W that are smaller than what they are made of."""
    early = {
        walked.roots[value].node
        for (value, _), reads in walked.read.items()
        if any(t not in late and t not in walked.weights for t in reads)
    }
    early |= {node for node in walked.again if node in walked.kernels and walked.position[node] not in late}
    order = [node for node in sorted(walked.again, key=walked.position.__getitem__) if walked.roots[Value(node)] == Value(node)]
    for node in reversed(order):
        if node in early:
            early |= {root.node for root in _roots(walked, node) if root.node in walked.again}
    readers, made = defaultdict[Value, set[fx.Node]](set), set(order)
    for node, t in walked.position.items():
        if t in late or t in walked.weights or (node in made and node not in early):
            for root in _roots(walked, node):
                readers[root].add(node)
    for node in order:
        made_of = _roots(walked, node)
        if node in early or walked.position[node] in late or any(root.node in walked.again and root.node not in early for root in made_of):
            continue
        freed = sum(value_spec(root).num_bytes for root in made_of if readers[root] == {node})
        if freed > sum(spec.num_bytes for spec in specs_of(node)):
            early.add(node)
            for root in made_of:
                readers[root].discard(node)
    return early


def _roots(walked: Walked, node: fx.Node) -> set[Value]:
    """What an op reads of other ops."""
    return {walked.roots[value] for value in operands_of(node) if value in walked.roots}


def _add_made_again(
    walked: Walked, late: Collection[int], early: Collection[fx.Node], stays: Sequence[list[Stay]], ends: Sequence[Interval]
) -> Iterator[tuple[int, Edge]]:
    """What is computed again, where it is wanted; ``early`` by I. What W gathers of it for gradients of weights alone is given, with the op
    that it does so for."""
    read: tuple[dict[Wanted, list[int]], ...] = (defaultdict(list), defaultdict(list))  # by I and by W
    used: tuple[dict[Wanted, list[int]], ...] = (defaultdict(list), defaultdict(list))  # the same, to compute more
    tops: tuple[dict[fx.Node, list[int]], ...] = (defaultdict(list), defaultdict(list))
    forms: dict[fx.Node, dict[Wanted, None]] = defaultdict(dict)
    for wanted, positions in walked.read.items():
        root = walked.roots[wanted[0]]
        forms[root.node] |= {wanted: None, (root, None): None}
        for t in positions:
            part = t in late or t in walked.weights
            read[part][wanted].append(t)
            tops[part][root.node].append(t)
    for node in sorted(walked.again, key=walked.position.__getitem__, reverse=True):
        t, is_late = walked.position[node], node not in early
        if walked.roots[Value(node)] != Value(node):
            continue  # a view
        if node in walked.kernels:
            tops[is_late][node].append(t)
        top = max(tops[is_late][node] or tops[1][node], default=t)
        for i, value in enumerate(operands_of(node)):
            if value in walked.roots and walked.roots[value].node in walked.again:
                tops[is_late][walked.roots[value].node].append(top)
                used[is_late][walked.wanted(value, node, i)].append(top)
        begin, end = ends[walked.stage_at[t]]
        for value, edge in sorted(forms[node], key=lambda wanted: wanted[1] is None):  # as it is made last: the others are made of that
            wanted = value, edge
            in_inputs, in_weights = (read[part][wanted] + used[part][wanted] for part in (False, True))
            inputs = weights = None
            if is_late or (in_weights and not in_inputs and edge is not None):
                weights = (min(in_weights), max(in_weights)) if read[True][wanted] else None
                if weights and edge is not None:
                    used[True][walked.roots[value], None].append(weights[1])
                    if weights[1] in read[True][wanted] and weights[1] not in late:
                        yield weights[1], edge
            elif in_weights:
                inputs, weights = (begin, max(in_inputs, default=top)), (min(in_weights), end)
            elif read[False][wanted] or (edge is None and in_inputs and min(in_inputs) < top):
                is_copy = edge is not None and walked.roots[value] == value  # a view stands for what it views
                inputs = min(in_inputs), max(in_inputs) if is_copy else top
                if is_copy:
                    used[False][value, None].append(inputs[1])
            if inputs or weights:
                stays[walked.stage_at[t]].append(Stay(value, inputs, weights, by=edge, root=walked.roots[value]))


def _add_gradients(walked: Walked, late: Collection[int], stays: Sequence[list[Stay]], ends: Sequence[Interval]) -> None:
    """Gradients of values, in each stage that has them."""
    consumed = {
        (walked.stage_at[t], walked.roots[value])
        for node, t in walked.position.items()
        if t not in late
        for value in operands_of(node)
        if value in walked.roots
    }
    for value, span in walked.spans.items():
        if not value_spec(value).requires_grad or span.viewed == ():
            continue
        made_in = walked.stage_at[span.start]
        for stage in range(made_in, walked.stage_at[span.end] + 1):
            begin, end = ends[stage]
            first, last = max(begin, span.start), min(end, span.end)
            if first > last:
                continue
            inputs: Interval | None = (first, last)
            weights: Interval | None = None
            if stage == made_in and span.start in late:
                is_given = span.end > end or (stage, value) in consumed
                inputs, weights = ((begin, last), (first, end)) if is_given else (None, (first, last))
            stays[stage].append(Stay(value, inputs, weights, is_gradient=True))
    for t, value in walked.twice.items():
        stays[walked.stage_at[t]].append(Stay(value, *((None, (t, t)) if t in late else ((t, t), None))))

