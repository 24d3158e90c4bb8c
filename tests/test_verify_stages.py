"""Pipelines and micro-batches equal the unmodified model, on virtual ranks, with labels that differ in number by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import nn

from autopar import Manual
from autopar.ops import onednn
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.verify import Verification, verify_plan
from tests import models
from tests.marks import exhaustive, few, only
from tests.models import Example
from tests.passes.test_microbatch import (
    CountedByHand,
    Distilled,
    LinearAuxiliary,
    Many,
    Remembered,
    Reversed,
    Smoothed,
    Summed,
    Told,
)
from tests.planning import planned

pytestmark = pytest.mark.slow

BUILDERS: dict[str, Callable[..., Example]] = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "t5": models.t5,
    "nn_transformer": models.nn_transformer,
    "unet": models.unet,
    "bert": models.bert,
    "vit": models.vit,
}
CONFIGS: dict[str, Manual] = {
    "pp2": Manual(pp=2),
    "pp4": Manual(pp=4),
    "pp2_tp2": Manual(pp=2, tp=2),
    "pp2_zero1": Manual(pp=2, dp=2, zero=1),
    "pp2_zero2": Manual(pp=2, dp=2, zero=2),
    "pp2_zero3": Manual(pp=2, dp=2, zero=3),
    "interleaved": Manual(pp=2, schedule="interleaved:2"),
    "gpipe": Manual(pp=2, schedule="gpipe"),
    "zb": Manual(pp=4, schedule="zb-h1"),
    "dp2": Manual(dp=2),
    "cp2_tp2": Manual(cp=2, tp=2),
    "cp4": Manual(cp=4),
    "pp2_cp2": Manual(pp=2, cp=2),
    "dp2_cp2_zero3": Manual(dp=2, cp=2, zero=3),
    "hybrid_zero3": Manual(dp=4, zero=3, replicas=2),
    "pp2_hybrid_zero2": Manual(pp=2, dp=4, zero=2, replicas=2, schedule="interleaved:2"),
    "pp2_hybrid_zero3": Manual(pp=2, dp=4, zero=3, replicas=2, schedule="zb-h1"),
    "pp2_hybrid_zero1": Manual(pp=2, dp=4, zero=1, replicas=2),
    "hybrid_zero2_cp2": Manual(dp=2, cp=2, zero=2, replicas=2),
}
MICROBATCHES = (1, 4, 8)


@cache
def opened(name: str, batch: int = 8) -> tuple[Example, Session]:
    """A model of two blocks with a batch whose rows have more labels from row to row, the first none."""
    example = models.ragged(BUILDERS[name](layers=2, batch=batch))
    return example, open_session(make_skeleton(example.model), (), example.batch)


def cut(config: Manual, microbatches: int) -> Manual:
    return replace(config, microbatches=microbatches)


def verify(example: Example, session: Session, wanted: Manual) -> Verification:
    return verify_plan(example.model, session.captured, session.normal, planned(session, wanted), (), example.batch)


def check(found: Verification) -> None:
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)
    assert found.loss_error <= 1e-6, str(found)
    assert found.output_error <= 1e-5, str(found)


ALWAYS = [
    ("gpt2", "zb", 8),
    ("gpt2", "pp2_zero1", 4),
    ("unet", "pp2", 1),
    ("unet", "pp2_zero3", 8),
    ("unet", "interleaved", 4),
    ("unet", "dp2", 4),
    ("llama", "cp2_tp2", 1),
    ("gpt2", "pp2_cp2", 4),
    ("gpt2", "hybrid_zero3", 2),
]
MORE = [
    ("gpt2", "pp2_hybrid_zero3", 2),
    ("unet", "pp2_hybrid_zero2", 2),
    ("gpt2", "pp2_tp2", 4),
    ("unet", "pp2_tp2", 4),
    ("unet", "pp2_zero2", 4),
    ("unet", "gpipe", 8),
    ("gpt2", "interleaved", 8),
    ("gpt2", "pp2_zero3", 4),
    ("llama", "interleaved", 4),
    ("llama", "zb", 1),
    ("t5", "zb", 8),
    ("nn_transformer", "pp2", 8),
    ("bert", "gpipe", 4),
    ("vit", "pp2_zero2", 1),
    ("gpt2", "cp4", 1),
    ("bert", "cp2_tp2", 1),
    ("t5", "cp4", 1),
    ("llama", "dp2_cp2_zero3", 4),
    ("unet", "hybrid_zero3", 1),
    ("gpt2", "pp2_hybrid_zero1", 4),
    ("llama", "hybrid_zero2_cp2", 2),
]
CASES = only(ALWAYS, [*ALWAYS, *MORE])


@pytest.mark.parametrize("name, config, microbatches", CASES)
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_stages_equal_the_model(name: str, config: str, microbatches: int) -> None:
    wanted = CONFIGS[config]
    check(verify(*opened(name, max(8, wanted.dp * microbatches)), cut(wanted, microbatches)))


@pytest.mark.parametrize("config", ["zb", *(pytest.param(name, marks=exhaustive) for name in ("pp2_tp2", "pp2_zero3"))])
def test_products_of_onednn_in_stages(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, called = onednn.linear, []

    def linear(*args: Any) -> torch.Tensor:
        called.append(args)
        return plain(*args)

    monkeypatch.setattr(onednn, "LEAST_FLOPS", 0)
    monkeypatch.setattr(onednn, "linear", linear)
    check(verify(*opened("gpt2"), cut(CONFIGS[config], 4)))
    assert called


LOSSES = [Smoothed, Summed, CountedByHand, Distilled, LinearAuxiliary, Many, Reversed, Told]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_losses_over_micro_batches(kind: type[nn.Module]) -> None:
    """Means count the samples of the whole batch, whatever way they are written; outputs come back in their places."""
    torch.manual_seed(0)
    example = Example(kind(), {"x": torch.randn(8, 8), "labels": torch.tensor([3, -100, -100, 5, -100, 1, 2, 7])})
    if kind is not Smoothed:
        example.batch["labels"] = torch.arange(8)
    session = open_session(make_skeleton(example.model), (), example.batch)
    for config in (Manual(microbatches=4), Manual(dp=2, zero=1, microbatches=2)):
        check(verify(example, session, config))


def named(build: Callable[[], nn.Module], config: Manual, **batch: torch.Tensor) -> Verification:
    torch.manual_seed(0)
    example = Example(build(), batch)
    return verify(example, open_session(make_skeleton(example.model), (), batch), config)


@pytest.mark.parametrize("config", [Manual(microbatches=4), Manual(dp=2, microbatches=2)], ids=str)
def test_rows_of_parameters_go_with_the_batch(config: Manual) -> None:
    check(named(Remembered, config, x=torch.randn(8, 8), labels=torch.arange(8)))


class Routed(nn.Module):
    """What crosses a cut is no number with a gradient: the class that the first stage finds likeliest, and whether it is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 6), nn.Embedding(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = cast(torch.Tensor, self.first(x))
        likeliest = logits.argmax(-1)
        y = self.second(likeliest) * (likeliest % 2 == 1)[:, None] + x
        return nn.functional.cross_entropy(self.last(y), labels) + logits.logsumexp(-1).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_values_without_gradients_cross_stages(schedule: str) -> None:
    config = Manual(pp=3, schedule=schedule, microbatches=4, stages=("second", "last"))
    check(named(Routed, config, x=torch.randn(8, 8), labels=torch.arange(8) % 4))


class Normed(nn.Module):
    """What is made of parameters alone is an output, alike in all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = nn.functional.normalize(self.codes.weight, dim=1)
        return nn.functional.cross_entropy(x @ codes.t(), labels), codes


@pytest.mark.parametrize("config", [Manual(microbatches=2), Manual(dp=2, zero=3, microbatches=2), Manual(tp=2, microbatches=2)], ids=str)
def test_an_output_of_parameters_alone(config: Manual) -> None:
    check(named(Normed, config, x=torch.randn(8, 8), labels=torch.arange(8) % 4))


class Headed(nn.Module):
    """The last stage has parameters, and none of them is on a way to the loss: the stage before waits for its gradients all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return nn.functional.cross_entropy(hidden, labels), self.head(hidden)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_that_is_not_on_the_way_to_the_loss(schedule: str) -> None:
    config = Manual(pp=2, schedule=schedule, microbatches=4, stages=("head",))
    check(named(Headed, config, x=torch.randn(8, 8), labels=torch.arange(8) % 4))


def frozen() -> nn.Module:
    model = models.gpt2(layers=2, hidden=32).model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wte" not in name and "h.0.attn" not in name and "h.1.mlp" not in name)
    return model


@pytest.mark.parametrize("schedule", few(1, ["1f1b", "zb-h1"]))
def test_frozen_parameters_have_no_gradients(schedule: str) -> None:
    check(named(frozen, Manual(pp=2, dp=2, zero=1, schedule=schedule, microbatches=4), **models.gpt2(batch=8).batch))


def test_stages_begin_where_they_are_said_to() -> None:
    """Uneven ones: the first has the embedding alone, the last the head alone."""
    example, session = opened("gpt2")
    plan = planned(session, Manual(pp=3, microbatches=4, stages=("transformer.h.0", "transformer.ln_f")))
    stages = {op.module: op.stage for op in plan.ops if op.module.startswith("transformer.")}
    assert stages["transformer.h.0.ln_1"] == stages["transformer.h.1.mlp.c_proj"] == 1
    assert stages["transformer.ln_f"] == 2
    tied = plan.parameter("transformer.wte.weight")
    assert tied.stages == (0, 2)
    check(verify_plan(example.model, session.captured, session.normal, plan, (), example.batch))


class Twice(nn.Module):
    """The first and the third layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, labels)


@pytest.mark.parametrize("schedule", ["interleaved:2", "gpipe:2"])
def test_one_rank_has_both_stages_of_a_tied_parameter(schedule: str) -> None:
    """Of four stages on two ranks the first and the third are on one."""
    torch.manual_seed(0)
    example = Example(Twice(), {"x": torch.randn(8, 8), "labels": torch.randn(8, 8)})
    session = open_session(make_skeleton(example.model), (), example.batch)
    plan = planned(session, Manual(pp=2, schedule=schedule, microbatches=4, stages=("b", "c", "d")))
    assert [plan.parameter(name).stages for name in ("a.weight", "b.weight", "d.weight")] == [(0, 2), (1,), (3,)]
    check(verify_plan(example.model, session.captured, session.normal, plan, (), example.batch))
