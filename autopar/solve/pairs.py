"""Products in pairs, as hand-written tensor parallelism has them (Shoeybi et al. 2019): one by column, whose result stays split, and what
sums over that by row. What stands between them, attention or a gated activation, makes no difference. What a row gives begins the next
pair, and so does what an op wants whole, as a norm does.

It is dims that are followed, by the rules of the ops between: tokens that a router sends to experts have the dims of what was sent,
whatever made the router's scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from autopar.graph import Value, is_call, operands_of, specs_of
from autopar.rules.notation import Rule
from autopar.solve.pins import is_parameter, products_of
from autopar.solve.problem import Problem

COLUMN, ROW, EITHER = "column", "row", "either"
Sides = frozenset[str]
Made = Mapping[Value, Sequence[Sides]]
"""For each dim of a value the sides of the products that it comes from; nothing of weights and of what is made of them alone."""


def sides_of(problem: Problem) -> Mapping[fx.Node, str]:
    """For each product with a parameter which side it is, `EITHER` where what it sums over comes of columns and of others."""
    parameters = [cluster.leader for cluster in problem.clusters if is_parameter(cluster)]
    products = {problem.shared[product] for parameter in parameters for product in products_of(problem, parameter)}
    weights = set(map(Value, parameters)) | {Value(node) for node in problem.module.graph.nodes if problem.shared.get(node) in parameters}
    sides: dict[fx.Node, str] = {}
    made: dict[Value, Sequence[Sides]] = {}
    for node in filter(is_call, problem.module.graph.nodes):
        operands, rule = operands_of(node), problem.factors.rules.get(node)
        results = [Value(node, index) for index in range(len(specs_of(node)))]
        if operands and weights.issuperset(operands):
            weights.update(results)
        elif rule is None:
            whole = _union(side for value in operands for side in made.get(value, ()))
            made |= {value: [whole] * len(spec.shape) for value, spec in zip(results, specs_of(node), strict=True)}
        else:
            found = _by_factor(rule, operands, made)
            if problem.shared.get(node) in products:
                summed = _union(found.get(letter, Sides()) for letter in rule.summed)
                sides[node] = COLUMN if summed <= {ROW} else ROW if summed == {COLUMN} else EITHER
                found |= dict.fromkeys(_of_weights(rule, operands, weights), Sides({sides[node]}))
            terms = zip(results, rule.results, strict=True)
            made |= {value: [_union(found.get(letter, Sides()) for letter in dim) for dim in term] for value, term in terms}
    return sides


def _by_factor(rule: Rule, operands: Sequence[Value], made: Made) -> dict[str, Sides]:
    """Where each factor of an op comes from, but those that it wants whole."""
    found: dict[str, Sides] = {}
    for value, term in zip(operands, rule.operands, strict=True):
        for letters, side in zip(term, made.get(value, ()), strict=False):
            found |= {letter: found.get(letter, Sides()) | side for letter in letters if letter not in rule.whole}
    return found


def _of_weights(rule: Rule, operands: Sequence[Value], weights: set[Value]) -> set[str]:
    """Factors that the result of a product has of its weights alone."""
    others = {letter for value, term in zip(operands, rule.operands, strict=True) if value not in weights for dim in term for letter in dim}
    return {letter for term in rule.results for dim in term for letter in dim} - others


def _union(sides: Iterable[Sides]) -> Sides:
    return Sides().union(*sides)
