"""Parameters as DTensors: the stored shard of a layout, under the original names.

A layout's shard on a factor that is not the major one is a ``_StridedShard`` of torch; so is ZeRO storage inside a tensor-parallel shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.layout import Layout, take_shard


def torch_placements(layout: Layout) -> list[TorchPlacement]:
    """The placements of torch, one per mesh axis, applied in mesh order.

    An axis splits what earlier axes have left of the dim: ``split_factor`` is the size of what then lies before its piece.
    """
    placements: list[TorchPlacement] = []
    for axis, placement in enumerate(layout.placements):
        if not placement.is_sharded:
            placements.append(Replicate())
            continue
        before = 1
        for piece in layout.pieces(placement.dim):
            if piece.axis == axis:
                break
            before *= 1 if piece.axis is not None and piece.axis < axis else piece.size
        is_strided = before > 1
        placements.append(_StridedShard(placement.dim, split_factor=before) if is_strided else Shard(placement.dim))
    return placements


def shard_parameter(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    """The stored shard of a whole parameter; rank 0's values count on every rank."""
    whole = parameter.detach()
    if dist.get_world_size() > 1:
        whole = whole.clone()
        dist.broadcast(whole, 0)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = take_shard(whole, layout, coordinate).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(as_dtensor(local, layout, mesh), requires_grad=parameter.requires_grad)


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A local shard as the DTensor of its layout."""
    return DTensor.from_local(
        local, mesh, torch_placements(layout), run_check=False, shape=torch.Size(layout.shape), stride=_contiguous(layout.shape)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def replace_parameter(model: nn.Module, names: Sequence[str], new: nn.Parameter) -> None:
    """Put ``new`` where the parameter called ``names`` is. The Python object stays the same, so that optimizers made before hold the new one."""
    owner, _, leaf = names[0].rpartition(".")
    old = getattr(model.get_submodule(owner), leaf)
    torch.utils.swap_tensors(old, new)
