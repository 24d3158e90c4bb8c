"""Why this layout: the chosen variant of one parameter or op against the alternatives, each solved again with the alternative fixed."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import InfeasibleError, PlanError
from autopar.graph import Value
from autopar.solve.decide import Decision
from autopar.solve.intra import Solution, solve
from autopar.solve.problem import Cluster

MAX_ALTERNATIVES = 16


def explain_text(decision: Decision, name: str, *, limit_bytes: float) -> str:
    """A table of alternatives, the best first.

    Args:
        decision: the solved problem.
        name: a parameter (by any of its names) or an op (by the name of its node).
        limit_bytes: memory limit for the alternatives.
    """
    index = _find(decision, name)
    cluster = decision.problem.clusters[index]
    chosen = decision.solution.variants[index]
    lines = [_title(decision, cluster, name), f"{'layout':<34}{'step':>12}{'against':>10}{'memory':>12}"]
    base = decision.solution.objective.total_s
    rows = [(base, _row("* " + _names(decision, cluster, chosen), decision.solution, base))]
    for variant in _alternatives(cluster, chosen):
        label = "  " + _names(decision, cluster, variant)
        allowed = [*decision.allowed[:index], (variant,), *decision.allowed[index + 1 :]]
        try:
            other = solve(decision.prices, memory_limit_bytes=limit_bytes, allowed=allowed)
            rows.append((other.objective.total_s, _row(label, other, base)))
        except PlanError as error:
            why = "does not fit" if isinstance(error, InfeasibleError) else "no way"
            rows.append((float("inf"), f"{label:<34}{why:>12}"))
    return "\n".join([*lines, *(text for _, text in sorted(rows, key=lambda row: row[0]))])


def _find(decision: Decision, name: str) -> int:
    problem = decision.problem
    for node, shared in problem.shared.items():
        entry = node.meta.get("placeholder")
        names = (entry.name, *entry.aliases) if entry else (node.name,)
        if name in names:
            return problem.cluster_of[shared]
    raise PlanError(f"there is no parameter or op {name!r} in the plan; print(plan) lists parameters, plan.graph lists ops")


def _title(decision: Decision, cluster: Cluster, name: str) -> str:
    factors = decision.problem.factors
    atoms = " x ".join("".join(f"({a})" for a in dim) if len(dim) > 1 else str(dim[0]) for dim in factors.of(cluster.leader)) if (
        len(cluster.members) == 1 and cluster.leader.op == "placeholder"
    ) else ""
    rule = factors.rules.get(cluster.leader)
    told = f"factors {atoms}" if atoms else f"rule {rule}" if rule else "no rule: replicated"
    times = f", {cluster.multiplicity} times in the model" if cluster.multiplicity > 1 else ""
    axes = ", ".join(decision.problem.mesh.names)
    return f"{name}: {told}{times}; layouts on axes ({axes}), * is in force, the rest of the plan is solved again around each"


def _alternatives(cluster: Cluster, chosen: int) -> Iterator[int]:
    """Variants that differ from the chosen one on one axis, then the others, up to a limit."""
    mine = cluster.variants[chosen]

    def distance(v: int) -> int:
        return sum(a != b for a, b in zip(mine, cluster.variants[v], strict=True))

    others = sorted((v for v in range(len(cluster.variants)) if v != chosen), key=distance)
    yield from others[:MAX_ALTERNATIVES]


def _names(decision: Decision, cluster: Cluster, variant: int) -> str:
    names = cluster.choice_names(variant)
    if cluster.leader.op == "placeholder":
        return " ".join(names)
    results = cluster.gives(Value(cluster.leader), variant)
    return " ".join(f"{name}:{held}" for name, held in zip(names, results, strict=True))


def _row(label: str, solution: Solution, base: float) -> str:
    step = solution.objective.total_s
    return f"{label:<34}{step * 1e3:>9.3f} ms{step / base:>9.3f}x{solution.memory.total / 2**20:>9.1f} MiB"
