"""Hand-written configurations on GPT-2: what they fix, and what they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.cost.cluster import Cluster
from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planner.choose import make_plan
from autopar.planner.session import Session, open_session
from autopar.solve.build import build_problem
from autopar.solve.manual import Manual, UnusedSettingWarning
from autopar.solve.pins import Restriction, pin
from autopar.solve.shapes import Shape
from tests import models, planning
from tests.solve.problems import session


def planned(config: Manual, *pins: Restriction, of: Session | None = None, limit: float = np.inf) -> Plan:
    mesh = config.grid(config.dp * config.cp * config.tp)
    restrictions: Sequence[Restriction] = (*pins, config)
    plan, _ = make_plan(
        of or session("gpt2", 1),
        [Shape(mesh)],
        lambda m: Cluster(1, m.num_ranks).with_mesh(m).profile,
        memory_limit_bytes=limit,
        restrictions=restrictions,
        optimizer="adamw",
        training=True,
        config=str(config),
    )
    return plan


def held(plan: Plan, name: str) -> tuple[str, ...]:
    return plan.parameter(name).held


def test_tensor_parallel_splits_every_product() -> None:
    plan = planned(Manual(tp=4))
    block = "transformer.h.0"
    assert held(plan, f"{block}.attn.c_attn.weight") == ("R", "S1.1")  # (3)(4)(24): on the heads
    assert held(plan, f"{block}.attn.c_proj.weight") == ("R", "S0")
    for name in ("mlp.c_fc", "mlp.c_proj"):
        assert held(plan, f"{block}.{name}.weight")[1].startswith("S")
    kinds = {(c.kind, c.axis) for c in plan.collectives}
    assert ("all_reduce", "tp") in kinds
    assert {axis for _, axis in kinds} == {"tp"}


def test_context_parallel_splits_the_sequence_and_gathers_keys_and_values() -> None:
    plan = planned(Manual(cp=2, tp=2, zero=3))
    assert plan.mesh == Mesh(("dp", "cp", "tp"), (1, 2, 2))
    (attention,) = (op for op in plan.ops if "scaled_dot_product_attention" in op.op)
    assert attention.choices == ("R", "s", "b1")
    matrices = [p for p in plan.parameters if len(p.factors) == 2]
    assert all(p.held[1] == "Z3" for p in matrices)
    (gathered,) = (c for c in plan.collectives if c.axis == "cp" and c.kind == "all_gather" and c.value.startswith("transpose"))
    assert (gathered.count, gathered.num_bytes) == (2, 4 * 16 * 96 * 4 // 2)  # keys and values, of half of the heads each


def test_context_parallelism_wants_a_sequence_that_it_divides() -> None:
    with pytest.raises(PlanError, match=r"has a sequence of 16 \(dim 1\), which cp=3 does not divide"):
        planned(Manual(cp=3))
    with pytest.raises(PlanError, match="no input has a sequence"):
        planned(Manual(cp=2), of=open_session(torch.nn.Linear(8, 4), (torch.randn(8),), {}))
    with pytest.raises(MeshError, match=r"dp \* cp \* tp \* pp = 4 ranks"):
        Manual(dp=2, cp=2).grid(8)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_goes_by_heads_in_tensor_parallelism(sequence_parallel: bool) -> None:
    """Whatever it costs to go by queries."""
    normal = session("gpt2", 1).normal
    problem = build_problem(normal.module, normal.factors, Mesh(("dp", "tp"), (1, 2)))
    everything = [list(range(len(cluster.variants))) for cluster in problem.clusters]
    allowed = Manual(tp=2, sequence_parallel=sequence_parallel)(problem, everything)
    (index,) = (i for i, c in enumerate(problem.clusters) if "scaled_dot_product_attention" in str(c.leader.target))
    cluster = problem.clusters[index]
    assert "s" in {cluster.choice_names(v)[1] for v in everything[index]}
    left = {cluster.choice_names(v)[1] for v in allowed[index]}
    assert "b1" in left
    assert "s" not in left


def test_data_parallel_replicates_and_splits_the_batch() -> None:
    plan = planned(Manual(dp=4))
    assert {p.held for p in plan.parameters} == {("R", "R")}
    assert {(c.kind, c.axis, c.phase) for c in plan.collectives if c.value.startswith("transformer.h")} == {
        ("all_reduce", "dp", "backward")
    }
    block = [op for op in plan.ops if op.module.startswith("transformer.h.0") and op.time_s]
    assert block
    assert all(op.layout[0] == "S0" for op in block)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_levels_hold_shards(level: int) -> None:
    plan = planned(Manual(dp=4, zero=level))
    assert {p.held for p in plan.parameters} == {(f"Z{level}", "R")}
    whole = planned(Manual(dp=4))
    memory, replicated = plan.prediction.memory_bytes, whole.prediction.memory_bytes
    whole_bytes = sum(p.num_bytes for p in whole.parameters)
    assert sum(p.num_bytes for p in plan.parameters) * 4 == whole_bytes
    assert replicated["parameters"] - memory["parameters"] == whole_bytes * 3 // 4
    assert memory["optimizer"] * 4 == replicated["optimizer"] == 2 * whole_bytes
    in_two = planning.planned(session("gpt2", 1), Manual(dp=2, zero=level, microbatches=2))  # all gradients are there at the peak
    memory = in_two.prediction.memory_bytes
    assert memory["gradients"] == (whole_bytes * 3 // 2 if level == 1 else whole_bytes // 2), "whole, and the shards that come of them"
    assert (memory["buffers"] > whole_bytes // 4) is (level > 1), "some are on their way, beside the outputs"
    kinds = {c.kind for c in plan.collectives if c.value.startswith("transformer.h")}
    assert kinds == {"all_gather", "reduce_scatter"}


def test_two_axes_combine() -> None:
    plan = planned(Manual(dp=2, tp=2, zero=3))
    assert str(plan.mesh) == "dp=2,tp=2"
    weight = plan.parameter("transformer.h.0.attn.c_attn.weight")
    assert weight.held == ("Z3", "S1.1")
    assert weight.num_bytes * 4 == 96 * 288 * 4


def test_sequence_parallel_keeps_less() -> None:
    """Where memory asks for it; on so small a model, one all-reduce is faster than its two halves."""
    plain = planned(Manual(tp=4))
    with pytest.raises(InfeasibleError):
        planned(Manual(tp=4), limit=0.95 * plain.prediction.peak_memory_bytes[0])
    split = planned(Manual(tp=4, sequence_parallel=True), limit=0.95 * plain.prediction.peak_memory_bytes[0])
    assert split.prediction.memory_bytes["activations"] < plain.prediction.memory_bytes["activations"]
    norms = [op.layout[1] for op in split.ops if op.op == "aten.layer_norm"]
    assert "S1" in norms


def test_product_must_be_the_ranks() -> None:
    with pytest.raises(MeshError, match=r"Manual\(dp=2, tp=2, zero=0\) needs dp \* tp \* pp = 4 ranks, but there are 8"):
        Manual(dp=2, tp=2).grid(8)


def test_batch_must_divide() -> None:
    with pytest.raises(PlanError, match="has a batch of 4, which dp=3 does not divide"):
        planned(Manual(dp=3))


def test_micro_batches_must_divide_over_dp() -> None:
    """Else every data-parallel rank would do the whole of each."""
    example = models.mlp(layers=1, batch=8)
    with pytest.raises(PlanError, match=r"a batch of 8 in 8 micro-batches of 1, which dp=2 does not divide; use .* a multiple of 16"):
        autopar.plan(example.model, 2, example.batch, plan=Manual(dp=2, microbatches=8))


def test_its_text_tells_stages_and_experts_by_name() -> None:
    config = Manual(dp=2, pp=2, ep=2, stages=("h.1",), experts=("*.w1", "*.w2"))
    assert str(config) == "Manual(dp=2, tp=1, zero=0, ep=2, pp=2, 1f1b, stages=h.1, experts=*.w1+*.w2)"


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"dp": 0}, "whole numbers, at least 1, got dp=0, tp=1"),
        ({"dp": "4"}, "whole numbers, at least 1, got dp='4', tp=1"),
        ({"tp": 2.0}, "whole numbers, at least 1, got dp=1, tp=2.0"),
        ({"pp": True}, "whole numbers, at least 1, got dp=1, tp=1, pp=True"),
        ({"zero": 4}, "level from 0 to 3, got 4"),
        ({"zero": True}, "level from 0 to 3, got True"),
        ({"microbatches": "2"}, "microbatches is a whole number, at least 1, got '2'"),
        ({"micro_batch": 1.5}, "micro_batch is a whole number, at least 1, got 1.5"),
        ({"sequence_parallel": "no"}, "sequence_parallel is True or False, got 'no'"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'; there are gpipe, 1f1b,"),
        ({"schedule": None}, "a schedule reads like '1f1b' or 'interleaved:2', got None"),
        ({"recompute": ["full"]}, r"or a share as full:3/8, got \['full'\]"),
        ({"offload": ["optimizer"]}, r"offload is text .* got \['optimizer'\]"),
        ({"stages": "h.4", "pp": 4}, r"stages is several names, as \('h.4', 'h.8'\) or \('h.4',\), got 'h.4'"),
        ({"dp": 4, "ep": 3}, "so ep divides dp / replicas; got dp=4, replicas=1, ep=3"),
        ({"replicas": 0}, "whole numbers, at least 1, got .* replicas=0"),
        ({"dp": 4, "replicas": 3}, "so they divide dp; got dp=4, replicas=3"),
        ({"dp": 4, "replicas": 2, "ep": 4}, "so ep divides dp / replicas; got dp=4, replicas=2, ep=4"),
        ({"experts": 3}, "experts is several names, .* got 3"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Manual(**settings)  # type: ignore[arg-type]


def test_zero_without_data_parallel_ranks_warns() -> None:
    with pytest.warns(UnusedSettingWarning, match="zero=3 shards over dp = 1; every parameter stays whole"):
        plan = planned(Manual(tp=2, zero=3))
    assert not any("Z" in h for p in plan.parameters for h in p.held)


def test_replicas_hold_the_same_shards() -> None:
    plan = planned(Manual(dp=4, zero=3, replicas=2))
    assert str(plan.mesh) == "replica=2,dp=2,tp=1"
    assert {p.held for p in plan.parameters} == {("R", "Z3", "R")}
    with pytest.warns(UnusedSettingWarning, match="replicas=2 hold the same ZeRO shards, and with zero=0 there are none"):
        planned(Manual(dp=4, replicas=2))
    with pytest.warns(UnusedSettingWarning, match="zero=1 shards over dp / replicas = 1"):
        planned(Manual(dp=4, zero=1, replicas=4))


def test_zero_that_divides_nothing_warns_and_names() -> None:
    """The norms have 30 weights, the linears also 64 rows or columns."""
    example = models.mlp(layers=1, hidden=30, intermediate=64, batch=4)
    with pytest.warns(UnusedSettingWarning, match=r"no factor of blocks\.0\.0\.weight, .* is divisible by dp = 4"):
        plan = planned(Manual(dp=4, zero=2), of=open_session(example.model, (), example.batch))
    assert {p.name.removeprefix("blocks.0."): p.held[0] for p in plan.parameters} == {
        "0.weight": "R", "0.bias": "R", "1.weight": "Z2", "1.bias": "Z2", "3.weight": "Z2", "3.bias": "R"
    }  # fmt: skip


def test_honoured_settings_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedSettingWarning)
        planned(Manual(dp=2, zero=3), of=session("mlp"))


def test_pin_that_contradicts_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match=r"together leave no way for transformer\.h\.0\.mlp\.c_fc\.weight"):
        planned(Manual(dp=2), pin("transformer.h.0.mlp.c_fc.weight", dp="zero3"))


class Corrected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.bias = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores + self.bias.squeeze()).topk(2, -1).indices
        loss: torch.Tensor = scores.gather(-1, chosen).square().mean()
        return loss


def test_a_vector_of_two_dims_may_stay_whole() -> None:
    """A bias [1, n] that choices are corrected by, which want all of it: it was only held by columns, which nothing can read."""
    model = Corrected()
    plan = planned(Manual(tp=2), of=open_session(model, (torch.randn(8, 16),), {}))
    assert held(plan, "bias") == ("R", "R")


class Placed(nn.Module):
    """Positions are added to what is normalised before and after, which wants it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 4, 16))
        self.before, self.after, self.product = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.product(self.after(self.before(x) + self.positions)).square().mean()
        return loss


def test_a_matrix_that_is_added_may_stay_whole() -> None:
    plan = planned(Manual(tp=2), of=open_session(Placed(), (torch.randn(8, 4, 16),), {}))
    assert held(plan, "positions") == ("R", "R")
    assert "S0" in held(plan, "product.weight") or "S1" in held(plan, "product.weight")


def test_a_factor_that_no_op_can_split_is_not_split() -> None:
    """The last convolution has 3 output channels, and a bias that cannot be added to partial sums over its input channels."""
    example = models.unet(layers=1)
    plan = planned(Manual(tp=2), of=open_session(example.model, (), example.batch))
    assert held(plan, "last.weight") == ("R", "R")
    assert held(plan, "first.weight") == ("R", "S0")


class Weighted(nn.Module):
    """Columns have weights, which are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.product(x) * columns, y)


@pytest.mark.parametrize("config", [Manual(dp=2), Manual(dp=4, microbatches=2)], ids=str)
def test_inputs_that_are_not_of_the_batch_need_not_divide(config: Manual) -> None:
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 5), "columns": torch.rand(5)}
    plan = autopar.plan(Weighted(), config.dp, batch, plan=config)
    assert [op.layout[0] for op in plan.ops if op.op == "aten.linear"] == ["S0"]


class Heads(nn.Module):
    """Features of samples are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return nn.functional.mse_loss(hidden, y) + nn.functional.mse_loss(self.head(hidden), y)


def test_features_of_samples_are_no_sequence() -> None:
    """Tensor parallelism splits products on them, as it does not on a sequence."""
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    assert autopar.verify(Heads(), 2, batch, Manual(tp=2)).grad_error < 1e-6
    plan = autopar.plan(Heads(), 2, batch, plan=Manual(tp=2))
    assert held(plan, "body.weight") != ("R", "R") != held(plan, "head.weight")


class Sorted(nn.Module):
    """A weight of a product is sorted too, which wants all of its rows; another stands in a product alone."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x @ self.other @ self.own).square().mean() + self.own.flatten().median()
        return loss


def test_a_weight_that_is_read_whole_stays_whole_with_a_warning() -> None:
    model, batch = Sorted(), (torch.randn(4, 8),)
    with pytest.warns(UnusedSettingWarning, match=r"own stays whole on tp, since aten\..* at test_manual\.py:\d+ .* reads it"):
        plan = autopar.plan(model, 2, batch, plan=Manual(tp=2))
    assert held(plan, "own") == ("R", "R") != held(plan, "other")
    assert autopar.verify(model, 2, batch, plan).grad_error < 1e-6


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_channels_of_an_image_are_no_sequence(groups: int) -> None:
    """Tensor parallelism splits a convolution by them: one for each channel, or by groups; of one that mixes all only what it gives."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=groups, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    batch = (torch.randn(2, 8, 4, 4),)
    plan = autopar.plan(model, 2, batch, plan=Manual(tp=2), loss_fn=torch.Tensor.sum)
    assert held(plan, "0.weight")[1].startswith("S0")
    assert autopar.verify(model, 2, batch, Manual(tp=2), loss_fn=torch.Tensor.sum).grad_error < 1e-6
