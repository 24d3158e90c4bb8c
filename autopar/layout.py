"""How a tensor lies on a mesh: one placement per mesh axis, over the factors of each dim.

Every tensor dim is an ordered product of *atoms*, major first: GPT-2's fused ``c_attn`` output of 2304 is ``(3)(12)(64)``.
On one mesh axis a tensor is

| symbol | value on the ranks of the axis                        | its gradient         |
|--------|-------------------------------------------------------|----------------------|
| R      | the same whole value (replicated)                     | the same whole value |
| R*     | the same whole value                                  | a partial sum        |
| P      | a partial sum                                         | the same whole value |
| Sd.a   | rank i holds the i-th part of atom ``a`` of dim ``d`` | sharded alike        |

``Sd`` is short for ``Sd.0``. Axes that share an atom nest in ``order``, major first (the axis in time, then mesh order; of stored
parameters the ZeRO axes come last).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import ClassVar

import torch

from autopar.errors import PlanError
from autopar.mesh import Mesh

Atoms = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the sizes of its atoms, major first; their product is the dim."""


class Kind(StrEnum):
    REPLICATED = "R"
    REPLICATED_PARTIAL_GRAD = "R*"
    PARTIAL = "P"
    SHARDED = "S"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """What one mesh axis does to one tensor. Prints as ``R``, ``R*``, ``P``, ``S1`` or ``S1.2`` and parses back.

    There is one object for each, so that it is equal to itself alone: prices look millions of them up.
    """

    kind: Kind
    dim: int = -1
    atom: int = -1
    _all: ClassVar[dict[tuple[Kind, int, int], Placement]] = {}

    def __new__(cls, kind: Kind, dim: int = -1, atom: int = -1) -> Placement:
        key = kind, dim, atom
        return cls._all.get(key) or cls._all.setdefault(key, object.__new__(cls))

    def __reduce__(self) -> tuple[type[Placement], tuple[Kind, int, int]]:
        return Placement, (self.kind, self.dim, self.atom)

    def __str__(self) -> str:
        if self.kind is not Kind.SHARDED:
            return self.kind.value
        return f"S{self.dim}.{self.atom}" if self.atom else f"S{self.dim}"

    @staticmethod
    def parse(text: str) -> Placement:
        if text.startswith("S"):
            dim, _, atom = text[1:].partition(".")
            return shard(int(dim), int(atom or 0))
        return Placement(Kind(text))

    @property
    def is_sharded(self) -> bool:
        return self.kind is Kind.SHARDED

    @property
    def holds_whole(self) -> bool:
        return self.kind in (Kind.REPLICATED, Kind.REPLICATED_PARTIAL_GRAD)


REPLICATED = Placement(Kind.REPLICATED)
REPLICATED_PARTIAL_GRAD = Placement(Kind.REPLICATED_PARTIAL_GRAD)
PARTIAL = Placement(Kind.PARTIAL)


@cache
def shard(dim: int, atom: int = 0) -> Placement:
    return Placement(Kind.SHARDED, dim, atom)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a dim: either one axis's split of an atom (``axis`` set) or what of the atom each rank keeps (``axis`` None)."""

    size: int
    axis: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor on one mesh.

    Args:
        mesh: the mesh.
        atoms: the tensor's global shape, factored.
        placements: one per mesh axis.
        order: mesh axes, major first, where several share one atom; the default is that of `Mesh.nesting`.
    """

    mesh: Mesh
    atoms: Atoms
    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.placements) == len(self.mesh.sizes)
        if not self.order:
            object.__setattr__(self, "order", self.mesh.nesting)
        for placement in self.placements:
            if placement.is_sharded:
                shards = self.shards(placement.dim, placement.atom)
                if self.atoms[placement.dim][placement.atom] % shards:
                    raise PlanError(
                        f"atom {placement.atom} of dim {placement.dim} has size {self.atoms[placement.dim][placement.atom]}, "
                        f"which {shards} shards do not divide (layout {self} of shape {self.shape})"
                    )

    def __str__(self) -> str:
        return "[" + " ".join(str(placement) for placement in self.placements) + "]"

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(math.prod(atoms) for atoms in self.atoms)

    def axes(self, dim: int, atom: int) -> list[int]:
        """Mesh axes that shard this atom, major first."""
        return [axis for axis in self.order if self.placements[axis] is shard(dim, atom)]

    def shards(self, dim: int, atom: int) -> int:
        return math.prod(self.mesh.sizes[axis] for axis in self.axes(dim, atom))

    @property
    def num_shards(self) -> int:
        """Number of different shards over the whole mesh."""
        return math.prod(
            size for size, placement in zip(self.mesh.sizes, self.placements, strict=True) if placement.is_sharded
        )

    @property
    def local_atoms(self) -> Atoms:
        return tuple(
            tuple(size // self.shards(dim, atom) for atom, size in enumerate(atoms)) for dim, atoms in enumerate(self.atoms)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape that every rank holds."""
        return tuple(math.prod(atoms) for atoms in self.local_atoms)

    def pieces(self, dim: int) -> list[Piece]:
        """``dim`` as a product of pieces, major first: for each atom its axes' splits, then what is left of it."""
        pieces = []
        for atom, size in enumerate(self.atoms[dim]):
            axes = self.axes(dim, atom)
            pieces += [Piece(self.mesh.sizes[axis], axis) for axis in axes]
            pieces.append(Piece(size // self.shards(dim, atom), None))
        return pieces

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        placements = (*self.placements[:axis], placement, *self.placements[axis + 1 :])
        return Layout(self.mesh, self.atoms, placements, self.order)


def replicated(mesh: Mesh, shape: Sequence[int]) -> Layout:
    return Layout(mesh, tuple((size,) for size in shape), (REPLICATED,) * len(mesh.sizes))


def take_shard(whole: torch.Tensor, layout: Layout, coordinate: Sequence[int]) -> torch.Tensor:
    """The part of ``whole`` (global shape) that the rank at ``coordinate`` holds; partial sums are held by position 0, zeros elsewhere."""
    pieces = [piece for dim in range(whole.dim()) for piece in layout.pieces(dim)]
    view = whole.reshape([piece.size for piece in pieces])
    index = tuple(slice(None) if piece.axis is None else coordinate[piece.axis] for piece in pieces)
    local = view[index].reshape(layout.local_shape)
    is_zero = any(
        placement.kind is Kind.PARTIAL and position
        for placement, position in zip(layout.placements, coordinate, strict=True)
    )
    return torch.zeros_like(local) if is_zero else local


def assemble(shards: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor (global shape) from what every rank holds, in rank order; partial sums are added, replicas taken from position 0."""
    mesh = layout.mesh
    pieces = [piece for dim in range(len(layout.atoms)) for piece in layout.pieces(dim)]
    whole = shards[0].new_zeros([piece.size for piece in pieces])
    for rank, local in enumerate(shards):
        coordinate = mesh.coordinate(rank)
        if any(p.holds_whole and i for p, i in zip(layout.placements, coordinate, strict=True)):
            continue
        index = tuple(slice(None) if piece.axis is None else coordinate[piece.axis] for piece in pieces)
        whole[index] += local.reshape([piece.size for piece in pieces if piece.axis is None])
    return whole.reshape(layout.shape)
