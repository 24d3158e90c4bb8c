"""Which models may run on a part of the batch at a time, and why the others may not. `test_verify_stages` runs those that may."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.compile import Normal
from autopar.errors import MicrobatchError, PlanError
from autopar.graph import operands_of, outputs_of, value_spec
from autopar.layout import PARTIAL, REPLICATED, Placement, shard
from autopar.passes.microbatch import Split, light_nodes, split_batch, whole_batch
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests import models
from tests.marks import only
from tests.models import Example

pytestmark = pytest.mark.slow

functional = nn.functional

BUILDERS: list[Callable[..., Example]] = [
    models.gpt2,
    models.llama,
    models.bert,
    models.distilbert,
    models.vit,
    models.nn_transformer_encoder,
    models.t5,
    models.nn_transformer,
    models.unet,
    models.mlp,
]


def normal(model: nn.Module, batch: dict[str, torch.Tensor]) -> Normal:
    return open_session(make_skeleton(model), (), batch).normal


def split(model: nn.Module, batch: dict[str, torch.Tensor], microbatches: int) -> Split:
    found = normal(model, batch)
    return split_batch(found.module, found.factors, microbatches)


SPLIT = only([models.gpt2, models.vit, models.t5, models.unet, models.mlp], BUILDERS)


@pytest.mark.parametrize("build", SPLIT, ids=lambda build: build.__name__)
def test_every_model_splits(build: Callable[..., Example]) -> None:
    """The loss is a summand, every other output a part, no count is of a part, and no parameter is sliced."""
    example = models.ragged(build(layers=1, batch=8))
    found = normal(*example)
    made = split_batch(found.module, found.factors, 4)
    specs = [value_spec(value) for value in outputs_of(found.module.graph)]
    assert [spec.shape == () for spec in specs].count(True) == 1
    assert list(made.outputs) == [PARTIAL if spec.shape == () else shard(0) for spec in specs]
    light = light_nodes(found.module)
    assert light
    for node, choice in made.choices.items():
        assert node not in light or PARTIAL not in choice.results, node
        for value, placement in zip(operands_of(node), choice.operands, strict=True):
            is_parameter = value.node.op == "placeholder" and value_spec(value).requires_grad
            assert not is_parameter or placement.holds_whole, (node, value)


def test_one_micro_batch_is_the_whole_batch() -> None:
    found = normal(*models.mlp(layers=1))
    made = split_batch(found.module, found.factors, 1)
    assert made == whole_batch(found.module)
    assert set(made.outputs) == {REPLICATED}
    assert {choice.name for choice in made.choices.values()} == {"R"}


def test_tokens_are_counted_in_the_whole_batch() -> None:
    """Labels come whole to the count, and in parts to the loss; the sum of the loss is divided by the count of all."""
    found = normal(*models.gpt2(layers=1))
    made = split_batch(found.module, found.factors, 4)
    by_target = {str(node.target): (node, choice) for node, choice in made.choices.items()}
    count, counted = by_target["aten.sum.default"]
    assert (counted.operands, counted.results) == ((REPLICATED,), (REPLICATED,))
    loss, summed = by_target["aten.cross_entropy_loss.default"]
    assert (summed.operands, summed.results) == ((shard(0), shard(0)), (PARTIAL,))
    divided, quotient = by_target["aten.div.Tensor"]
    assert [value.node for value in operands_of(divided)] == [loss, count]
    assert (quotient.operands, quotient.results) == ((PARTIAL, REPLICATED), (PARTIAL,))


class Head(nn.Module):
    """A linear layer, for a loss of one's own making."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.linear(x))


def batch(size: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 8), "labels": torch.arange(size) % 8}


class Smoothed(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), labels, label_smoothing=0.1)


class Summed(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), labels, reduction="sum")


class CountedByHand(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(self.logits(x), labels, reduction="none")
        return (each * (labels > 2)).sum() / (labels > 2).sum().clamp(min=1)


class Weighted(Head):
    """Classes weigh differently, and one of them is ignored."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 2, 8, device=x.device, dtype=x.dtype)
        return functional.cross_entropy(self.logits(x), labels, weight, ignore_index=3, label_smoothing=0.1)


class Distilled(Head):
    """Targets are probabilities of the classes, which weigh differently: a mean over rows all the same."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 2, 8, device=x.device)
        return functional.cross_entropy(self.logits(x), x.softmax(-1), weight, label_smoothing=0.1)


class LinearAuxiliary(Head):
    """An auxiliary loss that is a mean, and so linear in the samples."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x)
        return functional.cross_entropy(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()


class Begun(Head):
    """Losses are added up from a tensor of zeros, and to a number that is 0."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(self.logits(x), labels)
        return 0 + sum([loss, 0.5 * loss], x.new_zeros(()))


class Offset(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 3 - (functional.cross_entropy(self.logits(x), labels) - 0.25)


class Regular(Head):
    """Weights count beside the samples: a penalty on them, and uncertainty, by which the loss is divided too."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.full((), 0.3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(self.logits(x), labels) * torch.exp(-self.log_variance) + self.log_variance
        return loss + 0.1 * self.linear.weight.square().sum()


class Written(Head):
    """Columns are written to, which writes all rows of what that gives."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x) + 0
        logits[:, 0] = 0.5
        logits[:, 2:4] *= x[:, 2:4]
        return functional.cross_entropy(logits, labels)


AFFINE: list[type[Head]] = [Begun, Offset, Regular]


@pytest.mark.parametrize("config", [Manual(dp=2, microbatches=3), Manual(pp=2, microbatches=2), Manual(dp=2, zero=3, microbatches=2)])
@pytest.mark.parametrize("kind", [Written, Weighted, *AFFINE])
def test_micro_batches_add_up_to_the_model(kind: type[Head], config: Manual) -> None:
    found = autopar.verify(kind().double(), 2, (torch.randn(12, 8).double(), torch.arange(12) % 8), config)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-14


@pytest.mark.parametrize("kind", [Smoothed, Summed, CountedByHand, Weighted, Distilled, LinearAuxiliary, Written, *AFFINE])
def test_losses_that_are_sums_split(kind: type[Head]) -> None:
    assert split(kind(), batch(), 4).outputs == (PARTIAL,)


class Noisy(Head):
    """Noise of as many rows as the batch, whatever these are."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x + torch.randn(8, 8)), labels)


class Reversed(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x + x.flip(0)), labels)


class Remembered(Head):
    """Each sample has a row of a parameter, and of another that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(0, 1, 64).view(8, 8))
        self.fixed = nn.Parameter(torch.linspace(1, 2, 64).view(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x + self.own) * self.fixed, labels)


@pytest.mark.parametrize("kind", [Noisy, Reversed, Remembered])
def test_what_is_matched_with_the_batch_is_cut_with_it(kind: type[Head]) -> None:
    assert split(kind(), batch(), 4).outputs == (PARTIAL,)


class Placed(Head):
    """Positions of as many tokens as there are rows, or as many samples' own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, own: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x) + self.places(positions) + own.cos()[:, None, None]
        return functional.cross_entropy(logits.transpose(1, 2), labels)


def test_numbers_of_tokens_that_are_as_many_as_the_batch_are_whole() -> None:
    """What is added along the other dim is no part of the batch; what is added along it is."""
    rows = {"x": torch.randn(8, 8, 8), "positions": torch.arange(8), "own": torch.arange(8.0), "labels": torch.zeros(8, 8).long()}
    found = split(Placed(), rows, 4)
    assert found.outputs == (PARTIAL,)
    cut = {str(node.target): choice.operands for node, choice in found.choices.items()}
    assert not any(placement.is_sharded for placement in cut["aten.embedding.default"])
    assert cut["aten.cos.default"] == (shard(0),)


class Contrastive(Head):
    """Every sample against all others."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        a, b = self.logits(x), torch.tanh(self.logits(x))
        return functional.cross_entropy(a @ b.t(), torch.arange(a.shape[0], device=a.device))


class Balanced(Head):
    """The load of a mixture of experts is squared after its mean over the batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        load = torch.softmax(self.logits(x), -1).mean(0)
        return functional.cross_entropy(self.logits(x), labels) + (load * load).sum()


class Root(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.logits(x).square().mean().sqrt()


class Worst(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), labels, reduction="none").max()


class Trained(Head):
    """Weights of classes are parameters, which torch refuses to differentiate: what divides the loss stays inside of the op."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x), labels, self.linear.bias.exp())


class Shuffled(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(x).roll(1, 0), labels)


class Centred(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(x)
        return functional.cross_entropy(logits - logits.mean(0), labels)


class BatchNorm(Head):
    """Batch statistics; those that run along would be a buffer that changes, which capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.norm(self.logits(x)), labels)


REFUSED: dict[type[Head], tuple[str, str]] = {
    BatchNorm: ("aten.batch_norm", "self.norm(self.logits(x))"),
    Contrastive: ("aten.matmul", "a @ b.t()"),
    Balanced: ("aten.mul.Tensor", "(load * load).sum()"),
    Root: ("aten.sqrt", ".square().mean().sqrt()"),
    Worst: ("aten.max", 'reduction="none").max()'),
    Trained: ("aten.cross_entropy_loss", "self.linear.bias.exp()"),
    Shuffled: ("aten.roll", ".roll(1, 0)"),
    Centred: ("aten.sub.Tensor", "logits - logits.mean(0)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_losses_that_need_the_whole_batch_are_refused(kind: type[Head]) -> None:
    """The text names the op and the user's own line."""
    op, source = REFUSED[kind]
    with pytest.raises(MicrobatchError) as error:
        split(kind(), batch(), 4)
    text = str(error.value)
    assert text.startswith(f"the batch cannot be split into micro-batches: {op} (test_microbatch.py:")
    assert source in text
    assert "needs all samples at once, or is not linear in their sum" in text
    assert split(kind(), batch(), 1).outputs == (REPLICATED,)


class Scaled(Head):
    """A scalar of parameters alone beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = self.scale.exp()
        return functional.cross_entropy(self.logits(x) * scale, labels), scale


class Told(Scaled):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, scale = super().forward(x, labels)
        return loss, scale.detach(), (scale + self.linear.bias).argmax()


def test_a_scalar_with_a_gradient_is_a_loss() -> None:
    with pytest.raises(MicrobatchError) as error:
        split(Scaled(), batch(), 4)
    text = str(error.value)
    assert text.startswith("the batch (dim 0 of input labels) cannot be split into micro-batches: output 1, a scalar with a gradient")
    assert ", is made of parameters alone; .detach() it if it is no loss, else train with one micro-batch, or let micro-batches" in text


@pytest.mark.parametrize("number", [3, 16])
def test_the_number_divides_the_batch(number: int) -> None:
    with pytest.raises(MicrobatchError, match=rf"{number} micro-batches do not divide the batch of 8 \(dim 0 of input \w+\)"):
        split(*models.mlp(layers=1), number)


class Many(Head):
    """A loss, and others that a caller may look at."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.logits(x)
        right = (logits.argmax(-1) == labels).float().mean()
        return functional.cross_entropy(logits, labels), right, logits.t(), labels + 1, (labels > 2).sum()


def test_outputs_are_joined_as_they_lie() -> None:
    """Sums for losses and means, parts along whatever dim the batch went to; what is made of inputs alone is a part, or whole."""
    found = split(Many(), batch(), 4).outputs
    assert found == (PARTIAL, PARTIAL, shard(1), shard(0), REPLICATED)


def test_a_configuration_that_cannot_be_is_an_error_with_the_reason() -> None:
    with pytest.raises(PlanError, match=r"cannot be split into micro-batches: aten\.matmul "):
        autopar.plan(Contrastive(), 2, batch(), plan=Manual(dp=2, microbatches=2))


def test_placements_over_time_are_no_wider_than_the_batch() -> None:
    """A dim of the batch that was flattened with another is cut at its outer factor."""
    made = split(*models.gpt2(layers=1, batch=8), 4)
    placements: set[Placement] = {placement for choice in made.choices.values() for placement in choice.results}
    assert {placement for placement in placements if placement.is_sharded} == {shard(0)}
