"""Bytes of a backward in two parts, I and W: of what `solve.split_lives` says is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.graph import Value
from autopar.layout import Placement
from autopar.solve.liveness import Interval, InTwo, Link
from autopar.solve.phases import OverTime

if TYPE_CHECKING:
    from autopar.solve.footprint import Footprint


class TwoParts(NamedTuple):
    """Bytes of a backward in two parts, I and W: ``left`` between them; at each op what there is of a micro-batch in I, and in W, with
    ``gathers`` and reductions in it."""

    left: float
    inputs: np.ndarray
    weights: np.ndarray
    gathers: np.ndarray

    def beside(self, kept: float, made: np.ndarray, is_own: np.ndarray) -> dict[str, float]:
        """What there is beside what is ``kept`` or left (`StageBytes`)."""
        return {
            "inputs": most_beside(kept, self.inputs[is_own]),
            "first_weights": most_beside(self.left, (self.weights + made)[is_own]),
            "later_weights": most_beside(self.left, self.weights[is_own]),
        }


_There = tuple[float, Interval | None, Interval | None]
"""Bytes, and the positions between which they are there in I, and in W."""


def in_two_parts(
    footprint: Footprint, stage: int, variants: Sequence[int], over_time: OverTime, is_own: np.ndarray
) -> TwoParts | None:
    """What there is of a micro-batch in I and W of a stage; None for backwards in one part."""
    two = footprint.liveness.in_two
    if two is None or not is_own.any():
        return None
    change, left = np.zeros((2, len(is_own) + 1)), 0.0
    for num_bytes, *there in _stays(footprint, two, stage, variants, is_own):
        left += num_bytes if None not in there else 0.0
        for row, interval in zip(change, there, strict=True):
            if interval is not None:
                row[interval[0]] += num_bytes
                row[interval[1] + 1] -= num_bytes
    is_late = np.isin(np.arange(len(is_own)), list(two.late))
    gathers = over_time.gathers * (~is_late, is_late)
    inputs, weights = np.cumsum(change, axis=1)[:, :-1] + gathers
    inputs = inputs + over_time.resharding * ~is_late
    weights = weights + (over_time.resharding + over_time.joining) * is_late
    for t, edge in ((t, edge) for t, edge in two.joined if is_own[t]):
        weights[t] += footprint.joined_bytes(edge, variants)
    return TwoParts(left, inputs, weights + over_time.reductions, gathers)


def _stays(
    footprint: Footprint, two: InTwo, stage: int, variants: Sequence[int], is_own: np.ndarray
) -> Iterator[_There]:
    live, cluster_of, own = footprint.liveness, footprint.problem.cluster_of, np.flatnonzero(is_own)
    begin, end = int(own[0]), int(own[-1])

    def kept(num_bytes: float, first: int, late: int | None) -> _There:
        """Of what the forward keeps, by its last reads in I and W."""
        return (num_bytes, (first, end), None) if late is None else (num_bytes, (begin, end), (late, end))

    wanted = _wanted_in_weights(footprint, two.weights[stage], variants)
    roots = {link.root for link, _ in wanted.values()}
    for link, position in wanted.values():
        yield _bytes_of(footprint, link.value, variants), (begin, link.last), (position, end)
    again: dict[tuple[Value, tuple[Placement, ...] | None], _There] = {}
    for stay in two.stays[stage]:
        if stay.root is not None:
            value = _shared(footprint, stay.value)
            made, layout = (footprint.layout_of(value, by, variants) for by in (None, stay.by))
            key = (stay.root, None) if layout == made else (stay.value, layout)
            num_bytes, inputs, weights = again.get(key, (0.0, None, None))
            num_bytes = max(num_bytes, footprint.bytes_in(value, layout))
            again[key] = num_bytes, _hull(inputs, stay.inputs), _hull(weights, stay.weights)
        elif not stay.is_gradient or stay.value not in roots:
            yield _bytes_of(footprint, stay.value, variants), stay.inputs, stay.weights
    yield from again.values()
    for entry, keepers in two.kept[stage]:
        places: dict[tuple[Placement, ...], list[int]] = {}
        for position, by in keepers:
            places.setdefault(footprint.layout_of(entry.value, by, variants), []).append(position)
        for layout, positions in places.items():
            late = next((position for position in positions if position in two.reads_late), None)
            yield kept(entry.times * footprint.kept_bytes(entry.value, layout), positions[0], late)
            if footprint.moves and (moved := entry.times * footprint.moved_bytes(entry.value, layout)):
                there = positions[0], min(positions[-1] + 1, end)  # as of `Liveness.fetched`
                yield moved, None if late is not None else there, None if late is None else there
    others = [(at, node, times, footprint.hidden) for at, node, times in live.hidden]
    others += [(use.first, use.parameter, use.times, footprint.copies) for use in live.parameters[stage]]
    for position, node, times, bytes_of in others:
        if live.stage_at[position] == stage:
            num_bytes = times * float(bytes_of[node][variants[cluster_of[node]]])
            yield kept(num_bytes, position, position if position in two.late else None)


def _wanted_in_weights(
    footprint: Footprint, weights: Sequence[tuple[int, Sequence[Link]]], variants: Sequence[int]
) -> dict[Value, tuple[Link, int]]:
    """The gradients that gradients of weights are made of, by the last value that has them, with the last op that wants each."""
    found: dict[Value, tuple[Link, int]] = {}
    for position, links in weights:
        own = next(link for link in links if link is links[-1] or (link.edge is not None and footprint.moves_back(link.edge, variants)))
        found.setdefault(own.value, (own, position))
    return found


def _bytes_of(footprint: Footprint, value: Value, variants: Sequence[int]) -> float:
    shared = _shared(footprint, value)
    return float(footprint.values[shared][variants[footprint.problem.cluster_of[shared.node]]])


def _shared(footprint: Footprint, value: Value) -> Value:
    return Value(footprint.problem.shared.get(value.node, value.node), value.index)


def most_beside(held: float, num_bytes: np.ndarray) -> float:
    """The most of bytes that are in part ``held`` anyway."""
    return float(num_bytes.max(initial=held)) - held


def _hull(a: Interval | None, b: Interval | None) -> Interval | None:
    """From the first of both to the last."""
    return (min(a[0], b[0]), max(a[1], b[1])) if a is not None and b is not None else a if b is None else b
