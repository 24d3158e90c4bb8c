"""Training in less than the precision of the parameters on real processes: as one device does it, and losses scaled as in float16."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual, Precision
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.precision import computing
from autopar.runtime.scaling import LossScale
from tests import models
from tests.marks import only
from tests.pool import RankPool

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile(
    "test", 2**33, tuple(MatmulSample(64, 64, 64, dtype, 1e9) for dtype in ("float32", "bfloat16")), 1e9, 1e-6, "for tests"
)
PLANS = {
    "zero3_tp": Manual(dp=2, tp=2, zero=3),
    "pp_zero1": Manual(pp=2, dp=2, zero=1, microbatches=2),
    "pp4": Manual(pp=4, microbatches=4),
    "in_parts": Manual(dp=4, zero=2, microbatches=2),
}
Batch = dict[str, torch.Tensor]


def build() -> nn.Module:
    return models.gpt2(layers=1, hidden=32, vocab=64, batch=8, sequence=8).model


def batches(count: int) -> list[Batch]:
    return [models.gpt2(layers=1, hidden=32, vocab=64, batch=8, sequence=8).batch] * count


def in_half(how: str) -> AbstractContextManager[object]:
    """Where a model computes in float16 by the user's own autocast."""
    return torch.autocast("cpu", torch.float16) if how == "autocast" else nullcontext()


def parallel(model: nn.Module, plan: Manual, precision: str | None) -> nn.Module:
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(4).sizes)
    profile = MachineProfile(DEVICE, links)
    made: nn.Module = autopar.parallelize(model, 4, example_batch=batches(1)[0], plan=plan, profile=profile, precision=precision)
    return made


def on_one_device(model: nn.Module, precision: Precision, given: list[Batch]) -> list[float]:
    """Float32 parameters and optimizer, everything between in the precision: written out."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for batch in given:
        with computing(model, precision):
            loss = model(**batch).loss
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train(rank: int, plan: Manual, precision: str) -> tuple[list[float], list[float]]:
    reference = build()
    model = parallel(copy.deepcopy(reference), plan, precision)
    wished = Precision.of(precision)
    assert wished is not None
    expected = on_one_device(reference, wished, batches(4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for batch in batches(4):
        loss = model(**batch).loss
        loss.backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
    return found, expected


@pytest.mark.parametrize("plan", only(["pp_zero1"], PLANS))
def test_training_in_bfloat16_is_that_of_one_device(ranks: RankPool, plan: str) -> None:
    for found, expected in ranks.run(train, PLANS[plan], "bf16"):
        assert found == pytest.approx(expected, rel=4e-3)
        assert found[-1] < found[0] - 0.3


WEIGHT = "transformer.h.0.mlp.c_fc.weight"


def overflow(model: nn.Module) -> None:
    """Let products of this rank's part of a weight be infinite in float16."""
    held = dict(model.named_parameters()).get(WEIGHT)
    if held is not None:
        whole = held.detach()
        assert isinstance(whole, DTensor)
        whole.to_local().fill_(6e4)


def scaled(rank: int, plan: Manual, how: str) -> list[tuple[float, float, bool]]:
    """Loss, scale after the step, and whether the step changed the parameters; the third step overflows."""
    with in_half(how):
        model = parallel(build(), plan, None if how == "autocast" else how)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    rows = []
    for step, batch in enumerate(batches(6)):
        before = [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]
        if step == 2:
            overflow(model)
        with in_half(how):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), before, strict=True):
                assert isinstance(parameter, DTensor)
                parameter.to_local().copy_(kept)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
        rows.append((float(loss), scaler.get_scale(), any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))))
    return rows


@pytest.mark.parametrize("how", only(["autocast"], ["fp16", "autocast"]))
@pytest.mark.parametrize("plan", only(["pp4"], PLANS))
def test_a_scaler_of_torch_works_as_on_one_device(ranks: RankPool, plan: str, how: str) -> None:
    found = ranks.run(scaled, PLANS[plan], how)
    losses, scales, steps = zip(*found[0], strict=True)
    assert all(own == found[0] for own in found), "all ranks step or none does"
    assert losses[-1] < losses[0] - 0.3
    assert list(steps) == [True, True, False, True, True, True]
    assert list(scales) == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


def one_overflow(rank: int, plan: Manual, how: str) -> tuple[bool, bool]:
    """One element of one rank's gradients is infinite: whether a step is taken, and whether this rank has that gradient."""
    with in_half(how):
        model = parallel(build(), plan, None if how == "autocast" else how)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    batch = batches(1)[0]
    is_mine = WEIGHT in dict(model.named_parameters()) and (plan.pp == 4 or rank % 2 == 1)
    if is_mine:
        overflow(model)
    with in_half(how):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    taken = []
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler.step(optimizer)
    return bool(taken), is_mine


@pytest.mark.parametrize("how", only(["autocast"], ["fp16", "autocast"]))
@pytest.mark.parametrize("plan", only(["pp4"], PLANS))
def test_an_overflow_of_one_rank_skips_the_step_of_all(ranks: RankPool, plan: str, how: str) -> None:
    taken, mine = zip(*ranks.run(one_overflow, PLANS[plan], how), strict=True)
    assert any(mine)
    assert not any(taken)


def one_infinite(rank: int, plan: Manual, is_frozen: bool) -> tuple[bool, float]:
    """A gradient of one rank in float32 is infinite, or the stage of another has none: whether a step is taken, and the scale after it."""
    model = parallel(build(), plan, None)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(**batches(1)[0]).loss).backward()
    *_, last = model.parameters()
    if rank == 1 and not is_frozen:
        assert isinstance(last.grad, DTensor)
        last.grad.to_local().view(-1)[:1] = torch.inf
    if rank == 2 and is_frozen:
        optimizer.zero_grad()
    taken = list[bool]()
    optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler.step(optimizer)
    scaler.update()
    return bool(taken), scaler.get_scale()


@pytest.mark.parametrize("plan", only(["pp4", "zero3_tp"], PLANS))
def test_in_any_precision_all_ranks_skip_a_step_or_none(ranks: RankPool, plan: str) -> None:
    assert ranks.run(one_infinite, PLANS[plan], False) == [(False, 2.0)] * 4


def test_a_stage_without_gradients_steps_with_the_others(ranks: RankPool) -> None:
    assert ranks.run(one_infinite, PLANS["pp4"], True) == [(True, 4.0)] * 4


def test_small_gradients_of_stages_survive_by_the_scale_that_is_expected() -> None:
    scale = LossScale()
    assert scale.settle(2.0**16, overflowed=False) == 1.0
    assert scale.settle(2.0**17, overflowed=False) == 2.0, "the scaler has grown"
    assert scale.settle(2.0**17, overflowed=True) == 1.0
    assert scale.expected == 2.0**16, "what the scaler falls back to"
    with pytest.warns(UserWarning, match=r"under the loss scale 65536 that was expected, and 1 came"):
        LossScale().settle(1.0, overflowed=True)
    assert scale.settle(1.0, overflowed=False) == 2.0**-16, "no scaler"
    assert scale.expected == 1.0
