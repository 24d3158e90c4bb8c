"""Tensors of checkpoints: the rectangles of a global tensor that a rank holds, for `torch.distributed.checkpoint` (DCP) to write and fill.

A DTensor shards every dim by itself, so that its rows along a dim are some runs of global rows, one for each piece of a strided shard; its
rectangles are the products of the runs of all dims. DCP finds what two layouts share by rectangles alone: whatever wrote a tensor, any
other layout of any other number of ranks may read it. (DCP itself takes the shard of a DTensor for one rectangle, and refuses others.)
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


class Run(NamedTuple):
    """Rows of a dim that lie next to each other both in the global tensor and here."""

    start: int
    local_start: int
    length: int


def runs_of(size: int, dim: int, placements: Sequence[Placement], mesh_sizes: Sequence[int], coordinate: Sequence[int]) -> list[Run]:
    """The rows of a dim of global ``size`` that the rank at a coordinate of the mesh holds, in the order in which it holds them."""
    rows = torch.arange(size, device="cpu")
    for placement, count, position in zip(placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            rows = rows.reshape(placement.split_factor, count, -1)[:, position].reshape(-1)
        elif isinstance(placement, Shard) and placement.dim == dim:
            parts = rows.chunk(count)  # there are fewer where the ranks are more than the rows
            rows = parts[position] if position < len(parts) else rows[:0]
    breaks = [0, *(torch.nonzero(rows.diff() != 1).flatten() + 1).tolist(), len(rows)]
    return [Run(int(rows[begin]), begin, end - begin) for begin, end in pairwise(breaks) if end > begin]


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a rank holds of a tensor: DCP asks by the names in double underscores.

    Args:
        whole: global shape.
        parts: views of the local tensor by where they begin in the global one.
    """

    whole: torch.Size
    parts: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor) -> Chunks:
        """Those of a DTensor, or of a tensor that every rank holds whole."""
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return Chunks(tensor.shape, {(0,) * tensor.dim(): tensor})
        mesh, local = tensor.device_mesh, tensor.to_local()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "a rank holds no tensor of a mesh that it is not in"
        runs = [runs_of(size, dim, tensor.placements, mesh.mesh.shape, coordinate) for dim, size in enumerate(tensor.shape)]
        parts = {}
        for rectangle in product(*runs):
            part = local
            for dim, run in enumerate(rectangle):
                part = part.narrow(dim, run.local_start, run.length)
            parts[tuple(run.start for run in rectangle)] = part
        return Chunks(tensor.shape, parts)

    def fill(self, whole: torch.Tensor) -> None:
        """Take the parts from a tensor that has all of it."""
        for offsets, part in self.parts.items():
            part.copy_(whole[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))])

    def copied(self) -> Chunks:
        """The same on the host, in memory of its own."""
        return Chunks(self.whole, {offsets: part.to("cpu", copy=True) for offsets, part in self.parts.items()})

    def size(self) -> torch.Size:
        return self.whole

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_metadata(offsets, part), TensorProperties.create_from_tensor(part), self.whole),
            )
            for offsets, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_metadata(offsets, part) for offsets, part in self.parts.items()]


def _metadata(offsets: tuple[int, ...], part: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), part.shape)


class ChunkSavePlanner(DefaultSavePlanner):
    """DCP's planner, which finds the part of `Chunks` that an item names, and leaves what is no tensor in one piece."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _part(self.state_dict, index) if index.offset is not None else super().lookup_object(index)


class ChunkLoadPlanner(DefaultLoadPlanner):
    """The same for reading; what is read goes to where the part lies."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As DCP's, which knows no other tensors than torch's and would drop them."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As DCP's, onto the host: what rank 0 had on a GPU is wanted by all ranks, and on machines without one."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _part(self.state_dict, index)


def _part(state: dict[str, Any], index: MetadataIndex) -> torch.Tensor:
    chunks = state[index.fqn]
    assert isinstance(chunks, Chunks)
    assert index.offset is not None
    return chunks.parts[tuple(index.offset)]
