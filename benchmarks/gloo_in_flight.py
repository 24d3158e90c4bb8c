"""Collectives in flight on one group of torch's gloo break the heap: two threads write to one string (`autopar.gloo` says which).

    torchrun --nproc-per-node 2 benchmarks/gloo_in_flight.py [all_gather reduce_scatter] [--in-flight 2] [--seconds 60] [--in-order]

Plain torch, and none of autopar but for ``--in-order``, with which the group is one that autopar runs its graphs on. Rank 0 prints how many
collectives were right; or a rank ends with ``malloc(): unaligned tcache chunk detected`` or a segmentation fault, or all wait for ever.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.gloo import in_order, open_in_order

_c10d = torch.ops._c10d_functional
LENGTHS = (3000, 96, 9000, 12, 30000, 48)
"""Of the tensors, in turn."""


def start(kind: str, x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, float]:
    """A collective that has started, and what its result is filled with."""
    name, size = group.group_name, dist.get_world_size()
    value = float(x[0])
    if kind == "all_gather":
        return _c10d.all_gather_into_tensor(x, size, name), value
    if kind == "all_reduce":
        return _c10d.all_reduce(x, "sum", name), value * size
    if kind == "reduce_scatter":
        return _c10d.reduce_scatter_tensor(x, "sum", size, name), value * size
    splits = [x.numel() // size] * size
    return _c10d.all_to_all_single(x, splits, splits, name), value


def end(on_its_way: tuple[torch.Tensor, float]) -> None:
    result, expected = _c10d.wait_tensor(on_its_way[0]), on_its_way[1]
    if not bool((result == expected).all()):
        raise RuntimeError(f"rank {dist.get_rank()}: a result of {expected} is {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
    parser.add_argument("kinds", nargs="*", default=["all_gather", "reduce_scatter"], help=f"done in turn: {', '.join(kinds)}")
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--in-order", action="store_true", help="on a group that runs them one at a time")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"no collective is called {', '.join(sorted(unknown))}: choose from {', '.join(kinds)}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if args.in_order:
        open_in_order(mesh)
    group = in_order(mesh.get_group())
    began, count, go_on = time.monotonic(), 0, torch.ones(1)
    flight: deque[tuple[torch.Tensor, float]] = deque()
    while go_on.item():
        for k in range(1200):
            kind, length = args.kinds[k % len(args.kinds)], LENGTHS[k % len(LENGTHS)]
            flight.append(start(kind, torch.full((length,), float(k)), group))
            if len(flight) >= args.in_flight:
                end(flight.popleft())
            count += 1
        while flight:
            end(flight.popleft())
        go_on[0] = float(time.monotonic() - began < args.seconds)
        dist.broadcast(go_on, 0)
    if dist.get_rank() == 0:
        print(f"{count} collectives, {args.in_flight} in flight: all right", flush=True)
    os._exit(0)  # nothing else may be freed: what is broken would show there too


if __name__ == "__main__":
    main()
