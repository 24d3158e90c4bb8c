"""What optimizers of torch take: state, memory while they step, passes through memory. Bytes are those of one rank.

| optimizer      | state of a parameter                                                              | source                 |
|----------------|-----------------------------------------------------------------------------------|------------------------|
| adam, adamw    | two moments                                                                       | Kingma & Ba, 2015      |
| `MASTER`       | and a float32 copy                                                                | Micikevicius et al.    |
| ..._amsgrad    | and the largest second moment                                                     | Reddi et al., 2018     |
| nadam, radam   | two moments                                                                       | torch.optim            |
| adamax         | a moment and the largest gradient                                                 | Kingma & Ba, 2015      |
| adadelta       | mean squares of gradients and of updates                                          | Zeiler, 2012           |
| adagrad        | the sum of squares                                                                | Duchi et al., 2011     |
| rmsprop        | their mean; with momentum or centered one more                                    | torch.optim.RMSprop    |
| asgd           | the mean of the parameter                                                         | torch.optim.ASGD       |
| sgd_momentum   | one                                                                               | torch.optim.SGD        |
| `FACTORED`     | of a matrix the mean squares of its rows and of its columns, else of its elements | Shazeer & Stern, 2018  |

`FACTORED` needs norms of whole parameters: those that are sharded are gathered one by one, with their gradients, and every rank updates all
of them (`runtime.optimizers`). So its factors are whole on every rank.

Not here: Rprop and Muon, which work on whole parameters too, Muon on matrices alone, so that another optimizer has the rest; LBFGS, which
sharded parameters refuse; SparseAdam, which dense gradients refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ADAM_STATE_BYTES = 8
"""Two float32 moments for each parameter (Kingma & Ba 2015)."""
FLOAT32_WIDTH = 4
MASTER, MASTER_WIDTH = "adamw_master", FLOAT32_WIDTH
"""AdamW that keeps a float32 copy of parameters that are in 16 bits, and the bytes of its elements."""
FACTORED = "adafactor"
OPTIMIZER_STATE_BYTES = {
    "adamw": ADAM_STATE_BYTES,
    "adam": ADAM_STATE_BYTES,
    "adamw_fused": ADAM_STATE_BYTES,
    "adam_fused": ADAM_STATE_BYTES,
    MASTER: ADAM_STATE_BYTES + MASTER_WIDTH,
    "sgd": 0,
    "sgd_momentum": 4,
    FACTORED: 0,
    "adamw_amsgrad": ADAM_STATE_BYTES + 4,
    "adam_amsgrad": ADAM_STATE_BYTES + 4,
    "nadam": 8,
    "radam": 8,
    "adamax": 8,
    "adadelta": 8,
    "adagrad": 4,
    "adagrad_fused": 4,
    "rmsprop": 4,
    "rmsprop_momentum": 8,
    "rmsprop_centered": 8,
    "asgd": 4,
}
"""Optimizer state in bytes per element of a parameter in float32. Torch has it in the dtype of the parameter (``zeros_like``), so that in
16 bits it is half of that, but for `MASTER`, whose moments are in float32 (`state_bytes`, where also is what `FACTORED` has)."""
UPDATE_COPIES = {
    "adamw": 2,
    "adam": 2,
    FACTORED: 1,
    "adamw_amsgrad": 2,
    "adam_amsgrad": 2,
    "nadam": 2,
    "radam": 5,
    "adamax": 1,
    "adadelta": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "rmsprop_momentum": 1,
    "rmsprop_centered": 1,
}
"""Tensors like a parameter that an optimizer has beside it while it steps: of Adam the root of the second moment, and the same after its
division; of `FACTORED` the update. The loop of torch over parameters is meant, that of CPUs; ``fused=True`` takes none."""
FOREACH_COPIES = {
    "adamw": 1,
    "adam": 1,
    "adamw_amsgrad": 1,
    "adam_amsgrad": 1,
    "nadam": 1,
    "radam": 1,
    "adamax": 1,
    "adadelta": 2,
    "adagrad": 2,
    "rmsprop": 1,
    "rmsprop_momentum": 1,
    "rmsprop_centered": 1,
    "asgd": 1,
}
"""The same of ``foreach``, the default of GPUs, which has them of all parameters at one time."""
WHOLE_COPIES = 3
"""What `FACTORED` has of a sharded parameter: it, its gradient and the update, all whole."""
ONE_KERNEL = (3.0, 2.0)
FACTORED_MATRIX, FACTORED_VECTOR = (17.0, 9.5), (16.0, 3.0)
UPDATE_PASSES = {
    "adamw": (12.0, 4.0),
    "adam": (10.0, 4.0),
    "adamw_fused": ONE_KERNEL,
    "adam_fused": ONE_KERNEL,
    MASTER: ONE_KERNEL,
    "sgd": (3.0, 0.0),
    "sgd_momentum": (3.0, 5.0),
    "adamw_amsgrad": (12.0, 11 / 3),
    "adam_amsgrad": (10.0, 11 / 3),
    "nadam": (14.0, 4.0),
    "radam": (20.0, 4.0),
    "adamax": (8.0, 4.0),
    "adadelta": (17.0, 5.0),
    "adagrad": (8.0, 3.0),
    "adagrad_fused": ONE_KERNEL,
    "rmsprop": (8.0, 5.0),
    "rmsprop_momentum": (8.0, 5.0),
    "rmsprop_centered": (11.0, 4.0),
    "asgd": (6.0, 2.0),
}
"""How often an update reads or writes a parameter and what is like it (its gradient, copies), and how often its state. Counted from the ops
of torch's defaults (``_single_tensor_*`` and ``_multi_tensor_*`` in torch/optim), each of which goes through memory; the optimizer with
float32 copies is one kernel (Apex, Megatron-LM). `FACTORED` goes 10 times through its rows and 9 times through its columns. RAdam is that
after its first five steps, which do less."""
FOREACH_PASSES = {"radam": (14.0, 4.0), "adagrad": (10.0, 3.0), "asgd": (9.0, 3.0)}
"""Of those whose ``foreach``, the default on GPUs, goes another number of times than their loop, that of CPUs."""


def state_bytes(optimizer: str, shape: Sequence[int], stored: float, width: int) -> float:
    """Bytes of state that a rank has for a parameter of this whole shape, of which it stores so many elements of ``width`` bytes."""
    if optimizer == MASTER:
        return stored * (OPTIMIZER_STATE_BYTES[MASTER] if width < MASTER_WIDTH else ADAM_STATE_BYTES)
    if optimizer != FACTORED:
        return stored * OPTIMIZER_STATE_BYTES[optimizer] * width / FLOAT32_WIDTH
    numel = 1
    for size in shape:
        numel *= size
    return width * (numel / shape[-1] + numel / shape[-2]) if len(shape) > 1 and numel else width * stored


class Taken(NamedTuple):
    """Bytes that an optimizer takes for itself: at its turn while it updates a parameter ``alone``, and what it has of all ``together``."""

    alone: float = 0.0
    together: float = 0.0


def taken_bytes(optimizer: str, whole: float, stored: float, *, by_foreach: bool) -> Taken:
    """What an optimizer takes for a parameter of ``whole`` bytes, of which a rank stores ``stored``; ``by_foreach`` for all at a time."""
    if optimizer == FACTORED and stored < whole:
        return Taken(alone=WHOLE_COPIES * whole)
    if by_foreach and optimizer in FOREACH_COPIES:
        return Taken(together=FOREACH_COPIES[optimizer] * stored)
    return Taken(alone=UPDATE_COPIES.get(optimizer, 0) * stored)


def update_passes(optimizer: str, num_dims: int, *, by_foreach: bool = False) -> tuple[float, float]:
    """`UPDATE_PASSES` of a parameter with so many dims; ``by_foreach`` for all at a time."""
    if optimizer == FACTORED:
        return FACTORED_MATRIX if num_dims > 1 else FACTORED_VECTOR
    return (by_foreach and FOREACH_PASSES.get(optimizer)) or UPDATE_PASSES[optimizer]
