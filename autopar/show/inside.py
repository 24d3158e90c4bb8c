"""The inside of an action on a timeline: what a stage computes, what runs on which axis meanwhile, and what computation waits for.

Computation and what it waits for follow each other. What may lie beside computation follows each other too, on whatever axis, in the time
that is left: a gather no sooner than the gather before it is used, a reduction no sooner than its gradient is there, and none so late
that the rest would not be done in the end. That is what the price says (`solve.inter`): the whole is as long as

    computation + waits + max(0, what may be hidden - computation)

of which the last is shared among those that do not hide, and waited for where each is wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.piece import HOST, Piece
from autopar.plan import StagePlan
from autopar.schedule.actions import Action, Kind

COMPUTE, WAIT = "compute", "wait"
PHASES = {
    Kind.FORWARD: ("forward",),
    Kind.BACKWARD: ("backward", "weights"),
    Kind.INPUT: ("backward",),
    Kind.WEIGHT: ("weights",),
    Kind.GATHER: ("gather",),
    Kind.REDUCE: ("reduce",),
    Kind.OUTPUT: ("output",),
}
"""What the pieces of an action are of."""
ROUNDING = 1e-12
"""How far two sums of the same seconds in another order may be apart, as a part of all."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A part of a piece: when, from the begin of the action, and where: ``compute``, ``wait`` (computation stands still), or its axis."""

    piece: int
    lane: str
    start_s: float
    end_s: float


def lay(pieces: Sequence[Piece], kind: Kind) -> list[Laid]:
    """The parts of an action; ``piece`` of each is a position in ``pieces``, which are those of its stage."""
    phases = PHASES.get(kind, ())
    own = [(i, piece) for phase in phases for i, piece in enumerate(pieces) if piece.phase == phase]
    exposed = _exposed([piece for _, piece in own])
    laid, clock_s, free_s, used_s = list[Laid](), 0.0, 0.0, 0.0
    stops, queue = list[tuple[float, float]](), list[tuple[int, Piece, float]]()
    for i, piece in own:
        if piece.is_compute or (piece.is_local and not piece.hidden_s):
            laid.append(Laid(i, COMPUTE, clock_s, clock_s + piece.waited_s))
            clock_s += piece.waited_s
            if piece.is_compute:
                free_s += piece.waited_s
            else:
                stops.append((free_s, piece.waited_s))
            continue
        if piece.hidden_s:
            is_gather = piece.kind == "all_gather" or piece.phase == "forward"
            queue.append((i, piece, used_s if is_gather else free_s))
            if (wait_s := exposed * piece.hidden_s) > 0:
                laid.append(Laid(i, WAIT, clock_s, clock_s + wait_s))
                clock_s, free_s = clock_s + wait_s, free_s + wait_s
            used_s = free_s if is_gather else used_s
        if piece.waited_s:
            laid += [Laid(i, lane, clock_s, clock_s + piece.waited_s) for lane in (WAIT, piece.axis)]
            stops.append((free_s, piece.waited_s))
            clock_s += piece.waited_s
    return [*laid, *_poured(queue, free_s, stops)]


def exposed_of(stage: StagePlan, microbatches: int) -> dict[str, float]:
    """Seconds of a step that computation of a stage waits for each kind of communication; copies that hide under nothing are the host's."""
    found: defaultdict[str, float] = defaultdict(float)
    uncovered = 1 - stage.covered_s / stage.reduce_s if stage.reduce_s else 1.0
    for kind, times in ((Kind.FORWARD, microbatches), (Kind.BACKWARD, microbatches), (Kind.GATHER, 1.0), (Kind.REDUCE, uncovered)):
        own = [piece for piece in stage.inside if piece.phase in PHASES[kind]]
        exposed = _exposed(own)
        for piece in own:
            waited_s = piece.waited_s if piece.axis != HOST else 0.0
            if not piece.is_compute and (time_s := times * (waited_s + exposed * piece.hidden_s)):
                found[piece.kind] += time_s
    return found


def _exposed(pieces: Sequence[Piece]) -> float:
    """Part of what may be hidden that is not."""
    compute_s, hidden_s = sum(piece.waited_s for piece in pieces if piece.is_compute), sum(piece.hidden_s for piece in pieces)
    return max(0.0, hidden_s - compute_s) / hidden_s if hidden_s else 0.0


def _poured(queue: Sequence[tuple[int, Piece, float]], free_s: float, stops: Sequence[tuple[float, float]]) -> Iterator[Laid]:
    """What may be hidden, one after the other, in the free time; ``stops`` are where and for how long that time stands still."""
    left_s, end_s = sum(piece.hidden_s for _, piece, _ in queue), 0.0
    places, stopped = [at_s for at_s, _ in stops], [0.0, *accumulate(time_s for _, time_s in stops)]
    for i, piece, ready_s in queue:
        start_s = _nearby(max(end_s, min(ready_s, free_s - left_s)), places, ROUNDING * free_s)
        end_s, left_s = _nearby(start_s + piece.hidden_s, places, ROUNDING * free_s), left_s - piece.hidden_s
        cuts = [start_s, *dict.fromkeys(at_s for at_s in places if start_s < at_s < end_s), end_s]
        for begin_s, until_s in pairwise(cuts):
            late_s = stopped[bisect_left(places, until_s)]
            yield Laid(i, piece.axis, begin_s + late_s, until_s + late_s)


def _nearby(at_s: float, places: Sequence[float], within_s: float) -> float:
    """One of the places that is as good as here, or here."""
    i = bisect_left(places, at_s - within_s)
    return places[i] if i < len(places) and places[i] <= at_s + within_s else at_s


def play_inside(pieces: Sequence[Piece], action: Action, start_s: float, end_s: float) -> list[Laid]:
    """The parts of an action that was played from ``start_s`` to ``end_s``, which may be slower than its price where ranks share cores."""
    laid = lay(pieces, action.kind)
    length_s = max((part.end_s for part in laid), default=0.0)
    scale = (end_s - start_s) / length_s if length_s else 0.0
    return [Laid(part.piece, part.lane, start_s + scale * part.start_s, start_s + scale * part.end_s) for part in laid]
