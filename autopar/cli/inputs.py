"""What the command line names: models, batches, grids, configurations and pins, read from text.

A model is ``module:function``, a configuration of transformers (``hf:gpt2``, ``hf:path/config.json``, or the name of one that was
downloaded before), or a GPT-2 by its sizes, ``gpt:layers=12,hidden=768``. It has random weights, on the meta device unless real ones are
asked for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.cli.complete import FAMILIES
from autopar.cli.profile import local_cluster
from autopar.cost.cluster import Cluster, Level
from autopar.errors import InputError, MeshError, PlanError
from autopar.mesh import Mesh
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, pin

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]

TOKENS = "input_ids", "labels"
"""What a model of tokens is called with where no batch is given."""
LOCAL = "local"
"""The cluster that is this machine."""
GPT_CONFIG = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "positions": "n_positions",
    "intermediate": "n_inner",
}
"""What ``--gpt`` says, in the words of transformers."""


class Example(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    batch: Batch


def load_example(name: str, *, batch: int, sequence: int, real: bool, given: Sequence[str] = ()) -> Example:
    """Build the named model with a batch.

    Args:
        name: ``module:function``, ``hf:...`` or ``gpt:...``.
        batch: rows of the batch; unused if the function returns one.
        sequence: tokens per row.
        real: random weights and inputs on the CPU instead of meta tensors.
        given: options that the user gave for ``batch`` and ``sequence``, which must not be unused.

    Raises:
        InputError: there is no such model, or the batch does not fit it.
    """
    kind, colon, rest = name.partition(":")
    if not colon or not kind or not rest:
        raise InputError(
            f"model {name!r} reads neither like 'module:function' nor like 'hf:gpt2', 'hf:path/config.json' or 'gpt:layers=12,hidden=768'"
        )
    device = torch.device("cpu" if real else "meta")
    with device:
        torch.manual_seed(0)
        try:
            made = _made(kind, rest, sequence)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if real or not re.search(r"\bmeta\b", str(error), re.IGNORECASE):  # torch says so wherever values are read that are not there
                raise
            raise InputError(f"{name} cannot be built on the meta device ({error}); add --real") from error
    if isinstance(made, nn.Module):
        return Example(made, _batch_for(made, batch, sequence, device))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        if given:
            raise InputError(
                f"{name} returns a batch of its own, so that {' and '.join(given)} would change nothing; leave out, or let the function "
                "return the model alone"
            )
        return Example(*made)
    raise InputError(f"{name} returned a {type(made).__name__}; it has to return a model, or (model, batch)")


def _made(kind: str, rest: str, sequence: int) -> object:
    if kind == "hf":
        return _from_transformers(rest)
    is_sizes = kind == "gpt" and "=" in rest  # a module may have that name too
    return _gpt(rest, sequence) if is_sizes else _function(kind, rest)()


def _function(module: str, function: str) -> Callable[[], object]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there, and itself imports what is not
        raise InputError(f"there is no module {module!r} in the working directory or among installed packages") from error
    if not callable(found):
        raise InputError(f"module {module!r} has no function {function!r}; it has to return a model, or (model, batch)")
    return found  # type: ignore[no-any-return]


def _from_transformers(name: str) -> nn.Module:
    transformers = _transformers(f"hf:{name}")
    if name in FAMILIES:
        config_class, model_class = FAMILIES[name]
        config = getattr(transformers, config_class)()
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError) as error:
            if Path(name).exists():
                raise InputError(f"hf:{name} cannot be read as a configuration: {error}") from error
            raise InputError(
                f"hf:{name} is neither one of {', '.join(FAMILIES)}, nor a file, nor the name of what transformers has in its cache; "
                "nothing is downloaded"
            ) from error
        model_class = next(iter(config.architectures or ()), "")
        if not hasattr(transformers, model_class):
            raise InputError(f"{name} says nothing of its model class; add for example \"architectures\": [\"GPT2LMHeadModel\"]")
    config.use_cache = False
    model: nn.Module = getattr(transformers, model_class)(config).train()
    return model


def _transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{name} needs transformers: pip install 'autopar[examples]'") from error
    transformers.logging.set_verbosity_error()
    return transformers


def read_gpt(text: str, sequence: int) -> dict[str, int]:
    """``layers=24,hidden=2048,heads=16,vocab=50304,positions=2048,intermediate=8192`` as arguments of `transformers.GPT2Config`.

    Heads are of 64 if their number is not given, positions as many as tokens, the rest as transformers has it.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in GPT_CONFIG or not value.isdecimal() or not int(value):
            raise InputError(
                f"the sizes of a GPT read like 'layers=24,hidden=2048,heads=16', got {part!r} in {text!r}; it may have "
                f"{', '.join(GPT_CONFIG)}"
            )
        sizes[name] = int(value)
    lacking = [name for name in ("layers", "hidden") if name not in sizes]
    if lacking:
        raise InputError(f"a GPT needs {' and '.join(lacking)}, got {text!r}")
    hidden, heads = sizes["hidden"], sizes.setdefault("heads", max(1, sizes["hidden"] // 64))
    if hidden % heads:
        raise InputError(f"hidden={hidden} is not divided by heads={heads}, in {text!r}; choose a divisor")
    sizes.setdefault("positions", sequence)
    return {GPT_CONFIG[name]: size for name, size in sizes.items()}


def _gpt(text: str, sequence: int) -> nn.Module:
    sizes = read_gpt(text, sequence)
    transformers = _transformers(f"--gpt {text}")
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # what verify compares has none
    config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def _batch_for(model: nn.Module, batch: int, sequence: int, device: torch.device) -> Batch:
    """Tokens and labels, or images and labels, by what the model's configuration says."""
    config: Any = getattr(model, "config", None)
    image = getattr(config, "image_size", None)
    if image is not None and getattr(model, "main_input_name", "") == "pixel_values":
        size = (image, image) if isinstance(image, int) else tuple(image)
        pixels = torch.randn(batch, config.num_channels, *size, device=device)
        return {"pixel_values": pixels, "labels": _integers((batch,), config.num_labels, device)}
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise InputError(f"--sequence {sequence} is longer than the {longest} positions of {type(model).__name__}; give a shorter one")
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    vocab = getattr(config, "vocab_size", None) or max(embeddings, default=0)
    if not vocab:
        raise InputError(f"{type(model).__name__} has no embedding, so that tokens do not fit it; let the function return (model, batch)")
    taken = inspect.signature(model.forward).parameters
    if not taken.keys() >= set(TOKENS) and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in taken.values()):
        names = ", ".join(taken) or "nothing"
        raise InputError(
            f"{type(model).__name__} takes {names}, and not {' and '.join(TOKENS)}; let the function return (model, batch)"
        )
    return {name: _integers((batch, sequence), vocab, device) for name in TOKENS}


def _integers(size: tuple[int, ...], limit: int, device: torch.device) -> torch.Tensor:
    return torch.randint(limit, size, device=device)


def read_mesh(text: str) -> Mesh | int:
    """``8`` is a number of ranks, ``2x4`` and ``dp=2,tp=4`` are grids."""
    if "=" in text:
        return Mesh.parse(text)
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        raise MeshError(f"a mesh reads like '8', '2x4' or 'dp=2,tp=4', got {text!r}")
    return int(text) if len(parts) == 1 else Mesh.of([int(part) for part in parts])


def read_cluster(text: str) -> Cluster:
    """``4x8:h100`` is 4 nodes with 8 devices each and the network that these usually have, ``4x8:h100@eth-100`` names another, ``8:h100``
    is one node, ``4x8:a100-80gb+2x8:h100`` has nodes of two kinds,
    ``2048x8:h100/pod=256:7`` has pods of 256 nodes with one uplink for seven ports (a third number: seconds that a message between them
    takes longer); else the file of a saved cluster."""
    if text == LOCAL:
        raise MeshError("--cluster local is one machine, of which there are not several sizes; describe its nodes, as 8x8:h100")
    if Path(text).exists():
        return Cluster.load(text)
    kinds, *levels = text.split("/")
    read = tuple(_read_level(level, text) for level in levels)
    return reduce(add, (replace(_read_nodes(part.strip(), text), levels=read) for part in kinds.split("+")))


def _read_level(part: str, text: str) -> Level:
    name, _, numbers = part.partition("=")
    nodes, *rest = numbers.split(":")
    try:
        return Level(name.strip(), int(nodes), *map(float, rest))
    except (TypeError, ValueError):
        raise MeshError(
            f"{part!r} is no level of {text!r}: it reads like 'pod=256', or 'pod=256:7' where seven ports share an uplink, or "
            "'pod=256:7:1e-4' with the seconds that a message takes longer"
        ) from None


def _read_nodes(part: str, text: str) -> Cluster:
    grid, colon, device = part.partition(":")
    sizes = grid.split("x")
    if not (colon and len(sizes) <= 2 and all(size.isdecimal() for size in sizes)):
        raise MeshError(
            f"a cluster reads like '4x8:h100' (nodes x devices : device), '4x8:h100@eth-100' (over another network) or "
            f"'4x8:a100-80gb+2x8:h100', or is a saved file, or 'local', got {text!r}"
        )
    device, at, inter = device.partition("@")
    return Cluster(int(sizes[0]) if len(sizes) == 2 else 1, int(sizes[-1]), device, inter if at else None)


def read_grid(mesh: str | None, cluster: str | None) -> Mesh | Cluster | int:
    """The grid that ``--mesh`` and ``--cluster`` name together: a mesh regroups the ranks of a cluster."""
    if cluster is None:
        if mesh is None:
            raise MeshError("say what to plan for: --mesh 8, --mesh dp=2,tp=4, --cluster 4x8:h100 or --cluster local")
        return read_mesh(mesh)
    grid = read_mesh(mesh) if mesh is not None else None
    regrouped = Mesh.of(grid) if isinstance(grid, int) else grid
    found = local_cluster(regrouped.num_ranks if regrouped else None) if cluster == LOCAL else read_cluster(cluster)
    return found.with_mesh(regrouped) if regrouped else found


def read_manual(text: str) -> Manual:
    """``dp=2,tp=4,pp=2,zero=1,sequence_parallel,schedule=1f1b,microbatches=8,recompute=full:1/2,stages=h.4+h.8,experts=*.w1+*.w2``"""
    settings: dict[str, Any] = {}
    known = [field.name for field in fields(Manual)]
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        is_number = name not in ("schedule", "recompute", "stages", "precision", "offload", "experts")
        if name not in known or not ((value.isdecimal() or (value and not is_number)) if equals else name == "sequence_parallel"):
            raise PlanError(
                f"a configuration reads like 'dp=2,tp=4,pp=2,zero=1', got {part!r} in {text!r}; it may have {', '.join(known)}"
            )
        if name == "sequence_parallel":
            settings[name] = not equals or value != "0"
        else:
            settings[name] = int(value) if is_number else tuple(value.split("+")) if name in ("stages", "experts") else value
    return Manual(**settings)


def read_pin(text: str) -> Pin:
    """``transformer.h.*.attn.c_attn.weight:tp=S1.1`` or ``...:dp=zero3,tp=column``"""
    pattern, _, axes = text.rpartition(":")
    pairs = [part.partition("=") for part in axes.split(",")]
    if not pattern or not all(name and value for name, _, value in pairs):
        raise PlanError(f"a pin reads like 'h.*.attn.weight:dp=R,tp=S1.1', got {text!r}")
    return pin(pattern, **{name: value for name, _, value in pairs})


def read_configs(texts: Sequence[str]) -> dict[str, Manual]:
    """``NAME:dp=2,tp=4`` each; without a name the configuration is its own. Values may have colons too (``schedule=interleaved:2``)."""
    configs: dict[str, Manual] = {}
    for text in texts:
        first, equals, _ = text.partition("=")
        name, colon, _ = first.rpartition(":") if equals else text.rpartition(":")
        named = name if colon else text
        if named in configs:
            raise InputError(f"two configurations are called {named!r}, as {text!r} is; give one another name, or leave it out")
        configs[named] = read_manual(text.removeprefix(name + colon))
    return configs
