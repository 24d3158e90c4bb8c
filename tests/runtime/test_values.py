"""Models on meta on four real processes: shards of the values of one device under every plan, from everything that gives values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import AutoparError
from tests.marks import exhaustive, few
from tests.models import gpt2
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK

pytestmark = pytest.mark.slow

PLANS = [
    Manual(tp=4),
    Manual(dp=4, zero=3),
    Manual(pp=2, tp=2, microbatches=2, stages=("blocks.1",)),
    Manual(pp=2, dp=2, zero=3, microbatches=2, stages=("blocks.1",)),
]
SOME = [pytest.param(PLANS[::3], id="some"), pytest.param(PLANS, id="all", marks=exhaustive)]
"""Heads, and parts of stages, cut a tensor in all the ways that the others do."""
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    """Attention with its heads in one fused weight, which tensor parallelism stores as a strided shard."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        nn.init.trunc_normal_(self.out.weight, std=0.1)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.out.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        out: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + out


class Small(nn.Module):
    """Tied weights with a row of zeros, a table that no state dict has, and values that are drawn again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16, padding_idx=3), nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.empty(16), persistent=False)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.get_buffer("scale").copy_(torch.linspace(0.5, 1.5, 16))
        for block in self.blocks:
            nn.init.normal_(block.get_parameter("qkv.weight"), std=0.2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(seed: int = 7) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randint(32, (8, 4), generator=random) for name in ("tokens", "labels")}


def real(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def recorded(seed: int) -> Small:
    torch.manual_seed(seed)
    with autopar.deferred():
        return Small()


def on_meta() -> Small:
    with torch.device("meta"):
        return Small()


def parallel(model: nn.Module, plan: Manual, example: dict[str, torch.Tensor] | None = None, **options: Any) -> Any:
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    return autopar.parallelize(model, 4, plan=plan, profile=profile, example_batch=example or batch(), **options)


def values_of(model: nn.Module) -> Values:
    """What this rank has a part of, whole, and its buffers."""
    parameters = {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()}
    return parameters | {name: buffer.clone() for name, buffer in model.named_buffers()}


def started(rank: int, kind: str, plans: list[Manual], folder: str | None = None) -> list[Values]:
    """Under all of these plans. The ranks have seeds of their own, of which that of rank 0 counts."""
    found = []
    for plan in plans:
        torch.manual_seed(5 + rank)
        model = {"recorded": recorded, "real": real}[kind](5 + rank) if kind != "modules" else on_meta()
        found.append(values_of(parallel(model, plan, weights=folder, device="cpu")))
    return found


def together(ranks: list[list[Values]]) -> list[Values]:
    """For every plan what all stages have; what several ranks have must be the same bits."""
    every = []
    for plan in zip(*ranks, strict=True):
        found = Values()
        for values in plan:
            for name, value in values.items():
                assert torch.equal(found.setdefault(name, value), value), name
        every.append(found)
    return every


def assert_equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("plans", SOME)
def test_recorded_values_are_those_of_one_device(ranks: RankPool, plans: list[Manual]) -> None:
    for found in together(ranks.run(started, "recorded", plans)):
        assert_equal(found, values_of(real(5)))


@pytest.mark.parametrize("plans", SOME)
def test_values_of_modules_do_not_depend_on_the_plan(ranks: RankPool, plans: list[Manual]) -> None:
    first, *others = together(ranks.run(started, "modules", plans))
    for other in others:
        assert_equal(other, first)
    assert not first["embed.weight"][3].any()
    assert torch.equal(first["scale"], real(0).get_buffer("scale"))
    assert first["blocks.0.qkv.weight"].std().item() == pytest.approx(0.2, rel=0.1)
    assert first["blocks.0.out.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(first["blocks.0.out.weight"], first["blocks.1.out.weight"])


def drawn(rank: int) -> list[float]:
    """What follows in a program that begins alike on all ranks."""
    torch.manual_seed(5)
    parallel(on_meta(), PLANS[0], device="cpu")
    return torch.rand(2).tolist()


def drawn_after_a_call(rank: int) -> tuple[list[float], list[float]]:
    """What follows the first call, and what follows without it."""
    model = parallel(real(5), PLANS[0])
    torch.manual_seed(6)
    model(**batch())
    with_call = torch.rand(2).tolist()
    torch.manual_seed(6)
    return with_call, torch.rand(2).tolist()


def drawn_by_the_start(rank: int) -> tuple[list[float], list[float]]:
    """What follows the start of a model that has its values, and what follows without it."""
    model = real(5)
    torch.manual_seed(6)
    parallel(model, PLANS[0])
    with_start = torch.rand(2).tolist()
    torch.manual_seed(6)
    return with_start, torch.rand(2).tolist()


@pytest.mark.parametrize("of", [drawn_by_the_start, drawn_after_a_call])
def test_a_loop_draws_the_batches_of_one_device(ranks: RankPool, of: Callable[[int], tuple[list[float], list[float]]]) -> None:
    for found, wanted in ranks.run(of):
        assert found == wanted


def test_ranks_go_on_to_draw_the_same_numbers(ranks: RankPool) -> None:
    first, *others = ranks.run(drawn)
    assert others == [first] * len(others)


@pytest.mark.parametrize("kind", few(1, ["modules", "recorded", "real"]))
def test_files_give_what_they_have(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """And the start without them the table that they lack."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = real(9)
    save_file({name: value for name, value in source.state_dict().items() if name != "head.weight"}, tmp_path / "model.safetensors")
    for found in together(ranks.run(started, kind, PLANS[-1:], str(tmp_path))):
        assert_equal(found, values_of(source))


def blank(rank: int, folder: str) -> tuple[float, float, bool]:
    """The loss before a checkpoint of another start is loaded, and after; whether the table was there before."""
    autopar.save(folder, parallel(recorded(5), PLANS[1], device="cpu"))
    model = parallel(on_meta(), PLANS[3], initialize=False, device="cpu")
    has_table = "scale" in dict(model.named_buffers()) and not bool(model.scale.isnan().any())
    before = float(model(**batch()).detach())
    autopar.load(folder, model)
    return before, float(model(**batch()).detach()), has_table


def test_a_model_that_waits_for_a_checkpoint_is_not_trained_by_accident(ranks: RankPool, tmp_path: Path) -> None:
    wanted = float(real(5)(**batch()).detach())
    for before, after, has_table in ranks.run(blank, str(tmp_path)):
        assert before != before
        assert after == pytest.approx(wanted, rel=1e-5)
        assert has_table


def losses(rank: int) -> list[float]:
    """The optimizer is made before the plan."""
    plan = PLANS[1]
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    model = autopar.parallelize(recorded(5), 4, plan=plan, profile=profile, device="cpu")
    return train(model, torch.optim.AdamW(model.parameters(), 0.01))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(3):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_an_optimizer_made_before_the_plan_trains_what_was_materialised(ranks: RankPool) -> None:
    model = real(5)
    wanted = train(model, torch.optim.AdamW(model.parameters(), 0.01))
    for found in ranks.run(losses):
        assert found == pytest.approx(wanted, rel=1e-4)


def fused(rank: int) -> tuple[str, Values]:
    """A model of transformers."""
    with autopar.deferred():
        model = gpt2(layers=1, hidden=32, vocab=64).model
    example = gpt2(layers=1, hidden=32, vocab=64, batch=8, sequence=8).batch
    model = parallel(model, Manual(tp=4), example, device="cpu")
    return str(cast(Any, model.get_parameter("transformer.h.0.attn.c_attn.weight")).placements), values_of(model)


def test_a_fused_weight_of_transformers_is_cut_as_it_is_stored(ranks: RankPool) -> None:
    wanted = values_of(gpt2(layers=1, hidden=32, vocab=64).model)
    for placements, found in ranks.run(fused):
        assert "_StridedShard" in placements or "split_factor" in placements
        assert_equal(found, wanted)


def errors(rank: int) -> list[str]:
    """What is refused, on all ranks."""
    mixed, lost, changed = on_meta(), on_meta(), recorded(0)
    mixed.blocks[0] = Block()
    cast(Any, lost.blocks[1]).bare = nn.Parameter(torch.empty(3, device="meta"))
    with torch.no_grad():
        changed.embed.weight.zero_()
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (mixed, {}),
        (lost, {}),
        (changed, {}),
        (real(0), {"device": "cuda"}),
        (real(0), {"initialize": False}),
        (on_meta(), {"initialize": False, "weights": "/nowhere"}),
        (on_meta(), {"weights": "/nowhere"}),
        (other(rank), {}),
    ]
    found = []
    for model, options in cases:
        try:
            parallel(model, PLANS[0], **({"device": "cpu"} | options))
        except AutoparError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def other(rank: int) -> Small:
    """A model that rank 2 constructs otherwise."""
    with autopar.deferred():
        model = Small()
        if rank == 2:
            nn.init.ones_(model.head.weight)
        return model


ERRORS = [
    r"StartError: 6 parameters of the model on meta, but not blocks.0.norm.weight, .* \(5 in all\); build all of it",
    r"StartError: blocks.1.bare \(1 in all\) are on meta and nothing gives them values: .*let Block have a reset_parameters\(\)",
    r"StartError: a tensor of shape \(32, 16\) was changed in place after autopar.deferred\(\), where nothing is recorded",
    r"PlanError: the weights of the model are on cpu, not on cuda, as device= says",
    r"StartError: initialize=False is for a model on meta",
    r"StartError: weights= gives a model its values now, initialize=False leaves them to come",
    r"StartError: CheckpointError: there are no files of safetensors in /nowhere",
    r"StartError: rank 2 constructed another model than rank 0",
]


def test_what_cannot_start_says_so_on_all_ranks(ranks: RankPool) -> None:
    for found in ranks.run(errors):
        assert len(found) == len(ERRORS)
        for text, pattern in zip(found, ERRORS, strict=True):
            assert re.match(pattern, text), text
