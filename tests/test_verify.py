"""The whole way, plan to numbers: every model under every kind of plan equals the unmodified model, on virtual ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import pytest
import torch

import autopar
from autopar import Manual
from autopar.errors import InputError
from autopar.ops import collectives
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.pins import Allowed
from autopar.solve.problem import Problem
from autopar.verify import _difference, _largest, _output_error, _worst_gradient, verify_plan
from autopar.virtual import run_lockstep
from tests import models
from tests.marks import few, only
from tests.planning import MODELS, Wanted, compiled, opened, planned, rank_inputs

pytestmark = pytest.mark.slow

PLANS: dict[str, Wanted] = {
    "auto_2x2": (2, 2),
    "dp2_tp2_sequence": Manual(dp=2, tp=2, sequence_parallel=True),
    "zero3": Manual(dp=4, zero=3),
}
OTHERS = [name for name in MODELS if name != "distilbert"]  # which is bert with less
MORE_PLANS: dict[str, Wanted] = {
    "auto_4": (4,),
    "dp4": Manual(dp=4),
    "tp4": Manual(tp=4),
    "zero1": Manual(dp=4, zero=1),
    "zero2_tp2": Manual(dp=2, tp=2, zero=2),
}


def check(name: str, wanted: Wanted) -> None:
    (model, batch), session = opened(name)
    found = verify_plan(model, session.captured, session.normal, planned(session, wanted), (), batch)
    bound = 4 * found.reference_error + 1e-7
    assert found.grad_error <= bound, str(found)
    assert found.loss_error <= 1e-6, str(found)
    assert found.output_error <= 1e-5, str(found)


@pytest.mark.parametrize("name, plan", only([(name, "auto_2x2") for name in ("t5", "vit")], product(OTHERS, PLANS)))
def test_every_model(name: str, plan: str) -> None:
    check(name, PLANS[plan])


@pytest.mark.parametrize("name, plan", only([("mlp", plan) for plan in MORE_PLANS], product(("gpt2", "mlp"), MORE_PLANS)))
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_more_plans(name: str, plan: str) -> None:
    check(name, MORE_PLANS[plan])


def test_three_axes() -> None:
    check("mlp", (2, 2, 2))


def test_a_wrong_plan_is_found() -> None:
    """The comparison sees a difference: the same plan against other weights."""
    (_, batch), session = opened("mlp")
    other = models.mlp(layers=1, seed=1).model
    plan = planned(session, Manual(dp=4))
    assert verify_plan(other, session.captured, session.normal, plan, (), batch).grad_error < 1e-5
    with torch.no_grad():
        next(iter(other.parameters())).fill_(math.nan)
    assert math.isnan(verify_plan(other, session.captured, session.normal, plan, (), batch).loss_error)


def test_what_is_no_number_is_not_hidden_by_what_is() -> None:
    """A plain ``max`` keeps what came first if the other is no number."""
    one, nan = torch.ones(2), torch.full((2,), math.nan)
    assert math.isnan(_largest([0.1, math.nan, 0.2]))
    assert _worst_gradient({"a": one, "b": nan}, {"a": one, "b": one})[0] == "b"


def test_a_gradient_on_one_side_counts_whole() -> None:
    one, three = torch.ones(2), torch.full((2,), 3.0)
    assert _worst_gradient({"a": one}, {"a": one, "b": three}) == ("b", 1.0)
    assert _worst_gradient({"a": one, "b": three}, {"a": one}) == ("b", 3.0)


def test_what_cannot_be_verified_is_refused() -> None:
    example, session = opened("mlp", dropout=0.5)
    with pytest.raises(InputError, match="without random numbers"):
        verify_plan(example.model, session.captured, session.normal, planned(session, (2,)), (), example.batch)
    meta = models.mlp(layers=1, device="meta")
    with pytest.raises(InputError, match="the model is on meta"):
        verify_plan(meta.model, session.captured, session.normal, planned(session, (2,)), (), meta.batch)


def test_the_vocabulary_is_split_without_gathering_logits() -> None:
    """Embedding and loss run on a part of the vocabulary; logits are gathered for the caller alone."""
    plan, made = compiled("gpt2", Manual(tp=4))
    assert plan.parameter("transformer.wte.weight").held == ("R", "S0")
    local = made.local.graph
    sizes = {node: math.prod(node.meta["specs"][0].shape) for node in local.nodes if node.meta.get("specs")}
    (returned,) = local.find_nodes(op="output")
    (logits,) = [node for node in returned.args[0] if sizes[node] == 4 * 16 * 96]
    (gathered,) = logits.all_input_nodes
    assert gathered.target is collectives.all_gather
    assert list(gathered.users) == [logits]
    loss = next(node for node in local.nodes if "cross_entropy" in str(node.target))
    assert sizes[loss.all_input_nodes[0]] == 4 * 16 * 96 // 4


def test_more_axes_than_key_value_heads() -> None:
    """Of 8 heads in 2 groups one axis takes the groups and the other the heads in each; keys and values are whole on that one."""
    model, batch = models.llama(layers=1, heads=8, kv_heads=2)
    session = open_session(make_skeleton(model), (), batch)
    attention = "model.layers.0.self_attn"
    plan = planned(
        session,
        (2, 2),
        autopar.pin(f"{attention}.q_proj.weight", d0="S0", d1="S0.1"),
        autopar.pin(f"{attention}.[kv]_proj.weight", d0="S0", d1="R"),
        autopar.pin("scaled_dot_product_attention", d0="b1", d1="b1.1"),
    )
    assert plan.parameter(f"{attention}.q_proj.weight").factors[0][:2] == (2, 4)
    (op,) = [op for op in plan.ops if "scaled_dot_product_attention" in op.op]
    assert op.choices == ("b1", "b1.1")
    found = verify_plan(model, session.captured, session.normal, plan, (), batch)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)


def by_queries(problem: Problem, allowed: Allowed) -> Allowed:
    """Attention shares its queries on every axis."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return [
        [v for v in rows if cluster.leader.target is not attention or set(cluster.choice_names(v)) == {"s"}]
        for cluster, rows in zip(problem.clusters, allowed, strict=True)
    ]


@pytest.mark.parametrize("name", few(1, ["gpt2", "llama"]))
def test_queries_of_causal_attention_over_two_axes(name: str) -> None:
    """A part of a part: the first axis is the major one."""
    (model, batch), session = opened(name)
    plan = planned(session, (2, 2), by_queries)
    (attention,) = (op for op in plan.ops if "scaled_dot_product_attention" in op.op)
    assert attention.choices == ("s", "s")
    found = verify_plan(model, session.captured, session.normal, plan, (), batch)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)


@pytest.mark.parametrize("name", few(1, ["mlp", "gpt2"]))
def test_masks_are_equal_across_plans(name: str) -> None:
    """With dropout the loss depends on the seed, and not on the plan."""
    losses: dict[int, list[float]] = {0: [], 1: []}
    for wanted in ((1,), Manual(dp=4), Manual(tp=4), (2, 2)):
        example, session = opened(name, dropout=0.3)
        plan, made = compiled(name, wanted, dropout=0.3)
        for seed, found in losses.items():
            results = run_lockstep(
                made.halves.forward, rank_inputs(example, session.normal, plan, seed=seed), plan.mesh
            )
            found += [float(result[made.halves.differentiable[0]]) for result in results]
    for found in losses.values():
        torch.testing.assert_close(found, [found[0]] * len(found), rtol=1e-5, atol=0)
    assert abs(losses[0][0] - losses[1][0]) > 1e-4


def test_buffers_are_small_together() -> None:
    """A mean that is rounding is no error beside another that is not, nor one that counts; outputs are each by themselves."""
    theirs = [torch.tensor([1e-8]), torch.tensor([1e-8]), torch.tensor([0.5]), torch.tensor(10_000)]
    mean = [theirs[0], torch.tensor([3e-8]), *theirs[2:]]
    assert _output_error(mean, theirs, 3) == pytest.approx(4e-8)
    assert _output_error([mean[1], *theirs[1:]], theirs, 3) == pytest.approx(2.0)
    assert _output_error([*theirs[:2], torch.tensor([0.6]), theirs[3]], theirs, 3) == pytest.approx(0.2)
    assert math.isnan(_output_error([*theirs[:2], torch.tensor([math.nan]), theirs[3]], theirs, 3))


def test_other_shapes_and_dtypes_are_errors() -> None:
    """Which would be broadcast, or converted; but for numbers of a reference that is computed in another width."""
    x, ones = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64)
    assert _difference(x, x) == 0
    assert math.isinf(_difference(x.sum() / 4, x))
    assert math.isinf(_difference(x[:1], x))
    assert math.isinf(_difference(x.double(), x))
    assert _difference(x.bfloat16(), x, any_width=True) == 0
    for other in (ones, ones.bool(), x + 0j):
        assert math.isinf(_difference(other, x, any_width=True))
    assert math.isinf(_difference(ones.bool(), ones, any_width=True))


@dataclass
class Held:
    loss: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    rows: int


class Masked(torch.nn.Module):
    """Returns truth values, and numbers in a dtype that is not torch's default."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Held:
        y = self.linear(x)
        return Held(y.float().square().sum(), (y, x > 0), len(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", [Manual(dp=2), Manual(tp=2, microbatches=2)], ids=str)
def test_truth_values_and_what_dataclasses_hold_are_compared(dtype: torch.dtype, plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Masked(dtype), 2, (torch.randn(4, 8, dtype=dtype),), plan)
    assert max(found.loss_error, found.output_error) < (1e-6 if dtype is torch.float32 else 2e-2), str(found)


class WithNothing(torch.nn.Module):
    """With parameters that have no elements, one of them put to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.rows, self.none = torch.nn.Parameter(torch.empty(0, 8)), torch.nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.linear(x) @ torch.cat([self.linear.weight, self.rows]).t()).square().sum() + self.none.sum()
        return result


@pytest.mark.parametrize("plan", [Manual(dp=2, zero=3), Manual(tp=2)], ids=str)
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_parameters_without_elements(plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(WithNothing(), 2, (torch.randn(4, 8),), plan)
    assert max(found.loss_error, found.grad_error) < 1e-6, str(found)


class Few(torch.nn.Module):
    """Has no batch, returns nothing among what it returns, and repeats a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        loss = torch.nn.functional.cross_entropy(y, label) + (y.sum().repeat_interleave(8) * x).sum()
        return loss, y[:0], self.linear.weight[:, :0], y.repeat_interleave(0)


@pytest.mark.parametrize("plan", [None, Manual(tp=2)], ids=str)
def test_values_without_dims_or_elements(plan: Manual | None) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Few(), 2, (torch.randn(8), torch.tensor(3)), plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6, str(found)


def test_rounding_is_that_of_the_dtypes_of_the_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 12)).bfloat16()
    found = autopar.verify(model, 4, (torch.randn(12, 12).bfloat16(),), Manual(dp=4), loss_fn=lambda y: y.square().mean())
    assert 1e-4 < found.grad_error < 4 * found.reference_error < 0.1
