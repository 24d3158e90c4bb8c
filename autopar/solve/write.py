"""Staged decision -> `Plan`: what was decided, as a document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.capture.trace import Source
from autopar.cost.machine import MachineProfile, level_of
from autopar.cost.pricing import Pricer
from autopar.cost.simulate import StagePrice
from autopar.graph import Value, operands_of, source_name, specs_of, value_spec
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.passes.stages import staged_ops
from autopar.piece import HOST
from autopar.plan import (
    MEMORY_KINDS,
    Alternative,
    CollectivePlan,
    LinkPlan,
    OpPlan,
    ParameterPlan,
    Plan,
    Prediction,
    StagePlan,
    Stats,
)
from autopar.solve.decide import Decision, graph_hash
from autopar.solve.footprint import MemoryUse
from autopar.solve.inside import inside_of
from autopar.solve.prices import Objective, inside_reductions
from autopar.solve.problem import Problem
from autopar.solve.range import far_notes
from autopar.solve.staged import Staged
from autopar.solve.traffic import gradient_reduction, gradient_traffic, ways_of
from autopar.storage import Stored, storage_layout
from autopar.tokens import Amount, amount_of
from autopar.transitions import transition
from autopar.units import bytes_text, number_text

LARGE_OUTPUTS = 0.2
"""Outputs that take more of the peak than that are worth a note."""


def write_plan(
    staged: Staged,
    *,
    machine: MachineProfile,
    model: str,
    batch: Mapping[str, str],
    memory_limit_bytes: int,
    capture_time_s: float,
    config: str = "",
    precision: str = "",
    alternatives: Sequence[Alternative] = (),
    notes: Sequence[str] = (),
    is_interrupted: bool = False,
) -> Plan:
    """The decision as a document; ``machine`` has a link for each axis of its grid, that of the pipeline too."""
    decision = staged.decision
    problem, solution = decision.problem, decision.solution
    collectives, stages, ops = tuple(_collectives(decision)), tuple(_stages(staged)), tuple(_ops(staged))
    return Plan(
        model=model,
        mesh=problem.mesh.in_space,
        machine=decision.prices.pricer.machine.origin,
        batch=dict(batch),
        memory_limit_bytes=int(memory_limit_bytes),
        parameters=tuple(_parameters(staged)),
        ops=ops,
        collectives=(*collectives, *_over_stages(stages, ops, staged.shape.pipeline.axis)),
        prediction=_prediction(staged, stages),
        stats=Stats(
            capture_time_s, solution.solve_time_s, solution.gap, solution.num_variables, len(problem.clusters), is_interrupted
        ),
        graph_hash=graph_hash(problem.module),
        config=config,
        pipeline=staged.shape.pipeline,
        stages=stages,
        links=tuple(_links(staged.shape.grid, machine)),
        alternatives=tuple(alternatives),
        notes=(*notes, *_kind_notes(staged), *_compression_notes(decision), *_output_notes(staged), *far_notes(decision, collectives)),
        optimizer=decision.prices.pricer.optimizer,
        precision=precision,
        dtypes=_dtypes(staged),
        sharing=staged.sharing,
        offload=str(decision.prices.pricer.offload),
        compression=str(decision.prices.pricer.compression or ""),
    )


def _kind_notes(staged: Staged) -> Iterator[str]:
    """Which stages run on which devices, where they differ."""
    found: dict[str, list[str]] = {}
    for stage in range(staged.shape.pipeline.stages):
        found.setdefault(staged.costs_of(stage).prices.pricer.machine.device.name, []).append(str(stage))
    if len(found) > 1:
        where = "; ".join(f"{name}: stages {', '.join(stages)}" for name, stages in found.items())
        yield f"stages take what their own devices take ({where}); ops are sharded, and collectives priced, as on the slowest"
    elif kinds := staged.decision.prices.pricer.machine.kinds:
        yield f"all ranks share all ops, and wait for the slowest of {' and '.join(machine.device.name for _, machine in kinds)}"


def _output_notes(staged: Staged) -> Iterator[str]:
    num_bytes = sum(given.num_bytes + given.joined_bytes for given in staged.decision.prices.footprint.liveness.given)
    if num_bytes > LARGE_OUTPUTS * max(staged.rank_bytes):
        yield f"the outputs of the model, whole on every rank, take up to {bytes_text(num_bytes)} of it; outputs='loss' gives the loss"


def _compression_notes(decision: Decision) -> Iterator[str]:
    """How many gradients travel compressed, which may be none, and what that saves."""
    how = decision.prices.pricer.compression
    if how is None or not decision.prices.pricer.training:
        return
    traffic = gradient_traffic(decision)
    sent, exact = bytes_text(traffic.sent_bytes), bytes_text(traffic.exact_bytes)
    yield (
        f"{traffic.num_compressed} of {number_text(traffic.count, 'reduction')} of gradients travel compressed ({how}): a rank sends "
        f"{sent} for all of them instead of {exact}; small ones, and those that would not shrink, stay exact"
    )


def _variant(decision: Decision, node: fx.Node) -> tuple[int, int]:
    index = decision.problem.cluster_of[decision.problem.shared[node]]
    return index, decision.solution.variants[index]


def _parameters(staged: Staged) -> list[ParameterPlan]:
    decision, problem = staged.decision, staged.decision.problem
    homes, mesh = staged.homes(), problem.mesh.in_space
    rows = []
    for node in problem.module.graph.find_nodes(op="placeholder"):
        entry = node.meta["placeholder"]
        if entry.source is not Source.PARAMETER:
            continue
        index, variant = _variant(decision, node)
        cluster = problem.clusters[index]
        held = cluster.gives(Value(cluster.leader), variant)[: len(mesh.sizes)]
        atoms = problem.factors.of(node)
        layout = storage_layout(mesh, atoms, held)
        spec = specs_of(node)[0].stored
        num_bytes = spec.num_bytes // layout.num_shards
        rows.append(
            ParameterPlan(
                name=entry.name,
                aliases=entry.aliases,
                shape=spec.shape,
                factors=atoms,
                held=tuple(map(str, held)),
                local_shape=layout.local_shape,
                num_bytes=num_bytes,
                stages=homes.get(node, (0,)),
            )
        )
    return rows


def _ops(staged: Staged) -> list[OpPlan]:
    decision, problem = staged.decision, staged.decision.problem
    num_axes = len(problem.mesh.in_space.sizes)
    rows = []
    for node in problem.module.graph.nodes:
        if node.op != "call_function" or node not in problem.shared:
            continue
        shared = problem.shared[node]
        index, variant = _variant(decision, node)
        cluster = problem.clusters[index]
        choices = [cluster.choices[axis][pick].members[shared] for axis, pick in enumerate(cluster.variants[variant][:num_axes])]
        stage = staged.stage_of.get(node, 0)
        times = staged.costs_of(stage).prices.times[index]
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
                inputs=tuple(source_name(value) for value in operands_of(node)),
                stage=stage,
                recompute=staged.again.get(node, ""),
            )
        )
    return rows


def _collectives(decision: Decision) -> list[CollectivePlan]:
    """Every reshard that communicates, once per fan; those of compressed gradients as they travel; reductions inside of ops. Each with the
    time that is in the price of the step: of what travels with others its part of a bucket, of what is waited for that of a crowd."""
    problem, prices = decision.problem, decision.prices
    mesh, pricer = problem.mesh, prices.pricer
    counted: Counter[tuple[str, int, str, str, str, int, int, bool, bool]] = Counter()
    for fan in problem.fans:
        for axis in range(len(mesh.in_space.sizes)):
            for way, edge in ways_of(decision, fan, axis):
                value = fan.edges[0].value
                spec, module = value_spec(value), value.node.meta.get("module", "")
                needs_grad = spec.requires_grad and pricer.training
                times = fan.multiplicity * prices.repeats(fan.edges[0], way)
                reduction = gradient_reduction(decision, edge, axis) if pricer.compression is not None else None
                compressed = reduction.compressed if reduction is not None else None
                for message in compressed.messages if compressed is not None else ():
                    row = message.kind, axis, "backward", source_name(value), module, message.num_bytes
                    counted[*row, pricer.priced_bytes(message, axis), True, False] += times
                is_read_again = pricer.training and value.node.op == "placeholder" and prices.is_read_again(value.node)
                for phase, kind in _kinds(way.held, way.wanted, needs_grad=needs_grad, is_read_again=is_read_again):
                    is_reduced = phase == "backward" and kind in ("all_reduce", "reduce_scatter")
                    if kind in ("", "slice", "pad") or (is_reduced and compressed is not None):
                        continue
                    num_bytes = spec.numel * (spec.reduced_width if is_reduced else spec.dtype.itemsize) // way.parts
                    of_parameter = value.node.op == "placeholder"
                    counted[kind, axis, phase, source_name(value), module, num_bytes, num_bytes, of_parameter, spec.is_vector] += times
    for node, axis, num_bytes, times in inside_reductions(problem, decision.solution.variants):
        name, module = source_name(Value(node)), node.meta.get("module", "")
        counted["all_reduce", axis, "forward", name, module, num_bytes, num_bytes, False, False] += times
    rows, places = [], _places(problem)
    for (kind, axis, phase, name, module, num_bytes, priced_bytes, of_parameter, is_vector), count in counted.items():
        if of_parameter:
            time_s = pricer.of_parameter_s(kind, priced_bytes, axis, is_vector=is_vector)
        else:
            time_s = pricer.waited_s(kind, priced_bytes, axis)
        for place in _shares(_Place(name, module, count), places.get(name, ())):
            rows.append(CollectivePlan(kind, mesh.names[axis], phase, place.name, place.module, num_bytes, time_s, place.number))
    return rows


def _over_stages(stages: Sequence[StagePlan], ops: Sequence[OpPlan], axis: str) -> Iterator[CollectivePlan]:
    """Gradients that several stages add up, each once, and outputs that go to the ranks of all other stages."""
    pieces = [piece for stage in stages for piece in stage.inside if piece.axis == axis] if len(stages) > 1 else []
    modules, grads = {op.name: op.module for op in ops}, {piece.of: piece for piece in pieces if piece.phase == "reduce"}
    for phase, found in (("backward", grads.values()), ("forward", (piece for piece in pieces if piece.phase == "output"))):
        for piece in found:
            yield CollectivePlan(piece.kind, piece.axis, phase, piece.of, modules.get(piece.of, ""), piece.num_bytes, piece.time_s, 1)


class _Place(NamedTuple):
    """The first value of a place in equal blocks, its module, and how many there are or how often they move."""

    name: str
    module: str
    number: int


def _places(problem: Problem) -> dict[str, list[_Place]]:
    """Of each value that is decided for others too, the places where these lie: the norm of a block may stand for that at the end, too."""
    found: dict[str, dict[str, _Place]] = {}
    for node, shared in problem.shared.items():
        name, module = source_name(Value(node)), node.meta.get("module", "")
        places = found.setdefault(source_name(Value(shared)), {})
        path = ".".join("*" if part.isdecimal() else part for part in (name if node.op == "placeholder" else module).split("."))
        first = places.get(path, _Place(name, module, 0))
        places[path] = first._replace(number=first.number + 1)
    return {name: list(places.values()) for name, places in found.items()}


def _shares(whole: _Place, places: Sequence[_Place]) -> list[_Place]:
    """What moves, by place; all of it is said of the first where it does not divide."""
    times, left = divmod(whole.number, sum(place.number for place in places) or 1)
    return [whole] if left or not places else [place._replace(number=times * place.number) for place in places]


def _kinds(held: object, wanted: Placement, *, needs_grad: bool, is_read_again: bool) -> list[tuple[str, str]]:
    """(phase, collective) of a way."""
    if isinstance(held, Stored):
        again = [("backward", "all_gather")] if held.level == 3 and is_read_again else []
        partial = needs_grad and wanted.kind.value != "R"
        return [("forward", "all_gather"), *again, ("backward", "reduce_scatter" if partial else "slice")]
    assert isinstance(held, Placement)
    step = transition(held, wanted, needs_grad=needs_grad, in_time=True)
    assert step is not None
    return [("forward", step.forward), ("backward", step.backward)]


def _stages(staged: Staged) -> list[StagePlan]:
    """Figures of every stage."""
    ops = staged_ops(staged.decision.problem.module)
    rows = []
    shared = {field.name for field in fields(StagePlan)} & {field.name for field in fields(StagePrice)}
    memory = [_by_kind(use) for use in staged.memory]
    if len(memory) == len(staged.rank_bytes):  # a stage is all that its rank has
        memory = [_reaching(kinds, num_bytes) for kinds, num_bytes in zip(memory, staged.rank_bytes, strict=True)]
    each = zip(staged.prices, staged.memory, memory, staged.live, staged.levels, inside_of(staged), strict=True)
    for stage, (price, use, kinds, live, level, inside) in enumerate(each):
        own = [node for node in ops if staged.stage_of[node] == stage]
        rows.append(
            StagePlan(
                begins=own[0].meta.get("module", "") if own else "",
                num_ops=len(own),
                send_forward_bytes=int(price.send_forward_num_bytes),
                send_backward_bytes=int(price.send_backward_num_bytes),
                live=live,
                recompute=level,
                memory_bytes=kinds,
                held=use.held,
                inside=inside,
                **{name: getattr(price, name) for name in shared},
            )
        )
    return rows


def _links(grid: Mesh, machine: MachineProfile) -> Iterator[LinkPlan]:
    """The levels of links that each axis crosses."""
    for axis, size, link in zip(grid.names, grid.sizes, machine.links, strict=True):
        levels, ranks = [link.level or level_of(axis)], [size]
        while link.inside is not None and link.ranks_inside > 1:
            ranks.append(link.ranks_inside)
            link = link.inside
            levels.append(link.level or level_of(axis))
        yield LinkPlan(axis, tuple(levels), tuple(ranks))


def _by_kind(memory: MemoryUse) -> dict[str, int]:
    return {kind: int(getattr(memory, kind)) for kind in MEMORY_KINDS}


def _prediction(staged: Staged, stages: Sequence[StagePlan]) -> Prediction:
    problem, objective = staged.decision.problem, _objective(staged)
    amount = _amount(problem.module)
    tokens = amount.count * _graphs_per_step(staged)
    step_s, degree = staged.step_time_s, staged.shape.pipeline.degree  # the program is of all stages, of which a rank has its share
    microbatches, shared_s = staged.shape.pipeline.microbatches, sum(price.shared_s for price in staged.prices)
    return Prediction(
        step_time_s=step_s,
        compute_s=microbatches * sum(map(_computed_s, stages)) / degree,
        update_s=sum(stage.update_s for stage in stages) / degree,
        blocking_comm_s=(objective.blocking_s + _again_s(staged) + shared_s) / degree + sum(stage.output_s for stage in stages),
        exposed_comm_s=sum(degree * s.output_s + _exposed_s(s, microbatches) for s in stages) / degree,
        tokens_per_s=tokens / step_s if step_s else 0.0,
        mfu=_mfu(staged),
        bubble_fraction=staged.bubble_fraction,
        peak_memory_bytes=tuple(map(int, staged.rank_bytes)),
        memory_bytes=_of_first_rank(staged),
        host_memory_bytes=tuple(map(int, staged.host_bytes)) if any(staged.host_bytes) else (),
        host_s=objective.copied_s / degree,
        unit=amount.unit,
        dispatch_s=max(sum(stage.dispatch_s for stage in stages[rank::degree]) for rank in range(degree)),
    )


def _computed_s(stage: StagePlan) -> float:
    """Computation of a stage in one micro-batch, with what the backward computes again, of which the program knows nothing."""
    return max(0.0, stage.forward_s - stage.forward_comm_s) + max(0.0, stage.backward_s - stage.backward_comm_s)


def _again_s(staged: Staged) -> float:
    """Communication that is waited for once more in a step, for what the backward computes again."""
    stage_of = staged.stage_of
    each_s = sum(staged.costs_of(stage_of[node]).ops[node].given_comm_s for node in staged.again if node in stage_of)
    return staged.shape.pipeline.microbatches * each_s


def _exposed_s(stage: StagePlan, microbatches: int) -> float:
    """Communication of a stage that nothing hides, in the step that is played; copies that are waited for are the host's."""
    copied_s = sum(piece.waited_s for piece in stage.inside if piece.axis == HOST)
    each_s = max(0.0, stage.forward_comm_s + stage.backward_comm_s - copied_s)
    return microbatches * each_s + stage.gather_s + stage.reduce_s - stage.covered_s


def _objective(staged: Staged) -> Objective:
    """That of the decision; where devices differ the sum of what each would take of the part of the model that is on it."""
    if len(staged.costs) == 1:
        return staged.decision.solution.objective
    total = np.zeros(len(fields(Objective)))
    for position, costs in enumerate(staged.costs):
        times = {node: costs.time_s(node) for node in staged.stage_of}
        own_s = sum(time_s for node, time_s in times.items() if staged.stage_of[node] % len(staged.costs) == position)
        total += own_s / sum(times.values()) * np.array(astuple(costs.prices.objective(costs.variants)))
    return Objective(*map(float, total))


def _of_first_rank(staged: Staged) -> dict[str, int]:
    """The peak of the first rank of the pipeline by kind: all that its stages hold; the rest is activations."""
    own = [_by_kind(use) for use in staged.memory[:: staged.shape.pipeline.degree]]
    return _reaching({kind: sum(row[kind] for row in own) for kind in own[0]}, staged.rank_bytes[0])


def _reaching(kinds: dict[str, int], num_bytes: float) -> dict[str, int]:
    """The kinds of a peak of so many bytes, as they are while the schedule is played; what differs from what stages take alone is of
    activations."""
    return kinds | {"activations": kinds["activations"] + int(num_bytes) - sum(kinds.values())}


def _amount(module: fx.GraphModule) -> Amount:
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if n.meta["placeholder"].source is Source.INPUT]
    return amount_of([specs_of(node)[0] for node in inputs])


def _graphs_per_step(staged: Staged) -> int:
    """How often the graph, which is of the whole batch or of one of several that are averaged, stands for a step."""
    pipeline = staged.shape.pipeline
    return pipeline.microbatches if pipeline.is_average else 1


def _mfu(staged: Staged) -> float:
    """Flops of the model's contractions, forward and backward, over what all devices could do (Chowdhery et al. 2022, appendix B)."""
    problem, pricer = staged.decision.problem, staged.decision.prices.pricer
    best = pricer.machine.best_flops_per_s
    if not best or not staged.step_time_s:
        return 0.0
    flops = sum(_flops(problem, pricer).values())
    return float(flops * _graphs_per_step(staged) / (best * staged.shape.grid.num_ranks * staged.step_time_s))


def _flops(problem: Problem, pricer: Pricer) -> dict[torch.dtype, float]:
    """Flops of contractions on the whole graph, by what they compute in."""
    found: defaultdict[torch.dtype, float] = defaultdict(float)
    for cluster in problem.clusters:
        for node in cluster.members:
            if node.op != "placeholder" and specs_of(node):
                rule, letters = problem.factors.rules.get(node), problem.factors.letters.get(node, {})
                found[specs_of(node)[0].dtype] += cluster.multiplicity * pricer.whole_flops(node, rule, letters)
    return found


def _dtypes(staged: Staged) -> tuple[str, ...]:
    """What contractions compute in, that of most flops first; without any what ops give."""
    problem = staged.decision.problem
    weights: Mapping[torch.dtype, float] = _flops(problem, staged.decision.prices.pricer)
    if not any(weights.values()):
        weights = Counter(specs_of(node)[0].dtype for node in staged_ops(problem.module) if specs_of(node))
    dtypes = [dtype for dtype, weight in weights.items() if weight and dtype.is_floating_point]
    return tuple(str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=lambda dtype: -weights[dtype]))
