"""One op, one line: how the factors of its operands become the factors of its results.

    linear      "b s k, n k -> b s n ; 0 | 1"
    split       "b s (n! d) -> b s d, b s d, b s d ; 0"      with n=3, d=768

A line is read for one mesh axis. Each letter is a factor that may be sharded:

* a letter of the results: the results are sharded on it; operands that lack it are whole and get a partial gradient;
* a letter that no result has is *summed*: sharding it leaves a partial sum;
* ``x!`` is *whole* and must not be sharded;
* ``x@`` is an index range: the op runs in a special form that is told which contiguous part of ``x`` it holds;
* ``x&`` is an index range, and the special form reduces over it inside, so that the results are whole.

``(h d)`` is one dim made of two factors, major first; ``1`` is a dim of size 1; a scalar operand is written ``.``.
After ``;`` stand the sets of operands in which the op is linear, alternatives parted by ``|``: these may be partial sums, and then
the results are. (``0 | 1`` is a product, ``0 1`` a sum.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import RuleError

Dim = tuple[str, ...]
"""The factors of one dim, major first; empty for a dim of size 1."""
Term = tuple[Dim, ...]
"""The dims of one tensor."""

_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")
_LETTER = re.compile(r"([a-z][a-z0-9]*)([!@&]?)")


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed line. ``sizes`` holds the factor sizes that shapes alone do not tell (factors inside a group)."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    whole: frozenset[str] = frozenset()
    ranged: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def terms(self) -> tuple[object, ...]:
        """All but the sizes."""
        return self.operands, self.results, self.whole, self.ranged, self.reduced, self.linear

    @staticmethod
    def parse(text: str, **sizes: int) -> Rule:
        """Read one line; RuleError names the part that does not fit the notation."""
        body, _, tail = text.partition(";")
        left, arrow, right = body.partition("->")
        if not arrow:
            raise RuleError(f"rule {text!r} has no '->'")
        marks: dict[str, str] = {}
        operands = tuple(_parse_term(part, marks, text) for part in left.split(",")) if left.strip() else ()
        results = tuple(_parse_term(part, marks, text) for part in right.split(","))
        linear = tuple(frozenset(int(i) for i in part.split()) for part in tail.split("|")) if tail.strip() else ()
        if any(i >= len(operands) for group in linear for i in group):
            raise RuleError(f"rule {text!r} calls an operand linear that it has not: {tail.strip()!r}")

        def marked(mark: str) -> frozenset[str]:
            return frozenset(letter for letter, m in marks.items() if m == mark)

        return Rule(operands, results, marked("!"), marked("@") | marked("&"), marked("&"), linear, dict(sizes))

    def __str__(self) -> str:
        def show_dim(dim: Dim) -> str:
            marked = [letter + self._mark(letter) for letter in dim]
            return "1" if not dim else marked[0] if len(dim) == 1 else "(" + " ".join(marked) + ")"

        def show(terms: Sequence[Term]) -> str:
            return ", ".join(" ".join(map(show_dim, term)) or "." for term in terms)

        tail = " | ".join(" ".join(map(str, sorted(group))) for group in self.linear)
        return f"{show(self.operands)} -> {show(self.results)}" + (f" ; {tail}" if tail else "")

    def _mark(self, letter: str) -> str:
        if letter in self.whole:
            return "!"
        return "&" if letter in self.reduced else "@" if letter in self.ranged else ""

    @property
    def letters(self) -> tuple[str, ...]:
        """All factors in the order in which they appear."""
        return tuple(dict.fromkeys(letter for term in (*self.operands, *self.results) for dim in term for letter in dim))

    @property
    def summed(self) -> frozenset[str]:
        """Factors whose sharding leaves a partial sum."""
        kept = {letter for term in self.results for dim in term for letter in dim}
        return frozenset(self.letters) - kept - self.whole - self.reduced

    def bind(self, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of every factor for a call with these shapes; RuleError if the line does not fit them."""
        shapes = [*operand_shapes, *result_shapes]
        terms = [*self.operands, *self.results]
        if len(shapes) != len(terms) or any(len(t) != len(s) for t, s in zip(terms, shapes, strict=True)):
            raise RuleError(f"rule '{self}' does not fit operands {list(operand_shapes)} and results {list(result_shapes)}")
        sizes = dict(self.sizes)
        dims = [(dim, size) for term, shape in zip(terms, shapes, strict=True) for dim, size in zip(term, shape, strict=True)]
        for dim, size in dims:
            if len(dim) == 1:
                sizes.setdefault(dim[0], size)
        for dim, size in dims:
            unknown = [letter for letter in dim if letter not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // math.prod(sizes[letter] for letter in dim if letter in sizes)
            if any(letter not in sizes for letter in dim) or math.prod(sizes[letter] for letter in dim) != size:
                raise RuleError(f"rule '{self}': dim {dim} of size {size} does not fit factor sizes {sizes}")
        return sizes


def _parse_term(text: str, marks: dict[str, str], line: str) -> Term:
    dims: list[Dim] = []
    for group, single in _TOKEN.findall(text):
        if single == ".":
            continue
        letters = []
        for token in (group or single).split():
            match = _LETTER.fullmatch(token)
            if match:
                letters.append(match[1])
                marks[match[1]] = match[2] or marks.get(match[1], "")
            elif token != "1":
                raise RuleError(f"rule {line!r}: cannot read factor {token!r}")
        dims.append(tuple(letters))
    return tuple(dims)
