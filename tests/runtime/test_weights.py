"""Weights of transformers' files in models under a plan, and checkpoints as such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import autopar
from autopar import Manual
from autopar.cost.machine import MachineProfile
from autopar.errors import CheckpointError
from tests import models
from tests.pool import RankPool
from tests.runtime.test_train import DEVICE, LINK, batches

pytestmark = pytest.mark.slow


def build(seed: int = 0, tied: bool = True) -> Any:
    return models.gpt2(layers=2, hidden=32, vocab=64, batch=8, sequence=8, seed=seed, tied=tied).model


def loss_of(model: nn.Module) -> float:
    return float(model(**batches(1)[0]).loss.detach())


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_one_file_or_several(tmp_path: Path, size: str) -> None:
    source, model = build(), build(seed=1)
    source.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) is (size == "20KB")
    assert loss_of(model) != loss_of(source)
    autopar.load_weights(tmp_path, model)
    assert loss_of(model) == loss_of(source)


def load(rank: int, folder: str, plan: Manual) -> float:
    links = (LINK,) * len(plan.grid(dist.get_world_size()).sizes)
    profile = MachineProfile(DEVICE, links)
    model = autopar.parallelize(build(seed=1), 4, plan=plan, profile=profile, example_batch=batches(1)[0])
    autopar.load_weights(folder, model)
    return loss_of(model)


def test_each_rank_reads_its_part(ranks: RankPool, tmp_path: Path) -> None:
    source = build()
    source.save_pretrained(tmp_path)
    for loss in ranks.run(load, str(tmp_path), Manual(pp=2, dp=2, zero=3, microbatches=2)):
        assert loss == pytest.approx(loss_of(source), rel=1e-6)


def test_the_base_model_is_enough(tmp_path: Path) -> None:
    """Published weights of GPT-2 are those of `GPT2Model`, without the prefix."""
    source, model = build(), build(seed=1)
    source.transformer.save_pretrained(tmp_path)
    autopar.load_weights(tmp_path, model)
    assert loss_of(model) == loss_of(source)


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_transformers_load_what_is_exported(tmp_path: Path, max_file_bytes: int) -> None:
    source = build()
    autopar.save(tmp_path / "checkpoint", source, torch.optim.AdamW(source.parameters()))
    files = autopar.export_weights(tmp_path / "checkpoint", tmp_path / "out", max_file_bytes=max_file_bytes)
    source.config.save_pretrained(tmp_path / "out")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert loss_of(again.eval()) == pytest.approx(loss_of(source.eval()), rel=1e-6)  # what lies elsewhere may be summed in another order
    assert again.lm_head.weight is again.transformer.wte.weight
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in source.parameters())
        assert {*index["weight_map"].values()} == {path.name for path in files}
        assert all(path.stat().st_size < 2 * max_file_bytes for path in files)
    with pytest.raises(CheckpointError, match=r"has weights already .* export to a new folder"):
        autopar.export_weights(tmp_path / "checkpoint", tmp_path / "out")


def test_exported_in_another_dtype(tmp_path: Path) -> None:
    source = nn.BatchNorm1d(3)
    autopar.save(tmp_path / "checkpoint", source)
    autopar.export_weights(tmp_path / "checkpoint", tmp_path / "out", dtype=torch.bfloat16)
    again = nn.BatchNorm1d(3).bfloat16()
    again.load_state_dict(again.state_dict() | {"num_batches_tracked": torch.tensor(7)})
    autopar.load_weights(tmp_path / "out" / "model.safetensors", again)
    assert again.num_batches_tracked == 0
    torch.testing.assert_close(again.state_dict(), {name: x.to(again.state_dict()[name].dtype) for name, x in source.state_dict().items()})


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there are no files of safetensors in"):
        autopar.load_weights(tmp_path, nn.Linear(2, 2))
    build().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"the files lack lm_head.weight \(1 in all\)"):
        autopar.load_weights(tmp_path, build(tied=False))
    with pytest.raises(CheckpointError, match=r"transformer.wpe.weight is \(64, 32\) in .* and \(80, 32\) here"):
        autopar.load_weights(tmp_path, models.gpt2(layers=2, hidden=32, vocab=64, sequence=80).model)
    smaller = models.gpt2(layers=1, hidden=32, vocab=64).model
    with pytest.warns(UserWarning, match=r"the files have what the model lacks: transformer.h.1.attn.c_attn.bias, .* \(12 in all\)"):
        autopar.load_weights(tmp_path, smaller)
    assert torch.equal(cast(Any, smaller).transformer.h[0].ln_1.weight, build().transformer.h[0].ln_1.weight)
