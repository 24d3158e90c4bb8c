"""The simulated step of a plan, played again from the figures that the plan holds; also as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from autopar.cost.simulate import Event, StagePrice, Timeline, simulate
from autopar.plan import Plan
from autopar.schedule.actions import Action, Kind
from autopar.schedule.tables import forward_only, make_schedule

STREAMS = ("compute", "collective", "send", "receive")
"""Of a rank, in the order in which they are shown."""

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
}
_ONCE = (Kind.GATHER, Kind.REDUCE)


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
        core_s=s.core_s,
        live_num_bytes=s.kept_bytes,
        freed_num_bytes=s.kept_bytes - s.left_bytes,
        static_num_bytes=sum(s.memory_bytes.values()) - s.live * s.kept_bytes,
    )


def words(action: Action | None) -> str:
    """``forward of micro-batch 3, stage 1``"""
    if action is None:
        return "update"
    part = "" if action.kind in _ONCE else f" of micro-batch {action.microbatch}"
    return f"{_WORDS[action.kind]}{part}, stage {action.stage}"


def trace_json(plan: Plan) -> str:
    """The step in the Trace Event Format: a process for each rank of the pipeline, a thread for each stream, times in microseconds."""
    timeline = play(plan)
    events = [*_names(len(timeline.busy_s)), *map(_span, timeline.events)]
    for rank, memory in enumerate(timeline.memory_at):
        events += [{"ph": "C", "pid": rank, "name": "memory", "ts": at_s * 1e6, "args": {"bytes": num_bytes}} for at_s, num_bytes in memory]
    about = {"model": plan.model, "mesh": str(plan.grid), "machine": plan.machine, "config": plan.config or "automatic"}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _names(ranks: int) -> Iterator[Mapping[str, object]]:
    for rank in range(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} of the pipeline"}}
        for tid, stream in enumerate(STREAMS):
            yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": stream}}


def _span(event: Event) -> Mapping[str, object]:
    action = event.action
    told = {} if action is None else {"stage": action.stage} | ({} if action.kind in _ONCE else {"micro_batch": action.microbatch})
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": STREAMS.index(event.stream),
        "name": words(action),
        "cat": event.stream,
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": told,
    }
