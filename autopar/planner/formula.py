"""What one op or parameter costs a rank, as formulas in the sizes of factors and mesh axes, with their values in this plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from autopar.cost.compute import OpCost, node_cost, summed_bytes, symbol
from autopar.cost.updates import FACTORED
from autopar.graph import Value, call_of, specs_of
from autopar.layout import Placement
from autopar.rules.notation import Rule
from autopar.solve.decide import Decision
from autopar.solve.names import find_by_name
from autopar.storage import Stored
from autopar.units import bytes_text, count_text, number_text, seconds_text


@dataclass(frozen=True, slots=True)
class Formula:
    """One amount: ``what`` it is of (forward, kept, optimizer), the expression, and its value in ``unit`` (flop or B)."""

    what: str
    expression: str
    value: float
    unit: str

    def __str__(self) -> str:
        value = bytes_text(self.value) if self.unit == "B" else count_text(self.value) + self.unit
        return f"  {self.what:<9} {self.expression} = {value}"


@dataclass(frozen=True, slots=True)
class Formulas:
    """What one op or parameter costs a rank.

    Args:
        name: of it; ``about`` it in words.
        sizes: of what the expressions are written in.
        amounts: the formulas.
        times_s: of an op the predicted seconds of its forward, its backward, and of a launch; empty for a parameter.
        together: with how many others that lie like it these are.
    """

    name: str
    about: str
    sizes: Mapping[str, int]
    amounts: tuple[Formula, ...]
    times_s: Mapping[str, float]
    together: int = 0

    def __str__(self) -> str:
        lines = [self.about, "  " + ", ".join(f"{name} = {size}" for name, size in self.sizes.items()), *map(str, self.amounts)]
        if self.times_s:
            forward, backward, launch = map(seconds_text, self.times_s.values())
            others = f", with {number_text(self.together, 'op')} laid out like it" if self.together else ""
            lines.append(f"  {'time':<9} {forward} forward, {backward} backward{others}; a launch is {launch}")
        return "\n".join(lines)


def formulas(decision: Decision, name: str) -> Formulas:
    """Flops, bytes and what the backward keeps of an op, for one micro-batch; elements and bytes by kind of a parameter.

    A factor that the plan shards is divided by the axes that shard it; the batch in parts by ``microbatch``.

    Args:
        decision: the solved problem.
        name: a parameter (by any of its names) or an op (by the name of its node).

    Raises:
        PlanError: there is none of this name.
    """
    node, shared = find_by_name(decision.problem, name)
    return _of_parameter(decision, name, shared) if node.op == "placeholder" else _of_op(decision, node, shared)


def _of_op(decision: Decision, node: fx.Node, shared: fx.Node) -> Formulas:
    problem, device = decision.problem, decision.prices.pricer.machine.device
    index = problem.cluster_of[shared]
    cluster, variant = problem.clusters[index], decision.solution.variants[index]
    rule, sizes = problem.factors.rules.get(shared), {k: math.prod(v) for k, v in problem.factors.letters.get(shared, {}).items()}
    local: dict[sympy.Symbol, sympy.Expr] = {}
    for axis, (choices, pick) in enumerate(zip(cluster.choices, cluster.variants[variant], strict=True)):
        letter = choices[pick].members[shared].name.partition(".")[0]
        if letter in sizes:
            axis_name = problem.mesh.names[axis]
            local[symbol(letter)] = local.get(symbol(letter), symbol(letter)) / symbol(axis_name)
            sizes[axis_name] = problem.mesh.sizes[axis]
    cost = node_cost(shared, rule)
    rows = [("forward", cost.flops, "flop"), ("forward", cost.num_bytes, "B")]
    if decision.prices.pricer.training:
        rows += [("backward", cost.backward_flops, "flop"), ("backward", cost.backward_num_bytes, "B")]
        rows += [("summed", summed_bytes(shared, cost), "B")]
        rows += [("kept", _kept(cost, shared, rule), "B")]
    amounts = [
        _formula(what, sympy.factor_terms(sympy.expand(expr.subs(local, simultaneous=True))), unit, sizes)
        for what, expr, unit in rows
        if expr != 0
    ]
    times, count = decision.prices.times[index], problem.microbatches
    times_s = {
        "forward_s": float(times.forward_s[variant]) / count,
        "backward_s": float(times.backward_s[variant]) / count,
        "launch_s": device.launch_overhead_s,
    }
    about = f"{node.name}: {str(node.target).removesuffix('.default')}, rule {rule or 'none: replicated'}"
    if decision.prices.pricer.is_added(shared):
        about += "; the product before it adds this bias, in no time of its own but where a reshard stands between"
    return Formulas(node.name, about, sizes, tuple(amounts), times_s, len(cluster.members) - 1)


def _of_parameter(decision: Decision, name: str, shared: fx.Node) -> Formulas:
    problem, pricer = decision.problem, decision.prices.pricer
    index = problem.cluster_of[shared]
    held = problem.clusters[index].gives(Value(shared), decision.solution.variants[index])
    axes = list(zip(problem.mesh.names, problem.mesh.sizes, held, strict=True))
    spec = specs_of(shared)[0]
    numel, used, stored = symbol("N"), sympy.Integer(1), sympy.Integer(1)
    sizes = {"N": spec.numel}
    for axis, size, how in axes:
        if isinstance(how, Stored):
            stored, sizes[axis] = stored * symbol(axis), size
        elif isinstance(how, Placement) and how.is_sharded:
            used, sizes[axis] = used * symbol(axis), size
    levels, width = {how.level for how in held if isinstance(how, Stored)}, spec.stored.dtype.itemsize
    about = f"{name}: {' x '.join(map(str, spec.shape))}, held as {' '.join(map(str, held))} on axes ({', '.join(problem.mesh.names)})"
    taken, own, whole = pricer.parameter_bytes(spec, held), numel / (used * stored), numel / used
    copied, num_stored = pricer.kept_bytes(spec, held).gathered, max(1.0, float(own.subs({symbol(k): size for k, size in sizes.items()})))
    is_whole = pricer.optimizer == FACTORED and len(spec.shape) > 1
    rows = [
        ("parameter", width * own, taken.parameter),
        ("gradient", width * (whole if 1 in levels else own), taken.gradient),
        ("optimizer", sympy.Float(taken.optimizer) if is_whole else taken.optimizer / num_stored * own, taken.optimizer),
        ("gathered", (spec.dtype.itemsize * whole if copied else 0) + (taken.gathered - copied) / num_stored * own, taken.gathered),
    ]
    amounts = [_formula(what, sympy.nsimplify(expr), "B", sizes) for what, expr, num_bytes in rows if num_bytes]
    return Formulas(name, about, sizes, tuple(amounts), {})


def _formula(what: str, expr: sympy.Expr, unit: str, sizes: Mapping[str, int]) -> Formula:
    return Formula(what, str(expr), float(expr.subs({symbol(name): size for name, size in sizes.items()})), unit)


def _kept(cost: OpCost, node: fx.Node, rule: Rule | None) -> sympy.Expr:
    """Bytes that the backward needs of this op's own operands and results, and beside them."""
    call = call_of(node)
    specs = (*call.operands, *call.results)
    if rule is None:
        return cost.hidden_bytes + sum(specs[i].num_bytes for i in cost.saved)
    terms = (*rule.operands, *rule.results)
    return cost.hidden_bytes + sum(specs[i].dtype.itemsize * sympy.Mul(*(symbol(k) for dim in terms[i] for k in dim)) for i in cost.saved)
