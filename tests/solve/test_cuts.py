"""Where a pipeline may be cut: evenly, and for few messages."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.cost.machine import LinkProfile
from autopar.solve import cuts
from autopar.solve.cuts import cuts_by_time


def costs(seconds: Sequence[float], crossing: Sequence[float], once_s: Sequence[float] = ()) -> Any:
    """Of ops that take so long, with so many bytes after each, and so long for what is done once a step."""
    order = [f"op{i}" for i in range(len(seconds))]
    return SimpleNamespace(
        order=order,
        crossing_bytes=lambda: np.array([*crossing, 0.0]),
        time_s=dict(zip(order, seconds, strict=True)).__getitem__,
        once_s=lambda: np.array(once_s or [0.0] * len(order)),
    )


@pytest.fixture(autouse=True)
def _all_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "_is_trained", lambda node: True)


def sizes(found: Sequence[dict[Any, int]]) -> list[list[int]]:
    """Ops of each stage, of every cut."""
    return [[list(cut.values()).count(stage) for stage in range(max(cut.values()) + 1)] for cut in found]


SECONDS, CROSSING = (1.0, 1.0, 1.0, 1.0), (0.1, 0.5, 0.1)
"""Even in the middle, where five times as much crosses."""


def test_the_first_is_the_most_even() -> None:
    assert sizes(cuts_by_time([costs(SECONDS, CROSSING)], 2, [LinkProfile(0.0, 1.0)]))[0] == [2, 2]


def test_others_send_less_the_longer_stages_may_be() -> None:
    assert sizes(cuts_by_time([costs(SECONDS, CROSSING)], 2, [LinkProfile(0.0, 1.0)])) == [[2, 2], [1, 3]]
    seconds, crossing = [1.0] * 8, [0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1]
    assert [4, 4] in (found := sizes(cuts_by_time([costs(seconds, crossing)], 2, [LinkProfile(0.0, 1.0)])))
    assert [sizes[0] for sizes in found] == [4, 3, 2, 1]  # at 1, 1.25, 1.5 and 1.75 of the most even


def test_a_cut_stands_there_once() -> None:
    """Nothing is sent less by stages that are longer."""
    assert sizes(cuts_by_time([costs(SECONDS, (0.5, 0.1, 0.5))], 2, [LinkProfile(0.0, 1.0)])) == [[2, 2]]


def test_of_cuts_that_send_alike_there_is_the_most_even_one_and_the_earliest() -> None:
    """The last op takes as long as three others, so that no cut has a shorter longest stage."""
    seconds = (*[1.0] * 6, 3.0)
    assert sizes(cuts_by_time([costs(seconds, [0.1] * 6)], 4, [LinkProfile(0.0, 1.0)]))[:2] == [[2, 2, 2, 1], [1, 2, 3, 1]]
    assert sizes(cuts_by_time([costs(seconds, [0.0] * 6)], 4, []))[0] == [2, 2, 2, 1]
    sent = [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]  # to send less is more than to be even
    assert sizes(cuts_by_time([costs(seconds, sent)], 4, [LinkProfile(0.0, 1.0)]))[0] in ([1, 2, 3, 1], [1, 3, 2, 1])


def test_of_what_is_done_once_a_step_stages_have_as_much() -> None:
    """The first op has as much of it as two others take; for who hides it the cut without it is there too."""
    even = [costs(SECONDS, (0.5, 0.1, 0.5), (2.0, 0.0, 0.0, 0.0))]
    assert sizes(cuts_by_time(even, 2, [LinkProfile(0.0, 1.0)])) == [[2, 2], [1, 3]]


def test_a_faster_device_takes_more() -> None:
    """Six ops of 1 s, or of half a second on the second device: 2 s each."""
    slow, fast = (costs([second] * 6, [0.0] * 5) for second in (1.0, 0.5))
    assert sizes(cuts_by_time([slow, fast], 2, [LinkProfile(0.0, 1.0)]))[0] == [2, 4]
    assert sizes(cuts_by_time([fast, slow], 2, [LinkProfile(0.0, 1.0)]))[0] == [4, 2]
    assert sizes(cuts_by_time([fast, slow], 4, [LinkProfile(0.0, 1.0)]))[0] == [2, 1, 2, 1]  # two stages each
