"""What is saved beside a model: values of rank 0, and of objects that have a state the parts of all ranks, as of averages of weights.

    extra                               the values and states, with None where something sharded stands
    extra.<name>['<key>']['<key>']      a DTensor of a state, by where it stands in it
    about["sharded"]                    where each of these stands

So what is sharded goes the way of parameters: each rank writes its own part, and reads what it has under the plan then. A rank of a stage
has the keys of its stage, and the states of all ranks together are the whole one; that needs names, since numbers begin at 0 on each.
"""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import CheckpointError
from autopar.runtime.chunks import Chunks
from autopar.runtime.parameters import like
from autopar.runtime.state import Fitting, make_state, some

Key = str | int
Where = tuple[Key, ...]
"""The name of an extra, and the keys of its state down to a tensor."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Kinds of tensors that no part of something sharded is of."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a rank saves.

    Args:
        values: values and states by name, with None where something sharded stands.
        sharded: what stands there.
    """

    values: dict[str, Any]
    sharded: dict[Where, DTensor]

    @staticmethod
    def of(extra: Mapping[str, object], *, writes: bool) -> Extras:
        """Those that the script gives on this rank; ``writes``: it is the one whose values are written.

        Raises:
            CheckpointError: one holds a part of something where it cannot be told what part it is.
        """
        made = Extras({}, {})
        for name, value in extra.items():
            own = _without_shards(value.state_dict(), (name,), made.sharded) if hasattr(value, "state_dict") else value
            if writes:
                _refuse_shards(name, own)
            made.values[name] = own
        return made

    def shapes(self) -> dict[str, dict[Where, tuple[int, ...]]]:
        """Those of what is sharded, by name of the extra."""
        found: dict[str, dict[Where, tuple[int, ...]]] = {name: {} for name in self.values}
        for where, tensor in self.sharded.items():
            found[str(where[0])][where] = tuple(tensor.shape)
        return found

    def merge(self, ranks: Sequence[dict[str, dict[Where, tuple[int, ...]]]]) -> dict[str, Where]:
        """Make room for what only other ranks have, by the `shapes` of all; where everything sharded stands, by its name in the checkpoint.

        Raises:
            CheckpointError: ranks give others.
        """
        found: dict[Where, tuple[int, ...]] = {}
        for number, shapes in enumerate(ranks):
            for where, shape in (item for own in shapes.values() for item in own.items()):
                if found.setdefault(where, shape) != shape:
                    raise CheckpointError(f"{_entry(where)} is {shape} on rank {number} and {found[where]} on others; make them alike")
        for name in {str(where[0]) for where in found}:
            lacking = [number for number, shapes in enumerate(ranks) if name not in shapes]
            if lacking:
                raise CheckpointError(f"extra {name!r} is sharded, and rank {lacking[0]} gives none; give it on all ranks")
        rooms = dict[Where, dict[Any, Any]]()
        for where in found.keys() - self.sharded.keys():
            _make_room(self.values, where, rooms)
        return {_entry(where): where for where in found}

    def chunks(self) -> dict[str, Chunks]:
        """What is sharded, by its name in the checkpoint."""
        return {_entry(where): Chunks.of(tensor) for where, tensor in self.sharded.items()}


@dataclass(frozen=True, slots=True)
class Coming:
    """What a rank loads.

    Args:
        values: as in `Extras`, of what was saved.
        places: where what is sharded stands, by its name in the checkpoint.
        asked: names of what is to get its state on this rank.
        tensors: to be filled, where they stand: as the object has them here, or whole where it has none.
    """

    values: dict[str, Any]
    places: Mapping[str, Where]
    asked: frozenset[str]
    tensors: dict[Where, torch.Tensor]

    @staticmethod
    def of(extra: Mapping[str, object], values: dict[str, Any], places: Mapping[str, Where], fitting: Fitting) -> Coming:
        """Fit the objects that are to get their states.

        Raises:
            CheckpointError: something sharded has another shape here, or stands under a number.
        """
        made = Coming(values, places, frozenset(extra), {})
        for name in {str(where[0]) for where in places.values()} & extra.keys():
            keeper, own = extra[name], dict[Where, DTensor]()
            if isinstance(keeper, torch.optim.Optimizer):
                make_state(keeper, [p for group in keeper.param_groups for p in group["params"] if p.requires_grad])
            if hasattr(keeper, "state_dict"):
                _without_shards(keeper.state_dict(), (name,), own)
            in_stages = any(_is_of_stage(tensor) for tensor in own.values())
            for entry, where in places.items():
                if where[0] == name and (where in own or not in_stages):
                    made.tensors[where] = _room(own.get(where), fitting.entries[entry])
                    fitting.add(entry, Chunks.of(made.tensors[where]))
        return made

    def refuse_unwanted(self, ranks: Iterable[tuple[frozenset[str], set[Where]]]) -> None:
        """Raise CheckpointError if what is asked for has something that no rank has; of each its ``asked``, and where its tensors stand."""
        asked, wanted = set[str](), set[Where]()
        for names, places in ranks:
            asked |= names
            wanted |= places
        unwanted = [entry for entry, where in self.places.items() if where[0] in asked and where not in wanted]
        if unwanted:
            raise CheckpointError(f"the checkpoint has what no rank has, {some(unwanted)} ({len(unwanted)} in all); build what was saved")

    def finish(self) -> dict[str, Any]:
        """Once the tensors are filled: what was saved, without what is sharded and not asked for."""
        sharded = {*self.places.values()}
        left = {where[0] for where in sharded} - self.asked
        return {name: _with_shards(value, (name,), self.tensors, sharded) for name, value in self.values.items() if name not in left}


def _entry(where: Where) -> str:
    return f"extra.{where[0]}" + "".join(f"[{key!r}]" for key in where[1:])


def _without_shards(value: Any, where: Where, found: dict[Where, DTensor]) -> Any:
    """A state with None for DTensors, which are put into ``found``: with copies of the dicts and lists that hold them."""
    if isinstance(value, DTensor):
        if _is_of_stage(value) and any(isinstance(key, int) for key in where[1:]):
            raise CheckpointError(
                f"{_entry(where)} is a DTensor under a number, and ranks of other pipeline stages number their own; give an optimizer of "
                "the model as optimizer, and keep what else there is under names of parameters"
            )
        found[where] = value
        return None
    if isinstance(value, dict):
        parts = {key: _without_shards(x, (*where, key), found) for key, x in value.items() if isinstance(key, Key)}
        others = {key: part for key, part in parts.items() if part is not value[key]}
        made = copy.copy(value) if others else value  # with what a state_dict says of versions
        for key, part in others.items():
            dict.__setitem__(made, key, part)
        return made
    if type(value) in (list, tuple):
        items = [_without_shards(x, (*where, i), found) for i, x in enumerate(value)]
        return value if all(item is x for item, x in zip(items, value, strict=True)) else type(value)(items)
    return value


def _with_shards(value: Any, where: Where, found: Mapping[Where, torch.Tensor], sharded: set[Where]) -> Any:
    """The reverse; what is not found is of other stages, and left out."""
    if where in sharded:
        return found[where]
    if isinstance(value, dict):
        for key in [key for key in value if isinstance(key, Key)]:
            place = (*where, key)
            if place in sharded and place not in found:
                del value[key]
            else:
                value[key] = _with_shards(value[key], place, found, sharded)
        return value
    if type(value) in (list, tuple):
        return type(value)(_with_shards(x, (*where, i), found, sharded) for i, x in enumerate(value))
    return value


def _make_room(values: dict[Any, Any], where: Where, rooms: dict[Where, dict[Any, Any]]) -> None:
    """Put None there; the dicts on the way become copies, which are kept in ``rooms``."""
    inside = values
    for depth, key in enumerate(where[:-1], start=1):
        if where[:depth] not in rooms:
            found = inside.get(key, {})
            if not isinstance(found, dict):
                raise CheckpointError(f"{_entry(where)} is not in a dict on rank 0, as on other ranks; make them alike")
            rooms[where[:depth]] = copy.copy(found)
            inside[key] = rooms[where[:depth]]
        inside = rooms[where[:depth]]
    inside[where[-1]] = None


def _is_of_stage(tensor: DTensor) -> bool:
    """Whether there are ranks that have no part of it: those of other stages."""
    return tensor.device_mesh.size() < dist.get_world_size()


def _room(own: DTensor | None, saved: Any) -> torch.Tensor:
    """Memory for a tensor: not that of the object itself, which takes it as it sees fit."""
    if own is None:
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
    return like(torch.empty_like(own.to_local(), requires_grad=False), own)


def _refuse_shards(name: str, value: object) -> None:
    """What is pickled is that of rank 0: of a DTensor its own part, which would come back as that of all ranks."""
    found: list[DTensor] = []

    def seen(tensor: DTensor) -> tuple[type, tuple[()]]:
        found.append(tensor)
        return object, ()

    pickler = pickle.Pickler(_Nowhere(), protocol=5, buffer_callback=lambda _: None)
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(_PLAIN, lambda _: (object, ())), DTensor: seen}
    with suppress(Exception):  # what cannot be pickled is said where it is written
        pickler.dump(value)
    for tensor in found:
        raise CheckpointError(
            f"extra {name!r} holds a DTensor of shape {tuple(tensor.shape)} where rank 0 alone would save it, and has but its part; give "
            "the object that has it, with state_dict and load_state_dict (an AveragedModel, not its state_dict()), or x.full_tensor()"
        )


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)
