"""The shares of a batch that ranks have loaded, put together to the whole: rows along dim 0, in the order of the ranks.

A share is a tree of mappings, lists and tuples. Its leaves are

    a tensor          with the rows of the share in dim 0
    a list or tuple   of as many entries as there are rows, no tensor in it: strings, ids
    a flag            a string, a bool or None that is the same on all ranks

Anything else that depends on the batch (a number, a scalar tensor, a width that is that of the longest row) is another for a share than for
the whole, and so an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import LoaderError
from autopar.runtime.groups import local_device

REMEDY = "or let rank 0 collate the whole of each batch: shard_loader(..., collate='batch')"


def block(size: int, rank: int, world: int) -> slice:
    """The rows of a rank, of ``size`` in all, one after the other; the first ranks have one more if they do not come out even."""
    each, over = divmod(size, world)
    start = rank * each + min(rank, over)
    return slice(start, start + each + (rank < over))


@dataclass(frozen=True, slots=True)
class Rows:
    """What a tensor is but for its rows."""

    dtype: torch.dtype
    row: tuple[int, ...]
    device_type: str

    def num_bytes(self, rows: int) -> int:
        return rows * torch.Size(self.row).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, ('rows', *self.row)))}] on {self.device_type}"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a leaf stands in the tree, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a share: `Rows` of a tensor; or the list; or the flag."""

    name: str
    value: object
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank tells of its share; what is in the tensors travels apart.

    Args:
        rows: of the batch.
        tree: with `Slot` in place of leaves; None if there are no rows.
        leaves: by their numbers.
    """

    rows: int
    tree: object = None
    leaves: tuple[Leaf, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(leaf.value.num_bytes(self.rows) for leaf in self.leaves if isinstance(leaf.value, Rows))


def split(batch: object, rows: int) -> tuple[Share, torch.Tensor]:
    """A share, and the bytes of its tensors.

    Raises:
        LoaderError: a leaf cannot be a part of a whole.
    """
    leaves, tensors = list[Leaf](), list[torch.Tensor]()

    def keep(value: object, name: str) -> Slot:
        if isinstance(value, torch.Tensor):
            _check_tensor(value, name, rows)
            tensors.append(value)
            leaves.append(Leaf(name, Rows(value.dtype, tuple(value.shape[1:]), value.device.type)))
        elif isinstance(value, list | tuple):
            leaves.append(Leaf(name, value, is_list=True))
        elif value is None or isinstance(value, str | bool):
            leaves.append(Leaf(name, value))
        else:
            what = f"{name} is {value!r}" if isinstance(value, int | float) else f"{name} is of type {type(value).__name__}"
            raise LoaderError(
                f"{what}, made of the {rows} rows of one rank, and what it is for all rows cannot be told; give tensors with the batch in "
                f"dim 0, or lists with an entry for each row, {REMEDY}"
            )
        return Slot(len(leaves) - 1)

    tree = _rebuilt(batch, keep, lambda value: _is_list_of_rows(value, rows), "the batch")
    return Share(rows, tree, tuple(leaves)), bytes_of(tensors)


def bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What is in plain dense tensors, one after the other, on the host."""
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device="cpu")


def join(shares: Sequence[Share], data: Sequence[torch.Tensor]) -> Any:
    """The whole batch of the shares of all ranks, and of the bytes of each (which may be longer).

    Raises:
        LoaderError: they do not fit together.
    """
    holders = check_alike(shares)
    first = shares[holders[0]]
    starts, wholes = [0] * len(shares), list[object]()
    for number, leaf in enumerate(first.leaves):
        if isinstance(leaf.value, Rows):
            ends = [start + leaf.value.num_bytes(share.rows) for start, share in zip(starts, shares, strict=True)]
            parts = [own[start:end] for own, start, end in zip(data, starts, ends, strict=True)]
            starts, rows = ends, sum(share.rows for share in shares)
            whole = torch.cat(parts).view(leaf.value.dtype).view(rows, *leaf.value.row)
            wholes.append(whole.to(local_device(leaf.value.device_type)))
        elif isinstance(leaf.value, list | tuple) and leaf.is_list:
            entries = [entry for rank in holders for entry in _entries(shares[rank].leaves[number])]
            wholes.append(type(leaf.value)(entries))
        else:
            wholes.append(leaf.value)
    return _rebuilt(first.tree, lambda slot, _: wholes[slot.number], lambda _: False, "the batch")


def check_alike(shares: Sequence[Share]) -> list[int]:
    """The ranks that have rows.

    Raises:
        LoaderError: their shares do not fit together.
    """
    holders = [rank for rank, share in enumerate(shares) if share.rows]
    for rank in holders[1:]:
        _compare(shares[holders[0]], shares[rank], f"rank {holders[0]}", f"rank {rank}")
    return holders


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: object) -> Any:
    """A batch with its tensors changed."""
    return _rebuilt(batch, lambda leaf, _: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, lambda _: False, "the batch")


def _entries(leaf: Leaf) -> Sequence[object]:
    assert isinstance(leaf.value, list | tuple)
    return leaf.value


def _check_tensor(tensor: torch.Tensor, name: str, rows: int) -> None:
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        shape = f"a scalar, {tensor.item()}" if tensor.dim() == 0 else f"of shape {tuple(tensor.shape)}"
        raise LoaderError(
            f"{name} is a tensor {shape}, made of the {rows} rows of one rank; rows are joined along dim 0, which must have as many: give "
            f"one with the batch in dim 0, {REMEDY}"
        )
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise LoaderError(
            f"{name} is a {type(tensor).__name__} of {tensor.layout}, whose rows cannot be joined; give a plain dense tensor, {REMEDY}"
        )


def _compare(one: Share, other: Share, here: str, there: str) -> None:
    if one.tree != other.tree:
        names = ({leaf.name for leaf in share.leaves} for share in (one, other))
        only = [f"{', '.join(sorted(own))} only on {where}" for own, where in zip(_differences(*names), (here, there), strict=True) if own]
        what = "; ".join(only) or f"{one.tree} and {other.tree}"
        raise LoaderError(f"the shares of {here} and {there} have other structures: {what}; collate alike whatever the rows, {REMEDY}")
    for own, theirs in zip(one.leaves, other.leaves, strict=True):
        if isinstance(own.value, Rows) and isinstance(theirs.value, Rows) and own.value != theirs.value:
            raise LoaderError(
                f"{own.name} is {own.value} of {here} and {theirs.value} of {there}: each rank collates its own rows, and other shapes "
                f"cannot be joined; pad to a fixed length (padding='max_length'), {REMEDY}"
            )
        if own.is_list != theirs.is_list or (not own.is_list and own.value != theirs.value):
            raise LoaderError(
                f"{own.name} is {own.value!r} on {here} and {theirs.value!r} on {there}; what is not one for each row must be the same, "
                f"{REMEDY}"
            )


def _differences(one: set[str], other: set[str]) -> tuple[set[str], set[str]]:
    return one - other, other - one


def _is_list_of_rows(value: object, rows: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == rows and not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(value))


def leaves_of(value: object) -> Iterator[object]:
    """What is in a tree of mappings, lists and tuples."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            yield from leaves_of(entry)
    else:
        yield value


def _rebuilt(value: Any, change: Callable[[Any, str], object], is_leaf: Callable[[object], bool], name: str) -> Any:
    """The same tree with its leaves changed."""
    if isinstance(value, Mapping):
        items = {key: _rebuilt(item, change, is_leaf, f"{name}[{key!r}]") for key, item in value.items()}
        if not isinstance(value, dict):
            return type(value)(items)  # type: ignore[call-arg]
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(value, list | tuple) and not is_leaf(value):
        entries = [_rebuilt(entry, change, is_leaf, f"{name}[{i}]") for i, entry in enumerate(value)]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return change(value, name)
