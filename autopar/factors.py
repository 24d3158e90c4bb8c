"""Graph -> factors: which products every tensor dim is made of.

Rules tie the dims of a graph into classes (union-find). A class keeps a set of *cuts*, the products of its minor factors; views, ``split``
and ``cat`` carry cuts between a dim and the factors that it is grouped from, in both directions, until nothing changes. So GPT-2's
``c_attn.weight`` comes out as 768 x (3)(12)(64), because its product is split in 3 and viewed as 12 heads of 64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import fx

from autopar.callers import user_level
from autopar.graph import Value, call_of, form_of, is_call, operands_of, specs_of, value_of, value_spec
from autopar.layout import Atoms
from autopar.rules.notation import Dim, Rule
from autopar.rules.registry import Call, rule_of
from autopar.rules.strategies import Choice, axis_choices, replicated_choice


class MissingRuleWarning(UserWarning):
    """An op has no rule and is computed replicated."""


@dataclass(slots=True)
class _Classes:
    """Union-find over dims and factors; every class has one size and a chain of cuts."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    cuts: list[set[int]] = field(default_factory=list)

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.cuts.append(set())
        return len(self.parent) - 1

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def union(self, i: int, j: int) -> None:
        i, j = self.find(i), self.find(j)
        if i != j:
            assert self.size[i] == self.size[j], (self.size[i], self.size[j])
            self.parent[j] = i
            for cut in self.cuts[j]:
                self.add_cut(i, cut)

    def add_cut(self, i: int, cut: int) -> bool:
        """Add a product of minor factors unless it breaks the chain of divisors; tell whether anything changed."""
        i = self.find(i)
        cuts = self.cuts[i]
        if cut in (1, self.size[i]) or cut in cuts or self.size[i] % cut:
            return False
        if any(max(cut, other) % min(cut, other) for other in cuts):
            return False
        cuts.add(cut)
        return True

    def atoms(self, i: int) -> tuple[int, ...]:
        i = self.find(i)
        chain = [self.size[i], *sorted(self.cuts[i], reverse=True), 1]
        return tuple(a // b for a, b in pairwise(chain)) if self.size[i] > 1 else (self.size[i],)


@dataclass(frozen=True, slots=True)
class Factors:
    """What the analysis found: for each value its atoms, for each call its rule and the atoms of the rule's factors.

    Calls without a rule, and calls on constants, are not in ``rules``.
    """

    values: dict[Value, Atoms]
    rules: dict[fx.Node, Rule]
    letters: dict[fx.Node, dict[str, tuple[int, ...]]]
    _choices: dict[tuple[fx.Node, int], list[Choice]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[object, list[Choice]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, node: fx.Node) -> Atoms:
        """Atoms of the tensor that a node stands for."""
        return self.values[value_of(node)]

    def choices(self, node: fx.Node, axis_size: int) -> list[Choice]:
        """Every legal choice of an op on an axis of ``axis_size`` ranks; an op without a rule can only be replicated."""
        if (node, axis_size) not in self._choices:
            self._choices[node, axis_size] = self._find_choices(node, axis_size)
        return self._choices[node, axis_size]

    def _find_choices(self, node: fx.Node, axis_size: int) -> list[Choice]:
        operands = operands_of(node)
        rule = self.rules.get(node)
        if rule is None:
            return [replicated_choice(len(operands), len(specs_of(node)))]
        letters, needs_grad = self.letters[node], tuple(value_spec(value).requires_grad for value in operands)
        result_needs_grad = any(spec.requires_grad for spec in specs_of(node))
        key = rule.terms, tuple(letters.items()), axis_size, needs_grad, result_needs_grad  # equal blocks have equal ones
        if key not in self._known:
            self._known[key] = axis_choices(
                rule, letters, axis_size=axis_size, needs_grad=needs_grad, result_needs_grad=result_needs_grad
            )
        return self._known[key]


def find_factors(module: fx.GraphModule) -> Factors:
    """Work out the factors of every value of a normal graph; warns once for each op that has no rule."""
    classes = _Classes()
    dims: dict[Value, list[int]] = {}
    letters: dict[fx.Node, dict[str, int]] = {}
    rules: dict[fx.Node, Rule] = {}
    groups: list[tuple[int, list[int]]] = []
    missing: dict[str, str] = {}
    known: dict[Hashable, tuple[Rule | None, Mapping[str, int]]] = {}
    for node in module.graph.nodes:
        for index, spec in enumerate(node.meta.get("specs", ())):
            dims[Value(node, index)] = [classes.new(size) for size in spec.shape]
        if not is_call(node) or node.meta["constant"]:
            continue
        form = form_of(node)
        if form not in known:
            known[form] = _rule_of(call_of(node))
        rule, sizes = known[form]
        if rule is None:
            missing.setdefault(str(node.target), node.meta.get("line", ""))
            continue
        rules[node] = rule
        letters[node] = {letter: classes.new(size) for letter, size in sizes.items()}
        for value, term in _tensors(node, rule):
            for dim, factors in zip(dims[value], term, strict=True):
                if len(factors) == 1:
                    classes.union(dim, letters[node][factors[0]])
                elif factors:
                    groups.append((dim, [letters[node][letter] for letter in factors]))
    for op, line in missing.items():
        text = f"{op} has no rule and is computed replicated on every rank (first at {line})"
        warnings.warn(text, MissingRuleWarning, stacklevel=user_level())
    changed = True
    while changed:
        changed = sum(_carry(classes, dim, factors) for dim, factors in groups) > 0
    values = {value: tuple(classes.atoms(dim) for dim in ids) for value, ids in dims.items()}
    letter_atoms = {node: {k: classes.atoms(i) for k, i in ids.items()} for node, ids in letters.items()}
    aligned = {node: _block_misaligned(node, rule, values, letter_atoms[node]) for node, rule in rules.items()}
    return Factors(values, aligned, letter_atoms)


def _rule_of(call: Call) -> tuple[Rule | None, Mapping[str, int]]:
    """The rule of a call, and the sizes of its factors."""
    rule = rule_of(call)
    return rule, rule.bind([spec.shape for spec in call.operands], [spec.shape for spec in call.results]) if rule is not None else {}


def _tensors(node: fx.Node, rule: Rule) -> Iterable[tuple[Value, tuple[Dim, ...]]]:
    yield from zip(operands_of(node), rule.operands, strict=True)
    for index, term in enumerate(rule.results[: len(specs_of(node))]):
        yield Value(node, index), term


def _carry(classes: _Classes, dim: int, factors: list[int]) -> bool:
    """Carry cuts between a dim and the factors that it groups; tell whether anything changed."""
    changed = False
    minor = 1
    for factor in reversed(factors):
        size = classes.size[classes.find(factor)]
        changed |= classes.add_cut(dim, minor)
        for cut in tuple(classes.cuts[classes.find(factor)]):
            changed |= classes.add_cut(dim, cut * minor)
        for cut in tuple(classes.cuts[classes.find(dim)]):
            if minor < cut < minor * size and cut % minor == 0:
                changed |= classes.add_cut(factor, cut // minor)
        minor *= size
    return changed


def _block_misaligned(node: fx.Node, rule: Rule, values: dict[Value, Atoms], letters: dict[str, tuple[int, ...]]) -> Rule:
    """Make whole the factors whose atoms are not those of the dims that they stand in (their cuts had no common chain)."""
    blocked = set()
    for value, term in _tensors(node, rule):
        for atoms, factors in zip(values[value], term, strict=True):
            expected = tuple(size for letter in factors for size in letters[letter])
            if factors and expected != atoms and math.prod(atoms) > 1:
                blocked |= set(factors)
    return replace(rule, whole=rule.whole | blocked) if blocked else rule
