"""How parameters are stored: whole, sharded as they are used, or as a ZeRO shard that is gathered for use.

On one mesh axis a parameter is *held* as a `Placement` (used as stored) or `Stored` at a ZeRO level:

| level | stored | gathered copy lives | gradient                                             |
|-------|--------|---------------------|------------------------------------------------------|
| R     | whole  | -                   | whole, all-reduced (DDP)                             |
| 1     | shard  | for the step        | whole until the backward ends, then reduce-scattered |
| 2     | shard  | for the step        | reduce-scattered as soon as it is there              |
| 3     | shard  | for each use        | reduce-scattered as soon as it is there              |

At level 2 each of several micro-batches has a copy of its own, from its forward to its backward.

The stored shard is the optimizer's parameter, always (ZeRO: Rajbhandari et al., SC 2020). Of several ZeRO axes the outermost, over the
slowest link, is the minor one: it is gathered first, while the buffer is still split by the others (hierarchical gathering, as in
ZeRO++: Wang et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Atoms, Layout, Placement, shard
from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Stored as a shard and gathered for use: ZeRO of ``level`` 1, 2 or 3. Prints as ``Z3``. One object for each, as of `Placement`."""

    level: int
    _all: ClassVar[dict[int, Stored]] = {}

    def __new__(cls, level: int) -> Stored:
        return cls._all.get(level) or cls._all.setdefault(level, object.__new__(cls))

    def __reduce__(self) -> tuple[type[Stored], tuple[int]]:
        return Stored, (self.level,)

    def __str__(self) -> str:
        return f"Z{self.level}"


Held = Placement | Stored


def parse_held(text: str) -> Held:
    return Stored(int(text[1:])) if text.startswith("Z") else Placement.parse(text)


def ways_to_hold(atoms: Atoms, size: int) -> list[Held]:
    """How a parameter of these factors may be held on an axis of a size: whole, sharded on a factor that it divides, or as a ZeRO shard."""
    places = ((shard(dim, atom), many) for dim, sizes in enumerate(atoms) for atom, many in enumerate(sizes))
    sharded = [place for place, many in places if size > 1 and many > 1 and many % size == 0]
    return [REPLICATED, *sharded, *(map(Stored, (1, 2, 3)) if sharded else ())]


def use_layout(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout:
    """How the parameter lies once its ZeRO axes are gathered."""
    return Layout(mesh, atoms, tuple(h if isinstance(h, Placement) else REPLICATED for h in held))


@lru_cache(maxsize=1 << 16)
def has_room(mesh: Mesh, atoms: Atoms, held: tuple[Held, ...]) -> bool:
    """Whether a tensor of these factors can be stored so."""
    return _store(mesh, atoms, held) is not None


def storage_layout(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout:
    """How the parameter is stored: its use shards first, then each ZeRO axis on the first atom that it divides, minor to the others."""
    layout = _store(mesh, atoms, held)
    if layout is None:
        text = " ".join(map(str, held))
        raise PlanError(f"a tensor of factors {atoms} cannot be stored as [{text}] on mesh ({mesh}): no factor has room")
    return layout


def split_factors(layout: Layout) -> tuple[int, ...]:
    """For each mesh axis, the size of what lies before its split in what earlier axes left of the dim; 1 for a plain shard, 0 for none.

    Torch applies placements in mesh order: ``Shard(dim)`` where this is 1, ``_StridedShard(dim, split_factor)`` where it is more.
    """
    factors = []
    for axis, placement in enumerate(layout.placements):
        before = int(placement.is_sharded)
        for piece in layout.pieces(placement.dim) if placement.is_sharded else ():
            if piece.axis == axis:
                break
            before *= 1 if piece.axis is not None and piece.axis < axis else piece.size
        factors.append(before)
    return tuple(factors)


def torch_can_hold(layout: Layout) -> bool:
    """Whether a DTensor of torch gathers this layout rightly.

    Where a later axis shards the same dim, torch reads a strided shard as one that was split after it (FSDP after TP), so that its
    split factor must be the number of those later shards (seen with torch 2.13: others raise, or gather in wrong order).
    """
    factors = split_factors(layout)
    for axis, placement in enumerate(layout.placements):
        later = [
            other for other in range(axis + 1, len(factors)) if factors[other] and layout.placements[other].dim == placement.dim
        ]
        if factors[axis] > 1 and later:
            shards = math.prod(layout.mesh.sizes[other] for other in later)
            if factors[axis] != shards or any(factors[other] != 1 for other in later):
                return False
    return True


def _store(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout | None:
    zero_axes = [axis for axis, h in enumerate(held) if isinstance(h, Stored)]
    order = (*(axis for axis in range(len(held)) if axis not in zero_axes), *reversed(zero_axes))
    layout = Layout(mesh, atoms, use_layout(mesh, atoms, held).placements, order)
    for axis in zero_axes:
        spots = (
            layout.with_placement(axis, shard(dim, atom))
            for dim, sizes in enumerate(atoms)
            for atom, size in enumerate(sizes)
            if size % (layout.shards(dim, atom) * mesh.sizes[axis]) == 0
        )
        found = next((spot for spot in spots if torch_can_hold(spot)), None)
        if found is None:
            return None
        layout = found
    return layout if torch_can_hold(layout) else None
