"""Groups of gloo that run their collectives one at a time, as those of NCCL do.

torch's own groups run two at a time, in two threads, and each thread writes the name of what it has done to one string, without a lock
(``ProcessGroupGloo::runLoop``, torch 2.11 to 2.13: ``pgStatus_->lastCompletedWorkName``). Names of more than 15 letters lie on the heap;
all-gathers of tensors have such a name, ``ALLGATHER_COALESCED``. A thread that writes to the string while the other frees it breaks the
heap of the process: it ends, or waits for ever (`benchmarks/gloo_in_flight.py` shows it in seconds, with plain torch).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

BACKEND = "autopar_gloo"
"""Name under which torch knows what makes such groups."""
_CPU = torch.device("cpu")
_in_order: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def open_in_order(mesh: DeviceMesh) -> None:
    """Make a group that runs its collectives in order beside each axis group of gloo; all ranks of the job call this together.

    Groups of other backends are in order or have no threads, and stay alone.
    """
    if mesh.device_type != _CPU.type:
        return
    for axis in range(mesh.ndim):
        own = mesh.get_group(axis)
        if own.size() == 1 or own in _in_order or not isinstance(own._get_backend(_CPU), dist.ProcessGroupGloo):
            continue
        lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
        timeout = own._get_backend(_CPU).options._timeout
        made, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout, backend=_backend())
        assert made is not None
        _in_order[own] = made


def in_order(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What runs the collectives of an axis group: the group that `open_in_order` has made for it, or itself."""
    return _in_order.get(group, group)


def _backend() -> str:
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    return BACKEND


def _make(about: Any, _: object) -> dist.ProcessGroupGloo:
    """As torch makes its own groups of gloo, but for the number of threads."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads, options._timeout = 1, about.timeout
    options.global_ranks_in_group, options.group_name = about.global_ranks_in_group, about.group_id
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    create = dist.ProcessGroupGloo.create_device
    default = dist.ProcessGroupGloo.create_default_device
    options._devices = [create(interface=name) for name in interfaces.split(",")] if interfaces else [default()]
    made = dist.ProcessGroupGloo(about.store, about.group_rank, about.group_size, options)
    made._set_sequence_number_for_group()
    return made
