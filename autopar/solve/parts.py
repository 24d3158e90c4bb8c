"""What a few blocks of a deep model tell of its stages: the first with what is before, one in the middle, the last with what is after.

Any number of blocks on a stage is a sum of three parts:

    stage of n blocks = n * block (+ first - its blocks) (+ last - its blocks)

Blocks go to the stages one by one, always to the one that takes least so far. The simulator plays the first rounds of the schedule; every
micro-batch more takes what the longest rank computes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from autopar.cost.collectives import send_time_s
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.simulate import StagePrice, dispatched_s, simulate
from autopar.errors import PlanError
from autopar.plan import Pipeline
from autopar.resident import StageBytes
from autopar.schedule.actions import Schedule
from autopar.schedule.check import peak_live
from autopar.schedule.held import Sent, peak_bytes
from autopar.solve.blocks import repeated_runs
from autopar.solve.decide import Decision
from autopar.solve.fold import ENDS, Folded
from autopar.solve.footprint import MemoryUse
from autopar.solve.inter import Costs, over_stages_s
from autopar.solve.liveness import Staging
from autopar.solve.places import MemoryLimit, places_of
from autopar.solve.recompute import blocks_of, borders, made_again
from autopar.solve.shapes import Shape
from autopar.solve.tables import held_by, table_of
from autopar.units import number_text

ROUNDS = 2
"""Micro-batches that are played, for each rank of the pipeline."""
TIMES = (
    *("forward_s", "backward_s", "input_s", "weight_s", "gather_s", "reduce_s", "update_s", "core_s", "dispatch_s"),
    *("output_num_bytes", "shared_num_bytes"),
)
"""Of a `StagePrice`, what adds up over the ops of a stage."""
HELD = ("static", "kept", "left", "gradients", "coming", "gone", "copies", "together")
"""The same of a `StageBytes`."""

MOST = ("transient", "inputs", "weights", "joined", "received", "update")
"""Of `PartBytes` what a stage takes once, however many blocks it has."""
BOUNDING = ("forward_s", "backward_s", "input_s", "weight_s", "update_s")
"""Of `TIMES` those that say what a step takes at least."""

Amounts = dict[str, float]
"""Seconds by name: those of `TIMES`, ``compute_s`` without communication, ``covered_s`` of a schedule with whole backwards and
``covered_in_two_s`` of one with backwards in two parts. Or bytes: `HELD`."""


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Memory of a decision for the folded graph, by blocks.

    Args:
        block: `HELD` of one in the middle.
        first, last: what the ends of the model have more.
        transient: bytes that come and go, at most.
        joined: bytes of the outputs of the model in the end, at most; ``received`` those of them that come from other ranks.
        update: bytes that the optimizer takes for itself, at most.
        inputs, weights: as ``transient``, of the two parts of a backward after the first stage.
    """

    block: Amounts
    first: Amounts
    last: Amounts
    transient: float
    joined: float
    received: float
    update: float
    inputs: float
    weights: float

    def of(self, stage: int, counts: Sequence[int]) -> Amounts:
        """Bytes of a stage."""
        return _of_stage(self.block, self.first, self.last, stage, counts)


@dataclass(frozen=True, slots=True)
class Parts:
    """A decision for the folded graph, by blocks.

    Args:
        blocks: of the whole model.
        block: seconds of one in the middle.
        first, last: what the ends of the model have more.
        sent: bytes from block to block.
        held: its memory, which is worked out when it is asked for: most shapes are too slow for it to matter.
    """

    blocks: int
    block: Amounts
    first: Amounts
    last: Amounts
    sent: float
    held: Callable[[], PartBytes] = field(compare=False, repr=False)

    def of(self, stage: int, counts: Sequence[int]) -> Amounts:
        """Seconds of a stage."""
        return _of_stage(self.block, self.first, self.last, stage, counts)


def _of_stage(block: Amounts, first: Amounts, last: Amounts, stage: int, counts: Sequence[int]) -> Amounts:
    ends = [end for end, at in ((first, 0), (last, len(counts) - 1)) if at == stage]
    return {name: counts[stage] * one + sum(end[name] for end in ends) for name, one in block.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks on the stages of a shape.

    Args:
        shape: the shape.
        decision: for the folded graph.
        levels: how much each stage computes again.
        parts: of each stage, by its level and its devices.
        stages: seconds of each.
        busy_s: of every rank, for a micro-batch.
        floor_s: what a step takes at least.
        peaks: of every rank of the pipeline, which are worked out when they are asked for.
    """

    shape: Shape
    decision: Decision
    levels: tuple[str, ...]
    parts: tuple[Parts, ...]
    stages: tuple[Amounts, ...]
    busy_s: tuple[float, ...]
    floor_s: float
    peaks: Callable[[], tuple[float, ...]] = field(compare=False, repr=False)

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Peak of every rank of the pipeline."""
        return self.peaks()

    def fits(self, limit: MemoryLimit) -> bool:
        return limit.holds(self.rank_bytes)


@dataclass(frozen=True, slots=True)
class Sketch:
    """What a shape is thought to take.

    Args:
        shape: the shape.
        step_time_s: of a step.
        bubble_fraction: idle share of all ranks.
        busy_s: of a rank, in the mean.
        rank_bytes: of every rank of the pipeline.
        levels: how much each stage computes again.
        decision: for the folded graph.
    """

    shape: Shape
    step_time_s: float
    bubble_fraction: float
    busy_s: float
    rank_bytes: tuple[float, ...]
    levels: tuple[str, ...]
    decision: Decision

    def fits(self, limit: MemoryLimit) -> bool:
        return limit.holds(self.rank_bytes)


def lay(
    shape: Shape,
    decision: Decision,
    levels: tuple[str, ...],
    parts: Sequence[Parts],
    machine: MachineProfile,
    *,
    training: bool,
    limit: MemoryLimit | None = None,
) -> Layout:
    """Share the blocks among the stages.

    Args:
        shape: the shape.
        decision: for the folded graph.
        levels: how much each stage computes again.
        parts: of each stage, by its level and its devices.
        machine: prices of the grid.
        training: forward and backward.
        limit: share the blocks so that no stage takes more, if that can be; None: by time alone.

    Raises:
        PlanError: there are more stages than blocks.
    """
    pipeline, sharing = shape.pipeline, machine.device.sharing
    schedule = played(pipeline, training)
    counts = _even(parts, _taken(parts, pipeline, peak_live(schedule), limit) if limit is not None else ())
    stages = tuple(part.of(stage, counts) for stage, part in enumerate(parts))
    busy_s = np.zeros(pipeline.degree)
    for stage, amounts in enumerate(stages):
        busy_s[stage % pipeline.degree] += amounts["forward_s"] + amounts["backward_s"]
    times = {name: np.array([amounts[name] for amounts in stages]) for name in BOUNDING}
    floor_s = max(float(_floor_s(pipeline, times, in_two=schedule.is_in_two)) / sharing, pipeline.microbatches * float(busy_s.mean()))
    peaks = cache(lambda: _peaks(parts, counts, pipeline, training))
    return Layout(shape, decision, levels, tuple(parts), stages, tuple(map(float, busy_s)), floor_s, peaks)


def _peaks(parts: Sequence[Parts], counts: Sequence[int], pipeline: Pipeline, training: bool) -> tuple[float, ...]:
    """Peak of every rank of the pipeline."""
    memory = [part.held() for part in parts]
    most = {name: max(getattr(of, name) for of in memory) for name in MOST}
    held = [_held(of.of(stage, counts), most, stage, pipeline, parts[stage].sent) for stage, of in enumerate(memory)]
    sent = [
        Sent(part.sent if stage < pipeline.stages - 1 else 0.0, part.sent if stage else 0.0) if pipeline.degree > 1 else Sent()
        for stage, part in enumerate(parts)
    ]
    return peak_bytes(held_by(_first_rounds(pipeline), training), held, sent)


def _held(amounts: Amounts, most: Mapping[str, float], stage: int, pipeline: Pipeline, sent: float) -> StageBytes:
    """Memory of a stage: what it computes needs most where it begins, or where it ends, if what is made is larger than what is taken.

    Args:
        amounts: its bytes.
        most: what stages take at most of the rest (`MOST`); outputs of the model lie with the first stage of a rank.
        stage: which; the first has all its backward in W, and keeps for that also the gradient of what it has ``sent``.
        pipeline: of which it is.
    """
    ends = {"end": most["joined"], "received": most["received"]} if stage < pipeline.degree else {}
    transient, kept = most["transient"], amounts["kept"]
    left, weights = (amounts["left"], most["weights"]) if stage else (kept + sent, transient)
    return StageBytes(
        first=transient + max(0.0, amounts["gradients"] - kept),
        later=transient,
        last=transient,
        forward=transient,
        inputs=(most["inputs"] if stage else 0.0) + max(0.0, left - kept),
        first_weights=weights + max(0.0, amounts["gradients"] - left),
        later_weights=weights,
        update=most["update"],
        **ends,
        **{name: amounts[name] for name in HELD} | {"left": left},
    )


def _floor_s(pipeline: Pipeline, times: Mapping[str, np.ndarray], *, in_two: bool) -> np.ndarray:
    """What a step takes at least with messages that take no time: before a rank begins the ranks before it go forward once, and after its
    last backward they go backward once, while it has the gradients of its weights (in two parts) and its update left to do.

    Args:
        pipeline: ranks, stages and micro-batches.
        times: seconds of every stage, in the last dim; of a micro-batch, ``update_s`` of a step.
        in_two: whether the schedule runs backwards in two parts.
    """

    def of_ranks(name: str) -> np.ndarray:
        return np.asarray(times[name].reshape(*times[name].shape[:-1], -1, pipeline.degree).sum(axis=-2))

    def of_ranks_before(name: str) -> np.ndarray:
        first = times[name][..., : pipeline.degree]
        return np.asarray(first.cumsum(axis=-1) - first)

    busy_s = pipeline.microbatches * (of_ranks("forward_s") + of_ranks("backward_s"))
    drain_s = of_ranks_before("input_s" if in_two else "backward_s")
    after_s = pipeline.microbatches * of_ranks("weight_s") if in_two else 0.0
    longest_s = of_ranks_before("forward_s") + busy_s + np.maximum(drain_s - after_s, of_ranks("update_s"))
    return np.asarray(longest_s.max(axis=-1))


def least_shared_s(whole: Parts, pipeline: Pipeline, *, in_two: bool) -> float:
    """What a step takes at least however the blocks are shared that all take as long: evenly by the stages between the ends of the model,
    while the first and the last have any number that is no larger, as they take more or less beside (`_even`).

    Args:
        whole: amounts of a step on one rank; a rank of each stage.
        pipeline: ranks, at least two, stages and micro-batches.
        in_two: whether the schedule runs backwards in two parts.
    """
    counts = _shared(whole.blocks, pipeline.stages)
    times = {name: counts * whole.block[name] for name in BOUNDING}
    for name, seconds in times.items():
        seconds[:, 0] += whole.first[name]
        seconds[:, -1] += whole.last[name]
        if name != "update_s":
            seconds /= pipeline.microbatches
    return float(_floor_s(pipeline, times, in_two=in_two).min())


def _shared(blocks: int, stages: int) -> np.ndarray:
    """Blocks of every stage, in a row for each way to share them evenly but for the ends."""
    if stages == ENDS:
        first = np.arange(blocks + 1)
        return np.column_stack((first, blocks - first))
    first, last = (ends.ravel() for ends in np.indices((blocks // (stages - 1) + 2,) * ENDS))
    each, over = np.divmod(blocks - first - last, stages - ENDS)
    between = each[:, None] + (np.arange(stages - ENDS) < over[:, None])
    is_even = (each >= 1) & (np.maximum(first, last) <= each + 1)
    return np.column_stack((first[is_even], between[is_even], last[is_even]))


def longest_rank_s(whole: Parts, pipeline: Pipeline, *, in_two: bool) -> float:
    """What the rank that takes longest takes of a step at least, if the blocks are shared as evenly as whole blocks can be.

    Every rank waits until the ranks before it went forward once, and after its last backward until they went backward once, through one
    block at least (in two parts: while it has the gradients of its weights left to do). Only the first and the last stage may have no
    block: the first where there are more stages than blocks.

    Args:
        whole: amounts of a step on one rank; a rank of each stage.
        pipeline: ranks, stages and micro-batches.
        in_two: whether the schedule runs backwards in two parts.
    """
    chunks, block, count = pipeline.stages // pipeline.degree, whole.block, pipeline.microbatches
    base, least = [0.0] * pipeline.degree, [chunks] * pipeline.degree
    for rank, end in ((0, whole.first), (-1, whole.last)):
        base[rank] += max(0.0, end["forward_s"] + end["backward_s"])
        least[rank] -= 1
    is_first_empty = pipeline.stages > whole.blocks

    def taken_s(rank: int, blocks: int) -> float:
        before = max(0, rank - is_first_empty)
        fill_s, drain_s = before * block["forward_s"] / count, before * block["input_s" if in_two else "backward_s"] / count
        after_s = blocks * block["weight_s"] if in_two else 0.0
        return base[rank] + fill_s + blocks * (block["forward_s"] + block["backward_s"]) + max(0.0, drain_s - after_s)

    queue = [(taken_s(rank, blocks + 1), rank, blocks + 1) for rank, blocks in enumerate(least)]
    heapq.heapify(queue)
    longest_s = max(taken_s(rank, blocks) for rank, blocks in enumerate(least))
    for _ in range(whole.blocks - sum(least)):
        time_s, rank, blocks = heapq.heappop(queue)
        longest_s = max(longest_s, time_s)
        heapq.heappush(queue, (taken_s(rank, blocks + 1), rank, blocks + 1))
    return longest_s


def play(layout: Layout, machine: MachineProfile, *, training: bool) -> Sketch:
    """The step of a layout, of which the first rounds are simulated."""
    shape, pipeline, sharing = layout.shape, layout.shape.pipeline, machine.device.sharing
    schedule = played(pipeline, training)
    line = places_of(machine, shape).links
    in_two = schedule.is_in_two
    prices = [
        _price(amounts, part.sent, stage, line, pipeline, in_two=in_two)
        for stage, (amounts, part) in enumerate(zip(layout.stages, layout.parts, strict=True))
    ]
    mean_s = sum(layout.busy_s) / pipeline.degree
    timeline = simulate(schedule, [replace(price, dispatch_s=0.0) for price in prices], sharing)
    step_time_s = timeline.step_time_s + (pipeline.microbatches - schedule.microbatches) * max(max(layout.busy_s) / sharing, mean_s)
    step_time_s = max(step_time_s, dispatched_s(schedule, prices))
    bubble = timeline.bubble_fraction * timeline.step_time_s / step_time_s
    return Sketch(shape, step_time_s, bubble, pipeline.microbatches * mean_s, layout.rank_bytes, layout.levels, layout.decision)


def parts_of(costs: Costs, level: str, folded: Folded) -> Parts:
    """A decision for the folded graph, by blocks that compute as much again.

    Raises:
        PlanError: its blocks cannot be told apart.
    """
    problem, variants, order, crossing = costs.prices.problem, costs.variants, costs.order, costs.crossing_bytes()
    runs = repeated_runs([problem.shared[node] for node in order])
    start, period, length = next((run for run in runs if not folded.block.isdisjoint(order[run[0] : run[0] + run[2]])), (0, 0, 0))
    places = borders(start, period, length, crossing) if length else []
    whole = [i for i in range(len(places) - 1) if places[i + 1] - places[i] == period and places[i] > 0]
    if not whole:
        raise PlanError("the equal blocks of the model are not told apart by what crosses from one to the next")
    middle = whole[len(whole) // 2]
    begin, end = places[middle], places[middle + 1]
    part_of = {node: int(i >= begin) + int(i >= end) for i, node in enumerate(order)}
    blocks = blocks_of(problem, order, crossing) if level != "none" else {}
    again = made_again(problem, part_of, blocks, (level,) * 3)
    staging = Staging(part_of, (1, 1, 1), (1, 1, 1), 3, {node: blocks[node] for node in again}, in_two=True)
    in_one, in_two = (costs.stage_prices(part_of, 3, [], (), (1, 1, 1), again, in_two=is_split) for is_split in (False, True))
    found: list[Amounts] = []
    for part, price in enumerate(in_one):
        own = [costs.ops[node] for node in order if part_of[node] == part]
        amounts = {name: float(getattr(price, name)) for name in TIMES}
        amounts["covered_s"], amounts["covered_in_two_s"] = price.covered_s, in_two[part].covered_s
        amounts["compute_s"] = sum(op.forward_s + op.backward_s for op in own)
        found.append(amounts)
    found[1]["shared_num_bytes"] = 0.0  # the ends of a model may share parameters, as tied embeddings do
    around = whole.index(middle), len(whole) - 1 - whole.index(middle)
    sent = float(crossing[[begin - 1, end - 1]].max())
    held = cache(lambda: _bytes_of(costs.prices.uses(variants, staging), around))
    return Parts(len(whole) + folded.removed, *_block_and_ends(found, around), sent, held)


def _bytes_of(uses: Sequence[MemoryUse], around: tuple[int, int]) -> PartBytes:
    """Memory by blocks, of the three parts that the folded graph is cut into."""
    return PartBytes(
        *_block_and_ends([{name: getattr(use.held, name) for name in HELD} for use in uses], around),
        transient=max(use.held.later for use in uses),
        joined=max(use.held.end for use in uses),
        received=max(use.held.received for use in uses),
        update=max(use.held.update for use in uses),
        inputs=max(use.held.inputs - max(0.0, use.held.left - use.held.kept) for use in uses[1:]),
        weights=max(use.held.later_weights for use in uses[1:]),
    )


def _block_and_ends(found: Sequence[Amounts], around: tuple[int, int]) -> tuple[Amounts, Amounts, Amounts]:
    """The part in the middle, a block, and what the two others have more than the blocks that are in them."""
    first, block, last = found
    before, after = around
    return block, {name: first[name] - before * block[name] for name in block}, {name: last[name] - after * block[name] for name in block}


def _taken(parts: Sequence[Parts], pipeline: Pipeline, live: Sequence[int], limit: MemoryLimit) -> list[tuple[float, float]]:
    """What each stage takes of its memory without blocks, and for each block."""
    chunks, nothing, found = pipeline.stages // pipeline.degree, [0] * pipeline.stages, []
    for stage, part in enumerate(parts):
        memory, room = part.held(), limit.positions[stage % pipeline.degree] / chunks
        base, each = (
            sum(held[name] for name in ("static", "gradients")) + live[stage] * held["kept"]
            for held in (memory.of(stage, nothing), memory.block)
        )
        found.append(((base + memory.transient) / room, each / room))
    return found


def _even(parts: Sequence[Parts], taken: Sequence[tuple[float, float]]) -> list[int]:
    """Blocks of every stage, so that none takes much longer than the others: each goes where it is done first, of the stages that have the
    memory for it, as long as there are any. With more stages than blocks the ends of the model are stages of their own."""
    stages, blocks = len(parts), parts[0].blocks
    if stages > blocks + ENDS:
        raise PlanError(f"{stages} stages are too many for a model of {number_text(blocks, 'equal block')}; use fewer")
    counts = [0] * stages if stages <= blocks else [0, *[1] * (stages - ENDS), 0]
    each = [part.block["forward_s"] + part.block["backward_s"] for part in parts]
    queue = []
    for stage, part in enumerate(parts):
        ends = part.of(stage, counts)
        queue.append((ends["forward_s"] + ends["backward_s"] + each[stage], stage))
    heapq.heapify(queue)
    for _ in range(blocks - sum(counts)):
        while taken and queue and taken[queue[0][1]][0] + (counts[queue[0][1]] + 1) * taken[queue[0][1]][1] > 1:
            heapq.heappop(queue)
        if not queue:
            return _even(parts, ())
        time_s, stage = heapq.heappop(queue)
        counts[stage] += 1
        heapq.heappush(queue, (time_s + each[stage], stage))
    return counts


def _price(
    amounts: Amounts, sent: float, stage: int, line: Sequence[LinkProfile], pipeline: Pipeline, *, in_two: bool
) -> StagePrice:
    """What the simulator wants to know of a stage; ``line`` leads from every position of the pipeline to the next."""
    times = {name: max(0.0, amounts[name]) for name in TIMES}
    times["covered_s"] = max(0.0, amounts["covered_in_two_s" if in_two else "covered_s"])
    rounds = _first_rounds(pipeline).microbatches
    for name, end, link in (
        ("send_forward_s", stage < pipeline.stages - 1, line[stage % len(line)] if line else None),
        ("send_backward_s", stage > 0, line[(stage - 1) % len(line)] if line else None),
    ):
        if end and link is not None:
            message_s = float(send_time_s(sent, link))
            times[name] = message_s + link.crowded_s
            times["core_s"] += 2 * rounds * (1 - link.overlap) * message_s  # at both ends
    times["output_s"] = over_stages_s("broadcast", times["output_num_bytes"], len(line), line)
    times["shared_s"] = over_stages_s("all_reduce", times["shared_num_bytes"], ENDS, line)
    times["reduce_s"] += times["shared_s"]
    return StagePrice(**times)


def played(pipeline: Pipeline, training: bool) -> Schedule:
    """The first rounds of the schedule."""
    return table_of(_first_rounds(pipeline), training)


def _first_rounds(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, microbatches=min(pipeline.microbatches, ROUNDS * pipeline.degree))
