"""What training scripts do to models, batches and gradients besides, against the same on one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import CaptureError, InputError, PlanError
from autopar.runtime import module
from tests.pool import RankError, RankPool
from tests.runtime.test_train import DEVICE, LINK

pytestmark = pytest.mark.slow

DATA, TENSOR, SHARDS, STAGES = Manual(dp=4), Manual(tp=4), Manual(dp=4, zero=3), Manual(pp=2, dp=2, microbatches=2)


def parallel(model: nn.Module, plan: Manual, **settings: Any) -> Any:
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    return autopar.parallelize(copy.deepcopy(model), 4, plan=plan, profile=profile, **settings)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def assert_like(ours: nn.Module, theirs: nn.Module) -> None:
    """Gradients that this rank has are those of one device."""
    expected = grads(theirs)
    for name, grad in grads(ours).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


def text_of(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


class Net(nn.Module):
    """With a mask that may come later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.scale = nn.Linear(8, 8), 1.0
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        made = self.head(x) * self.scale
        loss: torch.Tensor = (made if self.mask is None else made * self.mask).square().mean()
        return loss


def start(kind: type[nn.Module] = Net) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(8, 8)


class Remembering(nn.Module):
    """The backward reads the scale as it was before the forward changed it."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        made = self.last(hidden * self.scale.clone())
        with torch.no_grad():
            self.scale.mul_(0.5).add_(hidden.abs().mean(0) * 0.5)
        loss: torch.Tensor = made.square().mean()
        return loss


def change_what_is_read(rank: int) -> list[str]:
    """Buffers, which the forward itself changes, and inputs, which the loop does."""
    reference, x = start(Remembering)
    model = parallel(reference, DATA)
    for own in (reference, model):
        (own(x) + own(2 * x)).backward()
    assert_like(model, reference)
    torch.testing.assert_close(model.scale, reference.scale)
    reference, x = start()
    model = parallel(reference, TENSOR)
    loss = model(x)
    x.mul_(100.0)
    return [text_of(RuntimeError, loss.backward)]


def test_what_the_backward_reads_is_what_it_was(ranks: RankPool) -> None:
    for (text,) in ranks.run(change_what_is_read):
        assert text.startswith("an input of shape (8, 8) was changed in place between forward and backward")


class Two(nn.Module):
    """With two losses, each of parameters that the other has not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.one(hidden).square().mean(), self.other(hidden).abs().mean()


def take_one_loss(rank: int, plan: Manual) -> str:
    reference, x = start(Two)
    model = parallel(reference, plan)
    for own in (reference, model):
        one, other = own(x)
        one.backward()
    assert model.other.weight.grad is None
    assert_like(model, reference)
    return text_of(RuntimeError, other.backward)


@pytest.mark.parametrize("plan", [SHARDS], ids=str)
def test_a_loss_alone_gives_no_gradients_to_what_the_other_is_made_of(ranks: RankPool, plan: Manual) -> None:
    for text in ranks.run(take_one_loss, plan):
        assert "add several losses up and call backward once" in text


@dataclass
class Found:
    """Of which pytrees know nothing; ``rows`` are counted later."""

    loss: torch.Tensor
    shape: torch.Size
    rest: tuple[torch.Tensor, ...]
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        assert not self.loss.shape
        self.width = self.shape[1]


class Way(Enum):
    MEAN = 1


class Telling(Net):
    """What it returns besides its loss has no gradient, but for the last. It writes to a part of that, so that it is traced twice."""

    def forward(self, x: torch.Tensor) -> Any:
        made = self.layers[0](x).tanh() + 0.5
        made[:, 0] = 0.25
        with torch.no_grad():
            error = (made - x).abs().mean()
        found = Found(made.square().mean(), made.shape, (made.detach(), error, x, torch.arange(3.0), made))
        found.rows = 2 * len(x) + 1
        return found, x.shape[0] > 8, x.shape[0] / 4, made.dtype, Way.MEAN


def look_at_what_is_returned(rank: int, plan: Manual) -> None:
    reference, x = start(Telling)
    model = parallel(reference, plan)
    for size in (8, 16):  # of which the second is not captured again
        ours, theirs = (own(x.repeat(size // 8, 1)) for own in (model, reference))
        (found, *numbers), (expected, *others) = ours, theirs
        assert type(found) is Found
        assert numbers == others
        assert [type(number) for number in numbers] == [bool, float, torch.dtype, Way]
        assert (found.shape, found.rows, found.width) == (torch.Size((size, 8)), 2 * size + 1, 8)
        assert type(found.shape) is torch.Size
        torch.testing.assert_close((found.loss, *found.rest), (expected.loss, *expected.rest))
        assert [out.requires_grad for out in found.rest] == [out.requires_grad for out in expected.rest]
    found.rest[1].numpy()
    text = text_of(InputError, found.rest[-1].sum().backward)
    assert "a gradient came in for output '[0].rest[4]'" in text


@pytest.mark.parametrize("plan", [SHARDS, STAGES], ids=str)
def test_what_is_returned_is_what_one_device_returns(ranks: RankPool, plan: Manual) -> None:
    ranks.run(look_at_what_is_returned, plan)


def change_attributes(rank: int) -> list[str]:
    """Before the first call, and between calls; and what cannot change."""
    reference, x = start()
    model = parallel(reference, DATA)
    for value in (10.0, 3.0, 10.0):
        for own in (reference, model):
            own.scale = value
        torch.testing.assert_close(model(x), reference(x))
    assert sum(map(len, model._autopar.programs.values())) == 2
    for own in (reference, model):
        own.mask = torch.arange(8.0)
    torch.testing.assert_close(model(x), reference(x))
    copied = copy.deepcopy(model)
    copied.scale = 1.0
    torch.testing.assert_close(copied(x) * 100, reference(x))
    plain = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    texts = [text_of(CaptureError, torch.func.functional_call, model, plain, (x,))]
    torch.testing.assert_close(model(x), reference(x))
    model.head = nn.Linear(8, 8)
    return [*texts, text_of(CaptureError, model, x)]


def test_attributes_may_change(ranks: RankPool) -> None:
    for replaced, other in ranks.run(change_attributes):
        assert replaced.startswith("parameter layers.0.weight is no shard")
        assert other.startswith("the model has other modules inside than when parallelize was called")


def differentiate_twice(rank: int, plan: Manual) -> str:
    reference, x = start()
    model = parallel(reference, plan)
    return text_of(InputError, torch.autograd.grad, model(x), list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("plan", [DATA, STAGES], ids=str)
def test_a_penalty_on_gradients_is_refused(ranks: RankPool, plan: Manual) -> None:
    for text in ranks.run(differentiate_twice, plan):
        assert text.startswith("plans are differentiated once, and create_graph=True asks for gradients of gradients")


def hook_and_copy(rank: int) -> None:
    """Hooks on gradients from before the plan stay, and their handles work; models are copied with gradients."""
    reference, x = start()
    model, called = parallel(reference, SHARDS), []
    handles = [p.register_hook(lambda grad: grad * 2) for own in (reference, model) for p in own.parameters()]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: called.append(p))
    for own in (reference, model):
        own(x).backward()
    assert_like(model, reference)
    assert len(called) == len(list(model.parameters()))
    for handle in handles:
        handle.remove()
    for own in (reference, model):
        own.zero_grad()
        own(x).backward()
    assert_like(model, reference)
    assert_like(copy.deepcopy(model), reference)


def test_hooks_on_gradients_stay_and_gradients_are_copied(ranks: RankPool) -> None:
    ranks.run(hook_and_copy)


def norms_in_stages(rank: int) -> list[float]:
    """Of all gradients, of those of a module that one stage has, and of all once weights were assigned; a model that is gone is none."""
    reference, x = start()
    parallel(reference, Manual(pp=4, microbatches=4), example_batch=(x,))
    model = parallel(reference, STAGES, example_batch=(x,))
    model.load_state_dict(reference.state_dict(), assign=True)
    for own in (reference, model):
        own(x).backward()
    found = []
    for own in (reference, model):
        found.append(nn.utils.get_total_norm([p.grad for p in own.parameters() if p.grad is not None]))
        found.append(nn.utils.clip_grad_norm_(own.head.parameters(), 1.0))
        found.append(nn.utils.clip_grad_norm_(own.parameters(), 1.0))
    return [float(whole(norm)) for norm in found]


def test_norms_are_over_all_stages(ranks: RankPool) -> None:
    for norms in ranks.run(norms_in_stages):
        assert norms[3:] == pytest.approx(norms[:3], rel=1e-5)


def share_modules(rank: int) -> list[str]:
    encoder = nn.Linear(8, 8)
    first, second = nn.Sequential(encoder, nn.Linear(8, 8)), nn.Sequential(encoder, nn.Linear(8, 8))
    profile = MachineProfile(DEVICE, (LINK,) * 2)
    teacher = autopar.parallelize(first, 4, plan=DATA, profile=profile)
    students = (second, nn.Sequential(teacher))
    return [text_of(PlanError, autopar.parallelize, student, 4, plan=DATA, profile=profile) for student in students]


def test_parts_of_parallel_models_are_refused(ranks: RankPool) -> None:
    for shared, inner in ranks.run(share_modules):
        assert shared.startswith("parameter 0.weight is a DTensor of")
        assert inner.startswith("module 0, a ParallelSequential, is parallel already")


def give_another_shape(rank: int) -> None:
    """As a last batch that is short on one rank alone; the others wait for it in a collective."""
    reference, x = start()
    model = parallel(reference, DATA, compare_batches=0)
    model(x).backward()
    with patch.object(module, "job_timeout", lambda: timedelta(seconds=2)):
        model(x[: 8 if rank else 4]).backward()


def test_a_rank_whose_call_is_of_another_kind_says_so(ranks: RankPool) -> None:
    words = r"ranks \[1, 2, 3\] did not come to call 2 of model \d+, which is of a new kind on this rank .* drop_last=True"
    with pytest.raises(RankError, match=words) as caught:
        ranks.run(give_another_shape)
    assert caught.value.rank == 0
