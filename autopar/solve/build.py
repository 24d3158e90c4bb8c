"""Normal graph -> problem: what every op and parameter may do, which of them lie alike, and which values go from one to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from torch import fx

from autopar.capture.trace import Source
from autopar.factors import Factors
from autopar.graph import Value, is_call, operands_of, outputs_of, specs_of
from autopar.layout import PARTIAL, REPLICATED, Placement
from autopar.mesh import Mesh
from autopar.passes.microbatch import Split
from autopar.rules.strategies import Choice
from autopar.solve.blocks import representatives
from autopar.solve.join import follow, shared_value, take_in
from autopar.solve.problem import Cluster, ClusterChoice, Edge, Fan, Operand, Problem, Use, variants_of
from autopar.storage import ways_to_hold


def _call_choices(problem: Problem, node: fx.Node) -> list[list[ClusterChoice]]:
    constants = [i for i, value in enumerate(operands_of(node)) if value.node.meta["constant"]]

    def legal(axis: int) -> list[Choice]:
        if axis == problem.mesh.time_axis:
            assert problem.split is not None
            return [problem.split.choices[node]]
        choices = problem.factors.choices(node, problem.mesh.sizes[axis])
        return [c for c in choices if not any(c.operands[i] == PARTIAL for i in constants)]  # every rank makes constants whole

    return [[_cluster_choice(node, choice) for choice in legal(axis)] for axis in range(len(problem.mesh.sizes))]


def _cluster_choice(node: fx.Node, choice: Choice) -> ClusterChoice:
    gives = {Value(node, i): choice.results[i] for i in range(len(specs_of(node)))}
    wants = {(node, i): placement for i, placement in enumerate(choice.operands)}
    return ClusterChoice(choice.name, gives, wants, {node: choice})


def _placeholder_choices(problem: Problem, node: fx.Node) -> list[list[ClusterChoice]]:
    """Inputs and buffers come whole to every rank; a parameter may be stored whole, sharded for its use, or as a ZeRO shard."""
    value = Value(node)
    source = node.meta["placeholder"].source
    per_axis = []
    for axis, size in enumerate(problem.mesh.sizes):
        is_stored = source is Source.PARAMETER and axis != problem.mesh.time_axis
        held = ways_to_hold(problem.factors.values[value], size) if is_stored else [REPLICATED]
        per_axis.append([ClusterChoice(str(h), {value: h}, {}, {}) for h in held])
    return per_axis


def _uses(problem: Problem) -> Iterator[Use]:
    """Every use of a value outside of its cluster. Operands that a cluster wants alike in all its choices have one edge."""
    first: dict[tuple[Value, int, tuple[tuple[Placement, ...], ...]], Operand] = {}
    shared, cluster_of = problem.shared, problem.cluster_of
    for node in problem.module.graph.nodes:
        if node not in shared or node.op == "placeholder":
            continue
        target = cluster_of[shared[node]]
        for position, value in enumerate(operands_of(node)):
            operand = (shared[node], position)
            choices = problem.clusters[target].choices
            if value.node in shared and operand in choices[0][0].wants:
                known = shared_value(problem, value)
                wants = tuple(tuple(choice.wants[operand] for choice in row) for row in choices)
                alike = first.setdefault((known, target, wants), operand)
                yield Use(value, node, Edge(known, cluster_of[known.node], target, alike), operand)
    for value in outputs_of(problem.module.graph):
        if value.node in shared:
            known = shared_value(problem, value)
            yield Use(value, None, Edge(known, cluster_of[known.node], None, None), None)


def _connect(problem: Problem, stands_for: Mapping[fx.Node, int]) -> None:
    """Find the fans."""
    consumers: dict[Value, list[Edge]] = {}
    problem.uses = list(_uses(problem))
    for value, _, edge, _ in problem.uses:
        consumers.setdefault(value, []).append(edge)
    counted: Counter[tuple[Edge, ...]] = Counter()
    for value, edges in consumers.items():
        counted[tuple(dict.fromkeys(edges))] += stands_for.get(value.node, 1)
    problem.fans = [Fan(edges, count) for edges, count in counted.items()]
    problem.edges = list(dict.fromkeys(edge for fan in problem.fans for edge in fan.edges))


def build_problem(
    module: fx.GraphModule,
    factors: Factors,
    mesh: Mesh,
    *,
    split: Split | None = None,
    share: bool = True,
    tags: Mapping[fx.Node, Hashable] | None = None,
    repeats: Mapping[fx.Node, int] | None = None,
    like: Problem | None = None,
) -> Problem:
    """Build the problem of a normal graph on a mesh.

    Args:
        split: how ops go on the axis in time, which the mesh then has.
        share: let equal blocks share variables (off only for tests and measurements).
        tags: nodes with different tags do not share variables, and those with any do not work for others (`take_in`).
        repeats: how many nodes of the model a node stands for, where it is more than one (`fold`).
        like: the same on another mesh, in which ops go alike on the axis in time.
    """
    stands_for = repeats or {}
    problem = Problem(mesh, module, factors, split)
    alone = {n: n for n in module.graph.nodes if n.op == "placeholder" or (is_call(n) and not n.meta["constant"])}
    in_time = {} if split is None else {node: choice.name for node, choice in split.choices.items()}
    problem.shared = like.shared if like is not None else representatives(module, factors, tags or {}, in_time) if share else alone
    instances: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node in problem.shared:
            instances.setdefault(problem.shared[node], []).append(node)
    for leader, copies in instances.items():
        count = sum(stands_for.get(copy, 1) for copy in copies)
        is_op = leader.op != "placeholder"
        choices = _call_choices(problem, leader) if is_op else _placeholder_choices(problem, leader)
        cluster = Cluster(leader, [leader], count, choices, [])
        if is_op:
            if follow(problem, cluster, copies):
                continue
            take_in(problem, cluster, copies, tags or {})
        problem.cluster_of.update(dict.fromkeys(cluster.members, len(problem.clusters)))
        problem.clusters.append(cluster)
    for cluster in problem.clusters:
        cluster.variants = variants_of(problem, cluster.leader, cluster.choices)
    _connect(problem, stands_for)
    return problem
