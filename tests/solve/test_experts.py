"""Experts in graphs, and configurations that share them: found by products, named by the user, or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.experts import Experts, find_experts
from autopar.solve.manual import Manual, UnusedSettingWarning
from autopar.verify import verify_plan
from tests import models
from tests.marks import few
from tests.planning import planned
from tests.solve.problems import session


class Slots(nn.Module):
    """Slots by arithmetic of indices over all tokens, transposed weights, biases of two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.up_bias = nn.Parameter(torch.randn(4, 32, 16) / 4), nn.Parameter(torch.randn(4, 32))
        self.down, self.down_bias = nn.Parameter(torch.randn(4, 32, 16) / 6), nn.Parameter(torch.randn(4, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, expert = self.gate(flat).softmax(-1).max(-1)
        taken = nn.functional.one_hot(expert, 4)
        slot = expert * len(flat) + (taken.cumsum(0) * taken).sum(-1) - 1
        tokens = torch.zeros(4 * len(flat), 16, dtype=x.dtype, device=x.device).index_put((slot,), flat).view(4, len(flat), 16)
        inner = torch.tanh(torch.bmm(tokens, self.up.transpose(1, 2)) + self.up_bias.unsqueeze(1))
        outer = torch.baddbmm(self.down_bias, inner, self.down).flatten(0, 1)
        return nn.functional.mse_loss(outer[slot] * weight.unsqueeze(-1), flat)


class Everyone(nn.Module):
    """All experts take all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("btd,edf->btef", x, self.up).tanh() * self.gate(x).softmax(-1).unsqueeze(-1)
        return torch.einsum("btef,efd->btd", inner, self.down).square().mean()


class Looked(nn.Module):
    """Every token looks its expert's weights up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        return torch.bmm(self.weight[self.gate(flat).argmax(-1)], flat.unsqueeze(-1)).square().mean()


def opened(model: nn.Module) -> Session:
    return open_session(make_skeleton(model), (torch.randn(8, 4, 16),), {})


def shards(found: Experts) -> dict[str, str]:
    return {node.meta["placeholder"].name: str(place) for node, place in found.shards.items()}


def held(plan: Plan, part: str = "") -> Mapping[str, tuple[str, ...]]:
    return {p.name: p.held for p in plan.parameters if part in p.name}


def test_products_tell_the_experts_and_what_is_added_to_them() -> None:
    found = find_experts(session("mixture", 2).normal)
    assert shards(found) == {f"experts.{i}.{name}": "S0" for i in range(2) for name in ("up", "down", "up_bias")}
    assert found.counts == {4}
    assert shards(find_experts(opened(Slots()).normal)) == dict.fromkeys(("up", "up_bias", "down", "down_bias"), "S0")


@pytest.mark.parametrize("name", ["gpt2", "mlp", "unet"])
def test_other_models_have_none(name: str) -> None:
    assert not find_experts(session(name, 1).normal).shards


def test_experts_are_shared_and_tokens_go_to_them() -> None:
    plan = planned(session("mixture", 1), Manual(dp=4, ep=2, zero=1), cluster=autopar.Cluster(1, 4))
    assert plan.mesh == Mesh(("dp", "ep", "tp"), (2, 2, 1))
    assert held(plan, "gate") == {"experts.0.gate.weight": ("Z1", "Z1", "R")}
    assert set(held(plan, "up").values()) | set(held(plan, "down").values()) == {("Z1", "S0", "R")}
    moved = [(c.kind, c.phase, c.value) for c in plan.collectives if c.axis == "ep" and c.value.startswith("einsum")]
    assert moved == [("all_to_all", phase, value) for value in ("einsum", "einsum_2") for phase in ("forward", "backward")]
    assert {c.axis for c in plan.collectives if c.value in ("experts.0.up", "experts.0.down")} == {"dp"}  # reduced over copies alone


def test_tensor_parallelism_splits_each_expert() -> None:
    plan = planned(session("mixture", 1), Manual(dp=2, ep=2, tp=2), cluster=autopar.Cluster(1, 4))
    assert held(plan)["experts.0.up"] == ("R", "S0", "S2")
    assert held(plan)["experts.0.down"] == ("R", "S0", "S1")


@cache
def routed() -> tuple[nn.Module, dict[str, torch.Tensor], Session]:
    """Mixtral: rows are sorted to experts, and one product has a matrix for each group of rows."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, use_cache=False, **size
    )
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.randint(96, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    opened = open_session(make_skeleton(model), (), batch)
    return model, batch, opened


@pytest.mark.parametrize("config", few(1, [Manual(dp=2, tp=2, zero=3), Manual(tp=2)]), ids=str)
def test_tensor_parallelism_splits_experts_that_rows_are_sorted_to(config: Manual) -> None:
    model, batch, of = routed()
    plan = planned(of, config, cluster=autopar.Cluster(1, config.dp * config.tp))
    on_tp = {name.rpartition(".")[2]: placed[1] for name, placed in held(plan, "experts").items()}
    assert on_tp == {"gate_up_proj": "S1.1", "down_proj": "S2"}
    moved = [(c.kind, c.phase) for c in plan.collectives if c.axis == "tp" and c.value.startswith("sorted_mm")]
    assert moved == [("all_reduce", "forward")]
    found = verify_plan(model, of.captured, of.normal, plan, (), batch)
    assert max(found.loss_error, found.output_error) <= 1e-6, str(found)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)


def test_experts_that_rows_are_sorted_to_are_not_shared() -> None:
    _, _, of = routed()
    with pytest.raises(PlanError, match=r"gate_up_proj \(4, 128, 32\) goes into autopar.sorted_mm.*with tp to split each"):
        planned(of, Manual(dp=2, ep=2))
    with pytest.raises(PlanError, match=r"its rule: s k, e! k n, s -> s n.*with tp to split each"):
        planned(of, Manual(dp=2, ep=2, experts=("*.gate_up_proj", "*.down_proj")))


CONFIGS = (
    Manual(dp=4, ep=2, zero=3),
    Manual(dp=2, ep=2, tp=2, sequence_parallel=True),
    Manual(dp=2, ep=2, cp=2, zero=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values_are_those_of_the_model(config: Manual) -> None:
    model, batch = models.mixture(layers=1)
    of = session("mixture", 1)
    found = verify_plan(model, of.captured, of.normal, planned(of, config), (), batch)
    assert max(found.loss_error, found.output_error) <= 1e-6, str(found)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind, config", [(Slots, Manual(dp=4, ep=2)), (Everyone, Manual(dp=4, ep=4, experts=("up",)))])
def test_values_of_other_ways_to_write_experts(kind: type[nn.Module], config: Manual) -> None:
    model, x = kind(), torch.randn(8, 4, 16)
    of = open_session(make_skeleton(model), (x,), {})
    plan = planned(of, config)
    assert all(p.held[1] == "S0" for p in plan.parameters if not p.name.startswith("gate"))
    found = verify_plan(model, of.captured, of.normal, plan, (x,), {})
    assert found.loss_error <= 1e-6, str(found)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)


@pytest.mark.parametrize(
    "kind, config, said",
    [
        (Everyone, Manual(dp=2, ep=2), r"of 2 stacked parameters no product .*; up \(4, 16, 32\) goes into aten.einsum.default"),
        (Looked, Manual(dp=2, ep=2), r"weight \(4, 16, 16\) goes into aten.index.Tensor .* name the parameters"),
        (Looked, Manual(dp=2, ep=2, experts=("weight",)), "aten.index.Tensor .* reads parameters of experts, and no way to split it"),
        (Slots, Manual(dp=8, ep=8), r"up has 4 experts \(dim 0 of \(4, 32, 16\)\), which ep=8 does not divide"),
        (Slots, Manual(dp=2, ep=2, experts=("*.weights",)), r"experts='\*.weights' names no parameter; .* like up, up_bias"),
    ],
)
def test_what_cannot_be_shared_says_why(kind: type[nn.Module], config: Manual, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(opened(kind()), config)


def test_models_without_stacks() -> None:
    with pytest.raises(PlanError, match="no parameter is a stack of matrices"):
        planned(session("mlp"), Manual(dp=2, ep=2))


def test_stacks_that_are_left_over_are_told() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slots, self.everyone = Slots(), Everyone()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.slots(x), self.everyone(x)]).sum()

    with pytest.warns(UnusedSettingWarning, match=re.escape("everyone.up, everyone.down may hold experts too")):
        planned(opened(Both()), Manual(dp=2, ep=2))


def test_degrees_are_checked() -> None:
    with pytest.raises(PlanError, match="ep divides dp / replicas; got dp=2, replicas=1, ep=4"):
        Manual(dp=2, ep=4)
    with pytest.raises(PlanError, match="at least 1, got dp=1, tp=1, pp=1, cp=1, ep=0"):
        Manual(ep=0)
    assert str(Manual(dp=4, ep=2)) == "Manual(dp=4, tp=1, zero=0, ep=2)"
    assert autopar.Manual(dp=4, ep=2, cp=2, tp=2, pp=2).grid(32).num_ranks == 32
