"""The inside of actions: it takes as long as its action, and nothing is in two places."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.piece import COMPUTE as COMPUTES
from autopar.piece import NO_AXIS, Piece
from autopar.schedule.actions import Action, Kind
from autopar.show.inside import COMPUTE, WAIT, Laid, lay, play_inside


def computed(time_s: float, of: str = "h.0") -> Piece:
    return Piece("forward", COMPUTES, NO_AXIS, time_s, 0.0, 0, 1, of)


def moved(waited_s: float = 0.0, hidden_s: float = 0.0, *, kind: str = "all_gather", phase: str = "forward", axis: str = "dp") -> Piece:
    return Piece(phase, kind, axis, waited_s, hidden_s, 4096, 1, "w")


TIMES = st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0])
PIECES = st.lists(
    st.one_of(
        st.builds(computed, TIMES),
        st.builds(moved, TIMES, TIMES, kind=st.sampled_from(["all_gather", "all_reduce"]), axis=st.sampled_from(["dp", "tp"])),
    ),
    max_size=12,
)


@given(PIECES)
@example(  # a piece begins where computation stands still, but for rounding
    [
        computed(3.0),
        *(moved(waited_s, hidden_s) for waited_s, hidden_s in ((0, 0.5), (1, 0.5), (3, 1), (0, 3), (0, 3), (0.5, 1))),
        computed(1.0),
        computed(3.0),
    ]
)
def test_an_action_is_as_long_as_its_price_and_nothing_overlaps(pieces: list[Piece]) -> None:
    laid = lay(pieces, Kind.FORWARD)
    computing = sum(piece.waited_s for piece in pieces if piece.is_compute)
    waited = sum(piece.waited_s for piece in pieces if not piece.is_compute)
    hidden = sum(piece.hidden_s for piece in pieces)
    assert max((part.end_s for part in laid), default=0.0) == pytest.approx(computing + waited + max(0.0, hidden - computing))
    for rows in ([part for part in laid if part.lane in (COMPUTE, WAIT)], [part for part in laid if part.lane in ("dp", "tp")]):
        parts = sorted(rows, key=lambda part: (part.start_s, part.end_s))
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(parts))
    for i, piece in enumerate(pieces):
        lasted = sum(part.end_s - part.start_s for part in laid if part.piece == i and part.lane != WAIT)
        assert lasted == pytest.approx(piece.time_s)


def test_a_gather_comes_one_ahead_and_a_reduction_after_its_gradient() -> None:
    forward = [moved(0, 1.0), computed(4.0), moved(0, 1.0), computed(4.0), moved(0, 1.0), computed(4.0)]
    assert [part.start_s for part in lay(forward, Kind.FORWARD) if part.lane == "dp"] == [0.0, 1.0, 4.0]
    backward = [Piece("backward", COMPUTES, NO_AXIS, 4.0, 0.0, 0, 1, "h.1"), moved(0, 1.0, kind="all_reduce", phase="backward")]
    backward += [Piece("backward", COMPUTES, NO_AXIS, 4.0, 0.0, 0, 1, "h.0"), moved(0, 1.0, kind="all_reduce", phase="backward")]
    assert [part.start_s for part in lay(backward, Kind.BACKWARD) if part.lane == "dp"] == [4.0, 7.0]


def test_what_is_hidden_stands_still_while_another_is_waited_for() -> None:
    pieces = [computed(1.0), moved(0, 3.0), computed(2.0), moved(5.0, kind="all_reduce", axis="tp"), computed(2.0)]
    assert [(part.start_s, part.end_s) for part in lay(pieces, Kind.FORWARD) if part.lane == "dp"] == [(0.0, 3.0)]
    late = [computed(1.0), moved(0, 1.0), computed(2.0), moved(0, 3.0), moved(5.0, axis="tp"), computed(2.0)]
    gathers = [part for part in lay(late, Kind.FORWARD) if part.lane == "dp"]
    assert [(part.piece, part.start_s, part.end_s) for part in gathers] == [(1, 0.0, 1.0), (3, 1.0, 3.0), (3, 8.0, 9.0)]


def test_an_action_that_is_slower_than_its_price_is_stretched() -> None:
    parts = play_inside([computed(1.0), moved(1.0), computed(2.0)], Action.parse("0F0"), 10.0, 18.0)
    assert [part for part in parts if part.lane != "dp"] == [Laid(0, COMPUTE, 10, 12), Laid(1, WAIT, 12, 14), Laid(2, COMPUTE, 14, 18)]


@given(PIECES)
def test_pieces_parse_back(pieces: list[Piece]) -> None:
    assert [Piece.parse(str(piece)) for piece in pieces] == pieces


def test_what_is_no_piece_is_refused() -> None:
    with pytest.raises(PlanError, match="not a piece of a step: 'forward compute'"):
        Piece.parse("forward compute")
