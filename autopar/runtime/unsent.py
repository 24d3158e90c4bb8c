"""What compression keeps of gradients (`autopar.ops.codec.States`) in checkpoints:

    compression.<rank>.<state>      of each rank by itself
    about["compression"]            how ranks share the model, as text

What a rank has not sent is of its own rows of the batch and its own part of every parameter. So it goes back to the rank that kept it,
where the plan and the ranks are those that saved it. Elsewhere it is dropped, with a warning, and all begin with nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.callers import user_level
from autopar.compression import Compression
from autopar.runtime.chunks import Chunks
from autopar.runtime.module import ParallelModule
from autopar.units import number_text


def sharing_of(model: nn.Module) -> str:
    """How the ranks of a model share it and what they keep of gradients; empty if they keep nothing."""
    if not isinstance(model, ParallelModule):
        return ""
    plan = model.plan
    how = Compression.of(plan.compression)
    if how is None or not how.remembers:
        return ""
    parameters = "; ".join(f"{p.name} {' '.join(p.held)} {p.stages}" for p in plan.parameters)
    return f"{how} on ({plan.grid}), {number_text(plan.pipeline.stages, 'stage')}: {parameters}"


def unsent_of(model: nn.Module) -> dict[str, Chunks]:
    """What this rank keeps."""
    if not sharing_of(model):
        return {}
    assert isinstance(model, ParallelModule)
    return {f"{_prefix()}{name}": Chunks.of(value) for name, value in model._autopar.states.held.items()}


def fit_unsent(model: nn.Module, entries: Mapping[str, object], saved: str, *, warns: bool) -> dict[str, torch.Tensor]:
    """Make room for what this rank is to keep, by its names in the checkpoint.

    Args:
        entries: what the checkpoint has, by name.
        saved: `sharing_of` the model that was saved.
        warns: say what is dropped.
    """
    own = sharing_of(model)
    if saved and saved != own and warns:
        kind = saved.partition(" ")[0]
        warnings.warn(
            f"the checkpoint keeps what ranks had not sent of their gradients (compress={kind!r}), for another plan or compression than "
            "that of this model; it is dropped, and error feedback begins with nothing",
            stacklevel=user_level(),
        )
    if not own or saved != own:
        return {}
    found = {}
    for name, entry in entries.items():
        if name.startswith(_prefix()) and isinstance(entry, TensorStorageMetadata):
            found[name] = torch.empty(entry.size, dtype=torch.float32, device=_device(model))
    return found


def put_unsent(model: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Let this rank keep what was read, and nothing else."""
    if isinstance(model, ParallelModule):
        model._autopar.states.held = {name.removeprefix(_prefix()): value for name, value in found.items()}


def _prefix() -> str:
    return f"compression.{dist.get_rank() if dist.is_initialized() else 0}."


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
