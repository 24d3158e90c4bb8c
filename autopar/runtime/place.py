"""Where this rank stands under a plan: its position on the mesh of its stages, in its pipeline, and whom it talks to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar.plan import Plan
from autopar.runtime.groups import axis_groups, connect, coordinates, local_device
from autopar.runtime.transfer import Transfers, open_circle, open_transfers


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank stands.

    Args:
        mesh: of its stages.
        ranks: of its pipeline, by position; without one only itself.
        position: among them.
        line: process group of the pipeline; None without one.
        transfers: messages to its neighbours.
        circles: process groups of the positions that share parameters.
        rank_inputs: coordinates on the axes of ``mesh``.
        norm_dtype: of norms of gradients over the pipeline.
    """

    mesh: DeviceMesh
    ranks: tuple[int, ...]
    position: int
    line: dist.ProcessGroup | None
    transfers: Transfers
    circles: Mapping[tuple[int, ...], dist.ProcessGroup]
    rank_inputs: tuple[torch.Tensor, ...]
    norm_dtype: torch.dtype

    def is_home(self, stages: Sequence[int]) -> bool:
        """Whether this rank runs one of these stages."""
        return any(stage % len(self.ranks) == self.position for stage in stages)


def shared_positions(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameters that stages of several ranks use, with the positions of those ranks."""
    found = {p.name: tuple(sorted({stage % plan.pipeline.degree for stage in p.stages})) for p in plan.parameters}
    return {name: positions for name, positions in found.items() if len(positions) > 1}


def _norm_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """The widest that the norm of one of them has, float32 at least."""
    return torch.float64 if any(p.dtype in (torch.float64, torch.complex128) for p in parameters) else torch.float32


def take_place(plan: Plan, grid: DeviceMesh, parameters: Iterable[torch.Tensor]) -> Place:
    """Find this rank's place under a plan; makes the process groups that it needs and that are not there, with all other ranks.

    Args:
        plan: the plan.
        grid: the DeviceMesh of all ranks, ``plan.grid``.
        parameters: of the model, also those of other ranks' stages.
    """
    pipeline, device = plan.pipeline, local_device(grid.device_type)
    dtype = _norm_dtype(parameters)
    if pipeline.degree == 1:
        alone = (dist.get_rank(),)
        return Place(grid, alone, 0, None, Transfers(alone, 0, device, {}), {}, tuple(coordinates(grid)), dtype)
    inside = grid[plan.mesh.names]
    line = grid.get_group(pipeline.axis)
    ranks = tuple(dist.get_process_group_ranks(line))
    position = ranks.index(dist.get_rank())
    for group in (line, *axis_groups(inside).values()):
        connect(group, device)
    shared = dict.fromkeys(shared_positions(plan).values())
    found = {positions: open_circle(ranks, positions, position, device) for positions in shared}
    circles = {positions: group for positions, group in found.items() if group is not None}
    transfers = open_transfers(ranks, position, device)
    return Place(inside, ranks, position, line, transfers, circles, tuple(coordinates(inside)), dtype)


def norm_over_line(
    grads: Sequence[torch.Tensor], norm_type: float, place: Place, *, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all gradients of a pipeline, of which this rank counts ``grads``: the same number in the same dtype on all ranks, or
    copies of one parameter on two of them would part. All see the same too of what is not finite.

    Raises:
        RuntimeError: that of torch, on all ranks, if the norm is not finite and ``error_if_nonfinite``.
    """
    device = place.transfers.device
    norm = get_total_norm(grads, norm_type, foreach=foreach) if grads else torch.zeros((), device=device)
    norms = torch.zeros(len(place.ranks), dtype=torch.float64, device=device)
    norms[place.position] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    dist.all_reduce(norms, group=place.line)
    return get_total_norm([norms], norm_type, error_if_nonfinite).to(place.norm_dtype)
