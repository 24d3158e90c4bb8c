"""The initialisation that modules know themselves, recorded for a model that was built on meta.

As constructors do: ``reset_parameters()`` of every module that has it, children first; then, of models in the manner of transformers,
``_init_weights(module)`` of the model that a module belongs to, children first. A later value replaces an earlier one, which costs nothing
(`replay.needed`). Every call draws from a seed of its own, of the seed given and the name of the module, so that no value depends on which
others a rank needs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain

import torch
from torch import nn

from autopar.start.deferred import Faces, Recorder, recorded
from autopar.start.recording import Recording


@torch.no_grad()
def record_own(model: nn.Module, seed: int, device: torch.device) -> None:
    """Record how the modules of a model on meta initialise themselves on a device; `recorded` then finds what they did.

    Raises:
        StartError: an op cannot be recorded (`deferred`).
    """
    seeds = _Seeds()
    recorder, calls = Recorder(seeds.start, device), [*_calls(model)]
    for tensor in _without_value(model):
        recorder.adopt(tensor)
    with recorder, Faces(recorder):
        for name, initialize in calls:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            seeds.begin(int.from_bytes(digest[:8]) >> 1)
            initialize()


def _calls(model: nn.Module) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is called of the modules, in order, with a name of its own."""
    modules = [(name, module) for name, module in model.named_modules() if any(True for _ in _without_value(module))][::-1]
    for name, module in modules:
        for method in ("reset_parameters", "_reset_parameters"):  # the second is that of torch's attention
            own = getattr(module, method, None)
            if own is not None and _num_arguments(own) == 0:
                yield f"{name}.{method}", own
                break
    for name, module in modules:
        path = [model, *(model.get_submodule(above) for above in accumulate(name.split("."), "{}.{}".format) if name)]
        inits = [own for own in (getattr(above, "_init_weights", None) for above in path) if own is not None and _num_arguments(own) == 1]
        if inits:
            yield f"{name}._init_weights", partial(inits[-1], module)


def _without_value(module: nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_meta and recorded(tensor) is None)


def _num_arguments(function: Callable[..., object]) -> int:
    """How many it must be given."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


class _Seeds:
    """A seed for every generator at its first draw of a call."""

    def __init__(self) -> None:
        self._seed = 0
        self._seeded: set[int] = set()

    def begin(self, seed: int) -> None:
        self._seed = seed
        self._seeded.clear()

    def start(self, recording: Recording, number: int, generator: torch.Generator) -> int | None:
        if number in self._seeded:
            return None
        self._seeded.add(number)
        return self._seed
