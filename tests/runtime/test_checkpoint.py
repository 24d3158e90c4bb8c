"""Training goes on from a checkpoint as if it had never stopped, whatever the plan before and after."""

from __future__ import annotations

import copy
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import CheckpointError, PlanError
from autopar.runtime import checkpoint
from autopar.runtime.parameters import whole_of
from autopar.runtime.ranks import Ranks
from autopar.runtime.versions import publish
from tests import models
from tests.marks import exhaustive, few
from tests.pool import RankPool, clean_context
from tests.runtime.test_train import DEVICE, EPS, LINK, assert_equal, batches, step, whole

pytestmark = pytest.mark.slow

STAGES = Manual(pp=2, tp=2, microbatches=2)
SHARDED = Manual(dp=4, zero=3)
Made = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def build(dropout: float = 0.0) -> nn.Module:
    """Tied, with a fused weight."""
    return models.speaker(dropout=dropout).model.double()


def profile_for(plan: Manual) -> MachineProfile:
    return MachineProfile(DEVICE, (LINK,) * len(plan.grid(dist.get_world_size()).sizes))


def make(plan: Manual | None, dropout: float = 0.0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Made:
    """A model under a plan or on one device, with two groups of parameters and a learning rate that changes."""
    model = build(dropout)
    if plan is not None:
        model = autopar.parallelize(model, dist.get_world_size(), plan=plan, profile=profile_for(plan), example_batch=batches(1)[0])
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() != 2]}]
    settings = {"lr": 1e-2} | ({"eps": EPS} if kind is torch.optim.AdamW else {})
    optimizer = kind(groups, **settings)  # type: ignore[arg-type]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def train(made: Made, numbers: Sequence[int]) -> list[list[float]]:
    """Losses and norms of some of the batches."""
    model, optimizer, scheduler = made
    found = []
    for number in numbers:
        found.append(step(model, optimizer, batches(number + 1)[number]))
        scheduler.step()
    return found


def save_and_go_on(rank: int, folder: str, plan: Manual, dropout: float) -> list[list[float]]:
    """Two steps, a checkpoint, and two more."""
    made = make(plan, dropout)
    train(made, [0, 1])
    autopar.save(folder, made[0], made[1], extra={"scheduler": made[2], "step": 2})
    torch.rand(3)
    return train(made, [2, 3])


def resume(rank: int, folder: str, plan: Manual, dropout: float) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    made = make(plan, dropout)
    with torch.no_grad():
        for parameter in made[0].parameters():
            parameter.zero_()
    extra = autopar.load(folder, made[0], made[1], extra={"scheduler": made[2]})
    assert extra["step"] == 2
    return train(made, [2, 3]), whole(made[0]) if plan.pp == 1 else {}


MOVES = [(STAGES, SHARDED), (SHARDED, STAGES), (STAGES, Manual(tp=4)), (Manual(dp=2, tp=2, zero=1), STAGES)]


@pytest.mark.parametrize("before, after", few(1, MOVES), ids=str)
def test_training_goes_on_under_another_plan(ranks: RankPool, tmp_path: Path, before: Manual, after: Manual) -> None:
    """With dropout, whose masks do not depend on the plan."""
    expected = ranks.run(save_and_go_on, str(tmp_path), before, 0.1)
    found = ranks.run(resume, str(tmp_path), after, 0.1)
    for losses, _ in found:
        assert_equal(losses, expected[0])


@exhaustive
def test_training_goes_on_on_one_device_and_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save_and_go_on, str(tmp_path), STAGES, 0.0)
    model, optimizer, scheduler = made = make(None)
    autopar.load(tmp_path, model, optimizer, extra={"scheduler": scheduler})
    losses = train(made, [2, 3])
    assert_equal(losses, expected[0])
    two = RankPool(2)
    try:
        for found, parameters in two.run(resume, str(tmp_path), Manual(dp=2, zero=2), 0.0):
            assert_equal(found, losses)
            assert_equal(parameters, whole(model))
    finally:
        two.close()


def test_from_one_device_to_many(ranks: RankPool, tmp_path: Path) -> None:
    made = make(None)
    train(made, [0, 1])
    autopar.save(tmp_path, made[0], made[1], extra={"scheduler": made[2], "step": 2})
    expected = train(made, [2, 3])
    for losses, parameters in ranks.run(resume, str(tmp_path), Manual(dp=2, tp=2, zero=3), 0.0):
        assert_equal(losses, expected)
        assert_equal(parameters, whole(made[0]))


def train_in_float16(rank: int, folder: str) -> tuple[list[float], list[float], bool]:
    """Scales after steps whose gradients overflow under the scale that runs begin with; those of a run that goes on, and of one that is
    loaded, and whether both end with the same parameters."""
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator))

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = autopar.parallelize(
            nn.Linear(16, 16),
            plan=Manual(dp=4, microbatches=2),
            loss_fn=lambda found, wanted: nn.functional.mse_loss(found, wanted) * 3000,
            example_batch=batch,
            precision="fp16",
        )
        return model, torch.optim.SGD(model.parameters(), 1e-5), torch.amp.GradScaler("cpu")

    def scales(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            scaler.scale(model(*batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
        return found

    model, optimizer, scaler = begun()
    with warnings.catch_warnings(action="ignore"):  # of overflows
        assert scales(model, optimizer, scaler, 12)[0] < 2.0**16
    autopar.save(folder, model, optimizer, extra={"scaler": scaler})
    other = begun()
    autopar.load(folder, *other[:2], extra={"scaler": other[2]})
    on, again = scales(model, optimizer, scaler, 2), scales(*other, 2)
    same = all(torch.equal(a, b) for a, b in zip(whole(model).values(), whole(other[0]).values(), strict=True))
    return on, again, same


def test_gradients_overflow_after_loading_no_more_than_before(ranks: RankPool, tmp_path: Path) -> None:
    """The scale under which backwards of micro-batches run before the loss's own comes in is saved."""
    for on, again, same in ranks.run(train_in_float16, str(tmp_path)):
        assert on == again
        assert same


def save_beside_training(rank: int, folder: str) -> tuple[list[list[float]], bool]:
    made = make(SHARDED)
    train(made, [0, 1])
    saving = autopar.save(folder, made[0], made[1], extra={"scheduler": made[2], "step": 2}, background=True)
    losses = train(made, [2, 3])
    saving.wait()
    return losses, saving.is_done


def test_what_is_saved_in_the_background_is_what_there_was(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(save_beside_training, str(tmp_path))
    assert all(is_done for _, is_done in expected)
    model, optimizer, scheduler = made = make(None)
    autopar.load(tmp_path, model, optimizer, extra={"scheduler": scheduler})
    assert_equal(train(made, [2, 3]), expected[0][0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_other_optimizers(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    made, again = make(None, kind=kind), make(None, kind=kind)
    train(made, [0, 1])
    autopar.save(tmp_path, made[0], made[1], extra={"scheduler": made[2]})
    before = copy.deepcopy(whole(made[0]))
    autopar.load(tmp_path, again[0], again[1], extra={"scheduler": again[2]})
    torch.testing.assert_close(whole(again[0]), before, rtol=0, atol=0)
    assert train(again, [2, 3]) == train(made, [2, 3])


def muon_and_adamw(plan: Manual | None) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Muon takes matrices alone."""
    model = build() if plan is None else make(plan)[0]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, eps=EPS)]


def train_by_each(model: nn.Module, optimizers: list[torch.optim.Optimizer], numbers: Sequence[int]) -> list[float]:
    losses = []
    for number in numbers:
        loss = model(**batches(4)[number]).loss
        loss.backward()
        losses.append(float(loss))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def two_optimizers(rank: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of steps 2 and 3, unbroken on stages, then sharded and on one device from a checkpoint of stages."""
    model, optimizers = muon_and_adamw(STAGES)
    train_by_each(model, optimizers, [0, 1])
    autopar.save(folder, model, optimizers)
    unbroken = train_by_each(model, optimizers, [2, 3])
    found = []
    for plan in (SHARDED, None):
        model, optimizers = muon_and_adamw(plan)
        with pytest.raises(CheckpointError, match="is Muon, AdamW, this is AdamW, Muon"):
            autopar.load(folder, model, optimizers[::-1])
        autopar.load(folder, model, optimizers)
        for optimizer, key in zip(optimizers, ("momentum_buffer", "exp_avg_sq"), strict=True):
            assert all(whole_of(x).any() if isinstance(x := state[key], DTensor) else x.any() for state in optimizer.state.values())
            assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])
        found.append(train_by_each(model, optimizers, [2, 3]))
    return unbroken, found[0], found[1]


def test_several_optimizers_move_together(ranks: RankPool, tmp_path: Path) -> None:
    """The iteration of Muon is in bfloat16."""
    for unbroken, *others in ranks.run(two_optimizers, str(tmp_path)):
        for losses in others:
            assert losses[0] == pytest.approx(unbroken[0], rel=1e-6)
            assert losses[1] == pytest.approx(unbroken[1], rel=1e-4)


def test_a_parameter_has_one_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    both = [torch.optim.SGD(model.parameters()), torch.optim.SGD([model.bias])]
    with pytest.raises(CheckpointError, match="optimizers 0 and 1 both have bias"):
        autopar.save(tmp_path, model, both)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """Dropout of one device, and the order of a shuffled sampler."""
    made = make(None, dropout=0.1)
    train(made, [0])
    autopar.save(tmp_path, made[0], made[1])
    expected = train(made, [1, 2]), torch.randperm(10).tolist()
    autopar.load(tmp_path, made[0], made[1])
    assert (train(made, [1, 2]), torch.randperm(10).tolist()) == expected
    torch.manual_seed(3)
    kept = torch.get_rng_state()
    autopar.load(tmp_path, made[0], made[1], random=False)
    assert torch.equal(torch.get_rng_state(), kept)


def test_parameters_without_state_stay_without(tmp_path: Path) -> None:
    """Frozen ones, and those that no loss has reached yet; gradients that wait for a step stay too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    autopar.save(tmp_path, model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    autopar.load(tmp_path, model, optimizer)
    assert not optimizer.state
    assert model[1].weight.grad is not None
    optimizer.step()
    autopar.save(tmp_path, model, optimizer)
    autopar.load(tmp_path, model, optimizer)
    assert len(optimizer.state) == 2


def fails(message: str, act: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=message):
        act()


def test_what_is_no_optimizer_and_no_extra_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for call in (autopar.save, autopar.load):
        with pytest.raises(CheckpointError, match=r"optimizer is one of torch\.optim or several, got 'adam'"):
            call(tmp_path, model, "adam")  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"extra has values by name, as {'scheduler': scheduler}, got \[1\]"):
            call(tmp_path, model, extra=[1])  # type: ignore[arg-type]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    fails(r"no checkpoint in .* \(No such file or directory: latest\); autopar.save writes one", lambda: autopar.load(tmp_path, model))
    optimizer = torch.optim.AdamW(model.parameters())
    autopar.save(tmp_path, model, extra={"step": 1})
    fails("the checkpoint has no optimizer", lambda: autopar.load(tmp_path, model, optimizer))
    fails("keeps nothing extra called loader; it has step", lambda: autopar.load(tmp_path, model, extra={"loader": model}))
    fails(r"model.weight is \(4, 4\) in the checkpoint and \(5, 4\) here", lambda: autopar.load(tmp_path, nn.Linear(4, 5)))
    fails("the checkpoint lacks 0.bias, 0.weight", lambda: autopar.load(tmp_path, nn.Sequential(model)))
    fails("the checkpoint has what the model lacks, bias", lambda: autopar.load(tmp_path, nn.Linear(4, 4, bias=False)))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    autopar.save(tmp_path, model, optimizer)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    fails("the optimizer of the checkpoint is AdamW, this is SGD", lambda: autopar.load(tmp_path, model, other))
    more = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(3))])
    fails(r"the optimizer has a parameter of shape \(3,\) that is not the model's", lambda: autopar.load(tmp_path, model, more))
    fails(r"the optimizer has a parameter of shape \(3,\) that is not the model's", lambda: autopar.save(tmp_path, model, more))
    grouped = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    fails("the optimizer has 2 groups of parameters, that of the checkpoint 1", lambda: autopar.load(tmp_path, model, grouped))


def test_settings_come_before_what_depends_on_them(tmp_path: Path) -> None:
    """An optimizer made without momentum gets that of the checkpoint, with its buffers."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    autopar.save(tmp_path, model, optimizer)
    again = torch.optim.SGD(model.parameters(), 0.5)
    autopar.load(tmp_path, model, again)
    assert again.param_groups[0]["momentum"] == 0.9
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


class Remembers(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)


def test_state_that_only_the_module_can_set_is_refused(tmp_path: Path) -> None:
    fails("_extra_state of the model is a Tensor, which is not kept", lambda: autopar.save(tmp_path, Remembers(2, 2)))


def test_nothing_else_in_the_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / "data-imagenet").mkdir()
    (tmp_path / "data-20261122.csv").touch()
    model = nn.Linear(2, 2)
    for _ in range(3):
        autopar.save(tmp_path, model)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert {"data-imagenet", "data-20261122.csv", "latest"} < {*names}


class Silent:
    def state_dict(self) -> object:
        raise KeyError("step")


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_says_so_and_leaves_the_one_before(tmp_path: Path, background: bool) -> None:
    model, good, file = nn.Linear(2, 2), tmp_path / "good", tmp_path / "file"

    def save(folder: Path, **extra: object) -> None:
        autopar.save(folder, model, extra=extra, background=background).wait()

    save(good, step=1)
    file.touch()
    fails("could not be written: rank 0: (FileExistsError|NotADirectoryError)", lambda: save(file))
    fails("could not be written: .* pickle", lambda: save(good, loss=lambda: 0))
    fails("KeyError: 'step'", lambda: save(good, scheduler=Silent()))
    if background:
        autopar.save(file, model, background=True)
        fails("could not be written", lambda: save(good, step=2))  # nobody has waited for it
    assert autopar.load(good, model) == {"step": 1}


def test_what_counts_stays_where_a_rank_is_lost_just_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails for the ranks that are left, and its files are those that `latest` names."""
    model, gather = nn.Linear(2, 2), Ranks.gather
    autopar.save(tmp_path, model, extra={"step": 1})
    published: list[Path] = []

    def publish_and_note(version: Path, files: Sequence[str]) -> None:
        publish(version, files)
        published.append(version)

    def gather_or_fail(self: Ranks, value: object) -> list[object]:
        if published:
            raise RuntimeError("rank 1 is gone")
        return gather(self, value)

    monkeypatch.setattr("autopar.runtime.checkpoint.publish", publish_and_note)
    monkeypatch.setattr(Ranks, "gather", gather_or_fail)
    fails("could not be written: rank 1 is gone", lambda: autopar.save(tmp_path, model, extra={"step": 2}))
    monkeypatch.undo()
    assert autopar.load(tmp_path, model) == {"step": 2}


def test_tied_parameters(tmp_path: Path) -> None:
    """Saved once under the first name; a model that has no longer tied them would get one of them only."""
    tied = build()
    autopar.save(tmp_path, tied)
    untied = build()
    untied.get_submodule("head").weight = nn.Parameter(untied.get_parameter("embed.weight").detach().clone())
    both = "head.weight and embed.weight"
    fails(f"{both} are one parameter in the checkpoint and two here", lambda: autopar.load(tmp_path, untied))
    again = build()
    nn.init.zeros_(again.head.weight)  # type: ignore[union-attr, arg-type]
    autopar.load(tmp_path, again)
    torch.testing.assert_close(whole(again), whole(tied), rtol=0, atol=0)


def without_plan(rank: int, folder: str) -> str:
    model = autopar.parallelize(build(), 4, plan=SHARDED, profile=profile_for(SHARDED))
    with pytest.raises(PlanError, match="there is no plan yet"):
        autopar.save(folder, model)
    with pytest.raises(CheckpointError, match="the model is not parallel"):
        autopar.save(folder, build())
    made = make(SHARDED)
    if rank == 2:
        made[1].state[next(iter(made[0].parameters()))] = {"mine": torch.zeros(3)}
    with pytest.raises(CheckpointError) as caught:
        autopar.save(folder, made[0], made[1])
    made[1].state.clear()
    made[1].param_groups[1]["lr"] = 0.5 if rank == 3 else 0.1
    with pytest.raises(CheckpointError, match="group 1 of the optimizer has another lr on rank 3 than on rank 0; make them alike"):
        autopar.save(folder, made[0], made[1])
    return str(caught.value)


def test_a_problem_of_one_rank_is_one_of_all(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(without_plan, str(tmp_path)):
        assert text.startswith("rank 2: optimizer state 'mine' of embed.weight is a plain tensor of shape (3,)")
    assert not list(tmp_path.iterdir())


def test_files_that_others_wrote_elsewhere(tmp_path: Path) -> None:
    version = tmp_path / "data-1"
    version.mkdir()
    with pytest.raises(CheckpointError, match=r"lacks __1_0.distcp, which other ranks wrote on other disks"):
        publish(version, ["__1_0.distcp"])
    assert not (tmp_path / "latest").exists()


class Number(nn.Module):
    """Parameters that all say at which save they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()

    def set(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(number)


def save_for_ever(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model, plan = Number(), Manual(dp=2, zero=3)
    parallel = autopar.parallelize(model, 2, plan=plan, profile=profile_for(plan), example_batch=(torch.ones(4, 64),))
    for number in range(1, 10**9):
        model.set(number)
        autopar.save(folder, parallel, extra={"number": number})




@pytest.mark.parametrize("seed", few(3, range(20)))
def test_a_rank_that_is_killed_leaves_the_last_good_checkpoint(tmp_path: Path, seed: int) -> None:
    context = clean_context()
    folders = str(tmp_path / "store"), str(tmp_path / "saved")
    workers = [context.Process(target=save_for_ever, args=(rank, *folders), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "saved" / "latest").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        victim = workers[seed % 2]
        assert victim.pid is not None
        victim.kill()
        workers[1 - seed % 2].join(60)
        assert victim.exitcode in (None, -signal.SIGKILL)
        assert workers[1 - seed % 2].exitcode == 1  # with an error, and not hanging
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    model = Number()
    number = autopar.load(tmp_path / "saved", model)["number"]
    assert number >= 1
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, number))


def test_what_a_group_that_is_gone_leaves_is_told() -> None:
    """As where a script destroys it while a save is under way."""
    gone, alone = Ranks(cast(dist.ProcessGroup, object())), Ranks(None)
    error = ValueError("Group <object> is not registered, please create group with torch.distributed.new_group API")
    told = str(checkpoint._failed(Path("run/data-1"), error, gone))
    assert told.startswith("run/data-1 could not be written: the process group was destroyed before it was; call wait()")
    assert str(checkpoint._failed(Path("run/data-1"), error, alone)) == f"ValueError: {error}"
    known = CheckpointError("the disk is full")
    assert checkpoint._failed(Path("run/data-1"), known, alone) is known
