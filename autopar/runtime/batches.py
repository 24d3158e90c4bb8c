"""Whether all ranks were given the same global batch: a sampler with another seed on one of them would train on noise and say nothing."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.local_batch import Deal
from autopar.units import number_text

Print = tuple[bool, tuple[int, ...], str, int]
"""Of a tensor: whether a rank has its own rows of it, global shape, dtype and checksum."""


def compare_batches(tensors: Sequence[torch.Tensor], call: int, deal: Deal | None) -> None:
    """Compare the inputs of a call over all ranks, by their checksums; of tensors that are dealt out the rows of each rank with its peers'.

    Args:
        tensors: the inputs.
        call: its number.
        deal: of the rows of DTensors.

    Raises:
        InputError: they differ; on all ranks, which it names.
    """
    found: list[tuple[Print, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, tuple(map(_print, tensors)))
    most = Counter(map(_kinds, found)).most_common(1)[0][0]
    usual = next(prints for prints in found if _kinds(prints) == most)
    others = [rank for rank, prints in enumerate(found) if _kinds(prints) != most]
    if others:
        raise _unequal(call, others, f"{len(found) - len(others)} of {len(found)}", _difference(found[others[0]], usual))
    alike = defaultdict(list)
    for rank in range(len(found)):
        alike[deal.share_of(rank) if deal is not None and any(is_dealt for is_dealt, *_ in usual) else None].append(rank)
    for ranks in alike.values():
        usual = Counter(found[rank] for rank in ranks).most_common(1)[0][0]
        others = [rank for rank in ranks if found[rank] != usual]
        if others:
            where = "" if len(alike) == 1 else f" ranks {ranks}, which hold the same rows"
            raise _unequal(call, others, f"{len(ranks) - len(others)} of {len(ranks)}{where}", _difference(found[others[0]], usual))


def _unequal(call: int, others: Sequence[int], alike: str, difference: str) -> InputError:
    return InputError(
        f"call {call}: ranks {others} were given another batch than {alike}: {difference}; every rank takes the whole global batch, the "
        "same on all: seed the sampler alike on every rank, and do not shard it; or say on all ranks that they have their own rows: "
        "autopar.local_batch"
    )


def _kinds(prints: Sequence[Print]) -> tuple[tuple[object, ...], ...]:
    return tuple(of_tensor[:3] for of_tensor in prints)


def _difference(theirs: Sequence[Print], most: Sequence[Print]) -> str:
    if len(theirs) != len(most):
        return f"{number_text(len(theirs), 'tensor')}, not {len(most)}"
    number, one, other = next((i, one, other) for i, (one, other) in enumerate(zip(theirs, most, strict=True)) if one != other)
    if one[:3] == other[:3]:
        return f"input {number} has other values"
    return f"input {number} is {_kind_text(one)}, not {_kind_text(other)}"


def _kind_text(of_tensor: Print) -> str:
    is_dealt, shape, dtype, _ = of_tensor
    return f"{dtype}{list(shape)}" + (" by rows of each rank" if is_dealt else "")


def _print(tensor: torch.Tensor) -> Print:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    return isinstance(tensor, DTensor), tuple(tensor.shape), name, zlib.crc32(data.numpy().tobytes())
