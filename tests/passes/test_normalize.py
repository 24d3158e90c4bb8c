"""Normal graphs compute what the model computes, and read well."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar import Manual
from autopar.capture.trace import capture
from autopar.compile import normal_graph
from autopar.factors import MissingRuleWarning
from autopar.graph import spec_of, specs_of
from autopar.show.code import graph_code
from tests import models
from tests.marks import few
from tests.models import Example
from tests.planning import MODELS

pytestmark = pytest.mark.slow

aten = torch.ops.aten


def normal_of(example: Example) -> fx.GraphModule:
    captured = capture(example.model, (), example.batch)
    return normal_graph(captured, captured.sizes).module


def evaluate(module: fx.GraphModule, example: Example) -> list[torch.Tensor]:
    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers()), **example.batch}
    return list(module(*(state[node.meta["placeholder"].name] for node in module.graph.find_nodes(op="placeholder"))))


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def doubled(example: Example) -> Example:
    batch = {name: x.double() if x.is_floating_point() else x for name, x in example.batch.items()}
    return Example(example.model.double(), batch)


@pytest.mark.parametrize("name", few(4, MODELS))
def test_numbers_are_those_of_the_model(name: str) -> None:
    example = doubled(MODELS[name](layers=1))
    expected = [x for x in pytree.tree_leaves(example.model(**example.batch)) if isinstance(x, torch.Tensor)]
    torch.testing.assert_close(evaluate(normal_of(example), example), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", few(4, MODELS))
def test_specs_are_true(name: str) -> None:
    """Shapes, dtypes and the flow of gradients, as running the graph shows them."""
    example = MODELS[name](layers=1)
    module = normal_of(example)

    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            results = result if isinstance(result, (tuple, list)) else (result,)
            if n.op != "output":
                for spec, value in zip(specs_of(n), results, strict=True):
                    assert (spec.shape, spec.dtype) == (tuple(value.shape), value.dtype), n.format_node()
                    assert spec.requires_grad or not value.requires_grad, n.format_node()
            return result

    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers()), **example.batch}
    Check(module).run(*(state[node.meta["placeholder"].name] for node in module.graph.find_nodes(op="placeholder")))


@pytest.mark.parametrize("name", few(2, ["gpt2", "llama", "bert", "vit"]))
def test_attention_with_dropout_is_expanded(name: str) -> None:
    module = normal_of(MODELS[name](layers=1, dropout=0.1))
    found = targets(module)
    assert aten.scaled_dot_product_attention.default not in found
    (weights,) = [node for node in module.graph.nodes if node.target in (aten.softmax.int, aten._safe_softmax.default)]
    assert [user.target for user in weights.users] == [aten.dropout.default]
    scores = spec_of(weights).shape
    assert len(scores) == 4
    assert scores[-1] == scores[-2]


@pytest.mark.parametrize("name", few(2, ["llama", "gpt2", "bert", "vit"]))
def test_attention_without_dropout_stays_whole(name: str) -> None:
    found = targets(normal_of(MODELS[name](layers=1)))
    assert found.count(aten.scaled_dot_product_attention.default) == 1
    assert aten.dropout.default not in found


class OnesDropped(nn.Module):
    """Attention whose mask is causal, as an argument or as a tensor, with dropout that keeps all but one in a million."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_causal = kind == "causal"
        self.is_grouped = kind == "grouped"

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.linear(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (q[:, :2], q[:, 2:]) if self.is_grouped else (q, q)
        how: dict[str, Any] = {"dropout_p": 1e-6, "is_causal": self.is_causal, "enable_gqa": self.is_grouped}
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, **how)


@pytest.mark.parametrize("kind", ["causal", "none", "boolean", "additive", "grouped"])
def test_expanded_attention_is_attention(kind: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 5, 8)}
    if kind in ("boolean", "additive"):
        keep = torch.rand(5, 5) > 0.4
        keep.fill_diagonal_(True)
        batch["mask"] = keep if kind == "boolean" else torch.randn(5, 5)
    example = Example(OnesDropped(kind), batch)
    torch.manual_seed(0)
    (found,) = evaluate(normal_of(example), example)
    torch.testing.assert_close(found, example.model(**batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_query_that_may_look_at_no_key_gets_zeros(kind: str) -> None:
    """Not what is no number, nor do gradients."""
    torch.manual_seed(0)
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    mask = keep if kind == "boolean" else torch.zeros(5, 5).masked_fill(~keep, float("-inf"))
    example = Example(OnesDropped(kind), {"x": torch.randn(3, 5, 8), "mask": mask})
    (found,), want = evaluate(normal_of(example), example), example.model(**example.batch)
    assert not found[:, :, 2].any()
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), [*example.model.parameters()]) for x in (found, want)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        of_all = y.mean(dim=None), y.mean(dim=(), keepdim=True), y.mean(dim=None, keepdim=True), y.sum().mean((), keepdim=True)
        return y.mean(), y.mean(-1), y.mean((0, 2), keepdim=True), y.mean(dim=1, dtype=torch.float64), *of_all


def test_means_are_sums_over_counts() -> None:
    example = Example(Means(), {"x": torch.randn(3, 5, 8)})
    module = normal_of(example)
    assert not {aten.mean.default, aten.mean.dim} & set(targets(module))
    torch.testing.assert_close(evaluate(module, example), list(example.model(**example.batch)), rtol=1e-5, atol=1e-6)


class HalfMeans(nn.Module):
    """Of which the sums are beyond float16."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x.half()
        scores = half.log_softmax(-1)
        weight = torch.full((8,), 0.5, dtype=torch.float16)
        losses = [F.cross_entropy(half, labels), F.cross_entropy(half, labels, weight), F.nll_loss(scores, labels, weight)]
        return half.mean(), half.mean(0), half.mean((0, 1), keepdim=True), x.mean(dtype=torch.float16), *losses


def test_means_in_float16_are_of_sums_in_float32() -> None:
    torch.manual_seed(0)
    batch = {"x": 150 + 50 * torch.randn(2000, 8), "labels": torch.randint(8, (2000,))}
    found = evaluate(normal_of(Example(HalfMeans(), batch)), Example(HalfMeans(), batch))
    x = batch["x"]
    loss = F.cross_entropy(x, batch["labels"])
    for ours, want in zip(found, [x.mean(), x.mean(0), x.mean((0, 1), keepdim=True), x.mean(), *[loss] * 3], strict=True):
        torch.testing.assert_close(ours, want.half(), rtol=4e-3, atol=0.0)


class Loss(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.options = options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x), labels, **self.options)  # type: ignore[arg-type]


class Soft(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.options = options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x * self.scale, labels, **self.options)  # type: ignore[arg-type]


WEIGHT = torch.linspace(0.5, 2, 6)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
@pytest.mark.parametrize("weight", [{}, {"weight": WEIGHT}])
def test_the_mean_cross_entropy_counts_what_is_not_ignored(options: dict[str, object], weight: dict[str, object]) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 2, 5, options.get("ignore_index", -100), 2, 1])
    example = Example(Loss(**options, **weight), {"x": torch.randn(6, 8), "labels": labels})
    module = normal_of(example)
    assert (aten.div.Tensor in targets(module)) == ("reduction" not in options)
    (found,) = evaluate(module, example)
    torch.testing.assert_close(found, example.model(**example.batch))


def test_weights_of_another_dtype_are_refused_as_by_torch() -> None:
    example = Example(Loss(weight=WEIGHT.double()), {"x": torch.randn(6, 8), "labels": torch.arange(6)})
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        example.model(**example.batch)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Double"):
        evaluate(normal_of(example), example)


@pytest.mark.parametrize("shape", [(6, 6), (6,), (6, 6, 2, 3)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weight": WEIGHT}, {"reduction": "sum"}])
def test_the_mean_cross_entropy_of_probabilities_counts_rows(shape: tuple[int, ...], options: dict[str, object]) -> None:
    torch.manual_seed(0)
    example = Example(Soft(**options), {"x": torch.randn(shape), "labels": torch.randn(shape).softmax(min(1, len(shape) - 1))})
    module = normal_of(example)
    assert (aten.div.Tensor in targets(module)) == ("reduction" not in options)
    (found,) = evaluate(module, example)
    torch.testing.assert_close(found, example.model(**example.batch))


class Pairs(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.score = nn.Bilinear(4, 6, 2, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.score(x, y)
        return score.square().sum()


@pytest.mark.parametrize("bias", [True, False])
def test_a_bilinear_product_is_an_equation(bias: bool) -> None:
    example = Example(Pairs(bias=bias), {"x": torch.randn(8, 3, 4), "y": torch.randn(8, 3, 6)})
    module = normal_of(example)
    assert targets(module)[: 2 + bias] == [aten.einsum.default, aten.einsum.default, aten.add.Tensor][: 2 + bias]
    assert aten.bilinear.default not in targets(module)
    (found,) = evaluate(module, example)
    torch.testing.assert_close(found, example.model(**example.batch))


class Equation(nn.Module):
    def __init__(self, equation: str, path: list[int] | None) -> None:
        super().__init__()
        self.equation, self.path = equation, path

    def forward(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = aten.einsum(self.equation, tensors, path=self.path)
        return y


@pytest.mark.parametrize(
    "equation, path, products",
    [
        ("btec,bte,becd->btd", None, ["btec,bte->btec", "btec,becd->btd"]),
        ("btec, bte, becd -> btd", [1, 2, 0, 1], ["bte,becd->btecd", "btec,btecd->btd"]),
        ("be,ec,c,d->db", None, ["be,ec->bc", "bc,c->b", "b,d->db"]),
        ("be,ec,c,d->db", [2, 1, 0, 2, 0, 1], ["ec,c->e", "be,e->b", "d,b->db"]),
        ("be,ec->bc", None, ["be,ec->bc"]),
        ("...e,ec,c->...c", None, ["...e,ec,c->...c"]),
    ],
)
def test_an_equation_of_many_is_products_of_two(equation: str, path: list[int] | None, products: list[str]) -> None:
    sizes = dict(zip("btecd", (2, 3, 4, 5, 6), strict=True))
    terms = equation.replace(" ", "").replace("...", "bt").partition("->")[0].split(",")
    tensors = [torch.randn([sizes[x] for x in term], dtype=torch.float64) for term in terms]
    captured = capture(Equation(equation, path), (tensors,), {})
    module = normal_graph(captured, captured.sizes).module
    assert [node.args[0] for node in module.graph.nodes if node.op == "call_function"] == products
    (found,) = module(*tensors)
    torch.testing.assert_close(found, torch.einsum(equation, *tensors))


class Histogram(nn.Module):
    def __init__(self, bins: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bins, self.dtype = bins, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x.to(self.dtype), self.bins, -1, 2)


def counting(bins: int, dtype: torch.dtype) -> fx.GraphModule:
    """Captured on meta, where integers have a histogram as they have on a GPU."""
    captured = capture(Histogram(bins, dtype), (torch.empty(2, 4, dtype=torch.int64, device="meta"),), {})
    return normal_graph(captured, captured.sizes).module


class Dot(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = torch.tensordot(x, y, dims=([1, 0], [0, -1]))
        return z


def test_a_tensordot_is_an_equation() -> None:
    example = Example(Dot(), {"x": torch.randn(2, 3, 4), "y": torch.randn(3, 5, 2)})
    module = normal_of(example)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.einsum.default)
    assert node.args[0] == "abc,bea->ce"
    torch.testing.assert_close(module(*example.batch.values())[0], example.model(**example.batch))


def test_integers_are_counted_without_a_histogram() -> None:
    (found,) = counting(4, torch.int32)(torch.tensor([[-1, 0, 2, 2], [-2, 5, 2, 3]]))
    assert found.dtype == torch.int32
    assert found.tolist() == [1, 1, 0, 3]


@pytest.mark.parametrize("bins, dtype", [(4, torch.float32), (3, torch.int32)])
def test_other_histograms_stay(bins: int, dtype: torch.dtype) -> None:
    assert aten.histc.default in targets(counting(bins, dtype))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unused = self.linear(x) * 3
        assert unused.dim() == 2
        y: torch.Tensor = self.linear(x).to(x.dtype).contiguous()
        return nn.functional.dropout(y, 0.0).view(x.shape)


def test_what_does_nothing_is_dropped() -> None:
    found = targets(normal_of(Example(Unused(), {"x": torch.randn(3, 4)})))
    assert found == [aten.linear.default, aten.add.Tensor]


class After(nn.Module):
    """Does things as another tensor has them."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.type_as(y).view_as(y)
        return x.reshape_as(x.T).ravel()


def test_what_is_done_after_another_tensor_needs_only_its_shape_or_dtype() -> None:
    """Else a rank would need all of it. Not so `expand_as`: what it makes is split as the other, over micro-batches too."""
    module = normal_of(Example(After(), {"x": torch.randn(12), "y": torch.randn(3, 4, dtype=torch.float64)}))
    assert not module.graph.find_nodes(op="placeholder")[1].users
    assert targets(module) == [aten.to.dtype, *[aten.reshape.default] * 3]


def code_without_lines(module: fx.GraphModule) -> str:
    """The graph's text without lines of the installed transformers."""
    return re.sub(r"  # \w+\.py:\d+ .*", "", graph_code(module))


def test_gpt2(golden: Callable[[str, str], None]) -> None:
    golden("passes/normal_gpt2", code_without_lines(normal_of(models.gpt2(layers=1))))


def test_local_gpt2(golden: Callable[[str, str], None]) -> None:
    """Megatron's tensor parallelism, pinned."""
    model, batch = models.gpt2(layers=1)
    block = "transformer.h.0"
    pins = [
        autopar.pin(f"{block}.attn.c_attn.weight", tp="S1.1"),
        autopar.pin(f"{block}.mlp.c_fc.weight", tp="column"),
        *(autopar.pin(f"{block}.{part}.c_proj.weight", tp="row") for part in ("attn", "mlp")),
    ]
    plan = autopar.plan(model, 2, batch, plan=Manual(tp=2), constraints=pins)
    golden("passes/local_gpt2", code_without_lines(plan.local_graph()))


class Unreduced(nn.Module):
    """Weighs the loss of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="meta")

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(self.linear(x), labels, reduction="none") * 2
        return each.mean()


def test_unreduced_losses_have_a_shape_on_meta() -> None:
    batch = {"x": torch.randn(4, 8, device="meta"), "labels": torch.arange(4, device="meta")}
    module = normal_of(Example(Unreduced(), batch))
    shapes = [spec.shape for node in module.graph.nodes for spec in node.meta.get("specs", ()) if node.op == "call_function"]
    assert shapes == [(4, 8), (4, 8), (4,), (4,), (), ()]


class Sparse(nn.Module):
    """Looks rows up in ways that each ask for a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 6, sparse=True)
        self.bags = nn.EmbeddingBag(8, 6, mode="sum", sparse=True)
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        picked = torch.gather(self.table, 0, ids[:, :1].expand(-1, 6), sparse_grad=True)
        parts = self.rows(ids), self.bags(ids), self.bags(ids.flatten(), offsets), picked
        return torch.stack([part.square().sum() for part in parts]).sum()


@pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")
def test_sparse_gradients_are_dense() -> None:
    torch.manual_seed(0)
    found = autopar.verify(Sparse(), 2, (torch.randint(8, (4, 4)), torch.tensor([0, 3, 7, 12])))
    assert max(found.loss_error, found.grad_error) < 1e-6, str(found)


BAGS = {aten.embedding_bag.padding_idx, aten.embedding_bag.default}


class Bags(nn.Module):
    """Sums, means or maxima of some rows of a table."""

    def __init__(self, mode: str, *, is_weighted: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 6, mode=mode, padding_idx=padding, dtype=torch.float64)
        self.is_weighted = is_weighted

    def forward(self, ids: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.table(ids, offsets, per_sample_weights=weights.sin() if self.is_weighted else None)
        return found


def rows_of_ids(count: int = 6, size: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"ids": torch.randint(8, (count, size)), "weights": torch.randn(count, size, dtype=torch.float64)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode, is_weighted", [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_bags_of_one_size_are_look_ups(mode: str, is_weighted: bool, size: int) -> None:
    """An index may be twice in a bag."""
    model = Bags(mode, is_weighted=is_weighted)
    example = Example(model, rows_of_ids(size=size))
    module = normal_of(example)
    assert aten.embedding.default in targets(module)
    assert not BAGS & {*targets(module)}
    found, want = evaluate(module, example)[0], example.model(**example.batch)
    torch.testing.assert_close(found, want)
    above, table = torch.randn_like(want), model.table.weight
    torch.testing.assert_close(torch.autograd.grad(found, table, above), torch.autograd.grad(want, table, above))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("plan", [Manual(dp=2, tp=2, zero=3), Manual(dp=4, microbatches=2)], ids=str)
def test_a_plan_of_bags_equals_the_model(plan: Manual, size: int) -> None:
    example = Example(Bags("sum", is_weighted=True), rows_of_ids(count=8, size=size))
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingRuleWarning)
        found = autopar.verify(example.model, 4, example.batch, plan=plan, loss_fn=torch.sum)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6


def check_stays(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    example = Example(model, batch)
    with pytest.warns(MissingRuleWarning, match="embedding_bag"):
        module = normal_of(example)
    assert BAGS & {*targets(module)}
    torch.testing.assert_close(evaluate(module, example)[0], model(**batch))


def test_other_bags_stay() -> None:
    """One with an index that does not count, and one with bags that are told apart by their offsets."""
    batch = rows_of_ids()
    check_stays(Bags("sum", padding=1), batch)
    flat = {"ids": batch["ids"].flatten(), "weights": batch["weights"].flatten(), "offsets": torch.tensor([0, 3, 7])}
    check_stays(Bags("mean"), flat)


class Given(nn.Module):
    """Bags as a function has them, of a table."""

    def __init__(self, bags: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.bags = nn.Parameter(torch.randn(8, 6, dtype=torch.float64)), bags

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bags(self.table, ids)


@pytest.mark.parametrize(
    "bags",
    [
        lambda table, ids: F.embedding_bag(ids[:, 0], table, torch.arange(ids.shape[0]), mode="sum"),
        lambda table, ids: F.embedding_bag(ids[:, 0], table, torch.arange(0, 6, 1), mode="mean"),
        lambda table, ids: F.embedding_bag(ids[:, 0], table, torch.tensor([0, 1, 2, 3, 4, 5]), mode="max"),
        lambda table, ids: F.embedding_bag(ids[:, :2].reshape(-1), table, torch.arange(6) * 2),
        lambda table, ids: F.embedding_bag(ids.reshape(-1), table, torch.arange(0, 24, 2)),
        lambda table, ids: F.embedding_bag(ids.reshape(2, 3, 4).reshape(-1), table, torch.arange(0, 24, 12), mode="max"),
        lambda table, ids: F.embedding_bag(
            ids[:4].reshape(-1), table, torch.arange(0, 16, 4), mode="sum", per_sample_weights=table.sin()[:, :2].reshape(-1)
        ),
    ],
    ids=["arange", "arange by one", "listed", "product", "parts of rows", "several rows", "weights of other rows"],
)
def test_offsets_count_however_they_are_written(bags: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    example = Example(Given(bags), {"ids": torch.randint(8, (6, 4))})
    module = normal_of(example)
    assert not BAGS & {*targets(module)}
    torch.testing.assert_close(evaluate(module, example)[0], example.model(**example.batch))


@pytest.mark.parametrize(
    "bags",
    [
        lambda table, ids: F.embedding_bag(ids.reshape(-1), table, torch.tensor([0, 3, 7, 12])),
        lambda table, ids: torch.embedding_bag(table, ids.reshape(-1), torch.arange(0, 16, 4), mode=1)[2].double(),
    ],
    ids=["other offsets", "sizes"],
)
def test_bags_of_several_sizes_and_what_else_is_asked_of_bags_stay(bags: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    check_stays(Given(bags), {"ids": torch.randint(8, (4, 4))})


class Added(nn.Module):
    """A number is added in every way, with a factor and from the other side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = torch.rsub(torch.sub(torch.add(x.mean(), 3.0, alpha=2), 0.5, alpha=4), 1.0, alpha=2)
        return 1 - (loss + 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_added_to_a_scalar_become_tensors(dtype: torch.dtype) -> None:
    """Not in 16 bits, where a number is more exact than a tensor of it."""
    x = torch.randn(4, 6, dtype=dtype)
    module = normal_of(Example(Added(), {"x": x}))
    assert targets(module).count(torch.ops.aten.full.default) == (5 if dtype == torch.float32 else 0)
    (found,) = module(x)
    torch.testing.assert_close(found, Added()(x), rtol=0, atol=0)
