"""The one visible list of passes, in the order in which they run.

    captured graph  --normalise-->  normal graph  --plan-->  local graph  --fuse, differentiate-->  forward, backward
                    --overlap-->  the same, reordered

Every arrow takes a graph and gives a graph; `show.code` prints any of them as Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.factors import Factors, find_factors
from autopar.graph import is_call
from autopar.passes import constants, normalize
from autopar.passes.differentiate import Halves, differentiate
from autopar.passes.fuse import fuse_biases
from autopar.passes.overlap import overlap
from autopar.passes.shard import shard_graph
from autopar.plan import Plan
from autopar.rules.strategies import Choice
from autopar.storage import Held, Stored, parse_held
from autopar.trace import Captured, Source

NORMALIZE = (
    normalize.drop_noops,
    constants.mark_constants,
    constants.recognise_masks,
    constants.fold_identity_indexing,
    normalize.split_biases,
    normalize.expand_means,
    normalize.expand_losses,
    normalize.expand_attention_dropout,
    normalize.unify_dropout,
    normalize.drop_dead_code,
    constants.mark_constants,
)


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal graph with its factors."""

    module: fx.GraphModule
    factors: Factors


def normal_graph(captured: Captured, sizes: Mapping[sympy.Symbol, int]) -> Normal:
    """The captured graph for concrete sizes, in normal form."""
    module = normalize.mark_sources(normalize.concretize(captured, sizes), captured)
    for step in NORMALIZE:
        module = step(module)
    module.graph.lint()
    module.recompile()
    return Normal(module, find_factors(module))


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a plan becomes: the local graph, and its forward and backward."""

    local: fx.GraphModule
    halves: Halves


def local_graph(normal: Normal, plan: Plan, *, device: torch.device, training: bool) -> fx.GraphModule:
    """What every rank runs, before it is differentiated; arguments and errors are those of `compile_plan`."""
    choices, held = plan_choices(normal, plan), plan_held(normal, plan)
    return fuse_biases(shard_graph(normal.module, normal.factors, plan.mesh, choices, held, device=device, training=training))


def compile_plan(normal: Normal, plan: Plan, *, device: torch.device, training: bool) -> Compiled:
    """Rewrite a normal graph as the plan says.

    Args:
        normal: the graph that the plan was made for.
        plan: the plan.
        device: where it will run.
        training: make a backward too.

    Raises:
        PlanError: the plan asks for what the rules do not allow.
    """
    held = plan_held(normal, plan)
    local = local_graph(normal, plan, device=device, training=training)
    order = normal.module.graph.find_nodes(op="placeholder")
    levels = {i: _levels(held.get(node, ())) for i, node in enumerate(order)}
    parameters = [i for i, node in enumerate(order) if node in held]
    halves = differentiate(local, gather_again=[i for i in levels if 3 in levels[i]], device=device, training=training)
    forward = overlap(halves.forward, parameters=parameters)
    backward = halves.backward
    if backward is not None:
        names = [node.name for node in halves.forward.graph.find_nodes(op="placeholder")]
        stored = {f"saved_{names[i]}" for i in parameters}
        inputs = backward.graph.find_nodes(op="placeholder")
        late = [k for k, i in enumerate(halves.with_grad) if 1 in levels[i]]
        backward = overlap(backward, parameters=[k for k, node in enumerate(inputs) if node.name in stored], late=late)
    return Compiled(local, replace(halves, forward=forward, backward=backward))


def _levels(held: tuple[Held, ...]) -> set[int]:
    return {h.level for h in held if isinstance(h, Stored)}


def plan_choices(normal: Normal, plan: Plan) -> dict[fx.Node, tuple[Choice, ...]]:
    """The choice of every op on every axis, by the names in the plan."""
    named = {op.name: op.choices for op in plan.ops}
    chosen = {}
    for node in normal.module.graph.nodes:
        if is_call(node) and not node.meta["constant"]:
            if node.name not in named:
                raise PlanError(f"the plan says nothing of op {node.name}; it was made for another graph of this model")
            if len(named[node.name]) != len(plan.mesh.sizes):
                raise PlanError(
                    f"op {node.name} has {len(named[node.name])} choices, but mesh ({plan.mesh}) has {len(plan.mesh.sizes)} axes"
                )
            chosen[node] = tuple(
                _choice(normal, node, name, size, axis)
                for name, size, axis in zip(named[node.name], plan.mesh.sizes, plan.mesh.names, strict=True)
            )
    return chosen


def _choice(normal: Normal, node: fx.Node, name: str, size: int, axis: str) -> Choice:
    choices = normal.factors.choices(node, size)
    for choice in choices:
        if choice.name == name:
            return choice
    rule = normal.factors.rules.get(node)
    raise PlanError(f"op {node.name} ({rule}) cannot be {name!r} on axis {axis!r}; legal there: {', '.join(c.name for c in choices)}")


def plan_held(normal: Normal, plan: Plan) -> dict[fx.Node, tuple[Held, ...]]:
    """How every parameter is held on every axis."""
    nodes = normal.module.graph.find_nodes(op="placeholder")
    parameters = [node for node in nodes if node.meta["placeholder"].source is Source.PARAMETER]
    return {node: tuple(map(parse_held, plan.parameter(node.meta["placeholder"].name).held)) for node in parameters}


