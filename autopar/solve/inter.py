"""A solved problem -> what each stage of a pipeline takes: seconds of its ops, with what they move, and what it does once a step. Where the
stages begin says `solve.cuts`; the simulator plays the schedule with these times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.cost.collectives import collective_time_s, send_time_s
from autopar.cost.machine import LinkProfile
from autopar.cost.pricing import BACKWARD_OPS, EdgePrice, local_bytes
from autopar.cost.simulate import StagePrice
from autopar.graph import Value, is_call, operands_of, outputs_of, value_spec
from autopar.layout import REPLICATED
from autopar.passes.stages import Part, cut_stages, staged_ops
from autopar.solve.footprint import MemoryUse
from autopar.solve.prices import Prices, adds_bias
from autopar.solve.problem import Edge, Problem
from autopar.solve.ways import Way
from autopar.storage import Stored
from autopar.transitions import transition


class Move(NamedTuple):
    """Something that an op has moved before it runs (of an output of the model: after it), on one axis, in one micro-batch.

    Args:
        owner: the op that pays for it; of what is done once a step the stage.
        value: what moves; None: activations that the op keeps, to or from the host.
        axis: of the mesh; -1: between device and host.
        phase: ``forward`` or ``backward``; ``gather`` or ``reduce`` if it is done once a step.
        kind: the collective; ``slice``, ``pad`` or ``copy``.
        parts: in which the whole value moves.
        waited_s, hidden_s: seconds that computation waits for, and that may lie beside it.
    """

    owner: fx.Node | int
    value: Value | None
    axis: int
    phase: str
    kind: str
    parts: int
    waited_s: float
    hidden_s: float


class SharedGrad(NamedTuple):
    """The gradient of a parameter that several stages use: each has its own, and their sum goes to all of them once a step.

    Args:
        node: the parameter.
        stages: that use it, at ``positions`` different ones of the pipeline.
        num_bytes: of a rank, once it has been reduced within its stage.
    """

    node: fx.Node
    stages: tuple[int, ...]
    positions: int
    num_bytes: float


@dataclass(slots=True)
class OpCost:
    """What one op of the model takes in one micro-batch, with the reshards of what it reads; ``weight_s`` is the part of the backward
    that only gradients of parameters need, ``given`` the forward communication of what the op gives, whoever reads it, ``hidden`` forward
    and backward communication that may hide under compute."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    given_comm_s: float = 0.0
    hidden_s: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class OnceCost:
    """What a stage does once a step: gathers and reductions of parameters, and the optimizer with the copies to and from the host that
    nothing hides; ``core_s`` is the part of the communication
    that takes as much from computation, ``dispatch_s`` what the host takes to launch updates."""

    gather_s: float = 0.0
    reduce_s: float = 0.0
    hidden_s: float = 0.0
    core_s: float = 0.0
    update_s: float = 0.0
    dispatch_s: float = 0.0


OnceWay = tuple[fx.Node | None, Value, int, Way, tuple[Move, ...]]
"""Who reads what of the parameters, and what is moved for it once a step on an axis, whichever stage that is for."""


@dataclass(slots=True)
class Costs:
    """The seconds of one assignment, op by op; stages are sums over it.

    Args:
        prices: of the problem; ``variants`` is the assignment.
        ops: all ops; ``order`` are those that have a stage.
        moves: what they have moved in a micro-batch, in order.
    """

    prices: Prices
    variants: Sequence[int]
    ops: dict[fx.Node, OpCost] = field(default_factory=dict)
    order: list[fx.Node] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    _once_ways: list[OnceWay] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem = self.prices.problem
        self.order = staged_ops(problem.module)
        for node in problem.module.graph.nodes:
            if is_call(node) and node in problem.shared:
                self.ops[node] = self._compute(problem, node)
        self._add_biases(problem)
        self.moves = [*self._reshards(problem), *self._copies()]
        self._once_ways = list(self._each_once(problem))
        for move in self.moves:
            assert isinstance(move.owner, fx.Node)
            cost, (forward_s, backward_s) = self.ops[move.owner], self.ops[move.owner].hidden_s
            if move.phase == "forward":
                if move.value is not None and move.value.node in self.ops:
                    self.ops[move.value.node].given_comm_s += move.waited_s
                cost.forward_comm_s, cost.hidden_s = cost.forward_comm_s + move.waited_s, (forward_s + move.hidden_s, backward_s)
            else:
                cost.backward_comm_s, cost.hidden_s = cost.backward_comm_s + move.waited_s, (forward_s, backward_s + move.hidden_s)

    def _add_biases(self, problem: Problem) -> None:
        """Count the time of biases that are added to products after these were moved."""
        for _, node, edge, _ in problem.uses:
            if node in self.ops and adds_bias(edge):
                for axis in range(len(problem.mesh.sizes)):
                    self.ops[node].forward_s += self.prices.bias_s(edge, axis, self.prices.way(edge, axis, self.variants).moved)

    def _copies(self) -> Iterator[Move]:
        """Activations that are kept on the host."""
        if not self.prices.pricer.offload.activations:
            return
        device = self.prices.pricer.machine.device
        for node, num_bytes in self.prices.footprint.moved_by_op(self.variants).items():
            if num_bytes and node in self.ops:
                copy_s = float(device.copy_time_s(num_bytes))
                times = (0.0, copy_s) if device.has_host else (copy_s, 0.0)
                yield from (Move(node, None, -1, phase, "copy", 1, *times) for phase in ("forward", "backward"))

    def _compute(self, problem: Problem, node: fx.Node) -> OpCost:
        shared = problem.shared[node]
        index = problem.cluster_of[shared]
        if problem.clusters[index].leader is not shared:
            return OpCost()
        times, v, microbatches = self.prices.times[index], self.variants[index], problem.microbatches
        backward = float(times.backward_s[v]) / microbatches
        has_weight = any(value.node.op == "placeholder" and value_spec(value).requires_grad for value in operands_of(node))
        return OpCost(float(times.forward_s[v]) / microbatches, backward, backward / 2 if has_weight else 0.0)

    def _reshards(self, problem: Problem) -> Iterator[Move]:
        """What each op has moved of its operands and of outputs that it makes; of several that want a value alike, the first pays."""
        pricer, seen, copied = self.prices.pricer, set(), set[Value]()
        for value, node, edge, _ in problem.uses:
            owner = value.node if node is None else node
            if owner not in self.ops:
                continue
            if value.node.op == "placeholder" and value not in copied:
                copied.add(value)
                _, *hidden = self.prices.times[edge.source].copied_s[self.variants[edge.source]] / problem.microbatches
                for phase, copy_s in zip(("forward", "backward"), hidden[:2], strict=True):
                    if copy_s:
                        yield Move(owner, value, -1, phase, "copy", 1, 0.0, float(copy_s))
            spec = value_spec(value)
            needs_grad = spec.requires_grad and pricer.training
            for axis in range(len(problem.mesh.sizes)):
                way = self.prices.way(edge, axis, self.variants)
                if (value, axis, way) in seen or self._is_once(edge, way):
                    continue
                seen.add((value, axis, way))
                if value.node.op == "placeholder":
                    yield from self._parameter_moves(owner, value, axis, way, self.prices.tables[edge, axis].price(way))
                    continue
                assert not isinstance(way.held, Stored)
                step = transition(way.held, way.wanted, needs_grad=needs_grad, in_time=axis == problem.mesh.time_axis)
                assert step is not None
                for phase, kind in (("forward", step.forward), ("backward", step.backward if needs_grad else "")):
                    if kind and (time_s := pricer.waited_s(kind, spec.num_bytes / way.parts, axis)):
                        yield Move(owner, value, axis, phase, kind, way.parts, time_s, 0.0)

    def _parameter_moves(self, owner: fx.Node | int, value: Value, axis: int, way: Way, price: EdgePrice) -> Iterator[Move]:
        """What a parameter that is used by an op, or once a step by a stage, has moved for it."""
        is_once, overlap = isinstance(owner, int), self.prices.pricer.overlap(axis)
        is_again = isinstance(way.held, Stored) and way.held.level == 3 and price.backward_s and self.prices.is_read_again(value.node)
        again_s = price.forward_s if is_again else 0.0
        if isinstance(way.held, Stored):
            reduce = "slice" if way.wanted == REPLICATED else "reduce_scatter"
        else:
            needs_grad = value_spec(value).requires_grad and self.prices.pricer.training
            step = transition(way.held, way.wanted, needs_grad=needs_grad, in_time=axis == self.prices.problem.mesh.time_axis)
            reduce = step.backward or step.forward if step is not None else ""
        gathers, reduces = ("gather", "reduce") if is_once else ("forward", "backward")
        for phase, kind, waits_s, hides_s in (
            (gathers, "all_gather", 0.0, price.forward_s),
            (reduces, "all_gather", 0.0, again_s),
            (reduces, reduce, price.blocking_s, price.backward_s - again_s),
        ):
            if waits_s or hides_s:
                yield Move(owner, value, axis, phase, kind, way.parts, waits_s + (1 - overlap) * hides_s, overlap * hides_s)

    def _each_once(self, problem: Problem) -> Iterator[OnceWay]:
        for value, node, edge, _ in problem.uses:
            for axis in range(len(problem.mesh.sizes)):
                way = self.prices.way(edge, axis, self.variants)
                if self._is_once(edge, way):
                    moves = self._parameter_moves(-1, value, axis, way, self.prices.tables[edge, axis].price(way))
                    yield node, value, axis, way, tuple(moves)

    def _is_once(self, edge: Edge, way: Way) -> bool:
        """Whether with micro-batches a way is gone once a step."""
        return self.prices.repeats(edge, way) < self.prices.problem.microbatches

    def time_s(self, node: fx.Node) -> float:
        """Of an op in one micro-batch, forward and backward, with what it communicates."""
        cost = self.ops[node]
        return cost.forward_s + cost.backward_s + cost.forward_comm_s + cost.backward_comm_s

    def once_s(self) -> np.ndarray:
        """For every op, in order, what it has its stage do once a step, in seconds of a micro-batch: updates, and what may not hide of
        gathers and reductions."""
        alone = self._once({node: i for i, node in enumerate(self.order)}, len(self.order))
        time_s = np.array([cost.gather_s + cost.reduce_s - cost.hidden_s + cost.update_s for cost in alone])
        return time_s / self.prices.problem.microbatches

    def crossing_bytes(self) -> np.ndarray:
        """For every border after an op, the bytes of one micro-batch that a rank would send over it."""
        place = {node: i for i, node in enumerate(self.order)}
        change = np.zeros(len(self.order) + 1)
        last: dict[Value, int] = {}
        for node, i in place.items():
            for value in operands_of(node):
                if value.node in place:
                    last[value] = i
        for value, end in last.items():
            num_bytes = self.value_bytes(value)
            change[place[value.node]] += num_bytes
            change[end] -= num_bytes
        return np.asarray(np.cumsum(change)[:-1])

    def value_bytes(self, value: Value) -> float:
        problem = self.prices.problem
        shared = problem.shared[value.node]
        index = problem.cluster_of[shared]
        held = problem.clusters[index].gives(Value(shared, value.index), self.variants[index])
        return local_bytes(value_spec(value), held, problem.mesh)

    def stage_prices(
        self,
        stage_of: Mapping[fx.Node, int],
        stages: int,
        line: Sequence[LinkProfile],
        memory: Sequence[MemoryUse],
        live: Sequence[int],
        again: Mapping[fx.Node, str],
        *,
        in_two: bool,
    ) -> list[StagePrice]:
        """What the simulator wants to know of every stage.

        Args:
            line: from every position of the pipeline to the next; empty without a pipeline.
            memory: of every stage; without it nothing is said of bytes that are held.
            again: the ops that the backward computes again, with the level.
            in_two: whether the schedule runs backwards in two parts.
        """
        parts = cut_stages(self.prices.problem.module, stage_of, stages)
        once = self._once(stage_of, stages)
        shared = self.shared_grads(stage_of, len(line) or stages)
        result = []
        for stage, part in enumerate(parts):
            own = [self.ops[node] for node in part.nodes if node in self.ops]
            forward, backward, weight = (sum(getattr(c, name) for c in own) for name in ("forward_s", "backward_s", "weight_s"))
            backward += sum(self.ops[node].forward_s for node in part.nodes if node in again)
            recomm = sum(self.ops[node].given_comm_s for node in part.nodes if node in again)
            hidden_forward, hidden_backward = (sum(c.hidden_s[i] for c in own) for i in (0, 1))
            backward_comm = recomm + sum(c.backward_comm_s for c in own) + max(0.0, hidden_backward - backward)
            sent, times, core_s = self._messages(part, stage, line)
            given = float(sum(map(self.output_bytes, part.outputs)))
            joined = [grad for grad in shared if stage in grad.stages]
            shared_s = sum(over_stages_s("all_reduce", grad.num_bytes, grad.positions, line) for grad in joined)
            forward_comm = sum(c.forward_comm_s for c in own) + max(0.0, hidden_forward - forward)
            total, kept, left = (memory[stage].total, memory[stage].held.kept, memory[stage].held.left) if memory else (0.0, 0.0, 0.0)
            result.append(
                StagePrice(
                    forward_s=forward + forward_comm,
                    backward_s=backward + backward_comm,
                    input_s=backward - weight + backward_comm,
                    weight_s=weight,
                    gather_s=once[stage].gather_s,
                    reduce_s=once[stage].reduce_s + shared_s,
                    shared_s=shared_s,
                    covered_s=min(once[stage].hidden_s, max(0.0, (weight if in_two else backward) - hidden_backward)),
                    update_s=once[stage].update_s,
                    send_forward_s=times[0],
                    send_backward_s=times[1],
                    output_s=over_stages_s("broadcast", given, len(line), line),
                    output_num_bytes=given,
                    shared_num_bytes=sum(grad.num_bytes for grad in joined),
                    send_forward_num_bytes=sent[0],
                    send_backward_num_bytes=sent[1],
                    forward_comm_s=forward_comm,
                    backward_comm_s=backward_comm,
                    core_s=once[stage].core_s + self.prices.problem.microbatches * core_s,
                    dispatch_s=once[stage].dispatch_s + self._dispatch_s([node for node in part.nodes if node in stage_of], again),
                    live_num_bytes=kept,
                    freed_num_bytes=kept - left,
                    static_num_bytes=total - live[stage] * kept,
                )
            )
        return result

    def shared_grads(self, stage_of: Mapping[fx.Node, int], degree: int) -> list[SharedGrad]:
        """Of the parameters that are used at several of the ``degree`` positions of a pipeline, as tied embeddings are."""
        if not self.prices.pricer.training:
            return []
        problem, found = self.prices.problem, list[SharedGrad]()
        for node, stages in homes_of(problem, stage_of).items():
            positions, spec = len({stage % degree for stage in stages}), value_spec(Value(node))
            if positions == 1 or not spec.requires_grad:
                continue
            shared = problem.shared[node]
            index = problem.cluster_of[shared]
            held = problem.clusters[index].gives(Value(shared), self.variants[index])
            parts = math.prod(n for n, h in zip(problem.mesh.sizes, held, strict=True) if isinstance(h, Stored) or h.is_sharded)
            found.append(SharedGrad(node, stages, positions, spec.numel * spec.reduced_width / parts))
        return found

    def _messages(self, part: Part, stage: int, line: Sequence[LinkProfile]) -> tuple[list[float], list[float], float]:
        """Bytes and seconds of what a stage sends to the next one and to the one before, and of a core at both ends of them."""
        sends = [(sum(map(self.value_bytes, values)), at) for values, at in ((part.sent, stage), (part.received, stage - 1))]
        links = [line[at % len(line)] if line and num_bytes else None for num_bytes, at in sends]
        sent = [num_bytes if link else 0.0 for (num_bytes, _), link in zip(sends, links, strict=True)]
        times = [float(send_time_s(num_bytes, link)) if link else 0.0 for (num_bytes, _), link in zip(sends, links, strict=True)]
        core_s = 2 * sum((1 - link.overlap) * time_s for link, time_s in zip(links, times, strict=True) if link)
        return sent, [time_s + link.crowded_s if link else 0.0 for link, time_s in zip(links, times, strict=True)], core_s

    def output_bytes(self, position: int) -> int:
        """Of an output of the graph as the caller gets it; parts that are batches of their own are joined."""
        split, value = self.prices.problem.split, outputs_of(self.prices.problem.module.graph)[position]
        is_joined = split is not None and split.is_average and split.outputs[position].is_sharded
        return value_spec(value).num_bytes * (self.prices.problem.microbatches if is_joined else 1)

    def _dispatch_s(self, ops: Sequence[fx.Node], again: Collection[fx.Node]) -> float:
        """Seconds of the host to launch ops, for all micro-batches; those in ``again`` are computed again."""
        pricer = self.prices.pricer
        launched = len(ops) * (1 + BACKWARD_OPS * pricer.training) + sum(node in again for node in ops)
        return self.prices.problem.microbatches * launched * pricer.machine.device.dispatch_s

    def _once(self, stage_of: Mapping[fx.Node, int], stages: int) -> list[OnceCost]:
        costs = [OnceCost() for _ in range(stages)]
        updated: set[tuple[Value, int]] = set()
        for value, node, edge, _ in self.prices.problem.uses:
            stage = stage_of.get(node, 0) if node is not None else 0
            if value.node.op == "placeholder" and (value, stage) not in updated:
                times, v = self.prices.times[edge.source], self.variants[edge.source]
                costs[stage].update_s += float(times.update_s[v] + times.copied_s[v, 0])
                costs[stage].dispatch_s += self.prices.pricer.update_dispatch_s(value_spec(value))
                updated.add((value, stage))
        for move in self.once_moves(stage_of):
            assert isinstance(move.owner, int)
            cost, time_s, overlap = costs[move.owner], move.waited_s + move.hidden_s, self.prices.pricer.overlap(move.axis)
            cost.core_s += (1 - overlap) * time_s
            if move.phase == "gather":
                cost.gather_s += time_s
            else:
                cost.reduce_s += time_s
                cost.hidden_s += overlap * time_s
        return costs

    def once_moves(self, stage_of: Mapping[fx.Node, int]) -> Iterator[Move]:
        """What each stage moves of its parameters once a step, with micro-batches."""
        paid: set[tuple[Value, int, int, Way]] = set()
        for node, value, axis, way, moves in self._once_ways:
            stage = stage_of.get(node, 0) if node is not None else 0
            if (value, stage, axis, way) not in paid:
                paid.add((value, stage, axis, way))
                yield from (move._replace(owner=stage) for move in moves)


def over_stages_s(kind: str, num_bytes: float, ranks: int, line: Sequence[LinkProfile]) -> float:
    """Seconds of a collective of ``ranks`` at different positions of a pipeline, over the slowest hop of a ring; ``line`` leads from every
    position to the next."""
    return max((float(collective_time_s(kind, num_bytes, ranks, hop)) for hop in line), default=0.0) if num_bytes else 0.0


def stage_prices(
    costs: Sequence[Costs],
    stage_of: Mapping[fx.Node, int],
    stages: int,
    line: Sequence[LinkProfile],
    memory: Sequence[MemoryUse],
    live: Sequence[int],
    again: Mapping[fx.Node, str],
    *,
    in_two: bool,
) -> list[StagePrice]:
    """`Costs.stage_prices`, of every stage by the costs at its position of the pipeline."""
    alike = {id(one): one.stage_prices(stage_of, stages, line, memory, live, again, in_two=in_two) for one in costs}
    return [alike[id(costs[stage % len(costs)])][stage] for stage in range(stages)]


def homes_of(problem: Problem, stage_of: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    """The stages that use each parameter."""
    found: dict[fx.Node, set[int]] = defaultdict(set)
    for node, stage in stage_of.items():
        for value in operands_of(node):
            if value.node.op == "placeholder":
                found[value.node].add(stage)
    return {node: tuple(sorted(stages)) for node, stages in found.items()}
