"""Whether all ranks were given the same global batch: a sampler with another seed on one of them would train on noise and say nothing."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.units import number_text

Print = tuple[tuple[int, ...], str, int]
"""Shape, dtype and checksum of a tensor."""


def compare_batches(tensors: Sequence[torch.Tensor], call: int) -> None:
    """Compare the inputs of a call over all ranks, by their checksums.

    Raises:
        InputError: they differ; on all ranks, which it names.
    """
    found: list[tuple[Print, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, tuple(map(_print, tensors)))
    most = Counter(found).most_common(1)[0][0]
    others = [rank for rank, prints in enumerate(found) if prints != most]
    if not others:
        return
    difference = _difference(found[others[0]], most)
    raise InputError(
        f"call {call}: ranks {others} were given another batch than {len(found) - len(others)} of {len(found)}: {difference}; every rank "
        "takes the whole global batch, the same on all: seed the sampler alike on every rank, and do not shard it"
    )


def _difference(theirs: Sequence[Print], most: Sequence[Print]) -> str:
    if len(theirs) != len(most):
        return f"{number_text(len(theirs), 'tensor')}, not {len(most)}"
    number, one, other = next((i, one, other) for i, (one, other) in enumerate(zip(theirs, most, strict=True)) if one != other)
    if one[:2] == other[:2]:
        return f"input {number} has other values"
    return f"input {number} is {one[1]}{list(one[0])}, not {other[1]}{list(other[0])}"


def _print(tensor: torch.Tensor) -> Print:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), zlib.crc32(data.numpy().tobytes())
