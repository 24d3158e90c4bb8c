"""Where a pipeline is cut: evenly where every rank has its own device, for few messages where they share cores."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.cost.machine import LinkProfile
from autopar.solve import cuts
from autopar.solve.cuts import cut_by_time


def costs(seconds: Sequence[float], crossing: Sequence[float], microbatches: int = 8) -> Any:
    """Of ops that take so long, with so many bytes after each."""
    order = [f"op{i}" for i in range(len(seconds))]
    return SimpleNamespace(
        order=order,
        crossing_bytes=lambda: np.array([*crossing, 0.0]),
        time_s=dict(zip(order, seconds, strict=True)).__getitem__,
        prices=SimpleNamespace(problem=SimpleNamespace(microbatches=microbatches)),
    )


@pytest.fixture(autouse=True)
def _all_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "_is_trained", lambda node: True)


def sizes(found: dict[Any, int]) -> list[int]:
    """Ops of each stage."""
    return [list(found.values()).count(stage) for stage in range(max(found.values()) + 1)]


SECONDS, CROSSING = (1.0, 1.0, 1.0, 1.0), (0.1, 0.5, 0.1)
"""Even in the middle, where five times as much crosses."""


def test_even_where_each_has_a_device() -> None:
    assert sizes(cut_by_time([costs(SECONDS, CROSSING)], 2, [LinkProfile(0.0, 1.0)])) == [2, 2]


def test_of_cuts_that_send_alike_the_most_even_is_taken() -> None:
    """The last op takes as long as three others, so that no cut has a shorter longest stage."""
    assert sizes(cut_by_time([costs((*[1.0] * 6, 3.0), [0.1] * 6)], 4, [LinkProfile(0.0, 1.0)])) == [2, 2, 2, 1]
    assert sizes(cut_by_time([costs((*[1.0] * 6, 3.0), [0.0] * 6)], 4, [])) == [2, 2, 2, 1]
    assert sizes(cut_by_time([costs((*[1.0] * 6, 3.0), [0.1] * 6)], 4, [LinkProfile(0.0, 1.0)], is_even=False)) == [1, 2, 3, 1]
    sent = [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]  # to send less is more than to be even
    assert sizes(cut_by_time([costs((*[1.0] * 6, 3.0), sent)], 4, [LinkProfile(0.0, 1.0)])) in ([1, 2, 3, 1], [1, 3, 2, 1])


def test_a_slow_message_sets_the_pace() -> None:
    assert sizes(cut_by_time([costs(SECONDS, (0.1, 5.0, 0.1))], 2, [LinkProfile(0.0, 1.0)])) == [1, 3]


def test_a_faster_device_takes_more() -> None:
    """Six ops of 1 s, or of half a second on the second device: 2 s each."""
    slow, fast = (costs([second] * 6, [0.0] * 5) for second in (1.0, 0.5))
    assert sizes(cut_by_time([slow, fast], 2, [LinkProfile(0.0, 1.0)])) == [2, 4]
    assert sizes(cut_by_time([fast, slow], 2, [LinkProfile(0.0, 1.0)])) == [4, 2]
    assert sizes(cut_by_time([fast, slow], 4, [LinkProfile(0.0, 1.0)])) == [2, 1, 2, 1]  # two stages each


def test_ranks_that_share_cores_need_not_be_even() -> None:
    """Alone the longer stage runs twice as fast, so that only what is sent differs."""
    assert sizes(cut_by_time([costs(SECONDS, CROSSING)], 2, [LinkProfile(0.0, 1.0, overlap=1.0)], sharing=2.0)) == [1, 3]


def test_messages_take_of_cores_that_are_shared() -> None:
    """Sharing somewhat, the even cut is faster when messages cost no core, and slower when they do."""
    cuts = {
        overlap: sizes(cut_by_time([costs(SECONDS, (0.02, 0.3, 0.02), 32)], 2, [LinkProfile(0.0, 1.0, overlap=overlap)], sharing=1.4))
        for overlap in (0.0, 1.0)
    }
    assert cuts == {1.0: [2, 2], 0.0: [1, 3]}
