"""Run a recording for some of its values, with little memory.

- Only what they need is run. Random numbers are drawn in the order of the recording, so that all before the last one needed are drawn,
  be it for nothing.
- Ops that draw nothing are run as soon as the draws that they depend on are done: of ``Model().to(torch.bfloat16)`` each weight is
  converted when it has been drawn, not after the last of all. What depends on nothing, as zeros do, waits until it is wanted.
- A storage has memory from the first op that gives it a value to the last that touches it; then its values are handed out, and it is freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.start.recording import Op, Recording, View

Receiver = Callable[[torch.Tensor], None]


def needed(ops: Sequence[Op], wanted: Iterable[int], drawn: Iterable[int] = ()) -> list[Op]:
    """The ops that some storages need, in order, and those that draw from the generators ``drawn``."""
    live, drawing, kept = set(wanted), set(drawn), list[Op]()
    for op in reversed(ops):
        draw = op.draw
        if not (op.gives & live or (draw is not None and draw.generator in drawing)):
            continue
        kept.append(op)
        live -= op.makes | op.overwrites
        live |= op.reads
        if draw is not None:
            drawing.add(draw.generator)
            if draw.start is not None:
                drawing.remove(draw.generator)  # it begins anew here: what was drawn before does not matter
    return kept[::-1]


def ordered(ops: Sequence[Op]) -> list[Op]:
    """The same ops, each as soon as the draws are done on which it depends; draws keep their order."""
    written, read = defaultdict[int, int](lambda: -1), defaultdict[int, int](lambda: -1)
    after = list[int]()  # the last draw that an op depends on
    for i, op in enumerate(ops):
        last = max((*(written[s] for s in op.touches), *(read[s] for s in op.gives)), default=-1)
        after.append(i if op.draw is not None else last)
        for s in op.gives:
            written[s] = after[i]
        for s in op.reads:
            read[s] = max(read[s], after[i])
    touched = dict[int, int]()  # after which draw a storage is touched next
    for i, op in reversed([*enumerate(ops)]):
        if not op.reads and op.draw is None:
            after[i] = min((touched[s] for s in op.gives if s in touched), default=after[i])
        for s in op.touches:
            touched[s] = min(after[i], touched.get(s, after[i]))
    return [ops[i] for i in sorted(range(len(ops)), key=after.__getitem__)]


@torch.no_grad()
def replay(recording: Recording, wanted: Sequence[tuple[View, Receiver]], *, to_the_end: bool = False) -> list[torch.Tensor]:
    """Run a recording, and hand each value that is wanted to its receiver as soon as no op will change it.

    Every rank that wants the same value gets the same bits. What a receiver keeps is its own concern: the tensor is a view of memory that
    is let go when it returns. The generators of the process are left as they are found.

    Args:
        recording: a recording.
        wanted: tensors and their receivers.
        to_the_end: draw all random numbers, not only those that the values need.

    Returns:
        The state of each generator where it ends.
    """
    receivers = defaultdict[int, list[tuple[View, Receiver]]](list)
    for view, receive in wanted:
        receivers[view.storage].append((view, receive))
    ops = ordered(needed(recording.ops, receivers, range(len(recording.generators)) if to_the_end else ()))
    last = {s: i for i, op in enumerate(ops) for s in op.touches}
    memory = _Memory(recording)
    with _generators(recording) as generators:
        for i, (op, done) in enumerate(zip(ops, _done(ops), strict=True)):
            _run(op, memory, generators)
            for s in done:
                for view, receive in receivers.pop(s, ()) if last[s] == i else ():
                    receive(memory.tensor(view))
                memory.free(s)
        ends = [generator.get_state() for generator in generators]
    assert not receivers, f"no op gives storages {sorted(receivers)} a value"
    return ends


def _done(ops: Sequence[Op]) -> list[frozenset[int]]:
    """After each op the storages whose values no later op needs."""
    live, done = set[int](), list[frozenset[int]]()
    for op in reversed(ops):
        done.append(op.touches - live)
        live -= op.makes | op.overwrites
        live |= op.reads
    return done[::-1]


def evaluate(recording: Recording, views: Sequence[View]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """The values of some tensors, and where the generators stand after all that was recorded; None if nothing was drawn for the values."""
    draws = any(op.draw is not None for op in needed(recording.ops, {view.storage for view in views}))
    values = dict[View, torch.Tensor]()

    def keep(view: View) -> Receiver:
        return lambda value: values.update({view: value.clone()})

    ends = replay(recording, [(view, keep(view)) for view in dict.fromkeys(views)], to_the_end=draws)
    return [values[view] for view in views], ends if draws else None


class _Memory:
    """The storages that have memory now."""

    def __init__(self, recording: Recording) -> None:
        self._stores = recording.stores
        self._held: dict[int, torch.UntypedStorage] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """A tensor in its storage, which gets memory if it has none."""
        store = self._stores[view.storage]
        if view.storage not in self._held:
            self._held[view.storage] = torch.UntypedStorage(store.num_bytes, device=store.device)
        empty: torch.Tensor = torch.empty(0, dtype=view.dtype, device=store.device)
        return empty.set_(self._held[view.storage], view.offset, view.size, view.stride)

    def put(self, view: View, value: torch.Tensor) -> None:
        """Take over the memory of a result."""
        storage = value.untyped_storage()
        lies_alike = value.stride() == view.stride and value.storage_offset() == view.offset
        if lies_alike and storage.nbytes() == self._stores[view.storage].num_bytes:
            self._held[view.storage] = storage
        else:  # the op lays its result out otherwise than on meta
            self.tensor(view).copy_(value)

    def free(self, storage: int) -> None:
        self._held.pop(storage, None)


def _run(op: Op, memory: _Memory, generators: Sequence[torch.Generator]) -> None:
    leaves, spec = pytree.tree_flatten((op.args, dict(op.kwargs)))
    drawn = None
    if op.draw is not None:
        drawn, start = generators[op.draw.generator], op.draw.start
        if isinstance(start, int):
            drawn.manual_seed(start)
        elif start is not None:
            drawn.set_state(start)
    leaves = [
        memory.tensor(leaf) if isinstance(leaf, View) else drawn if isinstance(leaf, torch.Generator) else leaf for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    values = pytree.tree_leaves(op.func(*args, **kwargs))
    for view, value in zip(op.results, values, strict=True):
        if view is not None:
            memory.put(view, value)


@contextmanager
def _generators(recording: Recording) -> Iterator[list[torch.Generator]]:
    """Those of a recording: the default ones, which are put back afterwards, and new ones for others."""
    found = [
        torch.Generator(device) if i in recording.own else default_generator(device)
        for i, device in enumerate(recording.generators)
    ]
    states = [generator.get_state() for generator in found]
    try:
        yield found
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The one that ops draw from that are given none."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
