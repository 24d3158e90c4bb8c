"""Recorded steps as text, beside what the plan predicted, and as a trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.measured import Communication, Measured, Profiled, Recording, Span
from autopar.plan import Pipeline, Plan, StagePlan
from autopar.show.measured import begin_of, measured_data, recorded_processes, step_of
from autopar.show.record import compare_collectives, compare_phases, log_text, record_text
from autopar.show.trace import trace_json
from tests.show.plans import small_plan

GATHER = Communication(0, "all_gather", "dp", "gather", ("h.0.attn.c_attn.weight",), 7 * 2**20, "float32", 1.0, 1.5, 0.25)


def plan() -> Plan:
    """Two equal blocks, whose one stage computes 2 s forward and 4 s backward, and waits for 0.5 s of each."""
    times = dict.fromkeys(StagePlan.__dataclass_fields__, 0.0) | {"forward_s": 2.5, "backward_s": 4.5, "forward_comm_s": 0.5}
    stage = StagePlan(**times | {"backward_comm_s": 0.5, "update_s": 0.125, "memory_bytes": {}, "inside": ()})  # type: ignore[arg-type]
    made = small_plan(2)
    return replace(made, stages=(stage,), prediction=replace(made.prediction, step_time_s=8.0, exposed_comm_s=1.0))


def recording() -> Recording:
    """Two steps of 10 s, the second with twice the wait of the first."""
    spans = []
    for step in (0, 1):
        begin = 10.0 * step
        ends = [("forward", 3.0), ("wait", 3.5 + step / 2), ("backward", 8.0), ("update", 9.0)]
        for phase, end in ends:
            spans.append(Span(step, f"h.{step}", phase, begin, 10 * step + end))
            begin = 10 * step + end
    other = replace(GATHER, values=("h.1.attn.c_attn.weight",), start_s=1.5, end_s=1.75)
    events = [GATHER, other, replace(GATHER, step=1, start_s=11.0, end_s=11.25, overlapped=(("h.1 forward", 0.25),))]
    return Recording(3, 100.0, ((0.0, 10.0), (10.0, 20.0)), tuple(spans), tuple(events))


def test_phases_stand_beside_what_was_predicted_with_the_largest_surprise_first() -> None:
    rows = {row.name: (row.predicted_s, row.measured_s) for row in compare_phases(recording(), plan())}
    assert rows == {
        "exposed communication": (1.0, 0.5),
        "forward": (2.0, 3.0),
        "backward": (4.0, 4.5),
        "update": (0.125, 1.0),
        "other": (0.0, 1.0),
        "step": (8.0, 10.0),
    }  # of the step of median length, so that they add up to it
    *phases, step = compare_phases(recording(), plan())
    assert [abs(row.surprise_s) for row in phases] == sorted((abs(row.surprise_s) for row in phases), reverse=True)
    assert step.name == "step"


def test_collectives_of_equal_blocks_are_compared_together() -> None:
    (row,) = compare_collectives(recording(), plan())
    assert row.name == "all_gather dp gather h.*.attn.c_attn.weight"
    assert row.predicted_s == pytest.approx(2 * 2 * 1.5e-4)  # both blocks, forward and backward
    assert row.measured_s == pytest.approx((0.5 + 0.25 + 0.25) / 2)  # 0.75 s in the first step and 0.25 s in the second


def test_values_of_one_bucket_are_compared_together() -> None:
    row = small_plan(2).collectives[1]
    names = ("wte.weight", "h.0.ln.bias", "h.1.attn.c_attn.weight")
    reduced = [replace(row, kind="all_reduce", phase="backward", value=name, time_s=1.0, count=1) for name in names]
    seen = [
        replace(GATHER, kind="all_reduce", phase="reduce", values=names[:2]),
        replace(GATHER, kind="all_reduce", phase="reduce", values=names[1:], start_s=2.0, end_s=4.0),
    ]
    (bucket,) = compare_collectives(
        replace(recording(), steps=((0.0, 10.0),), events=tuple(seen)), replace(plan(), collectives=tuple(reduced))
    )
    assert bucket.name == "all_reduce dp reduce h.*.attn.c_attn.weight and 2 more"
    assert (bucket.predicted_s, bucket.measured_s) == (3.0, 2.5)


def test_a_log_tells_of_each_collective_what_it_ran_beside() -> None:
    header, _, first, *_, last = log_text(recording().events, plan(), begin_s=1.0).splitlines()
    assert " ".join(header.split()) == "start ms end ms for collective axis of bytes dtype waited ms hidden beside"
    assert " ".join(first.split()) == "0.00 500.00 gather all_gather dp h.0.attn.c_attn.weight 7 MiB float32 250.00 0.0% -"
    assert last.split()[-4] == "100.0%"
    assert last.split()[-3:] == ["h.1", "forward", "+0"]


def test_the_page_is_as_wide_as_a_terminal() -> None:
    text = record_text(recording(), plan())
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("rank 3, 2 steps: seconds of a step")
    assert "no steps" in record_text(replace(recording(), steps=(), spans=(), events=()), plan())


def test_a_trace_has_all_ranks_on_one_clock_and_rows_without_overlap() -> None:
    first = replace(recording(), rank=0, origin_s=98.0, events=(GATHER, replace(GATHER, start_s=1.25, end_s=2.0)))
    events = json.loads(trace_json(recorded_processes([first, recording()])))["traceEvents"]
    gathers = [event for event in events if event["ph"] == "X" and event["name"].startswith("all_gather")]
    assert [(event["pid"], event["ts"], event["dur"]) for event in gathers[:3]] == [
        (0, 1.0e6, 0.5e6),
        (0, 1.25e6, 0.75e6),
        (3, 3.0e6, 0.5e6),
    ]
    assert gathers[0]["tid"] != gathers[1]["tid"]
    assert len({event["tid"] for event in gathers[2:]}) == 1
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert rows == {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}


def test_a_trace_names_what_stages_do() -> None:
    stages = [(0.0, 1.0, "forward", 0, 1), (1.0, 1.5, "wait", 0, 1), (1.5, 2.0, "forward", 0, 1), (2.0, 2.5, "idle", 0, 1)]
    stages += [(2.5, 3.0, "forward", 2, 0), (3.0, 4.0, "forward", 2, 1), (4.0, 4.5, "wait", 2, 1), (4.5, 5.0, "backward", 2, 1)]
    spans = tuple(Span(0, "h.0", phase, begin, end, stage, microbatch) for begin, end, phase, stage, microbatch in stages)
    (process,) = recorded_processes([replace(recording(), spans=spans)])
    assert [(each.name, each.start_s, each.end_s) for each in process.slices if each.lane == "stages"] == [
        ("stage 0 forward 1", 0.0, 2.0),
        ("stage 2 forward 0", 2.5, 3.0),
        ("stage 2 forward 1", 3.0, 4.0),
        ("stage 2 backward 1", 4.5, 5.0),
    ]


def test_calls_that_accumulate_are_predicted_as_often_with_one_update() -> None:
    rows = {row.name: row.predicted_s for row in compare_phases(replace(recording(), calls=(3, 3)), plan())}
    assert rows == {
        "forward": 6.0,
        "backward": 12.0,
        "exposed communication": 3.0,
        "update": 0.125,
        "other": 0.0,
        "step": 3 * (8.0 - 0.125) + 0.125,
    }
    (row,) = compare_collectives(replace(recording(), calls=(3, 3)), plan())
    assert row.predicted_s == pytest.approx(3 * 2 * 2 * 1.5e-4)


def test_phases_of_a_stage_add_up_to_the_step() -> None:
    staged = replace(plan(), pipeline=Pipeline(degree=2, stages=2))
    *phases, step = compare_phases(recording(), replace(staged, stages=staged.stages * 2))
    assert {row.name: row.predicted_s for row in phases}["bubble"] == pytest.approx(8.0 - 2.0 - 4.0 - 1.0 - 0.125)
    assert sum(row.predicted_s for row in phases) == pytest.approx(step.predicted_s)


def test_some_steps_of_a_recording_are_a_recording() -> None:
    last = replace(recording(), calls=(1, 2)).only([1])
    assert (last.steps, last.calls) == (((10.0, 20.0),), (2,))
    assert {span.step for span in last.spans} == {event.step for event in last.events} == {0}
    assert len(last.events) == 1


def test_the_page_has_the_step_of_median_length_from_the_begin_of_its_first_rank() -> None:
    late = replace(recording(), rank=5, origin_s=100.5)
    longer = replace(recording(), steps=((0.0, 10.0), (10.0, 20.0), (20.0, 34.0)))
    assert step_of([longer]) == 0
    assert step_of([replace(longer, steps=((0.0, 9.0), (10.0, 30.0), (30.0, 44.0)))]) == 2
    assert begin_of([late, recording()], 1) == 110.0
    data = measured_data(plan(), [late, recording()])
    assert (data["step"], data["steps"], data["recorded"], data["end_s"]) == (0, 2, 2, 10.5)
    first, second = data["ranks"]
    assert [first["rank"], second["rank"]] == [3, 5]
    assert (first["step"], second["step"]) == ((0.0, 10.0), (0.5, 10.5))
    names = second["names"]
    spans = [(start_s, end_s, names[phase], names[name]) for start_s, end_s, _, _, phase, name in second["spans"]]
    assert spans[:2] == [(0.5, 3.5, "forward", "h.0"), (3.5, 4.0, "wait", "h.0")]
    (event, _) = second["events"]
    assert event[:4] == [1.5, 2.0, 0, 0]
    assert [names[i] for i in event[4:8]] == ["dp", "all_gather", "gather", "h.0.attn.c_attn.weight"]
    assert event[9:] == [7 * 2**20, 0.25, 0.0]
    assert first["phases"] == [(row.name, row.predicted_s, row.measured_s) for row in compare_phases(recording(), plan())]


def test_a_record_comes_back_from_its_file_as_it_was() -> None:
    measured = Measured("TinyGPT", "dp=2,tp=4", "0123", (recording(), replace(recording(), rank=4)))
    assert Measured.from_json(measured.to_json()) == measured


@pytest.mark.parametrize("text", ["no", "[]", "{}", '{"format": 0, "recordings": []}', '{"format": 1, "recordings": [{"rank": 0}]}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"not a (whole )?record"):
        Measured.from_json(text)


def test_ops_of_torch_stand_on_lanes_of_their_own_below_each_other() -> None:
    times = {"linear": (1.0, 2.0), "addmm": (1.25, 1.5), "relu": (2.0, 3.0)}
    ops = tuple(Profiled(name, "torch, thread 0", *begin_and_end) for name, begin_and_end in times.items())
    (process,) = recorded_processes([replace(recording(), profiled=ops, not_told=7)])
    assert process.name == "rank 3, without 7 short ops of the profiler"
    told = [(s.name, s.start_s, s.is_inside) for s in process.slices if s.category == "profiler"]
    assert told == [("linear", 1.0, False), ("addmm", 1.25, True), ("relu", 2.0, False)]
    events = json.loads(trace_json([process]))["traceEvents"]
    assert len({event["tid"] for event in events if event.get("cat") == "profiler"}) == 1
    told_of = [replace(recording(), profiled=ops, calls=(1, 1)).only([step]).profiled for step in (0, 1)]
    assert told_of == [ops, ()]
