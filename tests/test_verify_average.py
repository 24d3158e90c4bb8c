"""Micro-batches that are batches of their own equal the average of the model on the parts of the batch, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import cast

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import MicrobatchError
from tests import models
from tests.marks import exhaustive
from tests.models import Example
from tests.passes.test_microbatch import (
    Balanced,
    BatchNorm,
    Centred,
    Contrastive,
    Head,
    Many,
    Root,
    Shuffled,
    Worst,
    batch,
)

pytestmark = pytest.mark.slow

functional = nn.functional


def head(kind: type[Head]) -> Callable[[], Example]:
    return lambda: Example(kind(), batch())


EXAMPLES: dict[str, Callable[[], Example]] = {
    "statistics": models.batch_norm,
    **{kind.__name__: head(kind) for kind in (BatchNorm, Contrastive, Balanced, Root, Worst, Shuffled, Centred)},
}
PLANS = {
    "parts": Manual(microbatches=4),
    "dp": Manual(dp=2, zero=1, microbatches=2),
    "pp": Manual(pp=2, microbatches=4, schedule="zb-h1"),
}


CASES = [
    ("statistics", "pp"),
    ("Contrastive", "dp"),
    *(pytest.param("statistics", config, marks=exhaustive) for config in ("parts", "dp")),
    *(pytest.param(name, config, marks=exhaustive) for name, config in zip(list(EXAMPLES)[1:], cycle(PLANS), strict=False)),
]


@pytest.mark.parametrize("name, config", CASES)
def test_the_average_of_the_parts(name: str, config: str) -> None:
    """Losses, gradients, outputs, and buffers that change from part to part; and it is another step than that of the whole batch."""
    torch.manual_seed(0)
    (model, given), plan = EXAMPLES[name](), PLANS[config]
    found = autopar.verify(model, plan.dp * plan.pp, given, plan, average_microbatches=True)
    assert found.loss_error < 1e-6
    assert found.output_error < 1e-5
    assert found.grad_error < max(4 * found.reference_error, 1e-6)
    with pytest.raises(MicrobatchError, match="needs all samples at once"):
        autopar.verify(model, plan.dp * plan.pp, given, plan)


def test_what_is_exact_stays_exact() -> None:
    """Token counts that differ from part to part would make another loss."""
    model, given = models.ragged(models.gpt2(layers=1, batch=8))
    plan = autopar.plan(model, 2, given, plan=Manual(pp=2, microbatches=4), average_microbatches=True)
    assert not plan.pipeline.is_average
    assert not plan.notes
    found = autopar.verify(model, 2, given, plan)
    assert found.grad_error < max(4 * found.reference_error, 1e-6)


def test_the_planner_may_average_if_the_user_says_so() -> None:
    model, given = models.batch_norm(batch=16)
    kept, allowed = (autopar.plan(model, 4, given, average_microbatches=flag) for flag in (False, True))
    assert [a.shape for a in kept.alternatives if "micro-batches" in a.shape] == []
    assert "one micro-batch: the batch cannot be split" in kept.notes[0]
    averaged = [a.shape for a in allowed.alternatives if "averaged micro-batches" in a.shape]
    assert averaged
    assert not [a for a in allowed.alternatives if "micro-batches" in a.shape and a.shape not in averaged]
    assert "batches of their own, with the average of their losses: the batch cannot be split" in allowed.notes[0]
    split = autopar.plan(model, 2, given, plan=Manual(pp=2, microbatches=2), average_microbatches=True)
    assert "2 averaged micro-batches" in str(split)
    assert split.prediction.tokens_per_s * split.prediction.step_time_s == pytest.approx(16)


class Scores(Head):
    """Of every sample with every other, beside the loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x) @ self.logits(x).t()
        return functional.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device)), scores


class Counted(Contrastive):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x, labels), (self.logits(x) > 0).sum()


@pytest.mark.parametrize("kind, shape", [(Scores, r"\[2, 2\] .* nor averaged"), (Counted, r"\[\] \(torch.int64")])
def test_outputs_that_parts_do_not_give_are_refused(kind: type[Head], shape: str) -> None:
    with pytest.raises(MicrobatchError, match=rf"4 averaged micro-batches give outputs of shape {shape}"):
        autopar.plan(kind(), 1, batch(), plan=Manual(microbatches=4), average_microbatches=True)


class Returned(Many):
    """Outputs that are means, and that have the batch in a dim, the second of one; a loss that cannot be split."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.logits(x)
        return Contrastive.forward(cast(Contrastive, self), x, labels), logits.mean(), logits.t(), labels + 1


def test_outputs_are_joined() -> None:
    torch.manual_seed(0)
    found = autopar.verify(Returned(), 2, batch(), Manual(dp=2, microbatches=2), average_microbatches=True)
    assert found.output_error < 1e-6


def test_a_number_that_does_not_divide_the_batch() -> None:
    with pytest.raises(MicrobatchError, match="3 micro-batches do not divide the batch of 8"):
        autopar.plan(Contrastive(), 1, batch(), plan=Manual(microbatches=3), average_microbatches=True)
