"""Optimizer state on a disk between steps (the last tier of ZeRO-Infinity: Rajbhandari et al., SC 2021, section 5).

After a step the state of the parameters of an optimizer is written to a file of this rank by ``torch.save``, and mapped from there by
``torch.load(mmap=True)`` in place of what was in memory. The map is private: what the next step reads comes from the disk, what it writes
lies in memory until it is written out again. So whoever looks at the state finds tensors, as ever: ``state_dict``, checkpoints, the
optimizer itself.

The state in memory is given up only when all of the new file is written and mapped: a disk that is full raises, and loses nothing. A mapped
file is taken out of its folder at once, and its space is free when the next one is mapped or the process ends: no other run can read or
write it, and a crash leaves nothing that could be taken for a checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import PlanError
from autopar.runtime.parameters import like

_folders = WeakTensorKeyDictionary()
"""Where the state of each parameter goes."""
_hooks: list[object] = []


def keep_on_disk(parameters: Iterable[nn.Parameter], folder: str) -> None:
    """Have the state of these parameters in files in a folder between the steps of whatever optimizer they have.

    Raises:
        PlanError: files cannot be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlanError(f"offload='optimizer:{folder}' cannot write there: {error}; name a folder on a disk of this machine") from error
    for parameter in parameters:
        _folders[parameter] = folder
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_write_out))


def _write_out(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    own = [parameter for parameter in optimizer.state if parameter in _folders]
    for folder in dict.fromkeys(_folders[parameter] for parameter in own):
        states = [optimizer.state[parameter] for parameter in own if _folders[parameter] == folder]
        mapped = _on_disk([{key: _local(x) for key, x in state.items() if _is_large(x)} for state in states], folder)
        for state, found in zip(states, mapped, strict=True):
            for key, local in found.items():
                state[key] = like(local, state[key]) if isinstance(state[key], DTensor) else local


def _on_disk(tensors: list[dict[str, torch.Tensor]], folder: str) -> list[dict[str, torch.Tensor]]:
    """The same tensors, in a file that only they know of."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="optimizer-", suffix=".pt") as file:
        torch.save(tensors, file.name)
        mapped: list[dict[str, torch.Tensor]] = torch.load(file.name, mmap=True)
        return mapped


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def _is_large(x: object) -> bool:
    """Counters of steps stay in memory."""
    return isinstance(x, torch.Tensor) and x.dim() > 0
