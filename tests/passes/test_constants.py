"""Constant masks are recognised by value, and other masks are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar.capture.trace import capture
from autopar.compile import normal_graph
from autopar.passes import constants
from autopar.rules.registry import TensorSpec
from tests import models
from tests.models import Example

pytestmark = pytest.mark.slow

aten = torch.ops.aten


def normal_of(example: Example) -> fx.GraphModule:
    captured = capture(example.model, (), example.batch)
    return normal_graph(captured, captured.sizes).module


def attention(module: fx.GraphModule) -> tuple[bool, bool]:
    """Of the only attention: whether it has a mask, and whether it is causal."""
    (node,) = [node for node in module.graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    args = [*node.args, *[None] * 6]
    mask = args[3] if args[3] is not None else node.kwargs.get("attn_mask")
    return mask is not None, bool(args[5] or node.kwargs.get("is_causal", False))


@pytest.mark.parametrize("example", [models.gpt2(layers=1), models.llama(layers=1)], ids=["gpt2", "llama"])
def test_causal_models_have_no_mask(example: Example) -> None:
    assert attention(normal_of(example)) == (False, True)


def test_padding_stays_a_mask() -> None:
    example = models.bert(layers=1)
    assert attention(normal_of(example)) == (True, False)


def test_without_padding_there_is_no_mask() -> None:
    model, batch = models.bert(layers=1)
    del batch["attention_mask"]
    assert attention(normal_of(Example(model, batch))) == (False, False)


def test_padding_of_a_causal_model_stays_a_mask() -> None:
    model, batch = models.gpt2(layers=1)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -2:] = 0
    assert attention(normal_of(Example(model, {**batch, "attention_mask": mask}))) == (True, False)


class Masked(nn.Module):
    """Attention under a mask that the forward makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.shape[1]
        ones = torch.ones(s, s, dtype=torch.bool, device=x.device)
        mask = {"causal": ones.tril(), "full": ones, "banded": ones.tril().triu(-1), "shifted": ones.tril(1)}[self.kind.partition("_")[0]]
        if self.kind.endswith("additive"):
            mask = torch.zeros(s, s, device=x.device).masked_fill(~mask, float("-inf"))
        if self.kind.endswith("soft"):
            mask = torch.zeros(s, s, device=x.device).masked_fill(~mask, -1.0)
        q = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("causal", (False, True)),
        ("causal_additive", (False, True)),
        ("causal_soft", (True, False)),
        ("full", (False, False)),
        ("full_additive", (False, False)),
        ("banded", (True, False)),
        ("banded_additive", (True, False)),
        ("shifted", (True, False)),
    ],
)
def test_masks_by_value(kind: str, expected: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    example = Example(Masked(kind), {"x": torch.randn(3, 5, 8)})
    module = normal_of(example)
    assert attention(module) == expected
    state = {**dict(example.model.named_parameters()), **example.batch}
    (found,) = module(*(state[node.meta["placeholder"].name] for node in module.graph.find_nodes(op="placeholder")))
    torch.testing.assert_close(found, example.model(**example.batch))


class Hidden(nn.Module):
    """Keys that no query may look at, by a constant mask or a given one."""

    def __init__(self, mask: torch.Tensor, *, is_given: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.values, self.is_given = mask.tolist(), is_given

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        mask = mask if self.is_given else torch.tensor(self.values, device=x.device)
        return nn.functional.scaled_dot_product_attention(q, q, q, mask, dropout_p=1e-6)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("mask", [torch.tensor([True, True, False, True, False]), torch.tensor(0.5), torch.tensor(True)], ids=str)
def test_a_mask_may_be_the_same_for_all_queries(mask: torch.Tensor, is_given: bool) -> None:
    """The kernels of torch for CPUs want two dims of it, and those with dropout do not."""
    torch.manual_seed(0)
    example = Example(Hidden(mask, is_given=is_given), {"x": torch.randn(3, 5, 8), "mask": mask})
    module = normal_of(example)
    state = {**dict(example.model.named_parameters()), **example.batch}
    (found,) = module(*(state[node.meta["placeholder"].name] for node in module.graph.find_nodes(op="placeholder")))
    torch.testing.assert_close(found, example.model(**example.batch), rtol=1e-4, atol=1e-5)


class LooksUp(nn.Module):
    """Indexing that lists whole dims, in order or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(3, device=x.device), torch.arange(4, device=x.device)
        if self.kind == "reversed":
            columns = columns.flip(0)
        looked = table[columns[None, :], rows[:, None]] if self.kind == "transposed" else table[rows[:, None], columns[None, :]]
        result: torch.Tensor = self.linear(x) + looked
        return result


@pytest.mark.parametrize("kind, is_folded", [("plain", True), ("transposed", True), ("reversed", False)])
def test_indexing_of_whole_dims_is_folded(kind: str, is_folded: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(4, 3) if kind == "transposed" else torch.randn(3, 4)
    example = Example(LooksUp(kind), {"x": torch.randn(3, 4), "table": table})
    module = normal_of(example)
    assert (aten.index.Tensor not in {node.target for node in module.graph.nodes}) == is_folded
    state = {**dict(example.model.named_parameters()), **example.batch}
    (found,) = module(*(state[node.meta["placeholder"].name] for node in module.graph.find_nodes(op="placeholder")))
    torch.testing.assert_close(found, example.model(**example.batch))


def test_a_mask_is_as_large_as_what_it_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """[batch, 1, s, s] of equal rows counts as [s, s]."""
    example = models.gpt2(layers=1, batch=64, sequence=16)
    monkeypatch.setattr(constants, "MAX_NUMEL", 2 * 64 * 16)
    assert attention(normal_of(example)) == (False, True)
    monkeypatch.setattr(constants, "MAX_NUMEL", 16)
    assert attention(normal_of(example)) == (True, False)


def test_a_reshape_that_must_copy_counts_whole() -> None:
    """Of [b, s, s] with equal matrices, merging the first two dims makes all of them; merging the last two makes none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.reshape.default, (x, [32, 8]))
    node.meta["specs"] = (TensorSpec((32, 8), torch.float32),)
    repeated = torch.eye(8).expand(4, 8, 8)
    assert constants._num_elements(node, (repeated, [32, 8])) == 4 * 8 * 8
    assert constants._num_elements(node, (repeated, [4, 64])) == 0
