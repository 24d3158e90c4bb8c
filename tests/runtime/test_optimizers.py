"""Every optimizer of torch on shards does what it does on one device, or says why it cannot."""

from __future__ import annotations

import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import PlanError
from autopar.runtime import optimizers
from autopar.runtime.optimizers import EACH, register_before_updates
from tests.marks import exhaustive, only
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK, batches, build, whole

pytestmark = pytest.mark.slow

PLAN = Manual(dp=2, tp=2, zero=3)
KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "eps": 1e-4, "foreach": True, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "eps": 1e-4, "fused": True},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 1e-2, "eps": 1e-4},
    "NAdam": {"lr": 1e-2, "eps": 1e-4},
    "RAdam": {"lr": 1e-2, "eps": 1e-4},
    "ASGD": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "eps": 1e-3},
    "Muon": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.1},
    "Rprop": {"lr": 1e-3},
}


def parallel(model: nn.Module, plan: Manual = PLAN) -> nn.Module:
    profile = MachineProfile(DEVICE, (LINK,) * 2)
    made: nn.Module = autopar.parallelize(model, 4, plan=plan, profile=profile, example_batch=batches(1)[0])
    return made


def steps(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Parameters after three steps; those that follow signs take no biases, where the gradients of keys are nothing but rounding."""
    parameters = [p for p in model.parameters() if name not in ("Muon", "Rprop") or p.dim() == 2]
    optimizer = getattr(torch.optim, name)(parameters, **KINDS[name])
    for batch in batches(3):
        model(**batch).loss.backward()
        optimizer.step()
        assert all(p.grad is not None for p in parameters)
        model.zero_grad()
    return whole(model)


def differ(rank: int, name: str) -> None:
    reference = build().model
    model = parallel(copy.deepcopy(reference))
    tolerance = 2e-3 if name == "Muon" else 1e-6  # its iteration is in bfloat16; losses of transformers are in float32
    torch.testing.assert_close(steps(model, name), steps(reference, name), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", only(["Muon"], KINDS))
def test_steps_are_those_of_one_device(ranks: RankPool, name: str) -> None:
    ranks.run(differ, name)


class OfDTensors(TorchDispatchMode):
    """Names the ops that DTensors come to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] * any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def step_with(hook: str, name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Parameters and state after two steps by an optimizer with a hook, and the ops that DTensors saw in the second."""
    model = parallel(build().model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **KINDS[name])
    if hook:
        getattr(optimizer, hook)(lambda *_: None)
    for batch in batches(2):
        model.zero_grad()
        model(**batch).loss.backward()
        with OfDTensors() as ops:
            optimizer.step()
    state = {f"{i}.{key}": x for i, p in enumerate(model.parameters()) for key, x in optimizer.state[p].items()}
    held = [(p, x) for p in model.parameters() for x in optimizer.state[p].values() if isinstance(p, DTensor) and isinstance(x, DTensor)]
    assert all(x.placements == p.placements for p, x in held)
    return whole(model) | {name: x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x) for name, x in state.items()}, ops.seen


def step_by_shards(rank: int, name: str) -> None:
    """Bit for bit what a step of DTensors is, which one with a hook of the user is."""
    (expected, by_tensors), (found, none) = (step_with(hook, name) for hook in ("register_step_pre_hook", ""))
    assert by_tensors
    assert not none
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", only(["SGD", "ASGD"], sorted(kind.__name__ for kind in EACH)))
def test_elements_are_stepped_shard_by_shard(ranks: RankPool, name: str) -> None:
    ranks.run(step_by_shards, name)


def test_nothing_is_kept_of_models_that_are_gone() -> None:
    """Nor is a parameter ours that has the id of one that was."""
    model = nn.Linear(2, 2)
    optimizers.watch_optimizers(model)
    optimizers.refuse_steps_of(model.parameters())
    keys = [id(parameter) for parameter in model.parameters()]
    assert all(optimizers.is_ours(parameter) for parameter in model.parameters())
    assert not optimizers.is_ours(nn.Parameter(torch.ones(2)))
    other = nn.Parameter(torch.ones(2))
    optimizers._ours[id(other)] = optimizers._ours[keys[0]]
    assert not optimizers.is_ours(other)
    optimizers._stepped[keys[1]] = torch.ones(2)  # as a step that fails leaves it
    del model, optimizers._ours[id(other)]
    gc.collect()
    assert not (optimizers._ours.keys() | optimizers._replaced.keys() | optimizers._stepped.keys()) & {*keys}


def step_twice(rank: int, name: str) -> None:
    """A parameter that is there twice is stepped with as torch does, and keeps its gradient."""
    reference = build().model
    model, stepped = parallel(copy.deepcopy(reference)), []
    for one in (model, reference):
        first, second = [p for p in one.parameters() if p.dim() == 2][:2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it is there twice
            optimizer = getattr(torch.optim, name)([first, second, first], **KINDS[name])
        for batch in batches(2):
            one(**batch).loss.backward()
            optimizer.step()
            assert first.grad is not None
            one.zero_grad()
        stepped.append(whole(one))
    torch.testing.assert_close(*stepped, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["RAdam", "Adafactor"])
def test_a_parameter_that_is_there_twice(ranks: RankPool, name: str) -> None:
    ranks.run(step_twice, name)


def step_inside(rank: int) -> None:
    """A step within a step of one optimizer, as that of a subclass which calls the step of its class: gradients are back after both."""
    model = parallel(build().model)
    model(**batches(1)[0]).loss.backward()
    first = next(p for p in model.parameters() if p.dim() == 2)
    gradient, optimizer = first.grad, torch.optim.SGD([first], lr=0.1)
    optimizers._before(optimizer, (), {})
    assert first.grad is None
    optimizer.step()
    optimizers._after(optimizer, (), {})
    assert first.grad is gradient
    assert not optimizers._stepped


def test_a_step_within_a_step(ranks: RankPool) -> None:
    ranks.run(step_inside)


def heed(rank: int) -> list[float]:
    """Hooks see gradients, and what they make of them counts; a closure gives new ones; others' parameters are stepped with."""
    model, beside = parallel(build().model), nn.Parameter(torch.ones(2))
    given = batches(1)[0]
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=1.0)
    before = whole(model)
    beside.grad = torch.ones(2)
    first = model(**given).loss
    first.backward()
    grads = [p.grad for p in model.parameters()]
    kept = [grad.clone() for grad in grads if grad is not None]

    def mute(*_: object) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()

    for handle in (optimizer.register_step_pre_hook(mute), register_optimizer_step_pre_hook(mute)):
        optimizer.step()
        handle.remove()
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
    assert beside.tolist() == [-1.0, -1.0]
    for p, grad in zip(model.parameters(), kept, strict=True):
        assert p.grad is not None
        p.grad.copy_(grad)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**given).loss
        loss.backward()
        return loss

    losses = [first.detach(), *(optimizer.step(closure).detach() for _ in range(2))]
    return [float(loss) for loss in losses]


def test_what_others_do_about_a_step_is_heeded(ranks: RankPool) -> None:
    for before, first, second in ranks.run(heed):
        assert before == first > second


class Scaled(nn.Module):
    """With a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.scale * self.layer(x)).square().mean()
        return loss


def step_oddly(rank: int) -> None:
    """A parameter of no dims, whose state is no larger than the count of steps, and gradients that lie otherwise than what they are for."""
    torch.manual_seed(0)
    reference, x = Scaled(), torch.randn(4, 8)
    model = autopar.parallelize(copy.deepcopy(reference), 4, plan=Manual(dp=4, zero=3), profile=MachineProfile(DEVICE, (LINK,) * 2))
    for own in (reference, model):
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        for _ in range(2):
            own(x).backward()
            for p in own.parameters():
                p.grad = p.grad.redistribute(placements=[Replicate()] * 2) if isinstance(p.grad, DTensor) else p.grad
            optimizer.step()
            optimizer.zero_grad()
            own(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = {type(state["step"]) for state in optimizer.state.values()}
        assert steps == {torch.Tensor}
    torch.testing.assert_close(whole(model), whole(reference), rtol=1e-5, atol=1e-6)


def step_without_dims(rank: int, name: str) -> None:
    """Three steps of a parameter of no dims, of which the last two go on from a state of one device."""
    torch.manual_seed(0)
    reference, x = Scaled(), torch.randn(4, 8)
    first = getattr(torch.optim, name)(reference.parameters(), **KINDS[name])
    reference(x).backward()
    first.step()
    first.zero_grad()
    plan, profile = Manual(dp=4, zero=3), MachineProfile(DEVICE, (LINK,) * 2)
    for hook in ("", "register_step_pre_hook"):
        by_one = copy.deepcopy(reference)
        model = autopar.parallelize(copy.deepcopy(reference), 4, plan=plan, profile=profile, example_batch=(x,))
        for own in (by_one, model):
            optimizer = getattr(torch.optim, name)(own.parameters(), **KINDS[name])
            optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
            if hook:
                getattr(optimizer, hook)(lambda *_: None)
            for _ in range(2):
                own(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(whole(model), whole(by_one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", only(["Rprop", "SGD", "NAdam"], [name for name in KINDS if name != "Muon"]))
def test_parameters_of_no_dims_go_on_from_one_device(ranks: RankPool, name: str) -> None:
    ranks.run(step_without_dims, name)


def test_odd_parameters_and_gradients(ranks: RankPool) -> None:
    ranks.run(step_oddly)


class Square(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(x).square().mean()
        return loss


def step_early(rank: int) -> str:
    """Optimizers that were made, or whose state was loaded, before there was a plan; the error where what they made has no values."""
    torch.manual_seed(0)
    square, scaled, x = Square(), Scaled(), torch.randn(4, 8)
    plan, profile = Manual(dp=4, zero=3), MachineProfile(DEVICE, (LINK,) * 2)
    first = torch.optim.Adagrad(copy.deepcopy(scaled).parameters(), initial_accumulator_value=0.5)
    cases: list[tuple[nn.Module, dict[str, Any], bool]] = [(scaled, {}, False), (square, {"fused": True}, False), (scaled, {}, True)]
    for start, settings, is_loaded in cases:
        reference = copy.deepcopy(start)
        model = autopar.parallelize(copy.deepcopy(start), 4, plan=plan, profile=profile)
        for own in (reference, model):
            optimizer = torch.optim.Adagrad(own.parameters(), lr=0.1, initial_accumulator_value=0.2, **settings)
            if is_loaded:
                optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
            for _ in range(2):
                own(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        held = [(p, x["sum"]) for p, x in optimizer.state.items()]
        assert all(isinstance(p, DTensor) and x.placements == p.placements for p, x in held)
        torch.testing.assert_close(whole(model), whole(reference), rtol=1e-5, atol=1e-6)
    model = autopar.parallelize(Square().to("meta"), 4, plan=plan, profile=profile)
    optimizer = torch.optim.Adagrad(model.parameters())
    model(x).backward()
    with pytest.raises(PlanError) as caught:
        optimizer.step()
    return str(caught.value)


def test_optimizers_from_before_the_plan(ranks: RankPool) -> None:
    for text in ranks.run(step_early):
        assert text.startswith("Adagrad was made while its parameter of shape (8, 8) was on meta, and its state 'sum' has no values")


def test_what_measures_updates_comes_before_all_others() -> None:
    called: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: called.append("after")),
        register_before_updates(lambda *_: called.append("before")),
    ]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert called == ["before", "after"]


def refuse(rank: int) -> list[str]:
    model = parallel(build().model)
    before, texts = whole(model), []
    loss = model(**batches(1)[0]).loss
    for early in (torch.optim.Adafactor(model.parameters()), torch.optim.Rprop(model.parameters())):  # there are no gradients yet
        with pytest.raises(PlanError, match="steps with whole parameters before a closure could give new gradients"):
            early.step(lambda: float(loss))
    loss.backward()
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam):
        optimizer: Any = kind(model.parameters())
        with pytest.raises(PlanError) as caught:
            optimizer.step(lambda: loss)
        texts.append(str(caught.value))
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
    alone = nn.Linear(2, 2)
    alone(torch.ones(1, 2)).sum().backward()
    torch.optim.LBFGS(alone.parameters()).step(lambda: 0.0)
    return texts


def test_those_that_cannot_say_so(ranks: RankPool) -> None:
    for adafactor, lbfgs, sparse in ranks.run(refuse):
        assert adafactor.startswith("Adafactor steps with whole parameters before a closure could give new gradients")
        assert lbfgs.startswith("LBFGS needs all gradients in one place, and a parameter of shape (64, 32) is a DTensor of (")
        assert sparse.startswith("SparseAdam needs sparse gradients, and plans give every parameter a dense one")


def step_too_early(rank: int) -> str:
    """An optimizer that was made of what `parallelize` replaced, as one would for DDP; of another it says nothing."""
    model, alone = build().model, nn.Linear(2, 2)
    early = torch.optim.AdamW([*alone.parameters(), *model.parameters()])
    kept = parallel(model)
    kept(**batches(1)[0]).loss.backward()
    torch.optim.AdamW([*alone.parameters(), *kept.parameters()]).step()
    with pytest.raises(PlanError) as caught:
        early.step()
    return str(caught.value)


def test_one_that_was_made_before_says_so(ranks: RankPool) -> None:
    for text in ranks.run(step_too_early):
        assert text.startswith("this AdamW was made before parallelize and holds parameters that it replaced, one of shape (64, 32)")


def resume(rank: int, folder: str) -> None:
    """Adafactor goes on from a checkpoint under another plan, and on one device."""
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: range) -> None:
        for i in count:
            model(**batches(4)[i]).loss.backward()
            optimizer.step()
            model.zero_grad()

    def made(plan: Manual | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build().model if plan is None else parallel(build().model, plan)
        return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)

    reference, optimizer = made(None)
    steps(reference, optimizer, range(4))
    first, optimizer = made(PLAN)
    steps(first, optimizer, range(2))
    autopar.save(folder, first, optimizer)
    for plan in (Manual(dp=4, zero=3), None):
        model, optimizer = made(plan)
        if plan is None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        autopar.load(folder, model, optimizer)
        steps(model, optimizer, range(2, 4))
        torch.testing.assert_close(whole(model), whole(reference), rtol=1e-6, atol=1e-6)


@exhaustive
def test_state_of_whole_parameters_moves(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(resume, str(tmp_path / "saved"))
