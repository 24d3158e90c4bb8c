"""Factors of every dim of real models, and what happens where there are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import plan as plan_model
from autopar.errors import PlanError
from autopar.factors import MissingRuleWarning
from autopar.graph import call_of, is_call
from autopar.layout import Atoms
from autopar.mesh import Mesh
from autopar.planner.session import open_session
from autopar.rules.registry import rule_of
from autopar.solve.build import build_problem
from autopar.solve.pins import pin
from autopar.verify import verify_plan
from tests.solve.problems import session


@torch.library.custom_op("autopar_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    """An op that has no rule."""
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def parameter_factors(name: str) -> dict[str, Atoms]:
    normal = session(name, 1).normal
    nodes = normal.module.graph.find_nodes(op="placeholder")
    return {node.meta["placeholder"].name: normal.factors.of(node) for node in nodes}


@pytest.mark.parametrize(
    "name, factors",
    [
        ("attn.c_attn.weight", ((96,), (3, 4, 24))),
        ("attn.c_attn.bias", ((3, 4, 24),)),
        ("attn.c_proj.weight", ((4, 24), (96,))),
        ("mlp.c_fc.weight", ((96,), (384,))),
        ("ln_1.weight", ((96,),)),
    ],
)
def test_gpt2(name: str, factors: Atoms) -> None:
    assert parameter_factors("gpt2")[f"transformer.h.0.{name}"] == factors


@pytest.mark.parametrize(
    "name, factors",
    [
        # 8 heads of 8 in 4 groups of 2; rotary positions halve each head.
        ("q_proj", ((4, 2, 2, 4), (64,))),
        ("k_proj", ((4, 2, 4), (64,))),
        ("v_proj", ((4, 8), (64,))),
        ("o_proj", ((64,), (4, 2, 8))),
    ],
)
def test_llama_groups_its_heads(name: str, factors: Atoms) -> None:
    assert parameter_factors("llama")[f"model.layers.0.self_attn.{name}.weight"] == factors


class Cubed(nn.Module):
    """A product around an op that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.outer(cube(self.inner(x))).square().sum()
        return loss


def test_op_without_a_rule_is_replicated_with_a_warning() -> None:
    model, x = Cubed(), torch.randn(8, 8)
    with pytest.warns(MissingRuleWarning, match=r"autopar_tests\.cube\.default has no rule and is computed replicated"):
        made = plan_model(model, (4,), (x,))
    row = next(op for op in made.ops if "cube" in op.op)
    assert (row.rule, row.choices, row.layout) == ("", ("R",), ("R",))


class Torn(nn.Module):
    """One dim of 12 read as (3)(4) and as (4)(3): the cuts 4 and 3 have no common chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        first = torch.softmax(y.unflatten(1, (3, 4)), -1).flatten(1)
        second = torch.softmax(y.unflatten(1, (4, 3)), -1).flatten(1)
        return (first * second).sum()


@pytest.mark.slow
def test_conflicting_cuts_keep_the_numbers() -> None:
    """Under every layout that is offered for the op whose dim is read both ways, and for all ops after it."""
    model, x = Torn(), torch.randn(8, 8)
    opened = open_session(model, (x,), {})
    factors = opened.normal.factors
    assert any(rule.whole > rule_of(call_of(node)).whole for node, rule in factors.rules.items())  # type: ignore[union-attr]
    problem = build_problem(opened.normal.module, factors, Mesh.of(2))
    offered = {
        (cluster.leader.name, name)
        for cluster in problem.clusters
        for (name,) in map(cluster.choice_names, range(len(cluster.variants)))
        if cluster.leader.op != "placeholder"
    }
    verified, refused = 0, set()
    for op, name in sorted(offered):
        try:
            made = plan_model(model, (2,), (x,), constraints=[pin(op, d0=name)])
        except PlanError:
            refused.add(name)
            continue
        verified += 1
        outcome = verify_plan(model, opened.captured, opened.normal, made, (x,), {})
        assert max(outcome.loss_error, outcome.output_error) < 1e-5, (op, name, str(outcome))
        assert outcome.grad_error < 10 * outcome.reference_error + 1e-6, (op, name, str(outcome))
    assert verified > 10
    assert refused <= {"R*", "+0", "+1"}  # partial sums and partial gradients that no neighbour makes or takes up


def test_models_of_the_house_have_all_their_rules() -> None:
    """By what was found, since others may have captured them, and had the warnings."""
    for name in ("gpt2", "llama", "bert", "vit", "nn_transformer_encoder"):
        normal = session(name, 1).normal
        calls = {node for node in normal.module.graph.nodes if is_call(node) and not node.meta["constant"]}
        assert not calls - normal.factors.rules.keys(), name
