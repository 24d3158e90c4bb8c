"""Do ranks that communicate agree? Every group on op, order, dtype and size; every send with its receive; and do all come to their end?

Groups follow from coordinates: on an axis of the mesh the ranks that differ there alone; on the pipeline axis the line of a rank. Messages
between two ranks are matched first in, first out, each direction by itself, as they are at run time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from autopar.dry.graph import Call
from autopar.dry.play import Trail
from autopar.plan import Plan

TrailOf = Callable[[int], Trail]
"""What a rank does; ranks that do the same have the same object."""


def disagreements(plan: Plan, trail_of: TrailOf, ranks: Sequence[int]) -> list[str]:
    """What does not agree among these ranks and those that they talk to."""
    found: dict[str, None] = {}
    seen: set[object] = set()
    for rank in ranks:
        groups = [(axis, group_of(plan, rank, axis)) for axis in plan.grid.names]
        for axis, members in groups:
            if axis == plan.pipeline.axis and plan.pipeline.degree > 1:
                continue
            first = trail_of(members[0])
            for other in members[1:]:
                pair = frozenset((first, trail_of(other))), axis
                if trail_of(other) is not first and pair not in seen:
                    seen.add(pair)
                    found.update(dict.fromkeys(_unlike(plan, axis, members, other, trail_of)))
        line = group_of(plan, rank, plan.pipeline.axis) if plan.pipeline.degree > 1 else (rank,)
        trails = tuple(map(trail_of, line))
        if trails not in seen:
            seen.add(trails)
            found.update(dict.fromkeys(_along_line(line, trails)))
    return list(found)


def group_of(plan: Plan, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from a rank on one axis of the grid alone, in its order."""
    grid = plan.grid
    at, coordinate = grid.index(axis), grid.coordinate(rank)
    return tuple(grid.rank((*coordinate[:at], i, *coordinate[at + 1 :])) for i in range(grid.sizes[at]))


def _unlike(plan: Plan, axis: str, members: Sequence[int], other: int, trail_of: TrailOf) -> Iterator[str]:
    """The first call in which two members of a group on a mesh axis differ."""
    first, names = members[0], plan.mesh.names
    ours, theirs = (tuple(call for call in trail_of(rank).calls if call.over in names) for rank in (first, other))
    for number, (a, b) in enumerate(zip_longest(*([c for c in own if c.over == axis] for own in (ours, theirs)))):
        if a != b:
            yield f"the group of ranks {list(members)} on axis {axis} does not agree on its call {number}: {_both(first, a, other, b)}"
            return
    place = next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
    if place is not None:
        which = f"ranks {first} and {other}, of a group on axis {axis}, call collectives of several axes in different order"
        yield f"{which}, from call {place} on: {_both(first, ours[place], other, theirs[place])}"


def _both(first: int, a: Call | None, other: int, b: Call | None) -> str:
    return f"rank {first} makes {a if a is not None else 'no more'}, rank {other} {b if b is not None else 'no more'}"


def _along_line(line: Sequence[int], trails: Sequence[Trail]) -> Iterator[str]:
    """Messages and collectives of the ranks of one pipeline."""
    calls = [[call for call in trail.calls if call.kind in ("send", "receive", "wait", "broadcast") or call.positions] for trail in trails]
    for a in range(len(line)):
        for b in range(len(line)):
            if a != b:
                sent = [call for call in calls[a] if call.kind == "send" and call.peer == b]
                received = [call for call in calls[b] if call.kind == "receive" and call.peer == a]
                yield from _unmatched(line[a], sent, line[b], received)
    for positions in dict.fromkeys(positions for own in calls for call in own for positions in _who(call, len(line))):
        own = [[call for call in calls[p] if positions in _who(call, len(line))] for p in positions]
        for place, theirs in zip(positions[1:], own[1:], strict=True):
            different = next(((a, b) for a, b in zip_longest(own[0], theirs) if a != b), None)
            if different is not None:
                members = [line[p] for p in positions]
                both = _both(line[positions[0]], different[0], line[place], different[1])
                yield f"ranks {members} of a pipeline do not agree: {both}"
    yield from _stuck(line, calls)


def _unmatched(sender: int, sent: Sequence[Call], receiver: int, received: Sequence[Call]) -> Iterator[str]:
    for number, (send, receive) in enumerate(zip_longest(sent, received)):
        where = f"message {number} from rank {sender} to rank {receiver}"
        if receive is None:
            yield f"{where}: {send} has no receive"
        elif send is None:
            yield f"{where}: {receive} has no send"
        elif (send.dtype, send.shapes) != (receive.dtype, receive.shapes):
            yield f"{where}: {send} meets {receive}"
        else:
            continue
        return


def _who(call: Call, degree: int) -> tuple[tuple[int, ...], ...]:
    """The positions that take part in a collective along the line; none for a message."""
    return () if call.kind in ("send", "receive", "wait") else (call.positions or tuple(range(degree)),)


def _stuck(line: Sequence[int], calls: Sequence[Sequence[Call]]) -> Iterator[str]:
    """Play the calls of a line: a send ends at once, a wait when its message has been sent, a collective when all are at theirs."""
    reached = [0] * len(line)
    sent: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()

    def head(position: int) -> Call | None:
        return calls[position][reached[position]] if reached[position] < len(calls[position]) else None

    is_moving = True
    while is_moving:
        is_moving = False
        for position in range(len(line)):
            while (call := head(position)) is not None:
                if call.kind == "send":
                    sent[position, call.peer] += 1
                elif call.kind == "wait":
                    if sent[call.peer, position] <= taken[call.peer, position]:
                        break
                    taken[call.peer, position] += 1
                elif call.kind != "receive":
                    (members,) = _who(call, len(line))
                    if any(head(member) != call for member in members):
                        break
                    for member in members:
                        reached[member] += member != position
                reached[position] += 1
                is_moving = True
    waits = [f"rank {rank} at {head(position)}" for position, rank in enumerate(line) if head(position) is not None]
    if waits:
        yield f"the ranks of a pipeline wait for each other forever: {'; '.join(waits)}"
