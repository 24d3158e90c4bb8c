"""Equal rows of repeated blocks become one: ``h.0.attn``, ``h.1.attn``, ``h.2.attn`` are ``h.{0..2}.attn`` three times."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

Numbers = tuple[int, ...]


class Folded(NamedTuple, Generic[T]):
    """Items that look alike: their common name, and all of them in order."""

    name: str
    items: tuple[T, ...]


def split_numbers(name: str) -> tuple[str, Numbers]:
    """``h.3.attn`` is ``h.*.attn`` and (3,)."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return ".".join("*" if part.isdecimal() else part for part in parts), numbers


def ranges_text(numbers: Iterable[int]) -> str:
    """``{0..3,7}``; a single number without braces."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return str(ordered[0])
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = [str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in zip(starts, ends, strict=True)]
    return "{" + ",".join(runs) + "}"


def fold(rows: Sequence[tuple[str, Hashable, T]]) -> list[Folded[T]]:
    """Fold rows of (dotted name, what must be equal, item); in order of first appearance.

    Rows fold if their names differ in numbers only and every combination of the numbers is there.
    """
    groups: dict[tuple[str, Hashable], list[tuple[Numbers, int]]] = {}
    for position, (name, key, _) in enumerate(rows):
        pattern, numbers = split_numbers(name)
        groups.setdefault((pattern, key), []).append((numbers, position))
    folded: list[Folded[int]] = []
    for (pattern, _), members in groups.items():
        folded += _fold_pattern(pattern, members)
    folded.sort(key=lambda row: row.items[0])
    return [Folded(row.name, tuple(rows[position][2] for position in row.items)) for row in folded]


def _fold_pattern(pattern: str, members: list[tuple[Numbers, int]]) -> list[Folded[int]]:
    columns = [set(column) for column in zip(*(numbers for numbers, _ in members), strict=True)]
    if prod(map(len, columns)) == len({numbers for numbers, _ in members}):
        return [Folded(_filled(pattern, columns), tuple(position for _, position in members))]
    outer = max(i for i, column in enumerate(columns) if len(column) > 1)  # incomplete: fold the others for each of this one
    split: dict[int, list[tuple[Numbers, int]]] = {}
    for member in members:
        split.setdefault(member[0][outer], []).append(member)
    return [row for same in split.values() for row in _fold_pattern(pattern, same)]


def _filled(pattern: str, columns: Sequence[set[int]]) -> str:
    for column in columns:
        pattern = pattern.replace("*", ranges_text(column), 1)
    return pattern
