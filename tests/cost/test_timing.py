"""Timing on CUDA, by stand-ins for its events: what a device would see."""

from __future__ import annotations

import pytest
import torch

from autopar.cost.timing import CYCLES_PER_S, REST_S, time_calls


class _Event:
    """Written down when it is recorded; two are 6 ms apart."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def record(self) -> None:
        self.seen.append("event")

    def synchronize(self) -> None:
        self.seen.append("wait")

    def elapsed_time(self, end: _Event) -> float:
        return 6.0


@pytest.mark.parametrize("ahead", [True, False])
def test_a_device_rests_while_calls_that_run_ahead_are_enqueued(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    seen, rests = list[str](), list[int]()
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event(seen))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def rest(cycles: int) -> None:
        seen.append("rest")
        rests.append(cycles)

    monkeypatch.setattr(torch.cuda, "_sleep", rest)
    timing = time_calls(lambda: seen.append("call"), torch.device("cuda"), calls=3, repeats=2, ahead=ahead)
    assert timing == (2e-3, 0.0)
    before = ["call"] * (4 if ahead else 1)  # to warm up, and to know how long it takes to enqueue
    assert seen == before + [*(["rest"] if ahead else []), "event", "call", "call", "call", "event", "wait"] * 2
    assert all(cycles >= REST_S * CYCLES_PER_S for cycles in rests)


def test_on_cpus_nothing_runs_ahead() -> None:
    calls = list[int]()
    assert time_calls(lambda: calls.append(1), torch.device("cpu"), calls=2, repeats=3, ahead=True).median_s > 0
    assert len(calls) == 1 + 2 * 3
