"""All legal choices of one op on one mesh axis, from its rule and the atoms of its factors.

A choice is one atom of one factor (``n.1``, or ``n`` for its first), replication (``R``; ``R*`` with partial gradients passed through),
or a partial sum passed through an op that is linear in some operands (``+0``, the number of the alternative).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL_GRAD, Placement, shard
from autopar.rules.notation import Rule, Term

LetterAtoms = Mapping[str, tuple[int, ...]]
"""For each factor of a rule, the sizes of its atoms, major first; a factor without an entry is not split."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one op does on one mesh axis: its name, and the placement of every operand and result."""

    name: str
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(map(str, self.operands))} -> {' '.join(map(str, self.results))}"


def axis_choices(rule: Rule, atoms: LetterAtoms, *, axis_size: int, needs_grad: Sequence[bool], result_needs_grad: bool) -> list[Choice]:
    """Every legal choice on an axis of ``axis_size`` ranks, replication first.

    Args:
        rule: the op's rule.
        atoms: atoms of each factor.
        axis_size: ranks on the axis; a factor is only offered where it divides the atom, and on one rank there is nothing to choose.
        needs_grad: for each operand, whether a gradient flows back to it.
        result_needs_grad: whether the op takes part in the backward.
    """
    def whole(i: int) -> Placement:
        return REPLICATED_PARTIAL_GRAD if needs_grad[i] else REPLICATED

    num_operands, num_results = len(rule.operands), len(rule.results)
    choices = [replicated_choice(num_operands, num_results)]
    if axis_size == 1:
        return choices
    if result_needs_grad:
        choices.append(
            Choice("R*", tuple(whole(i) for i in range(num_operands)), (REPLICATED_PARTIAL_GRAD,) * num_results)
        )
    for letter in rule.letters:
        if letter in rule.whole or letter not in atoms or (letter in rule.ranged and len(atoms[letter]) > 1):
            continue
        for atom, size in enumerate(atoms[letter]):
            if size == 1 or size % axis_size:
                continue
            operands = tuple(_place(term, letter, atom, atoms) or whole(i) for i, term in enumerate(rule.operands))
            missing = REPLICATED if letter in rule.reduced else PARTIAL
            results = tuple(_place(term, letter, atom, atoms) or missing for term in rule.results)
            choices.append(Choice(f"{letter}.{atom}" if atom else letter, operands, results))
    for number, group in enumerate(rule.linear):
        operands = tuple(PARTIAL if i in group else whole(i) for i in range(num_operands))
        choices.append(Choice(f"+{number}", operands, (PARTIAL,) * num_results))
    return choices


def replicated_choice(num_operands: int, num_results: int) -> Choice:
    """Everything whole on every rank: the only choice of an op without a rule."""
    return Choice("R", (REPLICATED,) * num_operands, (REPLICATED,) * num_results)


def _place(term: Term, letter: str, atom: int, atoms: LetterAtoms) -> Placement | None:
    """Where the atom of the factor lies in this tensor; None if it has it not."""
    for dim, letters in enumerate(term):
        if letter in letters:
            before = letters[: letters.index(letter)]
            return shard(dim, sum(len(atoms[other]) for other in before) + atom)
    return None
