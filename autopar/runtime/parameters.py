"""Parameters as DTensors: the stored shard of a layout, under the original names.

A layout's shard on a factor that is not the major one is a ``_StridedShard`` of torch; so is ZeRO storage inside a tensor-parallel shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.layout import Layout, take_shard
from autopar.ops.host import on_host
from autopar.storage import split_factors


def _of_the_whole(x: object) -> list[tuple[list[TorchPlacement], list[TorchPlacement]]]:
    """How `torch.autograd.detect_anomaly` looks for NaN in a gradient: in the whole one, on all ranks of its mesh. DTensors do not know how
    to (seen: torch 2.13)."""
    return [([Replicate()], [Replicate()])]


register_sharding(torch.ops.aten._is_any_true.default)(_of_the_whole)


def torch_placements(layout: Layout) -> list[TorchPlacement]:
    """The placements of torch, one per mesh axis, applied in mesh order."""
    return [
        Replicate() if factor == 0 else Shard(placement.dim) if factor == 1 else _StridedShard(placement.dim, split_factor=factor)
        for placement, factor in zip(layout.placements, split_factors(layout), strict=True)
    ]


def hold_whole(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace every parameter by a replicated DTensor on the same memory, until a plan says how to store it.

    An optimizer made before the plan keeps hold of these objects; `store` later changes what they are, not who they are.
    """
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in whole:
                held = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.mesh.dim(), run_check=False)
                whole[id(parameter)] = nn.Parameter(held, parameter.requires_grad)
            setattr(module, name, whole[id(parameter)])


def store(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh, *, to_host: bool = False) -> None:
    """Turn a parameter that is held whole into the stored shard of its layout, in place; rank 0's values count on every rank.

    With ``to_host`` the shard is in memory of the host: a DTensor of the same mesh, whose local tensor is there.
    """
    held = parameter.detach()
    assert isinstance(held, DTensor)
    whole = from_first(held.to_local())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shard = take_shard(whole, layout, coordinate)
    keep(parameter, on_host(shard) if to_host else shard.clone(memory_format=torch.contiguous_format), layout, mesh)


def agree(buffer: torch.Tensor) -> None:
    """Give a buffer rank 0's values, in place; one that does not lie in order, as an expanded one, gets memory of its own."""
    whole = from_first(buffer)
    if not buffer.is_contiguous():
        torch.utils.swap_tensors(buffer, torch.empty_like(buffer).copy_(whole))  # as the skeleton has it


def from_first(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's values of a tensor, contiguous, on every rank: collectives read and write memory in order, whatever the strides."""
    whole = tensor.detach().contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(whole, 0)
    return whole


def keep(parameter: nn.Parameter, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> None:
    """Turn a parameter into the stored shard of its layout, in place."""
    made: Any = nn.Parameter(as_dtensor(local, layout, mesh), parameter.requires_grad)
    made._spec = _without_order(made._spec)
    _swap(parameter, made)


def _swap(parameter: nn.Parameter, made: nn.Parameter) -> None:
    """Make a parameter what another is, but for the hooks on its gradient, which a loop may have given it before there was a plan."""
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    torch.utils.swap_tensors(parameter, made)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, after


def hand_over(parameter: nn.Parameter, device: torch.device) -> None:
    """Give up a parameter that only stages of other ranks hold, with its memory; all ranks call this or `store` in the same order."""
    held = parameter.detach()
    assert isinstance(held, DTensor)
    if not is_on_meta(parameter):
        from_first(held.to_local())
    nothing: torch.Tensor = torch.empty(0, dtype=held.dtype, device=device)
    empty = DTensor.from_local(nothing, held.device_mesh, held.placements, run_check=False)
    torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=False))


def is_on_meta(parameter: torch.Tensor) -> bool:
    """Whether a parameter has no values yet."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).is_meta


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A local shard as the DTensor of its layout, wherever its memory is."""
    empty = torch.empty_like(local, device="meta")  # `from_local` moves others to the device of the mesh
    shape, stride = torch.Size(layout.shape), _contiguous(layout.shape)
    placed = DTensor.from_local(empty, mesh, torch_placements(layout), run_check=False, shape=shape, stride=stride)
    return _by(_without_order(placed._spec), local)


def whole_of(tensor: DTensor) -> torch.Tensor:
    """What all ranks hold of a tensor together."""
    return _by(_without_order(tensor._spec), tensor.to_local()).full_tensor()


def _without_order(spec: DTensorSpec) -> DTensorSpec:
    """The same shards, not read as an order of the axes where they are none, which torch 2.11 cannot make whole."""
    is_order = spec.use_strided_shard_as_shard_order
    if is_order and spec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh) is None:
        return replace(spec, use_strided_shard_as_shard_order=False)
    return spec


def _by(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """Without ``__init__``, which does nothing and takes as long as the rest: a step makes one of every gradient."""
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def like(local: torch.Tensor, owner: DTensor) -> DTensor:
    """A local tensor as a DTensor that lies as another does."""
    return _by(owner._spec, local)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
