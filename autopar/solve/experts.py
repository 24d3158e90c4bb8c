"""The experts of a model: which dim of which parameters counts them, and which ops work on them.

Experts are stacked: in ``becd, edf -> becf`` each of ``e`` matrices has tokens of its own. So the dim of a parameter that counts experts
is a factor that a product has in both operands and in its result, beside one that it sums: a batch dim of the product. A parameter that
meets that factor later, as the second matrix or a bias of each expert, has the same experts. Where products do not tell (all experts take
all tokens, ``bsd, edf -> bsef``, which are the columns of one product), the user names parameters that stack experts on dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import fx

from autopar.capture.trace import Source
from autopar.errors import PlanError
from autopar.graph import Value, is_call, operands_of, source_name, specs_of
from autopar.layout import Placement, shard
from autopar.rules.notation import Rule
from autopar.solve.follow import Factored, Key, Positions, follow, followed_keys, places
from autopar.units import number_text


@dataclass(frozen=True, slots=True)
class Experts:
    """What is sharded by experts.

    Args:
        shards: of each parameter that holds experts, that by which they are counted.
        positions: the shards that split the experts, of every value that has them.
        weights: values that are made of these parameters alone.
    """

    shards: Mapping[fx.Node, Placement]
    positions: Positions
    weights: Set[Value]

    @property
    def counts(self) -> set[int]:
        """Experts of the layers."""
        return {specs_of(node)[0].shape[place.dim] for node, place in self.shards.items()}

    def reads(self, node: fx.Node) -> bool:
        """Whether an op takes experts' parameters."""
        return any(value in self.weights for value in operands_of(node))

    def has(self, node: fx.Node) -> bool:
        """Whether any operand or result of an op has a dim of experts."""
        return any(v in self.positions for v in (*operands_of(node), *(Value(node, i) for i in range(len(specs_of(node))))))


@dataclass(frozen=True, slots=True)
class _Meeting:
    """An op in which parameters meet other values: each atom of its factors that a parameter brings, and which shard of the parameter
    that is."""

    node: fx.Node
    brought: Sequence[tuple[Key, fx.Node, Placement]]


def find_experts(known: Factored, patterns: Sequence[str] = ()) -> Experts:
    """The experts of a graph; none if there are none.

    Args:
        known: the graph.
        patterns: of names of parameters that stack experts on dim 0, with ``*``; without, those that products tell.

    Raises:
        PlanError: a pattern names no parameter, or one without dims.
    """
    alone, meetings = _meetings(known)
    found = dict(_named(known, patterns)) if patterns else dict(_batch_dims(known, meetings))
    positions: Positions = {}
    before = -1
    while len(found) > before:
        before = len(found)
        positions = follow(known, {Value(node): {place} for node, place in found.items()})
        for meeting in meetings:
            followed = {key for keys in followed_keys(known, meeting.node, positions) for key in keys}
            for key, node, place in meeting.brought:
                if key in followed:
                    found.setdefault(node, place)
    weights = {value for value, owner in alone.items() if owner & found.keys()}
    return Experts(found, positions, weights)


def no_experts_text(known: Factored) -> str:
    """Why no experts were found, and what to do."""
    stacks = [node for node in _parameters(known) if len(specs_of(node)[0].shape) >= 3]
    what = "no parameter is a stack of matrices (3 dims or more)"
    if stacks:
        alone, _ = _meetings(known)
        first, shape = source_name(Value(stacks[0])), specs_of(stacks[0])[0].shape
        of_first = {value.node for value, owners in alone.items() if stacks[0] in owners}
        ops = dict.fromkeys(f"{op_text(user)}" for node in of_first for user in node.users if Value(user) not in alone)
        what = f"of {number_text(len(stacks), 'stacked parameter')} no product has the experts in both operands and in its result; "
        what += f"{first} {shape} goes into {', '.join(ops)}"
    return (
        f"no experts for ep to share: {what}. Experts are seen where one product computes all of them on tokens that are sorted into "
        "slots of a fixed number (torch.einsum('becd,edf->becf', tokens, weight) or torch.bmm), not where each is a module of its own or "
        "takes as many rows as are routed to it; write them so, or name the parameters that stack experts on dim 0: experts=('*.w1', ...)"
    )


def op_text(node: fx.Node) -> str:
    """An op with the line of the model that it comes from."""
    return f"{node.target} at {node.meta['line']}" if node.meta.get("line") else str(node.target)


def unclear_stacks(known: Factored, experts: Experts) -> Iterator[str]:
    """Names of stacks of as many matrices as there are experts that are none of them."""
    for node in _parameters(known):
        shape = specs_of(node)[0].shape
        if node not in experts.shards and len(shape) >= 3 and shape[0] in experts.counts:
            yield source_name(Value(node))


def _parameters(known: Factored) -> Iterator[fx.Node]:
    nodes = known.module.graph.find_nodes(op="placeholder")
    return (node for node in nodes if node.meta["placeholder"].source is Source.PARAMETER)


def _named(known: Factored, patterns: Sequence[str]) -> Iterator[tuple[fx.Node, Placement]]:
    for pattern in patterns:
        named = [n for n in _parameters(known) if any(fnmatchcase(name, pattern) for name in _names(n))]
        if not named:
            some = [source_name(Value(node)) for node in _parameters(known)][:6]
            raise PlanError(f"experts={pattern!r} names no parameter; parameters are named like {', '.join(some)}")
        for node in named:
            if not specs_of(node)[0].shape:
                raise PlanError(f"experts={pattern!r} names {source_name(Value(node))}, a scalar; experts are counted by dim 0")
            yield node, shard(0, 0)


def _names(node: fx.Node) -> tuple[str, ...]:
    entry = node.meta["placeholder"]
    return (entry.name, *entry.aliases)


def _meetings(known: Factored) -> tuple[dict[Value, frozenset[fx.Node]], list[_Meeting]]:
    """Values that are made of parameters alone, with which, and the ops in which these meet others."""
    alone: dict[Value, frozenset[fx.Node]] = {}
    origin: dict[Value, dict[Placement, tuple[fx.Node, Placement]]] = {}
    for node in _parameters(known):
        value = Value(node)
        alone[value] = frozenset([node])
        atoms = known.factors.of(node)
        origin[value] = {shard(dim, atom): (node, shard(dim, atom)) for dim, row in enumerate(atoms) for atom in range(len(row))}
    meetings: list[_Meeting] = []
    for node in known.module.graph.nodes:
        rule = known.factors.rules.get(node)
        operands = operands_of(node) if is_call(node) else []
        if rule is None or not any(value in alone for value in operands):
            continue
        letters = known.factors.letters[node]
        brought = [
            (key, *origin[value][place])
            for value, term in zip(operands, rule.operands, strict=True)
            if value in alone
            for key, place in places(term, letters)
            if place in origin[value]
        ]
        if all(value in alone or value.node.meta["constant"] for value in operands):
            for i, term in enumerate(rule.results):
                alone[Value(node, i)] = frozenset().union(*(alone[value] for value in operands if value in alone))
                behind = {key: (owner, place) for key, owner, place in brought}
                origin[Value(node, i)] = {place: behind[key] for key, place in places(term, letters) if key in behind}
        else:
            meetings.append(_Meeting(node, brought))
    return alone, meetings


def _batch_dims(known: Factored, meetings: Sequence[_Meeting]) -> Iterator[tuple[fx.Node, Placement]]:
    """Dims of stacks of matrices that are batch dims of their product; of several the outermost."""
    for meeting in meetings:
        rule = known.factors.rules[meeting.node]
        if not _is_product(rule):
            continue
        batch = _batch_letters(rule)
        of_parameter: dict[fx.Node, list[Placement]] = {}
        for (letter, _), node, place in meeting.brought:
            if letter in batch and len(specs_of(node)[0].shape) >= 3:
                of_parameter.setdefault(node, []).append(place)
        yield from ((node, min(found, key=lambda place: (place.dim, place.atom))) for node, found in of_parameter.items())


def _multiplied(rule: Rule) -> list[set[str]]:
    """Factors of the operands that an op multiplies: it is linear in each for itself, and not in what it adds to the product."""
    if len(rule.linear) < 2:
        return []
    operands = frozenset.union(*rule.linear) - frozenset.intersection(*rule.linear)
    return [{letter for dim in rule.operands[i] for letter in dim} for i in operands]


def _shared(rule: Rule) -> set[str]:
    """Factors of several operands of a product."""
    of = _multiplied(rule)
    return {letter for letter in set().union(*of) if sum(letter in letters for letters in of) > 1}


def _kept(rule: Rule) -> set[str]:
    return {letter for term in rule.results for dim in term for letter in dim}


def _is_product(rule: Rule) -> bool:
    """Multiplies, and sums over a factor that several operands have."""
    return bool(_shared(rule) - _kept(rule))


def _batch_letters(rule: Rule) -> set[str]:
    """Factors of several operands and of the result."""
    return _shared(rule) & _kept(rule) - rule.whole
