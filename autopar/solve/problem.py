"""Normal graph -> problem: clusters of nodes with their variants, and the edges between them with prices.

A *cluster* is one op (or parameter) with the followers that lie like it does; equal clusters of repeated blocks are one, with a
multiplicity. On each mesh axis a cluster has *choices* (on the axis in time but one); a *variant* is one choice per axis. An *edge*
carries a value from a cluster to an operand of another; a *fan* is the set of edges over which one value goes out, so that a reshard that
several consumers want is paid once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
from torch import fx

from autopar.factors import Factors
from autopar.graph import Value, is_call, operands_of, outputs_of, specs_of, value_spec
from autopar.layout import PARTIAL, REPLICATED, Placement, shard
from autopar.mesh import Mesh
from autopar.passes.microbatch import Split
from autopar.rules.strategies import Choice
from autopar.solve.blocks import representatives
from autopar.storage import Held, Stored, has_room
from autopar.trace import Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """What a cluster does on one axis: how it gives each value and wants each operand."""

    name: str
    gives: Mapping[Value, Held]
    wants: Mapping[tuple[fx.Node, int], Placement]
    members: Mapping[fx.Node, Choice]


@dataclass(slots=True)
class Cluster:
    """One block of variables."""

    leader: fx.Node
    members: list[fx.Node]
    multiplicity: int
    choices: list[list[ClusterChoice]]
    variants: list[tuple[int, ...]]

    def choice_names(self, variant: int) -> tuple[str, ...]:
        return tuple(self.choices[axis][pick].name for axis, pick in enumerate(self.variants[variant]))

    def gives(self, value: Value, variant: int) -> tuple[Held, ...]:
        """How the value is held, per axis."""
        return tuple(self.choices[axis][pick].gives[value] for axis, pick in enumerate(self.variants[variant]))

    def wants(self, operand: tuple[fx.Node, int], variant: int) -> tuple[Placement, ...]:
        """How the operand is wanted, per axis."""
        return tuple(self.choices[axis][pick].wants[operand] for axis, pick in enumerate(self.variants[variant]))

    def all_gives(self, value: Value) -> list[tuple[Held, ...]]:
        """`gives` of every variant."""
        return self._of_variants([[choice.gives[value] for choice in choices] for choices in self.choices])

    def all_wants(self, operand: tuple[fx.Node, int]) -> list[tuple[Placement, ...]]:
        """`wants` of every variant."""
        return self._of_variants([[choice.wants[operand] for choice in choices] for choices in self.choices])

    def _of_variants(self, rows: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
        picked = ([row[pick] for pick in column] for row, column in zip(rows, zip(*self.variants, strict=True), strict=True))
        return list(zip(*picked, strict=True))


@dataclass(frozen=True, slots=True)
class Edge:
    """A value of cluster ``source`` that goes to an operand of cluster ``target`` (None: to the user, who gets it whole)."""

    value: Value
    source: int
    target: int | None
    operand: tuple[fx.Node, int] | None


class Use(NamedTuple):
    """A use of a value of the model outside of its cluster: by an op (``by``; None: by the user), over an edge."""

    value: Value
    by: fx.Node | None
    edge: Edge


@dataclass(slots=True)
class Fan:
    """The edges over which one value goes out, and how often this happens in the model."""

    edges: tuple[Edge, ...]
    multiplicity: int


@dataclass(slots=True)
class Problem:
    """All that the integer program is about; ``edges`` has every distinct edge, ``uses`` every use in the model."""

    mesh: Mesh
    module: fx.GraphModule
    factors: Factors
    split: Split | None = None
    clusters: list[Cluster] = field(default_factory=list)
    fans: list[Fan] = field(default_factory=list)
    shared: dict[fx.Node, fx.Node] = field(default_factory=dict)
    cluster_of: dict[fx.Node, int] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    _sizes: dict[fx.Node, dict[str, np.ndarray]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def microbatches(self) -> int:
        return self.split.microbatches if self.split is not None else 1

    def in_parts(self, split: Split | None) -> Problem | None:
        """The same with the batch in other parts, of which every op has other variants; None if ops go another way on the axis in time."""
        if self.split is None or split is None or self.split.choices != split.choices:
            return None
        problem = replace(self, mesh=self.mesh.in_space.with_time(split.microbatches), split=split, clusters=[])
        for cluster in self.clusters:
            problem.clusters.append(replace(cluster, variants=_variants(problem, cluster.leader, cluster.choices)))
        return problem


def build_problem(
    module: fx.GraphModule,
    factors: Factors,
    mesh: Mesh,
    *,
    split: Split | None = None,
    share: bool = True,
    tags: Mapping[fx.Node, Hashable] | None = None,
    repeats: Mapping[fx.Node, int] | None = None,
) -> Problem:
    """Build the problem of a normal graph on a mesh.

    Args:
        split: how ops go on the axis in time, which the mesh then has.
        share: let equal blocks share variables (off only for tests and measurements).
        tags: nodes with different tags do not share.
        repeats: how many nodes of the model a node stands for, where it is more than one (`fold`).
    """
    stands_for = repeats or {}
    problem = Problem(mesh, module, factors, split)
    alone = {n: n for n in module.graph.nodes if n.op == "placeholder" or (is_call(n) and not n.meta["constant"])}
    in_time = {} if split is None else {node: choice.name for node, choice in split.choices.items()}
    problem.shared = representatives(module, factors, tags or {}, in_time) if share else alone
    instances: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node in problem.shared:
            instances.setdefault(problem.shared[node], []).append(node)
    for leader, copies in instances.items():
        count = sum(stands_for.get(copy, 1) for copy in copies)
        if leader.op == "placeholder":
            choices = _placeholder_choices(problem, leader)
        else:
            choices = _call_choices(problem, leader)
            if _follow(problem, leader, copies, count, choices):
                continue
        variants = _variants(problem, leader, choices)
        problem.cluster_of[leader] = len(problem.clusters)
        problem.clusters.append(Cluster(leader, [leader], count, choices, variants))
    _connect(problem, stands_for)
    return problem


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
        held: list[Held] = [REPLICATED]
        if source is Source.PARAMETER and size > 1 and axis != problem.mesh.time_axis:
            sharded = [
                shard(dim, atom)
                for dim, atoms in enumerate(problem.factors.values[value])
                for atom, atom_size in enumerate(atoms)
                if atom_size > 1 and atom_size % size == 0
            ]
            held += sharded
            if sharded:
                held += [Stored(level) for level in (1, 2, 3)]
        per_axis.append([ClusterChoice(str(h), {value: h}, {}, {}) for h in held])
    return per_axis


def _follow(problem: Problem, node: fx.Node, copies: Sequence[fx.Node], count: int, choices: list[list[ClusterChoice]]) -> bool:
    """Add ``node`` to the cluster of its producer if it can lie as whatever that gives, and moves no fewer bytes."""
    operands = [value for value in operands_of(node) if not value.node.meta["constant"]]
    if len(operands) != 1 or operands[0].node.op == "placeholder" or len(specs_of(node)) != 1:
        return False
    producers = {_shared_value(problem, _only_operand(copy)) for copy in copies}
    if len(producers) != 1 or value_spec(operands[0]).num_bytes != specs_of(node)[0].num_bytes:
        return False
    (value,) = producers
    cluster = problem.clusters[problem.cluster_of[value.node]]
    if cluster.multiplicity != count:
        return False
    position = [v.node.meta["constant"] for v in operands_of(node)].index(False)
    matched: list[list[ClusterChoice]] = []
    for axis, given in enumerate(cluster.choices):
        row = []
        for choice in given:
            fitting = [c for c in choices[axis] if c.wants[node, position] == choice.gives[value] and _constants_whole(c, node)]
            if not fitting:
                return False
            row.append(fitting[0])
        matched.append(row)
    cluster.members.append(node)
    problem.cluster_of[node] = problem.cluster_of[value.node]
    for axis, row in enumerate(matched):
        cluster.choices[axis] = [
            ClusterChoice(a.name, {**a.gives, **b.gives}, {**a.wants, **_without(b, node, position)}, {**a.members, **b.members})
            for a, b in zip(cluster.choices[axis], row, strict=True)
        ]
    return True


def _constants_whole(choice: ClusterChoice, node: fx.Node) -> bool:
    return all(
        choice.wants[node, i].holds_whole for i, value in enumerate(operands_of(node)) if value.node.meta["constant"]
    )


def _without(choice: ClusterChoice, node: fx.Node, position: int) -> dict[tuple[fx.Node, int], Placement]:
    return {key: placement for key, placement in choice.wants.items() if key != (node, position)}


def _only_operand(node: fx.Node) -> Value:
    (value,) = (value for value in operands_of(node) if not value.node.meta["constant"])
    return value


def _shared_value(problem: Problem, value: Value) -> Value:
    return Value(problem.shared.get(value.node, value.node), value.index)


def _variants(problem: Problem, node: fx.Node, choices: list[list[ClusterChoice]]) -> list[tuple[int, ...]]:
    """One choice per axis, where axes that share an atom together divide it and a parameter's shards can be stored."""
    atom_sizes = _atom_sizes(problem, node)
    in_space = problem.mesh.in_space
    kept = []
    for picks in product(*(range(len(row)) for row in choices)):
        shards: dict[str, int] = {}
        for axis, pick in enumerate(picks):
            name = choices[axis][pick].name
            if name in atom_sizes:
                shards[name] = shards.get(name, 1) * problem.mesh.sizes[axis]
        if any(atom_sizes[name] % count for name, count in shards.items()):
            continue
        if node.op == "placeholder":
            held = tuple(row[pick].gives[Value(node)] for row, pick in zip(choices, picks, strict=True))
            if not has_room(in_space, problem.factors.of(node), held[: len(in_space.sizes)]):
                continue
        kept.append(picks)
    return kept


def _atom_sizes(problem: Problem, node: fx.Node) -> dict[str, int]:
    """Size of the atom behind each choice that shards one, by the choice's name."""
    if node.op == "placeholder":
        atoms = problem.factors.of(node)
        return {str(shard(d, a)): size for d, sizes in enumerate(atoms) for a, size in enumerate(sizes)}
    letters = problem.factors.letters.get(node, {})
    return {f"{letter}.{a}" if a else letter: size for letter, sizes in letters.items() for a, size in enumerate(sizes)}


def _uses(problem: Problem) -> Iterator[Use]:
    shared, cluster_of = problem.shared, problem.cluster_of
    for node in problem.module.graph.nodes:
        if node not in shared or node.op == "placeholder":
            continue
        target = cluster_of[shared[node]]
        for position, value in enumerate(operands_of(node)):
            operand = (shared[node], position)
            if value.node in shared and operand in problem.clusters[target].choices[0][0].wants:
                known = _shared_value(problem, value)
                yield Use(value, node, Edge(known, cluster_of[known.node], target, operand))
    for value in outputs_of(problem.module.graph):
        if value.node in shared:
            known = _shared_value(problem, value)
            yield Use(value, None, Edge(known, cluster_of[known.node], None, None))


def _connect(problem: Problem, stands_for: Mapping[fx.Node, int]) -> None:
    """Find the fans."""
    consumers: dict[Value, list[Edge]] = {}
    problem.uses = list(_uses(problem))
    for value, _, edge in problem.uses:
        consumers.setdefault(value, []).append(edge)
    counted: Counter[tuple[Edge, ...]] = Counter()
    for value, edges in consumers.items():
        counted[tuple(dict.fromkeys(edges))] += stands_for.get(value.node, 1)
    problem.fans = [Fan(edges, count) for edges, count in counted.items()]
    problem.edges = list(dict.fromkeys(edge for fan in problem.fans for edge in fan.edges))


def local_sizes(problem: Problem, cluster: Cluster, node: fx.Node) -> Mapping[str, np.ndarray]:
    """Local size of every factor of an op, for every variant of its cluster; worked out once."""
    if node not in problem._sizes:
        letters = problem.factors.letters.get(node, {})
        sizes = {letter: np.full(len(cluster.variants), float(math.prod(atoms))) for letter, atoms in letters.items()}
        for picks, choices, axis_size in zip(np.array(cluster.variants).T, cluster.choices, problem.mesh.sizes, strict=True):
            letter_of = np.array([choice.members[node].name.partition(".")[0] for choice in choices])[picks]
            for letter, size in sizes.items():
                size[letter_of == letter] /= axis_size
        problem._sizes[node] = sizes
    return problem._sizes[node]
