"""What a model computes in: narrower than its parameters, equal to one device that computes so, and with what travels narrow too."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar import Cluster, Manual, Precision
from autopar.capture.trace import Captured, Source
from autopar.compile import Normal, compile_plan, compile_stage
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.planner.session import Session, open_session
from autopar.precision import computing
from autopar.runtime.module import make_skeleton
from tests import models
from tests.marks import exhaustive, few, only
from tests.planning import planned

pytestmark = pytest.mark.slow

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CPU = torch.device("cpu")
BF16 = Precision(torch.bfloat16)

PLANS = {
    "zero3": Manual(dp=4, zero=3),
    "tp_zero1_in_parts": Manual(dp=2, tp=2, zero=1, microbatches=4),
    "pp": Manual(dp=2, pp=2, microbatches=4),
    "pp_zb_zero2": Manual(dp=2, pp=2, zero=2, microbatches=4, schedule="zb-h1"),
    "sequence_parallel": Manual(dp=2, tp=2, zero=3, sequence_parallel=True),
}


@pytest.mark.parametrize("precision", only(["bf16"], ["bf16", "bf16/bf16", "fp16"]))
@pytest.mark.parametrize("plan", only(["tp_zero1_in_parts", "pp_zb_zero2"], PLANS))
def test_plans_compute_what_one_device_does_in_that_precision(plan: str, precision: str) -> None:
    example = models.llama(layers=1, batch=8)
    found = autopar.verify(example.model, 4, example.batch, PLANS[plan], precision=precision)
    assert found.reference_error > 1e-4, "the reference is not in that precision"
    assert found.loss_error < 1e-3
    assert found.grad_error < 2 * found.reference_error


def captured(model: nn.Module, batch: dict[str, torch.Tensor], precision: Precision | None = BF16) -> Session:
    return open_session(make_skeleton(model), (), batch, precision=precision)


def dtypes(module: fx.GraphModule, target: object) -> set[torch.dtype]:
    """Of what a graph gives to calls of ``target``."""
    return {node.args[0].meta["val"].dtype for node in module.graph.nodes if node.target is target}


@pytest.mark.parametrize("precision, reduced", [("bf16", torch.float32), ("bf16/bf16", torch.bfloat16)])
def test_what_is_narrow_travels_and_gradients_are_reduced_as_asked(precision: str, reduced: torch.dtype) -> None:
    example = models.gpt2(layers=1)
    session = captured(example.model, example.batch, Precision.of(precision))
    halves = compile_plan(session.normal, planned(session, Manual(dp=2, zero=3)), device=CPU, training=True).halves
    assert halves.backward is not None
    for half in (halves.forward, halves.backward):
        assert dtypes(half, c10d.all_gather_into_tensor.default) == {torch.bfloat16}
    assert dtypes(halves.backward, c10d.reduce_scatter_tensor.default) == {reduced}
    (output,) = halves.backward.graph.find_nodes(op="output")
    assert {grad.meta["val"].dtype for grad in output.args[0]} == {torch.float32}


@pytest.mark.parametrize("precision", few(1, ["bf16/bf16", "bf16"]))
def test_a_step_makes_a_copy_once_and_its_gradients_add_up_in_float32(precision: str) -> None:
    example = models.gpt2(layers=1, batch=8)
    session = captured(example.model, example.batch, Precision.of(precision))
    program = compile_stage(session.normal, planned(session, Manual(dp=2, zero=1, microbatches=4)), 0, device=CPU, training=True)
    assert program.prepare is not None
    assert program.ending is not None
    assert program.ending.last is not None
    copies = program.prepare.forward.graph.find_nodes(op="output")[0].args[0]
    assert {copy.meta["val"].dtype for copy in copies} == {torch.bfloat16}
    assert dtypes(program.prepare.forward, c10d.all_gather_into_tensor.default) == {torch.bfloat16}
    for graph in (program.ending.next, program.ending.last.start):
        sums = [node for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("sum_")]
        assert sums
        assert {node.meta["val"].dtype for node in sums} == {torch.float32}


def test_small_gradients_are_not_lost_in_a_sum_over_micro_batches() -> None:
    """In bfloat16, 256 + 1 is 256."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).sum()

    batch = {"x": torch.cat([torch.full((2, 2), 256.0), torch.ones(14, 2, 2)[:, 0]]).reshape(16, 1, 2).expand(16, 2, 2).contiguous()}
    found = autopar.verify(Weight(), 2, batch, Manual(dp=2, microbatches=8), precision="bf16")
    assert found.grad_error < 2**-8


class Mixed(nn.Module):
    """Buffers and inputs in float32 meet parameters in bfloat16, in products, norms and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.attend = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer, self.group, self.head = nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Linear(8, 5)
        self.register_buffer("table", torch.randn(6, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x)).transpose(1, 2) + self.table
        h = self.layer(h)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.group((h + self.table).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(h.mean(1)), labels)


def mixed() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Mixed(), {"x": torch.randn(4, 4, 6), "labels": torch.randint(5, (4,))}


def test_what_is_in_float32_beside_the_parameters_is_taken_in() -> None:
    model, batch = mixed()
    found = autopar.verify(model, 2, batch, Manual(dp=2, zero=3), precision="bf16")
    assert found.loss_error < 1e-3
    assert found.grad_error < 3 * found.reference_error


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.norm(self.first(x))
            with torch.autocast("cpu", enabled=False):
                exact = self.second(h.float())
            product = h @ self.second.weight
        return h, exact, product, F.mse_loss(product, torch.ones_like(product))


def run_graph(normal: Normal, model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    tensors, coming = dict(model.named_parameters()) | dict(model.named_buffers()), iter(inputs)
    nodes = normal.module.graph.find_nodes(op="placeholder")
    given = [tensors[name] if (name := node.meta["placeholder"].name) in tensors else next(coming) for node in nodes]
    return list(fx.Interpreter(normal.module).run(*given))


def test_an_autocast_inside_of_the_model_is_followed() -> None:
    torch.manual_seed(0)
    model, x = Autocast(), torch.randn(4, 8)
    session = open_session(make_skeleton(model), (x,), {})
    torch.testing.assert_close(run_graph(session.normal, model, [x]), list(model(x)), rtol=0, atol=0)


def test_an_autocast_around_the_call_is_followed_and_told_from_none() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)), torch.randn(4, 8)
    known: dict[object, Captured] = {}
    with torch.autocast("cpu", torch.bfloat16):
        inside, expected = open_session(make_skeleton(model), (x,), {}, known=known), model(x)
    outside = open_session(make_skeleton(model), (x,), {}, known=known)
    torch.testing.assert_close(run_graph(inside.normal, model, [x]), [expected], rtol=0, atol=0)
    torch.testing.assert_close(run_graph(outside.normal, model, [x]), [model(x)], rtol=0, atol=0)
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize("function", [lambda x: F.layer_norm(x, (64,)), lambda x: F.rms_norm(x, (64,)), lambda x: F.softmax(x, -1)])
def test_norms_and_softmaxes_of_torch_compute_in_float32_inside(function: object) -> None:
    assert callable(function)
    x = torch.randn(32, 64, dtype=torch.bfloat16) * 3
    torch.testing.assert_close(function(x), function(x.float()).to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["as it is", "autocast", "asked", "model"])
def test_plans_say_what_products_compute_in(how: str) -> None:
    """The first layer of a model of two stays in float32 under an autocast of the larger one."""
    small, large = nn.Linear(8, 8), nn.Linear(8, 64)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = small, large

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.small(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
                x = self.large(x)
            return x.float().sum()

    half = how == "model"
    model, x = Two().to(torch.bfloat16 if half else torch.float32), torch.zeros(4, 8, dtype=torch.bfloat16 if half else torch.float32)
    plan = autopar.plan(model, 2, {"x": x}, precision="bf16" if how == "asked" else None)
    expected = {"as it is": ("float32",), "autocast": ("bfloat16", "float32"), "asked": ("bfloat16",), "model": ("bfloat16",)}
    assert plan.dtypes == expected[how]
    assert f"computes in {'bf16' if how == 'asked' else ' and '.join(plan.dtypes)}, " in str(plan)


def test_losses_are_in_float32() -> None:
    example = models.gpt2(layers=1)
    logits, labels = torch.randn(4, 8, dtype=torch.bfloat16), torch.randint(8, (4,))
    with computing(example.model, BF16):
        loss = F.cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels), rtol=0, atol=0)


def test_the_model_is_left_as_it_was() -> None:
    example = models.gpt2(layers=1)
    before = {name: (p.data_ptr(), p.dtype) for name, p in example.model.named_parameters()}

    def stop_inside() -> None:
        with computing(example.model, BF16):
            assert {p.dtype for p in example.model.parameters()} == {torch.bfloat16}
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop_inside()
    assert {name: (p.data_ptr(), p.dtype) for name, p in example.model.named_parameters()} == before


CLUSTER = Cluster(1, 8, "h100")


def wide() -> models.Example:
    return models.llama(layers=1, hidden=1024, intermediate=4096, vocab=1024, batch=64, sequence=512, device="meta")


def plan_of(precision: str | None = None, wanted: Manual | Plan | None = None) -> autopar.Plan:
    example = wide()
    return autopar.plan(example.model, CLUSTER, example.batch, plan=wanted or Manual(dp=8), precision=precision)


@pytest.mark.parametrize("zero, gradient", [(0, 4.0), (1, 4.0), (2, 0.5)])
def test_memory_is_16_bytes_a_parameter_and_the_narrow_copy(zero: int, gradient: float) -> None:
    decision = plan_of("bf16", Manual(dp=8, zero=zero)).decision
    assert decision is not None
    rows, variants, clusters = decision.prices.footprint.parameters, decision.solution.variants, decision.problem.clusters
    trained = [i for i in rows if clusters[i].leader.meta["placeholder"].source is Source.PARAMETER]
    found = sum(rows[i][variants[i]] for i in trained) / sum(p.numel() for p in wide().model.parameters())
    sharded = 8 if zero else 1
    assert list(found) == pytest.approx([4 / sharded, gradient, 8 / sharded, 2.0, 4 / sharded])


def test_half_of_the_precision_is_faster_on_a_gpu_and_may_travel_in_half() -> None:
    whole, half, least = plan_of(), plan_of("bf16"), plan_of("bf16/bf16")
    assert half.prediction.compute_s < 0.7 * whole.prediction.compute_s
    num_bytes = [sum(c.num_bytes * c.count for c in plan.collectives if c.phase == "backward") for plan in (whole, half, least)]
    assert num_bytes[0] == num_bytes[1] == 2 * num_bytes[2], "gradients of data parallelism are all that travels"
    assert half.parameter("model.embed_tokens.weight").num_bytes == whole.parameter("model.embed_tokens.weight").num_bytes


def test_programs_are_what_the_plan_says() -> None:
    example = models.llama(layers=4, batch=8, device="meta")
    made = autopar.plan(example.model, 4, example.batch, plan=Manual(dp=4, zero=3), precision="bf16", outputs="loss")
    assert autopar.check(example.model, made, example.batch, outputs="loss").findings == ()
    counted = autopar.count(example.model, made, example.batch, outputs="loss").positions[0].traffic
    reduced = sum(c.num_bytes * c.count for c in made.collectives if c.kind == "reduce_scatter")
    assert reduced == 4 * sum(p.numel() for p in example.model.parameters())
    assert reduced == sum(t.num_bytes for t in counted if t.kind == "reduce_scatter")
    gathered = sum(t.num_bytes for t in counted if t.kind == "all_gather")
    embedding = example.model.get_parameter("model.embed_tokens.weight").numel()  # whose backward does not need it
    assert gathered == reduced - 2 * embedding, "two gathers, each in half of the bytes"


def test_the_precision_goes_with_the_plan() -> None:
    made = plan_of("bf16")
    assert made.precision == "bf16"
    again = autopar.Plan.from_json(made.to_json())
    assert again.precision == "bf16"
    assert plan_of(None, again).precision == "bf16"
    assert plan_of(None, Manual(dp=8, precision="bf16/bf16")).precision == "bf16/bf16"
    assert plan_of().with_(precision="bf16").prediction == made.prediction
    assert Precision.of(torch.bfloat16) == Precision.of("bf16")
    with pytest.raises(PlanError, match=r"precision is one of .*; got a int"):
        Precision.of(16)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="made for precision 'bf16', and 'fp16' is asked for"):
        plan_of("fp16", again)


def test_rows_of_a_comparison_may_compute_in_other_precisions() -> None:
    example = wide()
    configs = {"whole": Manual(dp=8), "half": Manual(dp=8, precision="bf16")}
    auto, whole, half = autopar.compare(example.model, CLUSTER, example.batch, configs, pipeline=False)
    assert half.prediction is not None
    assert whole.prediction is not None
    assert half.prediction.compute_s < whole.prediction.compute_s
    alike, _ = autopar.compare(example.model, CLUSTER, example.batch, {"half": configs["half"]}, pipeline=False)
    assert [row.plan.precision for row in (auto, alike) if row.plan is not None] == ["", "bf16"]


@pytest.mark.parametrize(
    "given, text",
    [
        ("bf32", "precision is one of bf16, fp16, fp32"),
        ("bf16/fp16", "reduces in float32 or in what it computes in"),
        ("fp32/bf16", "reduces in float32 or in what it computes in"),
    ],
)
def test_what_is_no_precision_is_refused(given: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Precision.of(given)
    with pytest.raises(PlanError, match=text):
        Manual(precision=given)


def test_digits_that_are_gone_do_not_come_back() -> None:
    example = models.gpt2(layers=1)
    with pytest.raises(PlanError, match="whose other digits are gone"):
        autopar.plan(example.model.bfloat16(), 2, example.batch, precision="fp32")
    with pytest.raises(PlanError, match="say optimizer='adamw'"):
        autopar.plan(example.model, 2, example.batch, precision="bf16", optimizer="adamw_master")


def test_a_model_that_is_in_that_precision_stays_as_it_is() -> None:
    example = models.gpt2(layers=1)
    model = example.model.bfloat16()
    own, asked = captured(model, example.batch, None), captured(model, example.batch)
    assert own.hash == asked.hash
    specs = pytree.tree_leaves([node.meta["specs"] for node in asked.normal.module.graph.find_nodes(op="placeholder")])
    assert all(spec.master is None for spec in specs)


@exhaustive
@pytest.mark.parametrize("name", ["bert", "vit", "distilbert", "nn_transformer_encoder"])
def test_other_models_too(name: str) -> None:
    example = getattr(models, name)(layers=1)
    found = autopar.verify(example.model, 4, example.batch, Manual(dp=2, tp=2, zero=3), precision="bf16")
    assert found.grad_error < 2 * found.reference_error


class Recurrent(nn.Module):
    """A recurrent layer, or a cell of one, takes numbers in float32, and a state in it."""

    def __init__(self, kind: type[nn.GRU | nn.RNN | nn.GRUCell]) -> None:
        super().__init__()
        self.layer = kind(8, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = self.layer(x[:, 0], state) if isinstance(self.layer, nn.GRUCell) else self.layer(x.transpose(0, 1), hx=state.unsqueeze(0))[0]
        loss: torch.Tensor = y.square().float().mean()
        return loss


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.GRUCell])
@pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")
def test_recurrent_layers_take_what_is_wide(kind: type[nn.GRU | nn.RNN | nn.GRUCell]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind)
    found = autopar.verify(model, 2, (torch.randn(4, 3, 8), torch.randn(4, 4)), precision="bf16")
    assert found.reference_error > 1e-4, "the reference is not in that precision"
    assert found.grad_error <= 4 * found.reference_error, str(found)
    assert not model.layer._forward_pre_hooks
