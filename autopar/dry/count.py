"""What the ranks of a plan compute, communicate and hold in a step, counted in the rewritten graphs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from autopar.capture.loss import LossFn
from autopar.dry.agree import group_of
from autopar.dry.build import build
from autopar.dry.check import open_plan
from autopar.dry.play import Programs, Trail, play
from autopar.plan import Plan
from autopar.planner.request import Batch
from autopar.report import Report, silent


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication of one kind over one axis in a step, per rank.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send`` or ``receive``.
        axis: of the grid.
        group_size: ranks of a group; 2 for messages.
        count: calls.
        num_bytes: of all calls: of what a rank has before a reduce-scatter, all-reduce or all-to-all and after an all-gather, of a message.
    """

    kind: str
    axis: str
    group_size: int
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RankCount:
    """A step of a rank; all ranks at this position of the pipeline count the same.

    Args:
        position: on the pipeline axis; 0 without one.
        ranks: that stand there.
        stages: that they run.
        flops: executed: of products, convolutions and attention, with what is computed again, attention as if it were not causal.
        traffic: communication.
        peak_memory_bytes: by liveness; ``memory_bytes`` is the same by kind.
    """

    position: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    flops: int
    traffic: tuple[Traffic, ...]
    peak_memory_bytes: int
    memory_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Counted:
    """What `count` counted.

    Args:
        model: name of the model's class.
        grid: axes and sizes, as ``dp=2,tp=4``; ``num_ranks`` is their product.
        microbatches: of a step, all of which are counted.
        total_flops: of all ranks.
        positions: a rank at each position of the pipeline.
    """

    model: str
    grid: str
    num_ranks: int
    microbatches: int
    total_flops: int
    positions: tuple[RankCount, ...]

    def to_json(self) -> str:
        """All figures, in flops and bytes."""
        return json.dumps(asdict(self), indent=1)


def count(
    model: nn.Module,
    plan: Plan | str,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> Counted:
    """Count flops, communication and memory of a step on every rank, in the graphs that the ranks run.

    Flops are those of torch's flop counter, whatever autopar predicts. Arguments and errors are those of `autopar.check`.
    """
    session, made = open_plan(model, plan, batch, loss_fn=loss_fn, outputs=outputs, report=report)
    programs, _ = build(session, made, report=report)
    report("playing the step")
    return count_programs(made, programs)


def count_programs(plan: Plan, programs: Programs) -> Counted:
    """Play a step at every position of the pipeline, and count."""
    pipeline, grid = plan.pipeline, plan.grid
    first = group_of(plan, 0, pipeline.axis) if pipeline.degree > 1 else (0,)
    rows = []
    for position in range(len(first)):
        trail = play(programs, position)
        ranks = tuple(r for r in range(grid.num_ranks) if pipeline.degree == 1 or grid.coordinate(r)[pipeline.position] == position)
        stages = tuple(range(position, pipeline.stages, pipeline.degree))
        rows.append(RankCount(position, ranks, stages, trail.flops, _traffic(plan, trail), trail.peak_bytes, trail.at_peak))
    total = sum(row.flops * len(row.ranks) for row in rows)
    return Counted(plan.model, str(grid), grid.num_ranks, pipeline.microbatches, total, tuple(rows))


def _traffic(plan: Plan, trail: Trail) -> tuple[Traffic, ...]:
    counts: Counter[tuple[str, str, int]] = Counter()
    num_bytes: Counter[tuple[str, str, int]] = Counter()
    for call in trail.calls:
        if call.kind == "wait":
            continue
        size = 2 if call.kind in ("send", "receive") else len(call.positions) or plan.grid.sizes[plan.grid.index(call.over)]
        counts[call.kind, call.over, size] += 1
        num_bytes[call.kind, call.over, size] += call.num_bytes
    return tuple(Traffic(*key, times, num_bytes[key]) for key, times in sorted(counts.items()))
