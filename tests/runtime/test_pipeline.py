"""Stages on real processes: the loop of one device gives the losses and parameters of one device, and each rank keeps its own stages."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import InputError, MicrobatchError, PlanError, RankError
from autopar.runtime import groups, place, transfer
from autopar.runtime.module import Engine
from autopar.runtime.pipeline import PipelineProgram
from autopar.step import StageRun
from tests import models
from tests.marks import exhaustive, few, only
from tests.pool import RankPool

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile(
    "test",
    2**33,
    tuple(MatmulSample(64, 64, 64, dtype, 1e9) for dtype in ("float32", "float64", "bfloat16")),
    1e9,
    1e-6,
    "for tests",
)
EPS = 1e-4
"""Of AdamW: its default would blow the rounding of a loss in float32 up where a gradient is almost zero."""

Batch = dict[str, torch.Tensor]


def build(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    """With one weight for its embedding and its head, in double precision."""
    return models.speaker(layers=layers, dropout=dropout).model.double()


def batches(count: int, size: int = 8) -> list[Batch]:
    """Different numbers of labels in every row."""
    made = []
    for seed in range(count):
        example = models.speaker(batch=size, seed=seed)
        made.append(models.ragged(example).batch)
    return made


def parallel(model: nn.Module, plan: Manual, **settings: Any) -> nn.Module:
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(plan.grid(4).sizes)
    made: nn.Module = autopar.parallelize(model, 4, plan=plan, profile=MachineProfile(DEVICE, links), **settings)
    return made


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def assert_equal(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    """Every parameter that this rank has."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert_equal(parameter.full_tensor(), reference.get_parameter(name).detach())


def assert_same_grads(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = grads(model), grads(reference)
    assert list(ours) == [name for name, _ in model.named_parameters()]
    assert_equal(ours, {name: theirs[name] for name in ours})


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> list[float]:
    """Loss and norm of the gradients."""
    loss = model(**batch).loss
    loss.backward()
    clip = getattr(model, "clip_grad_norm_", None)
    norm = clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return [float(loss), float(norm)]


def train(rank: int, plan: Manual) -> tuple[list[list[float]], list[str], int]:
    """Three steps against one device. Losses and norms, names and bytes of what this rank has."""
    reference = build()
    model = copy.deepcopy(reference)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), 1e-2, eps=EPS)
    expected = [step(reference, expected_optimizer, batch) for batch in batches(3)]
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    made = parallel(model, plan)
    optimizer = torch.optim.AdamW(made.parameters(), 1e-2, eps=EPS)  # before there is a plan
    found = [step(made, optimizer, batch) for batch in batches(3)]
    assert_equal(found, expected)
    assert_same_parameters(made, reference)
    held = dict(made.named_parameters())
    assert {id(p) for p in held.values()} <= {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in {id(p) for p in held.values()}]
    assert sum(p.to_local().numel() for p in others) == 0
    assert set(map(id, optimizer.state)) == {id(p) for p in held.values()}
    assert all(storage.expired() for storage in storages), "a rank still has the whole model"
    return found, list(held), sum(p.to_local().nbytes for p in held.values() if isinstance(p, DTensor))


PLANS = {
    "pp2_tp2": Manual(pp=2, tp=2, microbatches=4),
    "pp4_zb": Manual(pp=4, schedule="zb-h1", microbatches=8),
    "pp2_zero1": Manual(pp=2, dp=2, zero=1, microbatches=4),
    "interleaved": Manual(pp=2, dp=2, zero=2, schedule="interleaved:2", microbatches=4),
    "pp2_zero3": Manual(pp=2, dp=2, zero=3, schedule="gpipe", microbatches=2),
    "one_micro_batch": Manual(pp=4, microbatches=1),
    "no_stages": Manual(dp=4, zero=1, microbatches=2),
}


@pytest.mark.parametrize("plan", only(["pp4_zb", "interleaved"], sorted(PLANS.keys() - {"pp2_zero1"})))  # evaluation trains with it
def test_training_is_that_of_one_device(ranks: RankPool, plan: str) -> None:
    config = PLANS[plan]
    losses, names, sizes = zip(*ranks.run(train, config), strict=True)
    assert all(found == losses[0] for found in losses)
    model = build()
    whole = sum(p.nbytes for p in model.parameters())
    assert {name for own in names for name in own} == {name for name, _ in model.named_parameters()}
    tied = "embed.weight"
    if config.pp > 1:
        inside = config.dp * config.tp
        stages = [set(names[i * inside]) for i in range(config.pp)]
        assert [set(own) for own in names] == [stages[rank // inside] for rank in range(4)]
        assert [tied in stage for stage in stages] == [True, *[False] * (config.pp - 2), True]
        assert sum(map(len, stages)) == len(list(model.parameters())) + 1  # nothing but the tied weight is on two stages
    assert max(sizes) < 0.6 * whole


def accumulate_and_scale(rank: int) -> None:
    reference = build()
    first, second = batches(2)
    model = parallel(copy.deepcopy(reference), PLANS["pp2_tp2"])
    for own in (reference, model):
        (own(**first).loss * 8).backward()
    assert_same_grads(model, reference)
    for own in (reference, model):
        own(**second).loss.backward()  # on top of the first
    assert_same_grads(model, reference)
    for own in (reference, model):
        own.zero_grad()
        (own(**first).loss / 2 + own(**second).loss).backward()  # two forwards before one backward
    assert_same_grads(model, reference)
    for own in (reference, model):
        own.zero_grad()
        own(**first)  # its backward is never called
        own(**second).loss.backward()
    assert_same_grads(model, reference)


@exhaustive
def test_gradients_accumulate_and_scale(ranks: RankPool) -> None:
    ranks.run(accumulate_and_scale)


def failure(kind: type[BaseException], call: Any, *args: object, **kwargs: object) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    return str(error.value)


def misuse(rank: int) -> list[str]:
    model = parallel(build(), PLANS["pp4_zb"])
    (batch,) = batches(1)
    outputs = model(**batch)
    texts = [failure(InputError, outputs.logits.sum().backward)]
    outputs.loss.backward()
    first = grads(model)
    texts.append(failure(RuntimeError, outputs.loss.backward))
    assert all(torch.equal(grad, first[name]) for name, grad in grads(model).items())
    return texts


def test_misuse_is_explained(ranks: RankPool) -> None:
    for logits, twice in ranks.run(misuse):
        assert "a gradient came in for output" in logits
        assert "loss_fn" in logits
        assert "second time" in twice


def evaluate(rank: int) -> None:
    """Between steps, with a smaller batch, and without labels; without gradients there are forwards only."""
    reference = build(layers=1)
    model = parallel(copy.deepcopy(reference), PLANS["pp2_zero1"])
    optimizers = [torch.optim.AdamW(own.parameters(), 1e-2, eps=EPS) for own in (model, reference)]
    for size in (8, 8, 4):
        (batch,) = batches(1, size=size)
        if size == 8:
            found, expected = (step(own, optimizer, batch) for own, optimizer in zip((model, reference), optimizers, strict=True))
            assert_equal(found, expected)
            assert_same_parameters(model, reference)
        with torch.no_grad():
            ours, theirs = model.eval()(**batch), reference.eval()(**batch)
        assert type(ours) is type(theirs)
        assert not ours.loss.requires_grad
        assert_equal([ours.loss, ours.logits], [theirs.loss, theirs.logits])
        for own in (model, reference):
            own.train()
    with torch.no_grad():
        assert_equal(model.eval()(input_ids=batch["input_ids"]).logits, theirs.logits)
    kinds = cast(Engine, model._autopar).programs
    programs = [(gradients, built.program) for (_, _, gradients, *_), variants in kinds.items() for _, built in variants]
    assert {(gradients, cast(PipelineProgram, own).schedule.has_backward) for gradients, own in programs} == {(True, True), (False, False)}


def test_evaluation_runs_forwards_only(ranks: RankPool) -> None:
    ranks.run(evaluate)


def losses_with_dropout(rank: int, plan: Manual) -> list[float]:
    model = parallel(build(dropout=0.3, layers=1), plan)
    return [float(model(**batch).loss) for batch in batches(2)]


@exhaustive
def test_masks_are_those_of_other_plans(ranks: RankPool) -> None:
    plans = (Manual(dp=4), PLANS["pp2_tp2"])
    found = [losses for plan in plans for losses in ranks.run(losses_with_dropout, plan)]
    torch.testing.assert_close(found, [found[0]] * len(found), rtol=1e-6, atol=0)
    assert abs(found[0][0] - found[0][1]) > 1e-4


class Sums(nn.Module):
    """As many losses as are asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.last, self.count = nn.Linear(8, 16), nn.Linear(16, 8), count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.last(torch.tanh(self.first(x)))
        return (y, *(y.square().mean() * k for k in range(1, self.count + 1)))


def lose(rank: int, count: int) -> str:
    torch.manual_seed(0)
    return failure(PlanError, parallel(Sums(count), Manual(pp=2, dp=2)), torch.randn(8, 8))


@pytest.mark.parametrize("count, found", [(2, "found [1], [2]"), (0, "found none")])
def test_one_scalar_loss_is_needed(ranks: RankPool, count: int, found: str) -> None:
    for text in ranks.run(lose, count, timeout=60):
        assert text.startswith("stages and micro-batches need a model that gives one scalar loss")
        assert found in text
        assert "Give autopar.parallelize a loss_fn" in text


def split_unevenly(rank: int) -> str:
    return failure(MicrobatchError, parallel(Sums(1), Manual(pp=2, dp=2, microbatches=3)), torch.randn(8, 8))


def test_a_batch_that_cannot_be_split_is_an_error_on_every_rank(ranks: RankPool) -> None:
    for text in ranks.run(split_unevenly, timeout=60):
        assert text.startswith("3 micro-batches do not divide the batch of 8 (dim 0 of input x)")


def squared(outputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels)


def train_with_loss_function(rank: int) -> None:
    torch.manual_seed(0)
    reference = Sums(0)
    x, labels = torch.randn(8, 8), torch.randn(8, 8)
    model = parallel(copy.deepcopy(reference), Manual(pp=2, dp=2, microbatches=4), loss_fn=squared)
    squared(reference(x), labels).backward()
    model(x, labels).backward()
    assert_same_grads(model, reference)


def test_a_loss_function(ranks: RankPool) -> None:
    ranks.run(train_with_loss_function)


def train_frozen(rank: int) -> list[str]:
    """One block and the last norm do not train."""
    reference = build()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("blocks.0." not in name and not name.startswith("norm"))
    model = parallel(copy.deepcopy(reference), PLANS["pp2_zero1"])
    (batch,) = batches(1)
    for own in (reference, model):
        own(**batch).loss.backward()
    assert list(grads(model)) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert_equal(grads(model), {name: grad for name, grad in grads(reference).items() if name in grads(model)})
    return [name for name, p in model.named_parameters() if not p.requires_grad]


@exhaustive
def test_frozen_parameters_stay_frozen(ranks: RankPool) -> None:
    assert {name for names in ranks.run(train_frozen) for name in names if "blocks.0." in name or name.startswith("norm")}


class Unused(Sums):
    """A layer that no op reads."""

    def __init__(self) -> None:
        super().__init__(1)
        self.unused = nn.Linear(8, 8)


def train_with_unused(rank: int) -> list[str]:
    torch.manual_seed(0)
    reference = Unused()
    x = torch.randn(8, 8)
    model = parallel(copy.deepcopy(reference), Manual(pp=2, dp=2, zero=1, microbatches=2))
    for own in (reference, model):
        own(x)[1].backward()
    found = {name: p.grad is not None for name, p in model.named_parameters()}
    assert found == {name: "unused" not in name for name in found}
    assert_equal(grads(model), {name: grad for name, grad in grads(reference).items() if name in found})
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return list(found)


class Teacher(nn.Module):
    """Gives scores, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.inner(x).tanh()))


def run_frozen(rank: int) -> bool:
    torch.manual_seed(0)
    model, x = Teacher().requires_grad_(False), torch.randn(8, 8)
    scores = parallel(copy.deepcopy(model), Manual(dp=4, microbatches=2))(x)
    torch.testing.assert_close(scores, model(x))
    return bool(scores.requires_grad)


def test_a_model_that_is_frozen_whole_runs_forward_in_micro_batches(ranks: RankPool) -> None:
    """It needs no loss, though it is in training mode."""
    assert not any(ranks.run(run_frozen))


class Tied(nn.Module):
    """Whose last stage has nothing of its own: its head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.inner(self.embed(tokens)).tanh()), tokens)


def clip_tied(rank: int, dtype: torch.dtype, norm_type: float) -> tuple[float, torch.dtype, int]:
    """Norm, and how many parameters this rank has."""
    torch.manual_seed(0)
    model, tokens = Tied().to(dtype), torch.arange(8) % 5
    made = parallel(copy.deepcopy(model), Manual(pp=2, dp=2, microbatches=2, stages=("head",)))
    made(tokens).backward()
    norm = made.clip_grad_norm_(0.1, norm_type)  # type: ignore[operator]
    model.double()(tokens).backward()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    found, expected = grads(made), grads(model)
    pairs = [(norm, whole), *((found[name], expected[name]) for name in found)]
    rtol, atol = (2e-2, 1e-3) if dtype == torch.bfloat16 else (1e-12, 1e-14)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)
    return float(norm), norm.dtype, len(found)


@pytest.mark.parametrize("dtype, norm_type", few(2, [(torch.bfloat16, 2.0), (torch.float64, float("inf")), (torch.float64, 2.0)]), ids=str)
def test_a_stage_without_gradients_of_its_own_clips_as_others(ranks: RankPool, dtype: torch.dtype, norm_type: float) -> None:
    """Copies of a tied weight on two ranks would part if these had the norm in two dtypes."""
    norms, dtypes, counts = zip(*ranks.run(clip_tied, dtype, norm_type), strict=True)
    assert len(set(norms)) == 1
    assert set(dtypes) == {torch.promote_types(dtype, torch.float32)}
    assert sorted(counts) == [1, 1, 3, 3]


def clip_infinite(rank: int, plan: Manual) -> tuple[list[str], str]:
    """Errors of all ways to clip gradients of which one is not finite, on one stage alone; and of a norm that does not add up."""
    torch.manual_seed(0)
    model = parallel(Sums(1), plan)
    model(torch.randn(8, 8))[1].backward()
    for name, parameter in model.named_parameters():
        if name == "last.bias":
            cast(DTensor, parameter.grad).to_local().fill_(float("nan"))
    clip = cast(Any, model).clip_grad_norm_
    before = copy.deepcopy(grads(model))
    texts = []
    for norm_type in (2.0, float("inf")):
        for call in (clip, lambda *args: nn.utils.clip_grad_norm_(model.parameters(), *args)):
            texts.append(failure(RuntimeError, call, 0.1, norm_type, True))
    torch.testing.assert_close(grads(model), before, equal_nan=True)
    assert clip(0.1, norm_type, foreach=True).isnan()
    text = failure(PlanError, lambda norm_type: clip(0.1, norm_type), 0) if plan.pp > 1 else ""
    return texts, text


@pytest.mark.parametrize("plan", [Manual(pp=2, dp=2, microbatches=2), Manual(dp=4, zero=3)], ids=str)
def test_norms_that_are_not_finite_are_refused_as_by_torch(ranks: RankPool, plan: Manual) -> None:
    for texts, zero in ranks.run(clip_infinite, plan):
        orders = [text.partition(" for gradients")[0].removeprefix("The total norm of order ") for text in texts]
        assert orders == ["2.0", "2.0", "inf", "inf"]
        assert not zero or zero.startswith("norm_type=0: with pipeline stages")


def test_a_parameter_that_nobody_reads_is_on_one_stage(ranks: RankPool) -> None:
    names = ranks.run(train_with_unused)
    assert ["unused.weight" in own for own in names] == [True, True, False, False]


def fail_in_a_stage(rank: int, plan: Manual) -> tuple[str, str, list[str]]:
    torch.manual_seed(0)
    model, x = parallel(Sums(1), plan), torch.randn(8, 8)
    model(x)
    gather = StageRun.gather

    def broken(self: StageRun[torch.Tensor]) -> None:
        raise RuntimeError("the kernel failed")

    StageRun.gather = broken  # type: ignore[method-assign, assignment]
    try:
        model(x)
    except RuntimeError as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    except RankError as error:
        return type(error).__name__, str(error), []
    finally:
        StageRun.gather = gather  # type: ignore[method-assign]
    return "", "", []


def test_a_failure_of_its_own_is_not_blamed_on_others(ranks: RankPool) -> None:
    """A stage on one rank waits for nobody inside of it; on two ranks it may be either."""
    for rank, (kind, text, _) in enumerate(ranks.run(fail_in_a_stage, Manual(pp=2, dp=2, microbatches=2))):
        stage, where = rank // 2, [rank // 2 * 2, rank // 2 * 2 + 1]
        assert kind == "RankError"
        assert text.startswith(f"rank {rank}, action {stage}GATHER of the schedule (stage {stage}, on ranks {where}): one of them did not")
    for rank, (kind, text, notes) in enumerate(ranks.run(fail_in_a_stage, Manual(pp=4, microbatches=2))):
        assert (kind, text) == ("RuntimeError", "the kernel failed")
        assert notes == [f"rank {rank}, action {rank}GATHER of the schedule (stage {rank}, on ranks [{rank}])"]


class Once:
    """What may be waited for several times; gloo waits for as many messages."""

    def __init__(self, work: dist.Work) -> None:
        self.wait = cache(work.wait)
        self.is_completed = work.is_completed


def step_as_on_nccl(rank: int, plan: Manual) -> tuple[list[int], list[list[int]]]:
    """A step where the first message of a group waits for what this rank has asked for and for its peer, as communicators of NCCL do that
    are made then. How many messages each group had before the step, and what other groups were connected."""
    real, messages, asked, connected = dist.batch_isend_irecv, Counter[dist.ProcessGroup](), list[Once](), list[list[int]]()

    def exchange(ops: list[dist.P2POp]) -> list[Once]:
        group = ops[0].group
        assert group is not None
        if not messages[group]:
            for work in asked:
                work.wait()
            dist.barrier(group)
        messages[group] += 1
        works = [Once(work) for work in real(ops)]
        asked.extend(works if ops[0].op is dist.irecv else [])
        return works

    def connect(group: dist.ProcessGroup, device: torch.device) -> None:
        groups.connect(group, device)
        connected.append(dist.get_process_group_ranks(group))

    (batch,) = batches(1)
    with (
        patch.object(dist, "batch_isend_irecv", exchange),
        patch.object(transfer, "connect", connect),
        patch.object(place, "connect", connect),
        patch.dict(transfer._pairs, clear=True),
        patch.dict(transfer._circles, clear=True),
    ):
        model = parallel(build(), plan, example_batch=batch)
        before = list(messages.values())
        model(**batch).loss.backward()
    return before, connected


def test_pipelines_do_not_wait_for_communicators(ranks: RankPool) -> None:
    """Of pairs in both directions, of the pipeline, of the axes of its stages, and of the weight that the first and last stage share."""
    plan = Manual(pp=2, tp=2, microbatches=4)
    lines, axes = [[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = ranks.run(step_as_on_nccl, plan)
    assert [before for before, _ in found] == [[1, 1]] * 4
    assert [[ranks for ranks in connected if len(ranks) > 1] for _, connected in found] == [
        [line, axis, line] for line, axis in zip(lines, axes, strict=True)
    ]


class Copies(TorchFunctionMode):
    """Notes what makes tensors of numbers of Python, for which a host waits until a GPU has done all that it was given before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def step_without_copies(rank: int, plan: Manual) -> list[str]:
    model = parallel(build(dropout=0.1), plan)
    first, second = batches(2)
    model(**first).loss.backward()
    copies = Copies()
    with copies:
        model(**second).loss.backward()
    return copies.found


@pytest.mark.parametrize("plan", [Manual(dp=2, pp=2, microbatches=2), Manual(dp=4, zero=2, microbatches=2)], ids=str)
def test_hosts_run_ahead_of_their_devices(ranks: RankPool, plan: Manual) -> None:
    """Also from one micro-batch and one step to the next, with random numbers of their own."""
    assert ranks.run(step_without_copies, plan) == [[]] * 4


class Penalised(nn.Module):
    """A weight of the first stage counts in the last one too, where the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.first(x).tanh()).square().mean()
        return loss + 0.1 * self.first.weight.square().sum()


def train_on_batches_of_other_sizes(rank: int, zero: int) -> set[tuple[int, ...]]:
    """Losses against one device; the stages of the weight in the plans."""
    torch.manual_seed(0)
    reference = Penalised().double()
    models = copy.deepcopy(reference), parallel(copy.deepcopy(reference), Manual(pp=2, dp=2, zero=zero, microbatches=2, stages=("last",)))
    batches = [torch.randn(size, 8, dtype=torch.float64) for size in (8, 4, 8, 12, 8)]
    losses: list[list[float]] = []
    for model in models:
        optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        losses.append(found)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    plans = [built.plan for variants in cast(Any, models[1])._autopar.programs.values() for _, built in variants]
    assert len({tuple(op.stage for op in plan.ops if op.op == "aten.square") for plan in plans}) > 1, "the penalty is where it was"
    return {plan.parameter("first.weight").stages for plan in plans}


@pytest.mark.parametrize("zero", few(1, [1, 0, 3]))
def test_copies_of_a_parameter_stay_one_where_fewer_stages_use_it(ranks: RankPool, zero: int) -> None:
    """Another plan has the penalty on the first stage, and the last one has the weight still."""
    assert set().union(*ranks.run(train_on_batches_of_other_sizes, zero)) == {(0, 1)}
