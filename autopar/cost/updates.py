"""What optimizers of torch take: state, memory while they step, passes through memory. Bytes are those of one rank.

| optimizer      | state of a parameter                                                              | source                 |
|----------------|-----------------------------------------------------------------------------------|------------------------|
| adam, adamw    | two moments                                                                       | Kingma & Ba, 2015      |
| `MASTER`       | and a float32 copy                                                                | Micikevicius et al.    |
| sgd_momentum   | one                                                                               | torch.optim.SGD        |
| `FACTORED`     | of a matrix the mean squares of its rows and of its columns, else of its elements | Shazeer & Stern, 2018  |

`FACTORED` needs norms of whole parameters: those that are sharded are gathered one by one, with their gradients, and every rank updates all
of them (`runtime.optimizers`). So its factors are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

ADAM_STATE_BYTES = 8
"""Two float32 moments for each parameter (Kingma & Ba 2015)."""
MASTER, MASTER_WIDTH = "adamw_master", 4
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
}
"""Optimizer state in bytes per element of a parameter, in float32; what `FACTORED` has is in `state_bytes`."""
UPDATE_COPIES = {"adamw": 2, "adam": 2, FACTORED: 1}
"""Tensors like a parameter that an optimizer has beside it while it steps: the root of the second moment, and the same after its division;
of `FACTORED` the update. The loop of torch over parameters is meant, that of CPUs; ``foreach`` takes them for all parameters at a time,
``fused=True`` none."""
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
}
"""How often an update reads or writes a parameter and what is like it (its gradient, copies), and how often its state. Counted from the ops
of torch's defaults (``_single_tensor_*`` and ``_multi_tensor_*`` in torch/optim), each of which goes through memory; the optimizer with
float32 copies is one kernel (Apex, Megatron-LM). `FACTORED` goes 10 times through its rows and 9 times through its columns."""


def state_bytes(optimizer: str, shape: Sequence[int], stored: float) -> float:
    """Bytes of state that a rank has for a parameter of this whole shape, of which it stores so many elements."""
    if optimizer != FACTORED:
        return stored * OPTIMIZER_STATE_BYTES[optimizer]
    numel = 1
    for size in shape:
        numel *= size
    return 4 * (numel / shape[-1] + numel / shape[-2]) if len(shape) > 1 and numel else 4 * stored


def taken_bytes(optimizer: str, whole: float, stored: float) -> float:
    """Bytes that an optimizer takes for itself while it updates a parameter of ``whole`` bytes, of which a rank stores ``stored``."""
    if optimizer == FACTORED and stored < whole:
        return WHOLE_COPIES * whole
    return UPDATE_COPIES.get(optimizer, 0) * stored


def update_passes(optimizer: str, num_dims: int) -> tuple[float, float]:
    """`UPDATE_PASSES` of a parameter with so many dims."""
    if optimizer == FACTORED:
        return FACTORED_MATRIX if num_dims > 1 else FACTORED_VECTOR
    return UPDATE_PASSES[optimizer]
