"""The grid of devices: named axes in order, the outermost (slowest link) first; ranks are numbered row-major.

``axis`` is always of a mesh and ``dim`` is always of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from autopar.errors import MeshError
from autopar.units import is_whole

MICROBATCH = "microbatch"
"""Name of the axis in time: its positions are the micro-batches of a step, which every rank runs one after the other."""


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names and sizes, outermost first. Prints as ``dp=2,tp=4`` and parses back."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (_is_list(self.names) and _is_list(self.sizes)):
            given = f"names {self.names!r} and sizes {self.sizes!r}"
            raise MeshError(f"a mesh has several names and sizes, as Mesh(('dp', 'tp'), (2, 4)), got {given}")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if len(self.names) != len(self.sizes) or not self.names:
            raise MeshError(f"a mesh needs one size per axis name, got names {self.names} and sizes {self.sizes}")
        if not all(isinstance(name, str) and name and not {*name} & {*"=,"} for name in self.names):
            raise MeshError(f"mesh axis names are text without '=' and ',', got {self.names}")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axis names must differ, got {self.names}")
        if not all(is_whole(size) and size >= 1 for size in self.sizes):
            raise MeshError(f"mesh axis sizes must be whole numbers, at least 1, got {self.sizes}")

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read ``dp=2,tp=4``; MeshError if the text is something else."""
        pairs = [part.split("=") for part in text.split(",")] if isinstance(text, str) else [[""]]
        if any(len(pair) != 2 or not pair[1].isdecimal() for pair in pairs):
            raise MeshError(f"a mesh reads like 'dp=2,tp=4', got {text!r}")
        return Mesh(tuple(name for name, _ in pairs), tuple(int(size) for _, size in pairs))

    @staticmethod
    def of(sizes: int | Sequence[int]) -> Mesh:
        """A mesh with the default axis names ``d0, d1, ...``."""
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        if not _is_list(sizes):
            raise MeshError(f"sizes of a mesh are whole numbers, as (2, 4), got {sizes!r}")
        return Mesh(tuple(f"d{i}" for i in range(len(sizes))), tuple(sizes))

    @property
    def num_ranks(self) -> int:
        """Positions of the mesh; of one with an axis in time, ranks times micro-batches."""
        return math.prod(self.sizes)

    def with_time(self, microbatches: int) -> Mesh:
        """This mesh with the axis in time, last in the list of axes."""
        return Mesh((*self.names, MICROBATCH), (*self.sizes, microbatches))

    @property
    def in_space(self) -> Mesh:
        """This mesh without the axis in time."""
        kept = [axis for axis in range(len(self.sizes)) if axis != self.time_axis]
        return Mesh(tuple(self.names[axis] for axis in kept), tuple(self.sizes[axis] for axis in kept))

    @property
    def time_axis(self) -> int | None:
        """Which axis is that in time; None if there is none."""
        return len(self.names) - 1 if self.names[-1:] == (MICROBATCH,) else None

    @property
    def nesting(self) -> tuple[int, ...]:
        """Axes, major first, as they nest where they share a factor: micro-batches outermost, then the axes in order."""
        axes = tuple(range(len(self.sizes)))
        return axes if self.time_axis is None else (self.time_axis, *(axis for axis in axes if axis != self.time_axis))

    def index(self, name: str) -> int:
        """Position of the axis called ``name``; MeshError if there is none."""
        if name not in self.names:
            raise MeshError(f"mesh ({self}) has no axis {name!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank`` on every axis."""
        assert 0 <= rank < self.num_ranks
        coordinate = []
        for size in reversed(self.sizes):
            coordinate.append(rank % size)
            rank //= size
        return tuple(reversed(coordinate))

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a position on every axis."""
        rank = 0
        for position, size in zip(coordinate, self.sizes, strict=True):
            rank = rank * size + position
        return rank

    def groups(self, axis: int) -> list[list[int]]:
        """The sets of ranks that differ only on ``axis``, each in the order of that axis."""
        others = [range(size) if i != axis else range(1) for i, size in enumerate(self.sizes)]
        return [
            [self.rank((*base[:axis], position, *base[axis + 1 :])) for position in range(self.sizes[axis])]
            for base in product(*others)
        ]
