"""Where the values of a model come from: decided before there is a plan, alike on all ranks.

A tensor that has a value keeps it. One on meta gets it, in this order,

1. from files of safetensors (``weights=``), each rank its own slices;
2. from the recording of its construction (`autopar.deferred`);
3. from its module's own initialisation (`autopar.start.own`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from autopar.errors import StartError
from autopar.runtime.groups import local_device
from autopar.runtime.materialize import Start
from autopar.runtime.ranks import Ranks
from autopar.runtime.state import some
from autopar.runtime.weights import found_in, load_some, load_weights
from autopar.start.deferred import recorded
from autopar.start.own import record_own
from autopar.start.recording import Recording, View
from autopar.units import number_text

Recorded = Mapping[str, tuple[Recording, View]]


def plan_values(model: nn.Module, weights: str | Path | None, device_type: str, *, initialize: bool) -> Start:
    """Where the values of a model come from; all ranks call it.

    Args:
        model: before it is made parallel.
        weights: folder of safetensors.
        device_type: where the model will run.
        initialize: False: leave what a checkpoint has without values, which is what a state dict has.

    Raises:
        StartError: a tensor has no value and nothing that gives it one; all ranks raise it.
    """
    if not is_meta(model):
        if not initialize:
            raise StartError("initialize=False is for a model on meta; this one has its values already")
        return Start(load=None if weights is None else partial(load_weights, weights))
    if weights is not None and not initialize:
        raise StartError("weights= gives a model its values now, initialize=False leaves them to come; give one of the two")
    ranks = Ranks.everyone(StartError)
    drawn = int(torch.randint(2**62, (), device="cpu"))  # on all ranks, so that what is drawn next is alike on all
    seed = ranks.from_first(lambda: drawn)
    blank = ranks.together(lambda: _blank(model, weights, initialize=initialize))
    found = ranks.together(lambda: _recorded(model, blank, seed, device_type))
    load = None if weights is None else partial(load_some, weights, blank)
    return Start(_agreed(found, ranks), blank, load)


def is_meta(model: nn.Module) -> bool:
    """Whether the values of the parameters are still to come.

    Raises:
        StartError: of some, and not of others.
    """
    parameters = dict(model.named_parameters())
    real = [name for name, parameter in parameters.items() if not parameter.is_meta]
    if 0 < len(real) < len(parameters):
        raise StartError(
            f"{number_text(len(parameters) - len(real), 'parameter')} of the model on meta, but not {some(real)} ({len(real)} in all); "
            "build all of it on meta, or inside of autopar.deferred()"
        )
    return bool(parameters) and not real


def _blank(model: nn.Module, weights: str | Path | None, *, initialize: bool) -> frozenset[str]:
    """What files or a checkpoint will give values."""
    given = found_in(weights, model) if weights is not None else set() if initialize else {*model.state_dict()}
    return frozenset(given & _on_meta(model).keys())


def _recorded(model: nn.Module, blank: frozenset[str], seed: int, device_type: str) -> Recorded:
    tensors = {name: tensor for name, tensor in _on_meta(model).items() if name not in blank}
    if any(recorded(tensor) is None for tensor in tensors.values()):
        record_own(model, seed, local_device(device_type))
    given = dict[int, frozenset[int]]()
    found, missing = dict[str, tuple[Recording, View]](), list[str]()
    for name, tensor in tensors.items():
        place = recorded(tensor)
        if place is not None and place[1].storage in given.setdefault(id(place[0]), place[0].given()):
            found[name] = place
        else:
            missing.append(name)
    if missing:
        owner = type(model.get_submodule(missing[0].rpartition(".")[0])).__name__
        raise StartError(
            f"{some(missing)} ({len(missing)} in all) are on meta and nothing gives them values: construct the model inside of "
            f"autopar.deferred(), give weights= that have them, or let {owner} have a reset_parameters() that sets them"
        )
    return found


def _agreed(found: Recorded, ranks: Ranks) -> Recorded:
    """The same with the random numbers of rank 0.

    Raises:
        StartError: the ranks constructed different models.
    """
    first = {id(recording): recording for recording, _ in found.values()}
    prints = ranks.gather([recording.fingerprint() for recording in first.values()])
    other = next((rank for rank, own in enumerate(prints) if own != prints[0]), None)
    if other is not None:
        raise StartError(
            f"rank {other} constructed another model than rank 0, or one that depends on the random numbers drawn for it; give the "
            "constructor the same arguments, after the same torch.manual_seed, on every rank"
        )
    starts = ranks.from_first(lambda: [recording.starts for recording in first.values()])
    agreed = {key: recording.with_starts(own) for (key, recording), own in zip(first.items(), starts, strict=True)}
    return {name: (agreed[id(recording)], view) for name, (recording, view) in found.items()}


def _on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors: Iterable[tuple[str, torch.Tensor]] = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if tensor.is_meta}
