"""Copies between the memories of host and device: started in one place of a graph, waited for in another.

On CUDA a copy runs on a stream of its own for each direction, from and to page-locked memory, so that both directions and the computation
run at the same time:

- `leave`: the copying stream waits for what has been computed so far; the memory of what leaves is not given to others before it is read.
- `fetch`: the memory for what comes is taken from the computing stream, whose earlier work may still use it, so that the copying stream
  waits for that too: a copy starts where its place in the graph is reached.
- `arrive`: the computing stream waits for the copy; what is computed next may read it.

On CPUs host and device are one memory, and a copy is a tensor of its own that is there at once.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_under_way = WeakTensorKeyDictionary()
"""The event at which each tensor that is on its way is there."""
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def leave(x: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to the host. Before the host reads it, `settle`."""
    if x.device.type == "cpu":
        return torch.empty_like(x).copy_(x)
    stream = _stream(x.device, "to host")
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        made = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        x.record_stream(stream)
        _under_way[made] = stream.record_event()
    return made


def fetch(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy a tensor from the host. Before it is read, `arrive`."""
    made = torch.empty_like(x, device=device)
    if device.type == "cpu":
        return made.copy_(x)
    stream = _stream(made.device, "from host")
    stream.wait_stream(torch.cuda.current_stream(made.device))
    if x in _under_way:
        stream.wait_event(_under_way[x])
    with torch.cuda.stream(stream):
        made.copy_(x, non_blocking=True)
        _under_way[made] = stream.record_event()
    return made


def arrive(x: torch.Tensor) -> torch.Tensor:
    """Wait for what `fetch` has started."""
    event = _under_way.pop(x, None)
    if event is not None:
        torch.cuda.current_stream(x.device).wait_event(event)
    return x


def settle() -> None:
    """Wait on the host for all copies: it may read what has left, and write to what has been fetched."""
    for stream in _streams.values():
        stream.synchronize()


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the host that devices copy from and to beside their work."""
    made = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda", memory_format=torch.contiguous_format)
    return made.copy_(x)


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    key = device, direction
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    return _streams[key]
