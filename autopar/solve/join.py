"""Ops that lie alike without loss -> one cluster.

Moving a value between two ops costs what its bytes cost, wherever that is done on the way. So an op may lie as the one that makes what it
reads (`follow`), and take in those that work for it alone (`take_in`): `silu(gate) * up` is one choice, and so are the eight ops of a
rotary embedding, which read one value and make one of as many bytes. A reshard between them would cost no less than one of what goes in or
of what comes out, but for what they compute, which is little: matrix products and attention stay by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from torch import fx

from autopar.cost.compute import node_cost
from autopar.graph import Value, operands_of, outputs_of, specs_of, value_spec
from autopar.solve.problem import Cluster, ClusterChoice, Operand, Problem

HARDLY_MORE = 1.25
"""Of bytes: tables of a rotary embedding come on top of the queries."""


def follow(problem: Problem, cluster: Cluster, copies: Sequence[fx.Node]) -> bool:
    """Add an op to the cluster of its producer if it can lie as whatever that gives, and moves no fewer bytes.

    Args:
        problem: with the clusters of all ops before.
        cluster: of the op alone.
        copies: the op in every block that it is shared by.
    """
    node = cluster.leader
    operands = [value for value in operands_of(node) if not value.node.meta["constant"]]
    if len(operands) != 1 or operands[0].node.op == "placeholder" or len(specs_of(node)) != 1:
        return False
    producers = {shared_value(problem, _only_operand(copy)) for copy in copies}
    if len(producers) != 1 or value_spec(operands[0]).num_bytes != specs_of(node)[0].num_bytes:
        return False
    (value,) = producers
    producer = problem.clusters[problem.cluster_of[value.node]]
    if producer.multiplicity != cluster.multiplicity:
        return False
    position = [v.node.meta["constant"] for v in operands_of(node)].index(False)
    matched: list[list[ClusterChoice]] = []
    for axis, given in enumerate(producer.choices):
        row = []
        for choice in given:
            own = [c for c in cluster.choices[axis] if c.wants[node, position] == choice.gives[value] and _constants_whole(c, node)]
            if not own:
                return False
            row.append(own[0])
        matched.append(row)
    producer.members.append(node)
    problem.cluster_of[node] = problem.cluster_of[value.node]
    for axis, row in enumerate(matched):
        producer.choices[axis] = [
            _together(choice.name, [choice, own], inside={(node, position)})
            for choice, own in zip(producer.choices[axis], row, strict=True)
        ]
    return True


def take_in(problem: Problem, cluster: Cluster, copies: Sequence[fx.Node], tags: Mapping[fx.Node, Hashable]) -> None:
    """Add clusters that work for an op alone to its own, and take them from the problem, if what they read has hardly more bytes than what
    the op reads of them; arguments are as for `follow`. What is pinned (``tags``) stays by itself."""
    node = cluster.leader
    if node in tags or not _is_light(problem, node):
        return
    read: dict[int, dict[int, Value]] = {}
    for position, values in enumerate(zip(*map(operands_of, copies), strict=True)):
        value, *others = {shared_value(problem, value) for value in values}
        if not others and value.node in problem.cluster_of and value.node.op != "placeholder":
            read.setdefault(problem.cluster_of[value.node], {})[position] = value
    taken = {index: own for index, own in read.items() if _serves(problem, problem.clusters[index], cluster, tags)}
    operands = operands_of(node)
    sources = [problem.clusters[index] for index in taken]
    most = HARDLY_MORE * _num_bytes({operands[position] for own in taken.values() for position in own})
    if not taken or _num_bytes({value for source in sources for value in _read_by(problem, source)}) > most:
        return
    wanted = {(node, position): value for own in taken.values() for position, value in own.items()}
    rows = [[_taken_in(choice, axis, sources, wanted) for choice in row] for axis, row in enumerate(cluster.choices)]
    if any(None in row for row in rows) and specs_of(node)[0].num_bytes > most:
        return  # what the op can and they cannot would be a reshard of what it makes, which is more
    choices = [[choice for choice in row if choice is not None] for row in rows]
    if not all(choices):
        return  # they go other ways on the axis in time
    cluster.choices = choices
    cluster.members = [*(member for source in sources for member in source.members), node]
    problem.clusters = [one for index, one in enumerate(problem.clusters) if index not in taken]
    problem.cluster_of = {member: index for index, one in enumerate(problem.clusters) for member in one.members}


def _serves(problem: Problem, source: Cluster, cluster: Cluster, tags: Mapping[fx.Node, Hashable]) -> bool:
    """Whether a cluster of light ops that sum nothing is read by another alone, as often as there are copies of it."""
    rules, inside = problem.factors.rules, {*source.members, cluster.leader}
    if source.multiplicity != cluster.multiplicity or any(member in tags for member in source.members):
        return False
    if any(not _is_light(problem, member) or rules[member].summed or rules[member].reduced for member in source.members):
        return False
    made = [node for node, shared in problem.shared.items() if shared in source.members]
    outputs = {value.node for value in outputs_of(problem.module.graph)}
    return outputs.isdisjoint(made) and all(problem.shared.get(user) in inside for node in made for user in node.users)


def _is_light(problem: Problem, node: fx.Node) -> bool:
    rule = problem.factors.rules.get(node)
    if rule is None or node.op == "placeholder":
        return False
    cost = node_cost(node, rule)
    return not cost.is_matmul and not cost.is_attention


def _read_by(problem: Problem, cluster: Cluster) -> set[Value]:
    """What a cluster reads of others, in its first copy: values of two ops that share a decision are two."""
    values = {value for member in cluster.members for value in operands_of(member) if not value.node.meta["constant"]}
    return {value for value in values if problem.shared[value.node] not in cluster.members}


def _num_bytes(values: Collection[Value]) -> int:
    return sum(value_spec(value).num_bytes for value in values)


def _taken_in(choice: ClusterChoice, axis: int, sources: Sequence[Cluster], wanted: Mapping[Operand, Value]) -> ClusterChoice | None:
    """A choice of an op with those of others that give what it wants of them; None if one of them cannot."""
    found = [choice]
    for source in sources:
        own = {key: value for key, value in wanted.items() if value.node in source.members}
        fitting = [other for other in source.choices[axis] if all(other.gives[value] == choice.wants[key] for key, value in own.items())]
        if not fitting:
            return None
        found.append(fitting[0])
    return _together(choice.name, found, inside=wanted)


def _together(name: str, choices: Sequence[ClusterChoice], *, inside: Collection[Operand]) -> ClusterChoice:
    """Choices of several as one; what goes from one to another is nobody's wish."""
    return ClusterChoice(
        name,
        {value: held for choice in choices for value, held in choice.gives.items()},
        {key: place for choice in choices for key, place in choice.wants.items() if key not in inside},
        {node: own for choice in choices for node, own in choice.members.items()},
    )


def _constants_whole(choice: ClusterChoice, node: fx.Node) -> bool:
    return all(choice.wants[node, i].holds_whole for i, value in enumerate(operands_of(node)) if value.node.meta["constant"])


def _only_operand(node: fx.Node) -> Value:
    (value,) = (value for value in operands_of(node) if not value.node.meta["constant"])
    return value


def shared_value(problem: Problem, value: Value) -> Value:
    return Value(problem.shared.get(value.node, value.node), value.index)
