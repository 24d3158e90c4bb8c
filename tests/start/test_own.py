"""The initialisation of modules: what it sets, in whose order, and that no value depends on what else is wanted."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
import torch
import transformers
from torch import nn

from autopar.start.deferred import recorded
from autopar.start.own import record_own
from autopar.start.recording import View
from autopar.start.replay import Receiver, needed, replay


def put(found: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    found[name] = value.clone()


def start(model: nn.Module, seed: int = 0, only: str = "") -> tuple[dict[str, torch.Tensor], int]:
    """Values by name, and how many ops they take."""
    record_own(model, seed, torch.device("cpu"))
    found = dict[str, torch.Tensor]()
    wanted: list[tuple[View, Receiver]] = []
    recordings = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        place = recorded(tensor)
        assert place is not None
        if name.startswith(only):
            wanted.append((place[1], partial(put, found, name)))
            recordings.append(place[0])
    replay(recordings[0], wanted)
    return found, len(needed(recordings[0].ops, [view.storage for view, _ in wanted]))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0, initializer_range=0.5)
    with torch.device("meta"):
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_each_module_draws_for_itself() -> None:
    whole, count = start(gpt2())
    again, _ = start(gpt2())
    other, _ = start(gpt2(), seed=1)
    part, few = start(gpt2(), only="transformer.h.1.attn.c_attn")
    assert few < count / 8
    assert all(torch.equal(whole[name], value) for name, value in again.items())
    assert {*part} == {"transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.bias"}
    assert all(torch.equal(whole[name], value) for name, value in part.items())
    assert not torch.equal(whole["transformer.wte.weight"], other["transformer.wte.weight"])
    assert not torch.equal(whole["transformer.h.0.attn.c_attn.weight"], whole["transformer.h.1.attn.c_attn.weight"])


def test_transformers_have_the_last_word() -> None:
    """GPT-2 draws its ``c_proj`` again from the module above, with less variance."""
    values, _ = start(gpt2())
    assert values["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert values["transformer.h.0.attn.c_proj.weight"].std().item() == pytest.approx(0.25, rel=0.1)
    assert not values["transformer.h.0.mlp.c_fc.bias"].any()


def test_modules_of_torch() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 8), nn.BatchNorm1d(16), nn.Embedding(5, 3, padding_idx=1))
    values, _ = start(model)
    assert values["0.self_attn.in_proj_weight"].abs().max() <= (6 / 64) ** 0.5
    assert torch.equal(values["1.running_var"], torch.ones(16))
    assert values["1.num_batches_tracked"] == 0
    assert not values["2.weight"][1].any()
