"""Compressed gradients on real processes, held against each scheme written out in plain torch for all ranks together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.layout import REPLICATED, Layout, assemble, take_shard
from autopar.ops.codec import States
from autopar.plan import ParameterPlan
from autopar.storage import Stored, parse_held
from tests.marks import few, only
from tests.pool import RankPool

pytestmark = pytest.mark.slow

SAMPLES = tuple(MatmulSample(64, 64, 64, dtype, 1e9) for dtype in ("float32", "bfloat16"))
DEVICE = DeviceProfile("test", 2**33, SAMPLES, 1e9, 1e-6, "for tests")
ROWS, RANK, BLOCK = 16, 4, 256
KINDS = ("bf16", "fp16", "int8", "topk:0.05", f"powersgd:{RANK}")
PLANS = {
    "dp4": Manual(dp=4),
    "dp2_tp2": Manual(dp=2, tp=2),
    "zero1": Manual(dp=4, zero=1),
    "zero2": Manual(dp=4, zero=2),
    "zero3_tp2": Manual(dp=2, tp=2, zero=3),
    "in_parts": Manual(dp=4, microbatches=2),
    "zero1_in_parts": Manual(dp=4, zero=1, microbatches=2),
    "zero2_in_parts": Manual(dp=4, zero=2, microbatches=2),
    "pp2_dp2": Manual(pp=2, dp=2, microbatches=2),
    "pp2_zero3": Manual(pp=2, dp=2, zero=3, microbatches=2),
    "zb": Manual(pp=2, dp=2, zero=2, microbatches=2, schedule="zb-h1"),
}
ALWAYS = [
    ("dp4", "int8"),
    ("zero2_in_parts", f"powersgd:{RANK}"),
    ("pp2_dp2", "int8"),
]
Tensors = list[torch.Tensor]
State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Weights of 8192 and 4096 elements, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return (made - y).square().mean()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(ROWS, 64, generator=generator), "y": torch.randn(ROWS, 64, generator=generator)}


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def parallel(wanted: Manual, compress: str | None, **kwargs: Any) -> Any:
    links = (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * len(wanted.grid(4).sizes)
    profile = MachineProfile(DEVICE, links)
    return autopar.parallelize(build(), 4, example_batch=batch_of(0), plan=wanted, profile=profile, compress=compress, **kwargs)


# Each scheme for all ranks together: (gradients by rank, what was kept) -> their sum.


def exactly(grads: Tensors, state: State) -> torch.Tensor:
    return torch.stack(grads).sum(0)


def as_mean_in(dtype: torch.dtype) -> Callable[[Tensors, State], torch.Tensor]:
    def reduce(grads: Tensors, state: State) -> torch.Tensor:
        return torch.stack([(grad / len(grads)).to(dtype).float() for grad in grads]).sum(0) * len(grads)

    return reduce


def in_int8(grads: Tensors, state: State, *, is_scattered: bool = False) -> torch.Tensor:
    part = math.ceil(grads[0].numel() / len(grads))

    def coded(flat: torch.Tensor) -> torch.Tensor:
        rows = []
        for block in flat.split(BLOCK):
            scale = block.abs().max() / 127
            rows.append((block / scale).round() * scale)
        return torch.cat(rows)

    sums = [torch.stack([coded(grad.flatten().split(part)[i]) for grad in grads]).sum(0) for i in range(len(grads))]
    return torch.cat(sums if is_scattered else [coded(own) for own in sums]).view(grads[0].shape)


def by_largest(grads: Tensors, state: State) -> torch.Tensor:
    total = torch.zeros_like(grads[0])
    for rank, grad in enumerate(grads):
        whole = grad + state.get(f"error{rank}", torch.zeros_like(grad))
        count = math.ceil(0.05 * whole.numel())
        least = whole.abs().flatten().sort(descending=True).values[count - 1]
        sent = torch.where(whole.abs() >= least, whole, 0.0)
        state[f"error{rank}"] = whole - sent
        total += sent
    return total


def by_powersgd(grads: Tensors, state: State) -> torch.Tensor:
    """Algorithms 1 and 2 of Vogels et al., 2019, of the sum; Q is that of the states, which draw the first one."""
    wholes = [grad + state.get(f"error{rank}", torch.zeros_like(grad)) for rank, grad in enumerate(grads)]
    basis, _ = torch.linalg.qr(torch.stack([whole @ state["basis"] for whole in wholes]).sum(0))
    for rank, whole in enumerate(wholes):
        state[f"error{rank}"] = whole - basis @ (basis.t() @ whole)
    state["basis"] = torch.stack(wholes).sum(0).t() @ basis
    found: torch.Tensor = basis @ state["basis"].t()
    return found


SCHEMES = {
    "bf16": as_mean_in(torch.bfloat16),
    "fp16": as_mean_in(torch.float16),
    "int8": in_int8,
    "topk:0.05": by_largest,
    f"powersgd:{RANK}": by_powersgd,
}


def layout_of(entry: ParameterPlan, model: Any) -> Layout:
    """How gradients lie before they are reduced: sharded where the parameter is, and not by ZeRO."""
    held = tuple(map(parse_held, entry.held))
    return Layout(model.plan.mesh, entry.factors, tuple(REPLICATED if isinstance(h, Stored) else h for h in held))


def own_rows(wanted: Manual, part: int, rank: int) -> slice:
    """Rows of a rank of data parallelism in a micro-batch."""
    size = ROWS // ((wanted.microbatches or 1) * wanted.dp)
    start = (part * wanted.dp + rank) * size
    return slice(start, start + size)


def gradients(model: Net, wanted: Manual, step: int) -> list[list[dict[str, torch.Tensor]]]:
    """By micro-batch, and by rank of data parallelism: what its rows add to the gradient of the loss."""
    parts, batch = wanted.microbatches or 1, batch_of(step)
    found = []
    for part in range(parts):
        row = []
        for rank in range(wanted.dp):
            own = {name: x[own_rows(wanted, part, rank)] for name, x in batch.items()}
            model.zero_grad()
            (model(**own) / (parts * wanted.dp)).backward()
            row.append({name: cast(torch.Tensor, p.grad).clone() for name, p in model.named_parameters()})
        found.append(row)
    return found


def emulate(
    wanted: Manual, kind: str, model: Any, reference: Net, step: int, states: dict[tuple[str, int], State]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients of a step as the scheme gives them, and exactly."""
    by_part = gradients(reference, wanted, step)
    if wanted.zero in (0, 1):  # reduced once a step
        by_part = [[{name: sum(part[r][name] for part in by_part) for name in by_part[0][0]} for r in range(wanted.dp)]]  # type: ignore[misc]
    exact = {name: cast(torch.Tensor, sum(own[name] for part in by_part for own in part)) for name in by_part[0][0]}
    found = {name: torch.zeros_like(grad) for name, grad in exact.items()}
    for name in exact:
        entry = model.plan.parameter(name)
        layout = layout_of(entry, model)
        is_small = len(entry.shape) < 2 or math.prod(layout.local_shape) < 4096
        for part in by_part:
            summed: Tensors = []
            for position in range(layout.mesh.num_ranks):
                group = next(own for own in layout.mesh.groups(layout.mesh.names.index("dp")) if position in own)
                shards = [take_shard(part[i][name], layout, layout.mesh.coordinate(r)) for i, r in enumerate(group)]
                state = states.setdefault((name, min(group)), {})
                first = position == min(group)
                if first and kind.startswith("powersgd") and "basis" not in state and not is_small:
                    state["basis"] = first_basis(name, shards[0].shape[1], entry)
                scheme = SCHEMES[kind] if kind != "int8" else partial(in_int8, is_scattered=wanted.zero > 0)
                scheme = exactly if is_small else scheme
                summed.append(scheme(shards, state) if first else summed[min(group)])
            found[name] += assemble(summed, layout)
    return found, exact


def first_basis(name: str, rows: int, entry: ParameterPlan) -> torch.Tensor:
    return States().basis(f"{name}.{entry.stages[0]}@dp", rows, RANK, torch.device("cpu"))


def train(rank: int, wanted: Manual, kind: str) -> list[tuple[str, float, float, float]]:
    """For every gradient of three steps that is held here: the largest differences from the scheme and from the exact one, over the largest
    element, and the part of elements that are not those of the scheme."""
    model, reference, states, rows = parallel(wanted, kind), build(), dict[tuple[str, int], State](), []
    assert model.plan.compression == kind
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        found, exact = emulate(wanted, kind, model, reference, step, states)
        model(**batch_of(step)).backward()
        for name, parameter in model.named_parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.to_local().numel():
                own = parameter.grad.full_tensor()
                scale = exact[name].abs().max()
                error, lossy = (own - found[name]).abs(), (own - exact[name]).abs()
                others = float((error > 1e-4 * scale).float().mean())
                rows.append((name, float(error.max() / scale), float(lossy.max() / scale), others))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                held = dict(model.named_parameters()).get(name)
                value = parameter - 0.1 * found[name]
                parameter.copy_(held.full_tensor() if isinstance(held, DTensor) else value)
    return rows


WIDTHS = {"bf16": 2.0**-6, "fp16": 2.0**-9, "int8": 3 / 127}
"""How far a result may be from the scheme where sums are in another order: a rounding that goes the other way."""


@pytest.mark.parametrize("plan, kind", only(ALWAYS, product(PLANS, KINDS)))
def test_gradients_are_those_of_the_scheme(ranks: RankPool, plan: str, kind: str) -> None:
    for rows in ranks.run(train, PLANS[plan], kind):
        assert rows
        for name, error, lossy, others in rows:
            assert error <= WIDTHS.get(kind, 1e-3), (name, error)
            assert others < (0.02 if kind == "int8" else 1.0), (name, others)
            if name.endswith("bias"):
                assert lossy < 1e-4, name
        assert max(lossy for _, _, lossy, _ in rows) > 1e-4, "something is compressed"


def steps(model: Any, first: int, last: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for step in range(first, last):
        loss = model(**batch_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def local(rank: int, wanted: Manual, kind: str) -> list[torch.Tensor]:
    model = parallel(wanted, kind)
    steps(model, 0, 3)
    return [p.to_local().detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", only(["int8", f"powersgd:{RANK}"], KINDS))
def test_replicas_stay_the_same_bit_for_bit(ranks: RankPool, kind: str) -> None:
    first, *others = ranks.run(local, PLANS["dp4"], kind)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def resumed(rank: int, wanted: Manual, kind: str, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses after step 3 without a break, from a checkpoint, and from one whose unsent gradients are forgotten."""
    model = parallel(wanted, kind)
    steps(model, 0, 3)
    autopar.save(folder, model)
    unbroken, found = steps(model, 3, 6), []
    for forgets in (False, True):
        other = parallel(wanted, kind)
        steps(other, 7, 8)  # what it keeps now is to be replaced
        autopar.load(folder, other)
        if forgets:
            other._autopar.states.held.clear()
        found.append(steps(other, 3, 6))
    return unbroken, found[0], found[1]


@pytest.mark.parametrize("plan, kind", few(1, [("zero2_in_parts", "topk:0.05"), ("pp2_dp2", "powersgd:4")]))
def test_a_resumed_run_remembers_what_was_not_sent(ranks: RankPool, tmp_path: Path, plan: str, kind: str) -> None:
    for unbroken, again, forgetful in ranks.run(resumed, PLANS[plan], kind, str(tmp_path)):
        assert again == unbroken
        assert forgetful[1:] != unbroken[1:]


def moved(rank: int, folder: str) -> tuple[list[str], int]:
    """Warnings and states after loading under another plan."""
    model = parallel(PLANS["dp4"], "topk:0.05")
    steps(model, 0, 2)
    autopar.save(folder, model)
    other = parallel(PLANS["dp2_tp2"], "topk:0.05")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.load(folder, other)
    steps(other, 2, 3)
    return [str(w.message) for w in caught if "error feedback" in str(w.message)], len(model._autopar.states.held)


def test_under_another_plan_what_was_not_sent_is_dropped_with_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    (first, held), *others = ranks.run(moved, str(tmp_path))
    assert len(first) == 1
    assert held == 3
    assert all(not said for said, _ in others), "one rank says so"


def scaled(rank: int, wanted: Manual, kind: str) -> tuple[list[float], list[float], bool]:
    """Losses and scales under a scaler whose scale changes, with an overflow of rank 1; whether all that is kept is finite."""
    model = parallel(wanted, kind, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, scales = [], []
    for step in range(6):
        batch = batch_of(step)
        if step == 2:
            batch["y"][own_rows(wanted, 0, 1)] = 6e4
        loss = model(**batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return losses, scales, all(bool(value.isfinite().all()) for value in model._autopar.states.held.values())


@pytest.mark.parametrize("kind", only(["powersgd:4"], KINDS))
def test_an_overflow_skips_the_step_and_leaves_no_trace(ranks: RankPool, kind: str) -> None:
    for losses, scales, is_finite in ranks.run(scaled, PLANS["dp4"], kind):
        assert is_finite
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]
        assert all(math.isfinite(loss) for loss in losses[:2] + losses[3:])


def warmed(rank: int, wanted: Manual, folder: str) -> list[list[bool]]:
    """Whether losses of five steps are those without compression: of a run, and of one that goes on from a checkpoint."""
    kind = f"powersgd:{RANK} after 3"
    model, exact = parallel(wanted, kind), parallel(wanted, None)
    with torch.no_grad():  # a call without gradients does not count
        model(**batch_of(9))
    found = [steps(model, 0, 2), steps(exact, 0, 2)]
    assert not model._autopar.states.held
    autopar.save(folder, model)
    again = parallel(wanted, kind)
    autopar.load(folder, again)
    found = [a + steps(m, 2, 6) for a, m in zip(found, (model, exact), strict=True)]
    resumed = steps(again, 2, 6)
    return [[a == b for a, b in zip(found[0], found[1], strict=True)], [a == b for a, b in zip(resumed, found[0][2:], strict=True)]]


@pytest.mark.parametrize("plan", only(["dp4"], ["dp4", "zero3_tp2", "pp2_dp2"]))
def test_gradients_stay_exact_for_as_many_calls(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    """Three steps are exact; the fourth loss is still made of them, the fifth is not."""
    for whole, resumed in ranks.run(warmed, PLANS[plan], str(tmp_path)):
        assert whole == [True, True, True, True, False, False]
        assert all(resumed)
