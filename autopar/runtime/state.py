"""What a checkpoint holds of a model and its optimizer, by names that do not depend on the plan:

    model.<parameter>               of tied ones the name in the plan, or the first
    buffers.<buffer>
    optimizer.<parameter>.<key>

Loading goes the other way: the model and the optimizer at hand say what they hold, and `Fitting` finds it in the checkpoint, or says what
is not there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.chunks import Chunks
from autopar.runtime.module import ParallelModule
from autopar.units import number_text

SHOWN = 5
"""Names in an error message."""
OF_PARAMETERS = ("params", "param_names")
"""What a group has for each of its parameters; the names are the optimizer's own, and with stages each rank has others."""


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, with the name that they stand under."""
    if isinstance(model, ParallelModule):
        return {alias: p.name for p in model.plan.parameters for alias in p.aliases}
    first = dict[int, str]()
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        first.setdefault(id(parameter), name)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


def names_of(model: nn.Module) -> dict[int, str]:
    """Names of the parameters that this rank holds, by id."""
    aliases, found = aliases_of(model), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), aliases.get(name, name))
    return found


def parameters_of(model: nn.Module, names: Mapping[int, str]) -> dict[str, Chunks]:
    """The parameters that this rank holds."""
    return {f"model.{names[id(parameter)]}": Chunks.of(parameter) for parameter in model.parameters()}


def buffers_of(model: nn.Module) -> dict[str, Chunks]:
    """The buffers of the state dict, which are the same on every rank.

    Raises:
        CheckpointError: a module has state of its own that is no tensor.
    """
    parameters, found = {name for name, _ in model.named_parameters(remove_duplicate=False)}, {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            what = f"{name} of the model is a {type(value).__name__}"
            raise CheckpointError(f"{what}, which is not kept; make it a buffer, or save it as extra")
        if name not in parameters:
            found[f"buffers.{name}"] = Chunks.of(value)
    return found


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, object]:
    """What an optimizer knows of the parameters that this rank holds.

    Raises:
        CheckpointError: it cannot be told what part of a whole something is.
    """
    _refuse_strangers(optimizer, names)
    state = dict[str, object]()
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in values.items() if name is not None else ():
            state[f"optimizer.{name}.{key}"] = Chunks.of(value) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.dim() and isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                raise CheckpointError(
                    f"optimizer state {key!r} of {name} is a plain tensor of shape {tuple(value.shape)} beside a parameter that is a "
                    "DTensor: what part of the whole it is cannot be told; keep it as a DTensor, as torch.zeros_like(parameter) does"
                )
    return state


def kind_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Their classes, in order."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def refuse_shared(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """The state of a parameter stands under its name, and so can be that of one optimizer alone."""
    owners = dict[int, int]()
    for number, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in names):
            if owners.setdefault(id(parameter), number) != number:
                raise CheckpointError(
                    f"optimizers {owners[id(parameter)]} and {number} both have {names[id(parameter)]}; give each parameter to one of them"
                )


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of every group, and the names of its parameters that this rank holds."""
    return [
        {
            "settings": {key: value for key, value in group.items() if key not in OF_PARAMETERS},
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
        }
        for group in optimizer.param_groups
    ]


@dataclass(slots=True)
class Fitting:
    """A checkpoint held against a model and an optimizer.

    Args:
        entries: what the checkpoint has, by name.
        aliases: of its tied parameters.
        state: what is to be filled: tensors in place; what is no tensor is put there.
    """

    entries: Mapping[str, object]
    aliases: Mapping[str, str]
    state: dict[str, Any] = field(default_factory=dict)
    _plain: list[tuple[str, dict[str, object], str]] = field(default_factory=list)

    def model(self, model: nn.Module, names: Mapping[int, str]) -> None:
        """Fit the parameters and the buffers.

        Raises:
            CheckpointError: they are not those of the checkpoint.
        """
        own = {f"model.{self._name(names[id(parameter)])}": Chunks.of(parameter) for parameter in model.parameters()}
        if len(own) < len(names):
            both = next(alias for alias, name in self.aliases.items() if {alias, name} <= {*names.values()})
            raise CheckpointError(f"{both} and {self.aliases[both]} are one parameter in the checkpoint and two here; tie them")
        own |= buffers_of(model)
        planned = model.plan.parameters if isinstance(model, ParallelModule) else ()
        known = {*own, *(f"model.{self._name(p.name)}" for p in planned)}
        saved = {name for name in self.entries if name.startswith(("model.", "buffers."))}
        for what, found in (("lacks", {*own} - saved), ("has what the model lacks,", saved - known)):
            if found:
                few = some(name.partition(".")[2] for name in sorted(found))
                raise CheckpointError(f"the checkpoint {what} {few} ({len(found)} in all); build the model that was saved")
        for name, chunks in own.items():
            self.add(name, chunks)

    def optimizers(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], about: Mapping[str, Any]) -> None:
        """Fit what optimizers themselves make for each parameter; what the checkpoint has nothing of is left to be made at a step.

        Raises:
            CheckpointError: they are of other kinds, in another order, share a parameter, or their groups are others.
        """
        groups, kind = about["groups"], kind_of(optimizers)
        if groups is None:
            raise CheckpointError("the checkpoint has no optimizer; load the model alone, or save with the optimizer")
        if about["optimizer"] != kind:
            raise CheckpointError(f"the optimizer of the checkpoint is {about['optimizer']}, this is {kind}; use the one that was saved")
        refuse_shared(optimizers, names)
        for optimizer in optimizers:
            _refuse_strangers(optimizer, names)
        owned = [group for optimizer in optimizers for group in groups_of(optimizer, names)]
        if len(groups) != len(owned):
            held = number_text(len(owned), "group")
            raise CheckpointError(f"the optimizer has {held} of parameters, that of the checkpoint {len(groups)}; make them alike")
        for i, (own, saved) in enumerate(zip(owned, groups, strict=True)):
            strange = {self._name(name) for name in own["names"]} - {*saved["names"]}
            if strange:
                few = some(sorted(strange))
                raise CheckpointError(f"group {i} of the optimizer has {few}, which that of the checkpoint has not; group them alike")
        for group, saved in zip([group for each in optimizers for group in each.param_groups], groups, strict=True):
            settings = {key: value for key, value in saved["settings"].items() if key not in OF_PARAMETERS}  # older ones have names too
            group.update(copy.deepcopy(settings))  # what is kept of a parameter may depend on them: momentum, amsgrad
        for optimizer in optimizers:
            self._optimizer(optimizer, names)

    def _optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Fit the state of one: of what the checkpoint has state of, frozen or not."""
        held = [(p, self._name(names[id(p)])) for group in optimizer.param_groups for p in group["params"] if id(p) in names]
        kept = [(parameter, name, self._kept(name)) for parameter, name in held]
        make_state(optimizer, [parameter for parameter, _, keys in kept if keys])
        for parameter, name, keys in kept:
            if keys:
                self._state(name, keys, optimizer.state.get(parameter, {}), type(optimizer).__name__)
            else:
                optimizer.state.pop(parameter, None)

    def _kept(self, name: str) -> set[str]:
        """Keys of the state of a parameter in the checkpoint."""
        prefix = f"optimizer.{name}."
        return {entry.removeprefix(prefix) for entry in self.entries if entry.startswith(prefix)}

    def _state(self, name: str, kept: set[str], values: dict[str, object], kind: str) -> None:
        """Fit the state of one parameter."""
        if kept != {*values}:
            found, wanted = ", ".join(sorted(kept)), ", ".join(sorted(values))
            raise CheckpointError(f"{kind} keeps {wanted} of {name}, the checkpoint has {found}; use the optimizer that was saved")
        for key, value in values.items():
            entry = f"optimizer.{name}.{key}"
            if isinstance(value, torch.Tensor):
                self.add(entry, Chunks.of(value))
            else:
                self.state[entry] = None
                self._plain.append((entry, values, key))

    def finish(self) -> None:
        """Once ``state`` is filled: give the optimizer what is no tensor."""
        for entry, values, key in self._plain:
            values[key] = self.state[entry]

    def add(self, name: str, chunks: Chunks) -> None:
        """Have something filled from what the checkpoint has under a name.

        Raises:
            CheckpointError: that has another shape.
        """
        entry = self.entries[name]
        saved = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
        if saved != tuple(chunks.whole):
            raise CheckpointError(f"{name} is {saved} in the checkpoint and {tuple(chunks.whole)} here; build the model that was saved")
        self.state[name] = chunks

    def _name(self, name: str) -> str:
        return self.aliases.get(name, name)


def _refuse_strangers(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Those that ranks of other stages hold are empty here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names and parameter.numel():
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, and so has no name; make it "
                    "one of the model, or give it an optimizer of its own, and save that and its values as extra"
                )


def make_state(optimizer: torch.optim.Optimizer, wanted: Iterable[torch.Tensor]) -> None:
    """Let an optimizer make the state of those of its parameters that have none, by a step with gradients of zero and no learning rate."""
    lacking = {id(parameter) for parameter in wanted if not optimizer.state.get(parameter)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients, rates = [p.grad for p in parameters], [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if id(parameter) in lacking else None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def some(names: Iterable[str]) -> str:
    """The first of some names, for a message."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
