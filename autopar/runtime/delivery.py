"""Batches from rank to rank on the host: the shares of ranks to all of them (`gather`), or what one rank has to all (`deliver`).

Each takes one exchange of what is to come, with the errors of all ranks, and one of bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from autopar.errors import LoaderError
from autopar.runtime.groups import local_device, peer_group
from autopar.runtime.ranks import Ranks
from autopar.runtime.shares import Rows, Share, bytes_of, check_alike, join, split

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Note:
    """What a rank says before it sends its bytes."""

    problem: str | None
    share: Share
    about: object


@dataclass(frozen=True, slots=True)
class Packed:
    """Any value: a pickle without the tensors, what these are (all of each in one row), and their bytes."""

    pickled: bytes
    tensors: tuple[Rows, ...]
    data: torch.Tensor


def told(error: Exception) -> str:
    """What other ranks are told of an error. That of a worker of a loader has its traceback as text, of which the last line says it."""
    text = str(error)
    if isinstance(error, LoaderError):
        return text
    return text.strip().splitlines()[-1] if text.startswith("Caught ") else f"{type(error).__name__}: {text}"


def attempt(make: Callable[[], T]) -> T | Exception:
    try:
        return make()
    except Exception as error:  # of any kind: the others would wait for this rank
        return error


def gather(ranks: Ranks, made: object, rows: int, about: T, peers: Sequence[int] = ()) -> tuple[Any, T]:
    """The whole batch of the shares of all ranks, and what rank 0 says beside it.

    Args:
        made: the share of this rank, an error, or anything if it has no rows.
        peers: ranks, this one among them, whose shares alone are put together; none: those of all.

    Raises:
        LoaderError: a rank has an error, or the shares do not fit together; on all ranks.
    """
    error = made if isinstance(made, Exception) else None
    share, data = Share(0), torch.empty(0, dtype=torch.uint8, device="cpu")
    if error is None and rows:
        parts = attempt(lambda: split(made, rows))
        if isinstance(parts, Exception):
            error = parts
        else:
            share, data = parts
    notes = ranks.gather(_Note(None if error is None else told(error), share, about))
    ranks.refuse([note.problem for note in notes], error)
    shares, group = [note.share for note in notes], ranks.group
    if peers:
        check_alike(shares)
        shares, group = [shares[rank] for rank in peers], peer_group(peers)
    longest = max(share.num_bytes for share in shares)
    buffers = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in shares]
    if len(shares) == 1:
        buffers = [data]
    elif longest:
        own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        own[: data.numel()] = data
        dist.all_gather(buffers, own, group=group)
    return join(shares, buffers), cast(T, notes[0].about)


def deliver(ranks: Ranks, owner: int, make: Callable[[], T]) -> T:
    """What rank ``owner`` makes, on all ranks; tensors are on its kind of device.

    Raises:
        LoaderError: it cannot; on all ranks.
    """
    if ranks.group is None:
        return make()
    made: T | Exception | None = None
    said: list[Any] = [None]
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    if dist.get_rank() == owner:
        made = attempt(make)
        packed = made if isinstance(made, Exception) else attempt(lambda: pack(made))
        if isinstance(packed, Exception):
            made, said = packed, [told(packed) if isinstance(packed, LoaderError) else f"rank {owner}: {told(packed)}"]
        else:
            said, data = [(packed.pickled, packed.tensors)], packed.data
    dist.broadcast_object_list(said, owner, group=ranks.group)
    if isinstance(said[0], str):
        raise LoaderError(said[0]) from (made if isinstance(made, Exception) else None)
    pickled, tensors = said[0]
    if dist.get_rank() != owner:
        data = torch.empty(sum(kind.num_bytes(1) for kind in tensors), dtype=torch.uint8, device="cpu")
    if data.numel():
        dist.broadcast(data, owner, group=ranks.group)
    return cast(T, made if dist.get_rank() == owner else unpack(Packed(pickled, tensors, data)))


class _Pickler(pickle.Pickler):
    """Leaves plain dense tensors out, each once."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized or obj.is_nested:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def pack(value: object) -> Packed:
    """A value as bytes."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    kinds = tuple(Rows(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in pickler.tensors)
    return Packed(buffer.getvalue(), kinds, bytes_of(pickler.tensors))


def unpack(packed: Packed) -> Any:
    """The value again."""
    parts = packed.data.split([kind.num_bytes(1) for kind in packed.tensors])
    tensors = [
        part.clone().view(kind.dtype).view(kind.row).to(local_device(kind.device_type))
        for kind, part in zip(packed.tensors, parts, strict=True)
    ]
    return _Unpickler(io.BytesIO(packed.pickled), tensors).load()
