"""Why the search leaves shapes out."""

from __future__ import annotations

from enum import Enum


class Bound(Enum):
    """Why a shape is not tried, in words that follow a number of shapes, which may be 1."""

    OPS = "with more stages than the model has ops with parameters to train"
    STAGES = "with more stages than the model has equal blocks and ends"
    ALIKE = "with stages on an axis whose links are those of another"
    WORK = "slower by work and bubble"
    LONGEST_RANK = "slower by what ranks compute"
    BLOCKS = "slower however their stages share equal blocks (likely, not proved)"
    PATIENCE = "with more micro-batches where more were no faster (likely, not proved)"
    LINKS = "on links no faster than those on which the same shards were slower (likely, not proved)"
    ENOUGH = "after one that fits, or after as many as are tried"
