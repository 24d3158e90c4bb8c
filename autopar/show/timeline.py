"""The simulated step of a plan, played again from the figures that the plan holds; also as processes of a trace."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.simulate import Event, StagePrice, Timeline, simulate
from autopar.plan import Plan
from autopar.schedule.actions import ONCE, Action, Kind
from autopar.schedule.tables import forward_only, make_schedule
from autopar.show.inside import COMPUTE, WAIT, play_inside
from autopar.show.memory import memory_at
from autopar.show.trace import Process, Slice

STREAMS = ("compute", "collective", "send", "receive")
"""Of a rank, in the order in which they are shown."""
MOST_INSIDE = 100_000
"""Parts of actions that a trace has, at most."""

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "backward of weights",
    Kind.SEND_F: "send activations",
    Kind.RECV_F: "receive activations",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "receive gradients",
    Kind.GATHER: "gather parameters",
    Kind.REDUCE: "reduce gradients",
    Kind.OUTPUT: "broadcast outputs",
}
_ONCE = (*ONCE, Kind.OUTPUT)


def play(plan: Plan) -> Timeline:
    """The step of a plan, one row for each rank of its pipeline; of a plan for evaluation there are only forwards."""
    p, is_trained = plan.pipeline, any(stage.backward_s for stage in plan.stages)
    table = make_schedule(p.schedule, degree=p.degree, stages=p.stages, microbatches=p.microbatches) if is_trained else forward_only(
        p.degree, p.stages, p.microbatches
    )
    return simulate(table, [_price(plan, stage) for stage in range(len(plan.stages))], plan.sharing)


def _price(plan: Plan, stage: int) -> StagePrice:
    s = plan.stages[stage]
    return StagePrice(
        forward_s=s.forward_s,
        backward_s=s.backward_s,
        input_s=s.input_s,
        weight_s=s.weight_s,
        gather_s=s.gather_s,
        reduce_s=s.reduce_s,
        covered_s=s.covered_s,
        update_s=s.update_s,
        send_forward_s=s.send_forward_s,
        send_backward_s=s.send_backward_s,
        output_s=s.output_s,
        core_s=s.core_s,
        dispatch_s=s.dispatch_s,
        live_num_bytes=s.held.kept,
        freed_num_bytes=s.held.kept - s.held.left,
        static_num_bytes=sum(s.memory_bytes.values()) - s.live * s.held.kept,
    )


def words(action: Action | None) -> str:
    """``forward of micro-batch 3, stage 1``"""
    if action is None:
        return "update"
    part = "" if action.kind in _ONCE else f" of micro-batch {action.microbatch}"
    return f"{_WORDS[action.kind]}{part}, stage {action.stage}"


def predicted_processes(plan: Plan, first: int = 0) -> list[Process]:
    """The step as processes of a trace, one for each rank of the pipeline, numbered from ``first``.

    Actions stand on their stream, below them what they compute; all that they communicate stands by axis. Of a step of more than
    `MOST_INSIDE` parts only those of the first micro-batch are shown.
    """
    timeline = play(plan)
    total = sum(len(plan.stages[e.action.stage].inside) for e in timeline.events if e.action is not None)
    processes = []
    for rank, memory in enumerate(memory_at(plan, timeline)):
        slices: list[Slice] = []
        for event in (event for event in timeline.events if event.rank == rank):
            slices.append(_slice(event))
            action = event.action
            if action is not None and (total <= MOST_INSIDE or action.microbatch == 0):
                slices += _parts(plan, action, event)
        name = f"predicted: rank {rank} of the pipeline"
        processes.append(Process(first + rank, name, STREAMS, slices, memory))
    return processes


def _slice(event: Event) -> Slice:
    action = event.action
    told: dict[str, object] = {}
    if action is not None:
        told["stage"] = action.stage
        if action.kind not in _ONCE:
            told["micro_batch"] = action.microbatch
    return Slice(event.stream, words(action), event.stream, event.start_s, event.end_s, told)


def _parts(plan: Plan, action: Action, event: Event) -> Iterator[Slice]:
    pieces = plan.stages[action.stage].inside
    for part in play_inside(pieces, action, event.start_s, event.end_s):
        piece, times = pieces[part.piece], (part.start_s, part.end_s)
        of = piece.of if piece.count == 1 else f"{piece.of} and {piece.count - 1} more"
        if part.lane == COMPUTE:
            name = of or "top of the model" if piece.is_compute else f"{piece.kind} {of}"
            yield Slice(event.stream, name, "compute", *times, is_inside=True)
        elif part.lane == WAIT and event.stream == "compute":
            yield Slice(event.stream, f"wait for {piece.kind} {of}", "wait", *times, is_inside=True)
        elif part.lane != WAIT:
            args = {"num_bytes": piece.num_bytes, "values": piece.count, "price_us": piece.time_s * 1e6}
            yield Slice(f"communication {part.lane}", f"{piece.kind} {of}", piece.phase, *times, args)


def about(plan: Plan) -> dict[str, str]:
    """What a trace says of its plan."""
    return {"model": plan.model, "mesh": str(plan.grid), "machine": plan.machine, "config": plan.config or "automatic"}
