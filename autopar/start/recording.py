"""What is kept of the construction of a model on meta: its ops, in order, on numbered storages.

A value is a storage; a tensor is a `View` of one, so that an op that only makes another view is not an op here. An op reads storages,
writes in place or makes new ones, and may draw random numbers. What `replay` makes of it are the values of a real construction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Store:
    """A storage: its size, and the device that it would be on."""

    num_bytes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: where it lies in a storage, in elements of its dtype."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor, storage: int) -> View:
        return View(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True, slots=True)
class Draw:
    """An op takes random numbers.

    Args:
        generator: from which of the generators of the recording.
        start: the state, or the seed, that it is given before; None to go on after the draw before.
    """

    generator: int
    start: torch.Tensor | int | None


@dataclass(frozen=True, slots=True)
class Op:
    """A call of an op.

    Args:
        func: an overload.
        args, kwargs: with a `View` for each tensor that was made meanwhile, and a copy of any other tensor.
        reads: storages whose values it needs; ``writes`` those that it changes, and ``overwrites`` of these the ones that it fills
            whatever was there.
        results: for each tensor that it returns the view, if its storage is new.
        draw: random numbers that it takes.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    overwrites: frozenset[int] = frozenset()
    results: tuple[View | None, ...] = ()
    draw: Draw | None = None

    @property
    def makes(self) -> frozenset[int]:
        return frozenset(view.storage for view in self.results if view is not None)

    @property
    def gives(self) -> frozenset[int]:
        """The storages that have other values after it."""
        return self.writes | self.makes

    @property
    def touches(self) -> frozenset[int]:
        return self.reads | self.gives


@dataclass(frozen=True, slots=True)
class Recording:
    """A construction.

    Args:
        stores: by number.
        ops: in order.
        generators: for each the device; ``own`` of them are not the default one of their device.
        versions: of each storage as autograd counts changes in place; higher now: it was changed since.
    """

    stores: list[Store] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    generators: list[torch.device] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)

    def given(self) -> frozenset[int]:
        """The storages that any op gives values."""
        return frozenset[int]().union(*(op.gives for op in self.ops))

    @property
    def starts(self) -> list[torch.Tensor | int | None]:
        """What the draws begin from."""
        return [op.draw.start for op in self.ops if op.draw is not None]

    def with_starts(self, starts: Iterable[torch.Tensor | int | None]) -> Recording:
        """The same ops with other random numbers."""
        coming = iter(starts)
        ops = [op if op.draw is None else replace(op, draw=replace(op.draw, start=next(coming))) for op in self.ops]
        return replace(self, ops=ops)

    def fingerprint(self) -> str:
        """Equal where recordings are, but for the random numbers."""
        digest = hashlib.sha256(repr(self.stores).encode())
        for op in self.ops:
            leaves, spec = pytree.tree_flatten((op.args, dict(op.kwargs)))
            drawn = None if op.draw is None else op.draw.generator
            digest.update(repr((str(op.func), spec, op.results, drawn)).encode())
            for leaf in leaves:
                digest.update(_bytes_of(leaf))
        return digest.hexdigest()


def _bytes_of(leaf: object) -> bytes:
    if isinstance(leaf, torch.Generator):
        return b"generator"
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf).encode()
    return leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
