"""Seconds of a collective on one mesh axis.

n ranks, S bytes of the whole buffer, latency alpha per step, B bytes/s per rank and direction; each also takes ``base_s`` once:

============== ================================================ ==========================================
all_reduce     2 (n-1) alpha + 2 (n-1)/n S/B                    ring, Patarasu & Yuan 2009
               or 2 ceil(log2 n) alpha + 2 S/B if that is less  double binary tree, Sanders et al. 2009
all_gather     (n-1) alpha + (n-1)/n S/B                        ring, Thakur et al. 2005
reduce_scatter (n-1) alpha + (n-1)/n S/B                        ring, Patarasu & Yuan 2009
all_to_all     (n-1) alpha + (n-1)/n S/B                        pairwise exchange, Thakur et al. 2005
broadcast      (n-1) alpha + S/B                                pipelined ring, as NCCL does it
send           alpha + S/B                                      a message to the next rank, while others send theirs
============== ================================================ ==========================================

Where the link was measured, the formula is corrected by (measured / formula) at that message size, so that at the measured
group size and within the measured range the result *is* the log-log interpolation of the measurements. It also tells what a library
makes of a collective: gloo, for one, reduces and scatters by reducing all, which sends twice as much.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from autopar.cost.machine import LinkProfile

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


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
    """The formulas above."""
    steps, passing = ring_terms(kind, size)
    lanes = 1.0 if kind in ("all_to_all", "send") else link.lanes
    byte_s = num_bytes / (link.bandwidth * lanes)
    time_s = steps * link.alpha_s + passing * byte_s
    if kind == "all_reduce":
        time_s = np.minimum(time_s, 2 * math.ceil(math.log2(size)) * link.alpha_s + 2 * byte_s)
    return np.asarray(link.base_s + time_s)


def _correction(kind: str, num_bytes: np.ndarray, link: LinkProfile) -> np.ndarray:
    """Measured over modelled time at the measured group size, held constant outside the measured range; groups that several ranks of a node
    are in were not measured, and have that of the groups with one each.

    A kind that was not measured is taken to be as inefficient as all-reduce, where that was: nodes with switches that reduce
    make all-reduce better than the formula, which says nothing of the others, so gains are not carried over.
    """
    rows = link.measured.get(kind) or link.measured.get("all_reduce")
    if not rows:
        return np.ones(())
    sizes, times = np.log(np.array(rows, dtype=float).T)
    at = np.exp(np.clip(np.log(np.maximum(num_bytes, 1.0)), sizes[0], sizes[-1]))
    stand_in = kind if kind in link.measured else "all_reduce"
    ratio = np.exp(np.interp(np.log(at), sizes, times)) / _model_s(stand_in, at, link.group_size, replace(link, lanes=1.0))
    return np.asarray(ratio if stand_in == kind else np.maximum(ratio, 1.0))


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
    return np.asarray(_model_s(kind, num_bytes, size, link) * _correction(kind, num_bytes, link))


def send_time_s(num_bytes: ArrayLike, link: LinkProfile) -> np.ndarray:
    """Seconds of a message of ``num_bytes`` from one rank to its neighbour."""
    return collective_time_s("send", num_bytes, 2, link)
