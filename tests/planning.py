"""Words for tests that need a plan: small models captured once, and plans for them on a machine where whatever can be sharded is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import fx

from autopar.capture.trace import Source
from autopar.compile import Compiled, Normal, compile_plan, plan_held
from autopar.cost.cluster import Cluster
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.layout import replicated, take_shard
from autopar.mesh import Mesh
from autopar.passes.vectors import TOGETHER
from autopar.plan import Plan
from autopar.planner.choose import make_plan
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.manual import Manual
from autopar.solve.pins import Restriction
from autopar.solve.shapes import Shape
from autopar.storage import storage_layout
from tests import models
from tests.lockstep import coordinates
from tests.models import Example

_SAMPLES = tuple(MatmulSample(64, 64, 64, dtype, 1e6) for dtype in ("float32", "bfloat16"))
_SLOW = DeviceProfile("slow", 2**34, _SAMPLES, 1e6, 1e-9, "for tests")
_FREE = LinkProfile(alpha_s=1e-12, bandwidth=1e15)

MODELS: dict[str, Callable[..., Example]] = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "bert": models.bert,
    "distilbert": models.distilbert,
    "vit": models.vit,
    "nn_transformer_encoder": models.nn_transformer_encoder,
    "mlp": models.mlp,
}
Wanted = tuple[int, ...] | Manual
"""A mesh for the solver, or a configuration."""


@cache
def opened(name: str, dropout: float = 0.0) -> tuple[Example, Session]:
    """A model of one block and its capture."""
    example = MODELS[name](layers=1, dropout=dropout)
    return example, open_session(make_skeleton(example.model), (), example.batch)


def planned(session: Session, wanted: Wanted, *pins: Restriction, cluster: Cluster | None = None) -> Plan:
    """By the prices of a cluster, else of the machine for tests."""
    shape = wanted.shape(session.batch_size) if isinstance(wanted, Manual) else Shape(Mesh.of(wanted))
    machine = MachineProfile(_SLOW, (_FREE,) * len(shape.grid.sizes)) if cluster is None else cluster.with_mesh(shape.grid).profile
    plan, _ = make_plan(
        session,
        [shape],
        lambda _: machine,
        memory_limit_bytes=None,
        restrictions=[*pins, wanted] if isinstance(wanted, Manual) else pins,
        optimizer="adamw",
        training=True,
    )
    return plan


@cache
def compiled(name: str, wanted: Wanted, dropout: float = 0.0) -> tuple[Plan, Compiled]:
    _, session = opened(name, dropout)
    plan = planned(session, wanted)
    return plan, compile_plan(session.normal, plan, device=torch.device("cpu"), training=True)


def num_of(node: fx.Node) -> int:
    """How many tensors a collective, or its wait, is for."""
    return len(node.meta.get(TOGETHER, (node,)))


def rank_inputs(example: Example, normal: Normal, plan: Plan, *, seed: int = 0) -> list[list[torch.Tensor]]:
    """Inputs of the local graph for every rank: stored shards, the whole batch, coordinates, seed."""
    mesh, held = plan.mesh, plan_held(normal, plan)
    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers())}
    inputs: list[list[torch.Tensor]] = [[] for _ in range(mesh.num_ranks)]
    for node in normal.module.graph.find_nodes(op="placeholder"):
        entry = node.meta["placeholder"]
        whole = example.batch[entry.name] if entry.source is Source.INPUT else state[entry.name].detach()
        layout = storage_layout(mesh, normal.factors.of(node), held[node]) if node in held else replicated(mesh, whole.shape)
        for rank, given in enumerate(inputs):
            given.append(take_shard(whole, layout, mesh.coordinate(rank)).contiguous())
    for rank, given in enumerate(inputs):
        given += [*coordinates(mesh, rank), torch.tensor([seed])]
    return inputs
