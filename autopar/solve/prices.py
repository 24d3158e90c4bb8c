"""Problem -> prices: seconds of every variant of a cluster, of every way of an edge on an axis, and bytes of whatever may be held.

`Prices.objective` and `Prices.memory` say what one variant per cluster costs; the integer program (`solve.program`) is the same function
in rows. On an axis an edge is priced by the `Way` it goes (`solve.ways`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from torch import fx

from autopar.capture.trace import Source
from autopar.compression import part_shape
from autopar.cost.compute import node_cost
from autopar.cost.machine import MachineProfile
from autopar.cost.pricing import INSIDE_REDUCTIONS, EdgePrice, Pricer, beside, is_read_backward
from autopar.graph import Value, is_call, is_sorted, specs_of, value_spec
from autopar.layout import REPLICATED, Placement
from autopar.passes.fuse import biased_product
from autopar.passes.reshard import plan_steps
from autopar.rules.registry import TensorSpec
from autopar.solve.footprint import Footprint, MemoryUse
from autopar.solve.liveness import Liveness, Staging
from autopar.solve.lives import find_liveness
from autopar.solve.problem import Cluster, Edge, Problem, local_sizes
from autopar.solve.ways import Behind, Moved, Network, Sources, Targets, Way, network_of, sides_of
from autopar.storage import Held, Stored


@dataclass(slots=True)
class ClusterTime:
    """Seconds of each variant of a cluster in a step, once for all its copies; ``copied_s`` has a row like an `EdgePrice`, of the copies
    between host and device, for each."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    update_s: np.ndarray
    copied_s: np.ndarray

    @property
    def total_s(self) -> np.ndarray:
        """Without what may hide under compute."""
        return np.asarray(self.forward_s + self.backward_s + self.update_s + self.copied_s[:, 0])


@dataclass(frozen=True, slots=True)
class Objective:
    """Predicted seconds of a step, by kind; ``copied_s`` is of copies between host and device that nothing hides."""

    forward_s: float
    backward_s: float
    update_s: float
    blocking_s: float
    exposed_s: float
    copied_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.work_s + self.update_s + self.exposed_s + self.copied_s

    @property
    def work_s(self) -> float:
        """What is done for every micro-batch and nothing hides."""
        return self.forward_s + self.backward_s + self.blocking_s


def cluster_times(problem: Problem, pricer: Pricer) -> list[ClusterTime]:
    """Price every variant of every cluster, all variants of an op at a time."""
    return [_cluster_time(problem, pricer, cluster) for cluster in problem.clusters]


def _is_weight(problem: Problem, parameter: fx.Node) -> bool:
    """Whether the gradient of a parameter is a matrix product."""
    costs = [node_cost(user, problem.factors.rules.get(user)) for user in parameter.users if is_call(user)]
    return len(specs_of(parameter)[0].shape) == 2 and len(costs) == 1 and costs[0].is_matmul and not costs[0].is_attention


def _cluster_time(problem: Problem, pricer: Pricer, cluster: Cluster) -> ClusterTime:
    count, repeats = len(cluster.variants), problem.microbatches
    forward, backward, update = np.zeros(count), np.zeros(count), np.zeros(count)
    if cluster.leader.op == "placeholder":
        spec = specs_of(cluster.leader)[0]
        held = [cluster.gives(Value(cluster.leader), v) for v in range(count)]
        adds_itself = _is_weight(problem, cluster.leader)
        is_again = is_read_backward(cluster.leader, problem.factors.rules)
        update = np.array([pricer.update_time_s(spec, h, repeats, adds_itself=adds_itself, is_read_again=is_again) for h in held])
        is_stored = cluster.leader.meta["placeholder"].source is Source.PARAMETER
        copied = [pricer.copy_prices(spec, h, repeats) if is_stored else EdgePrice() for h in held]
        return ClusterTime(forward, backward, update, np.array(copied))
    for node in cluster.members:
        rule = problem.factors.rules.get(node)
        sizes = local_sizes(problem, cluster, node)
        op = pricer.op_time(node, rule, sizes, count)
        forward = forward + op.forward_s
        backward = backward + op.backward_s
        for letter in rule.reduced if rule else ():
            forward = forward + _inside_time(problem, pricer, cluster, node, letter)
    return ClusterTime(repeats * forward, repeats * backward, update, np.zeros((count, len(EdgePrice._fields))))


def _inside_time(problem: Problem, pricer: Pricer, cluster: Cluster, node: fx.Node, letter: str) -> np.ndarray:
    times = np.zeros(len(cluster.variants))
    for v, axis, num_bytes in _inside_bytes(problem, cluster, node, letter):
        times[v] += pricer.inside_time_s(num_bytes, axis)
    return times


def _inside_bytes(problem: Problem, cluster: Cluster, node: fx.Node, letter: str) -> Iterator[tuple[int, int, float]]:
    """Bytes of the float32 rows that are reduced inside the op, by variant and axis, where ``letter`` is sharded."""
    sizes = local_sizes(problem, cluster, node)
    others = math.prod((size for name, size in sizes.items() if name != letter), start=np.ones(len(cluster.variants)))
    for v, variant in enumerate(cluster.variants):
        for axis, pick in enumerate(variant):
            if cluster.choices[axis][pick].members[node].name.partition(".")[0] == letter:
                yield v, axis, 4.0 * float(others[v])


def inside_reductions(problem: Problem, variants: Sequence[int]) -> Iterator[tuple[fx.Node, int, int, int]]:
    """All-reduces inside of ops at one variant per cluster: the op, the axis, bytes of one, and how many there are in a step."""
    for cluster, chosen in zip(problem.clusters, variants, strict=True):
        for node in cluster.members:
            rule = problem.factors.rules.get(node)
            for letter in rule.reduced if rule else ():
                for v, axis, num_bytes in _inside_bytes(problem, cluster, node, letter):
                    if v == chosen:
                        yield node, axis, int(num_bytes), INSIDE_REDUCTIONS * cluster.multiplicity * problem.microbatches


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of a network with their ``prices``, and what is ``paid`` for them in a step: a row for each, like an `EdgePrice`."""

    network: Network
    prices: np.ndarray
    paid: np.ndarray


@dataclass(slots=True)
class EdgeTable:
    """Ways and prices of one edge on one axis.

    Args:
        sources, targets: variants of both clusters by the side of a way that they are on.
        ways: between them; equal edges have the same.
    """

    sources: Sources
    targets: Targets
    ways: Ways

    def price(self, way: Way) -> EdgePrice:
        """Of going a way once."""
        return EdgePrice(*self.ways.prices[self.ways.network.ways[way]].tolist())

    def paid(self, way: Way) -> np.ndarray | None:
        """Seconds of a way in a step, as in an `EdgePrice`; None if there is no such way."""
        number = self.ways.network.ways.get(way)
        return self.ways.paid[number] if number is not None else None

    @property
    def is_free(self) -> bool:
        """Whether every way can be gone, for nothing: then the edge is nobody's concern on this axis."""
        return len(self.ways.paid) == len(self.sources) * len(self.targets) and not self.ways.paid.any()


def adds_bias(edge: Edge) -> bool:
    """Whether an edge carries a product to the op that adds its bias."""
    return edge.operand is not None and biased_product(edge.operand[0]) is edge.value.node


def _split(held: Sequence[Held], axis: int, sizes: Sequence[int]) -> int:
    """Parts in which other ZeRO axes hold a parameter while ``axis`` moves it.

    The outermost ZeRO axis is gathered first (`storage`), and what is replicated is reduced before any is gathered.
    """
    if isinstance(held[axis], Placement) and held[axis] != REPLICATED:
        return 1
    first = axis + 1 if isinstance(held[axis], Stored) else 0
    return math.prod(size for other, size in enumerate(sizes) if other >= first and isinstance(held[other], Stored))


class Prices:
    """Everything that the program and its checks need to know about a problem, worked out once."""

    def __init__(self, problem: Problem, pricer: Pricer, staging: Staging | None = None) -> None:
        self.problem = problem
        self.pricer = pricer
        self._bytes, self._staging = pricer, staging
        self._alone: dict[tuple[int, ...], Footprint] = {}
        self._on: dict[MachineProfile, Prices] = {}
        self._read_again: dict[fx.Node, bool] = {}
        self._known_parts: dict[tuple[Value, tuple[Held, ...]], list[int]] = {}
        self._known_behind: dict[tuple[Held, ...], list[Behind]] = {}
        self._work_out()

    def _work_out(self) -> None:
        self.times = cluster_times(self.problem, self.pricer)
        self._known: dict[object, dict[Moved, EdgePrice]] = defaultdict(dict)
        self._ways: dict[object, Ways] = {}
        self.tables: dict[tuple[Edge, int], EdgeTable] = dict(self._tables())

    def on(self, machine: MachineProfile) -> Prices:
        """The same on another machine, with memory as here."""
        if machine not in self._on:
            prices = copy(self)
            prices.pricer = replace(self.pricer, machine=machine)
            prices._work_out()
            self._on[machine] = prices
        prices = copy(self._on[machine])
        prices.footprint = self.footprint  # that of `_on` may be of another staging
        return prices

    def staged(self, staging: Staging) -> Prices:
        """These prices, with memory counted by stages."""
        prices = copy(self)
        prices._staging = staging
        if "footprint" in vars(self):
            prices.footprint = self.footprint.over(self._liveness(staging))
        return prices

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes of whatever may be held, of all variants."""
        return Footprint(self.problem, self._bytes, self._liveness(self._staging))

    def _tables(self) -> Iterator[tuple[tuple[Edge, int], EdgeTable]]:
        sizes = self.problem.mesh.sizes
        sources: dict[tuple[Value, bool], list[Sources]] = {}
        for edge in self.problem.edges:
            key = edge.value, edge.target is None
            if key not in sources:
                layouts = self.problem.clusters[edge.source].all_gives(edge.value)
                sources[key] = sides_of(layouts, partial(self._behind, edge))
            if edge.target is None or edge.operand is None:
                targets = [{(self._to_user(held, axis), 1): [0] for held, _ in given} for axis, given in enumerate(sources[key])]
            else:
                targets = sides_of(self.problem.clusters[edge.target].all_wants(edge.operand), self.problem.other_shards)
            for axis in range(len(sizes)):
                yield (edge, axis), self._table(edge, axis, sources[key][axis], targets[axis])

    def _to_user(self, held: Held, axis: int) -> Placement:
        """How an axis gives the user what it holds so: whole, but for the axis in time (`Problem.output_layouts`)."""
        return held if axis == self.problem.mesh.time_axis and isinstance(held, Placement) else REPLICATED

    def _behind(self, edge: Edge, held: tuple[Held, ...]) -> list[Behind]:
        """For each axis what a `Way` has of the side where a value lies so.

        A parameter that one axis stores at ZeRO-2 or -3 is gathered for every micro-batch; axes that shard it have nothing to move.
        """
        if edge.target is None and not any(isinstance(h, Stored) for h in held):
            return [(part, False, 0) for part in self._output_parts(edge.value, held)]
        if held not in self._known_behind:
            self._known_behind[held] = self._find_behind(held)
        return self._known_behind[held]

    def _find_behind(self, held: tuple[Held, ...]) -> list[Behind]:
        levels = {h.level for h in held if isinstance(h, Stored)}
        if not levels:
            return [(1, False, 0)] * len(held)
        sizes, is_gathered = self.problem.mesh.sizes, self.problem.microbatches > 1 and max(levels) > 1
        own = enumerate(zip(held, self.problem.other_shards(held), strict=True))
        return [(_split(held, i, sizes), is_gathered and not (isinstance(h, Placement) and h.is_sharded), shards) for i, (h, shards) in own]

    def _output_parts(self, value: Value, held: tuple[Held, ...]) -> list[int]:
        """In how many parts an output lies when each axis has moved it to all of its ranks (`passes.shard`)."""
        key = value, held
        if key not in self._known_parts:
            lies, whole = self.problem.output_layouts(value, held)
            steps = {step.axis: step for step in plan_steps(lies, whole, needs_grad=False)}
            numel = max(1, math.prod(lies.shape))
            parts = [numel // max(1, math.prod(steps[axis].local_shape)) if axis in steps else 1 for axis in range(len(held))]
            self._known_parts[key] = parts
        return self._known_parts[key]

    def _table(self, edge: Edge, axis: int, sources: Sources, targets: Targets) -> EdgeTable:
        spec, is_parameter = value_spec(edge.value), edge.value.node.op == "placeholder"
        of = is_parameter, is_parameter and self.is_read_again(edge.value.node), is_parameter and spec.is_vector
        shape = spec.shape if self.pricer.compression is not None else None  # else only the bytes matter
        about = axis, shape, spec.num_bytes, spec.reduced_width / spec.dtype.itemsize, spec.requires_grad, of, adds_bias(edge)  # few
        ends, keeps_rows = (tuple(sources), tuple(targets)), is_sorted(edge.value)
        key = about, keeps_rows, spec.is_reduced_as_stored, *ends
        if key not in self._ways:
            needs_grad = spec.requires_grad and self.pricer.training
            kept = {"keeps_rows": keeps_rows, "in_time": axis == self.problem.mesh.time_axis}
            network = network_of(*ends, is_parameter=is_parameter, needs_grad=needs_grad, **kept)
            known = self._known[about]
            for moved in network.moved:
                if moved not in known:
                    price = self._price(spec, axis, moved, is_parameter=is_parameter, is_read_again=of[1])
                    known[moved] = price._replace(blocking_s=price.blocking_s + self.bias_s(edge, axis, moved))
            prices = np.array([known[moved] for moved in network.moved]).reshape(-1, len(EdgePrice._fields))
            paid = self._in_a_step(prices, network, spec if is_parameter else None)
            self._ways[key] = Ways(network, prices, beside(paid, self.pricer.overlap(axis)))
        return EdgeTable(sources, targets, self._ways[key])

    def _price(self, spec: TensorSpec, axis: int, moved: Moved, *, is_parameter: bool, is_read_again: bool) -> EdgePrice:
        """What going a way takes once."""
        held, wanted, parts = moved
        of_grad, num_bytes = spec.reduced_width / spec.dtype.itemsize, spec.num_bytes / parts
        if is_parameter:
            about = {"needs_grad": spec.requires_grad, "is_read_again": is_read_again, "is_vector": spec.is_vector}
            shape = part_shape(spec.shape, parts)
            price = self.pricer.parameter_edge(held, wanted, num_bytes, axis, of_grad=of_grad, shape=shape, **about)
        else:
            price = self.pricer.edge(held, wanted, num_bytes, axis, needs_grad=spec.requires_grad, of_grad=of_grad)
        assert price is not None, "there is a price for every way"
        return price

    def bias_s(self, edge: Edge, axis: int, moved: Moved) -> float:
        """Seconds, once, in which the op that an edge goes to adds a bias to a product that this axis moves; 0 for any other op."""
        held, wanted, parts = moved
        if edge.operand is None or held == wanted or not adds_bias(edge):
            return 0.0
        num_bytes = value_spec(edge.value).num_bytes / parts / (self.problem.mesh.sizes[axis] if wanted.is_sharded else 1)
        return self.pricer.bias_s(edge.operand[0], num_bytes)

    def _in_a_step(self, prices: np.ndarray, network: Network, parameter: TensorSpec | None) -> np.ndarray:
        """What ways take in a step, of what they take once: it is paid for every micro-batch, but once for parameters that are whole or
        ZeRO-1 on all axes, and for replicas of shards: gathered before the first forward (`passes.prepare`), reduced beside the last
        backward (`passes.last_backward`)."""
        if parameter is None or self.problem.microbatches == 1:
            return self.problem.microbatches * prices
        blocking_s, forward_s, backward_s, _ = prices.T
        nothing = np.zeros(len(prices))
        at_ends = np.column_stack((forward_s, nothing, nothing, blocking_s + backward_s))
        is_each = np.array([way.is_each(parameter) for way in network.ways])
        return np.where(is_each[:, None], self.problem.microbatches * prices, at_ends)

    def is_read_again(self, parameter: fx.Node) -> bool:
        """Whether any backward wants the parameter, so that a copy of it is gathered again (`passes.differentiate`)."""
        if parameter not in self._read_again:
            self._read_again[parameter] = is_read_backward(parameter, self.problem.factors.rules)
        return self._read_again[parameter]

    def _liveness(self, staging: Staging | None) -> Liveness:
        return find_liveness(self.problem, training=self.pricer.training, staging=staging)

    def objective(self, variants: Sequence[int]) -> Objective:
        """The objective of the program at one variant per cluster; infinite where an edge has no way."""
        problem = self.problem
        sums, copied, paid, biases_s = np.zeros(3), np.zeros(4), np.zeros(4), 0.0
        for cluster, times, v in zip(problem.clusters, self.times, variants, strict=True):
            sums += cluster.multiplicity * np.array([times.forward_s[v], times.backward_s[v], times.update_s[v]])
            copied += cluster.multiplicity * times.copied_s[v]
        for fan in problem.fans:
            for axis in range(len(problem.mesh.sizes)):
                ways = {self.way(edge, axis, variants): edge for edge in fan.edges}
                for way, edge in ways.items():
                    price = self.tables[edge, axis].paid(way)
                    paid += fan.multiplicity * (price if price is not None else np.array((np.inf, 0.0, 0.0, 0.0)))
                    biases_s += fan.multiplicity * problem.microbatches * self.bias_s(edge, axis, way.moved)
        forward, backward, update = sums
        moved = list(self.footprint.moved_by_op(variants).values()) if self.pricer.offload.activations else []
        copy_s = problem.microbatches * float(self.pricer.machine.device.copy_time_s(moved).sum()) if moved else 0.0
        copied += (0.0, copy_s, copy_s, 0.0) if self.pricer.machine.device.has_host else (2 * copy_s, 0.0, 0.0, 0.0)
        hidden_forward, hidden_backward, hidden_last = (paid + copied)[1:]
        left = max(0.0, backward - hidden_backward) / problem.microbatches  # of the last backward, beside what every one of them hides
        exposed = max(0.0, hidden_forward - forward) + max(0.0, hidden_backward - backward) + max(0.0, hidden_last - left)
        forward, blocking = forward + biases_s, paid[0] - biases_s  # which stand with the reshards before them
        return Objective(float(forward), float(backward), float(update), float(blocking), float(exposed), float(copied[0]))

    def repeats(self, edge: Edge, way: Way) -> int:
        """How often a way is gone in a step."""
        is_each = edge.value.node.op != "placeholder" or way.is_each(value_spec(edge.value))
        return self.problem.microbatches if is_each else 1

    def way(self, edge: Edge, axis: int, variants: Sequence[int]) -> Way:
        """The way that an edge takes on an axis under an assignment."""
        held = self.problem.clusters[edge.source].gives(edge.value, variants[edge.source])
        split, is_gathered, own = self._behind(edge, held)[axis]
        if edge.target is None or edge.operand is None:
            return Way(held[axis], split, self._to_user(held[axis], axis), 1, is_gathered, own)
        wants = self.problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
        return Way(held[axis], split, wants[axis], self.problem.other_shards(wants)[axis], is_gathered, own)

    def uses(self, variants: Sequence[int], staging: Staging) -> list[MemoryUse]:
        """Peak memory of the stages of a staging at one variant per cluster, for which only the bytes of these are counted."""
        key, liveness = tuple(variants), self._liveness(staging)
        if key not in self._alone:
            self._alone[key] = Footprint(self.problem.with_variants(key), self._bytes, liveness)
        return self._alone[key].over(liveness).uses([0] * len(key))

    def memory(self, variants: Sequence[int]) -> MemoryUse:
        """Peak memory at one variant per cluster."""
        return self.footprint.use(variants)
