"""Micro-batches that are batches of their own: for a model that needs its whole batch, where the user allows another step.

Batch statistics, contrastive losses and losses that are not linear in the samples have no exact micro-batches (`passes.microbatch`).
With ``average_microbatches=True`` the step is that of gradient accumulation by hand instead:

    for part in batch.chunk(m):              # statistics, counts and negatives are of the part
        (model(part).loss / m).backward()    # buffers change from part to part

The graph is that of one part. Nothing of it knows the axis in time: the runtime gives it a part of every input, and joins what it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.trace import Source
from autopar.errors import MicrobatchError
from autopar.graph import Value, outputs_of, specs_of, value_spec
from autopar.layout import PARTIAL, REPLICATED, Atoms, Placement, shard
from autopar.passes.microbatch import Split, batch_size, whole_batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Average:
    """How the graph of a part stands to that of the batch.

    Args:
        microbatches: number of parts.
        inputs: placeholders that take a part of dim 0 of what the model is given.
        outputs: how the outputs of the parts are joined: parts of a dim, averaged (P), or the last one (R).
        atoms: their shapes when joined.
        updates: for each buffer that changes, what it is and what it becomes, as (placeholder, position of the output).
    """

    microbatches: int
    inputs: frozenset[str]
    outputs: tuple[Placement, ...]
    atoms: tuple[Atoms, ...]
    updates: tuple[tuple[str, int], ...]

    def split(self, part: fx.GraphModule) -> Split:
        """Every op of a part is whole on the axis in time."""
        return Split(self.microbatches, whole_batch(part).choices, self.outputs, self.atoms, is_average=True)


def part_of_call(call: T, size: int, count: int, position: int = 0) -> T:
    """The arguments of a call with one of so many equal parts of its batch: of dim 0 of all tensors where that is the batch size."""

    def part(x: object) -> object:
        return x.chunk(count)[position] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == size else x

    parted: T = pytree.tree_map(part, call)
    return parted


def average_of(whole: fx.GraphModule, part: fx.GraphModule, microbatches: int, buffers: tuple[str, ...]) -> Average:
    """Compare the normal graphs of a batch and of one of its parts.

    Args:
        buffers: names of those that change; the last outputs are what they become.

    Raises:
        MicrobatchError: an output of the batch is no average of those of the parts, nor are they parts of it.
    """
    size = batch_size(whole)
    rows = {node.meta["placeholder"].name: specs_of(node)[0].shape[:1] for node in whole.graph.find_nodes(op="placeholder")}
    inputs, names = set(), {}
    for node in part.graph.find_nodes(op="placeholder"):
        entry = node.meta["placeholder"]
        names[entry.name] = node.name
        if entry.source is Source.INPUT and rows[entry.name] == (size,) and specs_of(node)[0].shape[0] * microbatches == size:
            inputs.add(node.name)
    values = list(zip(outputs_of(whole.graph), outputs_of(part.graph), strict=True))
    num_returned = len(values) - len(buffers)
    joined = [_join(*pair, microbatches) for pair in values[:num_returned]]
    joined += [(REPLICATED, tuple((n,) for n in value_spec(value).shape)) for value, _ in values[num_returned:]]
    updates = tuple((names[name], num_returned + i) for i, name in enumerate(buffers))
    return Average(microbatches, frozenset(inputs), tuple(p for p, _ in joined), tuple(atoms for _, atoms in joined), updates)


def _join(whole: Value, part: Value, microbatches: int) -> tuple[Placement, Atoms]:
    wanted, spec = value_spec(whole).shape, value_spec(part)
    if wanted == spec.shape and spec.dtype.is_floating_point:
        return PARTIAL, tuple((n,) for n in wanted)
    differing = [dim for dim, (a, b) in enumerate(zip(wanted, spec.shape, strict=True)) if a != b]
    if len(differing) == 1 and wanted[differing[0]] == microbatches * spec.shape[differing[0]]:
        return shard(differing[0]), tuple((microbatches, n) if dim in differing else (n,) for dim, n in enumerate(spec.shape))
    raise MicrobatchError(
        f"{microbatches} averaged micro-batches give outputs of shape {list(spec.shape)} ({spec.dtype}, {part.node.meta.get('line', '')}), "
        f"which are neither parts of the {list(wanted)} of the whole batch nor averaged; return what is a mean, or has the batch in one "
        "dim, or ask for outputs='loss'"
    )
