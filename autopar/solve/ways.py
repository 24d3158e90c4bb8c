"""How an edge may go on one axis of a mesh: by what its source and its target do there, whatever it takes.

    p, split -> q, c      moves    bytes of the whole value / (split * c)

`p` as its source holds the value, `q` as its target wants it, `c` the shards on the other axes as the target wants them, `split` the
parts in which other ZeRO axes still hold a parameter. Where they do, `c` are the shards as the source holds it, since slices come last
(`passes.reshard`). An output of the model goes to all ranks step by step, in `split` parts at each. So no product of whole layouts is
ever written down. With micro-batches a way also tells whether it is gone for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD, Placement
from autopar.rules.registry import TensorSpec
from autopar.storage import Held, Stored
from autopar.transitions import transition


class Way(NamedTuple):
    """How an edge goes on one axis.

    Args:
        held: from.
        split: parts in which other ZeRO axes still hold the parameter while this axis moves; of an output all its parts.
        wanted: to.
        shards: on the other axes, as the target wants the value.
        is_gathered: whether every micro-batch gathers the parameter: one axis holds it at ZeRO-2 or -3.
        own: shards on the other axes, as a parameter is held that ZeRO axes store; 0 for all else.
    """

    held: Held
    split: int
    wanted: Placement
    shards: int
    is_gathered: bool = False
    own: int = 0

    @property
    def parts(self) -> int:
        """The whole value over what this axis moves."""
        if self.own and self.wanted.is_sharded:
            return self.shards
        return self.split * (self.own or self.shards)

    def is_each(self, parameter: TensorSpec) -> bool:
        """Whether a parameter goes it for every micro-batch: on all axes if it is gathered for each, but for the sum over replicas of a
        shard, which is taken once a step if it is taken in the dtype that gradients add up in (`passes.prepare`)."""
        is_shared = self.held == REPLICATED and self.wanted == REPLICATED_PARTIAL_GRAD
        return self.is_gathered and not (is_shared and parameter.is_reduced_as_stored)

    @property
    def moved(self) -> Moved:
        return Moved(self.held, self.wanted, self.parts)


class Moved(NamedTuple):
    """What going a way once depends on beside the value; ``parts`` are those of the way."""

    held: Held
    wanted: Placement
    parts: int


H = TypeVar("H", Placement, Held)
Behind = tuple[int, bool, int]
"""``split``, ``is_gathered`` and ``own`` of a `Way`."""
P = TypeVar("P", int, Behind)
Sides = dict[tuple[H, P], list[int]]
"""Variants that look alike to an edge on an axis: by how they hold or want its value, and by what else a `Way` has of that side."""
Sources = Sides[Held, Behind]
Targets = Sides[Placement, int]


def sides_of(layouts: Sequence[tuple[H, ...]], parts: Callable[[tuple[H, ...]], Sequence[P]]) -> list[Sides[H, P]]:
    """For each axis the variants that look alike; ``layouts`` has one of them for each variant, ``parts`` tells of one for each axis."""
    alike: dict[tuple[H, ...], list[int]] = defaultdict(list)
    for v, layout in enumerate(layouts):
        alike[layout].append(v)
    found: list[Sides[H, P]] = [defaultdict(list) for _ in layouts[0]]
    for layout, variants in alike.items():
        for sides, own, part in zip(found, layout, parts(layout), strict=True):
            sides[own, part] += variants
    return found


@dataclass(frozen=True, slots=True)
class Network:
    """All ways between some sources and some targets.

    Args:
        ways: numbered in the order of sources, and for each of targets.
        moved: of each.
        from_sources, to_targets: for each source and each target the numbers of its ways.
    """

    ways: Mapping[Way, int]
    moved: tuple[Moved, ...]
    from_sources: tuple[tuple[int, ...], ...]
    to_targets: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1 << 12)
def network_of(
    sources: tuple[tuple[Held, Behind], ...],
    targets: tuple[tuple[Placement, int], ...],
    *,
    is_parameter: bool,
    needs_grad: bool,
    keeps_rows: bool = False,
    in_time: bool = False,
) -> Network:
    """The ways between sources and targets, which many edges and shapes have in common. Arguments are those of `has_way`."""
    ways: list[Way] = []
    from_sources: list[list[int]] = [[] for _ in sources]
    to_targets: list[list[int]] = [[] for _ in targets]
    for source, (held, (split, is_gathered, own)) in enumerate(sources):
        for target, (wanted, shards) in enumerate(targets):
            if has_way(held, wanted, is_parameter=is_parameter, needs_grad=needs_grad, keeps_rows=keeps_rows, in_time=in_time):
                from_sources[source].append(len(ways))
                to_targets[target].append(len(ways))
                ways.append(Way(held, split, wanted, shards, is_gathered, own))
    moved = tuple(way.moved for way in ways)
    return Network({way: number for number, way in enumerate(ways)}, moved, tuple(map(tuple, from_sources)), tuple(map(tuple, to_targets)))


def has_way(
    held: Held, wanted: Placement, *, is_parameter: bool, needs_grad: bool, keeps_rows: bool = False, in_time: bool = False
) -> bool:
    """Whether a value goes from one to the other: what is stored is gathered, a parameter is stored as its shards are used, and all else
    goes in one operation or not at all. Rows that each rank has sorted by itself stay where they are (`rules.sorted_rows`)."""
    if isinstance(held, Stored):
        return wanted.holds_whole
    if is_parameter and held.is_sharded:
        return held == wanted
    if keeps_rows and held != wanted and (held.dim == 0 or wanted.dim == 0):
        return False
    return transition(held, wanted, needs_grad=needs_grad, in_time=in_time) is not None
