"""What a recorder has collected -> spans and events in seconds."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple

from autopar.measured import COMPUTE, Communication, Recording, Span
from autopar.runtime.marks import What
from autopar.runtime.recorder import Recorder, Run, Seen
from autopar.runtime.watch import Moment


def resolve(recorder: Recorder, rank: int) -> Recording:
    """The recording of a rank. A collective that nobody has waited for, and that tells no end, is left out.

    Args:
        recorder: which is closed.
        rank: of it.
    """
    origin_s = recorder.clock.seconds(recorder.steps[0][0]) if recorder.steps else 0.0

    def seconds(moment: Moment) -> float:
        return recorder.clock.seconds(moment) - origin_s

    spans = []
    for timed in recorder.timed:
        step, stage, microbatch = astuple(timed.where)
        spans.append(Span(step, timed.name, timed.phase, seconds(timed.begin), seconds(timed.end), stage, microbatch))
    for run in recorder.runs:
        spans += _spans(run, seconds)
    spans.sort(key=lambda span: span.start_s)
    _match_waits(recorder.runs)
    computed = [span for span in spans if span.phase in COMPUTE]
    begins = [span.start_s for span in computed]
    events = []
    for seen, start_s, end_s in _timed(recorder.seen, seconds):
        events.append(
            Communication(
                step=seen.where.step,
                kind=seen.kind,
                axis=seen.axis,
                phase=seen.phase,
                values=seen.values,
                num_bytes=seen.flight.num_bytes,
                dtype=str(seen.flight.dtype).removeprefix("torch."),
                start_s=start_s,
                end_s=end_s,
                wait_s=sum(seconds(end) - seconds(begin) for begin, end in seen.flight.waits),
                overlapped=_beside(computed, begins, start_s, end_s),
                stage=seen.where.stage,
                microbatch=seen.where.microbatch,
            )
        )
    events.sort(key=lambda event: event.start_s)
    steps = tuple((seconds(begin), seconds(end)) for begin, end in recorder.steps)
    return Recording(rank, origin_s, steps, tuple(spans), tuple(events), tuple(map(len, recorder.plans)))


def waits_s(recorder: Recorder) -> tuple[float, float]:
    """Seconds in which the rank waited for collectives, and for other stages: what is ``wait`` and ``idle`` in a recording."""
    seconds = recorder.clock.seconds
    found = {"wait": 0.0, "idle": 0.0}
    for timed in recorder.timed:
        if timed.phase in found:
            found[timed.phase] += seconds(timed.end) - seconds(timed.begin)
    for run in recorder.runs:
        times = [seconds(moment) for moment in run.marks.times]
        for region, begin_s, end_s in zip(run.track.regions, times, times[1:], strict=False):
            if region.what is not What.COMPUTE:
                found["wait"] += end_s - begin_s
    return found["wait"], found["idle"]


def _spans(run: Run, seconds: Callable[[Moment], float]) -> Iterator[Span]:
    times = [seconds(moment) for moment in run.marks.times]
    for region, begin_s, end_s in zip(run.track.regions, times, times[1:], strict=False):  # one that failed has fewer times
        name = ", ".join(region.values)
        if region.what is What.COMPUTE:
            yield Span(run.where.step, name, region.phase, begin_s, end_s, run.where.stage, run.where.microbatch)
        else:
            name = f"start {region.kind} of {name}" if region.what is What.START else f"wait for {name}"
            yield Span(run.where.step, name, "wait", begin_s, end_s, run.where.stage, run.where.microbatch)


def _match_waits(runs: Sequence[Run]) -> None:
    """Tell every collective when it was waited for: in its own graph, or in a later one of the stage, by the value that moves."""
    pending: dict[tuple[int, str], deque[Seen]] = defaultdict(deque)
    for run in runs:
        regions, times = run.track.regions, run.marks.times
        inside = {region.started for region in regions if region.what is What.WAIT}
        for i, seen in run.flights.items():
            if i not in inside:
                for value in seen.values:
                    pending[run.where.stage, value].append(seen)
        for i, region in enumerate(regions[: len(times) - 1]):
            if region.what is not What.WAIT:
                continue
            if region.started is not None:
                waited = run.flights.get(region.started)
            else:
                waiting = pending[run.where.stage, region.values[0]] if region.values else deque()
                waited = waiting.popleft() if waiting else None
            if waited is not None:
                waited.flight.waits.append((times[i], times[i + 1]))


def _timed(all_seen: Sequence[Seen], seconds: Callable[[Moment], float]) -> Iterator[tuple[Seen, float, float]]:
    """When each ran: from when a lane of its group was free."""
    free: dict[int, list[float]] = {}
    for seen in all_seen:
        flight = seen.flight
        if flight.ended is None and not flight.waits:
            continue
        end_s = seconds(flight.waits[-1][1] if flight.ended is None else flight.ended)
        lanes = free.setdefault(id(flight.group), [float("-inf")] * flight.lanes)
        start_s = max(seconds(flight.issued), heapq.heappop(lanes))
        heapq.heappush(lanes, end_s)
        yield seen, min(start_s, end_s), end_s


def _beside(computed: Sequence[Span], begins: Sequence[float], start_s: float, end_s: float) -> tuple[tuple[str, float], ...]:
    """What was computed from one second to another, most first."""
    total: Counter[str] = Counter()
    first = max(bisect_left(begins, start_s) - 1, 0)
    for span in computed[first : bisect_left(begins, end_s)]:
        both_s = min(span.end_s, end_s) - max(span.start_s, start_s)
        if both_s > 0:
            total[f"{span.name} {span.phase}"] += both_s  # type: ignore[assignment]
    return tuple(total.most_common())
