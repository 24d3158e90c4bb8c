"""Seconds of a collective on one mesh axis.

n ranks, S bytes of the whole buffer, latency alpha per step, B bytes/s per rank and direction; each also takes ``base_s`` once:

| kind           | seconds                                 | algorithm                                            |
|----------------|-----------------------------------------|------------------------------------------------------|
| all_reduce     | 2 (n-1) alpha + 2 (n-1)/n S/B           | ring, Patarasu & Yuan 2009                           |
|                | or 2 ceil(log2 n) alpha + 2 S/B if less | double binary tree, Sanders et al. 2009              |
| all_gather     | (n-1) alpha + (n-1)/n S/B               | ring, Thakur et al. 2005                             |
| reduce_scatter | (n-1) alpha + (n-1)/n S/B               | ring, Patarasu & Yuan 2009                           |
| all_to_all     | (n-1) alpha + (n-1)/n S/B               | pairwise exchange, Thakur et al. 2005                |
| broadcast      | (n-1) alpha + S/B                       | pipelined ring, as NCCL does it                      |
| send           | alpha + S/B                             | a message to the next rank, while others send theirs |

Where r ranks of a group share each of N nodes, algorithms are hierarchical, as NCCL's are (src/graph/tuning.cc): of the n-1 steps of a ring
N-1 cross nodes and the others take the alpha inside, trees span nodes and end in chains inside of them, and what crosses goes through all
ports (``LinkProfile.lanes``). Of the n-1 exchanges of all_to_all r-1 stay inside. Of r ranks next to each other one sends to the next node,
by up to r times its part of a port that the ranks of the node share (``LinkProfile.alone``). Pods of nodes are to nodes as these are to
devices, but that trees span them too.

A library may have several protocols, quick to begin or fast, of which it takes the best for each message (``LinkProfile.protocols``).

Where the link was measured, the formula is corrected by (measured / formula) at that message size, so that at the measured
group size and within the measured range the result *is* the log-log interpolation of the measurements. It also tells what a library
makes of a collective: gloo, for one, reduces and scatters by reducing all, which sends twice as much. No message takes longer than a larger
one that was measured: what disturbed a measurement only made it longer, and what a size of groups lost there another need not lose. Nor
does any take less between nodes than the same ranks would inside of one, where small messages may have been measured to take long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost.machine import KINDS, LinkProfile

BETWEEN_ROWS = 8
"""Sizes of messages from one that was measured to the next at which the formulas are evaluated."""


def ring_terms(kind: str, size: int) -> tuple[float, float]:
    """Steps, and bytes that pass each rank per byte of the whole buffer, of the ring (all_to_all: pairwise) algorithm."""
    part = (size - 1) / size
    return {
        "all_reduce": (2.0 * (size - 1), 2 * part),
        "all_gather": (size - 1.0, part),
        "reduce_scatter": (size - 1.0, part),
        "all_to_all": (size - 1.0, part),
        "broadcast": (size - 1.0, 1.0),
        "send": (1.0, 1.0),
    }[kind]


def _model_s(kind: str, num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    """The formulas above, by the protocol that is the fastest."""
    ways = [_protocol_s(kind, num_bytes, size, link)]
    ways += [_protocol_s(kind, num_bytes, size, link.by_protocol(i)) for i in range(len(link.protocols))]
    return np.asarray(np.min(ways, axis=0))


def _protocol_s(kind: str, num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    if kind == "all_to_all":
        return np.asarray(link.base_s + _pairwise_s(num_bytes / size, size, link))
    steps, passing = ring_terms(kind, size)
    byte_s = num_bytes / (link.bandwidth * (min(link.alone, link.ranks_inside) if kind == "send" else link.lanes))
    latency_s = link.alpha_s if kind == "send" else steps / (size - 1) * _ring_latency_s(size, link)
    time_s = latency_s + passing * byte_s
    if kind == "all_reduce":
        time_s = np.minimum(time_s, 2 * _tree_latency_s(size, link) + 2 * byte_s)
    return np.asarray(link.base_s + time_s)


def _pairwise_s(num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    """Of ``num_bytes`` to every other rank, one after the other."""
    near = 1 if link.inside is None else link.ranks_inside
    time_s = (size - near) * (link.alpha_s + num_bytes / link.bandwidth)
    return time_s if link.inside is None else time_s + _pairwise_s(num_bytes, near, link.inside)


def _ring_latency_s(size: int, link: LinkProfile) -> float:
    """Of a message once around, which ends where it would begin again."""
    if link.inside is None:
        return (size - 1) * link.alpha_s
    nodes = math.ceil(size / link.ranks_inside)
    return (nodes - 1) * link.alpha_s + nodes * _ring_latency_s(link.ranks_inside, link.inside)


def _tree_latency_s(size: int, link: LinkProfile) -> float:
    """From the leaves to the root."""
    if link.inside is None:
        return math.ceil(math.log2(size)) * link.alpha_s
    nodes = math.ceil(size / link.ranks_inside)
    below = _tree_latency_s if link.inside.is_network else _ring_latency_s
    return math.ceil(math.log2(nodes)) * link.alpha_s + below(link.ranks_inside, link.inside)


def _correction(kind: str, num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    """Measured over modelled time at the measured group size, held constant outside the measured range; groups that several ranks of a node
    are in were not measured, and have that of the groups with one each.

    A kind that was not measured is taken to be as inefficient as all-reduce, where that was: nodes with switches that reduce
    make all-reduce better than the formula, which says nothing of the others, so gains are not carried over. Groups of fewer ranks of
    such a node gain less, and few enough of them nothing (``LinkProfile.lone_ranks``).
    """
    rows = link.measured.get(kind) or link.measured.get("all_reduce")
    if not rows:
        return np.ones(())
    sizes, times = np.log(np.array(rows, dtype=float).T)
    at = np.exp(np.clip(np.log(np.maximum(num_bytes, 1.0)), sizes[0], sizes[-1]))
    stand_in = kind if kind in link.measured else "all_reduce"
    as_measured = replace(link, lanes=1.0, inside=None, ranks_inside=1)
    ratio = np.exp(np.interp(np.log(at), sizes, times)) / _model_s(stand_in, at, link.group_size, as_measured)
    if stand_in != kind:
        return np.asarray(np.maximum(ratio, 1.0))
    if link.lone_ranks and size < link.group_size:
        gained = max(0.0, (size - link.lone_ranks) / (link.group_size - link.lone_ranks))
        ratio = np.where(ratio < 1, 1 - gained * (1 - ratio), ratio)
    return np.asarray(ratio)


@lru_cache(maxsize=1 << 12)
def _rising(kind: str, size: int, link: LinkProfile) -> tuple[np.ndarray, np.ndarray]:
    """Within the measured range, in logarithms: sizes of messages, and seconds of each or of the quickest of the larger ones."""
    measured = np.log([num_bytes for num_bytes, _ in link.measured.get(kind) or link.measured.get("all_reduce") or ()])
    places = np.arange((len(measured) - 1) * BETWEEN_ROWS + 1) / BETWEEN_ROWS
    sizes = np.interp(places, np.arange(len(measured)), measured) if len(measured) else measured
    return sizes, np.minimum.accumulate(np.log(_corrected_s(kind, np.exp(sizes), size, link))[::-1])[::-1]


def _corrected_s(kind: str, num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    return np.asarray(_model_s(kind, num_bytes, size, link) * _correction(kind, num_bytes, size, link))


def _rising_s(kind: str, num_bytes: np.ndarray, size: int, link: LinkProfile) -> np.ndarray:
    """Seconds by the formulas and what was measured, no more than of a larger message."""
    time_s = _corrected_s(kind, num_bytes, size, link)
    sizes, times = _rising(kind, size, link)
    if not sizes.size:
        return time_s
    at = np.log(np.maximum(num_bytes, 1.0))
    most = np.exp(np.interp(at, sizes, times))
    return np.asarray(np.where(at > sizes[-1], time_s, np.where(at < sizes[0], np.minimum(time_s, most), most)))


def collective_time_s(kind: str, num_bytes: ArrayLike, size: int, link: LinkProfile) -> np.ndarray:
    """Seconds of one collective.

    Args:
        kind: one of `KINDS`.
        num_bytes: bytes of the whole buffer, a number or an array: the gathered one; the reduced one; for all_to_all what each
            rank holds; for send the message.
        size: ranks of a group; one rank takes no time.
        link: the link of the axis.
    """
    assert kind in KINDS and size >= 1
    num_bytes = np.asarray(num_bytes, dtype=float)
    if size == 1:
        return np.zeros_like(num_bytes)
    time_s = _rising_s(kind, num_bytes, size, link)
    if link.inside is not None and kind != "send":  # no less than if all were in one node
        time_s = np.maximum(time_s, collective_time_s(kind, num_bytes, size, link.inside))
    return np.asarray(time_s)


@lru_cache(maxsize=1 << 10)
def are_no_slower(links: tuple[LinkProfile, ...], others: tuple[LinkProfile, ...], sizes: tuple[int, ...]) -> bool:
    """Whether collectives of groups of ``sizes`` take no longer on links than on others, and hide as well, from messages of 1 MB on, which
    are what takes the time of a step."""
    num_bytes = np.logspace(6, 10, 9)
    for link, other, size in zip(links, others, sizes, strict=True):
        if link == other:
            continue
        if link.overlap < other.overlap or link.crowded_s > other.crowded_s:
            return False
        kinds = [kind for kind in KINDS if kind != "send"]  # goes between stages
        if any(np.any(collective_time_s(kind, num_bytes, size, link) > collective_time_s(kind, num_bytes, size, other)) for kind in kinds):
            return False
    return True


def send_time_s(num_bytes: ArrayLike, link: LinkProfile) -> np.ndarray:
    """Seconds of a message of ``num_bytes`` from one rank to its neighbour."""
    return collective_time_s("send", num_bytes, 2, link)
