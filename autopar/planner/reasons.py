"""Why every parameter and op lies as it does, cheaply: its price as a formula, and what the step would take with it alone otherwise.

`explain` solves the rest again around each alternative, which takes its time; here all else stays, so these prices are upper bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.planner.explain import alternatives_of, variant_text
from autopar.planner.formula import formulas
from autopar.solve.decide import Decision


@dataclass(frozen=True, slots=True)
class Reason:
    """Of ops or parameters that equal blocks decide as one.

    Args:
        formula: what it costs a rank (`formula.formulas`).
        chosen: its layout.
        alternatives: others, with the predicted step over that of the plan, the best first.
        num_impossible: how many more need something else to change too.
    """

    formula: str
    chosen: str
    alternatives: tuple[tuple[str, float], ...]
    num_impossible: int


@dataclass(frozen=True, slots=True)
class Reasons:
    """Reasons by the name of one op or parameter that each is of; ``of`` has that name for every other."""

    reasons: dict[str, Reason]
    of: dict[str, str]


def find_reasons(decision: Decision) -> Reasons:
    """Those of all ops and parameters, once for equal ones."""
    problem = decision.problem
    base_s, names, of = decision.prices.objective(decision.solution.variants).total_s, dict[object, str](), dict[str, str]()
    tried: dict[int, list[tuple[int, float]]] = {}
    reasons: dict[str, Reason] = {}
    for node, shared in problem.shared.items():
        placeholder = node.meta.get("placeholder")
        name = placeholder.name if placeholder is not None else node.name
        first = of[name] = names.setdefault(shared, name)
        if first != name:
            continue
        index = problem.cluster_of[shared]
        if index not in tried:
            tried[index] = _tried(decision, index, base_s)
        cluster, possible = problem.clusters[index], sorted((row for row in tried[index] if math.isfinite(row[1])), key=lambda row: row[1])
        chosen = variant_text(cluster, decision.solution.variants[index], shared)
        others = tuple((variant_text(cluster, variant, shared), ratio) for variant, ratio in possible)
        reasons[name] = Reason(str(formulas(decision, name)), chosen, others, len(tried[index]) - len(possible))
    return Reasons(reasons, of)


def _tried(decision: Decision, index: int, base_s: float) -> list[tuple[int, float]]:
    """Alternatives of a cluster with the step over that of the plan under each; infinite where there is no way from or to what stays."""
    cluster, variants = decision.problem.clusters[index], decision.solution.variants
    rows = []
    for variant in alternatives_of(cluster, variants[index]):
        others = (*variants[:index], variant, *variants[index + 1 :])
        rows.append((variant, decision.prices.objective(others).total_s / base_s))
    return rows
