"""What is recorded of real steps: every collective by name, when it ran and beside what, and nothing that changes them."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import PlanError
from autopar.measured import COMPUTE, Communication, Recording
from autopar.ops.collectives import group_name
from autopar.plan import Plan
from autopar.runtime import profiling as profiling_module
from autopar.runtime.clocks import clock_offset_s
from autopar.runtime.groups import host_group
from autopar.runtime.marks import Marks, mark
from autopar.runtime.profiling import MARK, Profiling
from autopar.runtime.recorder import Recorder, Seen, Timed, Where
from autopar.runtime.resolve import resolve, waits_s
from autopar.runtime.watch import Clock, Ends, Flight, HostClock, Watched
from autopar.show.record import compare_collectives
from tests import models
from tests.marks import few
from tests.pool import RankPool
from tests.show.test_page import data_of

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
LINK = LinkProfile(alpha_s=1e-6, bandwidth=1e9)
LATE_S = 0.3


def parallel(given: nn.Module, config: Manual) -> Any:
    profile = MachineProfile(DEVICE, (LINK,) * len(config.grid(4).sizes))
    return autopar.parallelize(given, 4, plan=config, profile=profile, compare_batches=0)


def record_steps(rank: int, config: Manual) -> tuple[bool, Recording, Plan]:
    """Whether recorded steps have the losses and gradients of others, and what was recorded of two."""
    given, batch = models.speaker(batch=4)
    model = parallel(given, config)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step() -> list[torch.Tensor]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        seen = [loss.detach(), *(p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor))]
        optimizer.zero_grad()
        return seen

    expected = step()
    with model.record() as record:
        seen = [step(), step()]
    seen.append(step())
    is_same = all(torch.equal(a, b) for other in seen for a, b in zip(other, expected, strict=True)) and len(expected) > 1
    return is_same, record.recording, Plan.from_json(model.plan.to_json())


def check(recording: Recording) -> None:
    """What holds of any recording of two steps."""
    assert len(recording.steps) == 2
    assert {event.step for event in recording.events} == {0, 1}
    assert all(event.num_bytes > 0 for event in recording.events)
    for event in recording.events:
        begin_s, end_s = recording.steps[event.step]
        assert begin_s <= event.start_s <= event.end_s <= end_s
        assert 0 <= event.hidden_s <= event.time_s + 1e-9
        assert event.wait_s >= 0
    spans = [span for span in recording.spans if span.phase in COMPUTE]
    assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    assert {span.phase for span in spans} == set(COMPUTE)


def moved(events: tuple[Communication, ...], phase: str) -> set[tuple[str, str, str]]:
    return {(event.kind, event.axis, value) for event in events for value in event.values if event.phase == phase}


def planned(plan: Plan, phase: str, *, of_parameters: bool) -> set[tuple[str, str, str]]:
    names = {entry.name for entry in plan.parameters}
    return {(c.kind, c.axis, c.value) for c in plan.collectives if c.phase == phase and (c.value in names) == of_parameters}


CONFIGS = [Manual(dp=2, tp=2, zero=1, microbatches=2), Manual(dp=4, zero=3), Manual(dp=4), Manual(dp=4, zero=3, replicas=2)]


@pytest.mark.slow
@pytest.mark.parametrize("config", few(1, CONFIGS), ids=str)
def test_every_collective_is_seen_by_name(ranks: RankPool, config: Manual) -> None:
    for is_same, recording, plan in ranks.run(record_steps, config):
        assert is_same
        check(recording)
        events, gathers = recording.events, planned(plan, "forward", of_parameters=True)
        assert moved(events, "reduce") == planned(plan, "backward", of_parameters=True) - gathers
        assert moved(events, "gather") == gathers
        assert planned(plan, "forward", of_parameters=False) <= moved(events, "forward")
        assert planned(plan, "backward", of_parameters=False) == moved(events, "backward")
        sizes = {entry.name: 4 * math.prod(entry.shape) for entry in plan.parameters}
        for event in events:
            if event.phase in ("gather", "reduce"):
                assert event.dtype == "float32"
                parts = config.zero_ranks if event.axis == "replica" else 1  # replicas reduce shards
                assert config.tp > 1 or event.num_bytes * parts == sum(sizes[value] for value in event.values)


def record_a_pipeline(rank: int) -> tuple[Recording, Plan]:
    return record_steps(rank, Manual(pp=2, dp=2, microbatches=2))[1:]


@pytest.mark.slow
def test_messages_between_stages_are_seen(ranks: RankPool) -> None:
    found, plans = zip(*ranks.run(record_a_pipeline), strict=True)
    for recording, plan in zip(found, plans, strict=True):
        check(recording)
        outputs = {(c.kind, c.axis, c.value) for c in plan.collectives if c.kind == "broadcast"}
        assert outputs == {each for each in moved(recording.events, "forward") if each[0] == "broadcast"}
        rows = [row for row in compare_collectives(recording, plan) if row.name.startswith("broadcast pp forward ")]
        assert len(rows) == len(outputs) > 0
        peers = [event for event in recording.events if event.axis.startswith("rank ")]
        assert {event.step for event in peers} == {0, 1}
        assert {(event.kind, event.microbatch) for event in peers} == {(kind, k) for kind in ("send", "receive") for k in (0, 1)}
        assert {span.microbatch for span in recording.spans if span.phase == "backward"} == {0, 1}
    first, last = found[0], found[-1]
    assert {(e.kind, e.phase, e.stage) for e in first.events if e.axis == "rank 2"} == {("send", "forward", 0), ("receive", "backward", 0)}
    assert {(e.kind, e.phase, e.stage) for e in last.events if e.axis == "rank 1"} == {("receive", "forward", 1), ("send", "backward", 1)}
    sent = [e.num_bytes for e in first.events if e.kind == "send"]
    assert sent == [e.num_bytes for e in found[2].events if e.kind == "receive"]


def record_with_torch(rank: int) -> tuple[Recording, bool]:
    """A recorded step, and whether the profiler is still at work after a record that an error has left."""
    given, batch = models.speaker(batch=4)
    model = parallel(given, Manual(pp=2, dp=2, microbatches=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for record in (model.record(), model.record(profiler=True)):
        with record:
            model(**batch).loss.backward()
            optimizer.step()
    with suppress(ZeroDivisionError), model.record(profiler=True):
        model(**batch).loss.backward()
        raise ZeroDivisionError
    return record.recording, torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_ops_of_torch_are_on_the_clock_of_the_record(ranks: RankPool) -> None:
    for rank, (recording, is_enabled) in enumerate(ranks.run(record_with_torch)):
        assert not is_enabled
        begin_s = recording.steps[0][0]
        assert all(begin_s <= op.start_s <= op.end_s for op in recording.profiled)
        assert {op.name for op in recording.profiled} >= {"aten::mm", f"stage {rank // 2} forward 1", f"stage {rank // 2} backward 0"}
        assert MARK not in {op.name for op in recording.profiled}
        late_s = []
        for op in recording.profiled:
            if op.name.startswith("stage"):
                _, _, phase, microbatch = op.name.split()
                own = [s for s in recording.spans if (s.phase, s.microbatch) == (phase, int(microbatch))]
                late_s.append(own[0].start_s - op.start_s)
        assert len(late_s) >= 4
        assert abs(median(late_s)) < 1e-3


def test_of_many_ops_the_longest_are_told_and_there_is_one_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    profiling = Profiling(torch.device("cpu"))
    begin_s = time.perf_counter()
    profiling.start()
    with pytest.raises(PlanError, match="at work already"):
        Profiling(torch.device("cpu")).start()
    with profiling.named("all of them"):
        for _ in range(4):
            torch.ones(3).add_(1)
    profiling.stop()
    steps = [(0.0, time.perf_counter() - begin_s)]
    every, left_out = profiling.profiled(begin_s, steps)
    assert len([op for op in every if op.name == "aten::add_"]) == 4
    assert left_out == 0
    monkeypatch.setattr(profiling_module, "MOST", 3)
    few_of_them, left_out = profiling.profiled(begin_s, steps)
    assert {*few_of_them} == {*sorted(every, key=lambda op: op.time_s)[-3:]}
    assert [op.start_s for op in few_of_them] == sorted(op.start_s for op in few_of_them)
    assert left_out == len(every) - 3
    assert profiling.profiled(begin_s, [(-2.0, -1.0)]) == ((), 0)


def record_and_leave(rank: int, folder: str) -> tuple[str, str, bool, float, float, str]:
    """Messages of misuse, whether all is as before, how far the clock is, the longest reduction if rank 1 is late, and the text."""
    given, batch = models.mlp(layers=1)
    model = parallel(given, Manual(dp=4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plain = dist.distributed_c10d._resolve_process_group(group_name("dp"))  # type: ignore[attr-defined, arg-type]
    with model.record() as record:
        with pytest.raises(PlanError) as twice, model.record():
            pass
        with pytest.raises(PlanError) as early:
            print(record.events)
        step()
        dist.barrier()
        time.sleep(LATE_S * (rank == 1))
        step()
    left = dist.distributed_c10d._resolve_process_group(group_name("dp"))  # type: ignore[attr-defined, arg-type]
    step()
    is_as_before = left is plain and not isinstance(left, Watched) and len(record.recording.steps) == 2
    for write, name in ((record.save_trace, "trace.json"), (record.save, "record.json"), (record.to_html, "page.html")):
        write(Path(folder, name))
    if rank == 0:
        model.plan.save(Path(folder, "plan.json"))
    offset_s = clock_offset_s(host_group("records"))
    longest_s = max(event.time_s for event in record.events if event.step == 1)
    return str(twice.value), str(early.value), is_as_before, offset_s, longest_s, f"{record}\n{record.log()}"


@pytest.mark.slow
def test_a_late_rank_is_seen_and_all_ranks_share_a_trace(ranks: RankPool, tmp_path: Path) -> None:
    for rank, (twice, early, is_as_before, offset_s, longest_s, text) in enumerate(ranks.run(record_and_leave, str(tmp_path))):
        assert "is being recorded already" in twice
        assert "nothing is recorded yet" in early
        assert is_as_before
        assert abs(offset_s) < LATE_S
        assert longest_s > LATE_S / 2 or rank == 1
        assert "exposed communication" in text
        assert "reduce all_reduce dp blocks.0" in " ".join(text.split())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {event["pid"]: event for event in events if event["name"] == "step 1" and event["ph"] == "X"}
    assert sorted(steps) == [0, 1, 2, 3]
    assert all(abs(event["ts"] + event["dur"] - steps[0]["ts"] - steps[0]["dur"]) < LATE_S * 1e6 for event in steps.values())
    assert steps[1]["ts"] - steps[0]["ts"] > LATE_S / 2 * 1e6
    assert {event["pid"] for event in events if event["name"].startswith("all_reduce ")} == {0, 1, 2, 3}
    plan, saved = autopar.Plan.load(tmp_path / "plan.json"), tmp_path / "record.json"
    plan.to_html(tmp_path / "again.html", record=saved)
    of_ranks, of_file = (data_of((tmp_path / name).read_text())["plans"][0] for name in ("page.html", "again.html"))
    for measured in (of_ranks.pop("measured"), of_file.pop("measured")):  # each on clocks that were compared anew
        assert [each["rank"] for each in measured["ranks"]] == [0, 1, 2, 3]
        assert all(each["spans"] and each["events"] for each in measured["ranks"])
    assert of_ranks == of_file
    plan.to_trace(tmp_path / "both.json", record=saved)
    names = [e["args"]["name"] for e in json.loads((tmp_path / "both.json").read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3", "predicted: rank 0 of the pipeline"]
    with pytest.raises(PlanError, match=r"graph hash is \w+, that of the plan is other"):
        autopar.Plan.of(replace(plan, graph_hash="other")).to_html(tmp_path / "again.html", record=saved)


def seen(issued: float, ended: float | None, *, group: object, waits: list[tuple[float, float]] | None = None) -> Seen:
    return Seen(Where(), "all_reduce", "dp", "reduce", ("w",), Flight(group, 2, 8, torch.float32, issued, ended, waits or []))


def test_a_collective_begins_when_its_group_is_free_for_it() -> None:
    recorder, group = Recorder(torch.device("cpu"), []), object()
    recorder.close()
    recorder.steps = [(0.0, 9.0)]
    recorder.seen = [seen(1, 4, group=group), seen(1, 3, group=group), seen(2, 6, group=group), seen(2, 5, group=object())]
    recorder.seen += [seen(5, None, group=group, waits=[(5.5, 7)]), seen(8, None, group=group)]
    recorder.timed = [Timed(Where(), "SGD", "update", 2.0, 3.5), Timed(Where(), "all", "idle", 3.5, 5.0)]
    found = [(event.start_s, event.end_s, event.wait_s, event.overlapped) for event in resolve(recorder, 0).events]
    update = "SGD update"
    assert found == [
        (1, 4, 0, ((update, 1.5),)),
        (1, 3, 0, ((update, 1.0),)),
        (2, 5, 0, ((update, 1.5),)),
        (3, 6, 0, ((update, 0.5),)),
        (5, 7, 1.5, ()),
    ]


class Ticks(HostClock):
    """A clock of the host that is one further with every look at it."""

    def __init__(self) -> None:
        self.ticks = 0

    def now(self) -> float:
        self.ticks += 1
        return self.ticks


class OnDevice:
    """Tells the time as a device's clock, which is not of the host."""

    def now(self) -> float:
        return 7.0

    def seconds(self, moment: float) -> float:
        return moment


class Started:
    """What a group gives for a collective: done when its future is; of some there is none."""

    def __init__(self, *, tells: bool = True) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        self._tells = tells

    def get_future(self) -> torch.futures.Future[None]:
        if not self._tells:
            raise RuntimeError("not implemented")
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()


@pytest.mark.parametrize("clock, told", [(Ticks(), (None, 1)), (OnDevice(), (7.0, 7.0))], ids=["cpu", "device"])
def test_the_end_of_a_flight_is_that_of_all_its_works(clock: Clock, told: tuple[float | None, float]) -> None:
    """A rank on CPUs looks for it; on a device the future tells."""
    ends, works, flight = Ends(clock), [Started(), Started()], Flight(object(), 1, 8, torch.float32, 0.0)
    assert ends.follow(flight, works)  # type: ignore[arg-type]
    assert not ends.follow(flight, [Started(tells=False)])  # type: ignore[list-item]
    works[1].future.set_result(None)
    ends.look()
    assert flight.ended is None
    works[0].future.set_result(None)
    assert flight.ended == told[0]
    ends.look()
    ends.look()
    assert flight.ended == told[1]


def test_a_rank_looks_for_ends_between_all_ops_of_a_graph() -> None:
    """Else what ends while a long module is computed would be told when that is done."""
    neg, looked = torch.ops.aten.neg.default, []

    class Looking(Ends):
        def look(self) -> None:
            looked.append(self)

    graph = fx.Graph()
    (value,) = [graph.placeholder("x")]
    for _ in range(3):
        value = graph.call_function(neg, (value,))
        value.meta["custom"] = {"of": "all.0"}
    graph.output([value])
    track = mark(fx.GraphModule(nn.Module(), graph), "forward", (), {"all.0": "all"})
    marks = Marks(Ticks(), Looking(Ticks()))
    (result,) = track.module([torch.ones(2)], marks)
    assert torch.equal(result, -torch.ones(2))
    assert [region.values for region in track.regions] == [("reshards",), ("all",)]
    names = [getattr(node.target, "__name__", node.target) for node in track.module.graph.nodes]
    assert names[-8:-1] == ["take", "neg", "look", "neg", "look", "neg", "take"]
    assert len(looked) == names.count("take") + names.count("look")


def test_waits_are_added_up_without_spans() -> None:
    recorder = Recorder(torch.device("cpu"), [])
    recorder.close()
    idle, norm = Timed(Where(), "rank 1", "idle", 1.0, 1.5), Timed(Where(), "norm", "clip", 2.0, 9.0)
    recorder.timed = [idle, norm, Timed(Where(), "loss", "wait", 3.0, 5.0)]
    assert waits_s(recorder) == (2.0, 0.5)
