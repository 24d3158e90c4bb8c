"""Construction without memory: the values of a real one, bit for bit, and what cannot be recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from autopar import deferred
from autopar.errors import StartError
from autopar.start.deferred import _made, recorded
from autopar.start.recording import Recording, View
from autopar.start.replay import Receiver, replay
from tests import models
from tests.marks import few


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(model.named_parameters(), model.named_buffers()))


def put(found: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    found[name] = value.clone()


def values_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a replay gives, all of one recording."""
    found = dict[str, torch.Tensor]()
    places = {name: recorded(tensor) for name, tensor in tensors.items()}
    wanted: list[tuple[View, Receiver]] = []
    recordings: list[Recording] = []
    for name, place in places.items():
        assert place is not None, name
        recordings.append(place[0])
        wanted.append((place[1], partial(put, found, name)))
    assert all(recording is recordings[0] for recording in recordings)
    replay(recordings[0], wanted)
    return found


def check(build: Callable[[], nn.Module], seed: int = 11) -> nn.Module:
    """Construct with memory and without, and compare bits, dtypes and strides; the model without."""
    torch.manual_seed(seed)
    real = named(build())
    torch.manual_seed(seed)
    with deferred():
        model = build()
    tensors = named(model)
    assert all(tensor.is_meta for tensor in tensors.values())
    assert tensors.keys() == real.keys()
    for name, value in values_of(tensors).items():
        assert value.dtype == real[name].dtype
        assert value.stride() == real[name].stride()
        assert torch.equal(value, real[name]), name
    return model


HF = {"gpt2": models.gpt2, "llama": models.llama, "bert": models.bert, "vit": models.vit, "t5": models.t5, "distilbert": models.distilbert}


@pytest.mark.parametrize("name", few(4, HF))
def test_models_of_transformers(name: str) -> None:
    """Their ``post_init`` draws everything again; ViT's rejects what is drawn, and DistilBERT has a table made with numpy."""
    check(lambda: HF[name](layers=1).model)  # type: ignore[operator]


@pytest.mark.parametrize("build", [models.nn_transformer, models.batch_norm, models.unet], ids=lambda build: str(build.__name__))
def test_models_of_torch(build: Callable[[], models.Example]) -> None:
    """Layers that are copies of one, attention, buffers, convolutions."""
    check(lambda: build().model)


class Odd(nn.Module):
    """What constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.given = nn.Parameter(torch.from_numpy(np.arange(3.0)))
        self.drawn = nn.Parameter(torch.randn(4, 5).t())
        self.partly = nn.Parameter(torch.empty(6, 4))
        self.rejected = nn.Parameter(torch.empty(50, 50))
        self.seeded = nn.Parameter(torch.empty(7).uniform_(generator=torch.Generator().manual_seed(4)))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        with torch.no_grad():
            self.partly.data[::2].normal_()
            self.partly[1::2] = 0.5
            nn.init.trunc_normal_(self.rejected, std=1.0)
        self.rates = torch.linspace(0, 0.1, 3).tolist() + [float(self.rejected[0, 0].detach())]
        self.tail = nn.Parameter(torch.rand(3) * self.rates[-1])
        if self.rejected.mean() > 0:
            self.tail.data += 1
        self.register_buffer("order", torch.randperm(8)[torch.tensor([1, 0, 2])])
        self.register_buffer("found", torch.tensor([0, 1, 0, 1]).nonzero())
        self.register_buffer("large", (self.rejected.detach() > 1).nonzero())
        torch.manual_seed(1)
        self.again = nn.Parameter(torch.rand(3, device=self.tail.device))


def test_all_that_a_constructor_may_do() -> None:
    odd = check(Odd)
    torch.manual_seed(11)
    assert odd.rates == Odd().rates


def test_dtypes_and_ties_inside() -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4, padding_idx=2), "head": nn.Linear(4, 9, bias=False)})
        model["head"].weight = model["embed"].weight
        return model.to(torch.bfloat16).requires_grad_(False)

    model = check(build)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert not model.get_parameter("head.weight").requires_grad


def test_tensors_say_where_they_would_be() -> None:
    with deferred():
        x = torch.ones(3)
        assert (x.device, x.is_meta, x.is_cuda) == (torch.device("cpu"), False, False)
    assert x.is_meta


def test_random_numbers_go_on_elsewhere() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with deferred():
        first = nn.Linear(20, 20)
    after = torch.get_rng_state()
    with deferred():
        second = nn.Linear(20, 20)
    assert not torch.equal(before, after)
    drawn = [values_of(named(model))["weight"] for model in (first, second)]
    assert not torch.equal(*drawn)
    assert not torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(after)
    values_of(named(first))
    assert torch.equal(torch.get_rng_state(), after)


class Reseeded(nn.Module):
    """Seeds in between, and goes on where it was, as a library does that wants numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(4)
        self.first, self.other = nn.Linear(4, 4), nn.Parameter(torch.rand(4, generator=own))
        kept = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.inside = nn.Linear(4, 4)
            torch.manual_seed(1)
            self.same = nn.Linear(4, 4)
        self.after, self.another = nn.Linear(4, 4), nn.Parameter(torch.rand(4, generator=own))
        torch.set_rng_state(kept)
        self.again = nn.Linear(4, 4)


def test_seeds_and_states_inside() -> None:
    values = values_of(named(check(Reseeded)))
    assert torch.equal(values["same.weight"], values["inside.weight"])
    assert torch.equal(values["again.weight"], values["after.weight"])
    assert not torch.equal(values["after.weight"], values["first.weight"])


def test_a_recording_lives_as_long_as_its_tensors() -> None:
    with deferred():
        model = nn.Linear(3, 3)
    gc.collect()
    count = len(_made)
    assert recorded(model.weight) is not None
    del model
    gc.collect()
    assert len(_made) == count - 2


def refuse(change: Callable[[], object], match: str) -> None:
    with pytest.raises(StartError, match=match), deferred():
        change()


def test_what_is_not_recorded_is_refused() -> None:
    real, sparse = torch.ones(3), torch.eye(3).to_sparse()
    refuse(real.zero_, r"aten.zero_.default changes a tensor of shape \(3,\) that has values already")
    refuse(lambda: torch.empty(3).resize_(9), r"aten.resize_.default changes the size of a tensor")
    refuse(lambda: torch.randn(3, dtype=torch.complex64).conj() + 1, r"conjugate or negative Tensor of layout torch.strided; only plain")
    refuse(lambda: sparse * 2, r"Tensor of layout torch.sparse_coo; only plain tensors are recorded")
    with deferred():
        first = torch.ones(3)
    refuse(lambda: first + 1, r"a tensor of shape \(3,\) was made in another autopar.deferred\(\)")


def test_an_op_that_writes_and_is_unknown_on_meta_is_refused() -> None:
    library = torch.library.Library("autopar_tests", "FRAGMENT")
    library.define("halve_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("halve_", lambda x: x.mul_(0.5), "CPU")
    refuse(
        lambda: torch.ops.autopar_tests.halve_(torch.ones(3)),
        r"autopar_tests.halve_.default cannot be recorded: torch cannot run it on meta",
    )


def test_a_change_outside_is_noticed() -> None:
    with deferred():
        model = nn.Linear(3, 3).double()
    assert recorded(model.weight) is not None
    nn.init.zeros_(model.weight)
    with pytest.raises(StartError, match=r"shape \(3, 3\) was changed in place after autopar.deferred\(\)"):
        recorded(model.weight)
    assert recorded(model.half().weight) is None
    assert recorded(torch.ones(3)) is None


