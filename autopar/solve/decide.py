"""Problem -> decision: solve under pins, and write what was decided as a `Plan`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost.machine import MachineProfile
from autopar.cost.pricing import Pricer
from autopar.errors import PlanError
from autopar.factors import Factors
from autopar.graph import Value, operands_of, specs_of, value_spec
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.plan import CollectivePlan, OpPlan, ParameterPlan, Plan, Prediction, Stats
from autopar.solve.intra import Prices, Solution, solve
from autopar.solve.pins import Restriction, pin_tags
from autopar.solve.problem import Problem, build_problem
from autopar.storage import Stored, storage_layout
from autopar.trace import Source
from autopar.transitions import transition

PLAN_GAP = 5e-3
"""A plan within this part of the optimum is good enough: prices are less certain than that."""
PLAN_TIME_LIMIT_S = 20.0
"""Limit of one call of the solver; the gap that was reached then stands in the plan."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A solved problem; ``allowed`` are the variants that pins left to each cluster."""

    problem: Problem
    prices: Prices
    solution: Solution
    allowed: tuple[tuple[int, ...], ...]


def decide(
    module: fx.GraphModule,
    factors: Factors,
    mesh: Mesh,
    machine: MachineProfile,
    *,
    memory_limit_bytes: float,
    restrictions: Sequence[Restriction] = (),
    optimizer: str = "adamw",
    training: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Decision:
    """Choose a variant for every cluster.

    Args:
        module: normal graph.
        factors: its factors.
        mesh: axes and sizes.
        machine: prices, one link per axis.
        memory_limit_bytes: per rank.
        restrictions: pins; each takes variants away.
        optimizer: for the bytes of its state.
        training: price a backward and an optimizer step too.

    Raises:
        InfeasibleError: nothing fits.
        PlanError: a pin leaves nothing.
    """
    problem = build_problem(module, factors, mesh, tags=pin_tags(module, restrictions))
    allowed: list[list[int]] = [list(range(len(cluster.variants))) for cluster in problem.clusters]
    for restriction in restrictions:
        allowed = restriction(problem, allowed)
    _check_left(problem, allowed)
    prices = Prices(problem, Pricer(machine.for_mesh(mesh), mesh, optimizer, training))
    report(f"solving for mesh ({mesh}): {len(problem.clusters)} clusters, {sum(map(len, allowed))} variants")
    solution = solve(
        prices,
        memory_limit_bytes=memory_limit_bytes,
        allowed=allowed,
        report=report,
        gap=PLAN_GAP,
        time_limit_s=PLAN_TIME_LIMIT_S,
    )
    return Decision(problem, prices, solution, tuple(map(tuple, allowed)))


def _check_left(problem: Problem, allowed: Sequence[Sequence[int]]) -> None:
    for cluster, rows in zip(problem.clusters, allowed, strict=True):
        if not rows:
            placeholder = cluster.leader.meta.get("placeholder")
            name = placeholder.name if placeholder else cluster.leader.name
            raise PlanError(
                f"the pins and the configuration together leave no way for {name} on mesh ({problem.mesh}); fix less of it"
            )


def graph_hash(module: fx.GraphModule) -> str:
    """Hash of a normal graph: ops, arguments, shapes and parameter names."""
    digest = hashlib.sha256()
    for node in module.graph.nodes:
        placeholder = node.meta.get("placeholder")
        line = f"{node.name} {node.op} {node.target} {_without_device(node)} {node.meta.get('specs')} {placeholder}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _without_device(node: fx.Node) -> str:
    kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    return f"{node.args} {kwargs}"


def write_plan(
    decision: Decision,
    *,
    model: str,
    batch: Mapping[str, str],
    memory_limit_bytes: int,
    capture_time_s: float,
    config: str = "",
    notes: Sequence[str] = (),
) -> Plan:
    """The decision as a document."""
    problem, solution = decision.problem, decision.solution
    return Plan(
        model=model,
        mesh=problem.mesh,
        machine=decision.prices.pricer.machine.origin,
        batch=dict(batch),
        memory_limit_bytes=int(memory_limit_bytes),
        parameters=tuple(_parameters(decision)),
        ops=tuple(_ops(decision)),
        collectives=tuple(_collectives(decision)),
        prediction=_prediction(decision),
        stats=Stats(capture_time_s, solution.solve_time_s, solution.gap, solution.num_variables, len(problem.clusters)),
        graph_hash=graph_hash(problem.module),
        config=config,
        notes=tuple(notes),
    )


def _variant(decision: Decision, node: fx.Node) -> tuple[int, int]:
    index = decision.problem.cluster_of[decision.problem.shared[node]]
    return index, decision.solution.variants[index]


def _parameters(decision: Decision) -> list[ParameterPlan]:
    problem = decision.problem
    rows = []
    for node in problem.module.graph.find_nodes(op="placeholder"):
        entry = node.meta["placeholder"]
        if entry.source is not Source.PARAMETER:
            continue
        index, variant = _variant(decision, node)
        cluster = problem.clusters[index]
        held = cluster.gives(Value(cluster.leader), variant)
        atoms = problem.factors.of(node)
        layout = storage_layout(problem.mesh, atoms, held)
        spec = specs_of(node)[0]
        num_bytes = spec.num_bytes // layout.num_shards
        rows.append(
            ParameterPlan(
                entry.name, entry.aliases, spec.shape, atoms, tuple(map(str, held)), layout.local_shape, num_bytes
            )
        )
    return rows


def _ops(decision: Decision) -> list[OpPlan]:
    problem = decision.problem
    rows = []
    for node in problem.module.graph.nodes:
        if node.op != "call_function" or node not in problem.shared:
            continue
        shared = problem.shared[node]
        index, variant = _variant(decision, node)
        cluster = problem.clusters[index]
        choices = [cluster.choices[axis][pick].members[shared] for axis, pick in enumerate(cluster.variants[variant])]
        times = decision.prices.times[index]
        rule = problem.factors.rules.get(node)
        rows.append(
            OpPlan(
                name=node.name,
                op=str(node.target).removesuffix(".default"),
                module=node.meta.get("module", ""),
                line=node.meta.get("line", ""),
                shape=specs_of(node)[0].shape,
                rule=str(rule) if rule else "",
                choices=tuple(choice.name for choice in choices),
                layout=tuple(str(choice.results[0]) for choice in choices),
                time_s=float(times.forward_s[variant] + times.backward_s[variant]) if shared is cluster.leader else 0.0,
                inputs=tuple(_input_name(value) for value in operands_of(node)),
            )
        )
    return rows


def _input_name(value: Value) -> str:
    placeholder = value.node.meta.get("placeholder")
    return placeholder.name if placeholder else value.node.name


def _collectives(decision: Decision) -> list[CollectivePlan]:
    """Every reshard that communicates, once per fan."""
    problem, prices, variants = decision.problem, decision.prices, decision.solution.variants
    mesh, pricer = problem.mesh, prices.pricer
    counted: Counter[tuple[str, int, str, str, str, int]] = Counter()
    for fan in problem.fans:
        for axis in range(len(mesh.sizes)):
            for way in dict.fromkeys(prices.way(edge, axis, variants) for edge in fan.edges):
                value = fan.edges[0].value
                spec = value_spec(value)
                num_bytes = spec.num_bytes // way.parts
                needs_grad = spec.requires_grad and pricer.training
                for phase, kind in _kinds(way.held, way.wanted, needs_grad=needs_grad):
                    if kind in ("", "slice", "pad"):
                        continue
                    name = _input_name(value)
                    counted[kind, axis, phase, name, value.node.meta.get("module", ""), num_bytes] += fan.multiplicity
    rows = []
    for (kind, axis, phase, name, module, num_bytes), count in counted.items():
        time_s = pricer.collective_s(kind, num_bytes, axis)
        rows.append(CollectivePlan(kind, mesh.names[axis], phase, name, module, num_bytes, time_s, count))
    return rows


def _kinds(held: object, wanted: Placement, *, needs_grad: bool) -> list[tuple[str, str]]:
    """(phase, collective) of a way."""
    if isinstance(held, Stored):
        again = [("backward", "all_gather")] if held.level == 3 and needs_grad else []
        partial = needs_grad and wanted.kind.value != "R"
        return [("forward", "all_gather"), *again, ("backward", "reduce_scatter" if partial else "slice")]
    assert isinstance(held, Placement)
    step = transition(held, wanted, needs_grad=needs_grad)
    assert step is not None
    return [("forward", step.forward), ("backward", step.backward)]


def _prediction(decision: Decision) -> Prediction:
    problem, solution = decision.problem, decision.solution
    objective, memory = solution.objective, solution.memory
    tokens = _tokens(problem.module)
    step_s = objective.total_s
    kinds = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations,
    }
    return Prediction(
        step_time_s=step_s,
        compute_s=objective.forward_s + objective.backward_s,
        update_s=objective.update_s,
        blocking_comm_s=objective.blocking_s,
        exposed_comm_s=objective.blocking_s + objective.exposed_s,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        mfu=_mfu(decision),
        bubble_fraction=0.0,
        peak_memory_bytes=(int(memory.total),),
        memory_bytes={kind: int(value) for kind, value in kinds.items()},
    )


def _tokens(module: fx.GraphModule) -> int:
    """Elements of the first integer input, or rows of the first input."""
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if n.meta["placeholder"].source is Source.INPUT]
    for node in inputs:
        spec = specs_of(node)[0]
        if not spec.dtype.is_floating_point:
            return spec.numel
    return specs_of(inputs[0])[0].shape[0] if inputs and specs_of(inputs[0])[0].shape else 1


def _mfu(decision: Decision) -> float:
    """Flops of the model's contractions, forward and backward, over what all devices could do (Chowdhery et al. 2022, appendix B)."""
    problem, pricer = decision.problem, decision.prices.pricer
    rates = [sample.flops_per_s for sample in pricer.machine.device.matmul]
    if not rates or not decision.solution.objective.total_s:
        return 0.0
    flops = 0.0
    for cluster in problem.clusters:
        for node in cluster.members:
            if node.op != "placeholder":
                rule, letters = problem.factors.rules.get(node), problem.factors.letters.get(node, {})
                flops += cluster.multiplicity * pricer.whole_flops(node, rule, letters)
    return float(flops / (max(rates) * problem.mesh.num_ranks * decision.solution.objective.total_s))
