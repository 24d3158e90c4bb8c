"""Dims followed through a graph by its rules: where a dim of an input or of a parameter lies in every value that is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

from torch import fx

from autopar.graph import Value, is_call, operands_of, specs_of
from autopar.layout import Placement, shard
from autopar.rules.notation import Term
from autopar.rules.strategies import Choice
from autopar.solve.problem import Problem
from autopar.trace import Source

Positions = Mapping[Value, Set[Placement]]
"""For each value the shards that split what is followed."""

Key = tuple[str, int]
"""An atom of a factor of an op: the letter of its rule, and which of its atoms."""


def batch_inputs(problem: Problem) -> list[fx.Node]:
    """Inputs that have a dim 0."""
    nodes = problem.module.graph.find_nodes(op="placeholder")
    return [n for n in nodes if n.meta["placeholder"].source is Source.INPUT and specs_of(n)[0].shape]


def follow_inputs(problem: Problem, *, dim: int) -> Positions:
    """Follow a dim of the inputs."""
    starts: dict[Value, Set[Placement]] = {}
    for node in batch_inputs(problem):
        atoms = problem.factors.of(node)
        if len(atoms) > dim and math.prod(atoms[dim]) > 1:
            starts[Value(node)] = {shard(dim, atom) for atom in range(len(atoms[dim]))}
    return follow(problem, starts)


def follow(problem: Problem, starts: Positions) -> Positions:
    """Follow shards of some values forward."""
    positions = dict(starts)
    for node in problem.module.graph.nodes:
        rule = problem.factors.rules.get(node)
        if rule is None or not is_call(node):
            continue
        followed = {key for keys in followed_keys(problem, node, positions) for key in keys}
        for i, term in enumerate(rule.results):
            found = {place for key, place in places(term, problem.factors.letters[node]) if key in followed}
            if found:
                positions[Value(node, i)] = found
    return positions


def followed_keys(problem: Problem, node: fx.Node, positions: Positions) -> list[dict[Key, Placement]]:
    """For each operand of an op the atoms of factors that are followed, and the shard of the operand that splits each."""
    letters = problem.factors.letters[node]
    return [
        {key: place for key, place in places(term, letters) if place in positions.get(value, ())}
        for value, term in zip(operands_of(node), problem.factors.rules[node].operands, strict=True)
    ]


def places(term: Term, letters: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[Key, Placement]]:
    """Every atom of every factor of a tensor, with where it lies."""
    for dim, factors in enumerate(term):
        place = 0
        for letter in factors:
            for atom in range(len(letters[letter])):
                yield (letter, atom), shard(dim, place)
                place += 1


def splits(node: fx.Node, choice: Choice, positions: Positions) -> bool:
    """Whether a choice splits what is followed in any operand or result of an op."""
    values = [*operands_of(node), *(Value(node, i) for i in range(len(specs_of(node))))]
    placements = [*choice.operands, *choice.results]
    return any(place in positions.get(value, ()) for value, place in zip(values, placements, strict=True))
