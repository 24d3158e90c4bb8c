from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.planner.document import Plan
from autopar.show.timeline import STREAMS, play, predicted_processes
from autopar.show.trace import trace_json

WAYS = {
    "plain": Manual(dp=2, tp=2),
    "zero1": Manual(dp=4, zero=1),
    "zero3": Manual(dp=4, zero=3),
    "accumulating": Manual(dp=4, microbatches=2, zero=2),
    "1f1b": Manual(pp=2, dp=2, microbatches=4, stages=("2",)),
    "zb-h1": Manual(pp=4, microbatches=8, schedule="zb-h1", stages=("1", "2", "3")),
    "interleaved": Manual(pp=2, tp=2, microbatches=4, schedule="interleaved:2"),
    "1f1b_zero1": Manual(pp=2, dp=2, zero=1, microbatches=4, stages=("2",)),
    "recompute": Manual(pp=2, dp=2, microbatches=4, recompute="full", stages=("2",)),
}


@cache
def planned(name: str) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        batch = (torch.empty(64, 64),)
    return autopar.plan(model, autopar.Cluster(1, 4, "a100-80gb"), batch, plan=WAYS[name], loss_fn=lambda y: y.square().mean())


@pytest.mark.parametrize("name", WAYS)
def test_the_step_played_from_the_document_is_the_one_predicted(name: str) -> None:
    plan = Plan.from_json(planned(name).to_json())
    timeline = play(plan)
    assert timeline.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    assert timeline.bubble_fraction == pytest.approx(plan.prediction.bubble_fraction, abs=1e-12)


@pytest.mark.parametrize("name, error", [("1f1b", 1e-3), ("recompute", 1e-3), ("zb-h1", 0.4), ("interleaved", 0.5)])
def test_memory_reaches_the_predicted_peak(name: str, error: float) -> None:
    """But for messages, which the simulator does not count, and which in a model of these sizes are as large as what is kept."""
    plan = planned(name)
    timeline = play(plan)
    assert timeline.peak_num_bytes == pytest.approx(plan.prediction.peak_memory_bytes, rel=error)


def test_a_plan_without_stages_is_one_forward_one_backward_and_the_update() -> None:
    timeline = play(planned("plain"))
    computed = [event for event in timeline.events if event.stream == "compute"]
    assert [str(event.action) for event in computed] == ["0F0", "0B0", "None"]


@pytest.mark.parametrize("name", ["plain", "zero1", "zero3"])
def test_without_stages_the_step_is_what_the_solver_has_minimised(name: str) -> None:
    decision = planned(name).decision
    assert decision is not None
    assert planned(name).prediction.step_time_s == pytest.approx(decision.solution.objective.total_s, rel=1e-12)


def test_a_trace_has_every_action_on_its_rank_and_stream_and_below_it_what_it_is_made_of() -> None:
    plan = planned("1f1b")
    timeline = play(plan)
    data = json.loads(trace_json(predicted_processes(plan)))
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    found = {(s["pid"], s["tid"], s["ts"], s["dur"]) for s in spans}
    expected = {(e.rank, STREAMS.index(e.stream), e.start_s * 1e6, (e.end_s - e.start_s) * 1e6) for e in timeline.events}
    assert found >= expected
    inside = [s for s in spans if (s["pid"], s["tid"], s["ts"], s["dur"]) not in expected]
    assert {s["name"] for s in inside if s["tid"] == STREAMS.index("compute")} >= {"0.0", "3.0"}
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert {named[s["pid"], s["tid"]] for s in inside} == {"compute", "collective", "communication dp", "communication pp"}
    shown = {"forward of micro-batch 0, stage 0", "send activations of micro-batch 3, stage 0", "broadcast outputs, stage 1", "update"}
    assert {s["name"] for s in spans} >= shown
    assert named[1, STREAMS.index("send")] == "send"
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
    assert names == ["predicted: rank 0 of the pipeline", "predicted: rank 1 of the pipeline"]
