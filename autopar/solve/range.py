"""Where a plan is priced far outside of what was measured: there the model of the price goes on alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.cost.compute import evaluate, op_cost
from autopar.graph import call_of
from autopar.plan import CollectivePlan
from autopar.solve.decide import Decision
from autopar.solve.problem import local_sizes
from autopar.units import bytes_text, count_text, number_text

FAR = 8.0
"""Times the largest that was measured."""


def far_notes(decision: Decision, collectives: tuple[CollectivePlan, ...]) -> list[str]:
    """A line for each kind of price: what is largest in the plan, and what was measured."""
    return [*_collectives(decision, collectives), *_contractions(decision)]


def _collectives(decision: Decision, collectives: tuple[CollectivePlan, ...]) -> Iterator[str]:
    mesh, links = decision.problem.mesh, decision.prices.pricer.machine.links
    sizes: dict[tuple[str, str], list[float]] = {}
    for row in collectives:
        sizes.setdefault((row.kind, row.axis), []).append(row.num_bytes)
    for (kind, axis), found in sizes.items():
        link, ranks = links[mesh.names.index(axis)], mesh.sizes[mesh.names.index(axis)]
        measured = [num_bytes for num_bytes, _ in link.measured.get(kind, ())]
        if measured and max(found) > FAR * max(measured):  # below, a collective takes its latency
            known = bytes_text(max(measured))
            yield f"{kind} on axis {axis} of {bytes_text(max(found))} is priced by the model alone: measured up to {known}"
        if measured and ranks > link.group_size * link.ranks_inside:
            yield f"{kind} on axis {axis} of {number_text(ranks, 'rank')} is priced by the model: measured on {link.group_size}"


def _contractions(decision: Decision) -> Iterator[str]:
    problem, device = decision.problem, decision.prices.pricer.machine.device
    largest: dict[torch.dtype, float] = {}
    longest: dict[torch.dtype, float] = {}
    for cluster, variant in zip(problem.clusters, decision.solution.variants, strict=True):
        for node in cluster.members if cluster.leader.op != "placeholder" else ():
            call = call_of(node)
            cost, dtype = op_cost(call, problem.factors.rules.get(node)), call.results[0].dtype
            sizes = {name: size[variant] for name, size in local_sizes(problem, cluster, node).items()} if cost.is_matmul else {}
            if cost.is_attention and cost.sides and device.sampled_length(dtype):
                longest[dtype] = max(longest.get(dtype, 0.0), float(evaluate(cost.sides[1], sizes)))
            elif cost.is_matmul:
                largest[dtype] = max(largest.get(dtype, 0.0), float(evaluate(cost.flops, sizes)))
    for dtype, flops in largest.items():
        sampled = device.sampled_flops(dtype)
        if flops > FAR * sampled:  # smaller ones take their launch
            yield f"matmuls of {count_text(flops)}flop ({dtype}) are priced at the rate of the largest sample, {count_text(sampled)}flop"
    for dtype, keys in longest.items():
        length = device.sampled_length(dtype)
        if keys > FAR * length:
            known = number_text(length, "key")
            yield f"attention over {keys:.0f} keys ({dtype}) is priced at the rate of the longest sample, {known}"
