"""The order of an epoch, in a form that is kept: not the indices, but what they are drawn from.

A resumed epoch sets the samplers, their generators and the global random numbers as they were when it began, draws again what was given,
and compares checksums: a sampler that also depends on something else is found out.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autopar.errors import LoaderError
from autopar.runtime.shares import leaves_of

CHECKED_BYTES = 2**12
"""Of each tensor, in a checksum."""

Random = tuple[object, object, torch.Tensor]
"""State of the global random numbers of Python, numpy and torch."""


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The batch sampler, the sampler in it, and so on."""
    found, sampler = list[Any](), loader.batch_sampler
    while sampler is not None and sampler not in found:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What the next epoch of a loader will be drawn from, but for the global random numbers."""
    samplers = samplers_of(loader)
    return {
        "generators": [_generator_state(owner) for owner in (loader, *samplers)],
        "samplers": [sampler.state_dict() if _keeps_order(sampler) else None for sampler in samplers],
    }


def set_order(loader: DataLoader[Any], order: dict[str, Any]) -> None:
    """Let the next epoch be drawn from it.

    Raises:
        LoaderError: the loader has other samplers.
    """
    samplers = samplers_of(loader)
    had = [state is not None for state in (*order["generators"], *order["samplers"])]
    own = order_of(loader)
    if had != [state is not None for state in (*own["generators"], *own["samplers"])]:
        raise LoaderError(
            f"the state is that of another kind of loader: its samplers, or their generators, are not those of this one "
            f"({', '.join(type(sampler).__name__ for sampler in samplers) or 'none'}); build it as it was"
        )
    for owner, state in zip((loader, *samplers), order["generators"], strict=True):
        if state is not None:
            owner.generator.set_state(state)
    for sampler, state in zip(samplers, order["samplers"], strict=True):
        if state is not None:
            sampler.load_state_dict(state)


def global_random() -> Random:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


@contextlib.contextmanager
def random_as(state: Random) -> Iterator[None]:
    """Global random numbers as they were then, and afterwards as they are now."""
    now = global_random()
    _set_random(state)
    try:
        yield
    finally:
        _set_random(now)


def seeds_of(order: dict[str, Any], state: Random) -> torch.Generator:
    """A generator that draws what a loader's own, or torch's, would at the start of the epoch: first the seed of its workers."""
    seeds = torch.Generator()
    own = order["generators"][0]
    seeds.set_state(state[2] if own is None else own)
    return seeds


def draw_seed(generator: torch.Generator | None) -> int:
    """What a loader draws at the start of an epoch."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def checksum(batch: object, before: int) -> int:
    """Of indices or a batch, after those before it."""
    for leaf in leaves_of(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            part = leaf.detach().reshape(-1)[: CHECKED_BYTES // leaf.dtype.itemsize].cpu()
            before = zlib.crc32(part.view(torch.uint8).numpy().tobytes(), before)
        elif isinstance(leaf, str | int | float):
            before = zlib.crc32(repr(leaf).encode(), before)
    return before


def _keeps_order(sampler: Any) -> bool:
    """Whether what a sampler keeps belongs to its order. That of torchdata's StatefulDistributedSampler is a place, at the start of an
    epoch the end of the one before, from which a loaded sampler would go on; its order is of seed and epoch."""
    return hasattr(sampler, "state_dict") and not isinstance(sampler, DistributedSampler)


def _generator_state(owner: Any) -> torch.Tensor | None:
    generator = getattr(owner, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def _set_random(state: Random) -> None:
    random.setstate(state[0])  # type: ignore[arg-type]
    numpy.random.set_state(state[1])  # type: ignore[arg-type]
    torch.set_rng_state(state[2])
