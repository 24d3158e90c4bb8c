"""How parameters are stored: whole, sharded as they are used, or as a ZeRO shard that is gathered for use.

On one mesh axis a parameter is *held* as a `Placement` (used as stored) or `Stored` at a ZeRO level:

===== ============== =========================== ==========================================
level stored         gathered copy lives         gradient
===== ============== =========================== ==========================================
R     whole          -                           whole, all-reduced (DDP)
1     shard          for the step                whole until the backward ends, then reduce-scattered
2     shard          for the step                reduce-scattered as soon as it is there
3     shard          for each use                reduce-scattered as soon as it is there
===== ============== =========================== ==========================================

The stored shard is the optimizer's parameter, always (ZeRO: Rajbhandari et al., SC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Atoms, Layout, Placement, shard
from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored as a shard and gathered for use: ZeRO of ``level`` 1, 2 or 3. Prints as ``Z3``."""

    level: int

    def __str__(self) -> str:
        return f"Z{self.level}"


Held = Placement | Stored


def parse_held(text: str) -> Held:
    return Stored(int(text[1:])) if text.startswith("Z") else Placement.parse(text)


def use_layout(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout:
    """How the parameter lies once its ZeRO axes are gathered."""
    return Layout(mesh, atoms, tuple(h if isinstance(h, Placement) else REPLICATED for h in held))


def has_room(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> bool:
    return _store(mesh, atoms, held) is not None


def storage_layout(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout:
    """How the parameter is stored: its use shards first, then each ZeRO axis on the first atom that it divides, minor to the others."""
    layout = _store(mesh, atoms, held)
    if layout is None:
        raise PlanError(f"a tensor of factors {atoms} cannot be stored as [{' '.join(map(str, held))}] on mesh ({mesh}): no factor has room")
    return layout


def _store(mesh: Mesh, atoms: Atoms, held: Sequence[Held]) -> Layout | None:
    zero_axes = [axis for axis, h in enumerate(held) if isinstance(h, Stored)]
    order = (*(axis for axis in range(len(held)) if axis not in zero_axes), *zero_axes)
    layout = Layout(mesh, atoms, use_layout(mesh, atoms, held).placements, order)
    for axis in zero_axes:
        spots = (
            shard(dim, atom)
            for dim, sizes in enumerate(atoms)
            for atom, size in enumerate(sizes)
            if size % (layout.shards(dim, atom) * mesh.sizes[axis]) == 0
        )
        spot = next(spots, None)
        if spot is None:
            return None
        layout = layout.with_placement(axis, spot)
    return layout
