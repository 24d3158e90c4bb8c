"""Which reductions of a local graph travel compressed, where what they become stands, and what they give on virtual ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import fx, nn

from autopar import Manual
from autopar.compile import Compiled, compile_plan, stage_graph, stage_plan
from autopar.graph import spec_of
from autopar.ops import codec, collectives
from autopar.passes.aliases import WAIT
from autopar.passes.compress import kept_bytes
from autopar.passes.overlap import STARTS, overlap
from autopar.plan import Plan
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.virtual import run_lockstep
from tests import models
from tests.marks import few
from tests.models import Example
from tests.planning import planned, rank_inputs

pytestmark = pytest.mark.slow

_c10d = torch.ops._c10d_functional
KINDS = ("bf16", "fp16", "int8", "topk:0.05", "powersgd:4")
CPU = torch.device("cpu")


@cache
def opened() -> tuple[Example, Session]:
    example = models.gpt2(layers=1, hidden=64, vocab=128, batch=8, sequence=8)
    return example, open_session(make_skeleton(example.model), (), example.batch)


def plan_of(wanted: Manual, compress: str) -> Plan:
    return replace(planned(opened()[1], wanted), compression=compress)


@cache
def compiled(wanted: Manual, compress: str) -> Compiled:
    return compile_plan(opened()[1].normal, plan_of(wanted, compress), device=CPU, training=True)


def reductions(local: fx.GraphModule) -> dict[str, bool]:
    """The reductions behind reshards of a local graph by name, and whether they travel compressed."""
    nodes = [node for node in local.graph.nodes if node.target in (collectives.replicate, collectives.all_gather, collectives.all_reduce)]
    return {f"{node.args[0].name}@{node.kwargs['axis']}": bool(node.kwargs.get("compress")) for node in nodes}


@pytest.mark.parametrize("kind", KINDS)
def test_large_gradients_of_parameters_alone_are_compressed(kind: str) -> None:
    local = compiled(Manual(dp=2, tp=2), kind).local
    for node in local.graph.nodes:
        is_compressed, axis = bool(node.kwargs.get("compress")), node.kwargs.get("axis")
        is_parameter = node.all_input_nodes and node.all_input_nodes[0].op == "placeholder"
        if is_compressed:
            assert is_parameter
            assert axis == "dp"
            assert len(spec_of(node).shape) == 2
        elif node.target is collectives.replicate and is_parameter and axis == "dp":
            assert len(spec_of(node).shape) == 1 or spec_of(node).numel < 4096
    assert any(reductions(local).values())
    assert not all(reductions(local).values()), "tensor parallelism stays exact"


def test_states_have_names_of_their_own() -> None:
    local = compiled(Manual(dp=2, tp=2, zero=3), "topk:0.05").local
    states = [node.kwargs["state"] for node in local.graph.nodes if node.kwargs.get("state")]
    assert len(set(states)) == len(states) > 2
    assert "transformer.h.0.mlp.c_fc.weight.0@dp" in states


def test_what_is_kept_is_counted_by_parameter() -> None:
    """A rank keeps the error of the whole gradient, even where it stores a part of the parameter."""
    kept = kept_bytes(compiled(Manual(dp=2, tp=2, zero=3), "topk:0.05").local)
    shapes = {p.name: p.shape for p in plan_of(Manual(dp=2, tp=2, zero=3), "").parameters}
    assert kept["transformer.h.0.mlp.c_fc.weight"] == 4 * math.prod(shapes["transformer.h.0.mlp.c_fc.weight"]) // 2
    assert not any(name.endswith("bias") for name in kept)


def test_stages_have_states_of_their_own() -> None:
    normal = opened()[1].normal
    staged = stage_plan(normal, plan_of(Manual(pp=2, dp=2, microbatches=2), "topk:0.05"))
    states = [
        {node.kwargs["state"] for node in stage_graph(staged, stage, device=CPU, training=True).graph.nodes if node.kwargs.get("state")}
        for stage in range(2)
    ]
    assert states[0]
    assert states[1]
    assert not states[0] & states[1]
    assert {"transformer.wte.weight.0@dp", "transformer.wte.weight.1@dp"} <= states[0] | states[1], "a tied weight has one for each stage"


def test_nothing_is_compressed_without_a_backward() -> None:
    plan = plan_of(Manual(dp=4), "int8")
    local = compile_plan(opened()[1].normal, plan, device=CPU, training=False).local
    assert not any(node.kwargs.get("compress") for node in local.graph.nodes)


@cache
def gradients(wanted: Manual, compress: str) -> list[dict[str, torch.Tensor]]:
    """Of every virtual rank, by parameter."""
    example, session = opened()
    plan, halves = plan_of(wanted, compress), compiled(wanted, compress).halves
    assert halves.backward is not None
    mesh = plan.mesh
    results = run_lockstep(halves.forward, rank_inputs(example, session.normal, plan), mesh)
    tangents = [torch.ones_like(results[0][i]) for i in halves.differentiable]
    names = [entry.name for entry in session.captured.placeholders]
    found = run_lockstep(halves.backward, [[*result[halves.num_outputs :], *tangents] for result in results], mesh)
    return [{names[i]: grad for i, grad in zip(halves.with_grad, own, strict=True)} for own in found]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("wanted", few(1, [Manual(dp=2, tp=2, zero=3), Manual(dp=4)]), ids=str)
def test_gradients_are_nearly_the_exact_ones(wanted: Manual, kind: str) -> None:
    found, exact = gradients(wanted, kind), gradients(wanted, "")
    errors: dict[str, float] = {}
    for ours, plain in zip(found, exact, strict=True):
        for name, grad in ours.items():
            largest = plain[name].abs().max().clamp_min(1e-12)  # of a position that no token has it is 0
            errors[name] = max(errors.get(name, 0.0), float((grad - plain[name]).abs().max() / largest))
    limit = {"bf16": 2e-2, "fp16": 2e-3, "int8": 3e-2}[kind]
    assert all(error < limit for error in errors.values()), errors
    assert errors["transformer.ln_f.weight"] == 0.0
    assert errors["transformer.h.0.mlp.c_fc.weight"] > 0.0


def position(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(module.graph.nodes)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_compression_waits_for_waits_for_the_end(kind: str) -> None:
    """What is first sent is made among the computation; nothing after them comes before its last op."""
    backward = compiled(Manual(dp=4), kind).halves.backward
    assert backward is not None
    at = position(backward)
    computed = [node for node in at if node.target in (torch.ops.aten.mm.default, torch.ops.aten.embedding_dense_backward.default)]
    last = max(at[node] for node in computed)
    encoded = [node for node in at if node.target in codec.OPS and not any(u.target is WAIT for u in node.all_input_nodes)]
    decoded = [node for node in at if node.target in codec.OPS and any(u.target is WAIT for u in node.all_input_nodes)]
    assert min(at[node] for node in decoded) > last
    assert min(at[node] for node in encoded) < last
    if kind in ("int8", "topk:0.05"):  # small all-reduces are collected
        assert any(node.target in STARTS and at[node] < last for node in at)


@pytest.mark.parametrize(
    "num_bytes, order",
    [
        (2**20, [*["start"] * 4, *["wait", "start"] * 4, *["wait"] * 4]),
        (2**23, [*["start"] * 3, *["wait", "start"] * 2, *["wait"] * 2, "start", *["wait", "start"] * 2, *["wait"] * 2]),
    ],
)
def test_second_collectives_start_before_any_is_waited_for(num_bytes: int, order: list[str]) -> None:
    """But for what would take much together: of four gradients the first two are decoded before the last goes out."""
    graph = fx.Graph()
    given = [graph.placeholder(f"g{i}") for i in range(4)]
    results = []
    received = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    for grad in given:
        x = grad
        for _ in range(2):
            coded = graph.call_function(torch.ops.autopar.narrow.default, (x, torch.bfloat16, 1.0))
            waited = graph.call_function(WAIT, (graph.call_function(_c10d.all_reduce.default, (coded, "sum", "autopar.dp")),))
            x = graph.call_function(torch.ops.autopar.widen.default, (waited, torch.float32, 1.0))
            waited.meta["val"], x.meta["val"] = received, received[:1]
        results.append(x)
    graph.output(tuple(results))
    ordered = overlap(fx.GraphModule(nn.Module(), graph), parameters=[])
    kinds = [{_c10d.all_reduce.default: "start", WAIT: "wait"}.get(node.target, "") for node in ordered.graph.nodes]
    assert [kind for kind in kinds if kind] == order


def test_small_factors_travel_together() -> None:
    backward = compiled(Manual(dp=4), "powersgd:4").halves.backward
    assert backward is not None
    together = [node for node in backward.graph.nodes if node.target is _c10d.all_reduce_coalesced_.default]
    assert any(len(node.args[0]) > 2 and all(x.all_input_nodes[0].target in codec.OPS for x in node.args[0]) for node in together)


