"""Bytes per rank of what is alive (`solve.liveness`), and the peak of an assignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.capture.trace import Source
from autopar.cost.compute import node_cost
from autopar.cost.host import leaves_early, levels_of, used_bytes
from autopar.cost.pricing import Pricer, local_bytes
from autopar.graph import Value, specs_of, value_spec
from autopar.layout import PARTIAL, REPLICATED, Placement
from autopar.passes.offload import LARGE_NUM_BYTES
from autopar.passes.reshard import joining_elements
from autopar.resident import Resident, StageBytes
from autopar.rules.registry import TensorSpec
from autopar.solve.liveness import Interval, Keeper, Kept, Liveness, Moment
from autopar.solve.lives import is_input
from autopar.solve.phases import OfParameters, OverTime, Walk, peaks_of
from autopar.solve.problem import Edge, Problem, local_num_bytes, local_sizes
from autopar.solve.split_footprint import in_two_parts, most_beside
from autopar.storage import Held, Stored
from autopar.transitions import transition


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes per rank that a stage takes at its peak, by kind.

    Args:
        parameters, gradients, optimizer, gathered, activations: what there is of them.
        buffers: the batch, whole gradients that are being reduced, outputs of the model, and what the optimizer takes for itself.
        moment: when the peak is.
        held: what the stage holds when.
        host: bytes in the memory of the host, at most; 0 where it is that of the device.
        share: of the largest limit, that the stage has.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    buffers: float
    moment: Moment
    held: StageBytes
    host: float = 0.0
    share: float = 1.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations + self.buffers

    @property
    def of_limit(self) -> float:
        """What the largest limit has to be for the stage to fit its own."""
        return self.total / self.share


BytesOver = Callable[[Value, int, Held, Placement, int], float]
"""Bytes beside a value while it goes over an axis; arguments as of `Footprint.joined_over`."""


class Footprint:
    """Bytes per rank of everything that may be held, for each variant of its cluster, worked out once.

    ``parameters[index]`` has one row of `ParameterBytes` per variant of a placeholder's cluster; the others are by shared name: ``copies``
    of parameters that every micro-batch has of its own, ``partials`` parts of a gradient, ``coming`` what the reductions of ZeRO-1 make of
    one, ``in_rows`` and ``reduced_in_rows`` what a vector that is gathered for each use, and its gradient, take in a row with others,
    ``updates`` what the optimizer takes for itself while it updates one, ``together`` what it has of one while it updates all,
    ``hosted`` what the host has of one.
    """

    def __init__(self, problem: Problem, pricer: Pricer, liveness: Liveness) -> None:
        self.problem, self.liveness, self.training = problem, liveness, pricer.training
        self.moves, self.has_host = pricer.offload.activations, pricer.machine.device.has_host
        self._whole: dict[int, np.ndarray] = {}
        self._is_late: dict[int, np.ndarray] = {}
        self.parameters: dict[int, np.ndarray] = {}
        self.copies: dict[fx.Node, np.ndarray] = {}
        self.partials: dict[fx.Node, np.ndarray] = {}
        self.coming: dict[fx.Node, np.ndarray] = {}
        self.updates: dict[fx.Node, np.ndarray] = {}
        self.together: dict[fx.Node, np.ndarray] = {}
        self.hosted: dict[fx.Node, np.ndarray] = {}
        self.values: dict[Value, np.ndarray] = {}
        self.gathers: dict[fx.Node, np.ndarray] = {}
        self.in_rows: dict[fx.Node, np.ndarray] = {}
        self.reduced_in_rows: dict[fx.Node, np.ndarray] = {}
        self.reductions: dict[fx.Node, np.ndarray] = {}
        self.hidden: dict[fx.Node, np.ndarray] = {}
        self._keepers: dict[tuple[Value, Keeper], tuple[int, list[tuple[Placement, ...]]]] = {}
        self._joins: dict[Value, np.ndarray] = {}
        self._in: dict[tuple[Value, tuple[Placement, ...]], float] = {}
        for index, cluster in enumerate(problem.clusters):
            node = cluster.leader
            for value in cluster.choices[0][0].gives:
                self.values[value] = local_num_bytes(problem, cluster, value)
            if node.op == "placeholder":
                spec, held = specs_of(node)[0], cluster.all_gives(Value(node))
                is_stored = node.meta["placeholder"].source is Source.PARAMETER  # which alone may lie on the host
                bytes_of = pricer.parameter_bytes if is_stored else pricer.kept_bytes
                self._whole[index] = np.array([bytes_of(spec, h) for h in held])
                levels = [{x.level for x in h if isinstance(x, Stored)} for h in held]
                is_hosted = is_stored and pricer.offload.parameters
                self.gathers[node] = self._about_use(spec, held, self.values[Value(node)], is_hosted=is_hosted)
                self.hosted[node] = np.array([pricer.host_bytes(spec, h) * is_stored for h in held])
                self._is_late[index] = np.array([2 in level and 3 not in level for level in levels])
                self.updates[node], self.together[node] = np.array([pricer.update_bytes(spec, h) for h in held]).T
                has_host = pricer.offload.optimizer and pricer.machine.device.has_host
                leaves = [has_host and leaves_early(h, problem.mesh) for h in held]
                is_trained = spec.requires_grad and pricer.training
                is_reduced = [is_trained and (bool(level & {2, 3}) or leaving) for level, leaving in zip(levels, leaves, strict=True)]
                self.partials[node] = self.values[Value(node)] * (is_trained and ~np.array(is_reduced))
                reduced = self.values[Value(node)] * (spec.reduced_width / spec.dtype.itemsize)
                self.reductions[node] = reduced * is_reduced
                self.in_rows[node] = self.values[Value(node)] * np.array([3 in level for level in levels])
                self.reduced_in_rows[node] = reduced * np.array([is_trained and bool(level & {2, 3}) for level in levels])
                continue
            for member in cluster.members:
                rule, count = problem.factors.rules.get(member), len(cluster.variants)
                has_hidden = node_cost(member, rule).hidden_bytes != 0
                sizes = local_sizes(problem, cluster, member) if has_hidden else {}
                self.hidden[member] = pricer.hidden_bytes(member, rule, sizes, count) if has_hidden else np.zeros(count)
        self._tell_copies()

    def over(self, liveness: Liveness) -> Footprint:
        """The same bytes, alive at other times."""
        footprint = copy(self)
        footprint.liveness = liveness
        footprint._tell_copies()
        return footprint

    def _tell_copies(self) -> None:
        """Tell what is gathered once from the copies that every micro-batch has of its own."""
        has_own = self.training and not self.liveness.is_plain
        self.copies, self.coming, self.parameters = {}, {}, {}
        for index, whole in self._whole.items():
            copies = whole[:, 3] * (has_own & self._is_late[index])
            leader, gradient, reduced = self.problem.clusters[index].leader, whole[:, 1], whole[:, 4]
            self.copies[leader], self.coming[leader] = copies, reduced * (has_own & (gradient > reduced))
            self.parameters[index] = np.column_stack((whole[:, :3], whole[:, 3] - copies, reduced))

    def _about_use(self, spec: TensorSpec, held: Sequence[tuple[Held, ...]], values: np.ndarray, *, is_hosted: bool) -> np.ndarray:
        """Bytes of the copies of a parameter that there are about its use alone, for each variant; ``is_hosted``: it lies on the host."""
        rows = [(levels_of(h), h, float(value)) for h, value in zip(held, values, strict=True)]
        if not is_hosted:
            return np.array([value if 3 in levels else 0.0 for levels, _, value in rows])
        return np.array([0.0 if levels & {1, 2} else used_bytes(spec, value, h, self.problem.mesh) for levels, h, value in rows])

    def keeper(self, value: Value, by: Keeper) -> tuple[int, list[tuple[Placement, ...]]]:
        """The cluster that says how a value is kept, and in which layout for each of its variants."""
        if (value, by) not in self._keepers:
            index = self.problem.cluster_of[value.node] if by is None or by.target is None else by.target
            cluster = self.problem.clusters[index]
            layouts = cluster.all_gives(value) if by is None or by.operand is None else cluster.all_wants(by.operand)
            self._keepers[value, by] = index, [tuple(_without_gradient(p) for p in layout) for layout in layouts]
        return self._keepers[value, by]

    def joins(self, value: Value) -> np.ndarray:
        """What an output takes beside itself while it is made whole, for each variant."""
        if value not in self._joins:
            given = self.problem.clusters[self.problem.cluster_of[value.node]].all_gives(value)
            elements = {held: joining_elements(*self.problem.output_layouts(value, held)) for held in dict.fromkeys(given)}
            self._joins[value] = np.array([float(elements[held] * value_spec(value).dtype.itemsize) for held in given])
        return self._joins[value]

    def kept_bytes(self, value: Value, layout: Sequence[Placement]) -> float:
        """Of a value that is kept for the backward, on the device."""
        num_bytes = self._made_bytes(value, layout)
        return 0.0 if self.has_host and self._leaves(num_bytes) else num_bytes

    def moved_bytes(self, value: Value, layout: Sequence[Placement]) -> float:
        """Of a value that is kept for the backward, what goes to the host and comes back."""
        num_bytes = self._made_bytes(value, layout)
        return num_bytes if self._leaves(num_bytes) else 0.0

    def _made_bytes(self, value: Value, layout: Sequence[Placement]) -> float:
        """Of a value, what was made for it: of an input of the model, which is there whole, a part."""
        is_there = value.node.op == "placeholder" and not any(placement.is_sharded for placement in layout)
        return 0.0 if is_there else local_bytes(value_spec(value), layout, self.problem.mesh)

    def _leaves(self, num_bytes: float) -> bool:
        return self.moves and num_bytes >= LARGE_NUM_BYTES

    def use(self, variants: Sequence[int]) -> MemoryUse:
        """Peak memory of a full assignment (one variant per cluster), at the stage that needs most."""
        return max(self.uses(variants), key=lambda use: use.of_limit)

    def uses(self, variants: Sequence[int]) -> list[MemoryUse]:
        """Peak memory of every stage."""
        over_time = self._over_time(variants)
        stage_at = np.array(self.liveness.stage_at or [0])
        return [self._use(stage, variants, over_time, stage_at == stage) for stage in range(len(self.liveness.live))]

    def residents(self, variants: Sequence[int]) -> dict[fx.Node, dict[str, Resident]]:
        """Of each op what its stage holds for a micro-batch while it computes it: in the forward, and in the first backward, or both parts
        of it."""
        live, over_time = self.liveness, self._over_time(variants)
        stage_at = np.array(live.stage_at or [0])
        calls, found = self._calls(), dict[fx.Node, dict[str, Resident]]()
        for stage in range(len(live.live)):
            is_own = stage_at == stage
            own = self._of_parameters(stage, variants, len(stage_at))
            copies = np.cumsum(over_time.copies * is_own)
            gathered = over_time.gathers + copies + (own.copied if live.is_plain else 0.0)
            kept = np.cumsum(over_time.kept * is_own) - copies - over_time.gathers
            rows: dict[str, tuple[np.ndarray, ...]] = {"forward": (over_time.forward + kept, gathered)}
            passing = over_time.crossing - over_time.joins - over_time.reductions + own.partial
            rows["backward"] = passing + kept, gathered, own.made, over_time.reductions
            if (two := in_two_parts(self, stage, variants, over_time, is_own)) is not None:
                rows["backward"] = two.inputs - two.gathers[0], two.gathers[0]
                rows["weights"] = two.weights - two.gathers[1] - over_time.reductions, two.gathers[1], own.made, over_time.reductions
            for t in np.flatnonzero(is_own)[: len(calls)]:
                found[calls[t]] = {phase: Resident(*(int(row[t]) for row in columns)) for phase, columns in rows.items()}
        return found

    def by_op(self, variants: Sequence[int]) -> dict[fx.Node, tuple[float, float]]:
        """Bytes of each op: of parameters and their state, at their first use, and of what it keeps of a micro-batch."""
        kept = self._over_time(variants).kept
        state = np.zeros(len(kept))
        for use in (use for stage in self.liveness.parameters for use in stage):
            index = self.problem.cluster_of[use.parameter]
            state[use.first] += use.times * self.parameters[index][variants[index]][:4].sum()
        return {node: (float(a), float(b)) for node, a, b in zip(self._calls(), state, kept, strict=True)}

    def _over_time(self, variants: Sequence[int]) -> OverTime:
        cluster_of, live = self.problem.cluster_of, self.liveness
        length = max(1, live.length)
        change, ahead, twice = np.zeros((3, length + 2))
        kept, gathers, reductions, copies, moved, joins, resharding, joining = np.zeros((8, length))
        for span in live.spans:
            num_bytes = self.values[span.value][variants[cluster_of[span.value.node]]]
            is_view = span.viewed is not None and not any(self.moves_back(edge, variants) for edge in span.viewed)
            for changes, is_there in ((ahead, span.in_forward), (change, not is_view)):
                changes[span.start] += is_there * num_bytes
                changes[span.end + 1] -= is_there * num_bytes
        last_of = {stage: t for t, stage in enumerate(live.stage_at)}
        for entry in live.kept:
            layouts, as_made = set(), self.layout_of(entry.value, None, variants)
            for position, by in entry.keepers:
                layout = self.layout_of(entry.value, by, variants)
                key = live.stage_at[position], layout
                if key in layouts:
                    continue
                layouts.add(key)
                num_bytes = self.kept_bytes(entry.value, layout)
                kept[position] += entry.times * num_bytes
                moved[position] += entry.times * self.moved_bytes(entry.value, layout)
                if layout == as_made and entry.value.node.op != "placeholder":  # one of it, where the backward has it and its gradient
                    twice[position] += num_bytes
                    twice[max(position, min(entry.end, last_of[live.stage_at[position]]) + 1)] -= num_bytes
        for position, node, times in live.hidden:
            kept[position] += times * self.hidden[node][variants[cluster_of[node]]]
        for use in (use for stage in live.parameters for use in stage):
            copies[use.first] += use.times * self.copies[use.parameter][variants[cluster_of[use.parameter]]]
        for amounts, bytes_of, positions in ((gathers, self.gathers, live.gathers), (reductions, self.reductions, live.reductions)):
            for position, node in positions:
                amounts[position] += bytes_of[node][variants[cluster_of[node]]]
        for amounts, bytes_of, rows in (
            (gathers, self.in_rows, live.gathered_rows),
            (reductions, self.reduced_in_rows, live.reduced_rows),
        ):
            in_rows = np.zeros(length + 1)
            for (first, last), node in rows:
                num_bytes = bytes_of[node][variants[cluster_of[node]]]
                in_rows[first] += num_bytes
                in_rows[last + 1] -= num_bytes
            amounts += np.cumsum(in_rows)[:length]
        for position, value in live.joins:
            joins[position] += self.joins(value)[variants[cluster_of[value.node]]]
        for num_bytes, (first, last) in (*self._fetched(variants), *self._again(variants)):
            change[first] += num_bytes
            change[last + 1] -= num_bytes
        for num_bytes, t in self._resharding(variants):
            resharding[t] += num_bytes
        for t, edge in live.joined:
            joining[t] += self.joined_bytes(edge, variants)
        for t, edge in live.scattered:
            joining[t] += self.scattered_bytes(edge, variants)
        crossing = np.cumsum(change)[:length]
        forward = np.cumsum(ahead - twice)[:length] + gathers + joins
        crossing = crossing + gathers + reductions + joins + resharding + joining
        return OverTime(crossing, forward, gathers, reductions, joins, resharding, joining, kept + copies, copies, moved)

    def _fetched(self, variants: Sequence[int]) -> Iterator[tuple[float, Interval]]:
        """What comes back from the host."""
        for entry, first, last, keepers in self.liveness.fetched() if self.moves else ():
            layouts = {self.layout_of(entry.value, by, variants) for by in keepers}
            yield entry.times * sum(self.moved_bytes(entry.value, layout) for layout in layouts), (first, last)

    def _again(self, variants: Sequence[int]) -> Iterator[tuple[float, Interval]]:
        """What is computed again, in each of its layouts."""
        for entry in self.liveness.again:
            places: dict[tuple[Placement, ...], list[Interval]] = {}
            for interval, by in entry.places:
                places.setdefault(self.layout_of(entry.value, by, variants), []).append(interval)
            if entry.is_beside:
                places.pop(self.layout_of(entry.value, None, variants), None)
            for layout, intervals in places.items():
                yield from ((self.bytes_in(entry.value, layout), interval) for interval in _united(intervals))

    def _resharding(self, variants: Sequence[int]) -> Iterator[tuple[float, int]]:
        """What gradients take more than their values at the ops where they are moved."""
        for t, value, edges in self.liveness.resharded:
            own, *wanted = (self.bytes_in(value, self.layout_of(value, by, variants)) for by in (None, *edges))
            yield max(own, *wanted) - own, t

    def bytes_in(self, value: Value, layout: tuple[Placement, ...]) -> float:
        """Bytes of a value in a layout; worked out once."""
        if (value, layout) not in self._in:
            self._in[value, layout] = local_bytes(value_spec(value), layout, self.problem.mesh)
        return self._in[value, layout]

    def joined_over(self, value: Value, axis: int, held: Held, wanted: Placement, shards: int) -> float:
        """Bytes of the parts that an all-gather brings, where they do not lie one after the other in the result; ``shards`` are those on
        the other axes."""
        spec, size = value_spec(value), self.problem.mesh.sizes[axis]
        if size == 1 or not isinstance(held, Placement) or not held.is_sharded or wanted.is_sharded:
            return 0.0
        before = math.prod(spec.shape[: held.dim]) * math.prod(self.problem.factors.values[value][held.dim][: held.atom])
        return spec.num_bytes / shards if before > shards else 0.0

    def scattered_over(self, value: Value, axis: int, held: Held, wanted: Placement, shards: int) -> float:
        """Bytes of the terms of a sum as a reduce-scatter takes them, where its parts do not lie one after the other in the value.
        Arguments are those of `joined_over`."""
        spec, size = value_spec(value), self.problem.mesh.sizes[axis]
        if size == 1 or held != PARTIAL or not wanted.is_sharded:
            return 0.0
        before = math.prod(spec.shape[: wanted.dim]) * math.prod(self.problem.factors.values[value][wanted.dim][: wanted.atom])
        return spec.num_bytes / shards if before > shards else 0.0

    def joined_bytes(self, edge: Edge, variants: Sequence[int]) -> float:
        """`joined_over` all axes."""
        return self._over_axes(self.joined_over, edge, variants)

    def scattered_bytes(self, edge: Edge, variants: Sequence[int]) -> float:
        """`scattered_over` all axes."""
        return self._over_axes(self.scattered_over, edge, variants)

    def _over_axes(self, bytes_over: BytesOver, edge: Edge, variants: Sequence[int]) -> float:
        assert edge.target is not None and edge.operand is not None
        held = self.problem.clusters[edge.source].gives(edge.value, variants[edge.source])
        wanted = self.problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
        shards = self.problem.other_shards(wanted)
        return sum(bytes_over(edge.value, axis, *of_axis) for axis, of_axis in enumerate(zip(held, wanted, shards, strict=True)))

    def moves_back(self, edge: Edge, variants: Sequence[int]) -> bool:
        """Whether a gradient is moved over an edge."""
        assert edge.target is not None and edge.operand is not None
        given = self.problem.clusters[edge.source].gives(edge.value, variants[edge.source])
        wanted = self.problem.clusters[edge.target].wants(edge.operand, variants[edge.target])
        time, ways = self.problem.mesh.time_axis, zip(given, wanted, strict=True)
        steps = [transition(h, w, needs_grad=True, in_time=axis == time) for axis, (h, w) in enumerate(ways) if isinstance(h, Placement)]
        return any(step is not None and step.backward for step in steps)

    def layout_of(self, value: Value, by: Keeper, variants: Sequence[int]) -> tuple[Placement, ...]:
        """How a value lies as it is wanted over an edge, or as it is made."""
        index, choices = self.keeper(value, by)
        return choices[variants[index]]

    def moved_by_op(self, variants: Sequence[int]) -> dict[fx.Node, float]:
        """Bytes of each op that go to the host of one micro-batch, and come back."""
        return dict(zip(self._calls(), map(float, self._over_time(variants).moved), strict=True)) if self.moves else {}

    def _calls(self) -> list[fx.Node]:
        return [node for node in self.problem.module.graph.nodes if node.op == "call_function" and node in self.problem.shared]

    def _use(self, stage: int, variants: Sequence[int], over_time: OverTime, is_own: np.ndarray) -> MemoryUse:
        cluster_of, live = self.problem.cluster_of, self.liveness
        of_parameters = self._of_parameters(stage, variants, len(is_own))
        parameters, gradients, optimizer, gathered, reduced = map(float, of_parameters.kinds)
        own, outputs = float((over_time.kept * is_own).sum()), live.given_bytes(stage)
        walk = Walk.of(over_time, of_parameters, is_own, has_later=live.later[stage] > 0)
        peaks = peaks_of(live, stage, over_time, of_parameters, walk, is_own)
        moment = max(peaks, key=lambda moment: sum(peaks[moment]))
        two = in_two_parts(self, stage, variants, over_time, is_own)
        arriving = float(of_parameters.coming.max(initial=0.0))
        held = StageBytes(
            static=parameters + optimizer + gathered + outputs,
            kept=own,
            left=two.left if two is not None else 0.0,
            first=float(walk.first[is_own].max(initial=0.0)) - gathered,
            later=float(walk.later[is_own].max(initial=0.0)),
            last=float(walk.last[is_own].max(initial=0.0)) - (0.0 if live.later[stage] else gathered),
            forward=most_beside(own, (over_time.forward + np.cumsum(over_time.kept * is_own))[is_own]),
            gradients=gradients,
            coming=arriving,
            gone=gradients + arriving - reduced,
            copies=gathered,
            kept_copies=float((over_time.copies * is_own).sum()),
            end=live.joined_bytes(stage),
            received=live.received_bytes(stage),
            update=float(of_parameters.updated[is_own].max(initial=0.0)),
            together=of_parameters.together,
            sent=sum(self._sent_bytes(entry, stage, variants) for entry in live.kept),
            **(two.beside(own, of_parameters.made, is_own) if two is not None else {}),
        )
        most, share = peaks[moment], live.shares[stage]
        hosted = sum(use.times * float(self.hosted[use.parameter][variants[cluster_of[use.parameter]]]) for use in live.parameters[stage])
        hosted += live.live[stage] * float((over_time.moved * is_own).sum()) if self.has_host else 0.0
        batch = self._batch_bytes(stage, variants)
        most = most._replace(buffers=most.buffers + batch)
        return MemoryUse(parameters - batch, optimizer=optimizer, **most._asdict(), moment=moment, held=held, host=hosted, share=share)

    def _batch_bytes(self, stage: int, variants: Sequence[int]) -> float:
        """Of what `_of_parameters` counts as parameters that of inputs of the model."""
        inputs = [use for use in self.liveness.parameters[stage] if is_input(use.parameter)]
        indices = [self.problem.cluster_of[use.parameter] for use in inputs]
        return sum(use.times * float(self.parameters[i][variants[i]][0]) for use, i in zip(inputs, indices, strict=True))

    def _sent_bytes(self, entry: Kept, stage: int, variants: Sequence[int]) -> float:
        """Of a value that is kept, if its stage also sends it on."""
        if self.liveness.stage_at[entry.end] <= stage:
            return 0.0
        layouts = {self.layout_of(entry.value, by, variants) for at, by in entry.keepers if self.liveness.stage_at[at] == stage}
        return float(entry.times * max((self.kept_bytes(entry.value, layout) for layout in layouts), default=0.0))

    def _of_parameters(self, stage: int, variants: Sequence[int], length: int) -> OfParameters:
        (made, partial, beside, coming, copied, updated), together, kinds = np.zeros((6, length)), 0.0, np.zeros(5)
        for use in self.liveness.parameters[stage]:
            index = self.problem.cluster_of[use.parameter]
            row = use.times * self.parameters[index][variants[index]]
            kinds += row
            made[use.first] += row[1]
            coming[use.first] += use.times * self.coming[use.parameter][variants[index]]
            part = use.times * self.partials[use.parameter][variants[index]]
            if use.first < use.last:
                partial[use.first : use.last + 1] += part
                partial[use.first] += part
            beside[use.first] += part * (use.is_table or use.first < use.last)
            copied[use.first if self.liveness.is_plain else 0] += row[3]
            updated[use.first] += self.updates[use.parameter][variants[index]]
            together += use.times * float(self.together[use.parameter][variants[index]])
        made, coming = (np.cumsum(amounts[::-1])[::-1] for amounts in (made, coming))
        return OfParameters(made, partial, beside, coming, np.cumsum(copied), updated, together, kinds)


def _united(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals that have nothing in common, with all that is in some."""
    united: list[Interval] = []
    for first, last in sorted(intervals):
        if united and first <= united[-1][1]:
            united[-1] = united[-1][0], max(last, united[-1][1])
        else:
            united.append((first, last))
    return united


def _without_gradient(held: Held) -> Placement:
    assert isinstance(held, Placement), "values of ops are not stored"
    return REPLICATED if held.holds_whole else held
