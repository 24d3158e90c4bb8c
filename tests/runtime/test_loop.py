"""What plain training loops do besides: accumulation, scaled losses, loss functions; and what is refused, on every rank."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import AutoparError, CaptureError, InputError, MicrobatchError, PlanError
from tests import models
from tests.marks import few
from tests.models import Example
from tests.pool import RankPool

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
PROFILE = MachineProfile(DEVICE, (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * 2)
PLAN = Manual(dp=2, tp=2, zero=3)


def build() -> Example:
    return models.speaker(batch=4)


def parallel(model: nn.Module, plan: Manual = PLAN) -> nn.Module:
    profile = replace(PROFILE, links=PROFILE.links[:1] * len(plan.grid(4).sizes))
    made: nn.Module = autopar.parallelize(model, 4, plan=plan, profile=profile)
    return made


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def failure(kind: type[BaseException], call: object, *args: object, **kwargs: object) -> str:
    """The text of the error that a call raises."""
    assert callable(call)
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value)


def accumulate_and_scale(rank: int, plan: Manual) -> None:
    reference, batch = build()
    second = models.speaker(batch=4, seed=5).batch
    model = parallel(copy.deepcopy(reference), plan)

    def check() -> None:
        ours, theirs = grads(model), grads(reference)
        assert_equal(ours, {name: grad for name, grad in theirs.items() if plan.pp == 1 or name in ours})  # those of a stage
        assert ours

    for own in (reference, model):
        own(**batch).loss.backward()
        (own(**second).loss * 3).backward()
    check()
    for own in (reference, model):
        own.zero_grad()
        loss = own(**batch).loss
        loss /= 2
        loss += own(**second).loss  # two forwards before one backward
        loss.backward()
    check()


@pytest.mark.parametrize("plan", [PLAN, Manual(pp=2, dp=2, microbatches=2), Manual(dp=2, tp=2, microbatches=2)], ids=str)
def test_gradients_accumulate_and_scale(ranks: RankPool, plan: Manual) -> None:
    ranks.run(accumulate_and_scale, plan)


def square_of(model: nn.Module) -> torch.Tensor:
    """Of all parameters, a DTensor where they are."""
    total: torch.Tensor = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return total


def penalize(rank: int, plan: Manual) -> None:
    """What the loop computes of parameters is added to the loss, and multiplied with it once it is whole."""
    reference, batch = build()
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(4).sizes)
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=plan, profile=MachineProfile(DEVICE, links))
    for own in (reference, model):
        (own(**batch).loss * 2 + square_of(own) * 1e-2).backward()
    assert_equal(grads(model), {name: grad for name, grad in grads(reference).items() if name in grads(model)})
    if plan.pp > 1:
        return
    for own in (reference, model):
        own.zero_grad()
        square = square_of(own)
        (own(**batch).loss * (square.full_tensor() if isinstance(square, DTensor) else square)).backward()
    assert_equal(grads(model), grads(reference))
    text = failure(InputError, (model(**batch).loss * next(model.parameters()).square().sum()).backward)
    assert text.startswith("the gradient that came in for output"), text
    assert ".full_tensor()" in text


@pytest.mark.parametrize("plan", [PLAN, Manual(pp=2, dp=2, microbatches=2)])
def test_a_penalty_on_parameters(ranks: RankPool, plan: Manual) -> None:
    ranks.run(penalize, plan)


def look_for_nan(rank: int, plan: Manual) -> str:
    reference, batch = build()
    profile = MachineProfile(DEVICE, PROFILE.links[:1] * len(plan.grid(4).sizes))
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=plan, profile=profile)
    torch.autograd.set_detect_anomaly(True)
    try:
        for own in (reference, model):
            own(**batch).loss.backward()
        ours, theirs = grads(model), grads(reference)
        assert_equal(ours, {name: theirs[name] for name in ours})
        return failure(RuntimeError, model(**batch).loss.backward, torch.tensor(torch.nan))
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("plan", [PLAN, Manual(pp=2, dp=2, zero=1, microbatches=2)], ids=str)
def test_gradients_that_are_nan_are_found(ranks: RankPool, plan: Manual) -> None:
    assert all("returned nan values" in text for text in ranks.run(look_for_nan, plan))


def infer_and_train(rank: int, plan: Manual) -> None:
    """In `torch.inference_mode`, before there is a plan and after, and steps between."""
    reference, batch = build()
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(4).sizes)
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=plan, profile=MachineProfile(DEVICE, links), outputs="loss")
    for own in (model, reference):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        losses = []
        for _ in range(2):
            with torch.inference_mode():
                losses.append(own(**batch).loss.clone())
            loss = own(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert losses[0] == losses[1] > losses[2] == losses[3]
        if own is model:
            ours = losses
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", few(1, [Manual(pp=2, dp=2, microbatches=2), PLAN]))
def test_inference_mode_comes_first_and_between(ranks: RankPool, plan: Manual) -> None:
    ranks.run(infer_and_train, plan)


def misuse(rank: int) -> list[str]:
    model, batch = build()
    parallel(model)
    texts = [failure(PlanError, lambda: model.plan)]
    outputs = model(**batch)
    texts.append(failure(InputError, outputs.logits.sum().backward))
    outputs.loss.backward()
    texts.append(failure(RuntimeError, outputs.loss.backward))
    outputs = model(**batch)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    texts.append(failure(RuntimeError, outputs.loss.backward))
    outputs = model(**batch)
    torch.optim.SGD(model.parameters(), 0.1).step()
    texts.append(failure(RuntimeError, outputs.loss.backward))
    texts.append(failure(PlanError, parallel, model))
    return texts


def test_misuse_is_explained(ranks: RankPool) -> None:
    for texts in ranks.run(misuse):
        no_plan, logits, twice, changed, stepped, again = texts
        assert no_plan.startswith("there is no plan yet: it is made at the first call")
        assert "a gradient came in for output" in logits
        assert "logits" in logits
        assert "loss_fn" in logits
        assert "second time" in twice
        assert "was changed in place between forward and backward" in changed
        assert "step the optimizer after backward" in stepped
        assert "is parallel already" in again


def train_what_is_in_front(rank: int) -> str:
    front, x = nn.Linear(8, 8), torch.randn(4, 8)
    model = autopar.parallelize(nn.Linear(8, 4), 4, plan=PLAN, profile=PROFILE, loss_fn=lambda y: y.square().mean())
    text = failure(InputError, model, front(x))
    model(front(x).detach()).backward()
    model.eval()(front(x))
    with torch.no_grad():
        model.train()(front(x).requires_grad_())
    return text


def test_an_input_that_wants_a_gradient_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(train_what_is_in_front):
        assert text.startswith("input 0 of shape (4, 8) wants a gradient, and plans give none to inputs; put what made it into the model")


def squared(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, labels)


def train_with_loss_function(rank: int) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x, labels = torch.randn(8, 8), torch.randn(8, 4)
    model = autopar.parallelize(copy.deepcopy(reference), (2, 2), loss_fn=squared, profile=PROFILE)
    losses = []
    for own, loss in ((reference, lambda: squared(reference(x), labels)), (model, lambda: model(x, labels))):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(2):
            value = loss()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(value))
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-5, atol=1e-6)
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name), rtol=1e-5, atol=1e-6)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x, labels), squared(reference(x), labels), rtol=1e-5, atol=1e-6)


def test_a_loss_function(ranks: RankPool) -> None:
    ranks.run(train_with_loss_function)


def train_with_statistics(rank: int, plan: Manual) -> None:
    """Two steps and an evaluation of a model that remembers statistics of its batches, or of their averaged parts."""
    reference, batch = models.batch_norm()
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(4).sizes)
    model = autopar.parallelize(
        copy.deepcopy(reference), 4, plan=plan, profile=MachineProfile(DEVICE, links), average_microbatches=True
    )
    losses = []
    for own, count in ((reference, plan.microbatches or 1), (model, 1)):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(2):
            parts = zip(*(tensor.chunk(count) for tensor in batch.values()), strict=True)
            loss = sum((own(*part) for part in parts), torch.zeros(())) / count
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            losses.append(float(own.eval()(*batch.values())))
    torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-5, atol=1e-6)
    assert_equal(dict(model.named_buffers()), dict(reference.named_buffers()))


WITH_STATISTICS = [Manual(pp=2, dp=2, microbatches=2), Manual(dp=2, tp=2, zero=1), Manual(pp=2, dp=2, microbatches=1)]


@pytest.mark.parametrize("plan", few(1, WITH_STATISTICS), ids=str)
def test_statistics_are_kept(ranks: RankPool, plan: Manual) -> None:
    ranks.run(train_with_statistics, plan)


def switch_between_steps(rank: int) -> None:
    """A module in evaluation alone, and a parameter that is frozen at first; then both the other way round."""
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    reference[0].weight.requires_grad_(False)
    x = torch.randn(8, 8)
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=PLAN, profile=PROFILE, loss_fn=lambda y: y.square().mean())
    for is_first in (True, False):
        losses = []
        for own in (model, reference):
            own[1].train(is_first)
            own[0].weight.requires_grad_(not is_first)
            own[2].bias.requires_grad_(is_first)
            own.zero_grad()
            loss = own(x) if own is model else own(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        assert_equal(grads(model), grads(reference))
        assert_equal(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_modules_and_parameters_are_switched_between_steps(ranks: RankPool) -> None:
    ranks.run(switch_between_steps)


def call_hooks(rank: int) -> None:
    """Those of the model itself, from before and after, once a call; one inside is part of the forward."""
    reference, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    model, shown = copy.deepcopy(reference), list[str]()
    for own in (reference, model):
        own[0].register_forward_hook(lambda module, given, made: made * 2)
        own.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        own.register_forward_hook(lambda module, given, made: made * 3)
    model = autopar.parallelize(model, 4, plan=PLAN, profile=PROFILE)
    model.register_forward_hook(lambda module, given, made: shown.append(type(made).__name__))
    for _ in range(2):
        torch.testing.assert_close(model(x), reference(x))
    assert shown == ["Tensor", "Tensor"]
    model[0].register_forward_hook(lambda module, given, made: made)
    assert failure(CaptureError, model, x).startswith("module 0 has other forward hooks than when parallelize was called")


def test_hooks_of_the_model_are_called_and_others_refused(ranks: RankPool) -> None:
    ranks.run(call_hooks)


class Masked(nn.Linear):
    """Centred in the batch, so that it stays whole; gives the mask of its dropout."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return (y - y.mean(0)).square().sum(), nn.functional.dropout(torch.ones_like(x), 0.5)


def drop_in_parts(rank: int) -> None:
    model = autopar.parallelize(Masked(64, 4), 4, plan=Manual(dp=4, microbatches=2), profile=PROFILE, average_microbatches=True)
    _, mask = model(torch.randn(8, 64))
    rows = [tuple(row.tolist()) for row in mask]
    assert len(set(rows)) == 8
    assert {value for row in rows for value in row} == {0.0, 2.0}


def test_averaged_micro_batches_draw_their_own_numbers(ranks: RankPool) -> None:
    ranks.run(drop_in_parts)


def average_other_batches(rank: int) -> list[int]:
    """How many parts a batch has, by the statistics that they leave; any number of rows will do for an evaluation."""
    model = autopar.parallelize(
        nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8)),
        4,
        plan=Manual(dp=4, microbatches=2),
        profile=PROFILE,
        loss_fn=nn.functional.mse_loss,
        average_microbatches=True,
    )
    counts = []
    for rows in (8, 16, 8):
        before = int(model[1].num_batches_tracked)
        model(torch.randn(rows, 64), target=torch.randn(rows, 8))
        counts.append(int(model[1].num_batches_tracked) - before)
    text = failure(MicrobatchError, model, torch.randn(7, 64), target=torch.randn(7, 8))
    assert "the plan averages 2 micro-batches, which do not divide the batch of 7" in text
    model.eval()(torch.randn(4, 64), target=torch.randn(4, 8))
    return counts


def test_other_batches_are_averaged_too(ranks: RankPool) -> None:
    assert ranks.run(average_other_batches) == [[2, 2, 2]] * 4


def give_other_batches(rank: int) -> list[str]:
    """A sampler that is seeded otherwise on rank 2; rows that two ranks took for themselves; the fourth call is not compared."""
    model, batch = build()
    model = parallel(model)
    other = {name: x.roll(1, 0) for name, x in batch.items()}
    texts = [failure(InputError, model, **(other if rank == 2 else batch))]
    texts.append(failure(InputError, model, **{name: x[:2] if rank < 2 else x for name, x in batch.items()}))
    for _ in range(2):
        model(**batch)
    return texts


def test_other_batches_are_an_error_on_every_rank(ranks: RankPool) -> None:
    for values, shapes in ranks.run(give_other_batches):
        assert values.startswith("call 1: ranks [2] were given another batch than 3 of 4: input 0 has other values; every rank takes")
        assert "were given another batch than 2 of 4: input 0 is int64[" in shapes


def build_differently(rank: int) -> str:
    model, batch = models.speaker(layers=1 + rank % 2, batch=4)
    parallel(model)
    return failure(PlanError, model, **batch)


def test_different_models_are_an_error_on_every_rank(ranks: RankPool) -> None:
    for text in ranks.run(build_differently, timeout=60):
        assert text.startswith("the ranks captured different graphs")


def plan_the_impossible(rank: int) -> str:
    model, batch = build()
    autopar.parallelize(model, 4, plan=PLAN, memory_limit=1000, profile=PROFILE)
    return failure(AutoparError, model, **batch)


def test_an_error_of_the_planner_reaches_every_rank(ranks: RankPool) -> None:
    texts = ranks.run(plan_the_impossible, timeout=60)
    assert len(set(texts)) == 1
    assert "needs" in texts[0]


def fail_capture(rank: int) -> str:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.sum() if y.sum() > 0 else y.mean()

    return failure(AutoparError, autopar.parallelize(Branches(4, 4), (2, 2), profile=PROFILE), torch.randn(4, 4))


def test_an_error_of_capture_reaches_every_rank(ranks: RankPool) -> None:
    for text in ranks.run(fail_capture, timeout=60):
        assert text.startswith("cannot capture Branches")


class Fails(RuntimeError):
    """Not an error of ours."""


def fail_alone(rank: int) -> tuple[str, str]:
    """A rank that cannot capture, and a first rank that cannot plan."""

    def report(line: str) -> None:
        if line.startswith("capturing") and rank == 2:
            raise Fails("no room")

    def refuse(grid: object) -> MachineProfile:
        raise Fails("no prices")

    batch = torch.randn(4, 4)
    unread = autopar.parallelize(nn.Linear(4, 4), 4, plan=PLAN, profile=PROFILE, report=report)
    captured = failure(Fails if rank == 2 else PlanError, unread, batch)
    unpriced = autopar.parallelize(nn.Linear(4, 4), 4, plan=PLAN, profile=PROFILE)
    unpriced._autopar.build = replace(unpriced._autopar.build, machine_of=refuse)
    return captured, failure(PlanError if rank else Fails, unpriced, batch)


def test_an_error_of_any_kind_on_one_rank_ends_the_others(ranks: RankPool) -> None:
    for rank, texts in enumerate(ranks.run(fail_alone, timeout=40)):
        assert texts == ("no room" if rank == 2 else "rank 2: Fails: no room", "Fails: no prices" if rank else "no prices")
