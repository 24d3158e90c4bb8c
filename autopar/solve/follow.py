"""Dims followed through a graph by its rules: where a dim of an input or of a parameter lies in every value that is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Protocol

import torch
from torch import fx

from autopar.capture.trace import Source
from autopar.factors import Factors
from autopar.graph import Value, is_call, operands_of, specs_of
from autopar.layout import Placement, shard
from autopar.passes.microbatch import batch_size
from autopar.rules.notation import Term
from autopar.rules.strategies import Choice

aten = torch.ops.aten


class Factored(Protocol):
    """A graph and its factors."""

    @property
    def module(self) -> fx.GraphModule: ...

    @property
    def factors(self) -> Factors: ...


Positions = Mapping[Value, Set[Placement]]
"""For each value the shards that split what is followed."""

Key = tuple[str, int]
"""An atom of a factor of an op: the letter of its rule, and which of its atoms."""


def batch_inputs(known: Factored) -> list[fx.Node]:
    """Inputs whose dim 0 may be the batch: of as many rows as the first, or of so many for each row or for several (pairs, groups). What
    has another number is not of the samples, as weights of classes."""
    size = batch_size(known.module)
    return [n for n in _inputs(known, dims=1) if (rows := specs_of(n)[0].shape[0]) and not (rows % size and size % rows)]


def wide_inputs(known: Factored) -> list[fx.Node]:
    """Inputs that have a dim 1, which may be a sequence."""
    return _inputs(known, dims=2)


def sequence_inputs(known: Factored) -> list[fx.Node]:
    """Inputs whose dim 1 is a sequence by their kind: numbers of tokens [batch, tokens], vectors [batch, tokens, size], and weights of
    tokens that are as many. Dim 1 of other [batch, features] is none, nor is that of what a convolution reads, its channels."""
    specs = {node: specs_of(node)[0] for node in wide_inputs(known) if not _has_channels(node)}
    sure = {node for node, spec in specs.items() if len(spec.shape) > 2 or not spec.dtype.is_floating_point}
    sizes = {specs[node].shape[1] for node in sure}
    return [node for node, spec in specs.items() if node in sure or spec.shape[1] in sizes]


def _has_channels(node: fx.Node) -> bool:
    readers = [reader for user in node.users for reader in (user.users if user.target is aten.to.dtype else (user,))]
    return any(str(reader.target).startswith("aten.conv") for reader in readers)


def _inputs(known: Factored, *, dims: int) -> list[fx.Node]:
    """Inputs of so many dims or more."""
    nodes = known.module.graph.find_nodes(op="placeholder")
    return [n for n in nodes if n.meta["placeholder"].source is Source.INPUT and len(specs_of(n)[0].shape) >= dims]


def sequence_size(known: Factored) -> int:
    """How many tokens are in a row of every input that has some: the common divisor of dims 1, of numbers of tokens [batch, tokens] and of
    vectors [batch, tokens, size]; 1 without such inputs."""
    specs = [specs_of(node)[0] for node in wide_inputs(known)]
    return math.gcd(*(spec.shape[1] for spec in specs if len(spec.shape) == (3 if spec.dtype.is_floating_point else 2))) or 1


def follow_inputs(known: Factored, inputs: Iterable[fx.Node], *, dim: int) -> Positions:
    """Follow a dim of some inputs."""
    starts: dict[Value, Set[Placement]] = {}
    for node in inputs:
        atoms = known.factors.of(node)
        if math.prod(atoms[dim]) > 1:
            starts[Value(node)] = {shard(dim, atom) for atom in range(len(atoms[dim]))}
    return follow(known, starts)


def follow(known: Factored, starts: Positions) -> Positions:
    """Follow shards of some values forward."""
    positions = dict(starts)
    for node in known.module.graph.nodes:
        rule = known.factors.rules.get(node)
        if rule is None or not is_call(node):
            continue
        followed = {key for keys in followed_keys(known, node, positions) for key in keys}
        for i, term in enumerate(rule.results):
            found = {place for key, place in places(term, known.factors.letters[node]) if key in followed}
            if found:
                positions[Value(node, i)] = found
    return positions


def followed_keys(known: Factored, node: fx.Node, positions: Positions) -> list[dict[Key, Placement]]:
    """For each operand of an op the atoms of factors that are followed, and the shard of the operand that splits each."""
    letters = known.factors.letters[node]
    return [
        {key: place for key, place in places(term, letters) if place in positions.get(value, ())}
        for value, term in zip(operands_of(node), known.factors.rules[node].operands, strict=True)
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
