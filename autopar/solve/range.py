"""Where a plan is priced far outside of what was measured: there the model of the price goes on alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.cost.compute import evaluate, op_cost
from autopar.graph import call_of
from autopar.plan import CollectivePlan
from autopar.solve.decide import Decision
from autopar.solve.problem import local_sizes
from autopar.units import bytes_text, count_text

FAR = 8.0
"""Times the largest that was measured."""


def far_notes(decision: Decision, collectives: tuple[CollectivePlan, ...]) -> list[str]:
    """A line for each kind of price: what is largest in the plan, and what was measured."""
    return [*_collectives(decision, collectives), *_matmuls(decision)]


def _collectives(decision: Decision, collectives: tuple[CollectivePlan, ...]) -> Iterator[str]:
    names, links = decision.problem.mesh.names, decision.prices.pricer.machine.links
    sizes: dict[tuple[str, str], list[float]] = {}
    for row in collectives:
        sizes.setdefault((row.kind, row.axis), []).append(row.num_bytes)
    for (kind, axis), found in sizes.items():
        measured = [num_bytes for num_bytes, _ in links[names.index(axis)].measured.get(kind, ())]
        if measured and max(found) > FAR * max(measured):  # below, a collective takes its latency
            known = bytes_text(max(measured))
            yield f"{kind} on axis {axis} of {bytes_text(max(found))} is priced by the model alone: measured up to {known}"


def _matmuls(decision: Decision) -> Iterator[str]:
    problem, device = decision.problem, decision.prices.pricer.machine.device
    largest: dict[torch.dtype, float] = {}
    for cluster, variant in zip(problem.clusters, decision.solution.variants, strict=True):
        for node in cluster.members if cluster.leader.op != "placeholder" else ():
            call = call_of(node)
            cost, dtype = op_cost(call, problem.factors.rules.get(node)), call.results[0].dtype
            if cost.is_matmul and not cost.is_attention:
                sizes = {name: size[variant] for name, size in local_sizes(problem, cluster, node).items()}
                largest[dtype] = max(largest.get(dtype, 0.0), float(evaluate(cost.flops, sizes)))
    for dtype, flops in largest.items():
        sampled = max((s.flops for s in device.matmul if s.dtype == str(dtype).removeprefix("torch.")), default=flops)
        if flops > FAR * sampled:  # smaller ones take their launch
            yield f"matmuls of {count_text(flops)}flop ({dtype}) are priced at the rate of the largest sample, {count_text(sampled)}flop"
