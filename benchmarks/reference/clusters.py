"""The cluster of a record, in shipped profiles of devices and links."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from fields import RecordError
from names import POWER_LIMITED
from records import Record
from stacks import Stack

import autopar
from autopar.cost.cluster import named_device, named_overlap
from autopar.cost.device import DeviceProfile, Stream
from autopar.cost.machine import ASSUMED_OVERLAP, LinkProfile, MachineProfile
from autopar.mesh import Mesh

GPUS = {
    "V100-16GB": ("v100", 100),
    "V100-32GB": ("v100", 100),
    "A100-40GB": ("a100-40gb", 200),
    "A100-80GB": ("a100-80gb", 200),
    "H100-80GB": ("h100", 400),
    POWER_LIMITED: ("h100", 400),
    "H200": ("h200", 400),
    "B200": ("b200", 400),
}
"""Of the records: the shipped profile, and Gb/s to other nodes where a record does not say."""
MEMORY_GIB = {"V100-16GB": 16, POWER_LIMITED: 96}
"""Where it is not that of the profile."""
FABRICS = {50: "ib-50", 100: "ib-100", 200: "ib-200", 400: "ib-400", 800: "ib-800"}
"""Shipped links by Gb/s of each GPU; others are the nearest of them, with as much more bandwidth, or less."""
OMNI_PATH, OMNI_PATH_LINK = "bigscience-workshop/bigscience", "opa-100"
"""Whose runs were on Jean Zay, which has another fabric of as many Gb/s."""
SUSTAINED = {"H100": 0.92, "H200": 0.92, "B200": 0.92}
"""What is left of the clock of a cool device under hours of load, where the power limit is below what the chip could use: modelled."""
UNCLOCKED_W = 100
"""Watts of an H100 that do not depend on its clock: memory and leakage; modelled."""
BEFORE_REPAIR = ("chronicles-prequel.md (02-21)", "chronicles-prequel.md (02-23)", "chronicles-prequel.md (02-24)")
"""Runs on Jean Zay before "A100s PCI-Express/NUMA was improved today so all TFLOPs have changed for the better" on 2022-02-25."""
UNREPAIRED = 0.95
"""What is left of the clock there, by the seven configurations that the page has from both before and after: 4 to 8 % more time, 5.3 % in
the mean."""
PRECISIONS = {"fp16": (torch.float16, 1.0), "bf16": (torch.bfloat16, 1.0), "bf16-pure": (torch.bfloat16, 1.0), "fp8": (torch.bfloat16, 1.6)}
"""Of the records: the dtype of the model, and how much faster its products are: by 8 bits twice, less casts and transposes (modelled)."""


def _gpu(record: Record) -> tuple[str, int]:
    """Its shipped profile, and Gb/s of each to other nodes where a record does not say."""
    if record.gpu not in GPUS:
        raise RecordError(f"no profile for GPU {record.gpu!r}; there are {', '.join(GPUS)}")
    return GPUS[record.gpu]


def device_of(record: Record, stack: Stack) -> DeviceProfile:
    """The device as the record's software uses it, after hours of load."""
    return stack.device(bare_device(record), record.chip)


def bare_device(record: Record) -> DeviceProfile:
    """The device as torch's own kernels use it, after hours of load, which slows products: what moves bytes draws less than the limit."""
    device = named_device(_gpu(record)[0])
    times = SUSTAINED.get(record.chip, 1.0) * PRECISIONS[record.precision][1]
    times *= UNREPAIRED if any(page in record.source for page in BEFORE_REPAIR) else 1.0
    if record.gpu == POWER_LIMITED:  # less bandwidth by its data sheet, the clock by the cube root of what power is left for it
        bandwidth = device.memory_bandwidth * 2.4 / 3.35
        streams = {name: Stream(*(min(rate, bandwidth) for rate in rates)) for name, rates in device.streams.items()}
        device = replace(device, memory_bandwidth=bandwidth, streams=streams)
        times *= ((500 - UNCLOCKED_W) / (700 - UNCLOCKED_W)) ** (1 / 3)
    if record.gpu in MEMORY_GIB:
        device = replace(device, memory_bytes=MEMORY_GIB[record.gpu] * 2**30)
    return replace(device, matmul=tuple(sample.times(times) for sample in device.matmul))


def stack_on(record: Record, stack: Stack) -> Stack:
    """The stack on the record's device, where collectives that hide take more of computation than elsewhere, or less."""
    more = ASSUMED_OVERLAP - named_overlap(_gpu(record)[0])
    return replace(stack, data_overlap=max(0.0, stack.data_overlap - more))


def machine_of(record: Record, stack: Stack) -> MachineProfile:
    """The machine as the record's software uses it; links as in `links_of`."""
    pipe, data, tensor = links_of(record)
    return MachineProfile(device_of(record, stack), (pipe, stack.data_link(data), stack.tensor_link(tensor)))


def links_of(record: Record) -> tuple[LinkProfile, ...]:
    """Of the pipeline, of data and of tensor parallelism, in this order from the outermost."""
    nodes, per_node = max(1, record.num_gpus // record.gpus_per_node), min(record.num_gpus, record.gpus_per_node)
    grid = Mesh(("pp", "dp", "tp"), (record.pp, record.dp * record.cp, record.tp))
    if grid.num_ranks != record.num_gpus:
        raise RecordError(f"pp * dp * cp * tp = {grid.num_ranks}, but the run had {record.num_gpus} GPUs")
    gbps, nearest = _gbps(record)
    fabric = OMNI_PATH_LINK if record.publisher == OMNI_PATH else FABRICS[nearest]
    links = autopar.Cluster(nodes, per_node, _gpu(record)[0], fabric).with_mesh(grid).profile.links
    times = 1.0 if fabric == OMNI_PATH_LINK else gbps / nearest
    return tuple(_scaled(link, times) for link in links)


def assumed_link(record: Record) -> str | None:
    """What link the nodes of a record are taken to have where none is shipped for its Gb/s, in words."""
    gbps, nearest = _gbps(record)
    if record.num_gpus <= record.gpus_per_node or gbps == nearest or record.publisher == OMNI_PATH:
        return None
    return f"{gbps:g} Gb/s per GPU scaled from {FABRICS[nearest]}"


def _gbps(record: Record) -> tuple[float, int]:
    """Of each GPU to other nodes, and of the shipped link that is nearest to it."""
    gbps = record.inter_gbps or _gpu(record)[1]
    return gbps, min(FABRICS, key=lambda shipped: abs(math.log(shipped / gbps)))


def _scaled(link: LinkProfile, times: float) -> LinkProfile:
    """A link between nodes with so many times the bandwidth, of which a ring still has no more than what is inside carries."""
    if not link.is_network or times == 1:
        return link
    found = replace(link, bandwidth=link.bandwidth * times)
    if link.inside is None:
        return found
    inside = _scaled(link.inside, times)
    lanes = max(1.0, min(link.ranks_inside, inside.bandwidth * inside.lanes / found.bandwidth))
    return replace(found, inside=inside, lanes=lanes)
