"""Problem: clusters of nodes with their variants, and the edges between them.

A *cluster* is one op (or parameter) with those that lie like it does (`solve.join`); equal clusters of repeated blocks are one, with a
multiplicity. On each mesh axis a cluster has *choices* (on the axis in time but one); a *variant* is one choice per axis. An *edge*
carries a value from a cluster to an operand of another; a *fan* is the set of edges over which one value goes out, so that a reshard that
several consumers want is paid once. `solve.build` makes one of a normal graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import fx

from autopar.factors import Factors
from autopar.graph import Value, value_spec
from autopar.layout import REPLICATED, Layout, Placement, shard
from autopar.mesh import Mesh
from autopar.passes.microbatch import Split
from autopar.rules.strategies import Choice
from autopar.storage import Held, has_room

T = TypeVar("T")

Operand = tuple[fx.Node, int]
"""An op, and which of its operands."""


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """What a cluster does on one axis: how it gives each value and wants each operand."""

    name: str
    gives: Mapping[Value, Held]
    wants: Mapping[Operand, Placement]
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

    def wants(self, operand: Operand, variant: int) -> tuple[Placement, ...]:
        """How the operand is wanted, per axis."""
        return tuple(self.choices[axis][pick].wants[operand] for axis, pick in enumerate(self.variants[variant]))

    def all_gives(self, value: Value) -> list[tuple[Held, ...]]:
        """`gives` of every variant."""
        return self._of_variants([[choice.gives[value] for choice in choices] for choices in self.choices])

    def all_wants(self, operand: Operand) -> list[tuple[Placement, ...]]:
        """`wants` of every variant."""
        return self._of_variants([[choice.wants[operand] for choice in choices] for choices in self.choices])

    def _of_variants(self, rows: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
        picked = ([row[pick] for pick in column] for row, column in zip(rows, zip(*self.variants, strict=True), strict=True))
        return list(zip(*picked, strict=True))


class Edge(NamedTuple):
    """A value of cluster ``source`` that goes to an operand of cluster ``target`` (None: to the user, who gets it whole)."""

    value: Value
    source: int
    target: int | None
    operand: Operand | None


class Use(NamedTuple):
    """A use of a value of the model outside of its cluster: by an op (``by``; None: by the user), over an edge, which may be that of an
    operand that is wanted alike."""

    value: Value
    by: fx.Node | None
    edge: Edge
    operand: Operand | None


@dataclass(slots=True)
class Fan:
    """The edges over which one value goes out, and how often this happens in the model."""

    edges: tuple[Edge, ...]
    multiplicity: int


@dataclass(slots=True)
class Problem:
    """All that the integer program is about; ``edges`` has every distinct edge, ``uses`` every use in the model, ``walks`` what was found
    of the lives of values (`solve.lives`), which does not change with the number of micro-batches."""

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
    walks: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    _sizes: dict[fx.Node, dict[str, np.ndarray]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shards: dict[tuple[Held, ...], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def microbatches(self) -> int:
        return self.split.microbatches if self.split is not None else 1

    def other_shards(self, held: tuple[Held, ...]) -> list[int]:
        """For each axis the shards on the others; worked out once."""
        if held not in self._shards:
            sizes, is_sharded = self.mesh.sizes, [isinstance(h, Placement) and h.is_sharded for h in held]
            shards = math.prod(size for size, one in zip(sizes, is_sharded, strict=True) if one)
            self._shards[held] = [shards // size if one else shards for size, one in zip(sizes, is_sharded, strict=True)]
        return self._shards[held]

    def output_layouts(self, value: Value, held: Sequence[Held]) -> tuple[Layout, Layout]:
        """How an output lies that is held so, and how all its ranks get it: whole, but for the axis in time."""
        lies = Layout(self.mesh, self.factors.values[value], tuple(h for h in held if isinstance(h, Placement)))
        whole = tuple(p if axis == self.mesh.time_axis else REPLICATED for axis, p in enumerate(lies.placements))
        return lies, replace(lies, placements=whole)

    def with_variants(self, variants: Sequence[int]) -> Problem:
        """The same where each cluster has one variant alone."""
        clusters = [replace(cluster, variants=[cluster.variants[v]]) for cluster, v in zip(self.clusters, variants, strict=True)]
        return replace(self, clusters=clusters)

    def goes_alike(self, split: Split | None) -> bool:
        """Whether ops go on the axis in time as they do in ``split``."""
        return self.split is not None and split is not None and self.split.choices == split.choices

    def in_parts(self, split: Split) -> Problem:
        """The same with the batch in other parts, in which ops go alike, of which every op has other variants."""
        problem = replace(self, mesh=self.mesh.in_space.with_time(split.microbatches), split=split, clusters=[])
        for cluster in self.clusters:
            atoms, in_time = _atom_sizes(problem, cluster.leader), cluster.choices[-1]
            is_parted = any(choice.name in atoms for choice in in_time)
            problem.clusters.append(
                replace(cluster, variants=variants_of(problem, cluster.leader, cluster.choices)) if is_parted else cluster
            )
        return problem


def variants_of(problem: Problem, node: fx.Node, choices: list[list[ClusterChoice]]) -> list[tuple[int, ...]]:
    """One choice per axis, where axes that share an atom together divide it and a parameter's shards can be stored."""
    atom_sizes = _atom_sizes(problem, node)
    in_space = problem.mesh.in_space
    kept = []
    split_on = [[choice.name if choice.name in atom_sizes else "" for choice in row] for row in choices]
    for picks in product(*(range(len(row)) for row in choices)):
        shards: dict[str, int] = {}
        for names, pick, size in zip(split_on, picks, problem.mesh.sizes, strict=True):
            if name := names[pick]:
                shards[name] = shards.get(name, 1) * size
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


def local_num_bytes(problem: Problem, cluster: Cluster, value: Value) -> np.ndarray:
    """Bytes of a value that a cluster gives on each rank, for every variant."""
    parts = np.ones(len(cluster.variants))
    for picks, choices, size in zip(np.array(cluster.variants).T, cluster.choices, problem.mesh.sizes, strict=True):
        held = [choice.gives[value] for choice in choices]
        parts *= np.array([size if isinstance(h, Placement) and h.is_sharded else 1 for h in held])[picks]
    return value_spec(value).num_bytes / parts


def local_sizes(problem: Problem, cluster: Cluster, node: fx.Node) -> Mapping[str, np.ndarray]:
    """Local size of every factor of an op, for every variant of its cluster; worked out once."""
    if node not in problem._sizes:
        letters = problem.factors.letters.get(node, {})
        sizes = {letter: np.full(len(cluster.variants), float(math.prod(atoms))) for letter, atoms in letters.items()}
        for picks, choices, axis_size in zip(np.array(cluster.variants).T, cluster.choices, problem.mesh.sizes, strict=True):
            split = [choice.members[node].name.partition(".")[0] for choice in choices]
            for letter in sizes.keys() & split:
                sizes[letter] /= np.array([axis_size if name == letter else 1 for name in split])[picks]
        problem._sizes[node] = sizes
    return problem._sizes[node]
