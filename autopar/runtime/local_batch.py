"""Batches of which every rank holds its own rows: DTensors with the shape of the whole batch, which the parallel model takes as they lie.

Rows of a batch go micro-batch by micro-batch, and those of each in equal blocks over the axes that split the batch
(`passes.rows.RowSplit`). Ranks along the other axes, those of tensor parallelism and of a pipeline, hold the same rows: they are *peers*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory

from autopar.errors import InputError, PlanError
from autopar.layout import Layout, shard
from autopar.mesh import Mesh
from autopar.passes.rows import RowSplit
from autopar.runtime.groups import job_timeout
from autopar.runtime.parameters import as_dtensor, torch_placements
from autopar.runtime.shares import map_tensors
from autopar.units import number_text

T = TypeVar("T")


class BatchRank(NamedTuple):
    """Which share of a batch is this rank's, as ``DistributedSampler`` and HF's ``split_dataset_by_node`` count them."""

    num_replicas: int
    rank: int


@dataclass(frozen=True, slots=True)
class Deal:
    """How the rows of batches are dealt out to the ranks of a model.

    Args:
        split: of the rows.
        grid: all ranks.
        mesh: of one axis, with the ranks that hold the rows of a batch between them, in the order of the rows; this one is among them.
    """

    split: RowSplit
    grid: Mesh
    mesh: DeviceMesh

    @staticmethod
    def of(split: RowSplit, grid: Mesh, mesh: DeviceMesh) -> Deal:
        """That of a plan, whose grid is ``mesh`` for torch; all ranks call it, for it may make a process group."""
        axes = split.axes or grid.names[:1]
        found = mesh[axes] if len(grid.names) > 1 else mesh
        if len(axes) > 1:
            found = found._flatten()
            dist.distributed_c10d._set_pg_timeout(job_timeout(), found.get_group())
        return Deal(split, grid, found)

    @property
    def share(self) -> BatchRank:
        """Of this rank."""
        return self.share_of(dist.get_rank())

    def share_of(self, rank: int) -> BatchRank:
        coordinate, count, position = self.grid.coordinate(rank), 1, 0
        for axis in map(self.grid.index, self.split.axes):
            count, position = count * self.grid.sizes[axis], position * self.grid.sizes[axis] + coordinate[axis]
        return BatchRank(count, position)

    def layout(self, shape: Sequence[int]) -> Layout | None:
        """How a tensor with the rows of a batch in dim 0 lies on ``mesh``; None if they do not come out even."""
        count, parts = self.share.num_replicas, self.split.microbatches
        if not shape or shape[0] % (count * parts):
            return None
        rows = (shape[0],) if parts == 1 else (parts, shape[0] // parts)
        return Layout(Mesh(("batch",), (count,)), (rows, *((n,) for n in shape[1:])), (shard(0, len(rows) - 1),))

    @property
    def peers(self) -> list[int]:
        """The ranks that hold the same rows as this one, in order."""
        return [rank for rank in range(self.grid.num_ranks) if self.share_of(rank) == self.share]

    def rows(self, batch: Sequence[T]) -> list[T]:
        """This rank's of a batch whose rows come out even."""
        each = len(batch) // self.split.microbatches
        own = each // self.share.num_replicas
        starts = (k * each + self.share.rank * own for k in range(self.split.microbatches))
        return [row for start in starts for row in batch[start : start + own]]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor whose rows come out even."""
        parts, count = self.split.microbatches, self.share.num_replicas
        rows = whole.reshape(parts, count, len(whole) // (parts * count), *whole.shape[1:])[:, self.share.rank]
        return rows.flatten(0, 1).clone(memory_format=torch.contiguous_format)  # the whole is let go of

    def fits(self, size: int) -> bool:
        """Whether a batch of so many rows is dealt out: to several shares, and they come out even."""
        return self.share.num_replicas > 1 and self.layout((size,)) is not None

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor of a batch, of which this rank has these rows.

        Raises:
            InputError: they are not rows, or cannot be split into micro-batches.
        """
        if not local.dim():
            raise InputError("a tensor of the local batch is a scalar; give tensors with this rank's rows in dim 0")
        layout = self.layout((local.shape[0] * self.share.num_replicas, *local.shape[1:]))
        if layout is None:
            raise InputError(
                f"a rank has {number_text(local.shape[0], 'row')} of a batch, which {self.split.microbatches} micro-batches do not divide; "
                "give a multiple"
            )
        return as_dtensor(local, layout, self.mesh)

    def has_dealt(self, tensor: DTensor) -> bool:
        """Whether a tensor lies as `wrap` lets it lie."""
        layout = self.layout(tensor.shape)
        return layout is not None and tensor.device_mesh == self.mesh and list(tensor.placements) == torch_placements(layout)


DealFor = Callable[[int], Deal | None]
"""How a batch of so many rows is dealt out; None if every rank gets the whole."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch as a rank has loaded it.

    Args:
        batch: mappings, lists and tuples of tensors and other things.
        deal: of its rows; None if it is the whole for every rank.
        rows: of the whole.
        is_cut: whether its tensors have this rank's rows only, all of them; if not, those are dealt out that have as many rows.
    """

    batch: Any
    deal: Deal | None
    rows: int
    is_cut: bool

    def given(self, *, is_pinned: bool) -> Any:
        """What the loop gets; ``is_pinned``: in pinned memory."""
        if self.deal is None:
            return pin_memory(self.batch, None) if is_pinned else self.batch
        return map_tensors(lambda x: self._given(x, is_pinned=is_pinned), self.batch)

    def _given(self, x: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        assert self.deal is not None
        is_dealt = self.is_cut or (x.dim() > 0 and x.shape[0] == self.rows)
        local = x if self.is_cut or not is_dealt else self.deal.cut(x)
        local = local.pin_memory() if is_pinned else local
        return self.deal.wrap(local) if is_dealt else local


def plain(tensor: torch.Tensor, deal: Deal | None, position: int) -> torch.Tensor:
    """An input as the model takes it: a DTensor only if it was dealt out.

    Raises:
        InputError: it is a DTensor that lies otherwise.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.requires_grad:
        raise InputError(f"input {position} is a DTensor that requires a gradient; give the global batch as a plain tensor on every rank")
    if deal is not None and deal.has_dealt(tensor):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor.to_local()
    raise InputError(
        f"input {position} is a DTensor of {list(tensor.placements)}, and not of the rows that this model takes on a rank; give what "
        "autopar.local_batch or autopar.shard_loader gave, or the global batch as a plain tensor on every rank"
    )


def local_batch(batch: Any, model: nn.Module) -> Any:
    """Say that this rank holds only its own rows of a batch: give the result to the model in place of the global batch.

    The public ``autopar.local_batch``. Rank ``i`` of ``n`` (`batch_rank`) gives rows of its own, as many as each of the others, and ranks
    with the same ``i`` the same ones; no row of another is sent to it, unless the model needs all rows of an input in one place, as to
    count tokens. The global batch then is: of every micro-batch in turn, the parts that ranks 0, 1, ... ``n - 1`` have of it.

    Args:
        batch: a tensor with this rank's rows in dim 0, or mappings, lists and tuples of such tensors; anything else in it stays.
        model: of `parallelize`, which has a plan.

    Returns:
        The same with a DTensor of the global shape in place of every tensor. Ops of torch on these compute as on the whole batch; what the
        model returns are plain tensors, to hold against ``labels.full_tensor()``.

    Raises:
        InputError: a tensor has no rows, or not a multiple of the number of micro-batches.
        PlanError: there is no plan yet, from which to know what is whose; or the model is not parallel.
    """
    deal = deal_of(model)
    if deal.share.num_replicas == 1:
        return batch
    return pytree.tree_map_only(torch.Tensor, deal.wrap, batch)


def batch_rank(model: nn.Module) -> BatchRank:
    """Which rows of every global batch this rank computes on: those of ``rank`` of ``num_replicas``.

    The public ``autopar.batch_rank``; ``DistributedSampler(dataset, **autopar.batch_rank(model)._asdict())`` draws them, for `local_batch`.

    Raises:
        PlanError: there is no plan yet, or the model is not parallel.
    """
    return deal_of(model).share


def deal_of(model: nn.Module) -> Deal:
    """How the rows of a parallel model's batches are dealt out.

    Raises:
        PlanError: there is no plan yet, or the model is not parallel.
    """
    engine = getattr(model, "_autopar", None)
    if engine is None:
        raise PlanError(f"the model, a {type(model).__name__}, is not parallel; give it to autopar.parallelize first")
    deal: Deal | None = engine.deal
    if deal is None:
        raise PlanError(
            "there is no plan yet, which says whose rows are whose: give parallelize an example_batch=, or call the model once on a "
            "global batch"
        )
    return deal
